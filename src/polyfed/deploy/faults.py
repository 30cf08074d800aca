"""Errors on a device: the device's own log holds all details, and the server gets a short text without paths."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply, EgressError, NotAllowed, PolyfedError
from polyfed.core.system.log_lines import logger_of

LOGGER = logger_of("device", "stderr")

TELLING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
"""Disk errors whose names the device may send to the server."""

CURE = (
    "This device keeps its local state and its logs in {}. Make room there, or correct the permissions of this folder, "
    "or set another folder as `state` in [[device]]. The device takes part again at the next request"
)
"""What the device's log advises after a disk error."""


LONGEST_TEXT = 20_000
"""Largest number of characters of an error in the log. A recipe of a hostile server can have 100,000 mistakes, and the
text of its error would take megabytes of the log for each request."""


class Fault(Exception):
    """An error on this device. The text is for the server, and the cause is for the device's log."""


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn every error in the block into a `Fault` with this text.

    Three types of errors pass unchanged: errors in the server's message (`BadReply`), refusals (`EgressError`), and
    recipes that name code or a model file that the device's owner has not allowed (`NotAllowed`).
    """
    try:
        yield
    except (BadReply, EgressError, Fault, NotAllowed):
        raise
    except Exception as error:
        raise Fault(what) from error


def in_short(error: Exception) -> str:
    """Return the name of an error's class. For a disk error, add its cause, such as a full disk.

    The error's own text is left out, because it can contain paths and names.
    """
    known = [os.strerror(number) for number in TELLING if os.strerror(number) in str(error)]
    return " ".join([type(error).__name__, *(f"({words})" for words in known[:1])])


def log_fault(who: str, fault: Fault, folder: Path | None = None) -> None:
    """Write a fault with its cause to this device's log.

    If the cause is a user's mistake, the log shows the error's message. Otherwise the log shows a traceback.

    Args:
        who: the client.
        folder: the state folder of the device, if it is known. A disk error often does not name a file.
    """
    cause = fault.__cause__
    if isinstance(cause, PolyfedError | OSError) or cause is None:
        full = isinstance(cause, OSError) and cause.errno in TELLING and folder is not None
        cure = f". {CURE.format(folder)}" if full else ""
        text = "" if cause is None else f": {cause}"
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT:,} more characters)"
        LOGGER.error("%s: %s%s%s", who, fault, text, cure)
    else:
        LOGGER.error("%s: %s", who, fault, exc_info=cause)


def log(text: str, level: int = logging.INFO) -> None:
    """Write a line to this device's log."""
    LOGGER.log(level, "%s", text)


def log_problem(text: str) -> None:
    """Write a warning to this device's log."""
    log(text, logging.WARNING)


def log_event(event: str, **facts: Any) -> None:
    """Write a failed task with its traceback to this device's log. Register this function as a listener of events."""
    if event == "client-failed":
        extra = {"trace": facts["trace"]}
        LOGGER.error("client %s: task %s failed", facts["client"], facts["task"], extra=extra)
