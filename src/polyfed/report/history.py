"""A run's rounds as columns of numbers: one pass over rounds.jsonl, summaries in place of per-client values."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyfed.core.files import ROUNDS
from polyfed.report.participation import Participation
from polyfed.report.run_folder import Folder, damaged

QUANTILES = {"worst": 0.0, "lower": 0.25, "median": 0.5, "upper": 0.75, "best": 1.0}
"""Columns `personal_accuracy.<name>` and the quantile over clients that each holds."""

MOST_CELLS = 64
"""Longest side of a logged matrix as drawn; larger ones are averaged down to it."""


MOST_FRAMES = 16
"""A logged matrix is shown at so many rounds at most, the last among them."""


@dataclass
class Frames:
    """A logged matrix over rounds, thinned out evenly as they come.

    Attributes:
        rounds: when, ascending.
        tables: the matrix then.
        stride: every so many of those logged is kept, and always the last.
    """

    rounds: list[int] = field(default_factory=list)
    tables: list[list[list[float | None]]] = field(default_factory=list)
    stride: int = 1
    _seen: int = 0
    _passing: bool = False  # the newest stands there only until another one comes

    def add(self, round: int, table: list[list[float]]) -> None:
        """Take in the matrix of a round."""
        if self._passing:
            del self.rounds[-1], self.tables[-1]
        self._passing = self._seen % self.stride != 0
        self._seen += 1
        self.rounds.append(round)
        self.tables.append(shrunk(table))
        if not self._passing and len(self.rounds) > MOST_FRAMES:
            self.rounds, self.tables, self.stride = self.rounds[::2], self.tables[::2], 2 * self.stride

    def drawn(self) -> dict[str, Any]:
        """What the page's script gets: values to four digits."""
        short = [[[v if v is None else float(f"{v:.4g}") for v in row] for row in table] for table in self.tables]
        return {"rounds": self.rounds, "tables": short}


@dataclass
class History:
    """The numbers of a run.

    Attributes:
        rounds: their numbers.
        columns: dotted name -> one value a round, None where the round has none or it is not finite.
        participation: who took part.
        personal: the last measured accuracy of each client on its own test rows.
        tables: matrices that the algorithm logged, by name.
        reasons: why clients did not answer, and how often.
    """

    participation: Participation
    rounds: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    personal: dict[str, float] = field(default_factory=dict)
    tables: dict[str, "Frames"] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Take in a round."""
        done = len(self.rounds)
        self.rounds.append(int(row["round"]))
        self.participation.add(row)
        for name, value in numbers(row).items():
            self.columns.setdefault(name, [None] * done).append(value)
        for column in self.columns.values():
            column.extend([None] * (done + 1 - len(column)))
        self.personal = row.get("personal_accuracy") or self.personal
        for name, table in row.get("tables", {}).items():
            self.tables.setdefault(name, Frames()).add(int(row["round"]), table)
        for reason in row.get("missing", {}).values():
            self.reasons[str(reason)] = self.reasons.get(str(reason), 0) + 1

    def last(self, name: str) -> float | None:
        """The last value of a column."""
        return next((v for v in reversed(self.columns.get(name, [])) if v is not None), None)

    def group(self, prefix: str) -> dict[str, list[float | None]]:
        """Columns under a dotted prefix, by the rest of their name."""
        return {n.removeprefix(prefix): v for n, v in self.columns.items() if n.startswith(prefix)}


def read(folder: Folder) -> History:
    """The history of a run's folder; DataError if it is damaged."""
    history = History(Participation(folder.num_clients, folder.num_rounds))
    for number, row in enumerate(folder.rounds(), 1):
        try:
            history.add(row)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(folder.path / ROUNDS, f"{type(error).__name__}: {error}", number) from None
    return history


def numbers(row: dict[str, Any]) -> dict[str, float | None]:
    """What of a round is a number, under dotted names."""
    found: dict[str, float | None] = {}
    for name in ("train_loss", "bytes_up", "bytes_down", "simulated_seconds"):
        if name in row:
            found[name] = finite(row[name])
    found["cohort"] = float(len(row.get("cohort", ())))
    for group in ("seconds", "logged"):
        found |= {f"{group}.{name}": finite(value) for name, value in row.get(group, {}).items()}
    for group, entries in row.get("metrics", {}).items():
        found |= {f"{group}.{name}": finite(value) for name, value in entries.items()}
    if personal := row.get("personal_accuracy"):
        spread = np.quantile(list(personal.values()), list(QUANTILES.values()))
        found |= {f"personal_accuracy.{name}": float(q) for name, q in zip(QUANTILES, spread, strict=True)}
    return found


def finite(value: Any) -> float | None:
    """The value as a float that JSON can hold, None for all else."""
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable else None


def shrunk(table: list[list[float]]) -> list[list[float | None]]:
    """A matrix with sides of at most MOST_CELLS, neighbours averaged."""
    matrix = np.atleast_2d(np.asarray(table, dtype=np.float64))
    for axis in (0, 1):
        step = -(-matrix.shape[axis] // MOST_CELLS)
        if step > 1:
            starts = np.arange(0, matrix.shape[axis], step)
            counts = np.diff([*starts, matrix.shape[axis]])
            sums = np.add.reduceat(matrix, starts, axis)
            matrix = sums / (counts[:, None] if axis == 0 else counts)
    return [[finite(value) for value in row] for row in matrix.tolist()]
