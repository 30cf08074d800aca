"""A linear model on all rows in one place, by scikit-learn: a reference behind which no federated model should fall."""

import time
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.data import Columns, Population
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.task_choice import task_of, with_task
from polyfed.experiment.running.assembly import population_of
from polyfed.objective import Classification, Objective, Regression
from polyfed.objective.regression import numbers_of
from polyfed.recommendation.candidates import Planner
from polyfed.report.scores import Metric

LARGEST = 20_000_000
"""The most numbers in the features of all rows. For more, the fit could take minutes (ours)."""

PATIENCE = 20.0
"""The seconds after which no further seed is fitted."""


def linear_scores(planner: Planner, metric: Metric, seeds: Iterable[int]) -> dict[int, float]:
    """Return the score on the global test rows of a logistic or ridge regression, for each seed.

    It sees the training rows of all clients, with each feature standardised. A row that lacks a modality has zeros and
    an indicator.

    Returns:
        Seed -> score. Empty if clients have test rows of their own, for other tasks, and for large data.
    """
    result: dict[int, float] = {}
    group, _, name = metric.name.partition(".")
    started = time.monotonic()
    for seed in seeds:
        if group != "global" or time.monotonic() > started + PATIENCE:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = planner.recipe_table({"algorithm": {"name": "fedavg"}}) | {"seed": seed}
            recipe = with_task(parse_recipe(table), planner.columns)
            score = _score(recipe, population_of(recipe, planner.columns), name)
        if score is None:
            break
        result[seed] = score
    return result


def _score(recipe: Recipe, population: Population, name: str) -> float | None:
    """Return the value of a metric on the global test rows, or None if it has none."""
    columns, task = population.columns, task_of(recipe)
    width = sum(int(np.prod(column.shape)) for column in columns.modalities.values())
    if population.test_rows is None or not isinstance(task, Classification | Regression):
        return None
    train, test = torch.unique(population.train.rows.cpu()), population.test_rows.cpu()
    if not len(train) or not len(test) or width * (len(train) + len(test)) > LARGEST:
        return None
    x, new = _features(columns, train), _features(columns, test)
    mean, spread = x.mean(0), x.std(0)
    x, new = ((values - mean) / np.where(spread > 0, spread, 1.0) for values in (x, new))
    outputs = _outputs(task, x, columns.label[train].numpy(), new, columns.num_classes)
    y = columns.label[test]
    return task.measured(task.sums(outputs, Batch({}, y, torch.arange(len(y))))).get(name)


def _features(columns: Columns, rows: Tensor) -> NDArray[np.float64]:
    parts = []
    for name, column in columns.modalities.items():
        values = column.take(rows).flatten(1).double()
        if name in columns.present:
            there = columns.present[name].cpu()[rows].double()[:, None]
            values = torch.cat([values * there, there], 1)
        parts.append(values)
    return torch.cat(parts, 1).numpy()


def _outputs(task: Objective, x: Any, y: NDArray[Any], new: Any, classes: int) -> Tensor:
    """Return the outputs for new rows, in the form in which a model gives them to the task."""
    if isinstance(task, Classification):
        if len(np.unique(y)) == 1:
            return torch.nn.functional.one_hot(torch.full((len(new),), int(y[0])), classes).float()
        fitted = LogisticRegression(max_iter=300).fit(x, y)
        outputs = np.full((len(new), classes), -50.0)
        outputs[:, fitted.classes_] = fitted.predict_log_proba(new)
        return torch.from_numpy(outputs).float()
    assert isinstance(task, Regression), task
    y = y.reshape(len(y), -1).astype(np.float64)
    known = ~np.isnan(y).any(1)
    values = torch.from_numpy(np.asarray(Ridge().fit(x[known], y[known]).predict(new)).reshape(len(new), -1)).float()
    shift, scale = (
        torch.tensor(numbers_of(option) or (rest,)) for option, rest in ((task.shift, 0.0), (task.scale, 1.0))
    )
    return (values - shift) / scale
