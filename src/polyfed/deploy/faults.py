"""Errors on a device: its own log says everything; the server is told in a few words, without the device's paths."""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyfed.core.errors import BadReply, NotAllowed, PolyfedError

TELLING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
"""Errors of a disk whose names the server may be told."""


class Fault(Exception):
    """An error on this device. Its text is for the server; its cause is for the device's log."""


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn every error in the block into a `Fault` with this text.

    Errors in the server's message (`BadReply`) and things that the device's owner has not allowed pass unchanged.
    """
    try:
        yield
    except (BadReply, Fault, NotAllowed):
        raise
    except Exception as error:
        raise Fault(what) from error


def in_short(error: Exception) -> str:
    """The class of an error, without the paths and names in its text."""
    known = [os.strerror(number) for number in TELLING if os.strerror(number) in str(error)]
    return " ".join([type(error).__name__, *(f"({words})" for words in known[:1])])


def log_fault(who: str, fault: Fault) -> None:
    """Write a fault with its cause to standard error, which a SuperNode passes on.

    The cause is written as a sentence if it is a user's fault, and as a traceback otherwise.
    """
    cause = fault.__cause__
    if isinstance(cause, PolyfedError | OSError) or cause is None:
        told = "" if cause is None else f": {cause}"
    else:
        told = ":\n" + "".join(traceback.format_exception(cause))
    log(f"{who}: {fault}{told}")


def log(text: str) -> None:
    """Write to this device's log. A server's words in the text can neither begin a line nor steer a terminal."""
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())
    text = "\n    ".join(lines)
    print(f"polyfed: {text}", file=sys.stderr, flush=True)  # noqa: T201  a ClientApp's log is its standard error


def log_event(event: str, **facts: Any) -> None:
    """Write a failed task with its traceback to this device's log; a listener of events."""
    if event == "client-failed":
        log(f"client {facts['client']}: task {facts['task']} failed:\n{facts['trace']}")
