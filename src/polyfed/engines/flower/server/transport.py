"""A transport over a Flower grid."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import cast

import httpx
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import http_grid
from typing_extensions import override

from polyfed.core.errors import TransportError
from polyfed.engines.flower.codec import packet_of, records
from polyfed.engines.flower.device.fetch_limit import TOO_LARGE, at_most
from polyfed.engines.flower.server.device_keys import device_of
from polyfed.engines.flower.server.server_process import when_lost
from polyfed.engines.patience import Arrived, Node, PatientTransport
from polyfed.engines.protocol import one_line
from polyfed.federation.wire_format import Packet

FINAL = (
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.MOD_FAILED_PRECONDITION,
    ErrorCode.INVALID_FAB,
)
"""Flower's errors that would occur again for the same request. After other errors, polyfed sends the request again."""


@dataclass
class GridTransport(PatientTransport):
    """A `Transport` over a Flower grid. If a message was lost because a node went offline, it is sent again later.

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
        with _sentence("send messages"):
            sent = [identity or "" for identity in self.grid.push_messages(messages)] if messages else []
            if len(sent) != len(messages):
                raise OSError(f"the SuperLink returned {len(sent)} ids for {len(messages)} messages")
        return sent

    @override
    def pull(self, identities: Sequence[str], limit: int) -> list[Arrived]:
        with _sentence("fetch replies"), at_most(http_grid, limit):
            came = list(self.grid.pull_messages(identities)) if identities else []
        return [_arrived(message, limit) for message in came]

    @override
    def online(self) -> list[Node]:
        with _sentence("list the SuperNodes"):
            return list(self.grid.get_node_ids())

    @override
    def device_of(self, node: Node) -> str:
        return device_of(self.grid, cast(int, node))

    @override
    def rest(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise KeyboardInterrupt

    @override
    def when_lost(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        return when_lost(tell)


def _arrived(message: Message, limit: int) -> Arrived:
    identity, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
    if not message.has_error():
        return Arrived(identity, node, packet_of(message.content))
    if is_too_large(message.error.reason):
        return Arrived(identity, node, f"is too large: more than {limit} bytes", failed=True)
    lost = message.error.code not in FINAL
    return Arrived(identity, node, f"Flower says: {one_line(message.error.reason)}", failed=True, lost=lost)


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
