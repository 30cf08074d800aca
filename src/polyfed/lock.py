"""One process at a time in a folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyfed.errors import RecipeError

try:
    import fcntl
except ImportError:  # Windows has no such lock: there nobody is kept out
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Holds the number of the process that has the folder."""


@contextmanager
def alone_in(folder: Path, what: str, cure: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder.

    Args:
        folder: is there.
        what: the other one does there, as in "another server is writing this run".
        cure: how to end the other one.
        seconds: how long to wait for it to end.

    Raises:
        RecipeError: another process still holds it; names that process.
    """
    if fcntl is None:
        yield
        return
    end = time.monotonic() + seconds
    with (folder / LOCK).open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    file.seek(0)
                    raise RecipeError(f"{folder}: {what} (process {file.read().strip()}). {cure}") from None
                time.sleep(0.5)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
