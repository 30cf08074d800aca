"""Test sets and subsets: drawn with the seed of a source, so that they are the same in every run, or blocks of rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.data.columns import GUARD, OWN_TEST, OWN_TRAIN, TEST, TRAIN, Columns
from polyfed.data.partitions.persons import classes_of, whole_persons
from polyfed.data.partitions.shards import share_of


def stratified(label: Tensor, share: float, key: int) -> Tensor:
    """Draw a test set of `round(share * rows)` random rows of every class; the other rows are for training.

    Args:
        label: int64 (N,).
        share: Share of every class.
        key: Key of the draw.

    Returns:
        Split codes, int8 (N,).
    """
    split = np.full(len(label), TRAIN, dtype=np.int8)
    draw = keys.generator(key)
    classes = label.numpy()
    for number in np.unique(classes):
        rows = draw.permutation(np.flatnonzero(classes == number))
        split[rows[: round(share * len(rows))]] = TEST
    return torch.from_numpy(split)


def drawn(label: Tensor, share: float, seed: int, person: Tensor | None = None) -> Tensor:
    """Draw a test set for a table that has none: a share of every class, or of all rows if labels are not classes.

    With persons, none has rows on both sides, and the shares are as near as whole persons allow.

    Args:
        label: int64 (N,) class numbers, or other targets (N, ...).
        share: Share of the rows.
        seed: Seed of the draw.
        person: int64 (N,), the person of each row, or None.

    Returns:
        Split codes, int8 (N,).

    Raises:
        DataError: nobody can be held out; see `whole_persons`.
    """
    if person is not None and share:
        rows = person.numpy()
        off = whole_persons(rows, np.zeros_like(rows), classes_of(label), share, keys.key(seed, "npz", "split"))
        return torch.from_numpy(np.where(off, TEST, TRAIN).astype(np.int8))
    classes = torch.zeros(len(label), dtype=torch.int64) if label.is_floating_point() else label
    return stratified(classes, share, keys.key(seed, "npz", "split"))


DRAWN = "no split is given"
"""The beginning of `drawn_note`."""


def drawn_note(share: float) -> str:
    """Return a sentence that informs the user that `drawn` chose the test set."""
    if share == 0.0:
        return f"{DRAWN}, and test_share = 0: all rows are training rows"
    return f"{DRAWN}: a share of {share:g} of the rows is drawn as the test set (test_share)"


def subset(label: Tensor, split: Tensor, share: float, key: int) -> Tensor:
    """Draw a subset that keeps `share` of every class in every split, and return its row numbers in ascending order."""
    if share == 1.0:
        return torch.arange(len(label))
    group = label * 4 + split.to(torch.int64)
    return (stratified(group, share, key) == TEST).nonzero()[:, 0]


def held_out_blocks(columns: Columns, roles: Tensor, shares: Sequence[tuple[int, float]], guard: int) -> Tensor:
    """Hold out the last rows of each class of each natural client, and leave out the rows beside such a block.

    Random rows of a recording leak: each has a neighbour, of which it may even share a part, on the other side.

    Args:
        columns: the table. Without natural clients, all rows are one sequence; targets are one class.
        roles: int8 (N,), the role of each row: `OWN_TRAIN`, another one, or -1 for rows that are not considered.
        shares: the role and the share of each block, the last block first. The shares are of a client's rows with the
            role `OWN_TRAIN`, rounded down.
        guard: how many rows on both sides of a block, in the order of the client's rows, become `GUARD`. Test rows that
            the data marks stay; then the rows of the block beside them do.

    Returns:
        The new roles, int8 (N,).
    """
    result = roles.numpy().copy()
    client = np.zeros(len(columns), np.int64) if columns.client is None else columns.client.cpu().numpy()
    label = columns.label.cpu()
    classes = np.zeros(len(columns), np.int64) if label.is_floating_point() else label.numpy()
    free = np.flatnonzero(result == OWN_TRAIN)
    order = free[np.lexsort((free, classes[free], client[free]))]
    first = _starts(client[order])
    place, begin, end = np.arange(len(order)) - first, _starts(client[order], classes[order]) - first, first * 0
    end = len(order) - _starts(client[order][::-1], classes[order][::-1])[::-1] - first
    left = end - place  # of the rows of this class, from this one on
    for role, share in shares:
        count = share_of(share, end) - share_of(share, begin)
        result[order[(left > 0) & (left <= count)]] = role
        left = left - count
    rows = np.flatnonzero(result >= 0)
    rows = rows[np.lexsort((rows, client[rows]))]
    in_block = np.isin(result[rows], [role for role, _ in shares])
    ranks = np.where(result[rows] == OWN_TEST, len(shares) + 1, 0)
    for rank, (role, _) in enumerate(reversed(shares), 1):
        ranks[result[rows] == role] = rank
    for away in range(1, min(guard, len(rows) - 1) + 1):
        before, after = rows[:-away], rows[away:]
        same = (client[before] == client[after]) & (in_block[:-away] | in_block[away:])
        step = ranks[away:] - ranks[:-away]
        result[before[same & (step > 0)]] = GUARD
        result[after[same & (step < 0)]] = GUARD
    return torch.from_numpy(result)


def _starts(*keys_of: np.ndarray) -> np.ndarray:
    """Return for each entry of sorted arrays the first place with the same values."""
    new = np.ones(len(keys_of[0]), np.bool_)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys_of], 0)
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
