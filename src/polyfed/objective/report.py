"""Metrics of several sites with intervals, from sums alone: what an evaluation job computes from the sites' replies.

Counts and sums are exact after they are added up. AUROC and average precision come from histograms of scores, and each
has a bound on its error: the scores of rows in one bin may be in any order. All intervals are for 95 %. The half-width
of a mean over labels or classes is at most the mean of the single ones, and this where nothing else is known; AUROC and
average precision are narrower by a share that sites compute from their rows (`joint_shares`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import digamma, stdtrit
from torch import Tensor

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

BINS, REACH = 512, 64.0
"""Bins of a histogram of scores, and the largest absolute score. Bins are 0.02 wide at 0, and wider beyond."""

DRAWS = 400
"""Bootstrap samples of an interval."""

SHARES = (
    *("accuracy", "exact_match", "top5", "uar", "macro_f1", "micro_f1", "c_index", "c_index_within_sites", "auroc"),
    *("auroc_within_sites", "average_precision", "acc7", "acc2", "acc2_with_zero", "f1"),
    *("recall1", "recall5", "recall10", "mrr"),
)
"""The metrics that lie in [0, 1]."""

BOUNDS = (
    dict.fromkeys(SHARES, (0.0, 1.0))
    | dict.fromkeys(("loss", "mae", "rmse"), (0.0, math.inf))
    | dict.fromkeys(("pearson", "concordance", "weighted_kappa"), (-1.0, 1.0))
    | {"r2": (-math.inf, 1.0)}
)
"""The range of each metric that has one. No interval leaves it."""


def bounds_of(metric: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a metric can have."""
    return BOUNDS.get(metric, (-math.inf, math.inf))


@dataclass(frozen=True)
class Estimate:
    """A metric of some rows.

    Attributes:
        value: the metric.
        low: the lower end of its 95 % interval, or None if there is no interval.
        high: the upper end.
        error: the largest possible difference from the metric of all single rows; 0 for sums.
    """

    value: float
    low: float | None = None
    high: float | None = None
    error: float = 0.0

    def within(self, metric: str) -> "Estimate":
        """Return the estimate with its interval cut to the range of the metric."""
        if self.low is None or self.high is None:
            return self
        least, most = bounds_of(metric)
        return replace(self, low=max(self.low, least), high=min(self.high, most))

    def facts(self) -> dict[str, Any]:
        """Return the estimate as an object of result.json."""
        result = {"value": self.value, "low": self.low, "high": self.high}
        return result | ({"error": self.error} if self.error else {})


def around(value: float, half: float, error: float = 0.0, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return an estimate with an interval of this half-width, widened by the error of the value and cut to a range."""
    return Estimate(value, max(value - half - error, low), min(value + half + error, high), error)


def wilson(hits: float, n: float, quantile: float = Z) -> Estimate:
    """Return a share with Wilson's score interval (Journal of the American Statistical Association 22, 1927)."""
    share, square = hits / n, quantile * quantile / n
    middle = (share + square / 2) / (1 + square)
    half = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return Estimate(share, min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share))


def mean_of(each: Sequence[Estimate], share: float = 1.0) -> Estimate | None:
    """Return the mean of several estimates, or None without any; the module's docstring explains its interval.

    Args:
        each: the estimates.
        share: the variance of their mean, divided by the square of their mean standard deviation.
    """
    if not each:
        return None
    value, error = (math.fsum(getattr(one, name) for one in each) / len(each) for name in ("value", "error"))
    if any(one.low is None for one in each):
        return Estimate(value, error=error)
    below = math.fsum(max(one.value - (one.low or 0.0) - one.error, 0.0) for one in each) / len(each)
    above = math.fsum(max((one.high or 0.0) - one.value - one.error, 0.0) for one in each) / len(each)
    root = math.sqrt(share)
    return Estimate(value, value - root * below - error, value + root * above + error, error)


def t_quantile(clusters: int) -> float:
    """Return the 97.5 % quantile of Student's t for this number of clusters."""
    return float(stdtrit(clusters - 1, 0.975))


def moments(values: Tensor) -> Tensor:
    """Return the number of units, their sums, and the sums of their products, float64 (..., 1 + W + W * W).

    Args:
        values: (..., U, 1 + W), for U units, which are rows or clusters of rows: the number of rows of the unit, by
            which units without rows do not count, and W sums over these rows.
    """
    rows, sums = values[..., 0], values[..., 1:]
    products = sums.mT @ sums
    return torch.cat([(rows > 0).sum(-1, keepdim=True).double(), sums.sum(-2), products.flatten(-2)], -1)


def of_moments(numbers: Sequence[float], *, share: bool, clusters: bool, metric: str = "") -> Estimate | None:
    """Return a score with its interval from `moments` of `Objective.row_scores`; None if the score is undefined.

    The variance of a mean of ratios a_t / b_t is that of its linear part, the sum over units of
    (a_tu - a_t / b_t * b_tu) / b_t / T. For clusters it is multiplied by C / (C - 1), with Student's t of C - 1 degrees
    of freedom (Cameron and Miller, Journal of Human Resources 50, 2015). The interval of a share is Wilson's at the
    number of independent rows that have the same variance, or the number of units if all units are equal (Korn and
    Graubard, Survey Methodology 24, 1998).

    Args:
        numbers: the moments, 1 + W + W * W.
        share: whether the score is a share of rows.
        clusters: whether the units are clusters of rows.
        metric: the name of the score, whose range no interval leaves.
    """
    told = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    width = round((math.sqrt(4 * len(told) - 3) - 1) / 2)
    units, (above, below) = float(told[0]), told[1 : 1 + width].view(2, -1)
    known = below > 0
    if not bool(known.any()):
        return None
    ratio = torch.where(known, above / below.where(known, torch.ones_like(below)), 0.0)
    value, weight = float(ratio[known].mean()), torch.where(known, 1 / below, 0.0) / int(known.sum())
    slope = torch.cat([weight, -ratio * weight])
    spread = max(float(slope @ told[1 + width :].view(width, width) @ slope), 0.0)
    if units < 2:
        return Estimate(value)
    quantile = Z
    if clusters:
        spread, quantile = spread * units / (units - 1), t_quantile(round(units))
    if not share:
        return around(value, quantile * math.sqrt(spread)).within(metric)
    independent = value * (1 - value) / spread if spread > 1e-15 and 0 < value < 1 else units
    result = wilson(value * independent, independent, quantile)
    return Estimate(value, result.low, result.high)


def drawn(cells: Tensor, metric: Callable[[Tensor], float | None], draws: int = DRAWS) -> Estimate | None:
    """Return a metric of counts with its bootstrap interval, which equals that of a bootstrap of the rows.

    Args:
        cells: the number of rows in each cell, of any shape.
        metric: computes the metric from such counts.
        draws: the number of bootstrap samples; without any there is no interval.
    """
    value = metric(cells)
    if value is None or not draws:
        return None if value is None else Estimate(value)
    counts = cells.double().numpy()
    total = round(float(counts.sum()))
    samples = np.random.default_rng(0).multinomial(total, counts.ravel() / counts.sum(), size=draws)
    found = [metric(torch.from_numpy(one.reshape(counts.shape)).double()) for one in samples]
    known = [one for one in found if one is not None]
    low, high = np.quantile(known, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def histograms(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the number of positive and of negative rows in each bin of their scores, float64 (2, K, BINS).

    Args:
        scores: (B, K), for K labels or classes.
        positive: which rows are positive, bool (B, K).
        negative: which rows are negative, bool (B, K).
    """
    return _binned(_places(scores), torch.stack([positive, negative]).double())


def _places(scores: Tensor) -> Tensor:
    """Return the bin of each score, int64 (B, K)."""
    scaled = scores.double().asinh() / math.asinh(REACH) + 1
    return (scaled * (BINS / 2)).clamp(0, BINS - 1).nan_to_num(0.0).long()


def _binned(places: Tensor, weights: Tensor) -> Tensor:
    """Return the sums of the weights (2, B, K) in each bin, float64 (2, K, BINS)."""
    result = torch.zeros(2, places.shape[1], BINS, dtype=torch.float64, device=places.device)
    for side, weight in enumerate(weights):
        result[side].scatter_add_(1, places.T, weight.T)
    return result


SHARE_DRAWS, SHARE_ROWS = 200, 20_000
"""Bootstrap samples of the rows for `joint_shares`, and the largest number of rows in one."""


def joint_shares(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return by how much less the mean over labels or classes varies than the single ones, float64 (2,).

    A row counts in every label or class, in one of which it is positive, so that their errors are correlated, but not
    fully. The two numbers, for AUROC and average precision, are the variance of the mean divided by the square of the
    mean standard deviation, over bootstrap samples of the rows: at most 1.

    Args:
        scores: (B, K), for K labels or classes.
        positive: which rows are positive, bool (B, K).
        negative: which rows are negative, bool (B, K).
    """
    rows = len(scores)
    if scores.shape[1] < 2 or rows < 2:
        return torch.ones(2, dtype=torch.float64)
    random = np.random.default_rng(0)
    some = torch.from_numpy(random.permutation(rows)[:SHARE_ROWS])
    places, sides = _places(scores[some]), torch.stack([positive[some], negative[some]]).double()
    values = []
    for _ in range(SHARE_DRAWS):
        weights = np.bincount(random.integers(0, len(some), len(some)), minlength=len(some))
        values.append(_areas(_binned(places, sides * torch.from_numpy(weights).double().unsqueeze(-1))))
    found = torch.stack(values)  # (draws, 2, K), NaN where a class has no rows
    means, single = found.nanmean(-1), found - found.nanmean(0)
    deviations = single.square().nanmean(0).sqrt().nanmean(-1)
    ratio = (means - means.nanmean(0)).square().nanmean(0) / deviations.square()
    return torch.where(deviations > 0, ratio, 1.0).nan_to_num(1.0).clamp(0.0, 1.0)


def _areas(bins: Tensor) -> Tensor:
    """Return AUROC and average precision of each pair of histograms (2, K, BINS), (2, K)."""
    positive, negative = bins
    below, pairs = negative.cumsum(-1) - 0.5 * negative, positive.sum(-1) * negative.sum(-1)
    area = (positive * below).sum(-1) / torch.where(pairs > 0, pairs, torch.nan)
    falling, rows = positive.flip(-1), (positive + negative).flip(-1).cumsum(-1)
    precision = (falling * falling.cumsum(-1) / rows.clamp(min=1.0)).sum(-1)
    total = positive.sum(-1)
    return torch.stack([area, precision / torch.where(total > 0, total, torch.nan)])


LEVELS = BINS.bit_length() - 1
"""The level of a histogram at which it has one bin. Each level joins two neighbouring bins of the one before."""


def coarsened(bins: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Join neighbouring bins until each has `least` rows or none, because a bin of few rows tells their scores.

    Args:
        bins: histograms, (2, K, BINS).
        least: the smallest number of rows of one side that a bin may have.

    Returns:
        The histograms with the count of each joined bin in its first place, and the level of each label, int64 (K,).
    """
    levels = torch.zeros(bins.shape[1], dtype=torch.int64)
    for label in range(bins.shape[1]):
        sides = bins[:, label]
        while levels[label] < LEVELS and bool(((sides > 0) & (sides < least)).any()):
            sides = sides.view(2, -1, 2).sum(-1)
            levels[label] += 1
    return at_levels(bins, levels), levels


def raised(bins: Tensor, least: int) -> Tensor:
    """Join the bins of histograms of ascending scores, (..., N), each with its neighbours on a fixed binary grid.

    A bin is split in two only if each half has `least` rows or none. The rows of a joined bin count at its upper end,
    so that no score becomes smaller. A histogram of fewer rows becomes empty.
    """
    result = torch.zeros_like(bins)
    for own, into in zip(bins.reshape(-1, bins.shape[-1]), result.view(-1, bins.shape[-1]), strict=True):
        last = len(own) - 1
        parts = [(0, 1 << last.bit_length())] if int(own.sum()) >= least else []
        while parts:
            low, high = parts.pop()
            middle = (low + high) // 2
            halves = [int(own[low:middle].sum()), int(own[middle:high].sum())]
            if high - low > 1 and all(rows == 0 or rows >= least for rows in halves):
                parts += [(low, middle)] * (halves[0] > 0) + [(middle, high)] * (halves[1] > 0)
            else:
                into[min(high - 1, last)] += sum(halves)
    return result


def at_levels(bins: Tensor, levels: Tensor) -> Tensor:
    """Return histograms (2, K, BINS) with the bins of each label joined up to its level; see `coarsened`."""
    result = torch.zeros_like(bins)
    for label, level in enumerate(levels.tolist()):
        result[:, label, :: 1 << level] = bins[:, label].view(2, -1, 1 << level).sum(-1)
    return result


def log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of each class against the others, (B, C): scores in the order of the probabilities."""
    log = logits.double().log_softmax(-1)
    return log - torch.log1p(-log.exp()).clamp(min=-745.0)


def auroc(positive: Tensor, negative: Tensor) -> Estimate | None:
    """Return the AUROC of two histograms of ascending score, or None if one is empty.

    Pairs in one bin count half, so the error is at most half of their share. The interval has the variance of DeLong et
    al. (Biometrics 44, 1988), computed on the bins.
    """
    p, n = float(positive.sum()), float(negative.sum())
    if not p or not n:
        return None
    below, above = negative.cumsum(0) - negative, positive.flip(0).cumsum(0).flip(0) - positive
    of_positive, of_negative = (below + 0.5 * negative) / n, (above + 0.5 * positive) / p
    value = float((positive * of_positive).sum()) / p
    spread = 0.0
    for weights, parts, count in ((positive, of_positive, p), (negative, of_negative, n)):
        if count > 1:
            spread += float((weights * (parts - value).square()).sum()) / (count - 1) / count
    error = 0.5 * float((positive * negative).sum()) / (p * n)
    return around(value, Z * math.sqrt(spread), error, 0.0, 1.0)


def average_precision(positive: Tensor, negative: Tensor, draws: int = DRAWS) -> Estimate | None:
    """Return the average precision of two histograms of ascending score, or None without positive rows.

    The value takes each bin as one threshold. The true value is at least that with the negative rows of each bin first,
    and at most that with all of its positive rows first, tied with each other.
    """
    p, n = positive.flip(0).double(), negative.flip(0).double()
    total = float(p.sum())
    if not total:
        return None

    def value_of(cells: Tensor) -> float | None:
        pos, neg = cells
        hits, rows = pos.cumsum(0), (pos + neg).cumsum(0)
        count = float(pos.sum())
        return float((pos * hits / rows.clamp(min=1.0)).sum()) / count if count else None

    result = drawn(torch.stack([p, n]), value_of, draws)
    assert result is not None, "there are positive rows"
    hits, misses = p.cumsum(0), n.cumsum(0)
    highest = float((p * hits / (hits + misses - n).clamp(min=1.0)).sum()) / total
    first, behind = (hits - p).numpy(), misses.numpy()
    lowest = float((p.numpy() - behind * (digamma(first + p.numpy() + behind + 1) - digamma(first + behind + 1))).sum())
    error = max(highest - result.value, result.value - lowest / total, 0.0)
    if result.low is None or result.high is None:
        return Estimate(result.value, error=error)
    low, high = max(result.low - error, 0.0), min(result.high + error, 1.0)
    return Estimate(result.value, low, high, error)


def ranked(bins: Tensor, shares: Sequence[float], draws: int = DRAWS) -> dict[str, Estimate]:
    """Return `auroc` and `average_precision` as means over the K labels or classes of histograms (2, K, BINS).

    Args:
        bins: the histograms.
        shares: for both metrics, how much less the mean varies than the single ones (`joint_shares`).
        draws: the number of bootstrap samples.
    """
    result = {}
    metrics: tuple[Callable[..., Estimate | None], ...] = (auroc, partial(average_precision, draws=draws))
    for name, share, metric in zip(NAMES, shares, metrics, strict=True):
        each = [one for pair in bins.unbind(1) if (one := metric(*pair)) is not None]
        if (mean := mean_of(each, share)) is not None:
            result[name] = mean
    return result


NAMES = ("auroc", "average_precision")
"""The metrics that come from histograms."""

WITHIN = "auroc_within_sites"
"""How much more similar a query is to its partner than to other rows of its site; see `Retrieval`."""

UNKNOWN = (1.0, 1.0)
"""The shares of `ranked` where nothing is known: the widest intervals."""


def by_client(value: float, without: Sequence[float], *, share: bool, metric: str = "") -> tuple[float, float] | None:
    """Return the interval of a metric over clients: the jackknife that leaves out one client at a time.

    With Student's t of K - 1 degrees of freedom, it takes the clients as a sample of others (Efron and Stein, Annals of
    Statistics 9, 1981). The interval of a share is Wilson's, as in `of_moments`.

    Args:
        value: the metric of all rows.
        without: the metric without each of the K clients.
        share: whether the metric lies in [0, 1].
        metric: its name, whose range the interval does not leave.
    """
    known = np.array([one for one in without if math.isfinite(one)])
    if len(known) < 2:
        return None
    spread = float((len(known) - 1) / len(known) * np.square(known - known.mean()).sum())
    quantile = t_quantile(len(known))
    if not share:
        least, most = bounds_of(metric)
        return max(value - quantile * math.sqrt(spread), least), min(value + quantile * math.sqrt(spread), most)
    independent = value * (1 - value) / spread if spread > 1e-15 and 0 < value < 1 else float(len(known))
    result = wilson(value * independent, independent, quantile)
    assert result.low is not None
    assert result.high is not None
    return result.low, result.high


def shown_groups(sizes: Tensor, least: int, among: Tensor | None = None) -> Tensor:
    """Return which groups may be shown, bool (G,): those with at least `least` rows, or with none.

    If the hidden rows were fewer than `least`, they would follow from the total. The smallest shown group is then
    hidden too.

    Args:
        sizes: the number of rows of each group, (G,). The groups are disjoint, and hold all rows.
        least: the smallest number of rows that may be shown.
        among: the groups that are not hidden for another reason, bool (G,); all by default.
    """
    shown = (sizes >= least) | (sizes == 0)
    shown = shown if among is None else shown & among
    while 0 < int(sizes[~shown].sum()) < least and bool((shown & (sizes > 0)).any()):
        candidates = torch.where(shown & (sizes > 0), sizes, sizes.max() + 1)
        shown[int(candidates.argmin())] = False
    return shown


def shown_columns(codes: Mapping[str, Tensor], y: Tensor, least: int) -> dict[str, Tensor]:
    """Return which groups of each column may be shown, bool (G,); see `shown_groups`.

    A group whose rows are almost the rows of a class, or of shown groups of an earlier column, is hidden: the
    difference of their sums would tell of the few rows in which they differ.

    Args:
        codes: the group of each row by each column, int64 (n,), in an order that is the same in every job.
        y: the labels or targets of the rows.
        least: the smallest number of rows that may be shown.
    """
    targets = [y] if y.dim() == 1 else y.unbind(1)
    apart = [torch.where(t.isnan(), 2, t == 1).long() if y.is_floating_point() else t for t in targets]
    result = {}
    for name, own in codes.items():
        shown = shown_groups(torch.bincount(own), least)
        while (code := _telling(own, shown, apart, least)) is not None:
            shown[code] = False
        result[name] = shown
        apart.append(_cells(own, shown))
    return result


def shown_targets(codes: Tensor, shown: Tensor, y: Tensor, least: int) -> Tensor:
    """Return which targets may be shown in which groups of a column, bool (G, T); see `shown_groups`.

    A large group may have few rows in which a target is known.

    Args:
        codes: the group of each row, int64 (n,).
        shown: which groups may be shown, bool (G,).
        y: the targets of the rows, (n, T), NaN where unknown.
        least: the smallest number of rows that may be shown.
    """
    known = [torch.bincount(codes[~target.isnan()], minlength=len(shown)) for target in y.unbind(1)]
    return torch.stack([shown_groups(sizes, least, shown) for sizes in known], 1)


def _cells(codes: Tensor, shown: Tensor) -> Tensor:
    """Return the shown group of each row, int64 (n,); all hidden groups have one number."""
    return torch.where(shown[codes], codes, len(shown))


def _telling(codes: Tensor, shown: Tensor, others: Sequence[Tensor], least: int) -> int | None:
    """Return a shown group that, alone or with others, differs from a group of another column in few rows; or None."""
    if least < 2 or not len(codes):
        return None
    for cells in others:
        for code in torch.unique(codes[shown[codes]]).tolist():
            if 0 < _nearest(codes == code, cells) < least:
                return int(code)
        for cell in torch.unique(cells).tolist():
            inside = codes[(cells == cell) & shown[codes]]
            if len(inside) and 0 < _nearest(cells == cell, _cells(codes, shown)) < least:
                return int(torch.bincount(inside).argmax())
    return None


def _nearest(rows: Tensor, cells: Tensor) -> int:
    """Return in how many rows a set, bool (n,), differs from the nearest union of cells, int64 (n,)."""
    size = int(cells.max()) + 1
    inside, outside = (torch.bincount(cells[of], minlength=size) for of in (rows, ~rows))
    return int(torch.minimum(inside, outside).sum())
