"""The rounds of a run as columns of numbers, read in one pass. Values per client are summarised."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyfed.core.system.files import ROUNDS
from polyfed.report.pages.participation import Participation
from polyfed.report.reading.run_folder import Folder, damaged
from polyfed.report.scores import Headline

QUANTILES = {"worst": 0.0, "lower": 0.25, "median": 0.5, "upper": 0.75, "best": 1.0}
"""The columns `personal_accuracy.<name>`, each with the quantile over clients that it holds."""

MOST_CELLS = 64
"""The longest side of a logged matrix on the page. Larger matrices are averaged down to this size."""


MOST_FRAMES = 16
"""The largest number of rounds for which a logged matrix is shown, including the last round."""


@dataclass
class Frames:
    """The values of a logged matrix in the rounds of a run.

    At most `MOST_FRAMES` rounds are kept, at equal distances, and the last round in addition. If there are more, `add`
    drops every second one.

    Attributes:
        rounds: the rounds whose matrices are kept, ascending.
        tables: for each entry of `rounds`, the matrix of this round.
        stride: the distance between kept matrices: with n, every n-th matrix is kept. The last one is always kept.
    """

    rounds: list[int] = field(default_factory=list)
    tables: list[list[list[float | None]]] = field(default_factory=list)
    stride: int = 1
    _seen: int = 0
    _passing: bool = False  # whether the newest matrix is kept only until the next one is added

    def add(self, round: int, table: list[list[float]]) -> None:
        """Add the matrix of a round."""
        if self._passing:
            del self.rounds[-1], self.tables[-1]
        self._passing = self._seen % self.stride != 0
        self._seen += 1
        self.rounds.append(round)
        self.tables.append(shrunk(table))
        if not self._passing and len(self.rounds) > MOST_FRAMES:
            self.rounds, self.tables, self.stride = self.rounds[::2], self.tables[::2], 2 * self.stride

    def drawn(self) -> dict[str, Any]:
        """Return the data for the page's script. Matrix entries are rounded to four significant digits."""
        short = [[[v if v is None else float(f"{v:.4g}") for v in row] for row in table] for table in self.tables]
        return {"rounds": self.rounds, "tables": short}


@dataclass
class History:
    """The numbers of a run.

    Attributes:
        participation: which clients took part in which rounds.
        headline: the metrics by which the run is judged.
        rounds: the numbers of the rounds.
        columns: dotted name of a number -> its value in each round, or None for a round without a finite value.
        personal: client -> its last measured score on its own test rows.
        tables: name of a matrix that the algorithm logs -> the values of this matrix in the rounds.
        reasons: each reason why clients gave no usable reply -> how often it occurred.
        confusion: the confusion matrix of the last round, if the run has one.
        picked: client -> the number of rounds whose cohort included the client.
        requests: round -> how many training requests the round had. Later requests of the round were evaluations.
    """

    participation: Participation
    headline: Headline = Headline()
    rounds: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    personal: dict[str, float] = field(default_factory=dict)
    tables: dict[str, "Frames"] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    confusion: list[list[float]] | None = None
    picked: Counter[int] = field(default_factory=Counter)
    requests: dict[int, int] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of `rounds.jsonl`."""
        done = len(self.rounds)
        self.rounds.append(int(row["round"]))
        self.participation.add(row)
        self.picked.update(row.get("cohort", ()))
        self.confusion = square(row.get("confusion")) or self.confusion
        if "training_requests" in row:
            self.requests[int(row["round"])] = int(row["training_requests"])
        for name, value in (numbers(row, self.headline.rising) | {"picked_so_far": float(len(self.picked))}).items():
            self.columns.setdefault(name, [None] * done).append(value)
        for column in self.columns.values():
            column.extend([None] * (done + 1 - len(column)))
        self.personal = own_scores(row) or self.personal
        for name, table in row.get("tables", {}).items():
            self.tables.setdefault(name, Frames()).add(int(row["round"]), table)
        for reason in row.get("missing", {}).values():
            self.reasons[str(reason)] = self.reasons.get(str(reason), 0) + 1

    def last(self, name: str) -> float | None:
        """The last value of a column, or None."""
        return next((v for v in reversed(self.columns.get(name, [])) if v is not None), None)

    def group(self, prefix: str) -> dict[str, list[float | None]]:
        """The columns whose name starts with `prefix`. The keys are the names without this prefix."""
        return {n.removeprefix(prefix): v for n, v in self.columns.items() if n.startswith(prefix)}


def read(folder: Folder) -> History:
    """Read the history of a run.

    Raises:
        DataError: rounds.jsonl is damaged.
    """
    history = History(Participation(folder.num_clients, folder.num_rounds), folder.headline)
    for number, row in enumerate(folder.rounds(), 1):
        try:
            history.add(row)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(folder.path / ROUNDS, f"{type(error).__name__}: {error}", number) from None
    return history


def own_scores(row: dict[str, Any]) -> dict[str, float]:
    """Client -> the score on its own test rows, in a row of `rounds.jsonl`."""
    return row.get("personal_accuracy") or row.get("personal_score") or {}


def numbers(row: dict[str, Any], rising: bool = True) -> dict[str, float | None]:
    """The numbers in a row of `rounds.jsonl`, under dotted names.

    Args:
        rising: whether larger scores of clients are better.
    """
    result: dict[str, float | None] = {}
    for name in ("train_loss", "bytes_up", "bytes_down", "simulated_seconds"):
        if name in row:
            result[name] = finite(row[name])
    result["cohort"] = float(len(row.get("cohort", ())))
    for group in ("seconds", "logged", "evaluation"):
        result |= {f"{group}.{name}": finite(value) for name, value in row.get(group, {}).items()}
    if spent := row.get("privacy"):
        result["epsilon"] = finite(spent["epsilon"])
        known = {block: [e for e in kinds.values() if e is not None] for block, kinds in spent["blocks"].items()}
        result |= {f"epsilon.{block}": finite(max(values)) for block, values in known.items() if values}
    for part, blocks in row.get("norms", {}).items():
        result |= {f"norms.{part}.{block}": finite(value) for block, value in blocks.items()}
    result |= {f"sent.{block}": float(len(clients)) for block, clients in row.get("trained", {}).items()}
    for name, table in row.get("tables", {}).items():
        result |= {f"table.{name}.{label}": value for label, value in entries_of(table).items()}
    for group, entries in row.get("metrics", {}).items():
        result |= {f"{group}.{name}": finite(value) for name, value in entries.items()}
    if personal := own_scores(row):
        places = [place if rising else 1.0 - place for place in QUANTILES.values()]
        spread = np.quantile(list(personal.values()), places)
        result |= {f"personal_accuracy.{name}": float(q) for name, q in zip(QUANTILES, spread, strict=True)}
    return result


def entries_of(table: list[list[float]]) -> dict[str, float | None]:
    """The mean, smallest and largest entry of a matrix, and the mean of its diagonal if it is square."""
    matrix = np.atleast_2d(np.asarray(table, dtype=np.float64))
    known = matrix[np.isfinite(matrix)]
    if not known.size:
        return {}
    result = {"mean": known.mean(), "smallest": known.min(), "largest": known.max()}
    if matrix.shape[0] == matrix.shape[1] > 1:
        result["diagonal"] = matrix.diagonal().mean()
    return {label: finite(float(value)) for label, value in result.items()}


def square(matrix: list[list[float]] | None) -> list[list[float]] | None:
    """Check that a confusion matrix is square. Return it unchanged, or None if there is no matrix.

    Raises:
        ValueError: the matrix is not square.
    """
    if matrix is not None and any(len(row) != len(matrix) for row in matrix):
        raise ValueError("the confusion matrix is not square")
    return matrix


def finite(value: Any) -> float | None:
    """The value as a finite float, or None if it is not a finite number."""
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable else None


def shrunk(table: list[list[float]]) -> list[list[float | None]]:
    """Average neighbouring entries of a matrix so that no side is longer than MOST_CELLS."""
    matrix = np.atleast_2d(np.asarray(table, dtype=np.float64))
    for axis in (0, 1):
        step = -(-matrix.shape[axis] // MOST_CELLS)
        if step > 1:
            starts = np.arange(0, matrix.shape[axis], step)
            counts = np.diff([*starts, matrix.shape[axis]])
            sums = np.add.reduceat(matrix, starts, axis)
            matrix = sums / (counts[:, None] if axis == 0 else counts)
    return [[finite(value) for value in row] for row in matrix.tolist()]
