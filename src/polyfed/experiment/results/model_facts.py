"""Facts about a run's trained models that follow from predictions: the calibration, and the success of a backdoor."""

import statistics
from typing import Any

import torch

from polyfed.data import Population
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.results.calibration import ROWS_AT_ONCE, calibration_of
from polyfed.experiment.results.models import Models
from polyfed.federation.attack import Attack
from polyfed.federation.backdoor import Trigger


def facts_of_models(models: Models, recipe: Recipe, population: Population) -> dict[str, Any]:
    """Return the groups of result.json about the trained models and the attack on them.

    A group is left out if the run has no values for it.

    Args:
        models: the trained models.
        recipe: the recipe of the run.
        population: the data of the run.
    """
    found: dict[str, Any] = {"calibration": calibration_of(models, population)}
    if recipe.attack is not None:
        attackers = recipe.attack.attackers(population.num_clients, recipe.seed)
        found["attack"] = {"name": recipe.attack.name, "clients": sorted(attackers)}
    if recipe.attack is not None and recipe.attack.name == "backdoor":
        found["backdoor"] = backdoor_of(models, recipe.attack, population, recipe.seed)
    return {name: facts for name, facts in found.items() if facts is not None}


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
        hits += int((models.predict(x, client, present=present).argmax(-1) == target).sum())
    return hits / len(rows)
