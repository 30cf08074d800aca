"""Finds the task of a run, from the section [task] or the labels, and checks that the algorithm can train this task."""

from dataclasses import replace
from typing import Any
from warnings import warn

from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning, RecipeError
from polyfed.core.registry import find, name_of
from polyfed.data import Columns, Population
from polyfed.data.sources import Memory
from polyfed.experiment.recipes.recipe import Recipe, as_table
from polyfed.objective import CLASSES, OBJECTIVES, Objective, Regression, guessed
from polyfed.objective.regression import numbers_of
from polyfed.objective.targets import doubtful_targets, units_of


def with_task(recipe: Recipe, columns: Columns, rows: Tensor | None = None) -> Recipe:
    """Return the recipe with its task, which polyfed guesses from the labels if there is no section [task].

    A regression whose `shift` and `scale` are not given gets those of targets that are far from the outputs of a new
    model, with a warning, unless [data] standardise is false or epsilon counts single rows.

    Args:
        rows: the rows that train, int64 (n,). None if they are not known yet.
    """
    objective = recipe.task or guessed(columns)
    plain = isinstance(objective, Regression) and objective.shift is None and objective.scale is None
    known = plain and rows is not None and _may_standardise(recipe, rows)
    if known and rows is not None and (units := units_of(columns.label, rows)) is not None:
        objective = replace(objective, shift=units[0], scale=units[1])  # type: ignore[call-arg]
        warn(_told(columns, units), PolyfedWarning, stacklevel=3)
    return replace(recipe, task=objective)


def _may_standardise(recipe: Recipe, rows: Tensor) -> bool:
    """Whether the mean of the targets may be computed over these rows, which are elsewhere if they are negative."""
    by_row = recipe.privacy is not None and recipe.privacy.unit == "example"
    known = len(rows) > 0 and int(rows[0]) >= 0
    return known and not by_row and getattr(recipe.data, "standardise", "uneven") is not False


def _told(columns: Columns, units: tuple[Any, Any]) -> str:
    """Return the line about standardised targets."""
    shift, scale = (", ".join(f"{number:.4g}" for number in numbers_of(part)) for part in units)
    return (
        f"data '{columns.name}': the targets are far from the outputs of a new model, so it learns (target - {shift}) "
        f"/ {scale}; predictions and metrics keep the unit of the targets. [task] shift and scale set other numbers, "
        "and standardise = false turns this off"
    )


def needs_labels(task: str | None) -> bool:
    """Return whether a task learns from labels.

    Args:
        task: the name of the task. With None, polyfed chooses the task by looking at the labels, so it needs labels.

    Raises:
        RecipeError: there is no such task.
    """
    return task is None or find(task, OBJECTIVES, Objective).LABELLED


def task_of(recipe: Recipe) -> Objective:
    """Return the recipe's task without looking at the labels. If there is no section [task], it is classification."""
    return recipe.task or CLASSES


def prepared(recipe: Recipe, columns: Columns) -> Columns:
    """The table with its labels in the form that the task uses.

    Raises:
        DataError: the labels do not fit the task.
    """
    if recipe.task is None and not isinstance(recipe.data, Memory) and (remark := doubtful_targets(columns)):
        warn(remark, PolyfedWarning, stacklevel=3)  # `make_recipe` warned about data in memory
    objective = with_task(recipe, columns).task
    assert objective is not None
    if objective.LABELLED and not columns.labelled:
        free = ", ".join(f"'{name}'" for name, kind in OBJECTIVES.items() if not kind.LABELLED)
        raise DataError(
            f"data '{columns.name}' has no labels, and [task] name = '{name_of(objective, OBJECTIVES)}' learns from "
            f"them. Name the labels, as [data] label or as labels= in Python. Tasks without labels: {free}"
        )
    return objective.prepared(columns)


def refuse_unfit(recipe: Recipe, population: Population) -> None:
    """Refuse a task whose options do not fit the labels or the clients.

    Raises:
        RecipeError: the task does not fit. The text gives the reason.
    """
    objective = task_of(recipe)
    objective.check_size(population.columns.num_classes)
    lonely = (population.holds.sum(1) == 1).nonzero().flatten()
    if objective.BY_MODALITY and len(lonely):
        raise RecipeError(
            f"[task] name = '{name_of(objective, OBJECTIVES)}' learns from pairs of modalities, and client {lonely[0]} "
            f"has one modality ({len(lonely)} such clients). Give every client two: see [clients] holdings, missing",
            ("task", "name"),
        )


def headline_of(recipe: Recipe) -> dict[str, Any]:
    """The task in result.json: its name, and the metrics by which a run is judged."""
    objective = task_of(recipe)
    name = name_of(objective, OBJECTIVES)
    return {"name": name, "score": objective.SCORE, "best": objective.BEST, "rising": objective.RISING}


def task_facts(recipe: Recipe, size: int, *, was_guessed: bool) -> dict[str, Any]:
    """The facts about the task in run.json.

    Args:
        recipe: the recipe, with its task.
        size: the number of classes or targets.
        was_guessed: whether polyfed chose the task by looking at the labels, because the recipe names no task.
    """
    objective = task_of(recipe)
    facts = {"guessed": was_guessed, "outputs": objective.num_outputs(size), "options": as_table(objective)}
    return headline_of(recipe) | facts
