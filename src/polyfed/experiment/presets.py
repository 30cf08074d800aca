"""Named sets of options: `preset = "paper"` in [algorithm]."""

from collections.abc import Mapping
from typing import Any

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError


def with_preset(cls: type[Algorithm], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [algorithm] with the options of its preset. Options that the section sets have precedence.

    Raises:
        RecipeError: the algorithm has no such preset.
    """
    rest = dict(table)
    if (name := rest.pop("preset", None)) is None:
        return rest
    if name not in cls.presets:
        known = f"its presets are {', '.join(map(repr, cls.presets))}" if cls.presets else "it has no presets"
        raise RecipeError(
            f"[algorithm] preset = {name!r}: {cls.__name__} has no such preset; {known}. Remove the line",
            ("algorithm", "preset"),
        )
    return {**cls.presets[name], **rest}
