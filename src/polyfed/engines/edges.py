"""The engine of a server whose silos have edges: it sends parts to edges, and reads what they forward.

An edge runs the part of its silo (`federation/silos/parts.py`) with its devices. It answers with the replies that its
devices have given to tasks of the scope `server`, and with nothing else: this engine does not decode anything else. For
the transport, the client with the number of a silo is the edge of this silo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from typing_extensions import override

from polyfed.core.errors import BadReply, DataError, EgressError, RecipeError
from polyfed.core.messages import Message, cut
from polyfed.core.request import Request, Send
from polyfed.core.tasks import info_of, tasks_of, types_of
from polyfed.core.tree import SHARED
from polyfed.engines.protocol import (
    FAILED,
    PART,
    REFUSED,
    REPLY,
    RequestId,
    one_line,
    seal_of,
    versions,
)
from polyfed.engines.remote import Remote
from polyfed.federation.replies import Answer, stacked
from polyfed.federation.silos.forwarded import Forwarded, FromEdges
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.egress.ledger import TO_CLIENT

DATA = "data"
"""The value of `fault` in an answer of an edge whose devices do not fit each other, which ends the run."""

MOST_REQUESTS = 100_000
"""Largest number of a request in a round (inferred)."""


class EdgeRemote(Remote):
    """Sends parts to edges. Its own evaluation clients run in this process, and no device is asked from here."""

    @override
    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        assert all(client < 0 for client in clients), "devices of a silo are asked by their edge"
        missing: dict[int, str] = {}
        own = {client: self.alone(request, client, send, missing) for client in clients}
        return Answer.of(stacked({client: reply for client, reply in own.items() if reply is not None}), missing)

    def in_silos(self, place: Request, part: str, silos: Mapping[int, Sequence[int]], send: Message) -> FromEdges:
        """See `polyfed.federation.silos.forwarded.Edges`.

        Raises:
            EgressError: the policy of an edge or of a device refused, and `on_refusal` is "stop".
            DataError: the devices of a silo do not fit each other.
        """
        packets: dict[int, Packet] = {}
        messages: dict[int, Message] = {}
        for silo, members in silos.items():
            messages[silo] = cut(send, frozenset({SHARED, *(m for c in members for m in self.registry.owned(c))}))
            packets[silo] = self._part(place, part, silo, messages[silo])

        def sent(reached: Any) -> None:
            for silo in sorted(reached):
                self._book(place, min(silos[silo]), messages[silo], TO_CLIENT)

        answers = self._exchange(place, packets, sent)
        result = FromEdges(last=place.number + 1)  # even if no edge answers: each message has a number of its own
        merged: dict[int, Forwarded] = {}
        for silo, members in silos.items():
            try:
                last, told, seal = self._told(place, silo, members, answers[silo])
                before = [(one, merged[one.number]) for one in told if one.number in merged]
                if any((one.task, one.turn) != (other.task, other.turn) for one, other in before):
                    raise BadReply("answered other requests than other edges")
            except BadReply as error:
                result.missing[silo] = one_line(error)
                continue
            result.last = max(result.last, last)
            for one in told:
                self._book_all(place, one, seal)
                whole = merged.setdefault(one.number, Forwarded(one.task, one.number, one.turn))
                whole.replies |= one.replies
                whole.missing |= one.missing
        result.answers = [whole for _, whole in sorted(merged.items())]
        return result

    def _part(self, place: Request, part: str, silo: int, msg: Message) -> Packet:
        """Return the packet of a part.

        Raises:
            RecipeError: the message is larger than the limit that edges accept.
        """
        content = encode(msg)
        if len(content.body) > self.terms.limit:
            raise RecipeError(
                f"the message of part '{part}' to the edge of silo {silo} takes {len(content.body):,} bytes, and "
                f"[deployment] message_megabytes allows {self.terms.limit:,}. Raise it, or take a smaller model"
            )
        about = {"part": part, "seed": place.seed, "rounds": place.rounds, "kept": self.kept}
        header = self._request_id(place, silo).header(want=PART, facts=asdict(self.facts), **versions(), **about)
        return Packet(header | content.header, content.body)

    def _told(
        self, place: Request, silo: int, members: Sequence[int], answer: Packet | str
    ) -> tuple[int, list[Forwarded], str]:
        """Decode what an edge has forwarded. Return the number of the next request, the requests, and the seal.

        Raises:
            BadReply: the edge failed, or forwarded something else than replies of its devices to the server.
            EgressError, DataError: see `in_silos`.
        """
        if isinstance(answer, str):
            raise BadReply(answer)
        header = answer.header
        verdict, why = header.get("verdict"), one_line(header.get("reason"))
        if RequestId.read(header) != self._request_id(place, silo):
            raise BadReply(f"answered another question: {header['request_id']}")
        if verdict == REFUSED and self.terms.stop_on_refusal:
            raise EgressError(why)
        if verdict == FAILED and header.get("fault") == DATA:
            raise DataError(why)
        if verdict != REPLY:
            raise BadReply(why if verdict in (FAILED, REFUSED) else f"answered with {str(verdict)[:40]!r}")
        match header:
            case {"last": int(last), "asked": list(asked)} if place.number <= last < MOST_REQUESTS:
                return last, self._requests(place, members, last, asked, bytes(answer.body)), seal_of(header)
        raise BadReply("answered with something that cannot be read")

    def _requests(
        self, place: Request, members: Sequence[int], last: int, asked: list[Any], body: bytes
    ) -> list[Forwarded]:
        result: list[Forwarded] = []
        at, before = 0, place.number - 1
        for one in asked:
            match one:
                case {
                    "task": str(name),
                    "number": int(number),
                    "turn": int(turn),
                    "replies": dict(replies),
                    "missing": dict(missing),
                } if type(number) is type(turn) is int and before < number < last:
                    before = number
                case _:
                    raise BadReply("answered with something that cannot be read")
            request = self._request(place, name, number, turn)
            result.append(forwarded := Forwarded(name, number, turn))
            for client, packet in replies.items():
                size = packet.get("size") if isinstance(packet, dict) else None
                if type(size) is not int or not 0 <= size <= len(body) - at:
                    raise BadReply("answered with a reply whose size cannot be read")
                device = _member(client, members)
                forwarded.replies[device] = self._one(request, device, Packet(packet, body[at : at + size]))
                at += size
            forwarded.missing |= {_member(client, members): one_line(text) for client, text in missing.items()}
        if at != len(body):
            raise BadReply(f"holds {len(body) - at} bytes more than its header says")
        return result

    def _book_all(self, place: Request, one: Forwarded, seal: str) -> None:
        """Record the replies of an answer that could be read as a whole in the ledger, with the seal of the edge."""
        request = self._request(place, one.task, one.number, one.turn)
        for client, reply in sorted(one.replies.items()):
            self._book(request, client, reply, "server", seal)

    def _request(self, place: Request, name: str, number: int, turn: int) -> Request:
        """Return the request of an edge, whose replies the server may see.

        Raises:
            BadReply: there is no such task, or its replies are for the silo only.
        """
        task = tasks_of(self.algorithm).get(name)
        if task is None or info_of(task).scope != "server":
            raise BadReply(f"forwarded a reply to '{name[:80]}', which is not for the server")
        return replace(place, task=task, name=name, number=number, turn=turn)

    def _one(self, request: Request, client: int, packet: Packet) -> Message:
        """Decode the reply of a device."""
        kind = types_of(request.task)[1]
        reply: Message = decode(packet, kind, limit=self.terms.limit, most=self._most_tensors(kind))
        self._refuse_strange(request, client, reply)
        placed: Message = self.to_device(reply)
        return placed


def _member(client: Any, members: Sequence[int]) -> int:
    """Return the number of a device of the silo.

    Raises:
        BadReply: it has no such device.
    """
    result = [member for member in members if str(member) == client]
    if not result:
        raise BadReply(f"forwarded a reply of client {str(client)[:20]}, which is not of its silo")
    return result[0]
