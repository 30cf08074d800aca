"""Draws test sets and subsets with the seed of a source, so that they are the same in every run."""

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.data.columns import TEST, TRAIN


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


def drawn(label: Tensor, share: float, seed: int) -> Tensor:
    """Draw a test set for a table that has none: a share of every class, or of all rows if labels are not classes.

    Args:
        label: int64 (N,) class numbers, or other targets (N, ...).
        share: Share of the rows.
        seed: Seed of the draw.

    Returns:
        Split codes, int8 (N,).
    """
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
