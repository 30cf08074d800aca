"""Checks the values in a section of a recipe against the types of its dataclass, with pydantic in strict mode."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.vocabulary import advice_for


@dataclass(frozen=True)
class Within:
    """The range of an option, as metadata of its type: `mu: Annotated[float, NOT_NEGATIVE] = 0.0`.

    Attributes:
        words: a text that describes the allowed values. In an error message, it follows the words "must be".
        holds: a function that returns whether a finite value is in the range. For a tensor, it returns a result for
            each entry.
    """

    words: str
    holds: Callable[[Any], Any]


NOT_NEGATIVE = Within("0 or more", lambda value: value >= 0)
POSITIVE = Within("above 0", lambda value: value > 0)
AT_LEAST_ONE = Within("1 or more", lambda value: value >= 1)
ABOVE_ONE = Within("above 1", lambda value: value > 1)
AT_LEAST_TWO = Within("2 or more", lambda value: value >= 2)
FLAG = Within("1", lambda value: value == 1)
ZERO_OR_ONE = Within("0 or 1", lambda value: (value == 0) | (value == 1))
EVERY = Within("0 (only the last round) or more", lambda value: value >= 0)
PROBABILITY = Within("from 0 to 1", lambda value: (value >= 0) & (value <= 1))
FRACTION = Within("above 0, at most 1", lambda value: (value > 0) & (value <= 1))
INSIDE = Within("above 0 and below 1", lambda value: (value > 0) & (value < 1))
BELOW_ONE = Within("from 0 up to, not including, 1", lambda value: (value >= 0) & (value < 1))
BELOW_HALF = Within("from 0 up to, not including, 0.5", lambda value: (value >= 0) & (value < 0.5))


def between(low: int, high: int) -> Within:
    """The range from `low` to `high`, both included."""
    return Within(f"from {low} to {high}", lambda value: (low <= value) & (value <= high))


@dataclass(frozen=True, init=False)
class SearchRange:
    """The values of an option that a search tries by default, as metadata of its type beside its range `Within`.

    `mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.01, 0.1, fedavg=0.0)] = 0.01`

    Attributes:
        values: the values, in the order of a search; numbers ascend.
        fedavg: one of the values. If all options of a method that have this attribute have this value, the method is
            FedAvg. None if there is no such value.
        beside: another option and the values that it must have for this option to have an effect; empty if it always
            has one.
    """

    values: tuple[Any, ...]
    fedavg: Any
    beside: tuple[Any, ...]

    def __init__(self, *values: Any, fedavg: Any = None, beside: tuple[Any, ...] = ()) -> None:
        assert len(values) > 1, values
        assert fedavg is None or fedavg in values, (fedavg, values)
        for name, value in (("values", values), ("fedavg", fedavg), ("beside", beside)):
            object.__setattr__(self, name, value)

    def applies(self, options: Mapping[str, Any]) -> bool:
        """Return whether the option has an effect beside these values of the other options."""
        return not self.beside or options.get(self.beside[0]) in self.beside[1:]


@dataclass(frozen=True)
class NotSearched:
    """Why no search varies an option by default, as metadata of its type: a text that completes "not searched:"."""

    why: str


PLACEBO = NotSearched("a control, not a setting")
READING = NotSearched("two readings of the paper; the default is ours")
IN_RECIPE = NotSearched("part of the recipe, the same for every method")
COST = NotSearched("decides what a round costs")
OF_MODEL = NotSearched("a part of the model")


def check_ranges(section: str, spec: object) -> None:
    """Check the options of a dataclass against their types: simple types, allowed words and ranges.

    Use this function for objects made in Python. `checked` does the same for recipes. The check of a range
    accepts the value None.

    Args:
        section: the section of the recipe, for error texts.
        spec: an object of the dataclass.

    Raises:
        RecipeError: options are wrong. For each of them, the text gives section, name, value and the allowed values.
    """
    problems, cls = Problems(), type(spec)

    def refuse(name: str, text: str) -> None:
        problems.add(RecipeError(f"{section} {name} = {text}", key_of(section, name)))

    for name, kinds in simple_types(cls).items():  # type: ignore[arg-type]
        value = getattr(spec, name)
        if not any(_is_a(value, kind) for kind in kinds):
            refuse(name, f"{value!r}: must be {' or '.join(SIMPLE[kind] for kind in kinds)}")
    for name, words in choices(cls).items():  # type: ignore[arg-type]
        if (value := getattr(spec, name)) not in words:
            refuse(name, f"{value!r}; {did_you_mean(str(value), map(str, words))}")
    wrong = {error.key[-1] for error in problems.found}
    for name, within in ranges(cls).items():  # type: ignore[arg-type]
        value = getattr(spec, name)
        if name not in wrong and (fault := _outside(value, within)):
            refuse(name, fault)
    problems.raise_all()


def check_shares(section: str, option: str, given: Mapping[str, float] | float | None, within: Within) -> None:
    """Check an option that holds one share, or a share for each modality. None is allowed.

    Raises:
        RecipeError: shares are outside of the range. The text gives section, option, modality and the allowed values.
    """
    problems = Problems()
    for name, share in (given if isinstance(given, Mapping) else {"": given}).items():
        if share is None and not isinstance(given, Mapping):
            continue
        number = isinstance(share, Real) and not isinstance(share, bool)
        if not number or not math.isfinite(share) or not within.holds(share):  # type: ignore[arg-type]
            place = f"{option}.{name}" if isinstance(given, Mapping) else option
            text = f"{section} {place} = {share!r}: must be a share {within.words}"
            problems.add(RecipeError(text, key_of(section, option)))
    problems.raise_all()


def share_of(given: Mapping[str, float] | float, modality: str) -> float:
    """Return the share of a modality, from an option that holds one share, or a share for each modality."""
    return float(given.get(modality, 0.0)) if isinstance(given, Mapping) else float(given)


def _outside(value: Any, within: Within) -> str:
    """Return an error text if the value is outside of its range, or "" if it is inside the range or is None."""
    if value is None or (math.isfinite(value) and within.holds(value)):
        return ""
    return f"{value}: must be {'finite, ' if math.isinf(value) else ''}{within.words}"


def key_of(section: str, *names: str) -> tuple[str, ...]:
    """Return the place of an option in a recipe's file, or in a policy's.

    >>> key_of("[model.encoders]", "audio"), key_of("policy own.toml: [limits]", "min_rows")
    (('model', 'encoders', 'audio'), ('limits', 'min_rows'))
    >>> key_of("[data.columns] age:", "kind")
    ('data', 'columns', 'age', 'kind')
    """
    places = re.findall(r"\[([\w.-]*)\](?: (\w+))?", section)
    parts = [*places[-1][0].split("."), places[-1][1]] if places else []
    return (*filter(None, parts), *names)


@cache
def simple_types(cls: type) -> dict[str, tuple[type, ...]]:
    """For a dataclass, return each option whose type is simple or a union of simple types, with these types."""
    hints, result = get_type_hints(cls), {}
    for name in (f.name for f in fields(cls)):
        several = get_origin(hints[name]) in (Union, UnionType)
        result[name] = get_args(hints[name]) if several else (hints[name],)
    return {name: kinds for name, kinds in result.items() if all(kind in SIMPLE for kind in kinds)}


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float):  # NumPy numbers are allowed, bool is not
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, (str, PathLike) if kind is str else kind)


@cache
def ranges(cls: type) -> dict[str, Within]:
    """For a dataclass, return each option whose type has a range, with this range."""
    return _metadata(cls, Within)


@cache
def search_ranges(cls: type) -> dict[str, SearchRange]:
    """For a dataclass, return each option that a search varies by default, with the values that it tries."""
    return _metadata(cls, SearchRange)


@cache
def not_searched(cls: type) -> dict[str, NotSearched]:
    """For a dataclass, return each option that no search varies by default and that says why."""
    return _metadata(cls, NotSearched)


M = TypeVar("M")


def default_of(option: Field[Any]) -> Any:
    """Return the default of a dataclass's field, or `MISSING`, which equals no value."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def _metadata(cls: type, kind: type[M]) -> dict[str, M]:
    """Return each option of a dataclass whose type has metadata of this kind, with the metadata."""
    hints = get_type_hints(cls, include_extras=True)
    result = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(cls)}
    return {name: entry for name, extras in result.items() for entry in extras if isinstance(entry, kind)}


@cache
def choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """For a dataclass, return each option whose type is a `Literal`, with the allowed words."""
    hints = get_type_hints(cls)
    return {f.name: get_args(hints[f.name]) for f in fields(cls) if get_origin(hints[f.name]) is Literal}


Advice = Callable[[str, str], str | None]
"""Gives a hint for an unknown key, from the key and its section, or None."""


def checked(
    where: str,
    cls: type,
    table: Mapping[str, Any],
    elsewhere: frozenset[str] = frozenset(),
    advice: Advice = advice_for,
) -> dict[str, Any]:
    """Check the values of a section against the types of a dataclass.

    Args:
        where: the section, such as `[train]`; empty for keys above the first section.
        cls: the dataclass.
        table: keys and values as they are in the recipe.
        elsewhere: fields of the dataclass that belong to another section of the recipe.
        advice: gives a hint for an unknown key that means something elsewhere.

    Returns:
        The values by key, converted to their types.

    Raises:
        RecipeError: keys are unknown or values are wrong. For each of them, the text gives section, key, value and the
            allowed values.
    """
    values, problems = sifted(where, cls, table, elsewhere, advice)
    problems.raise_all()
    return values


def sifted(
    where: str,
    cls: type,
    table: Mapping[str, Any],
    elsewhere: frozenset[str] = frozenset(),
    advice: Advice = advice_for,
) -> tuple[dict[str, Any], Problems]:
    """Return the correct values of a section by key, and the faults of the other values; see `checked`."""
    hints, limits = get_type_hints(cls), ranges(cls)
    allowed = [f.name for f in fields(cls) if f.init and f.name not in elsewhere]
    values: dict[str, Any] = {}
    problems = Problems()
    for key, value in table.items():
        if key not in allowed:
            hint = _suggestion(where, key, allowed, advice)
            problems.add(RecipeError(f"{where} has no option '{key}'; {hint}", key_of(where, key)))
            continue
        try:
            # through JSON, so that strict mode accepts an array for a tuple, but still refuses "5" for 5
            values[key] = TypeAdapter(hints[key]).validate_json(json.dumps(value, default=_written), strict=True)
        except ValidationError as error:
            inside = value if isinstance(value, Mapping) else ()
            spot = "".join(
                f".{part}" if part in inside else f"[{part}]"
                for part in error.errors()[0]["loc"]
                if isinstance(part, int) or part in inside
            )
            text = f"{where} {key}{spot} = {_shown(value)}: must be {_wanted(error, value)}".lstrip()
            problems.add(RecipeError(text, key_of(where, key)))
            continue
        if key in limits and (fault := _outside(values[key], limits[key])):
            problems.add(RecipeError(f"{where} {key} = {fault}".lstrip(), key_of(where, key)))
            del values[key]
    return values, problems


def _written(value: Any) -> Any:
    """Replace a value that JSON cannot hold: NumPy values become numbers or lists, and all other values become text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _suggestion(where: str, key: str, allowed: Sequence[str], advice: Advice) -> str:
    """Return the hint with which the error message about an unknown key ends.

    The hint suggests an allowed key that has the same meaning as the unknown key. If there is none, it suggests an
    allowed key with a similar spelling. The hint also lists the allowed keys.
    """
    meant = advice(key, where.strip("[]"))
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
"""Texts for Pydantic's types of errors, in words for people who write TOML."""

SIMPLE = {
    bool: WANTED["bool_type"],
    int: WANTED["int_type"],
    float: WANTED["float_type"],
    str: WANTED["string_type"],
    type(None): "None",
}
"""Texts for the types that `check_ranges` checks, in the same words."""


def _wanted(error: ValidationError, value: Any) -> str:
    """Return what a value must be. If a field allows several types, the text joins them with "or"."""
    wishes = (WANTED.get(e["type"], e["msg"].removeprefix("Input should be ")) for e in error.errors())
    words = " or ".join(dict.fromkeys(wishes))
    return f"{words}, as in {json.dumps([value])}" if words == "a list" and isinstance(value, str) else words


def _shown(value: Any) -> str:
    """Return a value as text for an error message. Booleans are written as in TOML, all other values as in Python."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
