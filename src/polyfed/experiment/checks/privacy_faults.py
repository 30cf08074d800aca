"""Finds the reasons why a recipe cannot give the protection that its section [privacy] describes.

The server checks this before a run. A device that demands protection checks it again.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from polyfed.algorithms import ALGORITHMS, NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.registry import name_of
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.experiment.checks.privacy_support import methods_that_honour
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.federation.client_registry import ClientRegistry
from polyfed.model import Model
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Selector, Uniform


def faults_of_method(recipe: Recipe, spec: Privacy) -> Iterator[str]:
    """Yield the reasons why the algorithm cannot protect the `unit` of [privacy]: whole clients or single rows."""
    method = type(recipe.algorithm)
    if not method.honours(spec.unit):
        name = name_of(recipe.algorithm, NAMED)
        own = "" if name in ALGORITHMS else ". If your class keeps the rule of `protects`, declare `protects` in it"
        able = methods_that_honour(spec.unit)
        yield f"algorithm '{name}': {method.dishonour(spec.unit)}{own}. Methods that can: {able}"
    elif spec.unit == "client":
        yield from recipe.algorithm.private_faults(spec)


def refuse_app(recipe: Recipe) -> None:
    """Refuse a Flower app if a deployment cannot give the protection that the recipe's section [privacy] promises.

    Only reasons that follow from the recipe alone are checked, because the model and the clients are not known yet.

    Raises:
        RecipeError: with all reasons.
    """
    spec = recipe.privacy
    if spec is None:
        return
    reasons = [*faults_of_method(recipe, spec)]
    if recipe.algorithm.honours(spec.unit):  # otherwise no other option would help
        client = spec.unit == "client"
        reasons += faults_of_mean(recipe, spec, deployed=True) if client else faults_of_training(recipe)
    refuse(spec, reasons)


def refuse(spec: Privacy, reasons: Sequence[str]) -> None:
    """Raise a `RecipeError` that lists why the section cannot be honoured, unless there are no reasons."""
    if reasons:
        raise RecipeError(f'[privacy] unit = "{spec.unit}" cannot be honoured: ' + "; ".join(reasons), ("privacy",))


def faults_of_model(model: Model, initial: Tree) -> Iterator[str]:
    """Yield a fault if the model has entries that are not trained parameters, because clients would send these too."""
    if buffers := [name for name in initial if name not in model.trainable(initial)]:
        yield (
            f"the model has buffers that follow the rows of a batch, such as {buffers[0]} (BatchNorm). Use layers "
            "without them, such as GroupNorm or LayerNorm"
        )


def faults_of_mean(recipe: Recipe, spec: Privacy, *, deployed: bool) -> Iterator[str]:
    """Yield the reasons why the server's mean would reveal more about a client than [privacy] promises.

    Either a client could change the mean by more than the clip norm, or the recipe sets `amplification` but the cohort
    would not be secret.

    Args:
        spec: the section [privacy].
        deployed: whether the clients are real devices.
    """
    method: Any = recipe.algorithm
    if spec.amplification and deployed:
        yield (
            "amplification needs a secret cohort. In a deployment, every request holds the seed of the run, so each "
            "device could compute all cohorts: remove amplification"
        )
    if not isinstance(method, Averaging):
        return
    selector = method.selector
    if method.aggregation != "uniform":
        yield 'weights by rows give some clients more influence: set [algorithm] aggregation = "uniform"'
    if method.server.aggregate != "mean":
        yield f'[server] aggregate = "{method.server.aggregate}" has no bounded sensitivity: use "mean"'
    if type(selector).weigh is not Selector.weigh:
        yield f"[selection] {type(selector).__name__} sets the weights of the mean"
    if fault := _read_by(selector, {name.rpartition(".")[2] for name in method.honours("client")}):
        yield fault
    if spec.amplification and (type(selector) is not Uniform or selector.overselect is not None):
        yield "amplification needs the selector uniform without overselect, because other cohorts depend on the data"
    if spec.amplification and (method.private or method.fine_tune or type(method).local is not Algorithm.local):
        yield "amplification needs clients without a state of their own, which would tell later who was in a cohort"


def _read_by(selector: Selector, protected: Collection[str]) -> str:
    """Return a fault if the selector may read protected fields in the replies of single clients; otherwise ""."""
    kind = type(selector)
    learning = next(base for base in kind.__mro__ if "learn" in vars(base))
    if learning is Selector:
        return ""
    below = kind.__mro__[: kind.__mro__.index(learning) + 1]
    if not any("reads" in vars(base) for base in below):
        return (
            f"[selection] {kind.__name__} overrides learn, which gets the replies of single clients. If it reads no "
            "trained parameters, declare in `reads` the fields that it reads"
        )
    read = sorted({*selector.reads} & {*protected})
    return f"[selection] {kind.__name__} reads {read[0]} of single clients" if read else ""


def share_rows(clients: ClientRegistry, population: Population, *, deployed: bool) -> bool:
    """Return whether several clients hold the same rows.

    In a deployment, the server does not know the rows. It assumes that the clients share rows if they are in silos.
    """
    if deployed:
        return clients.silo is not None
    rows = population.train.rows
    return len(rows) > 0 and int(torch.bincount(rows).max()) > 1


def faults_of_rows(recipe: Recipe, model: Model, *, shared: bool) -> Iterator[str]:
    """Yield the reasons why [privacy] cannot protect single rows.

    There are two kinds of reasons. First, training could use a row more often than the calculation of epsilon assumes.
    Second, a gradient might not be a mean over the rows of a batch.

    Args:
        shared: whether several clients hold the same rows.
    """
    if shared:
        yield "several clients hold the same rows, as in silos, and epsilon counts the uses of a row by one client"
    yield from faults_of_training(recipe)
    if model.recomputes:
        yield "gradient checkpointing computes layers again, which the gradients of single rows do not allow"


def faults_of_training(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons of `faults_of_rows` that follow from the recipe alone, without the model and the clients."""
    train, objective = recipe.algorithm.train, task_of(recipe)
    if mixes := objective.mixes_rows:
        yield f"[task] {objective.NAME}: {mixes}"
    if train.steps is not None:
        yield "[train] steps: clients would pass over their rows a different number of times. Give epochs"
    if train.accumulate > 1:
        yield "[train] accumulate: set accumulate = 1"
