"""Shared memory between the server's process and a worker process: one process writes tensors, the other reads them.

The memory is an anonymous file (Linux `memfd`), which a forked process inherits. It is not in /dev/shm, because
containers limit the size of /dev/shm to 64 MB by default. The operating system frees the memory when the last process
that holds it has ended.
"""

import math
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes (a cache line), as in PyTorch's own allocations."""

FIRST_SIZE = 2**20
"""Size in bytes of a new arena. The arena grows if a message needs more."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in an arena.

    Attributes:
        start: offset of the tensor's first byte.
        dtype: the tensor's type.
        shape: the tensor's shape.
        end: offset at which the content of the arena ends, after the last tensor of the same call of `Arena.write`. The
            reader maps the arena from its start to this offset, or further.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    end: int


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, made with one thread."""
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    _copy(tensor, copy)
    return copy


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy the values of a tensor into a contiguous tensor on the CPU with one thread.

    PyTorch would copy a large tensor with all its threads. They would take cores from the worker processes, also for
    some time after the copy (`core/system/openmp.py`).
    """
    place, values = (t.detach().view(-1).view(torch.uint8).numpy() for t in (target, source.cpu().contiguous()))
    np.copyto(place, values)


class Memory(Protocol):
    """What holds the tensors of one message at a time between two processes."""

    def write(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Copy tensors into the memory, overwrite its previous content, and return their places."""

    def read(self, places: Iterable[Place]) -> list[Tensor]:
        """Return the tensors at these places as views of the memory. Equal places give the same object."""

    def close(self) -> None:
        """Release the memory in this process."""


class Arena:
    """A piece of shared memory that holds the tensors of one message at a time. Create it before the process forks."""

    def __init__(self) -> None:
        self._file = os.memfd_create("polyfed")
        self._size = FIRST_SIZE
        os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)
        self._close = weakref.finalize(self, os.close, self._file)

    def write(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Copy tensors into the arena, overwrite its previous content, and return their places.

        A tensor that occurs several times is copied once. The result then holds the same place several times.
        """
        given = list(tensors)
        places = _places(given)
        self._map(places[0].end if places else 0)
        _write(given, places, self._memory)
        return places

    def read(self, places: Iterable[Place]) -> list[Tensor]:
        """Return the tensors at these places as views of the shared memory. Equal places give the same object.

        The views are valid until the other process writes again. Clone tensors that you need for longer.
        """
        result: dict[Place, Tensor] = {}
        for place in (given := list(places)):
            if place not in result:
                self._map(place.end)
                result[place] = _view(self._memory, place)
        return [result[place] for place in given]

    def close(self) -> None:
        """Release the memory in this process. Views that still exist stay valid."""
        self._close()

    def _map(self, size: int) -> None:
        """Map at least `size` bytes. Views of an earlier mapping stay valid."""
        if size <= self._size:
            return
        self._size = max(size, 2 * self._size)
        if os.fstat(self._file).st_size < self._size:
            os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)


class Packed:
    """Ordinary memory that travels whole, as one array of bytes, from one machine to another.

    Attributes:
        content: the bytes, (n,).
    """

    def __init__(self, content: NDArray[np.uint8] | None = None) -> None:
        self.content = np.zeros(0, np.uint8) if content is None else content

    def write(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Copy tensors into a new array; see `Arena.write`. Earlier arrays stay as they are, also on their way."""
        given = list(tensors)
        places = _places(given)
        self.content = np.zeros(places[0].end if places else 0, np.uint8)
        _write(given, places, self.content)
        return places

    def read(self, places: Iterable[Place]) -> list[Tensor]:
        """Return the tensors at these places as views of the array; see `Arena.read`."""
        given = list(places)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an array that Ray keeps is not writable
            result = {place: _view(self.content, place) for place in dict.fromkeys(given)}
        return [result[place] for place in given]

    def close(self) -> None:
        """Forget the array."""
        self.content = np.zeros(0, np.uint8)


def _places(given: list[Tensor]) -> list[Place]:
    """Return where tensors lie one after another. A tensor that occurs several times has one place."""
    starts: dict[int, int] = {}
    end = 0
    for tensor in given:
        if id(tensor) not in starts:
            starts[id(tensor)] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return [Place(starts[id(tensor)], tensor.dtype, tuple(tensor.shape), end) for tensor in given]


def _write(given: list[Tensor], places: list[Place], memory: Any) -> None:
    """Copy each tensor to its place, once."""
    for place, tensor in {place: tensor for tensor, place in zip(given, places, strict=True)}.items():
        _copy(tensor, _view(memory, place))


def _view(memory: Any, place: Place) -> Tensor:
    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).reshape(place.shape)
