"""Metrics of every kind of task against scikit-learn and SciPy, also from the sums of several clients."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.objective import Classification, MultiLabel, Objective, Ordinal, Regression, Retrieval, ranking, sentiment

ROWS = 240
PARTS = (7, 90, 60, 1, 82)
"""Rows of the clients whose sums are added."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(y: Tensor, ok: Tensor | None = None) -> Batch:
    return Batch(x={}, y=y, rows=torch.arange(len(y)), ok=ok)


def merged(objective: Objective, outputs: Tensor, y: Tensor, own: bool = False) -> Tensor:
    """The sums of clients with `PARTS` rows, each padded with rows that must not count."""
    total: Any = 0
    for o, t in zip(outputs.split(PARTS), y.split(PARTS), strict=True):
        padding = 3
        padded = (
            torch.cat([o, torch.full((padding, *o.shape[1:]), 9.0)]),
            torch.cat([t, t[:1].expand(padding, *t.shape[1:])]),
        )
        part = batch(padded[1], torch.arange(len(t) + padding) < len(t))
        total = total + (objective.own_sums(padded[0], part) if own else objective.sums(padded[0], part))
    return total


@pytest.fixture
def numbers() -> tuple[Tensor, Tensor]:
    """Predictions and targets (N, 2), a fifth of the targets unknown, far from 0 in the second column."""
    y = drawn(1, ROWS, 2) * torch.tensor([1.0, 3.0]) + torch.tensor([0.0, 500.0])
    p = y + 0.7 * drawn(2, ROWS, 2)
    hidden = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(3)) < 0.2
    return p, y.masked_fill(hidden, torch.nan)


def concordance(p: np.ndarray, y: np.ndarray) -> float:
    return float(2 * np.cov(p, y, bias=True)[0, 1] / (p.var() + y.var() + (p.mean() - y.mean()) ** 2))


def test_regression_equals_scikit_learn_and_scipy(numbers: tuple[Tensor, Tensor]) -> None:
    p, y = numbers
    objective = Regression()
    found = objective.measured(merged(objective, p, y))
    pairs = [(p[k, t].double().numpy(), y[k, t].double().numpy()) for t in range(2) for k in [~y[:, t].isnan()]]

    def mean(metric: Any) -> Any:
        return pytest.approx(np.mean([metric(truth, guess) for guess, truth in pairs]), rel=1e-5)

    assert found["mae"] == mean(sk.mean_absolute_error)
    assert found["rmse"] == mean(sk.root_mean_squared_error)
    assert found["r2"] == mean(sk.r2_score)
    assert found["pearson"] == mean(lambda a, b: stats.pearsonr(a, b)[0])
    assert found["concordance"] == mean(lambda a, b: concordance(b, a))
    assert found["loss"] == pytest.approx(float(((p - y) ** 2).nanmean()), rel=1e-5)


def test_the_c_index_counts_pairs(numbers: tuple[Tensor, Tensor]) -> None:
    p, y = (part[:, 0].nan_to_num(0.0).mul(2).round() for part in numbers)  # rounded: ties in both
    pairs = [(a, b) for a in range(ROWS) for b in range(ROWS) if y[a] < y[b]]
    right = sum(float(p[a] < p[b]) + 0.5 * float(p[a] == p[b]) for a, b in pairs)
    assert ranking.c_index(y, p) == pytest.approx(right / len(pairs))
    assert ranking.c_index(torch.ones(5), torch.arange(5.0)) is None


def test_the_interval_of_pairs_within_groups_holds_the_index_of_the_population() -> None:
    draw, held, draws = torch.Generator().manual_seed(0), 0, 200
    truth = 0.75  # the index of two normal variables with the correlation 1 / sqrt(2): 1/2 + arcsin(r) / pi
    for _ in range(draws):
        total = torch.zeros(3, dtype=torch.float64)
        for rows in (25, 40, 60):
            y = torch.randn(rows, generator=draw)
            total += ranking.pair_sums(y, y + torch.randn(rows, generator=draw))
        right, pairs, spread = total.tolist()
        held += abs(right / pairs - truth) <= 1.96 * spread**0.5 / pairs
    assert held / draws > 0.95 - 3 * (0.05 * 0.95 / draws) ** 0.5


@pytest.mark.parametrize("rounding", [1, 100])
def test_auroc_and_average_precision_equal_scikit_learn(rounding: int) -> None:
    y = (drawn(4, ROWS) > 0.8).long()
    score = ((drawn(5, ROWS) + y) * rounding).round() / rounding
    assert ranking.c_index(y, score) == pytest.approx(sk.roc_auc_score(y, score))
    assert ranking.average_precision(y, score) == pytest.approx(sk.average_precision_score(y, score))


@pytest.fixture
def several() -> tuple[Tensor, Tensor]:
    """Logits and labels (N, 3), a fifth of the labels unknown."""
    y = (drawn(6, ROWS, 3) > torch.tensor([0.0, 0.5, 1.0])).float()
    logits = 2 * drawn(7, ROWS, 3) + 2 * y - 1
    hidden = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(8)) < 0.2
    return logits, y.masked_fill(hidden, torch.nan)


@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_multi_label_equals_scikit_learn(several: tuple[Tensor, Tensor], threshold: float) -> None:
    logits, y = several
    objective = MultiLabel(threshold=threshold)
    found = objective.measured(merged(objective, logits, y))
    known = ~y.isnan()
    yes = (logits.sigmoid() > threshold).long()
    columns = [(y[known[:, t], t].long(), yes[known[:, t], t]) for t in range(3)]
    assert found["macro_f1"] == pytest.approx(np.mean([sk.f1_score(a, b) for a, b in columns]))
    assert found["micro_f1"] == pytest.approx(sk.f1_score(y[known].long(), yes[known]))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y[known].long(), yes[known]))
    some = known.any(1)
    assert found["exact_match"] == pytest.approx(float(((yes == y) | ~known).all(1)[some].float().mean()))
    exact = dict(zip(objective.exact, objective.exact_scores(logits, batch(y)), strict=True))
    scores = [(y[k, t], logits[k, t]) for t in range(3) for k in [known[:, t]]]
    assert exact["auroc"] == pytest.approx(np.mean([sk.roc_auc_score(a, b) for a, b in scores]))
    assert exact["average_precision"] == pytest.approx(np.mean([sk.average_precision_score(a, b) for a, b in scores]))


def test_clients_histograms_give_the_auroc_within_the_stated_error(several: tuple[Tensor, Tensor]) -> None:
    logits, y = several
    objective = MultiLabel()
    found = objective.pooled(merged(objective, logits, y, own=True))
    exact = objective.exact_scores(logits, batch(y))[0]
    assert 0 < found["auroc_error"] < 0.02
    assert abs(found["auroc"] - exact) <= found["auroc_error"]
    on_the_grid = (logits * 16).floor() / 16 + 1 / 32  # then a bin holds equal scores only, and nothing is lost
    found = objective.pooled(merged(objective, on_the_grid, y, own=True))
    assert (found["auroc"], found["average_precision"]) == pytest.approx(
        tuple(objective.exact_scores(on_the_grid, batch(y)))
    )


def test_ordinal_equals_scikit_learn() -> None:
    y = torch.randint(0, 5, (ROWS,), generator=torch.Generator().manual_seed(9))
    outputs = (y.unsqueeze(1) > torch.arange(4)).float() * 2 - 1 + drawn(10, ROWS, 4)
    objective = Ordinal()
    found = objective.measured(merged(objective, outputs, y))
    guess = objective.decided(outputs)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, guess))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, guess))
    assert found["weighted_kappa"] == pytest.approx(sk.cohen_kappa_score(y, guess, weights="quadratic"))
    assert float(merged(objective, outputs, y, own=True)) / ROWS == pytest.approx(found["mae"])


def test_ranking_of_classes_equals_scikit_learn() -> None:
    objective = Classification(ranking=True)
    y = torch.randint(0, 4, (ROWS,), generator=torch.Generator().manual_seed(11))
    logits = drawn(12, ROWS, 4) + torch.nn.functional.one_hot(y, 4)
    auroc, precision = objective.exact_scores(logits, batch(y))
    share = logits.double().softmax(1)
    assert auroc == pytest.approx(sk.roc_auc_score(y, share, multi_class="ovr", average="macro"))
    assert precision == pytest.approx(sk.average_precision_score(np.eye(4)[y], share, average="macro"))
    two = objective.exact_scores(logits[:, :2], batch((y > 1).long()))
    assert two[0] == pytest.approx(sk.roc_auc_score(y > 1, logits[:, 1] - logits[:, 0]))


def test_the_sentiment_report_follows_the_released_rules() -> None:
    """The rules of `eval_mosei_senti` in the code of MulT, written with NumPy and scikit-learn."""
    truth = (drawn(13, ROWS) * 2 * 5).round() / 5
    truth = truth.clamp(-3, 3).masked_fill(torch.arange(ROWS) % 9 == 0, 0.0)
    guess = truth + 1.2 * drawn(14, ROWS)
    objective = Regression(report="sentiment")
    found = objective.measured(merged(objective, guess.unsqueeze(1), truth.unsqueeze(1)))
    p, t = guess.numpy().astype(np.float64), truth.numpy().astype(np.float64)
    assert found["acc7"] == pytest.approx(np.mean(np.round(np.clip(p, -3, 3)) == np.round(np.clip(t, -3, 3))))
    told = t != 0
    assert found["acc2"] == pytest.approx(sk.accuracy_score(t[told] > 0, p[told] > 0))
    assert found["f1"] == pytest.approx(sk.f1_score(t[told] > 0, p[told] > 0, average="weighted"))
    assert found["acc2_with_zero"] == pytest.approx(sk.accuracy_score(t >= 0, p >= 0))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(t, p))
    assert len(sentiment.counts(guess, truth)[0]) == sentiment.SIZE


def test_recall_counts_the_candidates_that_are_at_least_as_near() -> None:
    pairs = torch.nn.functional.normalize(drawn(15, 40, 2, 6) + 0.8 * drawn(16, 40, 1, 6), dim=-1)
    pairs[5, 0] = 0.0  # a row that lacks the first modality asks nothing and is no candidate
    objective = Retrieval()
    found = objective.measured(objective.sums(pairs, batch(torch.zeros(40, dtype=torch.int64))))
    kept = [row for row in range(40) if row != 5]
    ranks = []
    for query, other in ((0, 1), (1, 0)):
        near = pairs[kept, query] @ pairs[kept, other].T
        ranks += [int((near[i] >= near[i, i]).sum()) for i in range(39)]
    for k in (1, 5, 10):
        assert found[f"recall{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
    assert found["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
