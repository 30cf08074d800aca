"""`Clip`, the place of one modality of one sample, and `Extractor`, the interface that turns a clip into features."""

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
"""Shift and scale of a column, see `polyfed.data.Column`."""


@dataclass(frozen=True)
class Clip:
    """The place of one modality of one sample: a file, a part of a file, or content in memory.

    Attributes:
        name: The name of the clip in messages: the file, or the row of a table.
        path: The file. None if the content does not have its own file.
        held: If `path` is None, a function that returns the content (the bytes of a file, text or numbers).
        start: Start of the sample in the file: in seconds for media, in lines for a table.
        end: End of the sample, in the same unit as `start`. None means the end of the file.
        stamp: For content without a file, a value that changes with the content, so that a cache notices the change.
    """

    name: str
    path: Path | None = None
    held: Callable[[], Any] | None = None
    start: float = 0.0
    end: float | None = None
    stamp: str = ""

    @classmethod
    def at(cls, path: Path, start: float = 0.0, end: float | None = None) -> "Clip":
        """A clip of a file, or of a part of it."""
        return cls(str(path), path, None, start, end)

    @classmethod
    def of(cls, name: str, content: Any) -> "Clip":
        """A clip of content that is already in memory: text, numbers or the bytes of a file."""
        return cls(name, None, lambda: content, stamp=content if isinstance(content, str) else "")

    @property
    def part(self) -> tuple[float, float | None]:
        """The part of the file that is the sample, as its start and its end."""
        return self.start, self.end

    def content(self) -> Any:
        """The content in memory, or the bytes of the file.

        Raises:
            DataError: The file is missing or empty.
        """
        if self.path is None:
            assert self.held is not None
            return self.held()
        if not self.path.is_file():
            raise DataError(
                f"'{self.path}' does not exist. Copy it from the data set, or prepare with on_corrupt='skip'"
            )
        result = self.path.read_bytes()
        if not result:
            raise DataError(f"'{self.path}' is empty (0 bytes). Fetch it again, or prepare with on_corrupt='skip'")
        return result

    def text(self) -> str:
        """The content as text; a file is read as UTF-8.

        Raises:
            DataError: The file is missing or empty, or the content is not text.
        """
        result = self.content()
        if not isinstance(result, bytes | str):
            raise corrupt(self, f"is not text but a {type(result).__name__}")
        return result.decode("utf-8", "replace") if isinstance(result, bytes) else result

    def stream(self) -> io.BytesIO:
        """The content as an open file.

        Raises:
            DataError: The file is missing or empty, or the content is not bytes.
        """
        result = self.content()
        if isinstance(result, str):
            raise DataError(
                f"{_quoted(self.name)} holds the text {result[:40]!r} and no file. In a data set of the library "
                "`datasets`, write cast_column(COLUMN, datasets.Image()) and save_to_disk; or read paths in a table "
                'by the source `table`, as in [data] columns = { COLUMN = "image" }'
            )
        if not isinstance(result, bytes):
            raise corrupt(self, f"is not a file but a {type(result).__name__}")
        return io.BytesIO(result)

    def digest(self) -> str:
        """Return a hash of the content and of `part` (the sample's start and end), as hexadecimal digits."""
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
    """Turns a clip into features.

    An implementation is a frozen dataclass. Its `repr` must name all settings, because the feature cache uses the
    `repr` as part of its key.

    Attributes:
        norm: Shift and scale of the column that holds the features; None means no shift and no scale.
        by_client: Whether the features are standardised over all clips of their natural client.
    """

    @property
    def norm(self) -> Norm | None:
        """The shift and the scale of the column."""
        ...

    @property
    def by_client(self) -> bool:
        """Whether features are standardised by natural client."""
        ...

    def __call__(self, clip: Clip) -> Array:
        """Return the features of a clip. They have the same shape and type for all clips.

        Raises:
            DataError: The clip cannot be used; the message names it and says what to do.
        """
        ...


class PlainExtractor:
    """Base class of extractors that use no shift and scale and do not standardise features by client."""

    @property
    def norm(self) -> Norm | None:
        """Return None: batches use the features unchanged."""
        return None

    @property
    def by_client(self) -> bool:
        """Return False: features are not standardised by natural client."""
        return False


def optional(module: str, extra: str) -> Any:
    """Import a module of an optional dependency.

    Raises:
        RecipeError: The package is not installed; the message names the extra that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"this data needs the package '{module.split('.')[0]}' ({error}): pip install 'polyfed[{extra}]'"
        ) from error


def corrupt(clip: Clip, why: object) -> DataError:
    """Return the error for a clip that cannot be used.

    Args:
        clip: the clip. Its name begins the error text.
        why: the words that follow the name, such as "holds no sound".
    """
    return DataError(f"{_quoted(clip.name)} {why}. Fetch it again, or prepare with on_corrupt='skip'")


def _quoted(name: str) -> str:
    """Return the name of a clip in quotes, unless it has quotes already."""
    return name if "'" in name else f"'{name}'"


@dataclass(frozen=True, kw_only=True)
class Values(PlainExtractor):
    """The numbers in a cell of a table, as float32."""

    def __call__(self, clip: Clip) -> NDArray[np.float32]:
        """The numbers as a float32 array of the same shape; a single number becomes a vector (1,).

        Raises:
            DataError: The cell does not hold finite numbers.
        """
        try:
            result = np.atleast_1d(np.asarray(clip.content(), dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise corrupt(clip, f"is not an array of numbers ({error})") from error
        if not np.isfinite(result).all():
            raise corrupt(clip, "holds numbers that are not finite")
        return result
