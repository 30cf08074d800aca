"""A lock that allows only one process at a time to work in a folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyfed.core.errors import RecipeError

try:
    import fcntl
except ImportError:  # Windows has no such lock, so it allows all processes
    fcntl = None  # type: ignore[assignment]

LOCK = ".polyfed.lock"
"""The name of the lock file, which holds the id of the process that has the lock."""


_held: set[int] = set()
"""The file descriptors of the locks that this process has."""


@contextmanager
def alone_in(folder: Path, what: str, fix: str, seconds: float = 0.0) -> Iterator[None]:
    """Lock a folder while the `with` block runs.

    Args:
        folder: an existing folder.
        what: the part of the error message that says what the other process does, for example "another server is
            writing this run".
        fix: what the user can do about the other process.
        seconds: how long to wait for the other process to release the folder.

    Raises:
        RecipeError: another process still has the lock, or the lock file cannot be opened, for example because it is a
            symbolic link.
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
    _held.add(lock)
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        if lock in _held:  # not in a forked process
            _held.remove(lock)
            os.close(lock)


def is_locked(folder: Path) -> bool:
    """Return whether a living process has locked a folder with `alone_in`. Where there are no locks, return True."""
    if fcntl is None:
        return True
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _locked(path: Path) -> int | None:
    """The file descriptor of the lock, or None if another process has it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}. Choose a folder that can be written") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):  # another process has it, or removed the file between the calls
        pass
    os.close(lock)
    return None


def _leave_locks() -> None:
    """Close the locks of the parent process in a process that it has forked.

    The parent still has its locks. If the parent is killed, its worker processes still finish their work. Without this
    function, the lock would last until the last worker ends, and the run could not be resumed until then.
    """
    for lock in _held:
        os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)
