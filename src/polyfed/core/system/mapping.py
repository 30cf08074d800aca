"""Large tensors in mapped files: they take memory only while they are read, and the system takes it back when it needs.

A process that reads such a tensor shares the system's cache of the file. A change stays in the memory of the process.
"""

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyfed.core.tree import Tree, clone

LARGE = 2**20
"""From this size in bytes on, a tensor or the body of a message may stay in a file."""

ALIGNED = 64
"""A large tensor begins at a multiple of so many bytes, as PyTorch allocates it: operations round by the alignment."""


def gap(place: int, size: int) -> int:
    """Return how many bytes lie between a place of a file and a tensor of so many bytes that comes next."""
    return -place % ALIGNED if size >= LARGE else 0


def mapped(path: Path) -> bytes | memoryview:
    """Return the content of a file. A large file is mapped, so that it takes memory only where it is changed."""
    with open(path, "rb") as file:
        if path.stat().st_size < LARGE:
            return file.read()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which is not copied."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def on_disk(tree: Mapping[str, Tensor], folder: Path) -> Tree:
    """Return a copy of a tree whose large tensors lie in a file without a name, which goes with the last of them.

    Args:
        tree: the tree. Tensors on a GPU, and tensors that are not contiguous, are copied in memory.
        folder: where the file lies.

    Raises:
        OSError: the file cannot be written.
    """
    large = {
        name: value
        for name, value in tree.items()
        if value.nbytes >= LARGE and value.device.type == "cpu" and value.is_contiguous()
    }
    result = clone({name: value for name, value in tree.items() if name not in large})
    if not large:
        return result
    places, place = dict[str, int](), 0
    with tempfile.TemporaryFile(dir=folder) as file:
        for name, value in large.items():
            place += file.write(bytes(gap(place, value.nbytes)))
            places[name] = place
            place += file.write(bytes_of(value))
        file.flush()
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    for name, value in large.items():
        flat = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=places[name])
        result[name] = flat.reshape(value.shape)
    return {name: result[name] for name in tree}
