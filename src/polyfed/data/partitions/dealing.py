"""What partitions share: sizes are settled first, as a table (class, client), then rows are dealt by it.

Redrawing a table is cheap, and one shuffle per class serves 100,000 clients without a loop in Python.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyfed.core import keys
from polyfed.core.errors import DataError, RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.shards import Rows, Stretches

MAX_REDRAWS = 1000
"""Draws before a partition gives up (6.11)."""

Counts = NDArray[np.int64]


class Partition(ABC):
    """Deals rows to clients; your own is a subclass, a dataclass whose fields are keys of [clients]."""

    @abstractmethod
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """One array of rows per client, in order of clients. `rows` is the partition's own: it may reorder it."""


def labels(columns: Columns, rows: Rows) -> Rows:
    """Labels of some rows, on the host."""
    found: Rows = columns.label.cpu().numpy()[rows]
    return found


def dirichlet_counts(sizes: Counts, num: int, alpha: float, full: float, draw: np.random.Generator) -> Counts:
    """Rows of each class for each client, int64 (C, K), by one Dirichlet(alpha) draw per class (6.11).

    A client that already holds `full` rows gets none of the class; the shares of the others are renormalised.
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


def deal(columns: Columns, rows: Rows, counts: Counts, key: int) -> Stretches:
    """Shuffle each class and deal it by a table of counts; rows beyond the table stay unused.

    `counts` has a line per class: all C of them, or those that occur in `rows` in ascending order.
    """
    label = labels(columns, rows)
    classes = np.arange(columns.num_classes) if len(counts) == columns.num_classes else np.unique(label)
    draw = keys.generator(keys.key(key, "deal"))
    clients = np.arange(counts.shape[1])
    dealt, owner = [], []
    for number, per_client in zip(classes, counts, strict=True):
        dealt.append(draw.permutation(rows[label == number])[: per_client.sum()])
        owner.append(np.repeat(clients, per_client))
    owners = np.concatenate(owner)
    order = np.argsort(owners, kind="stable")
    return Stretches(np.concatenate(dealt)[order], np.concatenate(([0], np.cumsum(counts.sum(0)))))


def enough(columns: Columns, rows: Rows, num: int, min_size: int) -> None:
    """Raise RecipeError unless `num` clients can have `min_size` rows each; DataError where there is no row at all."""
    if not len(rows):
        raise DataError(
            f"data '{columns.name}' has no training row to deal to clients (split 0). A server's own test rows are "
            "such data: there, devices bring their rows, and `polyfed check RECIPE --node ...` checks one of them"
        )
    if len(rows) < num * max(1, min_size):
        raise RecipeError(
            f"{num} clients of at least {max(1, min_size)} rows need {num * max(1, min_size)} training rows; "
            f"data '{columns.name}' has {len(rows)} to deal. Use fewer clients or a lower clients.min_size"
        )
