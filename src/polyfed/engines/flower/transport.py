"""Packets over a grid of Flower's: enrolling nodes, sending asks, waiting for replies until a deadline."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from polyfed.engines.flower.codec import packet_of, records
from polyfed.engines.protocol import ENROL, ENROLLED, FAILED
from polyfed.federation.wire_format import Packet

FIRST_WAIT, LONGEST_WAIT = 0.02, 0.5
"""Seconds between looks for replies: a tenth of the time waited so far, within these. Flower's own grids wait 0.1
(simulation) and 3 (SuperLink)."""

LOOK_EVERY = 1.0
"""Seconds between looks for nodes that came or came back."""

FINAL = (
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.MOD_FAILED_PRECONDITION,
    ErrorCode.INVALID_FAB,
)
"""Errors of Flower after which asking again would give the same; after others an ask is sent again in time."""


@dataclass
class GridTransport:
    """A `Transport` over a grid of Flower's.

    Attributes:
        stop: set from outside to end a wait; it then raises KeyboardInterrupt.
        node_of: which node a client enrolled from.
    """

    grid: Grid
    stop: Event = field(default_factory=Event)
    node_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._asked: set[int] = set()  # nodes that have been asked to enrol
        self._enrolling: set[str] = set()

    def enrol(
        self, wanted: int, seconds: float, heard: Callable[[Sequence[Packet]], None] = lambda answers: None
    ) -> list[Packet]:
        """Ask nodes who they are, until `wanted` have answered or the time is up.

        Args:
            wanted: how many.
            seconds: how long to wait.
            heard: is told of the answers so far after every look.

        Returns:
            all answers; those that are no enrolment say why (`refused`, `failed`).
        """
        started = time.monotonic()
        end = started + seconds
        answers: list[Packet] = []
        while len(answers) < wanted and time.monotonic() < end:
            self._greet(seconds)
            found = self._greeted()
            answers += found
            heard(answers)
            if not found:
                self._pause(started, end)
        return answers

    def exchange(self, packets: dict[int, Packet], seconds: float) -> dict[int, Packet | str]:
        """See `Transport.exchange`. An ask that is lost with its node is sent again when the node is back: to do a task
        again gives the same reply (`letters`)."""
        started = looked = time.monotonic()
        end = started + seconds
        answers: dict[int, Packet | str] = {}
        again: dict[int, str] = {}
        waiting = self._push(packets, seconds)
        while len(answers) < len(packets) and time.monotonic() < end:
            came = self._pull(waiting, answers, again)
            if again and time.monotonic() - looked > LOOK_EVERY:
                waiting |= self._push(self._reachable(packets, again, seconds), end - time.monotonic())
                looked = time.monotonic()
            if not came:
                self._pause(started, end)
        return {client: f"{why}; not back in time" for client, why in again.items()} | answers

    def _push(self, packets: Mapping[int, Packet], seconds: float) -> dict[str, int]:
        """Send packets; the client by id of the message."""
        clients = [client for client in packets if client in self.node_of]
        messages = [
            Message(records(packets[client]), self.node_of[client], "train", ttl=max(seconds, 1.0))
            for client in clients
        ]
        sent = list(self.grid.push_messages(messages)) if messages else []
        return {identity: client for identity, client in zip(sent, clients, strict=True) if identity}

    def _pull(self, waiting: dict[str, int], answers: dict[int, Packet | str], again: dict[int, str]) -> bool:
        """Take in what came; each message is answered once, whatever the other side sends."""
        came = list(self.grid.pull_messages(list(waiting))) if waiting else []
        for message in came:
            client = waiting.pop(message.metadata.reply_to_message_id, None)
            if client is None or client in answers:
                continue
            if message.has_error() and message.error.code not in FINAL:
                again[client] = f"Flower says: {message.error.reason}"
            elif message.has_error():
                answers[client] = f"Flower says: {message.error.reason}"
            else:
                answers[client] = packet_of(message.content)
        return bool(came)

    def _reachable(self, packets: Mapping[int, Packet], again: dict[int, str], seconds: float) -> dict[int, Packet]:
        """What can be sent again now; a client may have come back as another node."""
        self._greet(seconds)
        self._greeted()
        online = set(self.grid.get_node_ids())
        back = [client for client in again if self.node_of[client] in online]
        for client in back:
            del again[client]
        return {client: packets[client] for client in back}

    def _greet(self, seconds: float) -> None:
        """Ask nodes that are new to enrol."""
        new = [node for node in self.grid.get_node_ids() if node not in self._asked]
        self._asked.update(new)
        hello = Packet({"want": ENROL})
        messages = [Message(records(hello), node, "query", ttl=max(seconds, 1.0)) for node in new]
        if messages:
            self._enrolling.update(i for i in self.grid.push_messages(messages) if i)

    def _greeted(self) -> list[Packet]:
        """Answers of nodes that were asked to enrol. A number that is taken stays taken while its node is online."""
        answers = []
        for message in self.grid.pull_messages(list(self._enrolling)) if self._enrolling else ():
            self._enrolling.discard(message.metadata.reply_to_message_id)
            packet = _content(message)
            client, node = packet.header.get("client"), message.metadata.src_node_id
            if packet.header.get("verdict") == ENROLLED and not self._placed(client, node):
                packet = Packet({"verdict": FAILED, "reason": f"client {client} enrolled twice, or has no number"})
            answers.append(packet)
        return answers

    def _placed(self, client: Any, node: int) -> bool:
        """Note where a client is; False if another node that is online has its number."""
        if type(client) is not int or client < 0:
            return False
        if self.node_of.get(client, node) != node and self.node_of[client] in set(self.grid.get_node_ids()):
            return False
        self.node_of[client] = node
        return True

    def _pause(self, started: float, end: float) -> None:
        now = time.monotonic()
        wait = min(LONGEST_WAIT, max(FIRST_WAIT, (now - started) / 10))
        if self.stop.wait(max(0.0, min(wait, end - now))):
            raise KeyboardInterrupt


def _content(message: Message) -> Packet:
    """What a node answered to the question who it is."""
    if message.has_error():
        return Packet({"verdict": FAILED, "reason": f"Flower says: {message.error.reason}"})
    packet = packet_of(message.content)
    return Packet({"verdict": FAILED, "reason": packet}) if isinstance(packet, str) else packet
