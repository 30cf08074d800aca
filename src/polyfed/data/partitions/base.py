"""The base class of partitions, and the steps that partitions share.

The partitions here first decide how many rows of each class every client gets. The result is a table of counts (class,
client). The partitions then split the rows according to this table. Drawing a table takes little time, so a partition
can draw it many times. Splitting the rows is fast even for 100,000 clients, because the code shuffles the rows of each
class once, and has no Python loop over clients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core import keys
from polyfed.core.errors import DataError, RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.shards import Rows, RowSlices

MAX_REDRAWS = 1000
"""The number of draws after which a partition that repeats draws stops with an error."""

Counts = NDArray[np.int64]


class Partition(ABC):
    """Splits training rows over clients.

    A partition is a frozen dataclass. Its fields are its options: a field `x` gets the value of the key `x` of
    `[clients]`. Your own partition extends this class. `[clients] partition` names it as `package.module:Class`.

    If the data names persons, a partition gets one row of each, whose label is the person's most frequent class.
    """

    EXACT: ClassVar[Literal["", "classes", "rows"]] = ""
    """What of a client is an exact number that whole persons would change, so that [data] person refuses the partition:
    the classes, if a person has several, or the rows, if a person has several."""

    @abstractmethod
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split rows over clients.

        Args:
            rows: The rows to split, int64 (n,); the partition may reorder this array.
            key: The only source of randomness: the same key always gives the same split.

        Returns:
            One array of rows for each client, in order of the clients; no row occurs twice.
        """


PARTITIONED = "Use [clients] partition = 'iid', 'by-client' or 'silos', and a share for personal_test"


def refuse_targets(columns: Columns, what: str, cure: str = PARTITIONED) -> None:
    """Raise an error if the labels are not classes, because an option of the recipe needs classes.

    Raises:
        RecipeError: the data has no labels, or the labels are regression targets. The text begins with `what`; for
            targets it ends with `cure`.
    """
    if not columns.labelled and columns.num_classes == 1:
        raise RecipeError(
            f"{what}, and data '{columns.name}' has no labels. Use [clients] partition = 'iid'",
            ("clients", "partition"),
        )
    if columns.label.is_floating_point():
        raise RecipeError(
            f"{what}, and the labels of data '{columns.name}' are targets of type float32. {cure}",
            ("clients", "partition"),
        )


def labels_of(columns: Columns, rows: Rows) -> Rows:
    """Labels of some rows, int64 (n,), on the CPU.

    Raises:
        RecipeError: the labels are not classes.
    """
    refuse_targets(columns, "[clients] partition deals rows by their class")
    result: Rows = columns.label.cpu().numpy()[rows]
    return result


def split_by_counts(columns: Columns, rows: Rows, counts: Counts, key: int) -> RowSlices:
    """Shuffle the rows of each class and deal them out according to `counts`. Rows beyond the counts are unused.

    Args:
        rows: The rows to split.
        counts: int64 (classes, K): a row for each of the C classes, or only for the classes that occur in `rows`, in
            ascending order.
        key: Key of the shuffles.
    """
    label = labels_of(columns, rows)
    classes = np.arange(columns.num_classes) if len(counts) == columns.num_classes else np.unique(label)
    draw = keys.generator(keys.key(key, "deal"))
    clients = np.arange(counts.shape[1])
    taken, owner = [], []
    for number, per_client in zip(classes, counts, strict=True):
        taken.append(draw.permutation(rows[label == number])[: per_client.sum()])
        owner.append(np.repeat(clients, per_client))
    owners = np.concatenate(owner)
    order = np.argsort(owners, kind="stable")
    return RowSlices(np.concatenate(taken)[order], np.concatenate(([0], np.cumsum(counts.sum(0)))))


def require_rows(columns: Columns, rows: Rows, num: int, min_size: int) -> None:
    """Check that there are enough rows to split.

    Raises:
        DataError: There is no training row at all.
        RecipeError: `num` clients of `min_size` rows need more rows than there are.
    """
    if not len(rows):
        raise DataError(
            f"data '{columns.name}' has no training row to split over clients (split 0). A server's own test rows are "
            "such data: there, devices bring their rows, and `polyfed check RECIPE --node ...` checks one of them"
        )
    if len(rows) < num * max(1, min_size):
        raise RecipeError(
            f"{num} clients of at least {max(1, min_size)} rows need {num * max(1, min_size)} training rows; "
            f"data '{columns.name}' has {len(rows)}. Use fewer clients or a lower clients.min_size",
            ("clients", "num"),
        )
