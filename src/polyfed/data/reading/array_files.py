"""Reads arrays from untrusted files, without pickle, and never allocates more memory than the file's size justifies.

`Arrays` reads `.npz` files and folders of `.npy` files, `read_npy` reads a single `.npy` file, and `read_idx` reads
MNIST's format. Before it allocates memory, each of them compares the header with the bytes in the file. Every fault is
a `DataError` that names the file and the array, and tells what to do.
"""

import gzip
import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, did_you_mean
from polyfed.data.reading.values import tensor_of

Array = NDArray[Any]

T = TypeVar("T")

_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # numpy tokenizes headers that Python 2 wrote
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    OverflowError,
    RuntimeError,  # an encrypted member, a header nested too deeply
    MemoryError,
)
"""The exceptions that numpy, zipfile and the decompressors raise for a damaged or malicious file."""

_HEADER_BYTES = 16_384  # numpy writes headers of at most 10,000 characters

_LARGE, _HIGHEST_RATIO = 1 << 28, 100
"""Data of more than 256 MiB that expands more than a hundredfold counts as a zip bomb."""

_MOST_AXES = 8  # the largest number of axes of an idx file; MNIST's images have three


def existing(path: str | Path, what: str) -> Path:
    """Return the path, with `~` expanded.

    Raises:
        DataError: The path does not exist; the message contains `what`, the description of the wanted data.
    """
    result = Path(path).expanduser()
    if not result.exists():
        raise DataError(f"{what}: '{result}' does not exist (looked from '{Path.cwd()}'). Give the right data path")
    return result


class Arrays:
    """Named arrays of an `.npz` file, or of a folder of `<name>.npy` files, which are memory-mapped.

    Object arrays are refused, because reading one would run code from the file.

    Args:
        path: The `.npz` file or the folder.

    Raises:
        DataError: The path does not exist, the folder has no `.npy` file, or the file is not a zip archive.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "arrays")
        self.names: tuple[str, ...]
        if self.path.is_dir():
            self.names = tuple(sorted(file.stem for file in self.path.glob("*.npy")))
            if not self.names:
                raise DataError(f"'{self.path}' is a folder without .npy files; give an .npz file or a folder of .npy")
            return
        try:
            with zipfile.ZipFile(self.path) as archive:
                self.names = tuple(name.removesuffix(".npy") for name in archive.namelist())
        except _UNREADABLE as error:
            raise DataError(
                f"'{self.path}' is not a whole .npz file ({_words(error)}). Copy or build it again with numpy.savez"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Array:
        return self._read(name, self._array)

    def form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the type of an array, from its header alone.

        Raises:
            DataError: as when the array is read.
        """
        result: tuple[tuple[int, ...], np.dtype[Any]] = self._read(name, lambda stream, form: form)
        return result

    def _array(self, stream: IO[bytes], form: Any) -> Array:
        if self.path.is_dir():
            # copy on write: pages come from the file, and PyTorch gets an array that it may treat as writable
            return np.asarray(np.load(stream.name, mmap_mode="c", allow_pickle=False))
        stream.seek(0)
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))

    def _read(self, name: str, read: Callable[[IO[bytes], Any], T]) -> T:
        """Return what a function reads from the stream of an array, whose header was checked."""
        if name not in self.names:
            raise DataError(f"'{self.path}' has no array '{name}'; {did_you_mean(name, self.names)}")
        where = f"'{self.path}': array '{name}'"
        try:
            if self.path.is_dir():
                file = self.path / f"{name}.npy"
                with file.open("rb") as stream:
                    return read(stream, _check_header(stream, file.stat().st_size, where))
            with zipfile.ZipFile(self.path) as archive:
                member = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name)
                self._check_member(member, where)
                with archive.open(member) as inner:
                    return read(inner, _check_header(inner, member.file_size, where))
        except _UNREADABLE as error:
            raise DataError(
                f"{where} is damaged or cut short ({_words(error)}). Copy or build the file again"
            ) from error

    def _check_member(self, member: zipfile.ZipInfo, where: str) -> None:
        """Raise DataError if a member of the archive claims more bytes than the archive can hold, or cannot be read."""
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # numpy writes no other compression, and an LZMA header may make the decoder allocate gigabytes
            raise DataError(
                f"{where} is compressed by method {member.compress_type}, which numpy never writes. "
                "Build the file with numpy.savez or numpy.savez_compressed"
            )
        if member.compress_size > self.path.stat().st_size:
            raise DataError(
                f"{where} claims {member.compress_size:,} bytes in a file of {self.path.stat().st_size:,}. "
                "Copy or build the file again"
            )
        cure = "save it with numpy.savez (not compressed), or as a folder of .npy files"
        check_expansion(where, member.compress_size, member.file_size, cure)

    def integers(self, name: str) -> Tensor:
        """An array of whole numbers (N,) as int64.

        Raises:
            DataError: The array is missing, unreadable, has several axes, or does not hold integers. Floats are
                refused, because rounding them would hide a mistake.
        """
        array = self[name]
        if array.dtype.kind not in "iub" or array.ndim != 1:
            raise DataError(
                f"'{self.path}': array '{name}' must hold integers, one a row; it is {array.dtype} "
                f"{array.shape}. Save it as int64 of shape (N,)"
            )
        return torch.from_numpy(array.astype(np.int64))

    def labels(self, name: str) -> Tensor:
        """Return labels: classes as int64 (N,), or regression targets as float32 (N,), or (N, T) for T targets a row.

        Raises:
            DataError: The array is missing or unreadable, or its entries are not labels.
        """
        array = self[name]
        if array.dtype.kind not in "iubf" or array.ndim not in (1, 2) or 0 in array.shape[1:]:
            raise DataError(
                f"'{self.path}': array '{name}' cannot hold labels: {array.dtype} {array.shape}. Save class numbers as "
                "int64 (N,), or targets as float32 (N,) or (N, T)"
            )
        if array.ndim == 1 and array.dtype.kind != "f":
            return torch.from_numpy(array.astype(np.int64))
        return torch.from_numpy(array.astype(np.float32))

    def strings(self, name: str) -> tuple[str, ...]:
        """An array of texts or whole numbers (N,), as texts.

        Raises:
            DataError: The array is missing or unreadable, has several axes, or holds neither texts nor integers.
        """
        array = self[name]
        if array.dtype.kind not in "iuUS" or array.ndim != 1:
            raise DataError(
                f"'{self.path}': array '{name}' must hold strings or integers, one for each entry; "
                f"it is {array.dtype} {array.shape}. Save it as strings of shape (N,)"
            )
        try:
            return tuple(text.decode() if isinstance(text, bytes) else str(text) for text in array.tolist())
        except ValueError as error:  # the bytes are not text
            raise DataError(f"'{self.path}': array '{name}' holds no valid text ({error}). Save it again") from error

    def features(self, name: str) -> Tensor:
        """Return an array of numbers (N, ...). PyTorch cannot index some types, which are converted to a similar type.

        Raises:
            DataError: The array is missing, unreadable, not numeric, or has only one axis.
        """
        array = self[name]
        if array.dtype.kind not in "fiub" or array.ndim < 2:
            raise DataError(
                f"'{self.path}': array '{name}' cannot be a modality: {array.dtype} {array.shape}. "
                "It needs numbers of shape (N, ...), one sample a row"
            )
        return tensor_of(array)


def check_expansion(where: str, size: int, expanded: int, cure: str) -> None:
    """Refuse data that would take much more memory than its size in the file justifies.

    Args:
        where: the file, and the part of it.
        size: bytes in the file.
        expanded: bytes in memory.
        cure: how to save data of one's own that is refused.

    Raises:
        DataError: the data takes more than 256 MiB and more than a hundred times its size.
    """
    if expanded > max(_LARGE, _HIGHEST_RATIO * size):
        raise DataError(
            f"{where} would expand from {size:,} to {expanded:,} bytes, like a zip bomb. If the data is yours, {cure}"
        )


def read_npy(path: Path) -> Array:
    """The array of a `.npy` file, read into memory.

    Raises:
        DataError: The file is missing or damaged, or its header claims more than the file holds.
    """
    try:
        with path.open("rb") as stream:
            _check_header(stream, path.stat().st_size, f"'{path}'")
            stream.seek(0)
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    except _UNREADABLE as error:
        raise DataError(f"'{path}' is damaged ({_words(error)}). Delete it and build it again") from error


def stored_name(path: Path) -> str:
    """Return a name for the data set in this file or folder."""
    return path.stem if path.is_file() else path.name


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes (MNIST's format), plain or `.gz`: uint8, of the shape in its header.

    The header is two zero bytes, the type 0x08, the number of axes, then each axis as a big-endian 32-bit integer.

    Raises:
        DataError: The file is damaged, has another type, or is not as long as its header says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _idx(stream, path)
    except _UNREADABLE as error:
        raise DataError(f"'{path}' is damaged or cut short ({_words(error)}). Fetch it again") from error


def _idx(stream: io.BufferedIOBase, path: Path) -> Tensor:
    start = stream.read(4)
    if len(start) < 4 or start[:3] != b"\x00\x00\x08" or not 1 <= start[3] <= _MOST_AXES:
        raise DataError(
            f"'{path}' is not an idx file of unsigned bytes: it starts with {start.hex() or 'nothing'}. Fetch it again"
        )
    axes = stream.read(4 * start[3])
    shape = struct.unpack(f">{start[3]}I", axes) if len(axes) == 4 * start[3] else (-1,)
    # deflate, used in .gz, expands a byte to at most 1,032 bytes, so a header that claims more is wrong
    claimed, possible = math.prod(shape), path.stat().st_size * (1032 if path.suffix == ".gz" else 1)
    raw = stream.read(claimed + 1) if 0 <= claimed <= possible else b""
    if len(raw) != claimed:
        raise DataError(
            f"'{path}' is cut short or too long: its header says {shape}, which its {path.stat().st_size:,} bytes do "
            "not hold. Fetch it again"
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(shape).copy())


def _check_header(stream: IO[bytes], size: int, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Compare the header of a `.npy` stream of `size` bytes with this size, before anything is allocated.

    Returns:
        The shape and the type of the array.

    Raises:
        DataError: The array holds Python objects, or claims more bytes than the stream has.
        ValueError: The header cannot be read.
    """
    head = io.BytesIO(stream.read(_HEADER_BYTES))
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"unknown version {version} of the .npy format")
    # headers of versions 2 and 3 differ only in their encoding, which affects only the names of fields
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(head)
    if dtype.hasobject:
        raise DataError(
            f"{where} holds Python objects, which polyfed never unpickles. Numbers and words are "
            "allowed: save numbers as a numeric type, and words as numpy.array(list(words), dtype=str)"
        )
    count: int = math.prod(shape)
    if any(length < 0 for length in shape) or (dtype.itemsize == 0 and count):
        raise ValueError(f"shape {shape} of {dtype}")
    claimed, there = count * dtype.itemsize, size - head.tell()
    if claimed > there:
        raise DataError(
            f"{where} claims shape {shape} of {dtype}, {claimed:,} bytes, but {there:,} bytes are there. "
            "Copy or build the file again"
        )
    return shape, dtype


def _words(error: BaseException) -> str:
    """Return the message of an error, or the error's name if it has no message (such as MemoryError)."""
    return str(error) or type(error).__name__
