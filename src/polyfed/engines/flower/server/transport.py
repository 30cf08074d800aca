"""A transport over a Flower grid: it enrols nodes, sends requests and waits for replies."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import http_grid

from polyfed.core.errors import TransportError
from polyfed.engines.flower.codec import packet_of, records
from polyfed.engines.flower.device.fetch_limit import TOO_LARGE, at_most
from polyfed.engines.flower.server.device_keys import device_of
from polyfed.engines.flower.server.server_process import when_lost
from polyfed.engines.protocol import ENROLLED, FAILED, REPLY, Patience, hello, one_line
from polyfed.federation.wire_format import Packet

FIRST_WAIT, LONGEST_WAIT = 0.02, 0.5
"""Shortest and longest pause in seconds between two queries for replies. The pause is a tenth of the time since the
start of the wait. Flower's own grids pause for 0.1 seconds (simulation) and 3 seconds (SuperLink)."""

LOOK_EVERY = 1.0
"""Seconds between two queries for nodes that are new, are online again, or are offline."""

LONGEST_SKIP = 64
"""A client that has missed n deadlines in a row gets the full deadline again after 2**n requests, but at the latest
after this number of requests."""

TTL = 2.0
"""Time for which Flower keeps a message, as a multiple of the deadline. So late replies arrive, and polyfed counts
them."""

LARGEST_ENROLMENT = 2**20
"""Largest size in bytes of a node's answer to the request to enrol."""

FINAL = (
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.MOD_FAILED_PRECONDITION,
    ErrorCode.INVALID_FAB,
)
"""Flower's errors that would occur again for the same request. After other errors, polyfed sends the request again."""

GRACE = 1.1
"""For a client that missed its last deadline, the server waits this multiple of the time that the others took."""


@dataclass
class OpenRequest:
    """One request to several clients while the server waits for their replies.

    Attributes:
        packets: the packets, by client.
        patience: how long to wait.
        waiting: id of each unanswered message -> client.
        answers: client -> its answer, or the reason why there is no answer.
        again: the clients to which the request must be sent again, because it was lost when the client's node went
            offline. Client -> the reason that Flower gave for the loss.
        away: client -> the time at which its node went offline.
        settled: the time at which the server stopped waiting for expected clients; since then, it waits only for other
            clients. A client is expected if its node is online and if it did not miss an earlier deadline. Infinity
            while the server still waits for an expected client.
    """

    packets: Mapping[int, Packet]
    patience: Patience
    started: float
    waiting: dict[str, int] = field(default_factory=dict)
    answers: dict[int, Packet | str] = field(default_factory=dict)
    again: dict[int, str] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)
    settled: float = math.inf

    @property
    def end(self) -> float:
        """The deadline on the monotonic clock."""
        return self.started + self.patience.seconds

    @property
    def grace(self) -> float:
        """The time until which the server waits for clients that missed an earlier deadline.

        While the server still waits for other clients too, the value is `math.inf`: this wait has no end yet.
        """
        return self.started + GRACE * (self.settled - self.started)

    @property
    def replied(self) -> int:
        """The number of clients that have replied. Refusals and failures do not count."""
        found = (answer for answer in self.answers.values() if isinstance(answer, Packet))
        return sum(answer.header.get("verdict") == REPLY for answer in found)

    def pending(self) -> list[int]:
        """Return the clients that have not answered."""
        return [client for client in self.packets if client not in self.answers]

    def gone(self, client: int, now: float) -> bool:
        """Return whether the client's node has been offline for longer than `patience.away_seconds`."""
        return client in self.away and now - self.away[client] >= self.patience.away_seconds


@dataclass
class GridTransport:
    """A `Transport` over a Flower grid.

    Attributes:
        grid: Flower's grid.
        stop: an event that another thread can set to end a wait with KeyboardInterrupt.
        node_of: the node from which each client enrolled.
        vet: `vet(packet, device)` returns the reason to refuse an enrolment, or an empty text to accept the enrolment.
            `device` is the fingerprint of the device's key.
        limit: size in bytes of the largest reply that the transport fetches.
        rounds_left: number of rounds that the run still has, which `hello` tells the nodes; 1 if it is not known.
        run: the name of the run if it goes on, which `hello` tells the nodes; empty if the run is new.
        flower_run: the id of the Flower run.
        discarded: client -> the number of its replies that arrived after their request had been closed.
    """

    grid: Grid
    stop: Event = field(default_factory=Event)
    node_of: dict[int, int] = field(default_factory=dict)
    vet: Callable[[Packet, str], str] = lambda packet, device: ""
    limit: int = 2**29
    rounds_left: int = 1
    run: str = ""
    flower_run: str = "0"
    discarded: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._asked: set[int] = set()  # nodes that have been asked to enrol and have not gone offline since
        self._enrolling: dict[str, int] = {}  # id of each unanswered request to enrol -> its node
        self._answered: set[int] = set()  # nodes that have answered a request to enrol
        self._lost: dict[int, str] = {}  # nodes whose last request to enrol was lost, each with Flower's reason
        self._misses: Counter[int] = Counter()  # number of deadlines in a row that a client missed
        self._skip: Counter[int] = Counter()  # number of requests until a late client gets the full deadline again
        self._overdue: dict[str, tuple[int, float]] = {}  # closed requests: client, and when Flower deletes the message

    when_lost = staticmethod(when_lost)

    def enrol(
        self, wanted: int, seconds: float, heard: Callable[[Sequence[Packet]], bool] = lambda answers: False
    ) -> list[Packet]:
        """Ask nodes to enrol. Stop when `wanted` clients have enrolled, when `heard` returns True, or after `seconds`.

        A node that refuses or fails does not count towards `wanted`. A node that goes offline before it has answered,
        or whose request Flower reports as lost, is asked again when it is online.

        Args:
            wanted: number of clients.
            seconds: how long to wait.
            heard: called with the answers so far, after every query. Returns whether the wait can end.

        Returns:
            All answers. An answer that is not an enrolment has the verdict `refused` or `failed` and a reason.
        """
        started = time.monotonic()
        end = started + seconds
        answers: list[Packet] = []
        while _enrolled(answers) < wanted and time.monotonic() < end:
            self._greet(seconds)
            found = self._greeted()
            answers += found
            if heard(answers):
                break
            if not found:
                self._pause(started, end)
        return answers + [Packet({"verdict": FAILED, "reason": why}) for why in self._lost.values()]

    def not_taken(self) -> list[str]:
        """Return the names of the devices that are online, but whose enrolment nobody waited for."""
        others = [node for node in online(self.grid) if node not in self._answered]
        return sorted(device_of(self.grid, node) for node in others)

    def exchange(
        self,
        packets: dict[int, Packet],
        patience: Patience,
        sent: Callable[[Collection[int]], None] = lambda clients: None,
    ) -> dict[int, Packet | str]:
        """Send a packet to each client and wait for the answers; see `Transport.exchange`.

        If a request is lost because a node went offline, the transport sends the request again when the node is back. A
        repeated task gives the same reply (`polyfed.engines.protocol`). The wait ends when all clients have answered,
        when `patience.enough` clients have replied, or at the deadline.

        After a client has missed a deadline, the transport waits less for this client in its next requests: only
        `open_request.GRACE` times as long as the other clients took. The number of such requests doubles with every
        further miss, up to `LONGEST_SKIP`. The wait for a client whose node is offline takes at most
        `patience.away_seconds`.
        """
        now = time.monotonic()
        run = OpenRequest(packets, patience, now)
        self._skip -= Counter(dict.fromkeys(packets, 1))
        absent = [client for client in packets if client not in self.node_of]
        run.answers |= dict.fromkeys(absent, "it has not enrolled, or was left out")
        self._send(run, packets, patience.seconds)
        sent(list(run.waiting.values()))
        looked = now
        while not (why := self._closed(run)):
            came = self._pull(run)
            if time.monotonic() - looked > LOOK_EVERY:
                self._look(run)
                looked = time.monotonic()
            if not came:
                self._pause(run.started, min(run.end, run.grace))
        return self._settled(run, why)

    def _closed(self, run: OpenRequest) -> str:
        """Return why the server no longer waits for answers, or "" if it still waits.

        For a client that has not answered, this text becomes the reason why its answer is missing.
        """
        now, pending, count = time.monotonic(), run.pending(), len(run.packets)
        if not pending:
            return "nobody is missing"
        if now >= run.end:
            return f"late: no answer within {run.patience.seconds:g} seconds"
        if run.replied >= run.patience.enough:
            return f"late: the request was closed when {run.replied} of {count} clients had replied"
        if any(not self._skip[client] and not run.gone(client, now) for client in pending):
            run.settled = math.inf
            return ""
        if run.replied < min(run.patience.least, count):
            return "late: its node is offline" if all(run.gone(client, now) for client in pending) else ""
        run.settled = min(run.settled, now)
        if now < run.grace:
            return ""
        return f"late: no answer to this request in {now - run.started:.3g} seconds, nor to an earlier one in time"

    def _settled(self, run: OpenRequest, why: str) -> dict[int, Packet | str]:
        """Return the answer of each client, or the reason why it is missing. Also count the missed deadlines."""
        now = time.monotonic()
        kept_until = now + TTL * run.patience.seconds
        self._overdue |= {identity: (client, kept_until) for identity, client in run.waiting.items()}
        for client in run.pending():
            run.answers[client] = f"late: {run.again[client]}; not back in time" if client in run.again else why
            if run.gone(client, now):
                away = now - run.away[client]
                run.answers[client] = f"late: its node has been offline for {away:.0f} seconds"
            elif run.replied >= run.patience.enough:
                continue  # the client did not have the full deadline, so it has not missed the deadline
            if not self._skip[client]:
                self._misses[client] += 1
                self._skip[client] = min(2 ** self._misses[client], LONGEST_SKIP) + 1
        return {client: run.answers[client] for client in run.packets}

    def _look(self, run: OpenRequest) -> None:
        """Record which nodes are offline, and send lost requests again to nodes that are online again."""
        left = run.end - time.monotonic()
        if run.again:
            self._send(run, self._reachable(run.packets, run.again, run.patience.seconds), left)
        now, there = time.monotonic(), set(online(self.grid))
        absent = [client for client in run.pending() if self.node_of.get(client) not in there]
        run.away = {client: run.away.get(client, now) for client in absent}

    def _send(self, run: OpenRequest, packets: Mapping[int, Packet], seconds: float) -> None:
        """Send packets. If the SuperLink does not accept a message, `_look` sends it again."""
        clients = [client for client in packets if client in self.node_of]
        messages = [
            Message(records(packets[client]), self.node_of[client], "train", ttl=max(TTL * seconds, 1.0))
            for client in clients
        ]
        for identity, client in zip(push(self.grid, messages), clients, strict=True):
            if identity:
                run.waiting[identity] = client
            else:
                run.again[client] = "the SuperLink did not accept the request"

    def _pull(self, run: OpenRequest) -> bool:
        """Fetch the replies that have arrived. The transport accepts only one reply to each message."""
        now = time.monotonic()
        self._overdue = {identity: entry for identity, entry in self._overdue.items() if entry[1] > now}
        wanted = [*run.waiting, *self._overdue]
        came = pull(self.grid, wanted, self.limit)
        for message in came:
            identity = message.metadata.reply_to_message_id
            late, _ = self._overdue.pop(identity, (None, 0.0))
            if late is not None and not message.has_error():
                self.discarded[late] += 1
            client = run.waiting.pop(identity, None)
            if client is None or client in run.answers:
                continue
            if message.has_error() and is_too_large(message.error.reason):
                run.answers[client] = f"is too large: more than {self.limit} bytes"
                continue
            if message.has_error() and message.error.code not in FINAL:
                run.again[client] = f"Flower says: {one_line(message.error.reason)}"
                continue
            said = message.has_error()
            run.answers[client] = (
                f"Flower says: {one_line(message.error.reason)}" if said else packet_of(message.content)
            )
            self._misses.pop(client, None)
            self._skip.pop(client, None)
        return bool(came)

    def _reachable(self, packets: Mapping[int, Packet], again: dict[int, str], seconds: float) -> dict[int, Packet]:
        """Return the packets that can be sent again now. A client may have enrolled again from another node."""
        self._greet(seconds)
        self._greeted()
        there = set(online(self.grid))
        back = [client for client in again if self.node_of[client] in there]
        for client in back:
            del again[client]
        return {client: packets[client] for client in back}

    def _greet(self, seconds: float) -> None:
        """Ask every node to enrol that is new, or that has gone offline or lost its request before it answered."""
        there = online(self.grid)
        self._asked -= set(self._enrolling.values()) - set(there)  # its process may have died with the request
        new = [node for node in there if node not in self._asked]
        if not new:
            return
        self._enrolling = {identity: node for identity, node in self._enrolling.items() if node not in set(new)}
        asking = records(hello(self.rounds_left, self.run))
        messages = [Message(asking, node, "query", ttl=max(seconds, 1.0)) for node in new]
        sent = {identity: node for identity, node in zip(push(self.grid, messages), new, strict=True) if identity}
        self._enrolling |= sent
        self._asked |= set(sent.values())

    def _greeted(self) -> list[Packet]:
        """Return the new answers to requests to enrol. A refused enrolment gets the verdict `failed`."""
        answers = []
        for message in pull(self.grid, list(self._enrolling), LARGEST_ENROLMENT):
            asked = self._enrolling.pop(message.metadata.reply_to_message_id)
            if message.has_error() and message.error.code not in FINAL and not is_too_large(message.error.reason):
                self._lost[asked] = f"{device_of(self.grid, asked)}: Flower says: {one_line(message.error.reason)}"
                self._asked.discard(asked)
                continue
            self._lost.pop(asked, None)
            self._answered.add(asked)
            packet = _content(message)
            if packet.header.get("verdict") == ENROLLED:
                node = message.metadata.src_node_id
                if flaw := self.vet(packet, device_of(self.grid, node)) or self._place(
                    packet.header.get("client"), node
                ):
                    packet = Packet({"verdict": FAILED, "reason": one_line(flaw)})
            answers.append(packet)
        return answers

    def _place(self, client: Any, node: int) -> str:
        """Record the node of a client. Return "" if this succeeds, and otherwise the reason why it does not.

        It does not succeed if the client number is invalid or belongs to another node that is online.
        """
        if type(client) is not int or client < 0:
            return "it enrolled without a client number"
        if self.node_of.get(client, node) != node and self.node_of[client] in set(online(self.grid)):
            return f"client {client} enrolled twice: another node that is online has its number"
        self.node_of[client] = node
        return ""

    def _pause(self, started: float, end: float) -> None:
        now = time.monotonic()
        wait = min(LONGEST_WAIT, max(FIRST_WAIT, (now - started) / 10))
        if self.stop.wait(max(0.0, min(wait, end - now))):
            raise KeyboardInterrupt


def _enrolled(answers: Sequence[Packet]) -> int:
    return sum(answer.header.get("verdict") == ENROLLED for answer in answers)


def _content(message: Message) -> Packet:
    """Return a node's answer to the request to enrol."""
    if message.has_error():
        return Packet({"verdict": FAILED, "reason": f"Flower says: {one_line(message.error.reason)}"})
    packet = packet_of(message.content)
    return Packet({"verdict": FAILED, "reason": packet}) if isinstance(packet, str) else packet


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages and return their ids, with an empty text for each message that the SuperLink did not accept.

    Raises:
        TransportError: the SuperLink failed, or did not say which messages it accepted.
    """
    with _sentence("send messages"):
        sent = [identity or "" for identity in grid.push_messages(messages)] if messages else []
        if len(sent) != len(messages):
            raise OSError(f"the SuperLink returned {len(sent)} ids for {len(messages)} messages")
    return sent


def pull(grid: Grid, identities: Sequence[str], limit: int) -> list[Message]:
    """Of the replies to these messages, return those that have already arrived.

    For a reply that is too large, the result holds an error message (`is_too_large`). This function fetches at most
    about `limit` bytes of such a reply.

    Args:
        identities: the ids of the messages.
        limit: size of the largest reply, in bytes.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("fetch replies"), at_most(http_grid, limit):
        return list(grid.pull_messages(identities)) if identities else []


def online(grid: Grid) -> list[int]:
    """Return the ids of the nodes that are online.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("list the SuperNodes"):
        return list(grid.get_node_ids())


def is_too_large(reason: str | None) -> bool:
    """Return whether this reason of a Flower error means that a message was too large to fetch."""
    return reason is not None and TOO_LARGE in reason


@contextmanager
def _sentence(what: str) -> Iterator[None]:
    """Turn connection errors in this block into a `TransportError`. Flower has already tried the call repeatedly."""
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        raise TransportError(
            f"the server could not {what} ({type(error).__name__}: {error!s:.300}). The SuperLink's own log says why "
            "(a full disk, a locked database, a message that is too large); `polyfed submit` goes on"
        ) from error
