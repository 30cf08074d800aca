"""Options of a recipe that let few rows or few steps decide the result of training, although the limits are kept.

A device with [limits] refuses such recipes. docs/egress.md lists the bounds.
"""

import math
from collections.abc import Iterator

from polyfed.algorithms.averaging.feddyn import FedDyn
from polyfed.algorithms.averaging.fednova import FedNova
from polyfed.algorithms.averaging.fedprox import FedProx
from polyfed.algorithms.averaging.hfl import Hfl
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.algorithms.modalities.fedmsplit import FedMSplit
from polyfed.algorithms.partialfl.partialfl import PartialFL
from polyfed.algorithms.personal.fedamp import FedAmp
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.privacy.egress.limits import Limits

MOST_WEIGHT = 10.0
"""The largest ratio between the weights of two rows in the training loss."""


def unfit_options(limits: Limits, recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why the options of a recipe would make the limits meaningless.

    Args:
        limits: the limits of the device, made stricter by the recipe's own.
    """
    yield from _weights(limits, recipe)
    train = recipe.algorithm.train
    option, strength = _pull(recipe.algorithm, recipe.rounds)
    rate = max(train.lr, train.lr if train.lr_end is None else train.lr_end)
    if why := limits.decay_breach(f"lr * {option}", rate * strength):
        yield why


def _weights(limits: Limits, recipe: Recipe) -> Iterator[str]:
    key = next((key for key in ("min_batch_size", "min_rows") if getattr(limits, key) > 1), None)
    if key is None:
        return
    # a negative row has the weight 1, and a target may be known in a few rows only
    for option, others in (("class_weights", ()), ("positive_weights", (1.0,)), ("target_weights", ())):
        weights = (*getattr(recipe.task, option, ()), *others)
        if weights and max(weights) > MOST_WEIGHT * min(weights):
            whose = "recipe" if limits.is_of_the_recipe(key) else "device"
            counted = ". The weight 1 of the negative rows counts as one of the weights" if others else ""
            yield (
                f"[limits] {key} = {getattr(limits, key)} of the {whose}, and [task] {option} weighs some rows more "
                f"than {MOST_WEIGHT:g} times as much as others, so that a few rows decide the result. Give weights "
                f"above 0, of which the largest is at most {MOST_WEIGHT:g} times the smallest{counted}"
            )


def _pull(method: Algorithm, rounds: int) -> tuple[str, float]:
    """Return how strongly a method pulls parameters back to the received ones, after the options that set this."""
    if isinstance(method, FedAmp):
        alpha = min(method.alpha_at(1), method.alpha_at(rounds))
        return "lam / alpha", method.lam / alpha if alpha else math.inf  # alpha may have decayed to zero
    if isinstance(method, FedMSplit):
        return "2 * lam", 2 * method.lam
    if isinstance(method, FedDyn):
        return "alpha", method.alpha
    if isinstance(method, FedProx | FedNova | Hfl | PartialFL | Vertical):
        return "mu", method.mu
    return "0", 0.0
