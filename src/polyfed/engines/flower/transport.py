"""A transport over a Flower grid."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import cast

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from typing_extensions import override

from polyfed.engines.flower.codec import packet_of, records
from polyfed.engines.patience import Arrived, Node, PatientTransport
from polyfed.engines.protocol import one_line
from polyfed.federation.wire.wire_format import Packet

FINAL = (
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.MOD_FAILED_PRECONDITION,
    ErrorCode.INVALID_FAB,
)
"""Flower's errors that would occur again for the same request. After other errors, polyfed sends the request again."""


@dataclass
class GridTransport(PatientTransport):
    """A `Transport` over a Flower grid. If a message was lost, it is sent again later.

    Attributes:
        grid: Flower's grid.
        stop: an event that another thread can set to end a wait with KeyboardInterrupt.
    """

    grid: Grid
    stop: Event = field(default_factory=Event)

    @override
    def push(self, packets: Sequence[tuple[Node, Packet]], seconds: float, *, enrols: bool) -> list[str]:
        kind = "query" if enrols else "train"
        messages = [Message(records(packet), cast(int, node), kind, ttl=seconds) for node, packet in packets]
        return [identity or "" for identity in self.grid.push_messages(messages)] if messages else []

    @override
    def pull(self, identities: Sequence[str], limit: int) -> list[Arrived]:
        return [_arrived(message) for message in self.grid.pull_messages(identities)] if identities else []

    @override
    def online(self) -> list[Node]:
        return list(self.grid.get_node_ids())

    @override
    def device_of(self, node: Node) -> str:
        return f"node {node}"

    @override
    def rest(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise KeyboardInterrupt


def _arrived(message: Message) -> Arrived:
    identity, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
    if not message.has_error():
        return Arrived(identity, node, packet_of(message.content))
    lost = message.error.code not in FINAL
    return Arrived(identity, node, f"Flower says: {one_line(message.error.reason)}", failed=True, lost=lost)
