"""Label skew by a Dirichlet distribution: `dirichlet` of NIID-Bench, `dirichlet-authors` of CMSFed's released code."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import MAX_REDRAWS, Counts, Partition, labels_of, require_rows, split_by_counts
from polyfed.data.partitions.shards import Rows, RowSlices


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Label skew by Dirichlet(alpha) per class, as in NIID-Bench (Li et al., ICDE 2022).

    For each class, the shares of the clients are drawn. Clients that already hold N/K rows get no rows of the class,
    and the other shares are renormalised. The whole draw is repeated until the smallest client has `min_size` rows.

    Attributes:
        num: Number of clients.
        alpha: Concentration. A large value gives nearly equal shares. With 0.1, most clients have only a few classes.
        min_size: Minimum number of rows of each client.
    """

    num: int
    alpha: float
    min_size: int = 10

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split the rows by Dirichlet shares; see `Partition.split`.

        Raises:
            RecipeError: None of the `MAX_REDRAWS` draws gave every client `min_size` rows.
        """
        return _split(self, 1.0, columns, rows, key)


@dataclass(frozen=True, kw_only=True)
class DirichletAuthors(Partition):
    """The variant in CMSFed's released code: a client is full at 1.1 N/K rows, and there is no minimum size.

    A draw that leaves a client without any row is repeated, because such a client could not train. The released code
    does not repeat the draw.

    Attributes:
        num: Number of clients.
        alpha: Concentration.
    """

    num: int
    alpha: float

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split the rows by Dirichlet shares; see `Partition.split`.

        Raises:
            RecipeError: Each of the `MAX_REDRAWS` draws left a client without a row.
        """
        return _split(Dirichlet(num=self.num, alpha=self.alpha, min_size=1), 1.1, columns, rows, key)


def dirichlet_counts(sizes: Counts, num: int, alpha: float, full: float, draw: np.random.Generator) -> Counts:
    """Return how many rows of each class each client gets, by one Dirichlet(alpha) draw per class (NIID-Bench).

    Args:
        sizes: Rows of each class, int64 (C,).
        num: Number of clients K.
        alpha: Concentration.
        full: A client that already holds this many rows gets no rows of the next class.
        draw: The random number generator.

    Returns:
        int64 (C, K); its rows sum to `sizes`.
    """
    counts = np.zeros((len(sizes), num), dtype=np.int64)
    held = np.zeros(num, dtype=np.int64)
    for number, size in enumerate(sizes):
        share = draw.dirichlet(np.full(num, alpha)) * (held < full)
        if share.sum() <= 0.0:  # a tiny alpha may put all weight on clients that are full
            share = (held <= held.min()).astype(np.float64)
        bounds = np.floor(np.cumsum(share / share.sum())[:-1] * size).astype(np.int64)
        counts[number] = np.diff(bounds, prepend=0, append=size)
        held += counts[number]
    return counts


def _split(spec: Dirichlet, fill: float, columns: Columns, rows: Rows, key: int) -> RowSlices:
    """Draw until the smallest client is large enough. A client is full at `fill` times N/K rows."""
    require_rows(columns, rows, spec.num, spec.min_size)
    sizes = np.bincount(labels_of(columns, rows), minlength=columns.num_classes)
    draw = keys.generator(keys.key(key, "shares"))
    best = -1
    for _ in range(MAX_REDRAWS):
        counts = dirichlet_counts(sizes, spec.num, spec.alpha, fill * len(rows) / spec.num, draw)
        best = max(best, int(counts.sum(0).min()))
        if best >= spec.min_size:
            return split_by_counts(columns, rows, counts, key)
    raise RecipeError(
        f"dirichlet: in {MAX_REDRAWS} draws the smallest of {spec.num} clients over {len(rows)} rows never had "
        f"more than {best} rows, clients.min_size asks for {spec.min_size}. Lower it, raise clients.alpha, or use "
        "fewer clients",
        ("clients", "min_size"),
    )
