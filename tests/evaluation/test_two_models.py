"""Two models on the same rows: DeLong, McNemar and the paired bootstrap against independent computations."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from polyfed.evaluation.two_models import delong, mcnemar, paired_bootstrap, paired_shares


def scores(n: int, ties: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    y = draw.random(n) < 0.4
    base = draw.normal(size=n) + y
    one, two = base + draw.normal(size=n), base + 0.5 * draw.normal(size=n)
    return (y, one.round(1), two.round(1)) if ties else (y, one, two)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [12, 80])
def test_delong_equals_its_definition_pair_by_pair(n: int, ties: bool) -> None:
    y, *models = scores(n, ties)
    found = delong(y, *models)
    assert found is not None
    assert found.first == pytest.approx(roc_auc_score(y, models[0]), abs=1e-12)
    assert found.second == pytest.approx(roc_auc_score(y, models[1]), abs=1e-12)
    kernel = [np.where(s[y][:, None] > s[~y], 1.0, np.where(s[y][:, None] == s[~y], 0.5, 0.0)) for s in models]
    v10, v01 = (np.stack([k.mean(axis) for k in kernel]) for axis in (1, 0))
    cov = np.cov(v10) / y.sum() + np.cov(v01) / (~y).sum()
    deviation = np.sqrt(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1])
    gap = found.first - found.second
    assert found.p == pytest.approx(2 * (1 - stats.norm.cdf(abs(gap) / deviation)), abs=1e-12)
    assert (found.high - found.low) / 2 == pytest.approx(stats.norm.ppf(0.975) * deviation, abs=1e-12)


def test_equal_models_do_not_differ_and_one_class_has_no_auroc() -> None:
    y, one, _ = scores(30, ties=False)
    same = delong(y, one, one)
    assert same is not None
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    assert delong(np.ones(30, dtype=bool), one, one) is None
    assert mcnemar(y, y).p == 1.0


def test_mcnemar_is_the_exact_sign_test_of_the_rows_on_which_the_models_disagree() -> None:
    draw = np.random.default_rng(1)
    one, two = draw.random(60) < 0.8, draw.random(60) < 0.6
    found = mcnemar(one, two)
    b, c = sum(one & ~two), sum(two & ~one)
    assert (found.first_only, found.second_only) == (b, c)
    tail = sum(stats.binom.pmf(k, b + c, 0.5) for k in range(max(b, c), b + c + 1))
    assert found.p == pytest.approx(min(1.0, 2 * tail), abs=1e-12)


def test_the_paired_bootstrap_is_narrower_than_that_of_two_samples_and_near_the_normal_interval() -> None:
    draw = np.random.default_rng(2)
    one = draw.normal(size=400)
    two = one + 0.1 * draw.normal(size=400) - 0.05
    found = paired_bootstrap(400, lambda rows: (float(one[rows].mean()), float(two[rows].mean())))
    assert found is not None
    half = stats.norm.ppf(0.975) * (one - two).std() / 20
    gap = (one - two).mean()
    assert found.low == pytest.approx(gap - half, abs=0.15 * half)
    assert found.high == pytest.approx(gap + half, abs=0.15 * half)
    assert paired_bootstrap(4, lambda rows: None) is None


def test_rows_of_one_client_count_once() -> None:
    """Each client's rows are copies: as many clients as rows give the tests of rows, their copies the same again."""
    y, one, two = scores(60, ties=False)
    right = [(model > 0.5) == y for model in (one, two)]
    whole, copies = np.arange(60), np.repeat(np.arange(60), 5)
    many = delong(np.repeat(y, 5), np.repeat(one, 5), np.repeat(two, 5), copies)
    single, by_rows = delong(y, one, two, whole), delong(y, one, two)
    assert many is not None
    assert single is not None
    assert by_rows is not None
    assert (many.low, many.p) == pytest.approx((single.low, single.p))
    assert single.high - single.low == pytest.approx(by_rows.high - by_rows.low, rel=0.06)
    ignorant = delong(np.repeat(y, 5), np.repeat(one, 5), np.repeat(two, 5))
    assert ignorant is not None
    assert ignorant.high - ignorant.low < 0.5 * (many.high - many.low)
    tests = [mcnemar(*right, whole).p, mcnemar(*(np.repeat(model, 5) for model in right), copies).p]
    assert tests[0] == pytest.approx(tests[1])
    assert mcnemar(*(np.repeat(model, 5) for model in right)).p < tests[1]

    def gap(rows: np.ndarray) -> tuple[float, float]:
        return float(np.repeat(right[0], 5)[rows].mean()), float(np.repeat(right[1], 5)[rows].mean())

    by_client, by_row = paired_bootstrap(300, gap, 200, clients=copies), paired_bootstrap(300, gap, 200)
    assert by_client is not None
    assert by_row is not None
    assert by_client.high - by_client.low > 1.7 * (by_row.high - by_row.low)


def test_the_interval_of_two_shares_holds_the_difference_as_often_as_it_says() -> None:
    draw, chances = np.random.default_rng(4), np.array([0.5, 0.25, 0.1, 0.15])
    held = 0
    for cells in draw.multinomial(60, chances, 1000).tolist():
        one = paired_shares(*cells)
        held += one.low <= 0.15 <= one.high
    assert 0.93 <= held / 1000 <= 0.98
    one, other = paired_shares(30, 9, 3, 8), paired_shares(30, 3, 9, 8)
    assert (one.first, one.second) == (other.second, other.first) == (39 / 50, 33 / 50)
    assert (one.low, one.high, one.p) == pytest.approx((-other.high, -other.low, other.p))
    assert one.p == stats.binomtest(9, 12).pvalue
    assert paired_shares(4, 0, 0, 1).low < 0 < paired_shares(4, 0, 0, 1).high
