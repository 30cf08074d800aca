"""Label skew of the FMML paper: clients that own a few classes (`classes-per-client`), or mostly one (`main-class`)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError, PolyfedWarning, RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import MAX_REDRAWS, Counts, Partition, labels_of, require_rows, split_by_counts
from polyfed.data.partitions.shards import Rows


@dataclass(frozen=True, kw_only=True)
class ClassesPerClient(Partition):
    """non-IID-1 of the FMML paper: every client owns random classes, and each class is split evenly among its owners.

    Each client has a different set of classes, if there are enough different sets. The sets overlap at random.

    Attributes:
        num: Number of clients.
        classes_per_client: Number of classes of each client; 3 in the paper.
    """

    EXACT = "classes"

    num: int
    classes_per_client: int = 3

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split each class evenly among the clients that own it; see `Partition.split`.

        Raises:
            RecipeError: There are too few classes, or the clients together cannot own all classes.
            DataError: In every draw, some class had no owner or more owners than rows.
        """
        classes, sizes = np.unique(labels_of(columns, rows), return_counts=True)
        if self.classes_per_client > len(classes):
            raise RecipeError(
                f"clients.classes_per_client = {self.classes_per_client}, but the training rows hold "
                f"{len(classes)} classes",
                ("clients", "classes_per_client"),
            )
        if self.num * self.classes_per_client < len(classes):
            raise RecipeError(
                f"{self.num} clients of {self.classes_per_client} classes cannot own all {len(classes)} "
                "classes; raise clients.num or clients.classes_per_client",
                ("clients", "classes_per_client"),
            )
        owned = self._owners(len(classes), sizes, keys.generator(keys.key(key, "owners")))
        owners = owned.sum(1, keepdims=True)
        rank = np.cumsum(owned, axis=1) - 1
        # split evenly: the first (size mod owners) owners get one row more
        counts = owned * (sizes[:, None] // owners + (rank < sizes[:, None] % owners))
        return split_by_counts(columns, rows, counts, key)

    def _owners(self, num_classes: int, sizes: Counts, draw: np.random.Generator) -> NDArray[np.bool_]:
        """Draw which client owns which class, bool (C, K). Every class has an owner and enough rows for its owners."""
        for _ in range(MAX_REDRAWS):
            sets = _class_sets(num_classes, self.classes_per_client, self.num, draw)
            owned = np.zeros((num_classes, self.num), dtype=bool)
            owned[sets.T, np.arange(self.num)] = True
            owners = owned.sum(1)
            if (owners >= 1).all() and (owners <= sizes).all():
                return owned
        raise DataError(
            f"classes-per-client: in {MAX_REDRAWS} draws some class had no owner, or fewer rows than owners "
            f"(the rarest has {sizes.min()}). Change clients.num or clients.classes_per_client"
        )


@dataclass(frozen=True, kw_only=True)
class MainClass(Partition):
    """non-IID-2 and non-IID-3 of the FMML paper: clients of equal size, each with one main class.

    A client has floor(N/K) rows, of which the share `main_share` comes from its main class. The main class of client k
    is k mod C. The other rows of a client come uniformly at random from the remaining rows of all classes. Rows that
    remain at the end are unused.

    Attributes:
        num: Number of clients.
        main_share: Share of the main class in a client's rows: 0.5 is non-IID-2, 0.3 is non-IID-3.
        exclude_main: If true, the rows beyond `main_share` never come from the main class, so the share is exact.
        on_shortage: What to do if a class is too rare for its clients. "reduce" makes every client smaller until the
            shares are exact. "cap" lets a client take the rest of its class, adds rows of the other classes, and warns.
    """

    EXACT = "rows"

    num: int
    main_share: float = 0.5
    exclude_main: bool = False
    on_shortage: Literal["reduce", "cap"] = "reduce"

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Give each client rows of its main class and random other rows; see `Partition.split`.

        Raises:
            DataError: A class is too rare, or too few other rows are left for a client.
        """
        require_rows(columns, rows, self.num, 1)
        left = np.bincount(labels_of(columns, rows), minlength=columns.num_classes)
        devices = np.bincount(np.arange(self.num) % columns.num_classes, minlength=columns.num_classes)
        size = len(rows) // self.num
        if self.on_shortage == "reduce":
            possible = left[devices > 0] / (self.main_share * devices[devices > 0])
            size = min(size, int(np.floor(possible.min() + 1e-9)))
            if size < 1:
                raise DataError("main-class: a class is too rare for its clients; use on_shortage = 'cap'")
        rest_key = keys.key(key, "rest")
        while (counts := self._table(left, size, keys.generator(rest_key))) is None:
            # the last clients found few rows outside their main class; 5 % less for every client leaves them a choice
            size = int(0.95 * size) if self.on_shortage == "reduce" else 0
            if size < 1:
                raise DataError("main-class: too few other rows; set clients.exclude_main = false")
        return split_by_counts(columns, rows, counts, key)

    def _table(self, sizes: Counts, size: int, draw: np.random.Generator) -> Counts | None:
        """Return the rows of each class for each client, int64 (C, K). Return None if too few rows are left.

        Args:
            sizes: Number of rows of each class (C,).
            size: Number of rows of each client.
            draw: The random number generator.
        """
        left, main = sizes.copy(), np.arange(self.num) % len(sizes)
        wanted = int(np.floor(self.main_share * size + 1e-9))
        counts = np.zeros((len(sizes), self.num), dtype=np.int64)
        for client, number in enumerate(main):
            counts[number, client] = min(wanted, left[number])
            left[number] -= counts[number, client]
        short = int((counts.sum(0) < wanted).sum())
        for client, number in enumerate(main):
            missing, pool = size - int(counts[number, client]), left.copy()
            if self.exclude_main:
                pool[number] = 0
            if missing > pool.sum():
                return None
            taken = draw.multivariate_hypergeometric(pool, missing)
            counts[:, client] += taken
            left -= taken
        if short:
            warnings.warn(
                f"main-class: {short} clients have a smaller share of their main class than clients.main_share",
                PolyfedWarning,
                stacklevel=3,
            )
        return counts


def _class_sets(num_classes: int, size: int, num: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """`num` random sets of `size` classes, int64 (num, size), with as few repeated sets as possible."""
    total = comb(num_classes, size)
    if total <= 2 * num + 1000:
        every = np.array(list(combinations(range(num_classes), size)))
        passes = [draw.permutation(total) for _ in range(-(-num // total))]
        return every[np.concatenate(passes)[:num]]
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < num:  # at most half of all sets are used, so each draw is new with probability 1/2 or more
        chosen[tuple(sorted(draw.choice(num_classes, size, replace=False).tolist()))] = None
    return np.array(list(chosen))
