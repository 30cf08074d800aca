"""A process of Flower's: what it says last, and when it ends."""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from threading import Thread

from polyfed.core.errors import PolyfedError

LOOK_SECONDS, GRACE_SECONDS = 2.0, 10.0
"""Between looks for the SuperLink, and from the interrupt to the end (Flower gives itself 5)."""

REFUSALS = 5
"""Connections refused in a row after which the SuperLink is gone."""


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


def end_with_link() -> None:
    """End this process, a ServerApp, soon after its SuperLink.

    Flower looks only whether the process that started this one lives. A SuperLink that was asked to end lives on for a
    minute while someone reads its log, but takes no connections any more. And Flower's signal goes to the thread that
    looks, so that a main thread which sleeps between attempts to reach the SuperLink does not wake up from it.
    Whatever is cut off here, the run's checkpoint is whole.
    """
    parent, address = os.getppid(), _address(sys.argv)

    def watch() -> None:
        refused = 0
        while os.getppid() == parent and refused < REFUSALS:
            time.sleep(LOOK_SECONDS)
            refused = refused + 1 if address is not None and _refuses(address) else 0
        print("polyfed: the SuperLink is gone; this server ends", flush=True)  # noqa: T201  the app's log is its screen
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _address(words: Sequence[str]) -> tuple[str, int] | None:
    """Where the SuperLink listens, from the words that Flower started a ServerApp with; None if they do not say."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--runtime-api-address", default="")
    host, _, port = parser.parse_known_args(list(words))[0].runtime_api_address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _refuses(address: tuple[str, int]) -> bool:
    """Whether nothing listens there; a network that fails is another matter."""
    try:
        socket.create_connection(address, timeout=LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
