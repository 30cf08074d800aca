"""The egress gate of a client: all replies of the client leave through this gate.

In a simulation, the messages of several clients may be stacked. One gate then serves all these clients, because
they have the same modalities and the same policy. The gate checks fields and shapes, not values, so the same code
handles both cases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import OF_THE_MODEL, Crossing, Message, crossings, cut
from polyfed.core.packing import Packings
from polyfed.core.request import Request, contiguous
from polyfed.core.tree import SHARED
from polyfed.privacy.egress.announcement import Announcement
from polyfed.privacy.egress.contents import contents
from polyfed.privacy.egress.ledger import TO_CLIENT, Entry, Ledger
from polyfed.privacy.egress.policy import rejection


@dataclass(frozen=True)
class EgressGate:
    """The gate of one client, or of several clients whose messages are stacked.

    Attributes:
        clients: the numbers of the clients.
        blocks: the blocks of the clients' model.
        ledger: records every part of every message that passes the gate or is refused.
        announcement: everything that the clients' replies can hold, and whether the policy allows it.
        on_server: whether these are evaluation clients. Their rows belong to the server, so no client's data leaves.
        on_device: whether this is the gate of a device. Its server may be hostile, and ask what no recipe asks.
        rounds: returns how the tensors of a message that arrives are rounded.
    """

    clients: tuple[int, ...]
    blocks: frozenset[str]
    ledger: Ledger
    announcement: Announcement
    on_server: bool = False
    on_device: bool = False
    rounds: Callable[[Message], Packings] = lambda msg: {}

    def receive(self, request: Request, msg: Message) -> Any:
        """Receive a message: remove the blocks that the clients do not have, and record the rest in the ledger.

        Raises:
            EgressError: the message holds parameters or prototypes of a block that the policy does not let come in.
        """
        own = cut(msg, self.blocks)
        if not self.on_server:
            parts = crossings(own, packings=self.rounds(own))
            _refuse_dotted(own, parts)
            why = self.rejection(request, own)
            self._book(request, own, parts, TO_CLIENT, (not why,) * len(parts), self.clients)
            if why:
                raise EgressError(why)
        return own

    def rejection(self, request: Request, own: Message) -> str:
        """Return why the clients do not take a message, or "" if they take it.

        Args:
            own: the message, without blocks that the clients do not have.
        """
        policy, name = self.announcement.policy, type(own).__name__
        parts = [part for part in crossings(own) if self.on_device or not self._comes_back(request, part)]
        result = (rejection(part, request.scope, policy, self.clients[0], name) for part in parts)
        return next(filter(None, result), "")

    def _comes_back(self, request: Request, part: Crossing) -> bool:
        """Return whether an honest reply holds this part too. The refusal to send it then says more."""
        return any(
            row.task == request.name and (row.kind, row.block) == (part.kind, part.block)
            for row in self.announcement.rows.values()
        )

    def release(self, request: Request, reply: Message, *, stacked: bool, packings: Packings | None = None) -> Message:
        """Check a reply and return it, with contiguous tensors, or refuse the whole reply.

        Args:
            request: the request that the reply answers.
            reply: the reply of one client, or the stacked replies of several clients.
            stacked: whether the tensors have a leading client axis.
            packings: the tensors that are compressed.

        Raises:
            EgressError: the policy forbids a part of the reply, or `polyfed check` did not announce that part. The
                error message names client, field, kind, block and destination of the part, and the policy line that
                would allow it.
        """
        assert isinstance(reply, Message), f"task {request.name} answered with {type(reply).__name__}, not a message"
        reply = contiguous(reply)
        if self.on_server:
            return reply
        self._refuse_another(request, reply, stacked)
        for clients, rows in self._alike(reply) if stacked else [(self.clients, None)]:
            self._pass(request, reply, clients, crossings(reply, stacked=stacked, rows=rows, packings=packings))
        return reply

    def _refuse_another(self, request: Request, reply: Message, stacked: bool) -> None:
        """Refuse a reply of a type that the task does not declare, and a reply that holds private parameters."""
        why = self.announcement.answer_refusal(request.name, type(reply), request.scope, self.clients[0])
        if why := why or self.announcement.private_refusal(reply, self.clients[0]):
            parts = crossings(reply, stacked=stacked)
            self._book(request, reply, parts, request.scope, (False,) * len(parts), self.clients)
            raise EgressError(why)

    def _pass(self, request: Request, reply: Message, clients: tuple[int, ...], parts: tuple[Crossing, ...]) -> None:
        refusals = [self.announcement.refusal(request.name, part, clients[0]) for part in parts]
        self._book(request, reply, parts, request.scope, tuple(not why for why in refusals), clients)
        if first := next(filter(None, refusals), ""):
            raise EgressError(first)

    def _alike(self, reply: Message) -> list[tuple[tuple[int, ...], dict[str, int] | None]]:
        """Group the clients of a stack by the number of rows that they send.

        Clients of a stack send the same fields with the same shapes. Only the numbers of rows can differ.
        """
        if not reply.counts:
            return [(self.clients, None)]
        counted = {name: getattr(reply, count).tolist() for name, count in reply.counts.items()}
        groups: dict[tuple[int, ...], list[int]] = {}
        for client, *rows in zip(self.clients, *counted.values(), strict=True):
            groups.setdefault(tuple(int(n) for n in rows), []).append(client)
        return [(tuple(clients), dict(zip(counted, rows, strict=True))) for rows, clients in groups.items()]

    def _book(
        self,
        request: Request,
        msg: Message,
        parts: tuple[Crossing, ...],
        destination: str,
        allowed: tuple[bool, ...],
        clients: tuple[int, ...],
    ) -> None:
        if not all(allowed):  # the whole message is refused, so no part of it may count as sent
            allowed = (False,) * len(allowed)
        hashes = contents(msg, parts, allowed) if self.ledger.hashing else ()
        name = type(msg).__name__
        self.ledger.book(Entry(request.round, request.number, clients, name, parts, destination, allowed, hashes))


def _refuse_dotted(msg: Message, parts: tuple[Crossing, ...]) -> None:
    """Refuse a message of the server if a tree that is neither parameters nor gradients has names with dots.

    Only the names of a model's parameters and buffers contain dots, as in `image.0.weight`.
    """
    for part in parts:
        if part.kind not in OF_THE_MODEL and (dotted := [name for name in part.names if "." in name]):
            raise RecipeError(
                f"{type(msg).__name__}.{part.field} holds '{dotted[0]}'; trees of kind '{part.kind}' are keyed by "
                f"modality, or by '{SHARED}' for what belongs to none"
            )
