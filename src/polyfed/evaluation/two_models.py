"""Two models on the same rows: DeLong's test of AUROCs, McNemar's test, and the paired bootstrap. All are two-sided."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from polyfed.objective.report import Z

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """The difference of two models in one metric, first minus second.

    Attributes:
        first: the metric of the first model.
        second: the metric of the second model.
        low: the lower end of the 95 % interval of the difference.
        high: the upper end.
        p: the p-value of the hypothesis that the models do not differ. None if the method gives none.
    """

    first: float
    second: float
    low: float
    high: float
    p: float | None = None


def delong(positive: Bools, first: Floats, second: Floats) -> Difference | None:
    """Compare two AUROCs on the same rows; None if all rows have the same label.

    Source: DeLong, DeLong, Clarke-Pearson, Biometrics 44 (1988), with the ranks of Sun and Xu, IEEE Signal Processing
    Letters 21 (2014).

    Args:
        positive: which rows are positive, (n,).
        first: scores of the first model, (n,).
        second: scores of the second model, (n,).
    """
    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        return None
    areas, of_positive, of_negative = [], [], []
    for scores in (first, second):
        both = stats.rankdata(np.concatenate([scores[positive], scores[~positive]]))
        own, other = stats.rankdata(scores[positive]), stats.rankdata(scores[~positive])
        areas.append((both[:m].sum() / m - (m + 1) / 2) / n)
        of_positive.append((both[:m] - own) / n)
        of_negative.append(1 - (both[m:] - other) / m)
    spread = np.zeros((2, 2))
    for parts, count in ((of_positive, m), (of_negative, n)):
        if count > 1:
            spread += np.cov(np.stack(parts)) / count
    gap = areas[0] - areas[1]
    deviation = math.sqrt(max(spread[0, 0] + spread[1, 1] - 2 * spread[0, 1], 0.0))
    p = float(2 * stats.norm.sf(abs(gap) / deviation)) if deviation else float(gap == 0)
    return Difference(float(areas[0]), float(areas[1]), gap - Z * deviation, gap + Z * deviation, p)


@dataclass(frozen=True)
class Disagreement:
    """McNemar's test: how often only one of two models is right.

    Attributes:
        first_only: rows that only the first model predicts correctly.
        second_only: rows that only the second model predicts correctly.
        p: the exact p-value. Source: McNemar, Psychometrika 12 (1947); the exact test is the sign test.
    """

    first_only: int
    second_only: int
    p: float


def mcnemar(first: Bools, second: Bools) -> Disagreement:
    """Compare which rows two models predict correctly, each (n,)."""
    one, other = int((first & ~second).sum()), int((~first & second).sum())
    p = float(stats.binomtest(one, one + other).pvalue) if one + other else 1.0
    return Disagreement(one, other, p)


def paired_bootstrap(
    n: int, metric: Callable[[NDArray[np.int64]], tuple[float, float] | None], draws: int = 1000, seed: int = 0
) -> Difference | None:
    """Return the difference of a metric with the interval of the bootstrap, which draws the same rows for both models.

    Args:
        n: the number of rows.
        metric: returns the metric of both models on these rows, or None if it is undefined there.
        draws: the number of bootstrap samples.
        seed: the seed of the samples.
    """
    whole = metric(np.arange(n))
    if whole is None:
        return None
    random = np.random.default_rng(seed)
    pairs = [metric(random.integers(0, n, n)) for _ in range(draws)]
    gaps = [pair[0] - pair[1] for pair in pairs if pair is not None]
    low, high = np.quantile(gaps, [0.025, 0.975])
    return Difference(*whole, float(low), float(high))
