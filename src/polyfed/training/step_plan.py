"""The rows that every client of a stack takes in every step of its local training.

Shape letters: `K` clients of the stack, `T` steps, `B` rows of a step, `N` rows of the client with the most rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from polyfed.training.step_counts import usable_rows


@dataclass(frozen=True)
class Rows:
    """The rows of a stack of clients.

    Attributes:
        index: positions of the clients' rows in the table, int64 (K, N), padded with 0.
        counts: number of rows of each client.
    """

    index: Tensor
    counts: tuple[int, ...]

    @classmethod
    def pad(cls, rows: Sequence[Tensor]) -> "Rows":
        """Stack the positions of several clients' rows. The clients may differ in their number of rows."""
        index = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return cls(index, tuple(len(r) for r in rows))


@dataclass(frozen=True)
class Plan:
    """The rows that every client takes in every step.

    Attributes:
        rows: positions among the client's own rows, int64 (K, T, B).
        ok: False for padding, bool (K, T, B).
        number: how many steps a client has taken after each step, including this step, int64 (K, T). The entry has no
            meaning if the client has no steps left.
        count: number of steps of each client, int64 (K,).
        full: for each step, whether no client has padding.
        live: for each step, whether all clients still train.
    """

    rows: Tensor
    ok: Tensor
    number: Tensor
    count: Tensor
    full: tuple[bool, ...]
    live: tuple[bool, ...]


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
    device = stack.index.device
    n_K = torch.tensor(stack.counts, device=device)
    ends = [usable_rows(n, train.batch_size, skip_single) for n in stack.counts]
    end_K = torch.tensor(ends, device=device)
    size = min(train.batch_size or max(stack.counts), max(stack.counts)) or 1
    slots = -(-max(ends) // size)
    epochs = train.epochs
    if train.steps is not None:
        shortest = min((-(-end // size) for end in ends if end), default=1)
        epochs = -(-train.steps // shortest)
    order_keys = keys.fold_in_all(keys.fold_in_all(np.array(client_keys, dtype=np.uint32), ORDER), stream)
    parts = [_epoch_order(order_keys, first_epoch + epoch, stack, slots * size) for epoch in range(epochs)]
    shape = (len(client_keys), epochs * slots, size)
    rows = torch.stack(parts, 1).view(shape) if parts else n_K.new_zeros(shape)
    place = torch.arange(slots * size, device=device).view(1, slots, size).expand(len(client_keys), -1, -1)
    ok = (place < end_K.view(-1, 1, 1)).repeat(1, epochs, 1)
    step = ok.any(-1).cumsum(1) - 1
    if train.steps is not None:
        ok = ok & (step < train.steps).unsqueeze(-1)
    used = ok.any(-1).any(0)  # drop the last slots if no client uses them
    last = int(used.nonzero().max()) + 1 if bool(used.any()) else 0
    rows, ok, step = rows[:, :last], ok[:, :last], step[:, :last]
    full = tuple(ok.all(-1).all(0).tolist())
    live = tuple(ok.any(-1).all(0).tolist())
    return Plan(rows, ok, step.clamp(min=0) + 1, ok.any(-1).sum(1), full, live)


def _epoch_order(order_keys: np.ndarray, epoch: int, stack: Rows, width: int) -> Tensor:
    """Return each client's random order of its rows in this epoch, int64 (K, width), padded with 0."""
    order = keys.permutations(keys.fold_in_all(order_keys, epoch), stack.counts, stack.index.device)
    return torch.nn.functional.pad(order, (0, max(width - order.shape[1], 0)))[:, :width]
