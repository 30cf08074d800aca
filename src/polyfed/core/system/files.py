"""The names of the files of a run, and functions that read, write and lock files safely."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from polyfed.core.errors import CheckpointError
from polyfed.core.system.json_and_toml import parse_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""Whether `lock` works on this system. Servers and devices need it; simulations and checks do without."""

_V = TypeVar("_V")

_PACKAGE = Path(__file__).resolve().parents[2]


def shipped(name: str) -> Path:
    """The folder `recipes` or `docs` that comes with polyfed: the wheel has it in the package, a clone beside `src`."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parents[1] / name


ROUNDS, EGRESS, RESULT, RECIPE, FACTS = (
    "rounds.jsonl",
    "egress.jsonl",
    "result.json",
    "recipe.toml",
    "run.json",
)


LEAKAGE = "leakage.json"
"""The file with the findings of `polyfed audit`: what the messages of a run reveal."""

STUDY = "study.json"
"""The file in the folder of a sweep that lists its runs."""

AUDIT, PUBLIC_KEY = "audit.jsonl", "audit-key.pub"
"""The audit log in the folder of a device or of a run, and the public key that checks it."""


MEMBERS, RECEIPTS = ".clients.json", "receipts.json"
"""Files in the folder of a deployed run: the device of each client number, which you may write before the first run,
and the receipts of the devices."""

SIGNED = "signed"
"""The entry of `MEMBERS` with the keys with which clients have signed, of those that renewed them meanwhile."""

CERTIFICATE = "certificate.json"
"""The file that `polyfed certify` writes into the folder of a run."""

TIE = "audit-key.tie"
"""The file of a device in which its key signs the key of its audit log."""


def read_notes(path: Path, of: Callable[[Any], _V]) -> dict[str, _V]:
    """Read a small JSON file in which polyfed keeps values across restarts. If there is no file, return {}.

    Args:
        of: a function that converts each value of the file, such as `int`.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        return {str(key): of(value) for key, value in parse_json(path.read_text()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy") from error


def replace_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; see `replace_bytes`."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file. Readers see either the old or the whole new content, even after a power failure."""
    draft = path.with_name(f".{path.name}.draft")
    with open(draft, "wb", opener=without_links) as file:
        file.write(content)
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def without_links(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file for `open(..., opener=without_links)`, unless it is a symbolic link, which could lead anywhere.

    Raises:
        OSError: the path is a symbolic link.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)


def lock(file: IO[Any] | int, *, wait: bool = True, shared: bool = False) -> None:
    """Lock an open file or folder against other processes, until it is closed.

    Args:
        file: the file, or its descriptor.
        wait: whether to wait for the process that has the lock.
        shared: whether others may have the lock if theirs is shared, too.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is False.
    """
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def append_whole(path: Path, text: bytes, *, private: bool = False) -> int:
    """Append a text to a file, either completely or not at all. Returns the file's previous size.

    Args:
        path: the file.
        private: whether only this process's user can read the file, if this call makes it.

    Raises:
        OSError: the text cannot be written. The file then keeps its previous size, because a partly written line would
            also make the next line unreadable.
    """
    opener = partial(without_links, mode=0o600) if private else without_links
    with open(path, "ab", buffering=0, opener=opener) as file:
        whole = file.tell()
        try:
            _write(file, text)
        except OSError:
            file.truncate(whole)
            raise
    return whole


@contextmanager
def undone(path: Path, size: int) -> Iterator[None]:
    """Truncate a file to this size if the enclosed block fails."""
    try:
        yield
    except BaseException:
        os.truncate(path, size)
        raise


def _write(file: BinaryIO, text: bytes) -> None:
    """Write the whole text. A single `write` may write only a part of it, for example on a disk that is almost full."""
    while text:
        text = text[file.write(text) :]
