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
    y, s = torch.unique(truth, return_inverse=True)[1], torch.unique(score, return_inverse=True)[1]
    n = len(y)
    comparable = n * (n - 1) // 2 - _tied(y)
    if not comparable:
        return None
    both = _tied(y * n + s)
    ahead = _increasing_pairs(s[(y * n + (n - 1 - s)).argsort()])
    return (ahead + 0.5 * (_tied(s) - both)) / comparable


def _tied(values: Tensor) -> int:
    """Return the number of pairs of equal entries."""
    counts = torch.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _increasing_pairs(values: Tensor) -> int:
    """Return the number of pairs i < j with values[i] < values[j], for values >= 0. A merge sort counts them."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    parts = torch.full((size,), -1, dtype=torch.int64)  # -1 is smaller than all values, so padding adds no pairs
    parts[: len(values)] = values
    found, width = 0, 1
    while width < size:
        pairs = parts.view(-1, 2 * width)
        left, right = pairs[:, :width].contiguous(), pairs[:, width:].contiguous()
        found += int(torch.searchsorted(left, right).sum())
        parts = pairs.sort(1).values.reshape(-1)
        width *= 2
    return found


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
    found = positive.flip(0).cumsum(0)
    rows = (positive + negative).flip(0).cumsum(0)
    total = float(positive.sum())
    return float((positive.flip(0) * found / rows.clamp(min=1.0)).sum()) / total if total > 0 else None


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
