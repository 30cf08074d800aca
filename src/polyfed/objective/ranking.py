"""Ranking metrics: AUROC, average precision and the C-index, exact from all rows or approximate from histograms.

The server can add up the histograms of scores of all clients. A histogram loses the order of scores within a bin.
`auroc_of` returns the largest error that this loss of order can cause.
"""

import torch
from torch import Tensor

BINS, REACH = 256, 8.0
"""Number of bins of a histogram of logits, and the largest absolute logit. So a bin is 1/16 wide, and larger logits are
clipped. These values are polyfed's choice: beyond 8, probabilities differ from 0 and 1 by less than 0.0004."""


def c_index(truth: Tensor, score: Tensor) -> float | None:
    """Return the concordance index: the share of pairs with different true values that the scores order correctly.

    Pairs with equal scores count half. If the true values are only 0 and 1, the index is the AUROC. The computation
    takes O(N log N) steps. Source: Harrell, Califf, Pryor, Lee, Rosati, "Evaluating the yield of medical tests", JAMA
    247 (1982). This function does not support censored data.

    Args:
        truth: the true values (N,).
        score: (N,).

    Returns:
        The index, or None if all true values are equal.
    """
    right, pairs = concordant(truth, score)
    total = int(pairs.sum())
    return int((2 * right).sum()) / (2 * total) if total else None


def concordant(truth: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row with how many others it is in the right order, and how many have another true value.

    Args:
        truth: the true values (N,).
        score: (N,).

    Returns:
        Both float64 (N,). Others with an equal score count half.
    """
    y, s = torch.unique(truth, return_inverse=True)[1], torch.unique(score, return_inverse=True)[1]
    n = len(y)
    if not n:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    pairs = n - _alike(y)
    below = _below_before(y, s)
    above = _below_before(y.max() - y, s.max() - s)
    return below + above + 0.5 * (_alike(s) - _alike(y * n + s)), pairs.double()


def pair_sums(truth: Tensor, score: Tensor) -> Tensor:
    """Return what the C-index over the pairs within several groups of rows needs of one group, float64 (3,).

    These are the number of pairs in the right order, the number of pairs with different true values, and the sum over
    the rows of (A - c B)^2, where A and B are a row's parts of both numbers and c is the C-index of the group. Summed
    over groups, the first two give the C-index, and the last, divided by the square of the second, its variance: that
    of a U-statistic by its projection (Hoeffding, Annals of Mathematical Statistics 19, 1948).

    Args:
        truth: the true values (N,).
        score: (N,).
    """
    right, pairs = concordant(truth, score)
    if not float(pairs.sum()):
        return torch.zeros(3, dtype=torch.float64)
    gaps = right - right.sum() / pairs.sum() * pairs
    return torch.stack([right.sum() / 2, pairs.sum() / 2, gaps.square().sum()])


def _alike(values: Tensor) -> Tensor:
    """Return for each entry how many entries are equal to it, itself included."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    result: Tensor = counts[place]
    return result


def _below_before(y: Tensor, s: Tensor) -> Tensor:
    """Return for each row how many have a smaller y and a smaller s, both >= 0. A merge sort counts them."""
    n = len(y)
    order = (y * n + (n - 1 - s)).argsort()  # equal y: the larger s first, so that it is not counted
    size = 1 << max(n - 1, 0).bit_length()
    parts = torch.full((size,), -1, dtype=torch.int64)  # -1 is smaller than all values, so padding counts nowhere
    parts[:n] = s[order]
    rows = torch.full((size,), n, dtype=torch.int64)
    rows[:n] = order
    found, width = torch.zeros(n + 1, dtype=torch.float64), 1
    while width < size:
        pairs, owners = parts.view(-1, 2 * width), rows.view(-1, 2 * width)
        left, right = pairs[:, :width].contiguous(), pairs[:, width:].contiguous()
        found.index_add_(0, owners[:, width:].flatten(), torch.searchsorted(left, right).flatten().double())
        merged = pairs.sort(1)
        parts, rows = merged.values.reshape(-1), owners.gather(1, merged.indices).reshape(-1)
        width *= 2
    every: Tensor = found[:n]
    return every


def average_precision(truth: Tensor, score: Tensor) -> float | None:
    """Return the sum of precisions weighted by the steps of recall, as in scikit-learn; None if no row is positive.

    Args:
        truth: 0 or 1, (N,).
        score: (N,).
    """
    group = torch.unique(score, return_inverse=True)[1]
    size = int(group.max()) + 1 if len(group) else 0
    positive = torch.zeros(size, dtype=torch.float64).index_add_(0, group, truth.to(torch.float64))
    rows = torch.zeros(size, dtype=torch.float64).index_add_(0, group, torch.ones(len(group), dtype=torch.float64))
    return precision_of(positive, rows - positive)


def precision_of(positive: Tensor, negative: Tensor) -> float | None:
    """Return the average precision from the numbers of positive and negative rows in bins of ascending score."""
    result = positive.flip(0).cumsum(0)
    rows = (positive + negative).flip(0).cumsum(0)
    total = float(positive.sum())
    return float((positive.flip(0) * result / rows.clamp(min=1.0)).sum()) / total if total > 0 else None


def auroc_of(positive: Tensor, negative: Tensor) -> tuple[float, float] | None:
    """Return the AUROC and its largest possible error, from the numbers of positive and negative rows in each bin.

    The result is None if there are no positive or no negative rows. Pairs in the same bin count half. The exact value
    of such a pair may be 0 or 1, so the error is at most half of the share of these pairs.
    """
    pairs = float(positive.sum() * negative.sum())
    if not pairs:
        return None
    together = float((positive * negative).sum()) / pairs
    below = negative.cumsum(0) - negative
    return float((positive * below).sum()) / pairs + 0.5 * together, 0.5 * together


def histogram(logits: Tensor, counted: Tensor) -> Tensor:
    """Return a histogram for each of the T columns of logits, as float64 (T, BINS). This function runs under vmap.

    Entry [t, b] of the result is the number of counted logits of column t in bin b.

    Args:
        logits: (B, T).
        counted: which of the logits count, bool (B, T).
    """
    place = ((logits + REACH) * (BINS / (2 * REACH))).clamp(0, BINS - 1).nan_to_num(0.0).to(torch.int64)
    hot = torch.nn.functional.one_hot(place, BINS).to(torch.float64)
    return (hot * counted.unsqueeze(-1)).sum(0)


def mean_defined(values: list[float | None]) -> float | None:
    """Return the mean over the values that are not None, or None if all values are None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
