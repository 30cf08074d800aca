"""Partitions: which training rows go to which client (specification 6.11, 6.12).

Each is a frozen dataclass whose fields are a part of `ClientsSpec`'s. `split(columns, rows, key)` deals the
given rows out: disjoint, deterministic, one array per client.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.dealing import MAX_REDRAWS, Partition, deal, dirichlet_counts, enough, labels
from polyfed.data.partitions.label_skew import ClassesPerClient, MainClass
from polyfed.data.partitions.shards import Rows, Stretches


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Shuffled equal shards; sizes differ by at most one.

    Attributes:
        num: clients.
    """

    num: int

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Deal the rows out."""
        enough(columns, rows, self.num, 1)
        bounds = np.arange(self.num + 1) * len(rows) // self.num
        keys.generator(key).shuffle(rows)  # in place: with many rows a second copy is the peak of a run's memory
        return Stretches(rows, bounds)


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Label skew by Dirichlet(alpha) per class, as in NIID-Bench (Li et al., ICDE 2022), 6.11.

    For each class, shares over the clients are drawn; clients that already hold N/K rows get none of it, the
    rest is renormalised. Everything is redrawn until the smallest client has `min_size` rows.

    Attributes:
        num: clients.
        alpha: concentration; large is near uniform, 0.1 leaves most clients with a few classes.
        min_size: rows of the smallest client.
    """

    num: int
    alpha: float
    min_size: int = 10

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Deal the rows out."""
        return _dirichlet(self, 1.0, columns, rows, key)


@dataclass(frozen=True, kw_only=True)
class DirichletAuthors(Partition):
    """The variant in CMSFed's released code (6.11): a client is full at 1.1 N/K rows, and there is no least
    size.

    A draw that leaves a client without any row is repeated, as such a client could not train.

    Attributes:
        num: clients.
        alpha: concentration.
    """

    num: int
    alpha: float

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Deal the rows out."""
        draw = Dirichlet(num=self.num, alpha=self.alpha, min_size=1)
        return _dirichlet(draw, 1.1, columns, rows, key)


@dataclass(frozen=True, kw_only=True)
class ByClient(Partition):
    """One client per natural client (speaker, subject, video), in order of their numbers.

    With `shards` above 1, each natural client is cut into that many by Dirichlet(alpha) over its labels: the
    recipe of FedMultimodal's UCI-HAR (21 subjects x 5 = 105 clients, `min_size` 5).

    Attributes:
        shards: clients per natural client.
        alpha: concentration of the cut; unused with one shard.
        min_size: rows of the smallest shard of the cut; unused with one shard.
    """

    shards: int = 1
    alpha: float = 1.0
    min_size: int = 10

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Deal the rows out."""
        natural = natural_clients(columns, rows)
        if self.shards == 1:
            return natural
        cut_up = Dirichlet(num=self.shards, alpha=self.alpha, min_size=self.min_size)
        parts: list[Rows] = []
        for number, own in enumerate(natural):
            if len(own) < self.shards * self.min_size:
                raise RecipeError(
                    f"natural client {number} has {len(own)} rows to deal, too few for clients.shards = "
                    f"{self.shards} of at least clients.min_size = {self.min_size}; lower one of them"
                )
            parts += cut_up.split(columns, own, keys.key(key, "natural client", number))
        return parts


@dataclass(frozen=True, kw_only=True)
class Silos(Partition):
    """HFM's setting (6.11): equal shuffled shards to `silos` silos. `populate` puts a silo's devices on its
    shard.

    Attributes:
        silos: number of silos; 4 [I] in 3.5.
    """

    silos: int = 4

    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """One array of rows per silo."""
        return Iid(num=self.silos).split(columns, rows, key)


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


def natural_clients(columns: Columns, rows: Rows) -> Stretches:
    """The given rows of each natural client that has any, in order of their numbers."""
    if columns.client is None:
        raise RecipeError(
            f"clients.partition = 'by-client', but data '{columns.name}' has no natural clients; "
            "name their array in data.client, or choose another partition"
        )
    client = columns.client.cpu().numpy()[rows]
    order = np.argsort(client, kind="stable")
    return Stretches(rows[order], np.concatenate(([0], np.flatnonzero(np.diff(client[order])) + 1, [len(rows)])))


def _dirichlet(spec: Dirichlet, fill: float, columns: Columns, rows: Rows, key: int) -> Stretches:
    """Draw until the smallest client is large enough; a client is full at `fill` times N/K rows."""
    enough(columns, rows, spec.num, spec.min_size)
    sizes = np.bincount(labels(columns, rows), minlength=columns.num_classes)
    draw = keys.generator(keys.key(key, "shares"))
    best = -1
    for _ in range(MAX_REDRAWS):
        counts = dirichlet_counts(sizes, spec.num, spec.alpha, fill * len(rows) / spec.num, draw)
        best = max(best, int(counts.sum(0).min()))
        if best >= spec.min_size:
            return deal(columns, rows, counts, key)
    raise RecipeError(
        f"dirichlet: in {MAX_REDRAWS} draws the smallest of {spec.num} clients over {len(rows)} rows never had "
        f"more than {best} rows, clients.min_size asks for {spec.min_size}. Lower it, raise clients.alpha, or use "
        "fewer clients"
    )
