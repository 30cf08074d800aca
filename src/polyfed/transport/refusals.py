"""What a server refuses to strangers, for its signed log, which nobody may fill by trying again and again.

The first refusal of a kind has a line at once. Further ones of this kind are counted, and told with the first one after
an hour. New kinds get a line a minute; those that come faster are counted together.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 3600.0
"""How long refusals of one kind are counted before the next line about them."""

MOST, PER_SECOND = 30.0, 1 / 60
"""How many lines there may be at once, and afterwards per second."""

KINDS = 1000
"""The number of kinds that are remembered."""

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class Refusals:
    """Counts refusals, and hands those that are due to `write`.

    Args:
        write: writes events.
    """

    def __init__(self, write: Callable[[Sequence[dict[str, Any]]], None]) -> None:
        self._write = write
        self._kinds: dict[tuple[str, str, int | None, str], tuple[float, int]] = {}  # when told, and how many since
        self._others, self._left, self._since = 0, MOST, time.monotonic()

    def add(self, why: str, device: str = "", client: int | None = None, name: str = "") -> None:
        """Count a refusal.

        Args:
            why: why the server refuses.
            device: fingerprint of the key that asked, as the stranger says; another text is left out.
            client: the number of the device whose token it was, if there is one.
            name: its name.
        """
        now = time.monotonic()
        kind = (why, device if _FINGERPRINT.fullmatch(device) else "", client, name)
        told, count = self._kinds.pop(kind, (0.0, 0))
        self._kinds[kind] = told, count + 1
        for old in list(self._kinds)[:-KINDS]:
            self._others += self._kinds.pop(old)[1]
        self._left, self._since = min(MOST, self._left + (now - self._since) * PER_SECOND), now
        if self._left >= 1 and (not told or now - told > SECONDS):
            self._left -= 1
            self._kinds[kind] = now, 0
            self._tell([_event(kind, count + 1)])

    def end(self) -> None:
        """Write what was counted since the last lines."""
        counted = [_event(kind, count) for kind, (_, count) in self._kinds.items() if count]
        self._kinds.clear()
        if counted or self._others:
            self._tell(counted)

    def _tell(self, events: list[dict[str, Any]]) -> None:
        if self._others:
            events.append(
                {"event": "refused", "why": "others, which came too fast to tell each", "times": self._others}
            )
        self._others = 0
        self._write(events)


def _event(kind: tuple[str, str, int | None, str], count: int) -> dict[str, Any]:
    why, device, client, name = kind
    known = {"client": client, "name": name} if client is not None else {}
    return {"event": "refused", **known, "device": device, "why": why, **({"times": count} if count > 1 else {})}
