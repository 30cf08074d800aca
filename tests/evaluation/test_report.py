"""The sums of an evaluation job: pooled they are those of all rows; AUROC and average precision keep their bounds."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.evaluation.site_scores import _add_intervals
from polyfed.evaluation.subsets import over_clients
from polyfed.objective import Classification, MultiLabel, Objective, Ordinal, Regression
from polyfed.objective.report import (
    BOUNDS,
    LEVELS,
    Estimate,
    auroc,
    average_precision,
    bounds_of,
    by_client,
    coarsened,
    histograms,
    moments,
    of_moments,
    shown_columns,
    shown_groups,
    wilson,
)

N = 600


def rows_of(name: str, seed: int = 0) -> tuple[Objective, Tensor, Tensor]:
    """An objective, outputs and labels of some rows."""
    g = torch.Generator().manual_seed(seed)
    if name.startswith("classes"):
        c = int(name[7:])
        y = torch.randint(c, (N,), generator=g)
        return Classification(), 2 * torch.randn(N, c, generator=g) + 2 * torch.eye(c)[y], y
    if name == "ordinal":
        y = torch.randint(4, (N,), generator=g)
        return Ordinal(), y.unsqueeze(1) - torch.arange(3) - 0.5 + torch.randn(N, 3, generator=g), y
    if name == "labels":
        y = (torch.rand(N, 3, generator=g) < 0.3).float()
        y[torch.rand(N, 3, generator=g) < 0.1] = torch.nan
        return MultiLabel(), torch.randn(N, 3, generator=g) + y.nan_to_num(0.0), y
    y = torch.randn(N, 2, generator=g)
    return Regression(), y + torch.randn(N, 2, generator=g), y


def sums_of(objective: Objective, outputs: Tensor, y: Tensor, rows: Any) -> Tensor:
    rows = torch.as_tensor(rows)
    return objective.site_sums(outputs[rows], Batch({}, y[rows], torch.arange(len(rows))))


TASKS = ["classes2", "classes3", "classes7", "ordinal", "labels", "regression"]


@pytest.mark.parametrize("name", TASKS)
def test_the_sums_of_three_sites_are_those_of_one_file(name: str) -> None:
    objective, outputs, y = rows_of(name)
    parts = np.array_split(np.random.default_rng(0).permutation(N), 3)
    pooled = objective.estimates(sum(sums_of(objective, outputs, y, part) for part in parts))  # type: ignore[arg-type]
    whole = objective.estimates(sums_of(objective, outputs, y, np.arange(N)))
    direct = objective.measured(objective.sums(outputs, Batch({}, y, torch.arange(N))))
    assert pooled.keys() == whole.keys() >= direct.keys()
    for metric, one in pooled.items():
        if metric != "c_index_within_sites":  # compares no rows of two sites
            assert one.value == pytest.approx(whole[metric].value, abs=1e-9)
        if metric in direct:
            assert one.value == pytest.approx(direct[metric], abs=1e-6), metric
        if one.low is not None and one.high is not None:
            assert one.low <= one.value <= one.high


@pytest.mark.parametrize("name", [task for task in TASKS if task != "regression"])
def test_auroc_and_average_precision_lie_inside_their_bounds_of_scikit_learn(name: str) -> None:
    objective, outputs, y = rows_of(name)
    if name.startswith("classes"):
        share, size = outputs.double().softmax(-1).numpy(), outputs.shape[1]
        classes = [1] if size == 2 else range(size)
        pairs = [((y == c).numpy(), share[:, c]) for c in classes]
    elif name == "ordinal":
        pairs = [((y > k).numpy(), outputs[:, k].numpy()) for k in range(3)]
    else:
        pairs = [(y[:, t][~y[:, t].isnan()].numpy() == 1, outputs[~y[:, t].isnan(), t].numpy()) for t in range(3)]
    found = objective.estimates(sums_of(objective, outputs, y, np.arange(N)))
    for metric, exact in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        truth = float(np.mean([exact(*pair) for pair in pairs]))
        one = found[metric]
        assert abs(one.value - truth) <= one.error + 1e-12, metric
        assert one.error < 0.02
        assert one.low is not None
        assert one.high is not None
        assert one.low <= truth <= one.high


@pytest.mark.parametrize("seed", range(40))
def test_the_bounds_hold_for_scores_that_crowd_into_few_bins(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = int(draw.integers(3, 60))
    y = draw.random(n) < draw.random()
    y[:2] = True, False
    scores = draw.normal(scale=draw.choice([1e-3, 0.01, 0.1, 200.0]), size=n).round(int(draw.integers(2, 6)))
    bins = histograms(torch.from_numpy(scores)[:, None], torch.from_numpy(y)[:, None], torch.from_numpy(~y)[:, None])
    for metric, exact in ((auroc, roc_auc_score), (average_precision, average_precision_score)):
        one = metric(*bins[:, 0])
        assert one is not None
        assert abs(one.value - exact(y, scores)) <= one.error + 1e-12


@pytest.mark.parametrize("least", [1, 3, 8, 40])
@pytest.mark.parametrize("name", ["classes3", "labels"])
def test_joined_bins_have_enough_rows_and_keep_the_bound(name: str, least: int) -> None:
    objective, outputs, y = rows_of(name)
    sums = sums_of(objective, outputs, y, np.arange(200))
    bins = objective.score_bins(sums)
    assert bins is not None
    before = bins.clone()
    joined, levels = coarsened(bins, least)
    full = levels < LEVELS
    assert not ((joined > 0) & (joined < least))[:, full].any()
    assert torch.equal(joined.sum(-1), before.sum(-1))
    assert torch.equal(joined, before) == (least == 1)
    scores, classes = outputs[:200].double(), range(3)
    for k in classes:
        truth = (y[:200] == k).numpy() if name == "classes3" else y[:200, k][~y[:200, k].isnan()].numpy() == 1
        own = scores.softmax(-1)[:, k].numpy() if name == "classes3" else scores[~y[:200, k].isnan(), k].numpy()
        for metric, exact in ((auroc, roc_auc_score), (average_precision, average_precision_score)):
            one = metric(*joined[:, k])
            assert one is not None
            assert abs(one.value - exact(truth, own)) <= one.error + 1e-12


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        y = draw.random(200) < 0.4
        scores = torch.from_numpy(draw.normal(size=200) + y)[:, None]
        one = auroc(*histograms(scores, torch.from_numpy(y)[:, None], torch.from_numpy(~y)[:, None])[:, 0])
        assert one is not None
        hits += (one.low or 0) <= 0.7602499389065233 <= (one.high or 1)  # Phi(1 / sqrt(2))
    assert hits >= 180
    assert wilson(8, 10).low == pytest.approx(0.4901624, abs=1e-6)
    assert wilson(8, 10).high == pytest.approx(0.9433178, abs=1e-6)


def test_hidden_groups_do_not_follow_from_the_total() -> None:
    for seed in range(300):
        draw = np.random.default_rng(seed)
        sizes, least = torch.from_numpy(draw.integers(0, 30, int(draw.integers(1, 7)))), int(draw.integers(1, 25))
        shown = shown_groups(sizes, least)
        assert bool((sizes[shown] >= least).logical_or(sizes[shown] == 0).all())
        hidden = int(sizes[~shown].sum())
        assert hidden == 0 or hidden >= least or not bool((shown & (sizes > 0)).any())
    assert shown_groups(torch.tensor([30, 20, 3]), 10).tolist() == [True, False, False]
    assert shown_groups(torch.tensor([30, 20, 0]), 10).tolist() == [True, True, True]


@pytest.mark.parametrize("name", ["classes10", "labels", "ordinal"])
def test_intervals_of_macro_auroc_and_average_precision_are_those_of_the_bootstrap_of_rows(name: str) -> None:
    objective, outputs, y = rows_of(name)
    ranked = objective.ranked_rows(outputs, Batch({}, y, torch.arange(N)))
    assert ranked is not None
    scores, positive, negative = (part.numpy() for part in ranked)
    shares = objective.joint_shares(outputs, Batch({}, y, torch.arange(N))).tolist()
    found = objective.estimates(sums_of(objective, outputs, y, np.arange(N)), shares)
    draw, means = np.random.default_rng(7), []
    for _ in range(150):
        rows = draw.integers(0, N, N)
        each = []
        for k in range(scores.shape[1]):
            own = rows[(positive | negative)[rows, k]]
            each.append([exact(positive[own, k], scores[own, k]) for exact in (roc_auc_score, average_precision_score)])
        means.append(np.mean(each, 0))
    for place, metric in enumerate(("auroc", "average_precision")):
        one = found[metric]
        low, high = np.quantile([mean[place] for mean in means], [0.025, 0.975])
        assert one.low is not None
        assert one.high is not None
        assert (one.high - one.low - 2 * one.error) == pytest.approx(high - low, rel=0.25), metric
        wide = objective.estimates(sums_of(objective, outputs, y, np.arange(N)))[metric]
        assert one.high - one.low < (0.6 if name == "classes10" else 1.0) * (wide.high - wide.low)  # type: ignore[operator]


def test_the_jackknife_over_clients_is_the_interval_of_their_scores() -> None:
    draw = np.random.default_rng(0)
    each = draw.uniform(0.4, 0.9, 8)
    without = [np.delete(each, k).mean() for k in range(8)]
    found = by_client(float(each.mean()), without, share=False)
    half = stats.t.ppf(0.975, 7) * each.std(ddof=1) / np.sqrt(8)
    assert found == pytest.approx((each.mean() - half, each.mean() + half))
    assert by_client(1.0, [1.0] * 8, share=True)[0] < 0.7, "eight clients that are all right are only eight"  # type: ignore[index]
    assert by_client(1.0, [1.0], share=True) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_two_groups_and_no_two_jobs_differ_in_few_rows(seed: int) -> None:
    """Any unions of the shown groups of two columns, or of classes, are equal or differ in enough rows."""
    draw, n, least = torch.Generator().manual_seed(seed), 60, 8
    y, sex = torch.randint(0, 2, (n,), generator=draw), torch.randint(0, 2, (n,), generator=draw)
    other = torch.rand(n, generator=draw) < torch.rand(1, generator=draw) * 0.3
    ward = torch.where(other, torch.randint(0, 3, (n,), generator=draw), (sex if seed % 2 else y))
    codes = {"sex": sex, "ward": ward}
    shown = shown_columns(codes, y, least)
    tables = [[y == c for c in range(2)]]
    tables += [[codes[name] == c for c in shown[name].nonzero()[:, 0].tolist()] for name in codes]
    rows = torch.ones(n, dtype=torch.bool)
    unions = [
        [sum((cell for i, cell in enumerate(table) if pick >> i & 1), ~rows) for pick in range(2 ** len(table))]
        for table in tables
    ]
    for one, table in itertools.permutations(range(3), 2):
        for group in tables[one]:
            for union in unions[table]:
                for part in (union, ~union):
                    apart = int((group ^ part).sum())
                    assert apart == 0 or apart >= least


def test_groups_that_repeat_a_class_or_each_other_are_hidden() -> None:
    y = torch.arange(100) % 2
    nearly = torch.where(torch.arange(100) < 2, 1 - y, y)
    across = torch.arange(100) // 50
    assert shown_columns({"a": y, "b": across}, y, 10)["a"].all(), "the same rows tell nothing new"
    assert not shown_columns({"a": nearly, "b": across}, y, 10)["a"].any()
    found = shown_columns({"a": across, "b": across.roll(2)}, y, 10)
    assert found["a"].all()
    assert not found["b"].any()
    assert shown_columns({"a": across, "b": across.roll(2)}, y, 0)["b"].all(), "the owner's own rows"


@pytest.mark.parametrize("metric", [*BOUNDS, "of my own"])
def test_no_interval_leaves_the_range_of_its_metric(metric: str) -> None:
    least, most = bounds_of(metric)
    for value in (max(least, -0.9) + 0.01, min(most, 3.0) - 0.01):
        rows = torch.tensor([[1.0, value - 9.0, 1.0], [1.0, value + 9.0, 1.0]], dtype=torch.float64)
        told = of_moments(moments(rows).tolist(), share=False, clusters=True, metric=metric)
        found = [told, Estimate(value, -9.0, 9.0).within(metric)]
        ends = [by_client(value, [value - 9.0, value + 9.0], share=False, metric=metric)]
        ends += [(one.low, one.high) for one in found if one is not None]
        assert len(ends) == 3
        for low, high in ends:
            assert least <= low <= value <= high <= most
    assert (metric == "of my own") == (least == -math.inf and most == math.inf)
    assert over_clients([value - 9.0, value + 9.0], 2, metric)["low"] >= least


def test_the_intervals_of_sites_have_no_negative_loss() -> None:
    """Two sites with very different losses: the jackknife alone would give an interval around 0."""
    objective = Classification()
    sites = [objective.site_sums(scale * torch.eye(2)[[0, 1] * 4], two_classes()) for scale in (-9.0, 9.0)]
    pooled = {"metrics": {n: e.facts() for n, e in objective.estimates(torch.stack(sites).sum(0)).items()}}
    _add_intervals(objective, pooled, torch.stack(sites))
    assert pooled["metrics"]["loss"]["clients"] == 2
    for name, told in pooled["metrics"].items():
        least, most = bounds_of(name)
        assert least <= told["low"] <= told["high"] <= most, name


def two_classes() -> Batch:
    return Batch({}, torch.tensor([0, 1] * 4), torch.arange(8))
