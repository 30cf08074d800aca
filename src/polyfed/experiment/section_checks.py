"""Checks of a recipe's sections that look at more than one value."""

from collections.abc import Mapping
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.core.messages import KINDS
from polyfed.privacy.limits import NO_LIMITS, Limits
from polyfed.training.optimisers import Train


def refuse_no_training(top: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Refuse a file that trains nothing. Python objects may, to look at an initial state; in a file it is a mistake."""
    for where, key, table in (("", "rounds", top), ("[train] ", "epochs", train), ("[train] ", "steps", train)):
        if table.get(key) == 0 and not (key == "epochs" and "steps" in train):
            raise RecipeError(f"{where}{key} = 0: must be 1 or more, as nothing would be trained")


def egress_table(rows: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The table of the policy; `Policy.parse`, which knows the modalities, checks its words."""
    for block, row in rows.items():
        if not isinstance(row, Mapping):
            raise RecipeError(
                f'[egress] {block} = {row!r}: write [egress.{block}] and below it server = ["parameters"]'
            )
        for destination, kinds in row.items():
            if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
                raise RecipeError(
                    f'[egress.{block}] {destination} = {kinds!r}: must be a list of kinds, as in ["parameters"]; '
                    f"Allowed: {', '.join(KINDS)}"
                )
    return {block: {destination: list(kinds) for destination, kinds in row.items()} for block, row in rows.items()}


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
