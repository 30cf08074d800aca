"""The engine for clients in other processes or on other machines. A `Transport` carries the packets.

The server's computations are the same as with the sequential engine. The server merges replies in ascending order of
the clients, not in the order of arrival, so the parameters do not depend on the clients' speed. The server's ledger
records the messages that the server sent and the replies that it accepted. Each client keeps its own ledger, which also
lists the refused parts.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from polyfed.core.errors import BadReply, EgressError, RecipeError
from polyfed.core.messages import Message, crossings, cut
from polyfed.core.packing import Packings
from polyfed.core.request import Request, Send
from polyfed.core.tree import digest
from polyfed.data.column_fitting import as_tables, features_of
from polyfed.engines.base import Engine
from polyfed.engines.kept_answers import KeptAnswers
from polyfed.engines.protocol import (
    FAILED,
    REFUSED,
    REPLY,
    Facts,
    Patience,
    RequestId,
    Transport,
    one_line,
    request_packet,
    seal_of,
)
from polyfed.federation.replies import Answer, stacked
from polyfed.federation.wire.compression import Expected
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.egress.contents import contents
from polyfed.privacy.egress.ledger import TO_CLIENT, Entry

NAMES_PER_NAME = 8
"""The trees of a valid reply hold far fewer tensors than this number for each name of the model (inferred)."""


@dataclass(frozen=True)
class ReplyTerms:
    """Settings for requests to clients in other processes: the session, and options of the [engine] section.

    Attributes:
        session: number of the current session. Each start of the server begins a session with a larger number.
        reply_seconds: deadline of a request, in seconds.
        close_at: the server closes the request when this share of the asked clients has replied.
        min_replies: smallest number of replies. With fewer replies, the server keeps waiting for all other clients
            until the deadline. It does so even for clients that missed earlier deadlines.
        away_seconds: how long the server waits for a client whose device is offline, over all requests.
        stop_on_refusal: whether a client's refusal ends the run. Otherwise the request continues without the client.
        relay: whether the server may relay, and so see, the messages between clients of a silo.
        limit: size in bytes of the largest message that server and clients read.
        holds: whether clients may work on while the server goes on.
    """

    session: int = 0
    reply_seconds: float = 600.0
    close_at: float = 1.0
    min_replies: int = 1
    away_seconds: float = math.inf
    stop_on_refusal: bool = True
    relay: bool = False
    limit: int = 2**29
    holds: bool = True


class Remote(Engine):
    """Sends requests to clients in other processes. The server's own evaluation clients run in this process.

    Args:
        transport: carries packets.
        terms: deadlines, limits and the effect of a refusal.
        facts: what an edge has heard about the federation; by default, the population has all facts.
        kept_answers: keeps the answers of a round, so that a run goes on within it; None if it begins the round again.
        *args: see `Engine`. `population` holds the server's knowledge about the clients.
        **kwargs: see `Engine`.

    Raises:
        RecipeError: the algorithm sends messages within silos, and the recipe does not allow the server to see them.
    """

    name = "remote"
    keeps_locals = False

    def __init__(
        self,
        *args: Any,
        transport: Transport,
        terms: ReplyTerms,
        facts: Facts | None = None,
        kept_answers: KeptAnswers | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.transport, self.terms, self.holds, self.kept_answers = transport, terms, terms.holds, kept_answers
        columns = self.population.columns
        shapes = {name: column.shape for name, column in columns.modalities.items()}
        scaled = columns.standardise if isinstance(columns.standardise, tuple) else ()
        known = as_tables(features_of(columns))
        self.facts = facts or Facts(shapes, columns.num_classes, digest(self.model.unsent), scaled, known)

    @override
    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        replies: dict[int, Message] = {}
        missing: dict[int, str] = {}
        for client in clients:
            if client < 0 and (evaluated := self.alone(request, client, send, missing)) is not None:
                replies[client] = evaluated
        asked = [client for client in clients if client >= 0]
        if asked:
            replies |= self._exchanged(request, asked, send, missing)
        return Answer.of(stacked(replies), missing)

    def gather(
        self, round: int, asked: Sequence[tuple[Request, Sequence[int], Send]], enough: int, interval_s: float | None
    ) -> list[Answer]:
        """Ask clients, and return what has come when `enough` have replied; see `polyfed.federation.Holding`."""
        packets: dict[int, Packet] = {}
        messages: dict[int, Message] = {}
        request_of = {client: request for request, clients, _ in asked for client in clients}
        for request, clients, send in asked:  # after a restart, those of earlier rounds leave again
            new, own = self._packets(request, [one for one in clients if one not in self.transport.working], send)
            packets, messages = packets | new, messages | own

        def sent(clients: Collection[int]) -> None:
            for client in sorted(clients):
                own = messages[client]
                self._book(request_of[client], client, own, TO_CLIENT, came=round, packings=self.rounds(own))

        least = min(self.terms.min_replies, len(request_of))
        patience = Patience(self.terms.reply_seconds, enough, least, self.terms.away_seconds)
        with self._telling_late_replies():
            answers = self.transport.gather(packets, patience, interval_s, sent)
        self._measure("")
        result, refused = list[Answer](), list[EgressError]()
        for request, clients, send in asked:
            missing: dict[int, str] = {}
            own_answers = {client: answers[client] for client in clients if client in answers}
            replies = self._accepted(request, send, own_answers, missing, refused, came=round)
            result.append(Answer.of(stacked(replies), missing))
        if refused:
            raise refused[0]
        return result

    def _exchanged(
        self, request: Request, asked: Sequence[int], send: Send, missing: dict[int, str]
    ) -> dict[int, Message]:
        """Send the request to clients in other processes and return their usable replies."""
        answers, refused = self._answers(request, *self._packets(request, asked, send)), list[EgressError]()
        replies = self._accepted(request, send, {client: answers[client] for client in asked}, missing, refused)
        if refused:  # raised only now, so that the ledger also records the replies of the other clients
            raise refused[0]
        return replies

    def _accepted(
        self,
        request: Request,
        send: Send,
        answers: Mapping[int, Packet | str],
        missing: dict[int, str],
        refused: list[EgressError],
        came: int | None = None,
    ) -> dict[int, Message]:
        """Return the usable replies among the answers, and add the refusals that end the run to `refused`."""
        replies: dict[int, Message] = {}
        for client, answer in answers.items():
            msg = send if isinstance(send, Message) else send[client]
            got = cut(msg, self.registry[client].blocks)  # as the client has read it, maybe in an earlier round
            try:
                reply = self._reply(request, client, got, answer, missing, came)
            except EgressError as error:
                refused.append(error)
                continue
            if reply is not None:
                replies[client] = self.to_device(reply)
        return replies

    @contextmanager
    def _telling_late_replies(self) -> Iterator[None]:
        """Emit an event for each client whose late reply to an earlier request is discarded meanwhile."""
        before = self.transport.discarded.copy()
        yield
        for client, count in (self.transport.discarded - before).items():
            total = self.transport.discarded[client]
            self.emit("late-reply", client=client, discarded=count, total=total)

    def _answers(
        self, request: Request, packets: dict[int, Packet], messages: Mapping[int, Message]
    ) -> dict[int, Packet | str]:
        """Exchange the packets, and record the sent messages in the ledger."""

        def sent(clients: Collection[int]) -> None:
            for client in sorted(clients):
                own = messages[client]
                self._book(request, client, own, TO_CLIENT, packings=self.rounds(own))

        return self._exchange(request, packets, sent)

    def _exchange(
        self, request: Request, packets: dict[int, Packet], sent: Callable[[Collection[int]], None]
    ) -> dict[int, Packet | str]:
        """Exchange packets, for as long as the terms say."""
        terms = self.terms
        least = min(terms.min_replies, len(packets))
        share = math.ceil(terms.close_at * len(packets) - 1e-9)
        enough = max(share if request.enough is None else min(share, request.enough), least)
        patience = Patience(terms.reply_seconds, enough, least, terms.away_seconds)

        def ask(reached: Callable[[Collection[int]], None]) -> dict[int, Packet | str]:
            with self._telling_late_replies():
                answers = self.transport.exchange(packets, patience, reached)
            self._measure(request.name)
            return answers

        return ask(sent) if self.kept_answers is None else self.kept_answers.through(request, packets, sent, ask)

    def _measure(self, task: str) -> None:
        """Learn what the transport has measured of requests; of closed ones, nobody knows the task."""
        for client, carried, late in self.transport.taken_measurements():
            if self.links is not None and client < len(self.registry):
                work = ("", 0.0) if late else (task, carried.work_s)
                up, down = (carried.up_bytes, carried.up_s), (carried.down_bytes, carried.down_s)
                self.links.learn(client, up=up, down=down, work=work)

    def _request_id(self, request: Request, client: int) -> RequestId:
        return RequestId(self.ledger.run, self.terms.session, request.round, request.number, client)

    def _packets(
        self, request: Request, clients: Sequence[int], send: Send
    ) -> tuple[dict[int, Packet], dict[int, Message]]:
        """Encode each client's message, and leave out the blocks that the client lacks.

        A message is encoded only once for all its receivers that have the same blocks.

        Raises:
            RecipeError: a message is larger than the limit that clients accept.
        """
        packets: dict[int, Packet] = {}
        messages: dict[int, Message] = {}
        encoded: dict[tuple[int, frozenset[str]], tuple[Message, Packet]] = {}
        for client in clients:
            msg = send if isinstance(send, Message) else send[client]
            blocks = self.registry[client].blocks
            if (id(msg), blocks) not in encoded:
                own = cut(msg, blocks)
                encoded[id(msg), blocks] = own, self._encoded(own)
            messages[client], content = encoded[id(msg), blocks]
            if len(content.body) > self.terms.limit:
                raise RecipeError(
                    f"the message of task '{request.name}' to client {client} takes {len(content.body):,} bytes, and "
                    f"[deployment] message_megabytes allows {self.terms.limit:,}. Raise it, or take a smaller model"
                )
            held = list(self.registry.owned(client))
            packets[client] = request_packet(
                self._request_id(request, client), request, self.facts, content, kept=self.kept, modalities=held
            )
        return packets, messages

    def _encoded(self, msg: Message) -> Packet:
        return encode(msg, None if self.compression is None else self.compression.pieces_down(msg))

    def _reply(
        self,
        request: Request,
        client: int,
        got: Message,
        answer: Packet | str,
        missing: dict[int, str],
        came: int | None = None,
    ) -> Message | None:
        """Decode a client's packet and return the reply. Return None if there is no usable reply.

        `answer` is the packet, or a text that says why there is no packet. If there is no usable reply, the reason is
        added to `missing`.

        Raises:
            EgressError: the client's policy refused the reply, and `terms` say that a refusal ends the run.
        """
        if isinstance(answer, str):
            missing[client] = one_line(answer)
            return None
        try:
            reply = self._opened(request, client, got, answer)
        except BadReply as error:
            missing[client] = one_line(error)
            return None
        except EgressError as error:
            if self.terms.stop_on_refusal:
                raise
            missing[client] = one_line(error)
            return None
        packings = {} if self.compression is None else self.compression.packings(request, got, reply)
        self._book(request, client, reply, request.scope, seal_of(answer.header), came, packings)
        return reply

    def _opened(self, request: Request, client: int, got: Message, answer: Packet) -> Message:
        """Decode an answer to this request.

        Raises:
            BadReply: the answer is for another request, is malformed, or reports that the task failed.
            EgressError: the client's policy refused the reply.
        """
        header: Mapping[str, Any] = answer.header
        verdict, why = header.get("verdict"), one_line(header.get("reason"))
        if RequestId.read(dict(header)) != self._request_id(request, client):
            raise BadReply(f"answered another question: {header['request_id']}")
        if verdict == REFUSED:
            raise EgressError(why)
        if verdict == FAILED:
            raise BadReply(why)
        if verdict != REPLY:
            raise BadReply(f"answered with {str(verdict)[:40]!r}, which is no verdict")
        compression, terms = self.compression, {"limit": self.terms.limit, "most": self._most_tensors(request.reply)}
        unpacking = None if compression is None else Expected(compression.slots(request, got))
        reply: Message = decode(answer, request.reply, **terms, unpacking=unpacking, shared=True)
        self._refuse_strange(request, client, reply)
        return reply

    def _refuse_strange(self, request: Request, client: int, reply: Message) -> None:
        """Refuse a reply with names that it does not declare, before the ledger records them.

        Raises:
            BadReply: it has such names.
        """
        announcement = self.announcement(self.registry.owned(client))
        for part in crossings(reply):
            if announcement.strange(request.name, part):
                raise BadReply(f"sent names in {part.field} that {type(reply).__name__} does not declare")

    def _most_tensors(self, reply: type[Message]) -> int:
        """Return an upper bound of the number of tensors in a valid reply.

        Some methods add names to those of the model, so each field may have `NAMES_PER_NAME` tensors for each name.
        """
        names = len(self.model.template) + len(self.population.columns.modalities) + 2
        return NAMES_PER_NAME * names * len(reply.declared)

    def _book(
        self,
        request: Request,
        client: int,
        msg: Message,
        destination: str,
        seal: str = "",
        came: int | None = None,
        packings: Packings | None = None,
    ) -> None:
        """Record a message in the ledger. `came` is the round in which it passed, if a buffer was filled then."""
        parts, came = crossings(msg, packings=packings), None if came == request.round else came
        allowed = (True,) * len(parts)
        hashes = contents(msg, parts, allowed) if self.ledger.hashing else ()
        name = type(msg).__name__
        place = (request.round, request.number, (client,))
        entry = Entry(*place, name, parts, destination, allowed, hashes, seal, came)
        self.ledger.book(entry)
