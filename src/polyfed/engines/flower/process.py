"""A process of Flower's: what it says last, and when it ends."""

import logging
import os
import signal
import time
from threading import Thread

from polyfed.errors import PolyfedError

LOOK_SECONDS, GRACE_SECONDS = 0.5, 10.0
"""Between looks for the parent, and from the interrupt to the end (Flower gives itself 5)."""


class LastWord(logging.Filter):
    """Leaves the last word to the sentence that a user's fault ends with, which the app has printed: no trace, no
    "unhandled exception" after it. Also drops the empty line by which Flower ends a run that went well."""

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if record.exc_info and isinstance(record.exc_info[1], PolyfedError):
            self.told = True
            return False
        text = record.getMessage()
        return bool(text.strip()) and not (self.told and text.startswith("Exit Code"))


LAST_WORD = LastWord()


def speak_last() -> None:
    """Have Flower's log leave users' faults to us; calling it again changes nothing."""
    logging.getLogger("flwr").addFilter(LAST_WORD)


def end_with_parent() -> None:
    """End this process soon after the one that started it.

    Flower watches for that too, but its signal goes to the thread that watches, and a main thread that sleeps between
    attempts to reach a SuperLink that is gone does not wake up from it. Whatever is cut off here, the run's checkpoint
    is whole.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        print("polyfed: the SuperLink is gone; this server ends", flush=True)  # noqa: T201  the app's log is its screen
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
