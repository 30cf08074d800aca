"""What may leave a client: per block (modality, `shared`, `labels`), kind and destination.

    [egress.audio]
    server = ["parameters"]
    silo = ["parameters", "embeddings"]
    [egress.labels]
    server = []

A row that is written decides alone; where nothing is written, parameters, gradients of parameters and statistics may
go, all else may not. In a deployment the client's own file decides, and a recipe can only make it stricter.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import DESTINATIONS, KINDS, LABELS, Crossing
from polyfed.core.tree import SHARED

DEFAULT = frozenset({"parameters", "gradients", "statistic"})
"""Kinds that may leave where no row says otherwise (docs/egress.md says why, and what they can still reveal)."""

Table = Mapping[str, Mapping[str, Iterable[str]]]


@dataclass(frozen=True)
class Policy:
    """Rules by (block, destination); `allows` answers for one crossing."""

    rules: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, table: Table, modalities: Iterable[str], where: str = "[egress]") -> "Policy":
        """Read the `egress` table of a recipe or of a client's own policy file.

        Raises:
            RecipeError: for an unknown row, destination or kind, with the nearest name.
        """
        rows = (*modalities, SHARED, LABELS)
        rules: dict[tuple[str, str], frozenset[str]] = {}
        for block, entry in table.items():
            if block not in rows:
                raise RecipeError(f"{where} has no row '{block}'; {did_you_mean(block, rows)}")
            for destination, kinds in entry.items():
                if destination not in DESTINATIONS:
                    hint = did_you_mean(destination, DESTINATIONS)
                    raise RecipeError(f"{where[:-1]}.{block}] has no destination '{destination}'; {hint}")
                if isinstance(kinds, str):
                    raise RecipeError(f'{where[:-1]}.{block}] {destination} must be a list, as in ["{kinds}"]')
                for kind in kinds:
                    if kind not in KINDS:
                        hint = did_you_mean(kind, KINDS)
                        raise RecipeError(f"{where[:-1]}.{block}] {destination}: no kind '{kind}'; {hint}")
                rules[block, destination] = frozenset(kinds)
        return cls(rules)

    def kinds(self, block: str, destination: str) -> frozenset[str]:
        """The kinds that may go from this block to this destination."""
        default: frozenset[str] = frozenset() if block == LABELS else DEFAULT
        return self.rules.get((block, destination), default)

    def allows(self, kind: str, block: str, destination: str) -> bool:
        """Whether this may leave."""
        return kind in self.kinds(block, destination)

    def allows_models(self, destination: str) -> bool:
        """Whether a whole model may leave: parameters of every modality and of `shared`."""
        named = {block for block, _ in self.rules} - {LABELS}  # every other block has the default, as `shared` has
        return all(self.allows("parameters", block, destination) for block in {SHARED, *named})

    def stricter(self, other: "Policy") -> "Policy":
        """The policy that allows what both allow: a client's own file, narrowed by a recipe."""
        pairs = {*self.rules, *other.rules}
        return Policy({pair: self.kinds(*pair) & other.kinds(*pair) for pair in pairs})

    def table(self, modalities: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """The resolved policy, every row written out."""
        return {
            block: {place: [k for k in KINDS if k in self.kinds(block, place)] for place in DESTINATIONS}
            for block in (*modalities, SHARED, LABELS)
        }

    def fix(self, wanted: Collection[str], block: str, destination: str) -> str:
        """The line of a policy that would allow these kinds."""
        kinds = [k for k in KINDS if k in wanted or k in self.kinds(block, destination)]
        listed = ", ".join(f'"{k}"' for k in kinds)
        return f"[egress.{block}] {destination} = [{listed}]"


def refusal(crossing: Crossing, destination: str, policy: Policy, client: int | str, message: str) -> str:
    """The words of a refusal: client, field, kind, block, destination, and the line that would allow it."""
    fix = policy.fix((crossing.kind,), crossing.block, destination)
    return (
        f"client {client} refused to send {message}.{crossing.field}: {crossing.kind} of {crossing.block} "
        f"may not go to the {destination}. It would leave if the client's policy said: {fix}"
    )
