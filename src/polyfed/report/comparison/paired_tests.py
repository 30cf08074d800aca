"""Tests over paired scores: differences with intervals, Holm's correction, mean ranks with a critical difference.

Every number comes from SciPy, except Holm's correction, which SciPy does not have. Source for the ranks: Demšar,
"Statistical comparisons of classifiers over multiple data sets", JMLR 7 (2006). Source for the correction: Holm, "A
simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Test = Literal["t", "wilcoxon"]

LEVEL = 0.05
"""The level of significance of all tests; intervals cover 1 - LEVEL."""


@dataclass(frozen=True)
class Paired:
    """The differences of paired scores.

    Attributes:
        n: the number of pairs.
        mean: the mean difference.
        low: lower end of the 95 % interval of the mean by Student's t. None for a single pair.
        high: upper end of the interval.
        p: two-sided p-value. None for a single pair. Also None if all pairs have the same difference and this
            difference is not 0.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks over blocks; rank 1 is the best.

    Attributes:
        ranks: the mean rank of each method.
        blocks: the number of blocks N.
        p: p-value of Friedman's test that all methods are alike.
        critical: the critical difference of Nemenyi's test at 5 %.
    """

    ranks: tuple[float, ...]
    blocks: int
    p: float
    critical: float

    @property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """The largest sets of methods whose mean ranks differ by less than the critical difference, sorted by rank."""
        order = sorted(range(len(self.ranks)), key=lambda method: self.ranks[method])
        result: list[tuple[int, ...]] = []
        for start, first in enumerate(order):
            alike = tuple(m for m in order[start:] if self.ranks[m] - self.ranks[first] < self.critical)
            if len(alike) > 1 and not any(set(alike) <= set(other) for other in result):
                result.append(alike)
        return tuple(result)


MOST_PAIRS = 10_000
"""The largest number of pairs that `seeds_to_show` names."""

ROUNDING = 1e-12
"""The largest spread of differences that are equal except for rounding errors."""


def paired(differences: Sequence[float], test: Test = "t") -> Paired:
    """Test whether the mean of paired differences is 0.

    Args:
        differences: the differences, one for each pair. There must be at least one. If all of them are equal, there is
            neither an interval nor a test, because their spread, which both need, is 0.
        test: "t" for Student's paired test, or "wilcoxon" for the signed-rank test. The signed-rank test does not
            assume a normal distribution. With five pairs, its p-value is never below 0.06.
    """
    from scipy import stats  # imported here, because it takes a fifth of a second

    sample = np.asarray(differences, dtype=np.float64)
    n, mean = len(sample), float(sample.mean())
    if n < 2:
        return Paired(n, mean, None, None, None)
    spread = float(sample.std(ddof=1))
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * spread / math.sqrt(n)
    if spread <= ROUNDING:
        return Paired(n, mean, None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy warns of small samples and ties, but the caller shows n
        p = stats.wilcoxon(sample).pvalue if test == "wilcoxon" else stats.ttest_1samp(sample, 0.0).pvalue
    return Paired(n, mean, mean - half, mean + half, float(p))


def seeds_to_show(differences: Sequence[float], wanted: float, power: float = 0.8) -> int | None:
    """Return how many pairs a paired t-test at 5 % needs to find a mean difference with this power.

    The spread of the pairs is estimated from these differences. Source: the noncentral t distribution (Cohen,
    "Statistical Power Analysis for the Behavioral Sciences", 1988, chapter 2).

    Args:
        differences: the differences of the pairs so far.
        wanted: the mean difference that the test shall find, above 0.
        power: the probability of finding it.

    Returns:
        The number of pairs, at least 2 and at most `MOST_PAIRS`. None with fewer than two differences.
    """
    from scipy import stats

    if len(differences) < 2:
        return None
    effect = wanted / max(float(np.std(np.asarray(differences, dtype=np.float64), ddof=1)), ROUNDING)

    def found(n: int) -> bool:
        free, shift = n - 1, min(effect * math.sqrt(n), 1e3)  # beyond this shift, the power is 1
        bound = stats.t.ppf(1 - LEVEL / 2, free)
        return bool(stats.nct.sf(bound, free, shift) + stats.nct.cdf(-bound, free, shift) >= power)

    low, high = 1, 2
    while high < MOST_PAIRS and not found(high):
        low, high = high, min(2 * high, MOST_PAIRS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values in the same order. None stays None and does not count as a test.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    order = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = highest
    return adjusted


def mean_ranks(scores: Sequence[Sequence[float]]) -> MeanRanks:
    """Rank methods in each block, and average the ranks. The highest score is the best; equal scores share their ranks.

    Args:
        scores: (N, K), a row for each block and a column for each method, N at least 2 and K at least 3.
    """
    from scipy import stats

    table = np.asarray(scores, dtype=np.float64)
    blocks, methods = table.shape
    ranks = stats.rankdata(-table, axis=1).mean(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # if all methods are equal in all blocks, the p-value is NaN
        p = float(stats.friedmanchisquare(*table.T).pvalue)
    return MeanRanks(
        tuple(float(rank) for rank in ranks), blocks, 1.0 if math.isnan(p) else p, critical_difference(methods, blocks)
    )


def critical_difference(methods: int, blocks: int) -> float:
    """The smallest difference of mean ranks that is significant at 5 % in Nemenyi's test (Demšar, Eq. 6).

    Args:
        methods: the number of methods K.
        blocks: the number of blocks N.
    """
    from scipy import stats

    quantile = float(stats.studentized_range.ppf(1 - LEVEL, methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))
