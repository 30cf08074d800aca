"""One process at a time in a folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyfed.core.errors import RecipeError

try:
    import fcntl
except ImportError:  # Windows has no such lock: there nobody is kept out
    fcntl = None  # type: ignore[assignment]

LOCK = ".polyfed.lock"
"""Holds the number of the process that has the folder."""


@contextmanager
def alone_in(folder: Path, what: str, fix: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder.

    Args:
        folder: is there.
        what: the other one does there, as in "another server is writing this run".
        fix: how to end the other one.
        seconds: how long to wait for it to end.

    Raises:
        RecipeError: another process still holds it; names that process. Or what should be the lock is a link.
    """
    if fcntl is None:
        yield
        return
    end = time.monotonic() + seconds
    while (lock := _locked(folder / LOCK)) is None:
        if time.monotonic() > end:
            holder = (folder / LOCK).read_text() if (folder / LOCK).exists() else "?"
            raise RecipeError(f"{folder}: {what} (process {holder.strip()}). {fix}")
        time.sleep(0.5)
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def _locked(path: Path) -> int | None:
    """The open lock, or None if another process has it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}. Choose a folder that can be written") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):  # held by another, or taken away by it between the calls
        pass
    os.close(lock)
    return None
