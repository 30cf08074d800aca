"""The events of a run. The progress display, the trackers, the records and the tests receive the same events."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from polyfed.core.system.json_and_toml import json_ready

Listener = Callable[..., None]
"""Called as `listener(event, **facts)`; see docs/outputs.md for the events and their facts."""


INTERRUPTED = "interrupted"
"""The reason in the event `run-stopped` after Ctrl-C. After an error, the reason is its class and its text."""


class Emitter:
    """Passes each event to all listeners, in the order of the list."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, **facts: Any) -> None:
        """Call every listener with an event and its facts."""
        for listener in self.listeners:
            listener(event, **facts)

    @contextmanager
    def stopped_in(self, round: Callable[[], int]) -> Iterator[None]:
        """Emit `run-stopped` if an exception ends the block. A listener that fails does not hide this exception.

        Args:
            round: returns the number of the current round.
        """
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            with suppress(Exception):
                reason = INTERRUPTED if interrupted else f"{type(error).__name__}: {error}"
                self("run-stopped", round=round(), reason=reason)
            raise


class EventLines:
    """A listener that writes each event as a JSON object on its own line, so that other programs can read the events.

    The object has `event`, `time` (UTC, ISO 8601) and the facts of the event. Tensors become lists.

    Args:
        file: an open text file. The listener flushes each line.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def __call__(self, event: str, **facts: Any) -> None:
        """Write one event."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = json_ready({"event": event, "time": moment, **facts})
        self.file.write(json.dumps(row, separators=(",", ":"), default=_plain) + "\n")
        self.file.flush()


def _plain(value: Any) -> Any:
    """Convert a tensor to lists. If JSON cannot represent an object of another type, convert the object to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
