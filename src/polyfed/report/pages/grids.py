"""Grids of a run's report, as data: the confusion matrix, and the labels that clients hold.

The page's script draws the grids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.report.reading.history import History
from polyfed.report.reading.run_folder import Folder

MOST_SIDE = 100
"""The longest side of a grid on the page. Neighbouring rows or columns of a larger grid are summed up."""

MOST_CLASSES = 200
"""The largest number of rows in the table of classes."""

MOST_COUNTED = 12
"""The most rows and columns of a grid whose counts are printed."""

LONGEST_NAME = 40
"""The largest number of characters of a class name on the page."""


@dataclass(frozen=True)
class Grid:
    """A grid of counts.

    Attributes:
        name: the id of the grid on the page.
        title: the heading.
        caption: sentences that describe the grid.
        rows: the name of each row.
        columns: the name of each column.
        counts: for each row, the counts of its columns. The larger the share of a count in its row, the stronger the
            page shades the cell.
        row_word: the word before the name of a row, such as `true class`.
        column_word: the word before the name of a column, such as `predicted`.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[str]
    columns: Sequence[str]
    counts: Sequence[Sequence[float]]
    row_word: str
    column_word: str

    @property
    def counted(self) -> bool:
        """Whether the page also prints the counts: they fit on a phone and on paper."""
        return max(len(self.rows), len(self.columns)) <= MOST_COUNTED

    def table(self) -> dict[str, Any]:
        """The grid as data for the page's script."""
        return asdict(self)


@dataclass(frozen=True)
class ClassScore:
    """How well one class is recognised.

    Attributes:
        name: the name of the class.
        rows: the number of rows of this class in the test set.
        recall: the share of these rows that the model recognised. None if there are no rows.
        precision: the share of this class among the rows that the model assigned to it. None if there are no such rows.
        mistaken: the class to which the model most often wrongly assigns rows of this class, and how often. None if
            there is no such class.
    """

    name: str
    rows: int
    recall: float | None
    precision: float | None
    mistaken: tuple[str, int] | None


def class_names(folder: Folder, count: int) -> list[str]:
    """Return the name of each class from the data, or else the class numbers."""
    known = folder.facts.get("data", {}).get("class_names") or []
    if not isinstance(known, list) or len(known) != count:
        return [str(number) for number in range(count)]
    return [str(name)[:LONGEST_NAME] for name in known]


def confusion(past: History, folder: Folder) -> Grid | None:
    """The confusion matrix of the last round; None if the run has none."""
    if past.confusion is None:
        return None
    names = class_names(folder, len(past.confusion))
    counts, rows, columns = summed(np.asarray(past.confusion, dtype=np.float64), names, names)
    return Grid(
        "confusion",
        "Confusion matrix",
        "Rows are the true classes, columns the predicted ones: the global model on the test set, after the last "
        "round. A cell is shaded by its share of the row.",
        rows,
        columns,
        counts.tolist(),
        "true class",
        "predicted",
    )


def class_scores(past: History, folder: Folder) -> list[ClassScore]:
    """Recall and precision of each class, from the confusion matrix, for at most `MOST_CLASSES` classes."""
    if past.confusion is None:
        return []
    matrix = np.asarray(past.confusion, dtype=np.float64)
    names = class_names(folder, len(matrix))
    right, there, taken = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    wrong = matrix - np.diag(right)
    result = []
    for number, name in enumerate(names[:MOST_CLASSES]):
        most = int(wrong[number].argmax())
        times = int(wrong[number, most])
        result.append(
            ClassScore(
                name,
                int(there[number]),
                float(right[number] / there[number]) if there[number] else None,
                float(right[number] / taken[number]) if taken[number] else None,
                (names[most], times) if times else None,
            )
        )
    return result


def labels(folder: Folder) -> Grid | None:
    """Return how many training rows of each class each client holds, or None if run.json lacks these numbers."""
    clients = [client for client in folder.facts.get("clients", []) if "labels" in client]
    if not clients or len({len(client["labels"]) for client in clients}) > 1:
        return None
    counts = np.asarray([client["labels"] for client in clients], dtype=np.float64)
    names = class_names(folder, counts.shape[1])
    shown, rows, columns = summed(counts, [str(client.get("name", client["id"])) for client in clients], names)
    caption = "Training rows of each class that each client holds. A cell is shaded by its share of the client's rows."
    if len(clients) < folder.num_clients:
        caption += f" The first {len(clients):,} of {folder.num_clients:,} clients."
    return Grid("labels", "Labels of the clients", caption, rows, columns, shown.tolist(), "client", "class")


def summed(
    counts: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str]
) -> tuple[NDArray[np.float64], list[str], list[str]]:
    """Add up neighbouring rows and columns so that no side is longer than `MOST_SIDE`; return counts and names."""
    names = [list(rows), list(columns)]
    for axis in (0, 1):
        step = -(-counts.shape[axis] // MOST_SIDE)
        if step > 1:
            starts = np.arange(0, counts.shape[axis], step)
            counts = np.add.reduceat(counts, starts, axis)
            own = names[axis]
            names[axis] = [_span(own[start : start + step]) for start in starts.tolist()]
    return counts, names[0], names[1]


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def modality_table(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many clients, and how many rows of all clients, have each modality.

    Args:
        groups: as `page.holdings` returns them.
    """
    total, rows = sum(group["clients"] for group in groups), sum(group["rows"] for group in groups)
    names = dict.fromkeys(name for group in groups for name in group["modalities"])
    result = []
    for name in names:
        own = [group for group in groups if name in group["modalities"]]
        clients = sum(group["clients"] for group in own)
        held = sum(group["rows"] - group["lacking"].get(name, 0) for group in own)
        result.append(
            {
                "name": name,
                "clients": clients,
                "share": clients / total if total else None,
                "rows": held,
                "row_share": held / rows if rows else None,
            }
        )
    return result
