"""The schema of `[clients]`: who the clients are, which rows and which modalities they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from polyfed.core.errors import RecipeError
from polyfed.core.registry import find
from polyfed.core.schema import AT_LEAST_ONE, BELOW_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, PROBABILITY, check_ranges
from polyfed.data.checks import need
from polyfed.data.partitions.dealing import Partition
from polyfed.data.partitions.partition import PARTITIONS

_ASSIGNMENTS = ("missing", "keep_both", "only", "holdings")


@dataclass(frozen=True, kw_only=True)
class ClientsSpec:
    """Clients of a run. Options of a partition that is not chosen have no effect.

    At most one of `missing`, `keep_both`, `only`, `holdings` says who lacks what; without any, everybody
    holds all that their rows hold. Nobody is ever left without a modality.

    Attributes:
        partition: how training rows are dealt: "iid", "dirichlet", "by-client", "classes-per-client", "main-class",
            "silos", or your own, "package.module:Class": a dataclass that extends `polyfed.data.Partition`, whose
            fields of the same names as keys of this section take their values. In Python also an object with `split`.
        num: clients; needed by all but "by-client" and "silos", which count for themselves.
        alpha: concentration of the Dirichlet partitions; also of the cut of natural clients.
        min_size: rows of the smallest client in a Dirichlet draw; 10 as in NIID-Bench (6.11).
        shards: "by-client": clients cut out of each natural client.
        classes_per_client: "classes-per-client": classes of each client; 3 (6.12).
        main_share: "main-class": share of the main class; 0.5 is non-IID-2, 0.3 non-IID-3 (6.12).
        exclude_main: "main-class": no more of the main class in the rest.
        on_shortage: "main-class": what to do where a class is too rare (see `MainClass`).
        silos: "silos": number of silos; a silo has one device per entry of `holdings`, or per modality.
        participation: clients a round: a float is a share of all in (0, 1], an int a count.
        missing: modality -> share of clients that lack it: exactly round(share * K), drawn among those with
            another.
        keep_both: share p of clients that keep all modalities, int(p * K) of them; the rest is dealt evenly
            over the modalities, one each, in order, so that with two of them the first goes to the smaller
            half (6.11).
        only: modality -> clients that hold nothing else; whoever is not listed holds all.
        holdings: client k holds the modalities `holdings[k mod len]`.
        personal_test: each client's own test rows. A share: split off its training rows. "split_personal":
            the rows that the data marks so, guard rows being left out. "matched": drawn from the global test
            set in the client's label proportions, about its share of it, clients may overlap (6.12). None: no
            own test.
        seed: draws partition, validation split and modality assignment; None: the run's own. Fixed, it leaves between
            runs of several seeds only what training itself draws.
        validation: share of each client's training rows, pooled at the server for the choice of the best
            round. With "by-client" it is taken from each natural client before the cut into shards.
    """

    partition: Any = "iid"
    num: Annotated[int | None, AT_LEAST_ONE] = None
    alpha: Annotated[float, POSITIVE] = 0.5
    min_size: Annotated[int, AT_LEAST_ONE] = 10
    shards: Annotated[int, AT_LEAST_ONE] = 1
    classes_per_client: Annotated[int, AT_LEAST_ONE] = 3
    main_share: Annotated[float, FRACTION] = 0.5
    exclude_main: bool = False
    on_shortage: Literal["reduce", "cap"] = "reduce"
    silos: Annotated[int, AT_LEAST_ONE] = 4
    participation: float | int = 1.0
    missing: Mapping[str, float] = field(default_factory=dict)
    keep_both: Annotated[float | None, PROBABILITY] = None
    only: Mapping[str, list[int]] = field(default_factory=dict)
    holdings: list[list[str]] | None = None
    personal_test: float | Literal["split_personal", "matched"] | None = None
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    validation: Annotated[float, BELOW_ONE] = 0.0

    def __post_init__(self) -> None:
        try:
            self._partition_class()
        except RecipeError as error:
            raise type(error)(f"clients.partition = {error}") from None
        check_ranges("[clients]", self)
        self._check_participation()
        self._check_personal_test()
        self._check_assignment()

    def build_partition(self) -> Partition:
        """The chosen partition, with its options taken from here."""
        if not isinstance(self.partition, str):
            own: Partition = self.partition
            return own
        cls = self._partition_class()
        options = {f.name: getattr(self, f.name) for f in fields(cls) if hasattr(self, f.name)}
        if "num" in options and self.num is None:
            raise RecipeError(f"clients.num is missing: partition '{self.partition}' needs the number of clients")
        if "num" not in options and self.num is not None:
            raise RecipeError(
                f"clients.num = {self.num} has no meaning with partition '{self.partition}', which counts "
                "its clients itself; remove it"
            )
        try:
            partition: Partition = cls(**options)
        except TypeError as error:  # a field that is no key of this section, or a method that is missing
            raise RecipeError(f"clients.partition = '{self.partition}': {error}") from None
        return partition

    def _partition_class(self) -> Any:
        """The class that `partition` names, or that it is an object of."""
        if isinstance(self.partition, str):
            return find(self.partition, PARTITIONS, Partition)
        if not hasattr(self.partition, "split"):
            raise RecipeError(f"{self.partition!r}: must be a name, or an object with split(columns, rows, key)")
        return type(self.partition)

    def _check_participation(self) -> None:
        share = self.participation
        if isinstance(share, int):
            need(share >= 1, "clients.participation", share, "a count of at least 1, or a share such as 0.1")
        else:
            need(
                0.0 < share <= 1.0,
                "clients.participation",
                share,
                "a share above 0, at most 1.0; or a whole number",
            )

    def _check_personal_test(self) -> None:
        share = self.personal_test
        if isinstance(share, str):
            allowed = ("split_personal", "matched")
            need(share in allowed, "clients.personal_test", share, "a share, 'split_personal' or 'matched'")
        elif share is not None:
            need(0.0 < share < 1.0, "clients.personal_test", share, "a share between 0 and 1")

    def _check_assignment(self) -> None:
        given = [name for name in _ASSIGNMENTS if getattr(self, name) not in (None, {})]
        if len(given) > 1:
            raise RecipeError(f"clients: {' and '.join(given)} both say who lacks what; keep one of them")
        if self.partition == "silos" and given and given != ["holdings"]:
            raise RecipeError(
                f"clients.{given[0]} cannot be used with silos; say clients.holdings, one entry per device"
            )
        for name, share in self.missing.items():
            need(0.0 <= share <= 1.0, f"clients.missing.{name}", share, "a share from 0 to 1")
        if self.holdings is not None:
            need(
                bool(self.holdings) and all(self.holdings),
                "clients.holdings",
                self.holdings,
                "lists of modalities, none empty: a client without a modality cannot train",
            )
