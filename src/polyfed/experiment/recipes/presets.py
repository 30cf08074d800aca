"""Named sets of options: `preset = "paper"` in [algorithm]."""

from collections.abc import Mapping
from typing import Any

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError, did_you_mean


def with_preset(cls: type[Algorithm], preset: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of [algorithm] together with the options of a preset. Options in `table` have precedence.

    Args:
        cls: the algorithm.
        preset: the value of the key `preset`, or None if the section has no such key.
        table: the other keys of the section.

    Raises:
        RecipeError: the algorithm has no such preset.
    """
    if preset is None:
        return dict(table)
    if not cls.presets:
        fault = f"{cls.__name__} has no such preset; it has no presets. Remove the line"
    elif not isinstance(preset, str) or preset not in cls.presets:
        fault = f"{cls.__name__} has no such preset; {did_you_mean(str(preset), cls.presets)}. Or remove the line"
    else:
        return {**cls.presets[preset], **table}
    raise RecipeError(f"[algorithm] preset = {preset!r}: {fault}", ("algorithm", "preset"))
