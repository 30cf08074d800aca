"""What a score is to be compared with: one answer for all rows; and whose rows it is about."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import polyfed
from polyfed.cli.printing.tables import result_table
from polyfed.core.batch import Batch
from polyfed.experiment.results.model_facts import _constant
from polyfed.experiment.results.run_result import Run
from polyfed.experiment.running.assembly import population_of
from polyfed.objective import OBJECTIVES
from polyfed.report.scores import not_beaten
from polyfed.report.text_layout import text_of

N = 200


def frame() -> pd.DataFrame:
    """Features that say nothing; 78 % of the rows are 'No'."""
    rng = np.random.default_rng(0)
    words = np.array(["No"] * 156 + ["Yes"] * 44)
    return pd.DataFrame(
        {
            "a_0": rng.normal(size=N),
            "a_1": rng.normal(size=N),
            "stay": rng.normal(5, 2, N),
            "label": rng.permutation(words),
            "client": [f"P{row % 8:02d}" for row in range(N)],
        }
    )


def run(tmp: Path | None = None, **more: Any) -> tuple[polyfed.Recipe, Run]:
    recipe = polyfed.make_recipe(frame(), modalities={"a": "a_*"}, algorithm="fedavg", rounds=1, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return recipe, polyfed.run(recipe, tmp)


def test_the_most_frequent_class_and_the_auroc_stand_beside_the_accuracy(tmp_path: Path) -> None:
    recipe, done = run(tmp_path / "run", clients={"ids": "client", "test_clients": ["P01", "P05"]})
    population, result = population_of(recipe), done.result
    y = population.columns.label[population.test_rows].numpy()
    assert result["baseline"] == {"answer": "always 'No'", "score": pytest.approx((y == 0).mean()), "rows": len(y)}
    rows = frame().iloc[population.test_rows.numpy()]
    chance = done.predict(rows).double().softmax(1)[:, 1].numpy()
    assert result["ranking"]["positive"] == "Yes"
    assert result["ranking"]["auroc"] == pytest.approx(roc_auc_score(y, chance))
    assert result["ranking"]["average_precision"] == pytest.approx(average_precision_score(y, chance))
    assert result["unseen_clients"] == ["P01", "P05"] == sorted({*rows["client"]})
    shown, page = text_of(result_table(result)), (tmp_path / "run" / "report.html").read_text()
    for words in ("always 'No'", "AUROC of 'Yes'", "test clients, outside training", "2: P01, P05"):
        assert words in shown, words
    for words in ("always &#39;No&#39;", "2 clients that take no part in training: P01, P05", "AUROC"):
        assert words in page, words
    json.dumps(result)


def test_the_mean_is_the_baseline_of_numbers() -> None:
    recipe, done = run(labels="stay", clients={"ids": "client"}, task={"name": "regression"})
    population = population_of(recipe)
    label = population.columns.label.numpy().reshape(N)
    mean = label[torch.unique(population.train.rows).numpy()].mean()
    error = np.abs(label[population.test_rows.numpy()] - mean).mean()
    assert done.result["baseline"]["answer"] == f"always the mean, {mean:.4g}"
    assert done.result["baseline"]["score"] == pytest.approx(error, rel=1e-5)
    assert "ranking" not in done.result
    assert "unseen_clients" not in done.result


@pytest.mark.parametrize(
    ("task", "label", "score"),
    [
        ("ordinal", torch.tensor([0, 1, 1, 2]), 0.5),
        ("multi-label", torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 0.75),
        ("regression", torch.tensor([[1.0], [3.0]]), 1.0),
        ("classification", torch.tensor([0, 1, 1, 1]), 0.75),
    ],
)
def test_the_best_answer_without_features(task: str, label: torch.Tensor, score: float) -> None:
    objective, classes = (
        OBJECTIVES[task](),
        {"multi-label": 2, "regression": 1}.get(task, 3 if task == "ordinal" else 2),
    )
    made = _constant(objective, label, classes, None)
    assert made is not None
    outputs = made[1].expand(len(label), -1)
    found = objective.measured(objective.sums(outputs, Batch({}, label, torch.arange(len(label)))))
    assert found[objective.SCORE] == pytest.approx(score)


@pytest.mark.parametrize(
    ("task", "own", "said"),
    [("classification", 0.779, True), ("classification", 0.8, False), ("regression", 3.1, True)],
)
def test_a_model_that_is_no_better_is_named(task: str, own: float, said: bool) -> None:
    kind = OBJECTIVES[task]
    facts = {"name": task, "score": kind.SCORE, "best": kind.BEST, "rising": kind.RISING}
    known = {"answer": "always 'No'", "score": 0.779 if task == "classification" else 1.377, "rows": 290}
    text = not_beaten({"task": facts, "metrics": {"global": {kind.SCORE: own}}, "baseline": known})
    assert bool(text) == said
    assert not said or "always 'No'" in text
