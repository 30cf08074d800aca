"""The state of a request: which clients have answered, and how long the server still waits for the others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyfed.engines.protocol import REPLY, Patience
from polyfed.federation.wire_format import Packet

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
