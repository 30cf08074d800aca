"""Checks of the sections of a recipe. Each of these checks needs more than one value of the recipe."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import key_of
from polyfed.core.problems import Problems
from polyfed.model import Model
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import steps_trained


def refuse_no_training(top: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Refuse a recipe file that trains nothing.

    A recipe that is built in Python may train nothing. This is useful to inspect the initial state of an algorithm.

    Raises:
        RecipeError: nothing would be trained; the text lists each key that causes this.
    """
    problems = Problems()
    for where, key, table in (("", "rounds", top), ("[train] ", "epochs", train), ("[train] ", "steps", train)):
        value = table.get(key)
        if isinstance(value, Real) and value == 0 and not (key == "epochs" and "steps" in train):
            text = f"{where}{key} = 0: must be 1 or more, as nothing would be trained"
            problems.add(RecipeError(text, key_of(where.strip(), key)))
    later = train.get("lr_schedule", "constant") != "constant" and train.get("lr_end")
    if isinstance(lr := train.get("lr"), Real) and lr == 0 and not later:
        problems.add(RecipeError("[train] lr = 0: must be above 0, as nothing would be trained", ("train", "lr")))
    problems.raise_all()


def refuse_idle_batches(train: Train, model: Model, sizes: Sequence[int]) -> None:
    """Refuse batches of one row for a model with BatchNorm, if no client could train a step.

    One row has no batch statistics, so such a batch is left out.

    Args:
        train: the section [train].
        sizes: the training rows of each client.

    Raises:
        RecipeError: no client trains a step.
    """
    if not model.has_batchnorm or not any(steps_trained(n, train, skip_single=False) for n in sizes):
        return
    if any(steps_trained(n, train, skip_single=True) for n in sizes):
        return
    what = "[train] batch_size = 1" if train.batch_size == 1 else "every client has one training row"
    cure = "Set batch_size to 2 or more" if train.batch_size == 1 else "Use fewer clients"
    raise RecipeError(
        f"{what}, and the model has BatchNorm, whose training batches need two rows, so nothing would be trained. "
        f"{cure}, or use nn.GroupNorm or nn.LayerNorm",
        ("train", "batch_size"),
    )


def refuse_breaches(limits: Limits, train: Train, rounds: int, rows: int | None = None, whose: str = "") -> None:
    """Refuse a recipe that exceeds the limits in its own section [limits].

    Args:
        limits: the section [limits].
        train: the section [train].
        rounds: the rounds of the recipe.
        rows: number of training rows of a client. None if the number is not known yet.
        whose: the client that has the rows.

    Raises:
        RecipeError: a limit is exceeded. The text names the limit and the value.
    """
    problems = Problems()
    for why in NO_LIMITS.stricter(limits).foreseen(train, rounds, rows):
        problems.add(RecipeError(f"{whose}{why}", ("limits",)))
    problems.raise_all()


def check_model(method: Algorithm, model: Model) -> None:
    """Refuse a model that the algorithm or the option `[evaluate] unimodal` cannot use.

    The value "head" of this option needs a model whose logits are a sum of one term for each modality.

    Raises:
        RecipeError: the model does not fit. The text lists what is allowed.
    """
    method.check_model(model)
    if method.evaluation.unimodal == "head" and not model.linear_head:
        raise RecipeError(
            "[evaluate] unimodal = 'head' splits the logits into a term for each modality, which only linear fusion "
            "allows (concat or sum without a head). Allowed here: 'auto', 'zero', 'prototype'",
            ("evaluate", "unimodal"),
        )
