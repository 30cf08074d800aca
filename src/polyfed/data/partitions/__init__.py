"""Partitions split training rows over clients. Each `[clients] partition` is a class here; see docs/partitions.md.

To add a partition, write a frozen dataclass that extends `Partition` in a new file, and add a line to `PARTITIONS`
below.

- `base`: the base class `Partition`, and the steps that partitions share.
- `iid`: `iid` and `silos`, equal random shards, and silos of given sizes.
- `dirichlet`: `dirichlet` and `dirichlet-authors`, label skew by a Dirichlet distribution.
- `label_skew`: `classes-per-client` and `main-class`, label skew of the FMML paper.
- `by_client`: `by-client`, the natural clients of the data.
- `shards`: the rows of all clients, compressed into two arrays.
"""

from polyfed.data.partitions.base import Partition
from polyfed.data.partitions.by_client import ByClient
from polyfed.data.partitions.dirichlet import Dirichlet, DirichletAuthors
from polyfed.data.partitions.iid import Iid, Silos
from polyfed.data.partitions.label_skew import ClassesPerClient, MainClass

PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-authors": DirichletAuthors,
    "by-client": ByClient,
    "classes-per-client": ClassesPerClient,
    "main-class": MainClass,
    "silos": Silos,
}
"""Partitions by the name that `[clients] partition` gives."""

__all__ = ["PARTITIONS", "Partition"]
