"""The LoRA ranks of the clients: which part of an adapter a client receives, trains and sends.

A client of rank r has the first r rows of each matrix A and the first r columns of each matrix B. The messages to and
from this client hold only these rows and columns. The model computes with them in the same way as with whole matrices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyfed.core.messages import OF_THE_MODEL, Message, map_fields
from polyfed.core.request import Send
from polyfed.federation.message_validation import Shape
from polyfed.federation.replies import ReplyStack
from polyfed.model.encoders.lora import pairs


@dataclass(frozen=True)
class ClientRanks:
    """The ranks of the clients.

    Attributes:
        ranks: client k has the rank `ranks[k mod len(ranks)]`. If empty, all clients have the ranks of the model.
        template: the model's tree, with the largest ranks.
    """

    ranks: tuple[int, ...] = ()
    template: Mapping[str, Tensor] = field(default_factory=dict)
    _shapes: dict[int, dict[str, Shape]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, client: int) -> int | None:
        """Return the rank of a client, or None for a client that has the whole model, such as an evaluation client."""
        return self.ranks[client % len(self.ranks)] if self.ranks and client >= 0 else None

    def shapes(self, client: int) -> Mapping[str, Shape]:
        """Return, by name, the shapes of the parameters that are smaller for this client than in the model."""
        rank = self.of(client)
        return {} if rank is None else self.shapes_at(rank)

    def shapes_at(self, rank: int) -> Mapping[str, Shape]:
        """Return, by name, the shapes of the parameters that are smaller at this rank than in the model."""
        if rank not in self._shapes:
            found = self._shapes.setdefault(rank, {})
            for a, b in pairs(self.template):
                if rank < len(self.template[a]):
                    outputs, _, *rest = self.template[b].shape
                    found[a], found[b] = (rank, *self.template[a].shape[1:]), (outputs, rank, *rest)
        return self._shapes[rank]

    def sized(self, send: Send, clients: Iterable[int]) -> Send:
        """Return the messages to these clients, with adapters of each client's own rank.

        Args:
            send: one message for all clients, or a mapping with one message for each.
            clients: the numbers of the clients.
        """
        asked = list(clients)
        if not (self.ranks and any(self.shapes(client) for client in asked)):
            return send
        made: dict[tuple[int, int | None], Message] = {}  # clients of the same rank share a message, to save memory

        def own(client: int) -> Message:
            msg = send if isinstance(send, Message) else send[client]
            key = id(msg), self.of(client)
            if key not in made:
                made[key] = _narrowed(msg, self.shapes(client))
            return made[key]

        return {client: own(client) for client in asked}

    def split(self, parts: list[ReplyStack]) -> list[ReplyStack]:
        """Divide stacks of replies into stacks of clients with the same rank."""
        if not self.ranks:
            return parts
        result: list[ReplyStack] = []
        for part in parts:
            places: dict[int | None, list[int]] = {}
            for place, client in enumerate(part.clients):
                places.setdefault(self.of(client), []).append(place)
            result += [part] if len(places) == 1 else [part.at(own) for own in places.values()]
        return result


def _narrowed(msg: Message, shapes: Mapping[str, Shape]) -> Any:
    """Return the message with its parameters and gradients cut to these shapes."""

    def own(name: str, value: Any) -> Any:
        if msg.kinds[name] not in OF_THE_MODEL or not shapes.keys() & value.keys():
            return value
        return {
            key: tensor[tuple(map(slice, shapes[key]))].contiguous() if key in shapes else tensor
            for key, tensor in value.items()
        }

    return map_fields(msg, own)
