"""Clients in other processes or on other machines: the server's half. What carries the packets is a `Transport`.

The server computes as the sequential engine does: replies come into the round in ascending order of the clients,
whenever they arrive, so parameters do not depend on who was fast. Its ledger books what it sent and what it
took; each client keeps a ledger of its own, which also knows what was refused there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import BadReply, EgressError, RecipeError
from polyfed.core.messages import Message, crossings, cut
from polyfed.core.request import Request, Send
from polyfed.core.tasks import info_of, tasks_of
from polyfed.core.tree import digest
from polyfed.engines.base import Engine
from polyfed.engines.protocol import FAILED, MAX_REASON, REFUSED, REPLY, Facts, RequestId, Transport, request_packet
from polyfed.federation.replies import Answer, stacked
from polyfed.federation.wire_format import Packet, decode, encode
from polyfed.privacy.ledger import TO_CLIENT, Entry


@dataclass(frozen=True)
class ReplyTerms:
    """How the server deals with clients it does not hold; the [engine] section says the same words.

    Attributes:
        session: number of this life of the server; a later life has a larger one.
        reply_seconds: how long an ask waits.
        stop_on_refusal: a client's refusal ends the run; otherwise it is left out of the ask.
        relay: the server may pass on, and see, what clients of a silo send each other.
        limit: most bytes of a message.
    """

    session: int = 0
    reply_seconds: float = 600.0
    stop_on_refusal: bool = True
    relay: bool = False
    limit: int = 2**29


class Remote(Engine):
    """Asks clients by post; the server's own evaluation_clients answer here.

    Args:
        transport: carries packets.
        terms: see `ReplyTerms`.

    The other arguments are those of `Engine`; `population` tells what the server knows of the clients.

    Raises:
        RecipeError: the algorithm sends within silos and nobody allowed the server to see that.
    """

    name = "flower"
    keeps_locals = False

    def __init__(self, *args: Any, transport: Transport, terms: ReplyTerms, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport, self.terms = transport, terms
        columns = self.population.columns
        shapes = {name: column.shape for name, column in columns.modalities.items()}
        self.facts = Facts(shapes, columns.num_classes, digest(self.model.frozen))
        if self.clock is not None:
            raise RecipeError("[network] is simulated time; the flower engine runs in real time. Remove the section")
        self._refuse_silos()

    def _refuse_silos(self) -> None:
        """Messages between clients of a silo pass through the server here, so the recipe must say that it sees them."""
        inner = [name for name, task in tasks_of(self.algorithm).items() if info_of(task).scope == "silo"]
        if inner and not self.terms.relay:
            raise RecipeError(
                f"task {inner[0]} sends within silos, and on the flower engine that passes through the server. "
                "If the server may see it, say [engine] relay = 'server-sees' (each client must agree in its own "
                "configuration); otherwise use the sequential or vectorised engine"
            )

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Send the request to these clients and wait for their replies; see `Engine.answer`."""
        replies: dict[int, Message] = {}
        missing: dict[int, str] = {}
        for client in clients:
            if client < 0 and (evaluated := self.alone(request, client, send, missing)) is not None:
                replies[client] = evaluated
        asked = [client for client in clients if client >= 0]
        if asked:
            replies |= self._exchanged(request, asked, send, missing)
        return Answer.of(stacked(replies), missing)

    def _exchanged(
        self, request: Request, asked: Sequence[int], send: Send, missing: dict[int, str]
    ) -> dict[int, Message]:
        """The replies of clients elsewhere."""
        replies: dict[int, Message] = {}
        answers = self.transport.exchange(self._packets(request, asked, send), self.terms.reply_seconds)
        refused: EgressError | None = None
        for client in asked:
            try:
                reply = self._reply(request, client, answers.get(client, self._too_late()), missing)
            except EgressError as error:
                refused = refused or error
                continue
            if reply is not None:
                replies[client] = self._to_device(reply)
        if refused is not None:  # only now: what the others sent has arrived all the same, and is booked
            raise refused
        return replies

    def _too_late(self) -> str:
        return f"no answer within {self.terms.reply_seconds:g} seconds"

    def _request_id(self, request: Request, client: int) -> RequestId:
        return RequestId(self.ledger.run, self.terms.session, request.round, request.number, client)

    def _packets(self, request: Request, clients: Sequence[int], send: Send) -> dict[int, Packet]:
        """A packet a client, cut to its blocks and booked; clients of the same blocks share one body."""
        packets: dict[int, Packet] = {}
        encoded: dict[tuple[int, frozenset[str]], tuple[Message, Packet]] = {}
        for client in clients:
            msg = send if isinstance(send, Message) else send[client]
            blocks = self.registry[client].blocks
            if (id(msg), blocks) not in encoded:
                own = cut(msg, blocks)
                encoded[id(msg), blocks] = own, encode(own)
            own, content = encoded[id(msg), blocks]
            self._book(request, client, own, TO_CLIENT)
            held = list(self.registry.owned(client))
            packets[client] = request_packet(
                self._request_id(request, client), request, self.facts, content, kept=self.kept, modalities=held
            )
        return packets

    def _reply(self, request: Request, client: int, answer: Packet | str, missing: dict[int, str]) -> Message | None:
        """The reply in an answer, or None and the reason in `missing`.

        Raises:
            EgressError: the client's policy refused, and the recipe says to stop then.
        """
        if isinstance(answer, str):
            missing[client] = answer
            return None
        try:
            reply = self._opened(request, client, answer)
        except BadReply as error:
            missing[client] = str(error)[:MAX_REASON]
            return None
        except EgressError as error:
            if self.terms.stop_on_refusal:
                raise
            missing[client] = str(error)
            return None
        self._book(request, client, reply, request.scope)
        return reply

    def _opened(self, request: Request, client: int, answer: Packet) -> Message:
        """The message of an answer, if it is one to this ask."""
        header: Mapping[str, Any] = answer.header
        verdict, why = header.get("verdict"), str(header.get("reason"))[:MAX_REASON]
        if RequestId.read(dict(header)) != self._request_id(request, client):
            raise BadReply(f"answered another question: {header['request_id']}")
        if verdict == REFUSED:
            raise EgressError(why)
        if verdict == FAILED:
            raise BadReply(why)
        if verdict != REPLY:
            raise BadReply(f"answered with {str(verdict)[:40]!r}, which is no verdict")
        reply: Message = decode(answer, request.reply, limit=self.terms.limit)
        announcement = self.announcement(self.registry.owned(client))
        for part in crossings(reply):  # before it is booked: the ledger has no name that no message declares
            if announcement.strange(request.name, part):
                raise BadReply(f"sent names in {part.field} that {type(reply).__name__} does not declare")
        return reply

    def _book(self, request: Request, client: int, msg: Message, destination: str) -> None:
        parts = crossings(msg)
        allowed = (True,) * len(parts)
        name = type(msg).__name__
        self.ledger.book(Entry(request.round, request.number, (client,), name, parts, destination, allowed))
