"""Partitions split training rows over clients. Each `[clients] partition` is a class here; see docs/partitions.md.

To add a partition, write a frozen dataclass that extends `Partition` in a new file, and add a line to `PARTITIONS`
below.

The modules, and the partitions in them:

- `base`: the base class `Partition`, and the steps that partitions share.
- `iid`: `iid` and `silos` make random shards of equal size. `[clients] silo_sizes` makes silos of given sizes.
- `dirichlet`: `dirichlet` and `dirichlet-authors` make label skew with a Dirichlet distribution.
- `label_skew`: `classes-per-client` and `main-class` make the label skew of the FMML paper.
- `by_client`: `by-client` uses the natural clients of the data.
- `shards`: stores the rows of all clients in two arrays.
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
