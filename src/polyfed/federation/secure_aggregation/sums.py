"""The sums of the clients' replies. A method receives these sums instead of single replies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import RecipeError
from polyfed.core.system.tracing import traced
from polyfed.core.tree import Tree
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.cohort import Entry


@dataclass(frozen=True)
class SummedReplies(Replies):
    """The sum of the replies to a request under secure aggregation. No single reply exists on the server.

    Attributes:
        clients: the clients whose replies are in the sums, ascending.
        sums: the weighted sum of each tensor of the replies.
        senders: for each tensor, the clients whose values are in its sum.
        weights_in: field -> client -> the weight by which this client multiplied its value of the field.
        template: the model's tree, which gives the types of the means.
        errors: for each tensor, the largest rounding error of an entry in one client's reply. Clients round every entry
            to a fixed-point number.
    """

    clients: tuple[int, ...] = ()
    sums: Mapping[Entry, Tensor] = field(default_factory=dict)
    senders: Mapping[Entry, tuple[int, ...]] = field(default_factory=dict)
    weights_in: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    template: Mapping[str, Tensor] = field(default_factory=dict)
    errors: Mapping[Entry, float] = field(default_factory=dict)

    because: ClassVar[str] = (
        "under [secure_aggregation] the server has no reply of a single client, only sums, and the method reads one. "
        "Remove the section, or let the method say so in `single_replies`"
    )
    """Why there is no single reply."""
    unequal: ClassVar[str] = (
        "under [secure_aggregation] clients multiply '{name}' by their own weights before they send it, and the server "
        "would use other weights. Use a selector that does not change weights, such as 'uniform'"
    )
    """Why the server cannot use other weights."""

    def __getitem__(self, client: int) -> NoReturn:
        """Refuse to return a single reply.

        Raises:
            RecipeError: always.
        """
        raise RecipeError(self.because)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def __contains__(self, client: object) -> bool:
        return client in self.clients

    @override
    def numbers(self, name: str) -> dict[int, float]:
        """Refuse to return each client's value of a field, because the server knows only the sum of these values.

        Raises:
            RecipeError: always.
        """
        return {client: self[client] for client in self.clients}

    @override
    @traced("aggregate")
    def mean(self, name: str, weights: Mapping[int, float]) -> Tree:
        """Return the weighted mean of a tree; see `Replies.mean`.

        Raises:
            RecipeError: the clients multiplied their values by weights that are not proportional to `weights`. The
                server cannot change the clients' weights.
        """
        return {
            str(key): (total / weight).to(self.template[str(key)].dtype if key in self.template else torch.float32)
            for (of, key), total in self.sums.items()
            if of == name and (weight := self._total(of, self.senders[of, key], weights)) > 0
        }

    @override
    def mean_number(self, name: str, weights: Mapping[int, float]) -> float:
        total = self._total(name, self.senders[name, None], weights)
        return float(self.sums[name, None]) / max(total, 1)

    def total(self, name: str) -> Any:
        """Return the sum of a field without weights."""
        return self.sums[name, None]

    def _total(self, name: str, clients: tuple[int, ...], weights: Mapping[int, float]) -> float:
        """Return the sum of the weights by which these clients multiplied a field.

        Raises:
            RecipeError: see `mean`.
        """
        used = self.weights_in[name]
        scale = sum(weights[client] for client in clients) / max(sum(used[client] for client in clients), 1e-12)
        if any(abs(weights[client] - scale * used[client]) > 1e-6 * abs(weights[client]) for client in clients):
            raise RecipeError(self.unequal.format(name=name))
        return sum(used[client] for client in clients)
