"""The client registry: what the server knows about the clients, stored in arrays to scale to a million clients."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from torch import Tensor

from polyfed.core.tree import SHARED
from polyfed.data import Population, Shards

TEST, VALIDATION = -1, -2
"""Numbers of the evaluation clients: pseudo-clients that hold the server's own test and validation rows. They run only
evaluation tasks. Their replies never leave the server, so no policy applies to them, and the ledger omits them."""


@dataclass(frozen=True)
class Client:
    """What the server knows about one client.

    Attributes:
        id: the client's number.
        num_rows: number of its training rows.
        modalities: the modalities it has, in the federation's order.
        silo: number of its silo, or None if the federation has no silos.
    """

    id: int
    num_rows: int
    modalities: tuple[str, ...]
    silo: int | None

    @property
    def blocks(self) -> frozenset[str]:
        """The blocks of the client's model: one for each of its modalities, and the shared block."""
        return frozenset((*self.modalities, SHARED))


class ClientNumbers(Sequence[int]):
    """Ascending numbers of clients, which are stored in an array. A tuple would take five times the memory.

    Args:
        mask: which clients belong to the sequence, bool (K,).
    """

    def __init__(self, mask: Tensor) -> None:
        self._numbers = mask.cpu().numpy().nonzero()[0]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        result: int | list[int] = self._numbers[at].tolist()
        return result

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __contains__(self, client: object) -> bool:
        if not isinstance(client, int):
            return False
        place = int(np.searchsorted(self._numbers, client))
        return place < len(self) and int(self._numbers[place]) == client


@dataclass(frozen=True)
class ClientRegistry:
    """The facts about all clients. Clients have numbers from 0. In shapes: `K` clients, `M` modalities.

    Attributes:
        modalities: all modalities of the federation.
        num_rows: number of training rows of each client, int64 (K,).
        holds: bool (K, M). An entry is True if the client of its row has the modality of its column.
        silo: the silo of each client, int64 (K,), or None if the federation has no silos.
        tested: clients that have test rows of their own.
        validated: clients that have validation rows of their own.
        limited: clients whose number of rows in `num_rows` is smaller than the number that they reported. The option
            `rows_cap` of the [engine] section sets this limit.
        eligible: clients that have training rows. The server never asks other clients to train.
    """

    modalities: tuple[str, ...]
    num_rows: Tensor
    holds: Tensor
    silo: Tensor | None = None
    tested: Sequence[int] = ()
    limited: frozenset[int] = frozenset()
    validated: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Compute `eligible` once instead of in every round."""
        empty = self.num_rows == 0
        eligible = ClientNumbers(~empty) if bool(empty.any()) else range(len(self))
        object.__setattr__(self, "eligible", eligible)
        # NumPy, because every round looks up new clients, and indexing a tensor takes ten times as long
        object.__setattr__(self, "_num_rows", self.num_rows.cpu().numpy())
        object.__setattr__(self, "_rows_of_holds", self.holds.cpu().numpy())

    eligible: Sequence[int] = field(init=False)
    _num_rows: np.ndarray = field(init=False, repr=False, compare=False)
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
        """Return the modalities of a client, in the federation's order."""
        held = self._rows_of_holds[client].tobytes()
        if held not in self._sets:
            self._sets[held] = tuple(m for m, has in zip(self.modalities, held, strict=True) if has)
        return self._sets[held]

    def holdings(self) -> list[tuple[str, ...]]:
        """Return the different sets of modalities that clients have."""
        firsts = np.unique(self._rows_of_holds, axis=0, return_index=True)[1]
        return sorted(self.owned(int(client)) for client in firsts)

    def rows_of(self, clients: Iterable[int]) -> dict[int, int]:
        """Return the number of training rows of each of these clients."""
        asked = list(clients)
        return dict(zip(asked, self._num_rows[asked].tolist(), strict=True))


def registry_of(population: Population) -> ClientRegistry:
    """Make the client registry of a population."""
    return ClientRegistry(
        modalities=tuple(population.columns.modalities),
        num_rows=population.train.sizes,
        holds=population.holds,
        silo=population.silo,
        tested=_with_rows(population.test),
        limited=population.limited,
        validated=_with_rows(population.own_validation),
    )


def _with_rows(own: Shards | None) -> Sequence[int]:
    return () if own is None else ClientNumbers(own.sizes > 0)
