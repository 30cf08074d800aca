"""A client's side: its site, its policy, its ledger, and the one gate through which replies leave.

In simulation a node may hold several alike clients at once (same modalities, same policy), whose messages are
stacked; gate and ledger look at fields, not at values, so the same code serves one and many.
"""

from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import OF_THE_MODEL, Crossing, Message, crossings, cut
from polyfed.core.request import Request
from polyfed.core.tree import SHARED
from polyfed.privacy.announcement import Announcement
from polyfed.privacy.contents import contents
from polyfed.privacy.ledger import TO_CLIENT, Entry, Ledger


@dataclass(frozen=True)
class EgressGate:
    """The gate of one client, or of several alike clients whose messages are stacked.

    Attributes:
        clients: their numbers.
        blocks: the blocks of their model.
        ledger: where every crossing is booked.
        announcement: all that their replies can hold, and what their policy says of it.
        on_server: whether these are evaluation clients: their rows are the server's own, so nothing leaves anybody.
    """

    clients: tuple[int, ...]
    blocks: frozenset[str]
    ledger: Ledger
    announcement: Announcement
    on_server: bool = False

    def receive(self, request: Request, msg: Message) -> Any:
        """Take a message in: leave out blocks this client does not have, and book the rest."""
        own = cut(msg, self.blocks)
        if not self.on_server:
            parts = crossings(own)
            _refuse_dotted(own, parts)
            self._book(request, own, parts, TO_CLIENT, (True,) * len(parts), self.clients)
        return own

    def release(self, request: Request, reply: Message, *, stacked: bool) -> Message:
        """The gate: let a reply out, or refuse it whole.

        Raises:
            EgressError: the policy forbids a part of it, or `polyfed check` did not announce one; naming client, field,
                kind, block, destination and the line that would allow it.
        """
        assert isinstance(reply, Message), f"task {request.name} answered with {type(reply).__name__}, not a message"
        if self.on_server:
            return reply
        self._refuse_another(request, reply, stacked)
        for clients, rows in self._alike(reply) if stacked else [(self.clients, None)]:
            self._pass(request, reply, clients, crossings(reply, stacked=stacked, rows=rows))
        return reply

    def _refuse_another(self, request: Request, reply: Message, stacked: bool) -> None:
        """Refuse what is not the reply that the task declares."""
        if why := self.announcement.answer_refusal(request.name, type(reply), request.scope, self.clients[0]):
            parts = crossings(reply, stacked=stacked)
            self._book(request, reply, parts, request.scope, (False,) * len(parts), self.clients)
            raise EgressError(why)

    def _pass(self, request: Request, reply: Message, clients: tuple[int, ...], parts: tuple[Crossing, ...]) -> None:
        refusals = [self.announcement.refusal(request.name, part, clients[0]) for part in parts]
        self._book(request, reply, parts, request.scope, tuple(not why for why in refusals), clients)
        if first := next(filter(None, refusals), ""):
            raise EgressError(first)

    def _alike(self, reply: Message) -> list[tuple[tuple[int, ...], dict[str, int] | None]]:
        """The clients of a stack by how many rows they send, which is all in which their messages differ."""
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
        if not all(allowed):  # refused whole: nothing of the message leaves, so nothing of it may count as sent
            allowed = (False,) * len(allowed)
        hashes = contents(msg, parts, allowed) if self.ledger.hashing else ()
        name = type(msg).__name__
        self.ledger.book(Entry(request.round, request.number, clients, name, parts, destination, allowed, hashes))


def _refuse_dotted(msg: Message, parts: tuple[Crossing, ...]) -> None:
    """Refuse what the server's half sends if a tree that is no model's has names like a model's."""
    for part in parts:
        if part.kind not in OF_THE_MODEL and (dotted := [name for name in part.names if "." in name]):
            raise RecipeError(
                f"{type(msg).__name__}.{part.field} holds '{dotted[0]}'; trees of kind '{part.kind}' are keyed by "
                f"modality, or by '{SHARED}' for what belongs to none"
            )
