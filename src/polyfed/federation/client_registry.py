"""What the server knows of the clients, kept in arrays: 100,000 clients cost no more than their arrays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyfed.core.tree import SHARED

TEST, VALIDATION = -1, -2
"""Examiners: the server's own test and validation rows answer like clients, with these numbers, and are asked only to
evaluate. What they send crosses no border, so neither gate nor ledger sees it."""


@dataclass(frozen=True)
class Client:
    """What the server knows of a client."""

    id: int
    num_rows: int
    modalities: tuple[str, ...]
    silo: int | None

    @property
    def blocks(self) -> frozenset[str]:
        """The blocks of its model."""
        return frozenset((*self.modalities, SHARED))


@dataclass(frozen=True)
class ClientRegistry:
    """All clients, by number from 0. Facts are kept in arrays: 100,000 clients cost no more than their arrays.

    Attributes:
        modalities: all modalities of the federation.
        num_rows: training rows, int64 (K,).
        holds: who owns which modality, bool (K, M).
        silo: silo of each client, int64 (K,), or None.
        tested: clients that have test rows of their own.
    """

    modalities: tuple[str, ...]
    num_rows: Tensor
    holds: Tensor
    silo: Tensor | None = None
    tested: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Look once, not every round, for clients without rows, which are never asked to train."""
        empty = self.num_rows == 0
        eligible = (~empty).nonzero().flatten().tolist() if bool(empty.any()) else range(len(self))
        object.__setattr__(self, "eligible", eligible)
        object.__setattr__(self, "_rows_of_holds", self.holds.cpu().numpy())

    eligible: Sequence[int] = field(init=False)
    _rows_of_holds: np.ndarray = field(init=False, repr=False, compare=False)
    _sets: dict[bytes, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.num_rows)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, client: int) -> Client:
        silo = None if self.silo is None else int(self.silo[client])
        return Client(client, int(self.num_rows[client]), self.owned(client), silo)

    def owned(self, client: int) -> tuple[str, ...]:
        """The modalities of a client, in the federation's order."""
        # NumPy: new clients come every round, and a tensor takes ten times as long
        held = self._rows_of_holds[client].tobytes()
        if held not in self._sets:
            self._sets[held] = tuple(m for m, has in zip(self.modalities, held, strict=True) if has)
        return self._sets[held]

    def rows_of(self, clients: Iterable[int]) -> dict[int, int]:
        """Training rows of these clients."""
        asked = list(clients)
        return dict(zip(asked, self.num_rows[torch.tensor(asked, dtype=torch.int64)].tolist(), strict=True))
