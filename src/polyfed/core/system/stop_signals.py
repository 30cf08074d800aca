"""Handling the signals that ask a process to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any


@contextmanager
def handling(handler: Any, *kinds: signal.Signals) -> Iterator[None]:
    """Handle these signals with `handler` inside the `with` block. Outside of the main thread, this does nothing."""
    if current_thread() is not main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, old)


def interrupt(*_: object) -> None:
    """A signal handler that acts like Ctrl-C."""
    raise KeyboardInterrupt
