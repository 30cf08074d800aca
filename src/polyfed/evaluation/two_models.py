"""Two models on the same rows: DeLong's test of AUROCs, McNemar's test, and the paired bootstrap. All are two-sided.

Rows of one client, such as a person, are alike. Given the client of each row, all three take the clients as a sample,
instead of the rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from polyfed.objective.report import Z

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


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


def delong(positive: Bools, first: Floats, second: Floats, clients: Ints | None = None) -> Difference | None:
    """Compare two AUROCs on the same rows; None if all rows have the same label.

    With clients, the structural components are summed by client (Obuchowski, Biometrics 53, 1997), with Student's t.

    Source: DeLong, DeLong, Clarke-Pearson, Biometrics 44 (1988), with the ranks of Sun and Xu, IEEE Signal Processing
    Letters 21 (2014).

    Args:
        positive: which rows are positive, (n,).
        first: scores of the first model, (n,).
        second: scores of the second model, (n,).
        clients: the client of each row, from 0, (n,).
    """
    found = _components(positive, first, second)
    if found is None:
        return None
    areas, gaps = found
    if clients is None:
        return _of_areas(areas, _variance(gaps))
    rows = np.empty(len(positive))
    rows[positive], rows[~positive] = (one / len(one) for one in gaps)
    sums = np.bincount(clients, rows)
    count = len(np.unique(clients))
    spread = float(np.square(sums).sum()) * count / max(count - 1, 1)
    return _of_areas(areas, spread, stats.t(max(count - 1, 1)))


def paired_areas(positive: Bools, first: Floats, second: Floats) -> tuple[float, float, float] | None:
    """Return two AUROCs on the same rows and DeLong's variance of their difference; see `delong`."""
    result = _components(positive, first, second)
    return None if result is None else (*result[0], _variance(result[1]))


def within_sites(rows: Floats, areas: Floats) -> Difference:
    """Compare two models by their AUROCs within each of several sites, averaged over the sites by rows.

    The sites are taken as they are, not as a sample of sites.

    Args:
        rows: the number of rows of each site, (S,).
        areas: `paired_areas` of each site, (S, 3).
    """
    weights = rows / rows.sum()
    first, second = weights @ areas[:, 0], weights @ areas[:, 1]
    return _of_areas((float(first), float(second)), float(np.square(weights) @ areas[:, 2]))


def _of_areas(areas: tuple[float, float], variance: float, law: Any = stats.norm) -> Difference:
    """Return the difference of two AUROCs, given its variance and its distribution divided by its deviation."""
    gap, deviation, quantile = areas[0] - areas[1], math.sqrt(variance), float(law.ppf(0.975))
    p = float(2 * law.sf(abs(gap) / deviation)) if deviation else float(gap == 0)
    return Difference(*areas, gap - quantile * deviation, gap + quantile * deviation, p)


def _variance(gaps: Sequence[Floats]) -> float:
    return sum(float(np.square(one).sum()) / (len(one) - 1) / len(one) for one in gaps if len(one) > 1)


def _components(
    positive: Bools, first: Floats, second: Floats
) -> tuple[tuple[float, float], tuple[Floats, Floats]] | None:
    """Return both AUROCs, and the structural components of their difference, centred, of the rows of each side."""
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
    gap = areas[0] - areas[1]
    centred = (of_positive[0] - of_positive[1] - gap, of_negative[0] - of_negative[1] - gap)
    return (float(areas[0]), float(areas[1])), centred


@dataclass(frozen=True)
class Disagreement:
    """McNemar's test: how often only one of two models is right.

    Attributes:
        first_only: rows that only the first model predicts correctly.
        second_only: rows that only the second model predicts correctly.
        p: the exact p-value. Source: McNemar, Psychometrika 12 (1947); the exact test is the sign test. With
            clients, the test of Durkalski et al. (Statistics in Medicine 22, 2003).
    """

    first_only: int
    second_only: int
    p: float


def mcnemar(first: Bools, second: Bools, clients: Ints | None = None) -> Disagreement:
    """Compare which rows two models predict correctly, each (n,), and the client of each row, from 0, if it counts."""
    more = first.astype(np.float64) - second
    gaps = None if clients is None else np.bincount(clients, more).astype(np.float64)
    return disagreement(int((first & ~second).sum()), int((~first & second).sum()), gaps)


def disagreement(first_only: int, second_only: int, gaps: Floats | None = None) -> Disagreement:
    """Return McNemar's test, given on how many rows only one model is right.

    Args:
        gaps: by how many rows the first model is right more often than the second, for each client if clients count.
    """
    if not first_only + second_only:
        p = 1.0
    elif gaps is None:
        p = float(stats.binomtest(first_only, first_only + second_only).pvalue)
    else:
        spread = float(np.square(gaps).sum())
        p = float(stats.chi2.sf(float(gaps.sum()) ** 2 / spread, 1)) if spread else 1.0
    return Disagreement(first_only, second_only, p)


def paired_shares(both: int, first_only: int, second_only: int, none: int) -> Difference:
    """Return the difference of two models' shares of right answers, given on how many rows which of them is right.

    The interval is Wald's after half a row more in each of the four groups (Agresti and Min, Biostatistics 6, 2005).
    """
    n, gap = both + first_only + second_only + none, first_only - second_only
    total, middle = n + 2, gap / (n + 2)
    deviation = math.sqrt(max((first_only + second_only + 1) / total - middle * middle, 0.0) / total)
    half = Z * deviation
    ends = (max(middle - half, -1.0), min(middle + half, 1.0))
    p = disagreement(first_only, second_only).p
    return Difference((both + first_only) / n, (both + second_only) / n, *ends, p)


def paired_means(sites: Mapping[str, Sequence[float]], *, root: bool = False) -> dict[str, Any]:
    """Compare two models in a metric that is a ratio of sums over rows; empty without rows.

    The interval over rows is that of the linear part of the difference (the delta method). With several sites, `low`
    and `high` are over sites: the jackknife that leaves out one site, with Student's t. They are the interval of the
    difference for other sites like these.

    Args:
        sites: the name of a site -> the `moments` of its rows: of the denominator and of both numerators, (13,).
        root: whether the metric is the root of the ratio, as the RMSE.
    """
    each = {site: np.array(told) for site, told in sites.items() if told[1] > 0}
    if not each:
        return {}
    own = {site: _of_moments(told, root) for site, told in each.items()}
    total = np.sum(list(each.values()), axis=0)
    result = asdict(pooled := _of_moments(total, root)) | {"rows": round(total[0])}
    if len(each) < 2:
        return result
    left = np.array([one.first - one.second for one in (_of_moments(total - told, root) for told in each.values())])
    spread = (len(left) - 1) / len(left) * float(np.square(left - left.mean()).sum())
    over = _of_areas((pooled.first, pooled.second), spread, stats.t(len(left) - 1))
    result |= asdict(over) | {"clients": len(each), "low_by_rows": pooled.low, "high_by_rows": pooled.high}
    return result | {"by_site": {site: asdict(one) | {"rows": round(each[site][0])} for site, one in own.items()}}


def _of_moments(told: Floats, root: bool) -> Difference:
    """Return the difference of two ratios (or of their roots) of sums, with its interval over rows."""
    rows, (below, *above), products = float(told[0]), told[1:4], told[4:].reshape(3, 3)
    ratios = np.array(above) / below
    values = np.sqrt(ratios) if root else ratios
    slopes = 0.5 / np.where(values > 0, values, np.inf) if root else np.ones(2)
    change = np.array([-(slopes * ratios) @ [1, -1], slopes[0], -slopes[1]]) / below
    spread = max(float(change @ products @ change), 0.0) * rows / max(rows - 1, 1)
    return _of_areas((float(values[0]), float(values[1])), spread)


def paired_bootstrap(
    n: int,
    metric: Callable[[Ints], tuple[float, float] | None],
    draws: int = 1000,
    seed: int = 0,
    clients: Ints | None = None,
) -> Difference | None:
    """Return the difference of a metric with the interval of the bootstrap, which draws the same rows for both models.

    With clients, it draws clients with all their rows (Davison and Hinkley, Bootstrap Methods, 1997, section 3.8).

    Args:
        n: the number of rows.
        metric: returns the metric of both models on these rows, or None if it is undefined there.
        draws: the number of bootstrap samples.
        seed: the seed of the samples.
        clients: the client of each row, from 0, (n,).
    """
    whole = metric(np.arange(n))
    if whole is None:
        return None
    random = np.random.default_rng(seed)
    rows_of = [] if clients is None else [np.flatnonzero(clients == client) for client in np.unique(clients)]

    def drawn() -> Ints:
        if not rows_of:
            return random.integers(0, n, n)
        return np.concatenate([rows_of[client] for client in random.integers(0, len(rows_of), len(rows_of))])

    pairs = [metric(drawn()) for _ in range(draws)]
    gaps = [pair[0] - pair[1] for pair in pairs if pair is not None]
    low, high = np.quantile(gaps, [0.025, 0.975])
    return Difference(*whole, float(low), float(high))
