"""Selectors: which clients take part in a round. They combine with every averaging algorithm."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.schema import check_ranges
from polyfed.core.tree import Tree
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """Chooses the cohort of a round.

    Attributes:
        participation: how many clients a round: a fraction of all (0 < float <= 1), or a count (int >= 1).
    """

    participation: float | int = 1.0

    def __post_init__(self) -> None:
        """Refuse a share or a count that has no meaning."""
        check_ranges("[selection]", self)
        value = self.participation
        if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
            raise RecipeError(
                f"[clients] participation = {value}: a fraction above 0 and at most 1, or a count of at least 1 "
                "(1.0 is all clients, 1 is one client)"
            )

    def size(self, fed: Federation) -> int:
        """Cohort size: `max(1, round(rate * K))` of all clients, never more than have rows (algorithms.md 0.5).

        Raises:
            RecipeError: for a count above the number of clients.
        """
        value, total = self.participation, len(fed.clients)
        if isinstance(value, int) and value > total:
            raise RecipeError(f"[clients] participation = {value}, but there are {total} clients")
        wanted = value if isinstance(value, int) else max(1, round(value * total))
        return min(wanted, len(fed.clients.eligible))

    def start(self, params: Tree) -> Any:
        """What the selector remembers before the first round: a tree, or any nest of tensors and numbers."""
        return {}

    @abstractmethod
    def choose(self, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
        """The cohort of this round, ascending, and the memory after choosing."""

    def learn(self, memory: Any, params: Tree, replies: Replies, fed: Federation) -> Any:
        """The memory after the cohort answered; `params` are those it started from."""
        return memory

    def weigh(self, memory: Any, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Weights of those who answered in the mean, given the algorithm's own."""
        return weights


@dataclass(frozen=True, kw_only=True)
class Uniform(Selector):
    """Each client with rows is equally likely, drawn without replacement (McMahan et al. 2017)."""

    def choose(self, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
        """A cohort from the stream (seed, "cohort", round)."""
        eligible = fed.clients.eligible
        key = keys.key(fed.seed, "cohort", fed.round)
        return [eligible[i] for i in keys.choice(key, len(eligible), self.size(fed))], memory


def must_be_uniform(selector: Selector, method: str) -> None:
    """Refuse a selector that judges clients by a global model which a method does not have.

    Raises:
        RecipeError: naming both.
    """
    if type(selector) is not Uniform:
        raise RecipeError(
            f"[selection] {type(selector).__name__} compares clients by a global model, and {method} has none that every "
            "client trains: remove the section, clients are then drawn uniformly"
        )
