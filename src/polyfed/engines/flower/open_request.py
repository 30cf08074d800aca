"""One request to several clients while the server waits for their replies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyfed.engines.protocol import REPLY, Patience
from polyfed.federation.wire_format import Packet

GRACE = 1.1
"""A client that missed its deadline is waited for until this multiple of the time that the others took."""


@dataclass
class OpenRequest:
    """One request to several clients while the server waits for their replies.

    Attributes:
        packets: by client.
        patience: how long to wait.
        waiting: client by id of the message that has not been answered.
        answers: what the clients answered, or why there is no answer.
        again: clients whose message was lost with their node, and Flower's reason.
        away: since when a client's node has been offline.
        settled: when every client that is waited for in full had answered.
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
        """When clients that missed an earlier deadline have had their time; infinity while others are waited for."""
        return self.started + GRACE * (self.settled - self.started)

    @property
    def replied(self) -> int:
        """How many clients have replied; refusals and failures do not count."""
        found = (answer for answer in self.answers.values() if isinstance(answer, Packet))
        return sum(answer.header.get("verdict") == REPLY for answer in found)

    def pending(self) -> list[int]:
        """The clients that have not answered."""
        return [client for client in self.packets if client not in self.answers]

    def gone(self, client: int, now: float) -> bool:
        """Whether the client's node has been offline for longer than it may be."""
        return client in self.away and now - self.away[client] >= self.patience.away_seconds
