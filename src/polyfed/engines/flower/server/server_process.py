"""Changes to the process in which Flower runs a ServerApp.

`speak_last` makes polyfed's error text the last line of the process's log. `end_with_link` ends the process soon after
its SuperLink has ended.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

from polyfed.core.errors import PolyfedError
from polyfed.core.system.log_lines import logger_of

LOOK_SECONDS, GRACE_SECONDS = 2.0, 10.0
"""Seconds between two checks that the SuperLink listens, and between the interrupt and the end (Flower takes 5)."""

REFUSALS = 5
"""Number of refused connections in a row after which this process considers the SuperLink dead."""


_tellers: list[Callable[[], None]] = []
"""The functions that `when_lost` has registered."""


@contextmanager
def when_lost(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` if this process ends during the block because its SuperLink has ended.

    Another thread calls `tell` and then interrupts the main thread. From that time on, Flower may kill this process.
    """
    _tellers.append(tell)
    try:
        yield
    finally:
        _tellers.remove(tell)


class LastWord(logging.Filter):
    """Keep polyfed's sentence about a user's mistake as the last line of the log.

    If a run fails because of such a mistake, the ServerApp prints the sentence. After it, Flower logs a traceback and
    an "unhandled exception". After a successful run, Flower logs an empty line. This filter drops all three.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True to keep a record in the log, False to drop it."""
        if record.exc_info and isinstance(record.exc_info[1], PolyfedError):
            self.told = True
            return False
        text = record.getMessage()
        return bool(text.strip()) and not (self.told and text.startswith("Exit Code"))


LAST_WORD = LastWord()


def speak_last() -> None:
    """Add the filter `LastWord` to Flower's log. A second call has no effect."""
    logging.getLogger("flwr").addFilter(LAST_WORD)


def end_with_link() -> None:
    """Make this process, a ServerApp, end soon after its SuperLink has ended.

    Flower's own check is not enough: one of its threads checks only whether the parent process is alive. If someone
    reads the SuperLink's log when the SuperLink shuts down, the SuperLink's process stays alive for about another
    minute, but accepts no connections. When the parent process has ended, Flower sends a signal to the checking thread
    only. A main thread that sleeps between attempts to reach the SuperLink therefore keeps sleeping, and the process
    does not end soon. This function ends the process. That is safe at any time, because polyfed writes
    checkpoints atomically.
    """
    parent, address = os.getppid(), _address(sys.argv)

    def watch() -> None:
        refused = 0
        while os.getppid() == parent and refused < REFUSALS:
            time.sleep(LOOK_SECONDS)
            refused = refused + 1 if address is not None and _refuses(address) else 0
        logger_of("server", "stdout").error("the SuperLink is gone; this server ends")
        for tell in list(_tellers):
            with suppress(OSError):  # a full disk
                tell()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _address(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the SuperLink's address from the command line of this process, or None if there is no address."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--runtime-api-address", default="")
    host, _, port = parser.parse_known_args(list(words))[0].runtime_api_address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _refuses(address: tuple[str, int]) -> bool:
    """Return whether a connection to this address is refused because no process listens there.

    If another network error occurs, the result is False.
    """
    try:
        socket.create_connection(address, timeout=LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
