"""One stream of events: the progress display, the files of a run, the report and the tests all read the same."""

from collections.abc import Callable, Sequence
from typing import Any

Listener = Callable[..., None]
"""Called as `listener(event, **facts)`; see docs/outputs.md for the events and their facts."""


class Emitter:
    """Hands each event to all listeners, in order."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, **facts: Any) -> None:
        """Tell everyone."""
        for listener in self.listeners:
            listener(event, **facts)
