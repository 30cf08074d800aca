"""The events of a run: the progress display, the trackers, the records and the tests listen to the same stream."""

from collections.abc import Callable, Sequence
from typing import Any

Listener = Callable[..., None]
"""Called as `listener(event, **facts)`; see docs/outputs.md for the events and their facts."""


class Emitter:
    """Passes each event to all listeners, in the order of the list."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, **facts: Any) -> None:
        """Call every listener with an event and its facts."""
        for listener in self.listeners:
            listener(event, **facts)
