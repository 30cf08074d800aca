"""Reading arrays from disk without trusting them: no pickle, and errors that name file, array and cure."""

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, did_you_mean

Array = NDArray[Any]

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


def existing(path: str | Path, what: str) -> Path:
    """The path if it is there; else a DataError that says what was looked for."""
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"{what}: '{found}' does not exist (looked from '{Path.cwd()}'). Give the right data path")
    return found


class Arrays:
    """Named arrays of an `.npz` file, or of a folder of `<name>.npy` files, which are memory mapped.

    Object arrays are refused, since reading one would run code from the file.
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
        except _DAMAGED as error:
            raise DataError(
                f"'{self.path}' is not a whole .npz file ({error}). Copy or build it again with numpy.savez"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Array:
        if name not in self.names:
            raise DataError(f"'{self.path}' has no array '{name}'; {did_you_mean(name, self.names)}")
        try:
            if self.path.is_dir():
                # copy on write: pages come from the file, and PyTorch gets an array it may call writable
                return np.asarray(np.load(self.path / f"{name}.npy", mmap_mode="c", allow_pickle=False))
            with np.load(self.path, allow_pickle=False) as archive:
                return np.asarray(archive[name])
        except _DAMAGED as error:
            if "allow_pickle" in str(error):
                fix = "holds Python objects, which polyfed never unpickles. Save it as a plain numeric array"
            else:
                fix = f"is damaged or cut short ({error}). Copy or build the file again"
            raise DataError(f"'{self.path}': array '{name}' {fix}") from error

    def integers(self, name: str) -> Tensor:
        """An array of whole numbers (N,) as int64; floats are refused: rounding would hide a mistake."""
        array = self[name]
        if array.dtype.kind not in "iub" or array.ndim != 1:
            raise DataError(
                f"'{self.path}': array '{name}' must hold integers, one a row; it is {array.dtype} "
                f"{array.shape}. Save it as int64 of shape (N,)"
            )
        return torch.from_numpy(array.astype(np.int64))

    def features(self, name: str) -> Tensor:
        """An array of numbers (N, ...) in the nearest type that PyTorch can index."""
        array = self[name]
        if array.dtype.kind not in "fiub" or array.ndim < 2:
            raise DataError(
                f"'{self.path}': array '{name}' cannot be a modality: {array.dtype} {array.shape}. "
                "It needs numbers of shape (N, ...), one sample a row"
            )
        native = array.dtype.newbyteorder("=")
        return torch.from_numpy(array.astype(_SUBSTITUTES.get(native.name, native), copy=False))


# NumPy types that PyTorch lacks or cannot index, and the next one that it can
_SUBSTITUTES: Mapping[str, str] = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "float64",
    "longdouble": "float64",
    "float128": "float64",
}


def stored_name(path: Path) -> str:
    """A name for the data set in this file or folder."""
    return path.stem if path.is_file() else path.name


def read_idx(path: Path) -> Tensor:
    """An idx file of unsigned bytes (MNIST's format), plain or `.gz`: uint8, shape as its header says.

    Header: two zero bytes, type 0x08, number of axes, then each axis as a big-endian 32-bit integer.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except _DAMAGED as error:
        raise DataError(f"'{path}' is damaged or cut short ({error}). Fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"'{path}' is not an idx file of unsigned bytes: it starts with {raw[:4].hex() or 'nothing'}")
    axes = raw[3]
    header = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", raw[4:header]) if len(raw) >= header else (-1,)
    if len(raw) != header + math.prod(shape):
        raise DataError(f"'{path}' is cut short or too long: header says {shape}, file has {len(raw)} bytes")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())
