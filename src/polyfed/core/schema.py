"""Checks the values in a section of a recipe against the types of its dataclass, with pydantic in strict mode."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.vocabulary import advice_for


@dataclass(frozen=True)
class Within:
    """The range of an option, as metadata of its type: `mu: Annotated[float, NOT_NEGATIVE] = 0.0`.

    Attributes:
        words: what a value must be; continues the words "must be".
        holds: whether a finite value is in the range; for a tensor, entry by entry.
    """

    words: str
    holds: Callable[[Any], Any]


NOT_NEGATIVE = Within("0 or more", lambda value: value >= 0)
POSITIVE = Within("above 0", lambda value: value > 0)
AT_LEAST_ONE = Within("1 or more", lambda value: value >= 1)
ABOVE_ONE = Within("above 1", lambda value: value > 1)
AT_LEAST_TWO = Within("2 or more", lambda value: value >= 2)
EVERY = Within("0 (only the last round) or more", lambda value: value >= 0)
PROBABILITY = Within("from 0 to 1", lambda value: (value >= 0) & (value <= 1))
FRACTION = Within("above 0, at most 1", lambda value: (value > 0) & (value <= 1))
BELOW_ONE = Within("from 0 up to, not including, 1", lambda value: (value >= 0) & (value < 1))
BELOW_HALF = Within("from 0 up to, not including, 0.5", lambda value: (value >= 0) & (value < 0.5))


def between(low: int, high: int) -> Within:
    """The range from `low` to `high`, both included."""
    return Within(f"from {low} to {high}", lambda value: (low <= value) & (value <= high))


def check_ranges(section: str, spec: object) -> None:
    """Check the options of a dataclass against their types: simple types, allowed words and ranges.

    For objects made in Python; `checked` does the same for recipes. None is inside every range.

    Args:
        section: the section of the recipe, for error texts.
        spec: an object of the dataclass.

    Raises:
        RecipeError: an option is wrong. The text gives section, name, value and what is allowed.
    """
    for name, kinds in simple_types(type(spec)).items():  # type: ignore[arg-type]
        value = getattr(spec, name)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(SIMPLE[kind] for kind in kinds)
            raise RecipeError(f"{section} {name} = {value!r}: must be {wanted}")
    for name, words in choices(type(spec)).items():  # type: ignore[arg-type]
        if (value := getattr(spec, name)) not in words:
            raise RecipeError(f"{section} {name} = {value!r}; {did_you_mean(str(value), map(str, words))}")
    for name, within in ranges(type(spec)).items():  # type: ignore[arg-type]
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and within.holds(value)):
            finite = "finite, " if math.isinf(value) else ""
            raise RecipeError(f"{section} {name} = {value}: must be {finite}{within.words}")


@cache
def simple_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The options of a dataclass whose type is a simple type or a union of simple types, and these types."""
    hints, found = get_type_hints(cls), {}
    for name in (f.name for f in fields(cls)):
        several = get_origin(hints[name]) in (Union, UnionType)
        found[name] = get_args(hints[name]) if several else (hints[name],)
    return {name: kinds for name, kinds in found.items() if all(kind in SIMPLE for kind in kinds)}


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):  # NumPy numbers count, bool does not
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, (str, PathLike) if kind is str else kind)


@cache
def ranges(cls: type) -> dict[str, Within]:
    """The options of a dataclass whose type has a range, and their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    found = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(cls)}
    return {name: entry for name, extras in found.items() for entry in extras if isinstance(entry, Within)}


@cache
def choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """The options of a dataclass whose type is a `Literal`, and the allowed words."""
    hints = get_type_hints(cls)
    return {f.name: get_args(hints[f.name]) for f in fields(cls) if get_origin(hints[f.name]) is Literal}


def checked(where: str, cls: type, table: Mapping[str, Any], elsewhere: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Check the values of a section against the types of a dataclass.

    A dataclass that once had options under other names says so in a class variable:
    `renamed: ClassVar[Mapping[str, str]] = {"q": "local_rounds"}`, old name -> new name.

    Args:
        where: the section, such as `[train]`; empty for keys above the first section.
        cls: the dataclass.
        table: keys and values as the recipe has them.
        elsewhere: fields of the dataclass that a recipe has in another section.

    Returns:
        The values by key, converted to their types.

    Raises:
        RecipeError: a key is unknown or a value is wrong. The text gives section, key, value and what is allowed, and
            the new name of an option that was renamed.
    """
    hints = get_type_hints(cls)
    allowed = [f.name for f in fields(cls) if f.init and f.name not in elsewhere]
    values = {}
    for key, value in table.items():
        if key not in allowed:
            new = getattr(cls, "renamed", {}).get(key)
            hint = f": it is now called '{new}'" if new else f"; {_suggestion(where, key, allowed)}"
            raise RecipeError(f"{where} has no option '{key}'{hint}")
        try:
            # through JSON, so that strict mode accepts an array for a tuple, but still refuses "5" for 5
            values[key] = TypeAdapter(hints[key]).validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            inside = value if isinstance(value, Mapping) else ()
            spot = "".join(
                f".{part}" if part in inside else f"[{part}]"
                for part in error.errors()[0]["loc"]
                if isinstance(part, int) or part in inside
            )
            raise RecipeError(f"{where} {key}{spot} = {_shown(value)}: must be {_wanted(error)}".lstrip()) from None
    return values


def _suggestion(where: str, key: str, allowed: Sequence[str]) -> str:
    """The key of the same meaning and the allowed keys; without such a key, the one that is spelled alike."""
    meant = advice_for(key, where.strip("[]"))
    return did_you_mean(key, allowed) if meant is None else f"{meant} {did_you_mean('', allowed)}"


WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a word in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}
"""Pydantic's types of error, in words for people who write TOML."""

SIMPLE = {
    bool: WANTED["bool_type"],
    int: WANTED["int_type"],
    float: WANTED["float_type"],
    str: WANTED["string_type"],
    type(None): "None",
}
"""The types that `check_ranges` checks, in the same words."""


def _wanted(error: ValidationError) -> str:
    """What a value must be: an alternative for each type that its field allows."""
    wishes = (WANTED.get(e["type"], e["msg"].removeprefix("Input should be ")) for e in error.errors())
    return " or ".join(dict.fromkeys(wishes))


def _shown(value: Any) -> str:
    """A value as an error text shows it; booleans as TOML writes them."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
