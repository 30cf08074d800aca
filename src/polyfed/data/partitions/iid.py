"""Partitions that ignore the labels: equal shards for clients (`iid`) or silos (`silos`), and shards of given sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from polyfed.core import keys
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import Partition, require_rows
from polyfed.data.partitions.shards import Rows, RowSlices

SILOS = 4
"""The number of silos if a recipe gives none."""


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Shuffled shards of nearly equal size: the sizes differ by at most one row.

    Attributes:
        num: Number of clients.
    """

    num: int

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        require_rows(columns, rows, self.num, 1)
        bounds = np.arange(self.num + 1) * len(rows) // self.num
        keys.generator(key).shuffle(rows)  # in place, because a second copy would be the peak of a run's memory
        return RowSlices(rows, bounds)


@dataclass(frozen=True, kw_only=True)
class Silos(Partition):
    """HFM's setting: shuffled shards of equal size for `silos` silos; all devices of a silo hold the same rows.

    `polyfed.data.populate` gives the shard of a silo to each of its devices.

    Attributes:
        silos: Number of silos. None means 4. HFM's report gives no number, so polyfed inferred it (docs/partitions.md).
    """

    silos: int | None = None

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        return Iid(num=self.silos or SILOS).split(columns, rows, key)


@dataclass(frozen=True, kw_only=True)
class Sized(Partition):
    """Shuffled shards whose sizes are in given proportions; `[clients] silo_sizes` uses this partition.

    Attributes:
        sizes: The relative size of each shard.
    """

    sizes: tuple[float, ...]

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        require_rows(columns, rows, len(self.sizes), 1)
        ends = np.cumsum([0.0, *self.sizes])
        bounds = np.round(ends / ends[-1] * len(rows)).astype(np.int64)
        keys.generator(key).shuffle(rows)
        return RowSlices(rows, bounds)
