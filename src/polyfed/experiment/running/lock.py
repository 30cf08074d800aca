"""A lock that allows only one process at a time to work in a folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import HAS_LOCKS, lock

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
    if not HAS_LOCKS:  # all processes may use the folder
        yield
        return
    end = time.monotonic() + seconds
    while (number := _locked(folder / LOCK)) is None:
        if time.monotonic() > end:
            holder = (folder / LOCK).read_text() if (folder / LOCK).exists() else "?"
            raise RecipeError(f"{folder}: {what} (process {holder.strip()}). {fix}")
        time.sleep(0.5)
    _held.add(number)
    try:
        os.truncate(number, 0)
        os.write(number, str(os.getpid()).encode())
        yield
    finally:
        if number in _held:  # not in a forked process
            _held.remove(number)
            os.close(number)


def is_locked(folder: Path) -> bool:
    """Return whether a living process has locked a folder with `alone_in`. Where there are no locks, return True."""
    if not HAS_LOCKS:
        return True
    try:
        number = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        lock(number, wait=False, shared=True)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def _locked(path: Path) -> int | None:
    """The file descriptor of the lock, or None if another process has it."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}. Choose a folder that can be written") from None
    try:
        lock(number, wait=False)
        if os.path.samestat(os.fstat(number), path.stat()):
            return number
    except (BlockingIOError, FileNotFoundError):  # another process has it, or removed the file between the calls
        pass
    os.close(number)
    return None


def _leave_locks() -> None:
    """Close the locks of the parent process in a process that it has forked.

    The parent still has its locks. If the parent is killed, its worker processes still finish their work. Without this
    function, the lock would last until the last worker ends, and the run could not be resumed until then.
    """
    for number in _held:
        os.close(number)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)
