"""What every transport to clients in other processes does: it enrols nodes, sends requests and waits for replies.

A subclass of `PatientTransport` says how packets travel: through polyfed's own server (`polyfed.engines.queued`), or in
a simulation on Flower (`polyfed.engines.flower`).
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polyfed.core.errors import BadReply
from polyfed.engines.protocol import ENROLLED, FAILED, REFUSED, REPLY, Patience, RequestId, hello, one_line
from polyfed.federation.wire.wire_format import Packet
from polyfed.transport.carried import Carried

FIRST_WAIT, LONGEST_WAIT = 0.02, 0.5
"""Shortest and longest pause in seconds between two queries for replies. The pause is a tenth of the time since the
start of the wait."""

LOOK_EVERY = 1.0
"""Seconds between two queries for nodes that are new, are online again, or are offline."""

SECOND_LOOK = 5.0
"""Seconds that a client gets to come back whose node was gone when it was asked. They count only where others do not
suffice: too few have replied to a request, or a buffer waits for nobody else."""

LONGEST_SKIP = 64
"""A client that has missed n deadlines in a row gets the full deadline again after 2**n requests, but at the latest
after this number of requests."""

TTL = 2.0
"""Time for which a message is kept, as a multiple of the deadline. So late replies arrive, and polyfed counts them."""

LARGEST_ENROLMENT = 2**20
"""Largest size in bytes of a node's answer to the request to enrol."""

GRACE = 1.1
"""For a client that missed its last deadline, the server waits this multiple of the time that the others took."""

Node = Hashable
"""What a transport calls a node: the fingerprint of the device's key, or a number in a simulation on Flower."""


class Arrived(NamedTuple):
    """What came for a message that was sent.

    Attributes:
        identity: id of the message.
        node: the node that answered.
        packet: the answer, or the reason why there is none.
        failed: whether the transport failed, or the node could not answer. Such a message is not counted as late.
        lost: whether the message must be sent again, because its failure would not repeat itself.
        carried: what the transport has measured of the message and its answer, if it measures anything.
    """

    identity: str
    node: Node
    packet: Packet | str
    failed: bool = False
    lost: bool = False
    carried: Carried | None = None


@dataclass
class OpenRequest:
    """One request to several clients while the server waits for their replies.

    Attributes:
        packets: the packets, by client.
        patience: how long to wait.
        waiting: id of each unanswered message -> client.
        answers: client -> its answer, or the reason why there is no answer.
        again: the clients to which the request must be sent again, because it was lost when the client's node went
            offline. Client -> the reason for the loss.
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
        result = (answer for answer in self.answers.values() if isinstance(answer, Packet))
        return sum(answer.header.get("verdict") == REPLY for answer in result)

    def pending(self) -> list[int]:
        """Return the clients that have not answered."""
        return [client for client in self.packets if client not in self.answers]


@dataclass(kw_only=True)
class PatientTransport(ABC):
    """A `Transport` that knows how long to wait for whom. Subclasses send messages and fetch what came for them.

    Attributes:
        node_of: the node from which each client enrolled.
        vet: `vet(packet, device)` returns the reason to refuse an enrolment, or an empty text to accept the enrolment.
            `device` is the fingerprint of the device's key.
        joined: returns the client number of each device that joined with a token, by the fingerprint of its key.
        renewed: returns the present key of each device that has replaced its key, by the fingerprint of every old one.
        registered: returns the present keys of all devices that the server knows; none if it does not know.
        noted: called with the enrolments and refusals that have come: the events of an audit log.
        limit: size in bytes of the largest reply that the transport fetches.
        rounds_left: number of rounds that the run still has, which `hello` tells the nodes; 1 if it is not known.
        run: the name of the run if it goes on, which `hello` tells the nodes; empty if the run is new.
        identity: a name for this start of the server, under which its status is kept.
        discarded: client -> the number of its replies that arrived after their request had been closed.
        measured: what was measured of requests since `taken_measurements`: the client, the measurements, and whether
            the request had been closed before.
    """

    node_of: dict[int, Node] = field(default_factory=dict)
    vet: Callable[[Packet, str], str] = lambda packet, device: ""
    joined: Callable[[], Mapping[str, int]] = dict
    renewed: Callable[[], Mapping[str, str]] = dict
    registered: Callable[[], Collection[str]] = tuple
    noted: Callable[[Sequence[Mapping[str, Any]]], None] = lambda events: None
    limit: int = 2**29
    rounds_left: int = 1
    run: str = ""
    identity: str = "0"
    discarded: Counter[int] = field(default_factory=Counter)
    measured: list[tuple[int, Carried, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._asked: set[Node] = set()  # nodes that have been asked to enrol and have not gone offline since
        self._enrolling: dict[str, Node] = {}  # id of each unanswered request to enrol -> its node
        self._answered: set[Node] = set()  # nodes that have answered a request to enrol
        self._lost: dict[Node, str] = {}  # nodes whose last request to enrol was lost, each with the reason
        self._misses: Counter[int] = Counter()  # number of deadlines in a row that a client missed
        self._skip: Counter[int] = Counter()  # number of requests until a late client gets the full deadline again
        self._overdue: dict[str, tuple[int, float]] = {}  # closed requests: client, and when the message is deleted
        self._away: dict[int, float] = {}  # when each client whose node is offline was first seen to be away
        self._looked = -math.inf  # when `_look` last did so
        self._working = OpenRequest({}, Patience(math.inf, 1), 0.0)  # what `gather` has sent and nobody has answered
        self._since: dict[int, float] = {}  # when each of these clients was asked

    @abstractmethod
    def push(self, packets: Sequence[tuple[Node, Packet]], seconds: float, *, enrols: bool) -> list[str]:
        """Send packets to nodes and return their ids, with an empty text for each that was not accepted.

        Args:
            packets: node and packet of each message.
            seconds: how long the messages are kept.
            enrols: whether they ask the nodes to enrol.

        Raises:
            TransportError: the connection failed.
        """

    @abstractmethod
    def pull(self, identities: Sequence[str], limit: int) -> list[Arrived]:
        """Return what came for these messages. Of an answer above `limit` bytes, little more than these are fetched.

        Raises:
            TransportError: the connection failed.
        """

    @abstractmethod
    def online(self) -> list[Node]:
        """Return the nodes that are online.

        Raises:
            TransportError: the connection failed.
        """

    @abstractmethod
    def device_of(self, node: Node) -> str:
        """Return the name of a node's device, which is the fingerprint of its key if it has one."""

    @abstractmethod
    def rest(self, seconds: float) -> None:
        """Wait for so many seconds, or less if something comes.

        Raises:
            KeyboardInterrupt: another thread ended the wait.
        """

    def close(self, identities: Collection[str]) -> None:  # noqa: B027
        """Note that nobody waits for the answers to these messages any more."""

    def enrol(
        self, wanted: int, seconds: float, heard: Callable[[Sequence[Packet]], bool] = lambda answers: False
    ) -> list[Packet]:
        """Ask nodes to enrol. Stop when `wanted` clients have enrolled, when `heard` returns True, or after `seconds`.

        A node that refuses or fails does not count towards `wanted`, and is not asked again: when all registered
        devices have answered, and at least `wanted`, nobody else will come. A node that goes offline before it has
        answered, or whose request is reported as lost, is asked again when it is online.

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
            if heard(answers) or self._all_heard(wanted):
                break
            if not found:
                self._pause(started, end)
        return answers + [Packet({"verdict": FAILED, "reason": why}) for why in self._lost.values()]

    def _all_heard(self, wanted: int) -> bool:
        """Return whether all registered devices have answered, and as many as are wanted."""
        answered = {self.device_of(node) for node in self._answered}
        return len(answered) >= wanted and bool(known := {*self.registered()}) and known <= answered

    def not_taken(self) -> list[str]:
        """Return the names of the devices that are online, but whose enrolment nobody waited for."""
        return sorted(self.device_of(node) for node in self.online() if node not in self._answered)

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
        further miss, up to `LONGEST_SKIP`.

        A client whose node has been offline for `patience.away_seconds` is *gone*: nobody waits for it until its node
        is online again. This time goes on between requests, so that an absence costs it only once. If fewer than
        `patience.least` others reply, a client that was gone already gets `SECOND_LOOK` seconds.
        """
        now = time.monotonic()
        run = OpenRequest(packets, patience, now)
        self._skip -= Counter(dict.fromkeys(packets, 1))
        absent = [client for client in packets if client not in self.node_of]
        run.answers |= dict.fromkeys(absent, "it has not enrolled, or was left out")
        self._look(run)
        self._send(run, packets, patience.seconds)
        sent(list(run.waiting.values()))
        while not (why := self._closed(run)):
            came = self._pull(run)
            self._look(run)
            if not came:
                self._pause(run.started, min(run.end, run.grace))
        return self._settled(run, why)

    def taken_measurements(self) -> list[tuple[int, Carried, bool]]:
        """Return `measured`, and forget it."""
        taken, self.measured = self.measured, []
        return taken

    @property
    def working(self) -> Collection[int]:
        """The clients that have got a packet by `gather` and have not answered."""
        return self._since.keys()

    def gather(
        self,
        packets: dict[int, Packet],
        patience: Patience,
        interval_s: float | None = None,
        sent: Callable[[Collection[int]], None] = lambda clients: None,
    ) -> dict[int, Packet | str]:
        """Send packets, and return what has come when enough clients have replied; see `Transport.gather`.

        Nobody gives up the other requests: their replies are for a later call. A client that has been asked longer than
        `patience.seconds` ago, or whose node is offline for `patience.away_seconds`, is given up; if the node was so
        when the client was asked, after `SECOND_LOOK` seconds.
        """
        now, run = time.monotonic(), self._working
        run.patience, run.started, run.packets = patience, now, {**run.packets, **packets}
        self._since |= dict.fromkeys(packets, now)
        absent = [client for client in packets if client not in self.node_of]
        run.answers |= dict.fromkeys(absent, "it has not enrolled, or was left out")
        self._look(run)
        self._send(run, packets, patience.seconds)
        sent(packets.keys() & set(run.waiting.values()))
        end = math.inf if interval_s is None else now + interval_s
        while not self._full(run, end):
            came = self._pull(run)
            self._look(run)
            if not came:
                ends = [end, *(self._since[client] + patience.seconds for client in run.pending())]
                self._pause(run.started, min(one for one in ends if one > time.monotonic()))
        answers, run.answers = run.answers, {}
        run.packets = {client: packet for client, packet in run.packets.items() if client not in answers}
        self._since = {client: since for client, since in self._since.items() if client not in answers}
        return answers

    def _full(self, run: OpenRequest, end: float) -> bool:
        """Return whether a buffer is full, or nobody is left to wait for. Give up clients that have had their time."""
        now, patience = time.monotonic(), run.patience
        given_up = set[int]()
        for client in run.pending():
            if now >= self._since[client] + patience.seconds:
                run.answers[client] = f"late: no answer within {patience.seconds:g} seconds"
            elif self._is_gone(client, patience, now) and _looked_again(self._since[client], patience, now):
                run.answers[client] = f"late: its node has been offline for {now - self._away[client]:.0f} seconds"
            else:
                continue
            given_up.add(client)
            run.again.pop(client, None)
        if given_up:
            ended = {identity: client for identity, client in run.waiting.items() if client in given_up}
            kept_until = now + TTL * patience.seconds
            self._overdue |= {identity: (client, kept_until) for identity, client in ended.items()}
            run.waiting = {identity: client for identity, client in run.waiting.items() if identity not in ended}
            self.close(list(ended))
        enough = patience.least if now >= end else patience.enough
        return not run.pending() or run.replied >= enough

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
        there = [client for client in pending if not self._is_gone(client, run.patience, now)]
        if any(not self._skip[client] for client in there):
            run.settled = math.inf
            return ""
        too_few = run.replied < min(run.patience.least, count)
        if not there:
            looks = too_few and not _looked_again(run.started, run.patience, now)
            return "" if looks else "late: its node is offline"
        if too_few:
            return ""
        run.settled = min(run.settled, now)
        if now < run.grace:
            return ""
        return f"late: no answer to this request in {now - run.started:.3g} seconds, nor to an earlier one in time"

    def _settled(self, run: OpenRequest, why: str) -> dict[int, Packet | str]:
        """Return the answer of each client, or the reason why it is missing. Also count the missed deadlines."""
        now = time.monotonic()
        kept_until = now + TTL * run.patience.seconds
        self._overdue |= {identity: (client, kept_until) for identity, client in run.waiting.items()}
        self.close(list(run.waiting))
        for client in run.pending():
            run.answers[client] = f"late: {run.again[client]}; not back in time" if client in run.again else why
            if self._is_gone(client, run.patience, now):
                away = now - self._away[client]
                run.answers[client] = f"late: its node has been offline for {away:.0f} seconds"
                if self._is_gone(client, run.patience, run.started):
                    continue  # nobody waited for the client; when it is back, it gets the full deadline
            elif run.replied >= run.patience.enough:
                continue  # the client did not have the full deadline, so it has not missed the deadline
            if not self._skip[client]:
                self._misses[client] += 1
                self._skip[client] = min(2 ** self._misses[client], LONGEST_SKIP) + 1
        return {client: run.answers[client] for client in run.packets}

    def _look(self, run: OpenRequest) -> None:
        """Record who is away, and send lost requests again to nodes that are online again, each `LOOK_EVERY` seconds.

        It looks for all clients, not only for those of this request: one that comes back between two of its own
        requests and goes offline again has a new absence.
        """
        now = time.monotonic()
        if now - self._looked <= LOOK_EVERY:
            return
        if run.again:
            left = run.end - now
            self._send(run, self._reachable(run.packets, run.again, run.patience.seconds), left)
        there, self._looked = set(self.online()), time.monotonic()
        absent = [client for client, node in self.node_of.items() if node not in there]
        self._away = {client: self._away.get(client, self._looked) for client in absent}

    def _is_gone(self, client: int, patience: Patience, now: float) -> bool:
        """Return whether the client's node has been offline for `patience.away_seconds`."""
        return client in self._away and now - self._away[client] >= patience.away_seconds

    def _send(self, run: OpenRequest, packets: Mapping[int, Packet], seconds: float) -> None:
        """Send packets. If a message is not accepted, `_look` sends it again."""
        clients = [client for client in packets if client in self.node_of]
        messages = [(self.node_of[client], packets[client]) for client in clients]
        sent = self.push(messages, max(TTL * seconds, 1.0), enrols=False)
        for identity, client in zip(sent, clients, strict=True):
            if identity:
                run.waiting[identity] = client
            else:
                run.again[client] = "the request was not accepted"

    def _pull(self, run: OpenRequest) -> bool:
        """Fetch the replies that have arrived. The transport accepts only one reply to each message."""
        now = time.monotonic()
        self._overdue = {identity: entry for identity, entry in self._overdue.items() if entry[1] > now}
        wanted = [*run.waiting, *self._overdue]
        came = self.pull(wanted, self.limit)
        if events := [event for found in came if (event := self._refusal_in(found)) is not None]:
            self.noted(events)
        for found in came:
            late, _ = self._overdue.pop(found.identity, (None, 0.0))
            if late is not None and not found.failed:
                self.discarded[late] += 1
            client = run.waiting.pop(found.identity, None)
            if (whose := client if late is None else late) is not None:
                if not found.failed:
                    self._away.pop(whose, None)
                if found.carried is not None:
                    self.measured.append((whose, found.carried, late is not None))
            if client is None or client in run.answers:
                continue
            if found.lost:
                run.again[client] = str(found.packet)
                continue
            run.answers[client] = found.packet
            self._misses.pop(client, None)
            self._skip.pop(client, None)
        return bool(came)

    def _refusal_in(self, found: Arrived) -> dict[str, Any] | None:
        """Return the event of a request that a device has refused, or None if it has not."""
        if isinstance(found.packet, str) or found.packet.header.get("verdict") != REFUSED:
            return None
        told: dict[str, Any] = {"event": "refused", "device": self.device_of(found.node)}
        try:
            of = RequestId.read(found.packet.header)
            told |= {"client": of.client, "run": of.run, "round": of.round}
        except BadReply:  # the device did not read the request as one
            pass
        return told | {"why": one_line(found.packet.header.get("reason"))}

    def _reachable(self, packets: Mapping[int, Packet], again: dict[int, str], seconds: float) -> dict[int, Packet]:
        """Return the packets that can be sent again now. A client may have enrolled again from another node."""
        self._greet(seconds)
        self._greeted()
        there = set(self.online())
        back = [client for client in again if self.node_of[client] in there]
        for client in back:
            del again[client]
        return {client: packets[client] for client in back}

    def _greet(self, seconds: float) -> None:
        """Ask every node to enrol that is new, or that has gone offline or lost its request before it answered."""
        there = self.online()
        self._asked -= set(self._enrolling.values()) - set(there)  # its process may have died with the request
        new = [node for node in there if node not in self._asked]
        if not new:
            return
        self.close([identity for identity, node in self._enrolling.items() if node in set(new)])
        self._enrolling = {identity: node for identity, node in self._enrolling.items() if node not in set(new)}
        asking = hello(self.rounds_left, self.run)
        identities = self.push([(node, asking) for node in new], max(seconds, 1.0), enrols=True)
        sent = {identity: node for identity, node in zip(identities, new, strict=True) if identity}
        self._enrolling |= sent
        self._asked |= set(sent.values())

    def _greeted(self) -> list[Packet]:
        """Return the new answers to requests to enrol. A refused enrolment gets the verdict `failed`."""
        answers, events = [], []
        for found in self.pull(list(self._enrolling), LARGEST_ENROLMENT):
            asked = self._enrolling.pop(found.identity)
            if found.lost:
                self._lost[asked] = f"{self.device_of(asked)}: {found.packet}"
                self._asked.discard(asked)
                continue
            self._lost.pop(asked, None)
            self._answered.add(asked)
            said = found.packet
            packet = Packet({"verdict": FAILED, "reason": said}) if isinstance(said, str) else said
            client, device, flaw = packet.header.get("client"), self.device_of(found.node), ""
            if (verdict := packet.header.get("verdict")) == ENROLLED:
                if flaw := self.vet(packet, device) or self._place(client, found.node):
                    packet = Packet({"verdict": FAILED, "reason": one_line(flaw)})
                else:
                    events.append({"event": "enrolled", "client": client, "device": device})
            if flaw or verdict == REFUSED:
                why = one_line(flaw or packet.header.get("reason"))
                client = client if type(client) is int else self.joined().get(device)
                whose = {} if client is None else {"client": client}
                events.append({"event": "refused", **whose, "device": device, "why": why})
            answers.append(packet)
        if events:
            self.noted(events)
        return answers

    def _place(self, client: Any, node: Node) -> str:
        """Record the node of a client. Return "" if this succeeds, and otherwise the reason why it does not.

        It does not succeed if the client number is invalid or belongs to another node that is online.
        """
        if type(client) is not int or client < 0:
            return "it enrolled without a client number"
        if self.node_of.get(client, node) != node and self.node_of[client] in set(self.online()):
            return f"client {client} enrolled twice: another node that is online has its number"
        self.node_of[client] = node
        return ""

    def _pause(self, started: float, end: float) -> None:
        now = time.monotonic()
        wait = min(LONGEST_WAIT, max(FIRST_WAIT, (now - started) / 10))
        self.rest(max(0.0, min(wait, end - now)))


def _looked_again(asked: float, patience: Patience, now: float) -> bool:
    """Return whether a client that was gone when it was asked has had its time to come back."""
    return now - asked >= min(SECOND_LOOK, patience.away_seconds)


def _enrolled(answers: Sequence[Packet]) -> int:
    return sum(answer.header.get("verdict") == ENROLLED for answer in answers)
