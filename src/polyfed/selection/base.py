"""`Selector`: the base class of the rules that choose the cohort of a round, and `Uniform`, the default rule.

A method calls a selector's hooks in this order: `start` once at the beginning; in every round `choose`, then `learn`
after the cohort has answered, and `weigh` when replies are averaged. A selector is frozen, so it cannot store facts
from earlier rounds itself. Its hooks receive and return these facts as its memory, which the method keeps in the server
state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import COST, check_ranges
from polyfed.core.tree import Tree
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """Chooses the cohort, which is the set of clients that take part in a round.

    Attributes:
        participation: size of the cohort: a fraction of all clients (0 < float <= 1), or a count (int >= 1).
        overselect: how many additional clients are chosen, as a share of the cohort. None chooses no additional
            clients.
    """

    participation: Annotated[float | int, COST] = 1.0
    overselect: Annotated[float | None, COST] = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: `participation` is neither a fraction nor a count.
        """
        check_ranges("[selection]", self)
        value = self.participation
        if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
            raise RecipeError(
                f"[clients] participation = {value}: must be a fraction above 0 and at most 1, or a count of at least "
                "1 (1.0 is all clients, 1 is one client)",
                ("clients", "participation"),
            )

    def size(self, clients: ClientRegistry) -> int:
        """Return the cohort size including `overselect`: how many of the clients with training rows the server asks.

        Raises:
            RecipeError: see `needed`.
        """
        return min(math.ceil(self.needed(clients) * (1 + (self.overselect or 0.0)) - 1e-9), len(clients.eligible))

    def enough(self, clients: ClientRegistry) -> int | None:
        """Return the number of replies after which the server stops waiting; None if it waits for the whole cohort."""
        return None if self.overselect is None else self.needed(clients)

    def needed(self, clients: ClientRegistry) -> int:
        """Return the cohort size: a count, or `max(1, round(participation * K))`, where K clients have training rows.

        If `participation` is a count above K, the cohort has K clients. In a deployment, a device that the server has
        left out counts as a client without training rows.

        Raises:
            RecipeError: `participation` is a count above the number of clients.
        """
        value, total, able = self.participation, len(clients), len(clients.eligible)
        if isinstance(value, int) and value > total:
            raise RecipeError(
                f"[clients] participation = {value}, but there are {total} clients: set a count of at most {total}",
                ("clients", "participation"),
            )
        return min(value, able) if isinstance(value, int) else max(1, round(value * able))

    def start(self, params: Tree) -> Any:
        """Return the memory before round 1: a Tree, or nested containers and dataclasses of tensors and numbers."""
        return {}

    @abstractmethod
    def choose(self, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
        """Choose the cohort of this round.

        Args:
            memory: the selector's memory.
            params: the global model.
            fed: the federation. The selector may first send requests to clients with `fed.ask`.

        Returns:
            The clients in ascending order, and the selector's memory after this choice.
        """

    reads: ClassVar[tuple[str, ...]] = ()
    """Fields of the cohort's replies that `learn` reads. A class that overrides `learn` has to declare them, because
    under [privacy] the fields must not be the trained parameters."""

    @property
    def single_replies(self) -> str:
        """Return why the selector needs replies of single clients, or "" if it does not; see `Algorithm`."""
        return ""

    def learn(self, memory: Any, params: Tree, replies: Replies, fed: Federation) -> Any:
        """Return the selector's memory after the cohort has answered.

        Args:
            memory: the selector's memory.
            params: the global model that the cohort received.
            replies: the cohort's replies.
        """
        return memory

    def weigh(self, memory: Any, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights for the mean over the clients that answered.

        Args:
            memory: the selector's memory.
            weights: for each client that answered, the weight that the method would use without the selector.
        """
        return weights


@dataclass(frozen=True, kw_only=True)
class Uniform(Selector):
    """Draws clients uniformly, without replacement, from all clients that have rows (McMahan et al. 2017)."""

    @override
    def choose(self, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
        eligible = fed.clients.eligible
        key = keys.key(fed.seed, "cohort", fed.round)
        return [eligible[i] for i in keys.choice(key, len(eligible), self.size(fed.clients))], memory
