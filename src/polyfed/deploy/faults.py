"""What goes wrong on a device: the whole story in its own log, a few words without its paths for the server."""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyfed.core.errors import BadReply, NotAllowed, PolyfedError

TELLING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
"""Faults of a disk that the server may be told by name."""


class Fault(Exception):
    """Something on this device is wrong. The text is for the server, the cause for the device's log."""


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is this fault, except what is wrong in the message of the server (`BadReply`) and what
    the device's owner has not allowed."""
    try:
        yield
    except (BadReply, Fault, NotAllowed):
        raise
    except Exception as error:
        raise Fault(what) from error


def in_short(error: Exception) -> str:
    """The kind of an error, without the paths and names in its text."""
    known = [os.strerror(number) for number in TELLING if os.strerror(number) in str(error)]
    return " ".join([type(error).__name__, *(f"({words})" for words in known[:1])])


def log_fault(who: str, fault: Fault) -> None:
    """The whole story on standard error, which a SuperNode passes on: in words, or as a trace where it is no user's
    fault."""
    cause = fault.__cause__
    if isinstance(cause, PolyfedError | OSError) or cause is None:
        told = "" if cause is None else f": {cause}"
    else:
        told = ":\n" + "".join(traceback.format_exception(cause))
    log(f"{who}: {fault}{told}")


def log(text: str) -> None:
    """A line of this device's log."""
    print(f"polyfed: {text}", file=sys.stderr, flush=True)  # noqa: T201  a ClientApp's log is its standard error


def log_event(event: str, **facts: Any) -> None:
    """A listener: a task that failed, with its trace."""
    if event == "client-failed":
        log(f"client {facts['client']}: task {facts['task']} failed:\n{facts['trace']}")
