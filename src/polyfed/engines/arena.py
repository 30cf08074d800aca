"""Shared memory of the server's process and a worker process: one of them writes tensors, the other one reads them.

The memory is an anonymous file (Linux `memfd`), which a forked process inherits. It is not in /dev/shm, whose size
containers limit to 64 MB by default, and the system frees it when the last process that holds it has ended.
"""

import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, a cache line, as PyTorch's own allocations do."""

FIRST_SIZE = 2**20
"""Size in bytes of a new arena; it grows when more is written."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in an arena.

    Attributes:
        start: offset of its first byte.
        dtype: its type.
        shape: its shape.
        end: end in bytes of everything that was written with it; the reader maps at least this much.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    end: int


class Arena:
    """A piece of shared memory that holds the tensors of one message at a time. Create it before the process forks."""

    def __init__(self) -> None:
        self._file = os.memfd_create("polyfed")
        self._size = FIRST_SIZE
        os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)
        self._close = weakref.finalize(self, os.close, self._file)

    def write(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Copy tensors into the arena, over what it held, and return their places.

        A tensor that occurs more than once is copied once, and all of its places are the same.
        """
        given = list(tensors)
        starts: dict[int, int] = {}
        end = 0
        for tensor in given:
            if id(tensor) not in starts:
                starts[id(tensor)] = end
                end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._map(end)
        written: set[int] = set()
        places = []
        for tensor in given:
            place = Place(starts[id(tensor)], tensor.dtype, tuple(tensor.shape), end)
            places.append(place)
            if id(tensor) not in written:
                written.add(id(tensor))
                self._view(place).copy_(tensor.detach())
        return places

    def read(self, places: Iterable[Place]) -> list[Tensor]:
        """Return the tensors at these places as views of the shared memory; equal places give the same object.

        The views are valid until the other process writes again. Clone what has to live longer.
        """
        found: dict[Place, Tensor] = {}
        for place in (given := list(places)):
            if place not in found:
                self._map(place.end)
                found[place] = self._view(place)
        return [found[place] for place in given]

    def close(self) -> None:
        """Give up this process's share of the memory; views that are still held stay valid."""
        self._close()

    def _map(self, size: int) -> None:
        """Map at least `size` bytes; views of an earlier mapping stay valid."""
        if size <= self._size:
            return
        self._size = max(size, 2 * self._size)
        if os.fstat(self._file).st_size < self._size:
            os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)

    def _view(self, place: Place) -> Tensor:
        count = 1
        for size in place.shape:
            count *= size
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=place.start).reshape(place.shape)
