"""The values of a key in a study, as a list or a range, and functions for dotted keys of recipes."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import AT_LEAST_TWO, POSITIVE, check_ranges, checked

WHOLE = ("kind", "name")
"""Keys that name a class. The options in a table with such a key depend on the class."""

MOST_VALUES = 10_000
"""The largest number of values of one key, and of combinations of the values of a grid."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included. They are whole numbers if both bounds are.

    Attributes:
        low: The smallest number.
        high: The largest number.
        step: The distance between neighbouring numbers.
        count: The number of values, which are evenly spaced.
        scale: If "log", the ratio of neighbouring numbers is constant, and a search draws the logarithm uniformly.
    """

    low: float | int
    high: float | int
    step: Annotated[float | int | None, POSITIVE] = None
    count: Annotated[int | None, AT_LEAST_TWO] = None
    scale: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        """Refuse bounds without any number between them, and options that contradict each other."""
        check_ranges("a range:", self)
        if not self.low < self.high:
            raise RecipeError(f"low = {self.low} must be below high = {self.high}")
        if self.scale == "log" and self.low <= 0:
            raise RecipeError(f"low = {self.low} must be above 0 with scale = 'log'")
        if self.scale == "log" and self.step is not None:
            raise RecipeError("step has no meaning with scale = 'log'; give count")

    @property
    def is_whole(self) -> bool:
        """Whether the range holds whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float)

    def values(self) -> list[float] | list[int]:
        """The numbers of the range, ascending.

        Raises:
            RecipeError: the numbers are not whole, and neither `step` nor `count` is given. Or there are too many.
        """
        if self.step is not None and self.count is not None:
            raise RecipeError("give step or count, not both")
        if self.count is not None:
            refuse_many(self.count)
            spaced = np.geomspace if self.scale == "log" else np.linspace
            result = [float(f"{value:.6g}") for value in spaced(self.low, self.high, self.count)]
            return list(dict.fromkeys(round(v) for v in result)) if self.is_whole else result
        if self.step is None and not (self.is_whole and self.scale == "linear"):
            raise RecipeError("give count, the number of values")
        step = 1 if self.step is None else self.step
        try:
            number = (self.high - self.low) / step + 1
        except OverflowError:
            number = math.inf
        refuse_many(number)
        number = math.floor(number + 1e-9)
        if self.is_whole:
            return [int(self.low + place * step) for place in range(number)]
        return [float(f"{self.low + place * step:.12g}") for place in range(number)]


def refuse_many(number: float) -> None:
    """Refuse more values, or combinations of values, than a study can have.

    Raises:
        RecipeError: there are too many.
    """
    if not number <= MOST_VALUES:
        raise RecipeError(f"there are {number:.6g} values, and at most {MOST_VALUES} are possible. Give fewer")


def entry_of(entry: Any) -> list[Any] | Range:
    """Return a list unchanged, or the range that a table describes.

    Raises:
        RecipeError: the entry is neither a list nor a range, or the list is empty or has a value twice.
    """
    if isinstance(entry, Mapping):
        given = checked("a range", Range, entry)
        if lacking := [bound for bound in ("low", "high") if bound not in given]:
            raise RecipeError(f"{entry!r}: a range needs {' and '.join(lacking)}, as in {{ low = 1, high = 5 }}")
        return Range(**given)
    if not isinstance(entry, list) or not entry:
        raise RecipeError(f"{entry!r} must be a list of values, or a range such as {{ low = 1, high = 5 }}")
    refuse_many(len(entry))
    if len({repr(value) for value in entry}) < len(entry):
        raise RecipeError(f"{entry!r} has a value twice")
    return list(entry)


def values_of(entry: Any) -> list[Any]:
    """The values of a list or a range; see `entry_of` for errors."""
    result = entry_of(entry)
    return list(result.values()) if isinstance(result, Range) else result


def end_of(entry: Any, *, last: bool) -> Any:
    """The first or the last value of a list or a range."""
    if isinstance(entry, Mapping):
        return entry["high" if last else "low"]
    return entry[-1 if last else 0]


def combinations(keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of these keys. The last key changes fastest."""
    for values in itertools.product(*(values_of(entry) for entry in keys.values())):
        yield dict(zip(keys, values, strict=True))


def grid_size(keys: Mapping[str, Any]) -> int:
    """The number of combinations of the values of these keys; see `entry_of` for errors."""
    return math.prod(len(values_of(entry)) for entry in keys.values())


def flat_keys(table: Mapping[str, Any], stop: Sequence[str] = WHOLE, head: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys. A table that is empty, or that has a key of `stop`, counts as a value.

    >>> flat_keys({"train": {"lr": 0.1}, "algorithm": {"name": "fedavg"}})
    {'train.lr': 0.1, 'algorithm': {'name': 'fedavg'}}
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value and not any(word in value for word in stop):
            result |= flat_keys(value, stop, f"{head}{key}.")
        else:
            result[f"{head}{key}"] = value
    return result


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Write a value at a dotted key of a recipe's table, which is changed in place.

    Raises:
        RecipeError: a part of the key names a value instead of a table.
    """
    *above, last = key.split(".")
    for name in above:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{key}: '{name}' is a value, not a table")
    table[last] = value


def remove(table: dict[str, Any], key: str) -> None:
    """Remove a dotted key from a recipe's table in place. Do nothing if the table lacks the key."""
    *above, last = key.split(".")
    for name in above:
        table = table.get(name, {})
        if not isinstance(table, dict):
            return
    table.pop(last, None)


def edit(table: dict[str, Any], changes: Mapping[str, Any], removed: list[str]) -> None:
    """Remove some keys from a recipe's table and set others, in place."""
    for key in removed:
        remove(table, key)
    for key, value in changes.items():
        put(table, key, deepcopy(value))  # a later change to this table must not reach the table of another cell


def at(table: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of a recipe's table, or None."""
    result: Any = table
    for name in key.split("."):
        result = result.get(name) if isinstance(result, Mapping) else None
    return result


def sets(changes: Mapping[str, Any], key: str) -> bool:
    """Return whether changes set a key, either by its dotted name or inside a whole table."""
    inside = (at(value, key.removeprefix(f"{head}.")) for head, value in changes.items() if key.startswith(f"{head}."))
    return key in changes or any(value is not None for value in inside)
