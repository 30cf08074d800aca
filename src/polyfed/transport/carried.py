"""What the server measures of a request that it carries: bytes, and seconds by its own clock.

No number here comes from a device. A device can only take its time, or hurry, and so change what is measured of itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MOST_REQUESTS = 10_000
"""Most requests whose measurements are kept before the reply has come; those of older ones are forgotten."""


class Carried(NamedTuple):
    """What was measured of a request and its reply.

    Attributes:
        up_bytes: bytes of the reply that have come, and
        up_s: the seconds for which they were on their way.
        down_bytes: bytes of the request that the device has acknowledged, and
        down_s: the seconds from the first of them to the last acknowledgement.
        work_s: seconds from the end of the request's way to the begin of the reply's; 0 if the reply has not begun.
    """

    up_bytes: int = 0
    up_s: float = 0.0
    down_bytes: int = 0
    down_s: float = 0.0
    work_s: float = 0.0


@dataclass
class _Open:
    """What is known of a request that is on its way, besides the sums; times are of the monotonic clock."""

    ready: float
    up_bytes: int = 0
    up_s: float = 0.0
    down_bytes: int = 0
    down_s: float = 0.0
    begun: float = 0.0


class Meter:
    """Measures requests from their offer to their reply.

    Args:
        clock: returns seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._open: dict[str, _Open] = {}

    def offered(self, request: str) -> None:
        """Note that a device gets to know of a request, perhaps again."""
        kept = self._open.setdefault(request, _Open(0.0))
        kept.ready = self.clock()
        for old in list(self._open)[:-MOST_REQUESTS]:
            del self._open[old]

    def down(self, request: str, count: int, seconds: float) -> None:
        """Note bytes that a device has acknowledged."""
        if (kept := self._open.get(request)) is not None:
            kept.down_bytes, kept.down_s = kept.down_bytes + count, kept.down_s + seconds
            kept.ready = self.clock()

    def begins(self, request: str) -> float:
        """Note that a piece of the reply begins, and return the time."""
        now = self.clock()
        if (kept := self._open.get(request)) is not None:
            kept.begun = kept.begun or now
        return now

    def up(self, request: str, count: int, since: float) -> None:
        """Note bytes of the reply, whose piece began at this time."""
        if (kept := self._open.get(request)) is not None and count > 0:
            kept.up_bytes, kept.up_s = kept.up_bytes + count, kept.up_s + self.clock() - since

    def ended(self, request: str) -> Carried:
        """Return what was measured of a request, and forget it."""
        kept = self._open.pop(request, _Open(0.0))
        work_s = max(kept.begun - kept.ready, 0.0) if kept.begun and kept.ready else 0.0
        return Carried(kept.up_bytes, kept.up_s, kept.down_bytes, kept.down_s, work_s)
