"""Facts about a run's trained models that follow from predictions: the calibration, and the success of a backdoor."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.data import Population
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.results.calibration import ROWS_AT_ONCE, calibration_of
from polyfed.experiment.results.models import Models
from polyfed.federation.attack import Attack
from polyfed.federation.backdoor import Trigger
from polyfed.objective import Classification, MultiLabel, Objective, Ordinal, Regression
from polyfed.objective.regression import numbers_of


def facts_of_models(models: Models, recipe: Recipe, population: Population) -> dict[str, Any]:
    """Return the groups of result.json about the trained models and the attack on them.

    A group is left out if the run has no values for it.

    Args:
        models: the trained models.
        recipe: the recipe of the run.
        population: the data of the run.
    """
    result: dict[str, Any] = {
        "calibration": calibration_of(models, population),
        "ranking": ranking_of(models, population),
        "baseline": baseline_of(models.task, population, models.class_names),
        "unseen_clients": unseen_clients(recipe, population),
        "sets": sets_of(models, population),
    }
    if recipe.attack is not None:
        attackers = recipe.attack.attackers(population.num_clients, recipe.seed)
        result["attack"] = {"name": recipe.attack.name, "clients": sorted(attackers)}
    if recipe.attack is not None and recipe.attack.name == "backdoor":
        result["backdoor"] = backdoor_of(models, recipe.attack, population, recipe.seed)
    return {name: facts for name, facts in result.items() if facts is not None}


def baseline_of(task: Objective, population: Population, names: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the group `baseline` of result.json: the score of one answer for all test rows.

    The answer is the most frequent class or label, the middle level, or the mean of the training rows.

    Args:
        task: what the model learnt to predict.
        population: the data of the run.
        names: the names of the classes or targets, or None.

    Returns:
        `answer` in words, the `score` and the number of test `rows`. None without rows on one side, or for other tasks.
    """
    columns = population.columns
    rows = population.test_rows if len(population.test_rows) or population.test is None else population.test.rows
    train = torch.unique(population.train.rows.to(columns.label.device))
    if not len(rows) or not len(train):
        return None
    label, y = columns.label[train].cpu(), columns.label[rows.to(columns.label.device)].cpu()
    made = _constant(task, label, columns.num_classes, names)
    if made is None:
        return None
    answer, output = made
    batch = Batch({}, y, torch.arange(len(y)))
    score = task.measured(task.sums(output.expand(len(y), -1), batch)).get(task.SCORE)
    return None if score is None else {"answer": answer, "score": score, "rows": len(y)}


def _constant(task: Objective, label: Tensor, classes: int, names: Sequence[str] | None) -> tuple[str, Tensor] | None:
    """Return the best answer without features, in words and as a model's output (O,). None for other tasks."""
    if isinstance(task, Classification):
        common = int(torch.bincount(label, minlength=classes).argmax())
        return f"always '{names[common] if names else common}'", torch.eye(classes)[common]
    if isinstance(task, Ordinal):
        middle = int(label.median())
        return f"always '{names[middle] if names else middle}'", (torch.arange(classes - 1) < middle) * 2.0 - 1.0
    if isinstance(task, Regression):
        mean = label.float().reshape(len(label), -1).nanmean(0)
        shift, scale = (
            torch.tensor(numbers_of(unit) or (rest,)) for unit, rest in ((task.shift, 0.0), (task.scale, 1.0))
        )
        words = f"always the mean, {float(mean[0]):.4g}" if len(mean) == 1 else "always the means"
        return words, (mean - shift) / scale
    if isinstance(task, MultiLabel):
        shares = label.float().reshape(len(label), -1).nanmean(0)
        return "always the most frequent labels", (shares > 0.5) * 2.0 - 1.0
    return None


def ranking_of(models: Models, population: Population) -> dict[str, Any] | None:
    """Return the group `ranking` of result.json: AUROC and average precision of class 1 of two, on the test rows.

    Returns:
        `auroc`, `average_precision`, and `positive`, the name of class 1. None if there is no global model, there are
        more classes or rows of one class only, or a prediction is not finite.
    """
    columns, rows = population.columns, population.test_rows.cpu()
    if models.shared is None or not isinstance(models.task, Classification) or columns.num_classes != 2:
        return None
    y, found = columns.label.cpu()[rows], []
    if len(torch.unique(y)) < 2:
        return None
    for part in torch.split(rows, ROWS_AT_ONCE):
        x = {m: column.raw(part.to(column.values.device)) for m, column in columns.modalities.items()}
        present = {m: there[part.to(there.device)] for m, there in columns.present.items()}
        found.append(models.computed(x, present=present).cpu())
    outputs = torch.cat(found)
    if not bool(outputs.isfinite().all()):
        return None
    scores = replace(models.task, ranking=True).exact_scores(outputs, Batch({}, y, torch.arange(len(y))))
    names = columns.class_names
    result = dict(zip(("auroc", "average_precision"), scores, strict=True))
    return result | {"positive": names[1] if names else "1"}


COVERAGE = 0.9
"""The promise of the sets that a result tells of."""

FEWEST_OF_CLASS = 10
"""A class with fewer test rows is no evidence that sets hold its rows less often than promised (ours)."""


def sets_of(models: Models, population: Population) -> dict[str, Any] | None:
    """Return the group `sets` of result.json: what `predict_set` returns for the test rows that have a modality.

    Without a global model or without test rows of the server, these are the clients' own test rows and models.

    Returns:
        `coverage`, the mean `size` of the sets or width of the intervals, the share of the test `rows` whose truth they
        hold (`holds`), for the class whose rows they hold least often, if that is not chance, its `class`, `holds` and
        `rows` (`least`), and the least number of `validation_rows` behind one; or `refused`, why there is none. None
        if no scores were counted, or nobody here has test rows and a model for them.
    """
    columns = population.columns
    parts = [] if models.conformal is None else list(_test_parts(models, population))
    if not parts:
        return None
    sizes, held, behind = [], [], []
    for client, part in parts:
        reads = columns.modalities if client is None else models.clients[client]
        x = {m: columns.modalities[m].raw(part.to(columns.modalities[m].values.device)) for m in reads}
        present = {m: columns.present[m][part.to(columns.present[m].device)] for m in reads if m in columns.present}
        try:
            found = models.computed_sets(x, COVERAGE, client, present=present)
        except RecipeError as error:
            return {"coverage": COVERAGE, "refused": str(error)}
        y = columns.label.cpu()[part]
        if found.sets is not None:
            held.append(found.sets.gather(1, y[:, None])[:, 0])
        else:
            assert found.low is not None
            assert found.high is not None
            known = ~y.isnan()
            held.append(((found.low <= y) & (y <= found.high))[known])
        sizes.append(found.sizes.double().reshape(len(part), -1).mean(1))
        behind.append(found.rows.min())
    rows = torch.cat([part for _, part in parts])
    least = least_held(torch.cat(held), columns.label.cpu()[rows], models) if found.sets is not None else {}
    return least | {
        "coverage": COVERAGE,
        "size": float(torch.cat(sizes).mean()),
        "holds": float(torch.cat(held).double().mean()),
        "rows": len(rows),
        "validation_rows": int(torch.stack(behind).min()),
    }


def _test_parts(models: Models, population: Population) -> Iterator[tuple[int | None, Tensor]]:
    """Return test rows that have a modality, in parts, each with the client whose model predicts them.

    The client is None for the rows of the server, which the global model predicts.
    """
    columns, rows = population.columns, population.test_rows.cpu()
    owners: dict[int | None, Tensor] = {}
    if models.shared is not None and len(rows):
        owners[None] = rows
    elif population.test is not None and not models.elsewhere:
        owners = {client: population.test[client].cpu() for client in models.clients}
    for client, own in owners.items():
        reads = tuple(columns.modalities) if client is None else models.clients[client]
        if len(own) and all(m in columns.present for m in reads):
            own = own[torch.stack([columns.present[m].cpu()[own] for m in reads]).any(0)]
        yield from ((client, part) for part in torch.split(own, ROWS_AT_ONCE) if len(part))


def least_held(held: Tensor, label: Tensor, models: Models) -> dict[str, Any]:
    """Return the class whose rows are held least often, if its share is two standard errors below the promise."""
    rows = torch.bincount(label, minlength=models.model.num_classes)
    share = torch.bincount(label, held.double(), minlength=len(rows)) / rows.clamp(min=1)
    below = COVERAGE - share - 2 * (COVERAGE * (1 - COVERAGE) / rows.clamp(min=1)).sqrt()
    below[rows < FEWEST_OF_CLASS] = -1.0
    worst = int(below.argmax())
    if below[worst] <= 0:
        return {}
    names = models.class_names
    name = str(names[worst] if names else worst)
    return {"least": {"class": name, "holds": float(share[worst]), "rows": int(rows[worst])}}


def unseen_clients(recipe: Recipe, population: Population) -> list[str] | None:
    """Return the natural clients that only have test rows, if the recipe holds whole clients out; otherwise None."""
    columns = population.columns
    if columns.client is None or (recipe.clients.test_clients is None and recipe.clients.folds is None):
        return None
    client = columns.client.cpu()
    held = torch.unique(client[population.test_rows.cpu()]).tolist()
    names = columns.client_names
    return [names[number] if names else str(number) for number in held]


def untested(recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Return a sentence if all test rows are of clients outside training, who have no own models to test."""
    method: Any = recipe.algorithm
    if (
        method.own_models == "none"
        or method.model_for != "client"
        or "personal" in result["metrics"]
        or not result.get("unseen_clients")
    ):
        return []
    return [
        "no score tests the clients' own models, because the test clients take no part in training. To test them too, "
        "give the other clients test rows: [clients] personal_test"
    ]


def backdoor_of(models: Models, attack: Attack, population: Population, seed: int) -> dict[str, Any] | None:
    """Return the group `backdoor` of result.json: how often the trigger makes a model predict the target class.

    Only test rows of other classes count. If the algorithm trains a global model, the function measures this model.
    Otherwise, the result is the mean over the honest clients whose models read the modality of the trigger.

    Args:
        models: the trained models.
        attack: the attack of the run.
        population: the data of the run.

    Returns:
        The target class (`target`), the modality of the trigger (`modality`), the number of measured rows (`rows`),
        `success` and `without_trigger`. `success` is the share of the rows for which the model predicts the target
        class when the trigger is added to them. `without_trigger` is this share for the same rows without the trigger.
        The result is None if there is no test row of another class, or no model to measure.
    """
    columns, trigger = population.columns, attack.trigger(population)
    rows = population.test_rows.cpu()
    rows = rows[columns.label.cpu()[rows] != attack.target]
    if trigger.modality in columns.present:
        rows = rows[columns.present[trigger.modality].cpu()[rows]]
    measured: list[int | None] = [None]
    if models.shared is None:
        liars = attack.attackers(population.num_clients, seed)
        honest = [client for client, reads in models.clients.items() if trigger.modality in reads]
        measured = [] if models.elsewhere else [client for client in honest if client not in liars]
    if not len(rows) or not measured:
        return None

    def share(shown: Trigger | None) -> float:
        return statistics.fmean(
            _answered(models, client, population, rows, attack.target, shown) for client in measured
        )

    facts = {"target": attack.target, "modality": trigger.modality, "rows": len(rows)}
    return facts | {"success": share(trigger), "without_trigger": share(None)}


def _answered(
    models: Models, client: int | None, population: Population, rows: torch.Tensor, target: int, trigger: Trigger | None
) -> float:
    """The share of the rows that a model assigns to the target class."""
    columns, hits = population.columns, 0
    for part in torch.split(rows, ROWS_AT_ONCE):
        own = {m: part.to(column.values.device) for m, column in columns.modalities.items()}
        x = {m: column.raw(own[m]) for m, column in columns.modalities.items()}
        if trigger is not None:
            stamped = trigger.stamped(columns.modalities[trigger.modality], own[trigger.modality])
            x[trigger.modality] = stamped.raw(torch.arange(len(part)))
        present = {m: there[part.to(there.device)] for m, there in columns.present.items()}
        hits += int((models.computed(x, client, present=present).argmax(-1) == target).sum())
    return hits / len(rows)
