"""The process in which Flower runs a ServerApp: what it prints last, and when it ends."""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from threading import Event, Thread

from polyfed.core.errors import PolyfedError
from polyfed.core.log_lines import logger_of

LOOK_SECONDS, GRACE_SECONDS = 2.0, 10.0
"""Seconds between two checks that the SuperLink listens, and from the interrupt to the end (Flower takes 5)."""

REFUSALS = 5
"""Connections refused in a row after which the SuperLink is gone."""


LINK_LOST = Event()
"""Set when this process ends because its SuperLink has ended."""


class LastWord(logging.Filter):
    """Keep our sentence about a user's fault as the last line of the log.

    The app has printed that sentence. The filter drops the trace and the "unhandled exception" that Flower would log
    after it, and the empty line that Flower logs after a run that went well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether Flower may log this record."""
        if record.exc_info and isinstance(record.exc_info[1], PolyfedError):
            self.told = True
            return False
        text = record.getMessage()
        return bool(text.strip()) and not (self.told and text.startswith("Exit Code"))


LAST_WORD = LastWord()


def speak_last() -> None:
    """Add the filter to Flower's log; calling this again changes nothing."""
    logging.getLogger("flwr").addFilter(LAST_WORD)


def end_with_link() -> None:
    """End this process, a ServerApp, soon after its SuperLink has ended.

    Flower checks only whether the process that started this one is alive. A SuperLink that was asked to end stays alive
    for a minute while someone reads its log, but takes no connections. And Flower's signal reaches the thread that
    checks, so it does not wake a main thread that sleeps between attempts to reach the SuperLink. The checkpoint of the
    run is written atomically, so it is whole whenever the process ends.
    """
    parent, address = os.getppid(), _address(sys.argv)

    def watch() -> None:
        refused = 0
        while os.getppid() == parent and refused < REFUSALS:
            time.sleep(LOOK_SECONDS)
            refused = refused + 1 if address is not None and _refuses(address) else 0
        logger_of("server", "stdout").error("the SuperLink is gone; this server ends")
        LINK_LOST.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _address(words: Sequence[str]) -> tuple[str, int] | None:
    """Where the SuperLink listens, from the command line of this process; None if it does not say."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--runtime-api-address", default="")
    host, _, port = parser.parse_known_args(list(words))[0].runtime_api_address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _refuses(address: tuple[str, int]) -> bool:
    """Whether the connection is refused, because nothing listens there; other failures of the network do not count."""
    try:
        socket.create_connection(address, timeout=LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
