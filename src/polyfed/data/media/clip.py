"""What an extractor reads, and what an extractor is."""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError

Array = NDArray[Any]
Norm = tuple[Tensor, Tensor]
"""Shift and scale of a column, see `Column`."""


@dataclass(frozen=True)
class Clip:
    """Where one modality of one sample is.

    Attributes:
        name: what messages call it: the file, or the row of a table.
        path: the file; None when the content is held.
        held: gives the content (bytes of a file, text or numbers) when there is no file of its own.
        start: where the sample begins in the file: seconds of media, lines of a table.
        end: where it ends, same unit; None is the end of the file.
        stamp: changes when held content changes, so that a cache notices.
    """

    name: str
    path: Path | None = None
    held: Callable[[], Any] | None = None
    start: float = 0.0
    end: float | None = None
    stamp: str = ""

    @classmethod
    def at(cls, path: Path, start: float = 0.0, end: float | None = None) -> "Clip":
        """A file, or a part of it."""
        return cls(str(path), path, None, start, end)

    @classmethod
    def of(cls, name: str, content: Any) -> "Clip":
        """Content that is already in memory: text, numbers or the bytes of a file."""
        return cls(name, None, lambda: content, stamp=content if isinstance(content, str) else "")

    @property
    def part(self) -> tuple[float, float | None]:
        """Start and end."""
        return self.start, self.end

    def content(self) -> Any:
        """The held content, or the bytes of the file; DataError if it is missing or empty."""
        if self.path is None:
            assert self.held is not None
            return self.held()
        if not self.path.is_file():
            raise DataError(
                f"'{self.path}' does not exist. Copy it from the data set, or prepare with on_corrupt='skip'"
            )
        found = self.path.read_bytes()
        if not found:
            raise DataError(f"'{self.path}' is empty (0 bytes). Fetch it again, or prepare with on_corrupt='skip'")
        return found

    def text(self) -> str:
        """The content as text; a file is read as UTF-8."""
        found = self.content()
        if not isinstance(found, bytes | str):
            raise corrupt(self, f"is not a text but a {type(found).__name__}")
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    def stream(self) -> io.BytesIO:
        """The content as an open file."""
        found = self.content()
        if not isinstance(found, bytes):
            raise corrupt(self, f"is not a file but a {type(found).__name__}")
        return io.BytesIO(found)

    def digest(self) -> str:
        """Hash of the content and of the part that is used."""
        found = self.content()
        seen = hashlib.blake2b(repr(self.part).encode(), digest_size=16)
        if isinstance(found, bytes):
            seen.update(found)
        elif isinstance(found, str):
            seen.update(b"text" + found.encode())
        else:
            array = np.ascontiguousarray(found)
            seen.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return seen.hexdigest()


class Extractor(Protocol):
    """Features of a clip. An implementation is a frozen dataclass: its `repr` names its settings, and so its cache.

    Attributes:
        norm: shift and scale of the column that holds the features; None leaves them as they are.
        by_client: whether the features are standardised over all clips of their natural client.
    """

    @property
    def norm(self) -> Norm | None:
        """See above."""
        ...

    @property
    def by_client(self) -> bool:
        """See above."""
        ...

    def __call__(self, clip: Clip) -> Array:
        """The features, of one shape and type for all clips; DataError names the clip and the cure."""
        ...


class Plain:
    """Base of the extractors: features stay as they are extracted."""

    @property
    def norm(self) -> Norm | None:
        """None."""
        return None

    @property
    def by_client(self) -> bool:
        """False."""
        return False


def optional(module: str, extra: str) -> Any:
    """A module of an optional dependency; RecipeError names the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"this data needs the package '{module.split('.')[0]}' ({error}): pip install 'polyfed[{extra}]'"
        ) from error


def corrupt(clip: Clip, why: object) -> DataError:
    """The error of a clip that cannot be used."""
    return DataError(f"'{clip.name}' {why}. Fetch it again, or prepare with on_corrupt='skip'")
