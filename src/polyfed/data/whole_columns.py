"""Columns that are a modality of their own: image files become pixels, and texts become token ids.

Nothing is fitted to the rows, so a client tells nothing about them, and new samples are read by the rule alone. The id
of a word is a hash of it (Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009): nobody
needs a vocabulary, and words that share an id share a vector. It is no protection: whoever hashes a dictionary can
name the words of the ids that a client's update changes.
"""

import io
import re
import struct
import unicodedata
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.column_rules import ColumnRule, word_of
from polyfed.data.media.clip import optional
from polyfed.data.reading.values import is_missing

MOST_PIXELS = 100_000_000
"""The most pixels of an image, which take 400 MB in memory. A file of a few kilobytes can claim billions."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that are read. Pillow's others are rare, and some of them start other programs."""

SUFFIXES = (".bmp", ".gif", ".jpg", ".jpeg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""How the names of such files end."""

DAMAGED = (OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError, OverflowError)
"""What Pillow raises for a damaged file, besides `struct.error` and `zlib.error`."""

MOST_FAULTS = 20
"""The most faulty cells that one message names."""

LONGEST_NAME = 200
"""The longest path that a message repeats."""

WORD = re.compile(r"\w+")

Cell = Callable[[Any], NDArray[Any] | None]


def read_cells(
    rule: ColumnRule, cells: Sequence[Any], where: str, folder: Path | None = None, first_line: int | None = None
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the samples of a column, and which cells are not empty, bool (n,).

    Args:
        rule: a rule of the kind `image` or `words`.
        cells: the cells: paths, bytes, pictures or arrays of bytes (H, W), (H, W, 3) for images; texts for words.
        where: the beginning of an error text.
        folder: the folder of the data file, in which paths begin and to which they are confined. None for data of a
            Python program, whose paths may lead anywhere and begin in the working directory.
        first_line: the line of the first cell in a text file, if each of the others is on the next line; or None.

    Returns:
        Pixels, uint8 (n, 3, size, size), or ids, int64 (n, length), with zeros for empty cells.

    Raises:
        DataError: cells cannot be read. The message names them, at most `MOST_FAULTS`, and how many more there are.
        RecipeError: Pillow is not installed.
    """
    if rule.kind == "image":
        optional("PIL.Image", "image")
    read: Cell = (lambda cell: _pixels(cell, rule.side, folder)) if rule.kind == "image" else _reader_of(rule)
    result = np.zeros((len(cells), *rule.shape), np.uint8 if rule.kind == "image" else np.int64)
    there, faults = np.ones(len(cells), np.bool_), list[str]()
    for row, cell in enumerate(cells):
        try:
            sample = read(cell)
        except (*DAMAGED, struct.error, zlib.error, MemoryError) as error:
            at = f"row {row}" if first_line is None else f"row {row} (line {first_line + row})"
            faults.append(f"{at}: {_named(cell)}{str(error) or type(error).__name__}")
            continue
        there[row] = sample is not None
        if sample is not None:
            result[row] = sample
    if faults:
        more = f"; {len(faults) - MOST_FAULTS:,} more rows have such faults" if len(faults) > MOST_FAULTS else ""
        raise DataError(
            f"{where}, {'; '.join(faults[:MOST_FAULTS])}{more}. Correct the cells, or leave them empty where the row "
            "lacks it"
        )
    return result, there


def _named(cell: Any) -> str:
    """Return the file that a cell names, for the beginning of a fault, or nothing."""
    cell = cell.get("path") if isinstance(cell, Mapping) and not cell.get("bytes") else cell
    return f"'{cell}' " if isinstance(cell, str | PathLike) and len(str(cell)) <= LONGEST_NAME else ""


def _reader_of(rule: ColumnRule) -> Cell:
    def read(cell: Any) -> NDArray[Any] | None:
        if is_missing(cell):
            return None
        if not isinstance(cell, str | int | float | np.generic):
            raise ValueError(f"holds a {type(cell).__name__} and no text")
        ids = token_ids(word_of(cell), rule.buckets, rule.length)
        return ids if ids.any() else None

    return read


def token_ids(text: str, buckets: int, length: int) -> NDArray[np.int64]:
    """Return the ids of the first words of a text, int64 (length,): 1 to `buckets`, and 0 for padding.

    A word is a run of letters, digits and `_`, in lower case. Its id is that of its BLAKE2b hash, the same on every
    machine.

    >>> token_ids("A fox, a FOX!", 4096, 6).tolist()
    [560, 952, 560, 952, 0, 0]
    """
    result = np.zeros(length, np.int64)
    words = WORD.findall(unicodedata.normalize("NFC", text).lower())[:length]
    for place, word in enumerate(words):
        digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        result[place] = 1 + int.from_bytes(digest, "big") % buckets
    return result


def _pixels(cell: Any, size: int, folder: Path | None) -> NDArray[np.uint8] | None:
    """Return the middle square of an image, uint8 (3, size, size), or None for an empty cell.

    Raises:
        ValueError: the cell is no image; and every exception of Pillow.
    """
    from PIL import Image, ImageOps

    if isinstance(cell, Mapping):  # a picture of the library `datasets`
        cell = cell.get("bytes") or cell.get("path")
    if is_missing(cell) or (isinstance(cell, str) and not cell.strip()):
        return None
    if hasattr(cell, "getbands"):
        image = _rgb(cell)
    elif isinstance(cell, np.ndarray):
        if cell.dtype != np.uint8 or cell.ndim not in (2, 3):
            raise ValueError(f"holds {cell.dtype} {cell.shape}; an image is uint8 (H, W) or (H, W, 3)")
        image = _rgb(Image.fromarray(cell))
    else:
        source = io.BytesIO(cell) if isinstance(cell, bytes) else _file(cell, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which the line after `open` refuses, and of odd metadata
            try:
                opened = Image.open(source, formats=FORMATS)
            except Image.DecompressionBombError:
                raise ValueError(f"has more than {MOST_PIXELS:,} pixels; make it smaller") from None
            with opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise ValueError(f"has {opened.width} x {opened.height} pixels; make it smaller")
                opened.draft("RGB", (2 * size, 2 * size))  # JPEG: decodes no more pixels than needed
                image = _rgb(ImageOps.exif_transpose(opened))
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).transpose(2, 0, 1)


def _rgb(image: Any) -> Any:
    """Return a picture of Pillow in RGB. `convert` would cut 16-bit grey values off at 255."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65_535) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("is an image of floats, whose range nobody states; save it with 8 or 16 bits")
    return image.convert("RGB")


def _file(cell: Any, folder: Path | None) -> Path:
    """Return the file that a cell names.

    Raises:
        ValueError: the cell is no path, there is no such file, or it is outside the folder.
    """
    if not isinstance(cell, str | PathLike):
        raise ValueError(f"holds a {type(cell).__name__} and no path of an image")
    path = Path(cell.replace("\\", "/") if isinstance(cell, str) else cell)
    if folder is not None:
        base = folder.resolve()
        path = (base / path).resolve()
        if not path.is_relative_to(base):
            raise ValueError(f"'{cell}' is outside '{folder}', the folder of the data file")
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'")
    return path


def as_cells(values: Any) -> NDArray[Any]:
    """Return one entry for each sample, as objects (n,): `numpy.array` would read a list of pictures as numbers."""
    result = np.empty(len(values), dtype=object)
    for row, cell in enumerate(values):
        result[row] = cell.detach().cpu().numpy() if isinstance(cell, Tensor) else cell
    return result


def are_images(cells: Sequence[Any]) -> bool:
    """Whether cells that are not empty name image files, as far as their names tell, or hold their bytes."""
    return bool(cells) and all(
        cell.lower().endswith(SUFFIXES)
        if isinstance(cell, str)
        else isinstance(cell, bytes) or (isinstance(cell, Mapping) and {"bytes", "path"} <= {*cell})
        for cell in cells
    )


def are_texts(cells: Sequence[Any]) -> bool:
    """Whether cells that are not empty are texts: at least half of them have several words."""
    words = [len(WORD.findall(cell)) for cell in cells if isinstance(cell, str)]
    return bool(cells) and len(words) == len(cells) and 2 * sum(count > 1 for count in words) >= len(words)
