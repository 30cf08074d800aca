"""Checks of a recipe's sections that look at more than one value."""

from collections.abc import Mapping
from typing import Any

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.schema import key_of
from polyfed.model import Model
from polyfed.privacy.limits import NO_LIMITS, Limits
from polyfed.training.optimisers import Train


def refuse_no_training(top: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Refuse a file that trains nothing. Python objects may, to look at an initial state; in a file it is a mistake."""
    for where, key, table in (("", "rounds", top), ("[train] ", "epochs", train), ("[train] ", "steps", train)):
        if table.get(key) == 0 and not (key == "epochs" and "steps" in train):
            raise RecipeError(
                f"{where}{key} = 0: must be 1 or more, as nothing would be trained", key_of(where.strip(), key)
            )


def refuse_breaches(limits: Limits, train: Train, rounds: int, rows: int | None = None, whose: str = "") -> None:
    """Refuse a recipe that breaks the limits that it states.

    Args:
        limits: the section [limits].
        train: the section [train].
        rounds: of the recipe.
        rows: training rows of a client; None before they are known.
        whose: which client the rows are of.

    Raises:
        RecipeError: the text names the limit and the value.
    """
    for why in NO_LIMITS.stricter(limits).foreseen(train, rounds, rows):
        raise RecipeError(f"{whose}{why}")


def check_model(method: Algorithm, model: Model) -> None:
    """Refuse a model that the method cannot use, or whose logits `unimodal = "head"` cannot split by modality.

    Raises:
        RecipeError: with what is allowed.
    """
    method.check_model(model)
    if method.evaluation.unimodal == "head" and not model.linear_head:
        raise RecipeError(
            "[evaluate] unimodal = 'head' splits the logits into a term for each modality, which only linear fusion "
            "allows (concat or sum without a head). Allowed here: 'auto', 'zero', 'prototype'"
        )
