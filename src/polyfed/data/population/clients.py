"""The schema of `[clients]`: the number of clients, and the rows and modalities that each client holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from polyfed.core.errors import RecipeError, require
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    AT_LEAST_TWO,
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    check_ranges,
    check_shares,
)
from polyfed.core.problems import Problems
from polyfed.core.registry import find
from polyfed.data.partitions import PARTITIONS, Partition
from polyfed.data.partitions.iid import SILOS, Sized

MANY = 10
"""The number of clients if a recipe gives none."""

_ASSIGNMENTS = ("missing", "keep_both", "only", "holdings")


@dataclass(frozen=True, kw_only=True)
class ClientsSpec:
    """The clients of a run. Options of a partition that is not chosen have no effect.

    At most one of `missing`, `keep_both`, `only` and `holdings` may be given. Without these options, every client holds
    all modalities that its rows have. No client is ever left without a modality.

    Attributes:
        partition: The rule that splits training rows over clients (docs/partitions.md): "iid", "dirichlet",
            "dirichlet-authors", "by-client", "classes-per-client", "main-class", "silos", or your own dataclass that
            extends `polyfed.data.Partition`, "package.module:Class", whose fields are then keys of [clients]. In
            Python, also an object with the method `split`.
        num: Number of clients, by default 10. "by-client" and "silos" refuse it, since it follows from the data or from
            `silos`.
        alpha: Concentration of the Dirichlet distribution, also with `shards`.
        min_size: Least number of rows of a client in a Dirichlet draw; 10 as in NIID-Bench.
        shards: With "by-client": number of clients into which each natural client is cut.
        classes_per_client: With "classes-per-client": number of classes of each client; 3 in the FMML paper.
        main_share: With "main-class": share of the main class in a client's rows; in the FMML paper, 0.5 is non-IID-2
            and 0.3 non-IID-3.
        exclude_main: With "main-class": whether a client's other rows are all of other classes.
        on_shortage: With "main-class", if a class is too rare for its clients: "reduce" makes every client smaller,
            "cap" fills up with rows of other classes.
        silos: With "silos": number of silos, by default 4. A silo has one device for each entry of `holdings`, or else
            for each modality; devices with equal entries divide the silo's rows.
        silo_partition: With "silos": the partition over silos, any except "silos"; with "by-client", each natural
            client is a silo.
        silo_sizes: With "silos": relative sizes of the silos, such as [3, 1, 1].
        silo_overlap: With "silos": share of a silo's rows that all its devices hold. Every other row goes to one entry
            of `holdings`, drawn at random.
        participation: Clients in each round: a float is a share in (0, 1], an int a number.
        overselect: Share of additional clients (0.3 in Bonawitz et al., 2019): for the n clients of `participation`,
            the server asks n * (1 + overselect), and closes the request when n have replied.
        missing: Modality -> share of clients that lack it: round(share * K) of those that hold another modality.
        keep_both: Share of the clients that keep all modalities, rounded down. The others hold one each, in equal
            numbers.
        only: Modality -> clients that hold no other; clients that are not listed hold all.
        holdings: Client k holds the modalities `holdings[k mod len]`.
        missing_rows: Modality -> share of rows that lack it, drawn at random; a number is the share of every modality.
            Every row keeps a modality (docs/missing.md).
        missing_rows_test: The same for test and validation rows; None for the shares of `missing_rows`.
        missing_rows_pattern: Which rows lack a modality: "random", each with the same probability; "client" or "label",
            with a probability of each client or class from a Beta distribution; "spans", whole spans of consecutive
            rows, as if a sensor failed.
        missing_rows_concentration: With "client" and "label": sum of both parameters of the Beta distribution. Larger
            values bring the probabilities nearer to their mean, the given share.
        missing_rows_span: With "spans": rows of a span.
        missing_rows_empty: Whether a row may lack all modalities, which are then lost independently.
        ranks: LoRA ranks: client k has the rank `ranks[k mod len]`, or a lower one that an adapter has
            (docs/models.md). None leaves the ranks as they are.
        personal_test: Each client's own test rows (docs/partitions.md): a share of its training rows, such as 0.25;
            "split_personal", those that the data marks; or "matched", drawn from the global test set in the proportions
            of the client's labels. None for none.
        test_clients: Natural clients whose rows are the global test set and do not train: a share, or a list of names
            or numbers (in sorted order). Test rows of the other clients then train.
        folds: Number of parts into which the natural clients are divided at random; the rows of one are the global test
            set, as with `test_clients`.
        fold: The part of `folds` that is tested, from 1. `polyfed sweep` runs all of them, and `polyfed compare` pools
            them.
        row_split: How the shares of `personal_test`, `personal_validation` and `validation` are drawn: "random", or
            "blocks", in which each natural client's last rows of every class, in the order of the table, are held out,
            for rows in time that overlap or follow each other.
        guard_rows: With "blocks": rows on both sides of a block that are left out; 1 for windows that overlap by half,
            3 by three quarters.
        validation_clients: Share of the natural clients that do not train either, and whose rows are the validation
            rows, so that settings are also chosen on unseen people.
        seed: Seed of partition, validation split and modality assignment, by default the run's. Set it to repeat a run
            with other random numbers on the same clients.
        validation: Share of each client's training rows (with "by-client", of each natural client's) that is pooled at
            the server, to choose the best round.
        personal_validation: Share of each client's training rows that it keeps as validation rows, for `[stop]` on
            `personal_validation` and for `[evaluate] conformal`.
        measure_on: "validation" evaluates on validation rows in place of test rows: on the pooled ones, and for single
            clients on a `validation` share of their training rows or on those of `personal_validation`. `polyfed sweep`
            chooses options with it.
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
    silos: Annotated[int | None, AT_LEAST_ONE] = None
    silo_partition: Any = "iid"
    silo_sizes: list[float] | None = None
    silo_overlap: Annotated[float | None, FRACTION] = None
    participation: float | int = 1.0
    overselect: Annotated[float | None, POSITIVE] = None
    missing: Mapping[str, float] = field(default_factory=dict)
    keep_both: Annotated[float | None, PROBABILITY] = None
    only: Mapping[str, list[int]] = field(default_factory=dict)
    holdings: list[list[str]] | None = None
    missing_rows: Mapping[str, float] | float = field(default_factory=dict)
    missing_rows_test: Mapping[str, float] | float | None = None
    missing_rows_pattern: Literal["random", "client", "label", "spans"] = "random"
    missing_rows_concentration: Annotated[float, POSITIVE] = 4.0
    missing_rows_span: Annotated[int, AT_LEAST_ONE] = 20
    missing_rows_empty: bool = False
    ranks: list[int] | None = None
    personal_test: float | Literal["split_personal", "matched"] | None = None
    test_clients: float | list[int | str] | None = None
    folds: Annotated[int | None, AT_LEAST_TWO] = None
    fold: Annotated[int | None, AT_LEAST_ONE] = None
    row_split: Literal["random", "blocks"] = "random"
    guard_rows: Annotated[int, NOT_NEGATIVE] = 1
    validation_clients: Annotated[float, BELOW_ONE] = 0.0
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    validation: Annotated[float, BELOW_ONE] = 0.0
    personal_validation: Annotated[float, BELOW_ONE] = 0.0
    measure_on: Literal["validation"] | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        try:
            self._partition_class()
        except RecipeError as error:
            problems.add(type(error)(f"clients.partition = {error}", ("clients", "partition")))
        for check in (
            lambda: check_ranges("[clients]", self),
            self._check_participation,
            self._check_personal_test,
            self._check_personal_validation,
            self._check_test_clients,
            self._check_ranks,
            self._check_assignment,
            self._check_missing_rows,
            self._check_silos,
        ):
            problems.attempt(check)
        problems.raise_all()

    @property
    def loses_rows(self) -> bool:
        """Whether rows lose modalities: whether one of the shares in `missing_rows` or `missing_rows_test` is not 0."""
        given = (self.missing_rows, self.missing_rows_test or 0.0)
        return any(any(one.values()) if isinstance(one, Mapping) else bool(one) for one in given)

    @property
    def drawn_shares(self) -> dict[str, float]:
        """Option -> the share of training rows that it holds out, from the test rows on; without those that are 0."""
        own = self.personal_test if isinstance(self.personal_test, float | int) else 0.0
        shares = {
            "personal_test": own,
            "validation": self.validation,
            "personal_validation": self.personal_validation,
        }
        return {option: share for option, share in shares.items() if share}

    @property
    def idle(self) -> dict[str, str]:
        """Return every option of a partition and of `missing_rows` that has no effect, with what makes it idle."""
        result = self._idle_partitions()
        if self.missing_rows_pattern not in ("client", "label"):
            result["missing_rows_concentration"] = f"missing_rows_pattern = '{self.missing_rows_pattern}'"
        if self.missing_rows_pattern != "spans":
            result["missing_rows_span"] = f"missing_rows_pattern = '{self.missing_rows_pattern}'"
        if not self.drawn_shares:
            result["row_split"] = "no share for personal_test, personal_validation or validation"
        if self.row_split == "random" or not self.drawn_shares:
            result["guard_rows"] = "row_split = 'random'" if self.drawn_shares else result["row_split"]
        if not self.loses_rows:
            options = ("pattern", "concentration", "span", "empty")
            result |= dict.fromkeys((f"missing_rows_{option}" for option in options), "missing_rows = 0")
        return result

    def _idle_partitions(self) -> dict[str, str]:
        """Return the options of partitions that are not chosen, each with the setting that causes this."""
        read: set[str] = {f.name for f in fields(self._partition_class())} if isinstance(self.partition, str) else set()
        because = f"partition = {self.partition!r}"
        if self.partition == "silos":
            over: Any = find(self.silo_partition, PARTITIONS, Partition)
            read |= {f.name for f in fields(over)} - {"num"}
            because += f" and silo_partition = {self.silo_partition!r}"
        if "shards" in read and self.shards == 1:
            read -= {"alpha", "min_size"}
            because += " and shards = 1"
        classes: Any = PARTITIONS.values()
        every = {f.name for cls in classes for f in fields(cls)} - {"num"}
        return {name: because for name in (f.name for f in fields(self)) if name in every - read}

    def counted(self) -> "ClientsSpec":
        """Return this section with `num` set to `MANY` if the partition needs a number of clients and none is given."""
        cls = self._partition_class()
        if self.num is not None or not (isinstance(self.partition, str) and "num" in {f.name for f in fields(cls)}):
            return self
        return replace(self, num=MANY)

    def build_partition(self) -> Partition:
        """Return the chosen partition, with the values of this section's keys as its options.

        Raises:
            RecipeError: `num` is missing, or is given to a partition that determines the number of clients itself. The
                same error is raised if a user's own partition class has a field that is not a key of this section.
        """
        if not isinstance(self.partition, str):
            given: Partition = self.partition
            return given
        if self.partition == "silos" and self.silo_sizes is not None:
            return Sized(sizes=tuple(self.silo_sizes))
        if self.partition == "silos" and self.silo_partition != "iid":
            return self._over_silos().build_partition()
        cls = self._partition_class()
        options = {f.name: getattr(self, f.name) for f in fields(cls) if hasattr(self, f.name)}
        if "num" in options and self.num is None:
            raise RecipeError(
                f"clients.num is missing: partition '{self.partition}' needs the number of clients", ("clients", "num")
            )
        if "num" not in options and self.num is not None:
            raise RecipeError(
                f"clients.num = {self.num} has no meaning with partition '{self.partition}', which counts "
                "its clients itself; remove it",
                ("clients", "num"),
            )
        try:
            partition: Partition = cls(**options)
        except TypeError as error:  # a field is not a key of this section, or a method is missing
            raise RecipeError(f"clients.partition = '{self.partition}': {error}", ("clients", "partition")) from None
        return partition

    def num_silos(self) -> int | None:
        """Return the number of silos, or None if there are no silos or only the data decides the number."""
        if self.partition != "silos":
            return None
        if self.silo_partition != "iid":
            return self._over_silos().num
        return self.silos or len(self.silo_sizes or ()) or SILOS

    def _over_silos(self) -> "ClientsSpec":
        """Return a section [clients] in which each silo is one client, so that its partition splits rows over silos.

        The method handles every `silo_partition` except iid.
        """
        plain = replace(
            self, partition=self.silo_partition, silo_partition="iid", silo_sizes=None, silo_overlap=None, silos=None
        )
        counts = "num" in {f.name for f in fields(plain._partition_class())}
        if not counts and self.silos is not None:
            raise RecipeError(
                f"clients.silos = {self.silos} has no meaning with silo_partition = '{self.silo_partition}', which "
                "counts the silos itself; remove it",
                ("clients", "silos"),
            )
        return replace(plain, num=(self.silos or SILOS) if counts else None)

    def _partition_class(self) -> Any:
        """Return the class that `partition` names. If `partition` is an object, return the class of the object."""
        if isinstance(self.partition, str):
            return find(self.partition, PARTITIONS, Partition)
        if not hasattr(self.partition, "split"):
            raise RecipeError(
                f"{self.partition!r}: must be a name, or an object with split(columns, rows, key)",
                ("clients", "partition"),
            )
        return type(self.partition)

    def _check_participation(self) -> None:
        share = self.participation
        if isinstance(share, int):
            require(share >= 1, "clients.participation", share, "a count of at least 1, or a share such as 0.1")
        else:
            require(
                0.0 < share <= 1.0,
                "clients.participation",
                share,
                "a share above 0, at most 1.0; or a whole number",
            )

    def _check_personal_test(self) -> None:
        share = self.personal_test
        if isinstance(share, str):
            allowed = ("split_personal", "matched")
            require(share in allowed, "clients.personal_test", share, "a share, 'split_personal' or 'matched'")
        elif share is not None:
            require(0.0 < share < 1.0, "clients.personal_test", share, "a share between 0 and 1")

    def _check_personal_validation(self) -> None:
        if self.personal_validation and self.validation:
            raise RecipeError(
                "clients: validation gives the server rows that personal_validation keeps at the clients; keep one of "
                "them. What needs the server's (`polyfed contribution`, [stop] on validation) takes --set "
                "clients.personal_validation=0, and [evaluate] conformal works with either",
                ("clients", "validation"),
            )

    def _check_test_clients(self) -> None:
        wanted = self.test_clients
        if isinstance(wanted, list):
            require(bool(wanted), "clients.test_clients", wanted, "names or numbers of natural clients, not none")
        elif wanted is not None:
            require(0.0 < wanted < 1.0, "clients.test_clients", wanted, "a share between 0 and 1, or a list of names")
        if (self.folds is None) != (self.fold is None):
            raise RecipeError(
                "clients.folds and clients.fold belong together: folds is the number of parts of the natural clients, "
                "and fold, from 1, is the one that is tested. To run all, a study (polyfed sweep) takes the "
                "grid { 'clients.fold' = [1, 2, ...] }",
                ("clients", "fold" if self.fold is None else "folds"),
            )
        if self.folds is not None and self.fold is not None:
            require(self.fold <= self.folds, "clients.fold", self.fold, f"a number from 1 to folds = {self.folds}")
            if wanted is not None:
                raise RecipeError(
                    "clients: test_clients and folds both choose the test clients; keep one of them",
                    ("clients", "test_clients"),
                )

    def _check_ranks(self) -> None:
        if self.ranks is not None:
            whole = all(type(rank) is int and rank >= 1 for rank in self.ranks)
            require(bool(self.ranks) and whole, "clients.ranks", self.ranks, "whole numbers of at least 1, not none")

    def _check_missing_rows(self) -> None:
        problems = Problems()
        for option in ("missing_rows", "missing_rows_test"):
            with problems.noting():
                check_shares("[clients]", option, getattr(self, option), PROBABILITY)
        problems.raise_all()

    def _check_silos(self) -> None:
        given = {"silo_partition": self.silo_partition != "iid", "silo_sizes": self.silo_sizes is not None}
        given["silo_overlap"] = self.silo_overlap is not None
        used = [name for name, is_given in given.items() if is_given]
        if used and self.partition != "silos":
            raise RecipeError(
                f"clients.{used[0]} needs clients.partition = 'silos'; set it, or remove {used[0]}",
                ("clients", used[0]),
            )
        if self.partition == "silos" and self.num is not None:
            raise RecipeError(
                f"clients.num = {self.num} has no meaning with partition 'silos', whose number of clients follows from "
                "silos and holdings; remove it",
                ("clients", "num"),
            )
        if self.silo_partition == "silos":
            raise RecipeError(
                "clients.silo_partition = 'silos': must be another partition, such as 'dirichlet'",
                ("clients", "silo_partition"),
            )
        if self.silo_partition != "iid":
            self._over_silos()
        if self.silo_sizes is None:
            return
        if self.silo_partition != "iid":
            raise RecipeError(
                "clients: silo_sizes and silo_partition both split the rows over silos; keep one of them",
                ("clients", "silo_sizes"),
            )
        require(
            bool(self.silo_sizes) and min(self.silo_sizes) > 0.0,
            "clients.silo_sizes",
            self.silo_sizes,
            "a number above 0 for each silo",
        )
        if self.silos not in (None, len(self.silo_sizes)):
            raise RecipeError(
                f"clients.silos = {self.silos}, but silo_sizes has {len(self.silo_sizes)} entries; remove silos, or "
                "give one size for each silo",
                ("clients", "silos"),
            )

    def _check_assignment(self) -> None:
        given = [name for name in _ASSIGNMENTS if getattr(self, name) not in (None, {})]
        if len(given) > 1:
            raise RecipeError(
                f"clients: {' and '.join(given)} both say which client lacks what; keep one of them",
                ("clients", given[0]),
            )
        if self.partition == "silos" and given and given != ["holdings"]:
            raise RecipeError(
                f"clients.{given[0]} cannot be used with silos; use clients.holdings, with one entry per device",
                ("clients", given[0]),
            )
        for name, share in self.missing.items():
            require(0.0 <= share <= 1.0, f"clients.missing.{name}", share, "a share from 0 to 1")
        if self.holdings is not None:
            require(
                bool(self.holdings) and all(self.holdings),
                "clients.holdings",
                self.holdings,
                "lists of modalities, none empty: a client without a modality cannot train",
            )
