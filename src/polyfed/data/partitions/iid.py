"""Partitions that ignore the labels: equal random shards for clients (`iid`) or for silos (`silos`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyfed.core import keys
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import Partition, require_rows
from polyfed.data.partitions.shards import Rows, RowSlices


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Shuffled shards of equal size; sizes differ by at most one row.

    Attributes:
        num: Number of clients.
    """

    num: int

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Shuffle the rows and cut them into `num` pieces; see `Partition.split`."""
        require_rows(columns, rows, self.num, 1)
        bounds = np.arange(self.num + 1) * len(rows) // self.num
        keys.generator(key).shuffle(rows)  # in place, because a second copy would be the peak of a run's memory
        return RowSlices(rows, bounds)


@dataclass(frozen=True, kw_only=True)
class Silos(Partition):
    """HFM's setting: shuffled shards of equal size for `silos` silos; all devices of a silo hold the same rows.

    `polyfed.data.populate` gives the shard of a silo to each of its devices.

    Attributes:
        silos: Number of silos; 4 is inferred, see docs/partitions.md.
    """

    silos: int = 4

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split the rows over silos: one array for each silo, not for each device; see `Partition.split`."""
        return Iid(num=self.silos).split(columns, rows, key)
