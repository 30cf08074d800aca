"""Whether the whole numbers of a modality are token ids or quantities."""

import torch
from torch import Tensor

from polyfed.data.columns import Column

WHOLE = (torch.int16, torch.int32, torch.int64)
"""Types of token ids. Tensors of bytes are treated as pixels."""

MOST_READ = 4096
"""Rows that the guess looks at; more would not change it (ours)."""


def vocabulary_of(column: Column) -> int | None:
    """Return the number of token ids, which is the largest id plus one, or None if the samples are not token ids.

    Vectors of whole numbers from 0 are token ids if that is plausible; see `are_plausible`.
    """
    rule = column.features[0].rule if column.features else None
    if rule is not None and rule.kind == "words":
        return rule.buckets + 1
    raw = column.shift is None and column.scale is None
    if not raw or column.values.dtype not in WHOLE or len(column.shape) != 1 or int(column.values.min()) < 0:
        return None
    return int(column.values.max()) + 1 if are_plausible(column) else None


def whole_numbers(column: Column) -> bool:
    """Whether the samples are vectors of whole numbers from 0, which are either token ids or quantities."""
    is_whole = column.values.dtype in WHOLE and len(column.shape) == 1
    return is_whole and column.shift is None and column.scale is None and int(column.values.min()) >= 0


def are_plausible(column: Column) -> bool:
    """Whether vectors of whole numbers look like sequences of token ids and not like counts (ours).

    A sequence has at least two positions, and at least three different ids. Its vocabulary is no larger than the number
    of entries in all rows, and an id occurs twice on average. All positions share one vocabulary, so at least half of
    them reach a quarter of it. Zeros are padding, so they stand at the ends of a row, and inside it they are no more
    frequent than other ids. Rows do not all have the same sum, as histograms do. The frequencies of neighbouring ids
    have nothing to do with each other, whereas counts lie around their mean: if a third of the values from 0, all next
    to each other, makes up half of the entries, they are counts, unless the vocabulary is large and its smallest ids
    are the most frequent ones, as in a vocabulary that is sorted by frequency.
    """
    x = _some(column)
    vocabulary = int(column.values.max()) + 1
    if x.shape[1] < 2 or vocabulary < 3 or vocabulary > column.values.numel():
        return False
    if 2 * int((x.amax(0) * 4 >= vocabulary).sum()) < x.shape[1]:
        return False
    inside = _inside(x)
    if 2 * len(torch.unique(x[inside])) > int(inside.sum()):
        return False
    zeros = int(((x == 0) & inside).sum()) / max(1, int(inside.sum()))
    if zeros > max(1.5 / vocabulary, 0.05):
        return False
    sums = x.sum(1)
    if len(x) > 2 and bool((sums == sums[0]).all()) and bool((x != x[0]).any()):
        return False
    return not _lie_together(x[inside], vocabulary)


def _some(column: Column) -> Tensor:
    """Return evenly spaced rows of the column, int64 (n, T)."""
    count = len(column)
    rows = torch.linspace(0, count - 1, min(count, MOST_READ), dtype=torch.float64).long()
    return column.raw(rows).long()


def _inside(x: Tensor) -> Tensor:
    """Return, bool (n, T), the entries from the first to the last one above 0 of each row."""
    filled = (x > 0).long()
    return (filled.cumsum(1) > 0) & (filled.flip(1).cumsum(1).flip(1) > 0)


def _lie_together(entries: Tensor, vocabulary: int) -> bool:
    """Whether values that lie next to each other, at most a third of all, make up half of the entries above 0."""
    counts = torch.bincount(entries[entries > 0], minlength=vocabulary)
    if not int(counts.sum()):
        return True
    order = counts.argsort(descending=True, stable=True)
    enough = int((counts[order].cumsum(0) * 2 < counts.sum()).sum()) + 1
    common = order[:enough]
    width = int(common.max() - common.min()) + 1
    by_frequency = vocabulary >= 100 and int(common.min()) <= int(entries[entries > 0].min())
    return enough * 3 <= vocabulary and width <= 1.5 * enough + 1 and not by_frequency
