"""Which clients took part with which modality, as counts on a grid of clients and rounds. Large grids use bins."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.tree import SHARED

MOST_ROWS, MOST_COLUMNS = 60, 120
"""The size of the largest grid that is legible on a screen and small in the file."""


@dataclass
class Participation:
    """The clients that took part in each round, counted on a grid.

    A row of the grid is a group of neighbouring clients, and a column is a group of consecutive rounds. Each cell
    counts the pairs (client, round) that fall into it. All arrays have the shape (rows, columns) of the grid.

    Args:
        num_clients: number of clients.
        num_rounds: number of rounds that the grid covers.

    Attributes:
        asked: in each cell, the number of pairs (client, round) for which the server asked the client in this round.
        missing: in each cell, the number of pairs (client, round) for which the server asked the client in this round
            but got no usable reply.
        trained: block -> in each cell, the number of pairs (client, round) for which the client sent parameters of this
            block in this round.
    """

    num_clients: int
    num_rounds: int
    asked: NDArray[np.int64] = field(init=False)
    missing: NDArray[np.int64] = field(init=False)
    trained: dict[str, NDArray[np.int64]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.height = -(-max(self.num_clients, 1) // MOST_ROWS)
        self.width = -(-max(self.num_rounds, 1) // MOST_COLUMNS)
        self.asked = self._grid()
        self.missing = self._grid()

    def add(self, row: dict[str, Any]) -> None:
        """Count a row of `rounds.jsonl`."""
        column = row["round"]
        self._count(self.asked, row.get("cohort", ()), column)
        self._count(self.missing, (int(client) for client in row.get("missing", {})), column)
        for block, clients in row.get("trained", {}).items():
            self._count(self.trained.setdefault(block, self._grid()), clients, column)

    def table(self, modalities: Sequence[str]) -> dict[str, Any]:
        """The data for the page: a panel for each modality, or one panel of all replies if no parameters were sent."""
        owned = [block for block in modalities if block in self.trained]
        blocks = owned + [block for block in self.trained if block not in (*owned, SHARED)] or list(self.trained)
        panels = {block: self.trained[block].tolist() for block in blocks}
        return {
            "clients": self.num_clients,
            "rounds": self.num_rounds,
            "clients_per_row": self.height,
            "rounds_per_column": self.width,
            "asked": self.asked.tolist(),
            "missing": self.missing.tolist(),
            "panels": panels or {"any": (self.asked - self.missing).clip(0).tolist()},
        }

    def _grid(self) -> NDArray[np.int64]:
        rows = -(-max(self.num_clients, 1) // self.height)
        columns = -(-max(self.num_rounds, 1) // self.width)
        return np.zeros((rows, columns), dtype=np.int64)

    def _count(self, grid: NDArray[np.int64], clients: Iterable[int], round: int) -> None:
        column = (round - 1) // self.width
        rows = np.fromiter(clients, dtype=np.int64) // self.height
        inside = (rows >= 0) & (rows < len(grid))
        if 0 <= column < grid.shape[1]:
            grid[:, column] += np.bincount(rows[inside], minlength=len(grid))
