"""How many steps a local training has, and the rows that every client of a stack takes in each.

Shape letters: `K` clients of the stack, `T` steps, `B` rows of a step, `N` rows of the client with the most rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.data.partitions.shards import Shards
from polyfed.training.client_data import DROPOUT, ORDER
from polyfed.training.optimisers import Train


@dataclass(frozen=True)
class Rows:
    """The rows of a stack of clients.

    Attributes:
        index: positions of the clients' rows in the table, int64 (K, N), padded as in `Shards.padded`.
        counts: number of rows of each client.
    """

    index: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, shards: Shards, clients: Sequence[int]) -> "Rows":
        """Stack the positions of these clients' rows. The clients may differ in their number of rows."""
        return cls(*shards.padded(clients))

    def to(self, device: torch.device | str) -> "Rows":
        """Return the same rows with the positions on another device."""
        return Rows(self.index.to(device), self.counts)


@dataclass(frozen=True)
class Plan:
    """The rows that every client takes in every step.

    Attributes:
        rows: positions among the client's own rows, int64 (K, T, B).
        ok: False for padding, bool (K, T, B).
        number: how many steps a client has taken after each step, including this step, int64 (K, T). The entry has no
            meaning if the client has no steps left.
        alive: whether a client takes the step, bool (K, T).
        count: number of steps of each client, int64 (K,).
        key: dropout key of each step, int32 (K, T), for clients that have taken no steps before.
        full: for each step, whether no client has padding.
        live: for each step, whether all clients still train.
    """

    rows: Tensor
    ok: Tensor
    number: Tensor
    alive: Tensor
    count: Tensor
    key: Tensor
    full: tuple[bool, ...]
    live: tuple[bool, ...]


def stream_keys(client_keys: Sequence[int], purpose: int, stream: int) -> np.ndarray:
    """Return `stream_key(client, purpose, stream)` for the key of each client, uint32 (K,)."""
    return keys.fold_in_all(keys.fold_in_all(np.array(client_keys, dtype=np.uint32), purpose), stream)


def make_plan(
    client_keys: Sequence[int],
    stack: Rows,
    train: Train,
    *,
    skip_single: bool,
    stream: int,
    first_epoch: int = 0,
) -> Plan:
    """Plan the steps of a stack of clients: the steps of `SingleClientData`, padded to equal numbers of steps and rows.

    Args:
        client_keys: random key of (run, round, client) of each client.
        stack: the clients' rows.
        train: epochs or steps, and batch size.
        skip_single: whether batches of one row are left out, see `usable_rows`.
        stream: number of the random stream for the order of rows.
        first_epoch: number of epochs already trained.
    """
    # NumPy, because for few clients the overhead of tensor operations dominates
    ends = np.array([usable_rows(n, train.batch_size, skip_single) for n in stack.counts])
    size = min(train.batch_size or max(stack.counts), max(stack.counts)) or 1
    slots = -(-int(ends.max()) // size)
    epochs = train.epochs
    if train.steps is not None:
        shortest = min((-(-int(end) // size) for end in ends if end), default=1)
        epochs = -(-train.steps // shortest)
    order_keys = stream_keys(client_keys, ORDER, stream)
    orders = [_epoch_order(order_keys, first_epoch + epoch, stack.counts, slots * size) for epoch in range(epochs)]
    shape = (len(client_keys), epochs * slots, size)
    rows = np.stack(orders, 1).reshape(shape) if orders else np.zeros(shape, np.int64)
    ok = np.tile(np.arange(slots * size).reshape(1, slots, size) < ends[:, None, None], (1, epochs, 1))
    step = ok.any(-1).cumsum(1) - 1
    if train.steps is not None:
        ok &= (step < train.steps)[..., None]
    used = np.flatnonzero(ok.any((0, 2)))  # drop the last slots if no client uses them
    last = int(used[-1]) + 1 if len(used) else 0
    rows, ok, step = rows[:, :last], ok[:, :last], step[:, :last]
    number, alive = step.clip(min=0) + 1, np.asarray(ok.any(-1))
    key = keys.fold_in_all(stream_keys(client_keys, DROPOUT, stream)[:, None], number - 1)

    def tensor(value: np.ndarray) -> Tensor:
        return torch.from_numpy(value).to(stack.index.device)

    return Plan(
        rows=tensor(rows),
        ok=tensor(ok),
        number=tensor(number),
        alive=tensor(alive),
        count=tensor(alive.sum(1)),
        key=tensor(key.view(np.int32)),
        full=tuple(np.asarray(ok.all((0, 2))).tolist()),
        live=tuple(np.asarray(alive.all(0)).tolist()),
    )


def _epoch_order(order_keys: np.ndarray, epoch: int, counts: Sequence[int], width: int) -> np.ndarray:
    """Return each client's random order of its rows in this epoch, int64 (K, width), padded with 0."""
    order = keys.permutations(keys.fold_in_all(order_keys, epoch), counts)
    return np.pad(order, ((0, 0), (0, max(width - order.shape[1], 0))))[:, :width]


def usable_rows(n: int, batch_size: int, skip_single: bool, smallest: int = 0) -> int:
    """Return how many of a client's `n` rows an epoch uses.

    Args:
        n: rows of the client.
        batch_size: rows of a batch; 0 means all rows in one batch.
        skip_single: whether a batch of one row is left out. This is necessary if the model has BatchNorm, because one
            row has no batch statistics.
        smallest: if the last batch of an epoch has fewer rows than this, and it is not the only batch, it is left out.
    """
    size = batch_size or n
    if not n:
        return n
    if skip_single and size == 1:
        return 0
    rest = n % size
    left_out = (skip_single and rest == 1) or (rest < smallest and n > size)
    return n - rest if left_out else n


def rows_trained(num_rows: int, train: Train, *, skip_single: bool) -> int:
    """Return the number of rows that the model processes in a local training. Repeated rows count each time."""
    end = usable_rows(num_rows, train.batch_size, skip_single)
    if train.steps is None or not end:
        return train.epochs * end if end else 0
    size = min(train.batch_size or end, end)
    epochs, rest = divmod(train.steps, -(-end // size))
    return epochs * end + min(rest * size, end)


def steps_trained(num_rows: int, train: Train, *, skip_single: bool, smallest: int = 0) -> int:
    """Return the number of optimiser steps of a local training; `usable_rows` explains the arguments."""
    end = usable_rows(num_rows, train.batch_size, skip_single, smallest)
    if train.steps is not None or not end:
        return train.steps or 0 if end else 0
    return train.epochs * -(-end // (train.batch_size or end))
