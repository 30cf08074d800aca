"""What server and client write on the outside of a packet when they are in different processes.

Every request has an id: run, session, round, number of the request, client. The client answers with the same id, so
that the server tells the reply it waits for from one that is late, doubled or replayed. A *session* is one life of the
server: a resumed server begins a new one and may ask again what it had asked before it died; a client does the work
again from the local state it had then, and the answer is the same bit for bit.
"""

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from polyfed.core.errors import BadReply
from polyfed.core.request import Request
from polyfed.federation.wire_format import Header, Packet

ENROL, ASK = "enrol", "ask"
"""What a server can want: facts about a client, or a task done."""

ENROLLED, REPLY, REFUSED, FAILED = "enrolled", "reply", "refused", "failed"
"""What a client can say. `refused` is its policy's word, `failed` every other reason, in plain words."""

MAX_REASON = 2000
"""Characters of a reason that are kept: one line of a log, not a trace (inferred)."""

MAX_CLIENTS, MAX_ROWS = 10**6, 2**40
"""Far above any deployment of today (inferred); they bound what a forged enrolment can make the server allocate."""

_RUN = re.compile(r"[A-Za-z0-9_\-]{1,100}")


@dataclass(frozen=True)
class RequestId:
    """Which question this is."""

    run: str
    session: int
    round: int
    request: int
    client: int

    @classmethod
    def read(cls, header: Header) -> "RequestId":
        """The request id of a header.

        Raises:
            BadReply: there is none, or it is none of ours; the run's name is used as a folder's.
        """
        match header.get("request_id"):
            case {"run": str(run), **numbers} if _RUN.fullmatch(run):
                found = [numbers.get(name) for name in ("session", "round", "request", "client")]
                if all(type(n) is int and n >= 0 for n in found):
                    return cls(run, *found)  # type: ignore[arg-type]
        raise BadReply(f"carries no request id that can be read: {str(header.get('request_id'))[:120]}")

    @property
    def place(self) -> tuple[int, int]:
        """Where in the run: (round, ask)."""
        return self.round, self.request

    def header(self, **more: Any) -> Header:
        """A header with this request id."""
        return {"request_id": asdict(self), **more}


@dataclass(frozen=True)
class Facts:
    """What the server tells every client about the federation, so that all build the same model.

    Attributes:
        shapes: of a sample, by modality, in the federation's order.
        num_classes: classes of the label.
        frozen: digest of the model's frozen parameters, which every client loads or draws by itself.
    """

    shapes: dict[str, tuple[int, ...]]
    num_classes: int
    frozen: str = ""

    @classmethod
    def read(cls, header: Header) -> "Facts":
        """The facts of a header.

        Raises:
            BadReply: there are none that can be read.
        """
        match header.get("facts"):
            case {"shapes": dict(shapes), "num_classes": int(num_classes), "frozen": str(frozen)} if num_classes > 0:
                if all(type(n) is int and n > 0 for shape in shapes.values() for n in shape):
                    return cls({str(name): tuple(shape) for name, shape in shapes.items()}, num_classes, frozen)
        raise BadReply("carries no facts about the federation that can be read")


@dataclass(frozen=True)
class Enrolment:
    """What a client tells about itself when it enrols.

    Attributes:
        client: its number, from 0.
        rows: training rows.
        modalities: what it owns.
        silo: its silo, or None.
        tested: whether it has test rows of its own.
        shapes: of its samples.
        num_classes: its largest label and one more.
    """

    client: int
    rows: int
    modalities: tuple[str, ...]
    silo: int | None
    tested: bool
    shapes: dict[str, tuple[int, ...]]
    num_classes: int

    @classmethod
    def read(cls, header: Header) -> "Enrolment":
        """An enrolment, every part of it checked.

        Raises:
            BadReply: it is none, or a number in it is out of range.
        """
        try:
            found = _ENROLMENT.validate_python({name: header.get(name) for name in _FIELDS}, strict=False)
        except ValidationError as error:
            raise BadReply(f"enrolled with something that cannot be read: {error.errors()[0]['msg']}") from None
        sizes = [n for shape in found.shapes.values() for n in shape]
        numbers = (found.client < MAX_CLIENTS, 0 <= found.rows < MAX_ROWS, 0 < found.num_classes < MAX_CLIENTS)
        if found.client < 0 or not all(numbers) or not all(0 < n < MAX_ROWS for n in sizes):
            raise BadReply(f"enrolled with a number out of range: {str(header)[:200]}")
        if set(found.modalities) != set(found.shapes):
            raise BadReply("enrolled with modalities that have no shape")
        return found

    def header(self) -> Header:
        """As it is sent."""
        return {"verdict": ENROLLED, **asdict(self)}


_ENROLMENT = TypeAdapter(Enrolment)
_FIELDS = tuple(field.name for field in fields(Enrolment))


class Transport(Protocol):
    """Carries packets to clients in other processes, and their answers back."""

    def exchange(self, packets: dict[int, Packet], seconds: float) -> dict[int, Packet | str]:
        """Answers by client, or why there is none, for as many as answered in time."""
        ...


def request_packet(request_id: RequestId, request: Request, facts: Facts, content: Packet, **more: Any) -> Packet:
    """The packet of an ask to one client.

    Args:
        request_id: which question.
        ask: the question.
        facts: about the federation.
        content: the message, encoded.
        more: `kept`, the newest round that the server will never ask again, so that older local states may be
            forgotten; `modalities`, which the server believes the client has.
    """
    about = {"task": request.name, "seed": request.seed, "rounds": request.rounds, "turn": request.turn}
    header = request_id.header(want=ASK, facts=asdict(facts), **about, **more)
    return Packet(header | content.header, content.body)


def reason(verdict: str, request_id: RequestId | None, text: str) -> Packet:
    """A client's answer that is no reply: `refused` or `failed`, and why."""
    header = {} if request_id is None else request_id.header()
    return Packet(header | {"verdict": verdict, "reason": text[:MAX_REASON]})
