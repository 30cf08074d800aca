"""The rows of all clients, stored in two arrays for any number of clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core import keys

Rows = NDArray[np.int64]


def share_of(share: float, counts: Rows | int) -> Rows:
    """Return `floor(share * count)`, for one count or each of several."""
    # 1e-9: 0.29 * 100 must give 29, but is 28.999999999999996 in binary
    return np.floor(share * np.asarray(counts) + 1e-9).astype(np.int64)


class RowSlices(Sequence[Rows]):
    """Consecutive slices of one array. Each slice is made on access.

    A list of a hundred thousand small arrays would need several times as much memory as one array of the same numbers.

    Args:
        rows: int64 (n,).
        bounds: int64 (K + 1,), ascending: slice k is `rows[bounds[k] : bounds[k + 1]]`.
    """

    def __init__(self, rows: Rows, bounds: NDArray[np.int64]) -> None:
        self.rows, self.bounds = rows, bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, at: int) -> Rows: ...
    @overload
    def __getitem__(self, at: slice) -> list[Rows]: ...
    def __getitem__(self, at: int | slice) -> Rows | list[Rows]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        return self.rows[self.bounds[number] : self.bounds[number + 1]]


@dataclass(frozen=True)
class Shards:
    """Rows of every client, compressed: client k has `rows[offsets[k] : offsets[k + 1]]`.

    Attributes:
        offsets: int64 (K + 1,), ascending from 0 to n.
        rows: int64 (n,), row numbers of the whole table.
    """

    offsets: Tensor
    rows: Tensor

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> "Shards":
        """Compress one array of rows per client."""
        if isinstance(parts, RowSlices):
            bounds = parts.bounds.astype(np.int64)
            return cls(torch.from_numpy(bounds - bounds[0]), torch.from_numpy(parts.rows[bounds[0] : bounds[-1]]))
        sizes = np.fromiter((len(part) for part in parts), np.int64, len(parts))
        rows = np.concatenate(parts) if len(parts) else np.zeros(0)
        return cls._sized(sizes, rows.astype(np.int64, copy=False))

    @classmethod
    def _sized(cls, sizes: Rows, rows: Rows) -> "Shards":
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        return cls(torch.from_numpy(offsets.astype(np.int64)), torch.from_numpy(rows))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1  # `len` of a tensor is three times as slow

    def __getitem__(self, client: int) -> Tensor:
        """Rows of one client, int64 (n_k,)."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        start, end = self.offsets[client : client + 2].tolist()
        return self.rows[start:end]

    def padded(self, clients: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        """Rows of several clients, int64 (len(clients), n), and the number of rows of each client.

        The first row of a client is its padding, so that a model computes no values from the rows of other clients.
        The padding of a client without rows is 0.
        """
        picked, offsets = np.array(clients, np.int64), self.offsets.numpy()
        first, sizes = offsets[picked], offsets[picked + 1] - offsets[picked]
        place = np.arange(max(sizes, default=0))
        inside = place < sizes[:, None]
        index = np.zeros(inside.shape, np.int64)
        index[sizes > 0] = self.rows.numpy()[first[sizes > 0]][:, None]
        index[inside] = self.rows.numpy()[(first[:, None] + place)[inside]]
        return torch.from_numpy(index), tuple(sizes.tolist())

    @property
    def sizes(self) -> Tensor:
        """Rows per client, int64 (K,)."""
        return self.offsets.diff()

    @property
    def owner(self) -> Tensor:
        """Client of every entry of `rows`, int64 (n,)."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def held_out(self, share: float, key: int) -> tuple["Shards", "Shards"]:
        """Remove `floor(share * n_k)` random rows from every client, and return both parts.

        Returns:
            The rows that remain, and the rows that were removed.
        """
        if share == 0.0:
            return self, self.where(torch.zeros(len(self.rows), dtype=torch.bool))
        sizes, owner = self.sizes.numpy(), self.owner.numpy()
        order = np.lexsort((keys.generator(key).random(len(owner)), owner))
        rank = np.empty(len(owner), np.int64)
        rank[order] = np.arange(len(owner)) - self.offsets.numpy()[owner]
        off = rank < share_of(share, sizes)[owner]
        return self.where(torch.from_numpy(~off)), self.where(torch.from_numpy(off))

    def where(self, keep: Tensor) -> "Shards":
        """Keep only the entries where `keep`, bool (n,), is true; clients may become empty."""
        if bool(keep.all()):
            return self  # no copy: with many clients these arrays are most of a run's memory
        if not bool(keep.any()):
            return Shards(torch.zeros_like(self.offsets), self.rows[:0])
        sizes = torch.bincount(self.owner[keep], minlength=len(self))
        return self._sized(sizes.numpy(), self.rows[keep].numpy())

    def first(self, most: int) -> "Shards":
        """The first `most` rows of every client."""
        return self.where(torch.arange(len(self.rows)) - self.offsets[self.owner] < most)

    def repeated(self, times: int) -> "Shards":
        """Repeat every client `times` times, each copy with the same rows."""
        if times == 1:
            return self
        return Shards.of([part.numpy() for k in range(len(self)) for part in [self[k]] * times])

    def counts(self, values: Tensor, num: int) -> Tensor:
        """How often each value occurs among a client's rows, int64 (K, num).

        Args:
            values: int64 (N,), a value in range(num) for each row of the whole table.
            num: Number of different values.
        """
        return torch.bincount(self.owner * num + values[self.rows], minlength=len(self) * num).view(-1, num)
