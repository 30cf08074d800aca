"""The headers of packets between a server and clients in other processes.

Every request has an id, which consists of run, session, round, number of the request, and client. The client repeats
the id in its reply. So the server can distinguish the expected reply from a late, duplicated or replayed reply. A
*session* is the time from a start of the server to its end. A resumed server begins a new session and may repeat
requests that it sent before it died. The client then repeats the work from the local state that it had before the
repeated request, and the reply is the same bit for bit.

Enrolments and requests carry the versions of polyfed and of the wire format. Both sides refuse other versions.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from polyfed.core.errors import BadReply
from polyfed.core.request import HELD_OUT, Request
from polyfed.data.column_fitting import Told
from polyfed.data.column_rules import MOST_WORDS
from polyfed.federation.wire.wire_format import NAME, WIRE_FORMAT, Header, Packet

ENROL, ASK, PART, SIGN = "enrol", "ask", "part", "sign"
"""The types of packets that a server sends: a request to enrol, to run a task, to run a part at an edge, or to sign the
ledger of a run."""

ENROLLED, REPLY, REFUSED, FAILED, SIGNED = "enrolled", "reply", "refused", "failed", "signed"
"""The verdicts in a client's answer: `refused` if its policy forbids the reply, `failed` for every other error."""

MAX_REASON = 2000
"""Largest length of a reason. Longer reasons are cut to this length, which suits one line of a log (inferred)."""

MAX_CLIENTS, MAX_ROWS, MAX_SAMPLE, MAX_AXES, MAX_MODALITIES = 10**6, 2**40, 2**24, 8, 1000
"""Upper bounds in an enrolment: client number, rows, numbers in one sample, axes of a sample. They are far above any
deployment of today (inferred), and limit the memory that a forged enrolment can make the server allocate."""

LARGEST_NUMBER = 2**63
"""Every number of a request id is below this bound. A device writes these numbers to files on its disk, and larger ones
could make such a file unreadable. Sessions are milliseconds since 1970, so real numbers are far smaller."""

MAX_WORD = 1000
"""Largest number of characters of a word of a column (inferred)."""

RUN_NAME = re.compile(r"[A-Za-z0-9_\-]{1,100}")
"""Pattern of the name of a run. A device makes a folder of this name."""

_SEAL = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RequestId:
    """Identifies one request to one client."""

    run: str
    session: int
    round: int
    request: int
    client: int

    @classmethod
    def read(cls, header: Header) -> "RequestId":
        """Read the request id of a header.

        Raises:
            BadReply: the id is missing, or a part of it is malformed. The run's name, for example, may hold only
                letters, digits, `-` and `_`, because a folder gets this name.
        """
        match header.get("request_id"):
            case {"run": str(run), **numbers} if RUN_NAME.fullmatch(run):
                result = [numbers.get(name) for name in ("session", "round", "request", "client")]
                if all(type(n) is int and 0 <= n < LARGEST_NUMBER for n in result):
                    return cls(run, *result)  # type: ignore[arg-type]
        raise BadReply(f"carries no request id that can be read: {str(header.get('request_id'))[:120]}")

    @property
    def place(self) -> tuple[int, int]:
        """The position in the run: (round, number of the request in the round)."""
        return self.round, self.request

    def header(self, **more: Any) -> Header:
        """Return a header with this request id and the entries of `more`."""
        return {"request_id": asdict(self), **more}


@dataclass(frozen=True)
class Facts:
    """Facts about the federation that the server sends to every client, so that all clients build the same model.

    Attributes:
        shapes: shape of a sample by modality, in the federation's order.
        num_classes: number of classes, or number of targets if the objective has no classes.
        frozen: digest of the model's frozen parameters and constant buffers. Every client makes these locally.
        standardise: the modalities that every device standardises with the statistics of its own rows.
        columns: modality -> its columns in the table, after the fit, as `Feature.as_table` gives them. Only modalities
            with rules in [data.columns] are in it.
    """

    shapes: dict[str, tuple[int, ...]]
    num_classes: int
    frozen: str = ""
    standardise: tuple[str, ...] = ()
    columns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, header: Header) -> "Facts":
        """Read the facts of a header.

        Raises:
            BadReply: the facts are missing, malformed or out of range.
        """
        match header.get("facts"):
            case {
                "shapes": dict(shapes),
                "num_classes": int(num_classes),
                "frozen": str(frozen),
                "standardise": list() | tuple() as scaled,
                "columns": dict(columns),
            } if 0 < num_classes < MAX_CLIENTS and len(shapes) <= MAX_MODALITIES:
                whole = all(isinstance(shape, list | tuple) for shape in shapes.values())
                sized = whole and all(_is_sample(tuple(shape)) for shape in shapes.values())
                if sized and all(isinstance(name, str) for name in scaled):
                    named = {str(name): tuple(shape) for name, shape in shapes.items()}
                    return cls(named, num_classes, frozen, tuple(scaled), columns)
        raise BadReply("carries no facts about the federation that can be read")


@dataclass(frozen=True)
class Enrolment:
    """The facts that a client reports about itself when it enrols.

    Attributes:
        client: the client's number, from 0.
        rows: number of training rows.
        modalities: the modalities of the client.
        silo: number of the client's silo, or None.
        tested: whether the client has test rows of its own.
        validated: whether the client has validation rows of its own.
        shapes: shape of a sample by modality.
        num_classes: the client's largest label plus one, or the number of targets of a row.
        classes: SHA-256 of the names of the classes, in order, or "" if the client lists none; see `digest_of_names`.
        uneven: the modalities whose features differ in size there, if [data] standardise is "uneven".
        columns: modality -> column -> what the client tells about a column of its table, if [data.columns] is fitted.
            The shape of such a modality is the number of its columns.
    """

    client: int
    rows: int
    modalities: tuple[str, ...]
    silo: int | None
    tested: bool
    shapes: dict[str, tuple[int, ...]]
    num_classes: int
    validated: bool = False
    classes: str = ""
    uneven: tuple[str, ...] = ()
    columns: dict[str, dict[str, Told]] = field(default_factory=dict)

    @classmethod
    def read(cls, header: Header) -> "Enrolment":
        """Read an enrolment and check every part of it.

        Raises:
            BadReply: the client runs another version, or a part is missing, malformed or out of range.
        """
        check_versions(header, "the server")
        try:
            result = _ENROLMENT.validate_python({name: header.get(name) for name in _FIELDS}, strict=False)
        except ValidationError as error:
            raise BadReply(f"enrolled with something that cannot be read: {error.errors()[0]['msg']}") from None
        result._check_numbers()
        if not result.modalities or set(result.modalities) != set(result.shapes):
            raise BadReply("enrolled without modalities, or with modalities that have no shape")
        if result.classes and not _SEAL.fullmatch(result.classes):
            raise BadReply("enrolled with a digest of class names that cannot be read")
        if not set(result.uneven) <= set(result.modalities):
            raise BadReply("enrolled with uneven features of a modality that it does not have")
        result._check_columns()
        if strange := [name for name in result.modalities if not NAME.fullmatch(name)]:
            raise BadReply(f"enrolled with a modality whose name cannot be used: {strange[0]!r:.80}")
        return result

    def _check_numbers(self) -> None:
        ranges = (
            0 <= self.client < MAX_CLIENTS,
            0 <= self.rows < MAX_ROWS,
            0 < self.num_classes < MAX_CLIENTS,
            self.silo is None or 0 <= self.silo < MAX_CLIENTS,
            len(self.shapes) <= MAX_MODALITIES,
            all(map(_is_sample, self.shapes.values())),
        )
        if not all(ranges):
            raise BadReply(f"enrolled with a number out of range: {asdict(self)!s:.200}")

    def _check_columns(self) -> None:
        told = [one for own in self.columns.values() for one in own.values()]
        fits = set(self.columns) <= set(self.modalities) and all(
            len(one.words) <= MOST_WORDS
            and all(len(word) <= MAX_WORD for word in one.words)
            and 0 <= one.count <= self.rows
            and math.isfinite(one.total)
            for one in told
        )
        if not fits or any(one.words and one.count for one in told):
            raise BadReply("enrolled with statistics of columns that cannot be read")

    def header(self) -> Header:
        """Return the header in which the enrolment is sent."""
        return {"verdict": ENROLLED, **versions(), **asdict(self)}


@dataclass(frozen=True)
class SiloEnrolment:
    """What the edge of a silo tells when it enrols.

    Attributes:
        silo: number of its silo.
        devices: what each of its devices has told the edge.
    """

    silo: int
    devices: tuple[Enrolment, ...]

    @classmethod
    def read(cls, header: Header) -> "SiloEnrolment":
        """Read what an edge tells, and check every part of it.

        Raises:
            BadReply: a part is malformed, a device is of another silo, or two have one number.
        """
        silo, devices = header.get("client"), header.get("devices")
        if type(silo) is not int or not 0 <= silo < MAX_CLIENTS or not isinstance(devices, list) or not devices:
            raise BadReply("is no edge of a silo; [deployment] relay = 'edge' takes edges only")
        result = tuple(Enrolment.read(one if isinstance(one, dict) else {}) for one in devices)
        if any(one.silo != silo for one in result):
            raise BadReply(f"is the edge of silo {silo}, and enrolled a device of another silo")
        if len({one.client for one in result}) < len(result):
            raise BadReply(f"is the edge of silo {silo}, and enrolled two devices with one number")
        return cls(silo, result)

    def header(self) -> Header:
        """Return the header in which an edge enrols."""
        devices = [one.header() for one in self.devices]
        return {"verdict": ENROLLED, **versions(), "client": self.silo, "devices": devices}


def _is_sample(shape: tuple[Any, ...]) -> bool:
    """Return whether this can be the shape of a sample. Both sides check it before they build a model for it."""
    sized = 0 < len(shape) <= MAX_AXES and all(type(n) is int and n > 0 for n in shape)
    return sized and math.prod(shape) <= MAX_SAMPLE


def digest_of_names(names: Sequence[str] | None) -> str:
    """Return the SHA-256 of a list of class names, or "" without a list. It reveals names to whoever can guess them."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest() if names is not None else ""


_ENROLMENT = TypeAdapter(Enrolment)
_FIELDS = tuple(field.name for field in fields(Enrolment))


def versions() -> Header:
    """Return the versions that every enrolment and every request carries."""
    return {"polyfed": _version(), "wire": WIRE_FORMAT}


@cache
def _version() -> str:
    return version("polyfed")


def check_versions(header: Mapping[str, Any], here: str) -> None:
    """Refuse a packet from another version, because both sides must build the same model and run the same tasks.

    Args:
        header: header of the packet.
        here: the name of the side that reads the packet, for the error message. Example: "the server".

    Raises:
        BadReply: the versions differ, or the header has no versions.
    """
    theirs = {name: header.get(name) for name in versions()}
    if theirs != versions():
        shown = (
            f"polyfed {found['polyfed']!s:.40}, wire format {found['wire']!s:.10}" for found in (theirs, versions())
        )
        raise BadReply("comes from {}, {here} has {}; install the same version on both".format(*shown, here=here))


def hello(rounds_left: int = 1, run: str = "") -> Packet:
    """Return the packet that asks a node to enrol.

    Args:
        rounds_left: in at most this number of rounds, the run may still ask the node. A device with a privacy budget
            refuses to enrol if its budget does not cover these rounds. 1 if the number is not known.
        run: the name of the run if it goes on. A device then knows which of its replies it can send again.
    """
    return Packet({"want": ENROL, "rounds_left": rounds_left, "run": run, **versions()})


@dataclass(frozen=True)
class Patience:
    """How long a transport waits for the replies to one request.

    Attributes:
        seconds: the deadline.
        enough: stop as soon as this number of clients have replied.
        least: while fewer clients than this have replied, also wait for clients that missed earlier deadlines.
        away_seconds: how long the transport waits for a client whose node is offline, over all requests.
    """

    seconds: float
    enough: int
    least: int = 1
    away_seconds: float = math.inf


class Transport(Protocol):
    """Carries packets to clients in other processes, and their replies back.

    Attributes:
        discarded: client -> the number of its replies that arrived after their request had been closed.
    """

    discarded: Counter[int]

    def taken_measurements(self) -> list[tuple[int, Any, bool]]:
        """Return what was measured since the last call: client, `polyfed.transport.carried.Carried`, was it closed."""
        ...

    @property
    def working(self) -> Collection[int]:
        """The clients that have got a packet by `gather` and have not answered."""
        ...

    def gather(
        self,
        packets: dict[int, Packet],
        patience: Patience,
        interval_s: float | None,
        sent: Callable[[Collection[int]], None],
    ) -> dict[int, Packet | str]:
        """Send a packet to each client, and return what has come from them and from those that are still working.

        Args:
            packets: the packets, by client; of clients that are not working.
            patience: how many replies to wait for, and for how long for each client from when it was asked.
            interval_s: `patience.least` replies are enough after so many seconds. None: never.
            sent: called once with the clients whose packets have left.

        Raises:
            TransportError: the connection failed permanently.
        """
        ...

    def exchange(
        self, packets: dict[int, Packet], patience: Patience, sent: Callable[[Collection[int]], None]
    ) -> dict[int, Packet | str]:
        """Send a packet to each client, and return each client's answer or the reason why there is no answer.

        Args:
            packets: the packets, by client.
            patience: how long to wait.
            sent: called once with the clients whose packets have left.

        Raises:
            TransportError: the connection failed permanently.
        """
        ...


def request_packet(request_id: RequestId, request: Request, facts: Facts, content: Packet, **more: Any) -> Packet:
    """Return the packet of a request to one client.

    Args:
        request_id: identifies the request.
        request: the task and its place in the run.
        facts: facts about the federation.
        content: the encoded message.
        more: further entries of the header. `kept` is a round number: the server will never repeat this round or an
            earlier one, so clients may delete older local states. `modalities` are the client's modalities according to
            the server.
    """
    about: Header = {"task": request.name, "seed": request.seed, "rounds": request.rounds, "turn": request.turn}
    if request.held_out != HELD_OUT[0]:
        about["held_out"] = request.held_out
    header = request_id.header(want=ASK, facts=asdict(facts), **versions(), **about, **more)
    return Packet(header | content.header, content.body)


MOST_UNANSWERED = 10_000
"""Most requests that a server may name as unanswered when it asks a device to sign its ledger (inferred)."""


def sign_packet(run: str, client: int, unanswered: Sequence[tuple[int, ...]]) -> Packet:
    """The packet that asks a device or an edge to sign its ledger of a run; see `polyfed.privacy.egress.audit_log`.

    Args:
        client: the client, or the silo of an edge.
        unanswered: the requests that are left out; see `polyfed.privacy.egress.audit_log.receipts.LeftOut`.
    """
    places = [list(place) for place in unanswered[:MOST_UNANSWERED]]
    return Packet({"want": SIGN, "run": run, "client": client, "unanswered": places, **versions()})


def to_sign(header: Mapping[str, Any]) -> tuple[str, int, list[tuple[int, ...]]]:
    """Return run, client and unanswered requests of a packet of `sign_packet`.

    Raises:
        BadReply: a part is missing or malformed.
    """
    match header:
        case {"run": str(run), "client": int(client), "unanswered": list(places)} if (
            RUN_NAME.fullmatch(run) and type(client) is int and len(places) <= MOST_UNANSWERED
        ):
            if all(isinstance(one, list) and list(map(type, one)) in ([int] * 2, [int] * 3) for one in places):
                return run, client, [tuple(one) for one in places]
    raise BadReply("does not say which ledger to sign")


def reason(verdict: str, request_id: RequestId | None, text: str) -> Packet:
    """Return the packet that is sent instead of a reply. It holds the verdict `refused` or `failed`, and the reason."""
    header = {} if request_id is None else request_id.header()
    return Packet(header | {"verdict": verdict, "reason": one_line(text)})


def seal_of(header: Mapping[str, Any]) -> str:
    """Return the hash of the audit log's seal from a reply's header, or "" if the header has no valid hash."""
    seal = header.get("seal")
    return seal if isinstance(seal, str) and _SEAL.fullmatch(seal) else ""


def one_line(text: object) -> str:
    """Turn text, for example from another machine, into one printable line of at most `MAX_REASON` characters.

    Control characters could forge lines of a log or control a terminal, so each becomes a space.

    >>> one_line("late\\npolyfed: round 2")
    'late polyfed: round 2'
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:MAX_REASON])
