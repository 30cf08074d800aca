"""The values that a search tries by default, which the options declare, and choices at the edge of a range."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

from polyfed.algorithms import NAMED
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.option_checks import ranges, search_ranges
from polyfed.core.registry import find
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.experiment.study.ranges import Range, at, entry_of, put, sets

SEARCHED = ("train", "algorithm", "server")
"""The sections whose options a search varies by default."""

FEWEST = 3
"""A range with fewer values has only edges, so a choice at its edge says nothing."""

MARGIN = 0.02
"""The part of a continuous range, at each end, that counts as its edge."""


def default_space(method: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a search varies by default for a method of a study, with their values.

    Args:
        method: the name of the method, which is the name of its algorithm unless `fixed` names another.
        fixed: the dotted keys that the study sets, with their values; no search varies them.

    Returns:
        An empty dictionary if the algorithm is unknown, which the study says when it reads the recipe.
    """
    table: dict[str, Any] = {"algorithm": {"name": method}}
    try:
        for key, value in fixed.items():
            put(table, key, deepcopy(value))
    except RecipeError:
        return {}
    result: dict[str, Any] = {}
    for section in SEARCHED:
        given = table.get(section, {})
        cls = class_of(section, table)
        if cls is None or not isinstance(given, Mapping):
            continue
        preset = cls.presets.get(str(given.get("preset")), {}) if issubclass(cls, Algorithm) else {}
        options = {f.name: f.default for f in fields(cls)} | dict(preset) | dict(given)
        for name, searched in search_ranges(cls).items():
            key = f"{section}.{name}"
            if searched.applies(options) and name not in preset and not sets(fixed, key):
                result[key] = list(searched.values)
    return result


def is_fedavg(table: Mapping[str, Any]) -> bool:
    """Return whether the options of a recipe's table make its method FedAvg; see `SearchRange.fedavg`."""
    found = beside_fedavg(table)
    return found is not None and not found[1] and (bool(found[0]) or str(at(table, "algorithm.name")) == "fedavg")


def beside_fedavg(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]] | None:
    """Return which options of a recipe's table have the value that makes its method FedAvg; see `SearchRange.fedavg`.

    Returns:
        Key -> value of the options that have it, and key -> (value, value of FedAvg) of those that have another. None
        if no values make the method FedAvg.
    """
    cls = class_of("algorithm", table)
    # the adaptive optimisers divide by moments, whatever their rate
    if cls is None or at_default(table, "server", "optimiser", "none") not in ("none", "avgm"):
        return None
    equal, other, server = dict[str, Any](), dict[str, tuple[Any, Any]](), class_of("server", table)
    assert server is not None, "[server] is a section"
    for section, of in (("algorithm", cls), ("server", server)):
        given = dict(table.get(section, {}))
        preset = of.presets.get(str(given.get("preset")), {}) if issubclass(of, Algorithm) else {}
        options = {f.name: f.default for f in fields(of)} | dict(preset) | given
        for name, searched in search_ranges(of).items():
            if searched.fedavg is not None and searched.applies(options):
                key, own = f"{section}.{name}", options[name]
                if own == searched.fedavg:
                    equal[key] = own
                else:
                    other[key] = own, searched.fedavg
    return equal, other


def at_default(table: Mapping[str, Any], section: str, name: str, default: Any) -> Any:
    """Return an option of a section of a table, or its default."""
    given = table.get(section, {})
    return given.get(name, default) if isinstance(given, Mapping) else default


def class_of(section: str, table: Mapping[str, Any]) -> type | None:
    """Return the dataclass of a section of a recipe's table, or None if there is no such section or class."""
    known = SECTIONS.get(section)
    if known is None or section != "algorithm":
        return None if known is None else known.cls
    try:
        cls: type = find(str(at(table, "algorithm.name")), NAMED, Algorithm)
    except PolyfedError:
        return None
    return cls


def edge_notes(space: Mapping[str, Any], chosen: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each chosen number at an edge of its range beyond which other values are allowed.

    Args:
        space: the searched keys with their lists or ranges.
        chosen: the values that the search chose.
        table: the recipe, which says whose option a key is.
    """
    for key, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or key not in space:
            continue
        low, high = _edges(entry_of(space[key]))
        for at_edge, way, word in ((value <= low, -math.inf, "smallest"), (value >= high, math.inf, "largest")):
            if at_edge and _allowed_beyond(key, value, way, table):
                yield (
                    f"the search chose {key} = {value:g}, the {word} value of its range, so a "
                    f"{'smaller' if way < 0 else 'larger'} one may be better: widen the range"
                )


def _edges(entry: list[Any] | Range) -> tuple[float, float]:
    """Return the numbers at and beyond which a value is at the lower or the upper edge."""
    none = -math.inf, math.inf
    if isinstance(entry, Range) and entry.count is None and entry.step is None and not entry.is_whole:
        if entry.scale == "log":
            width = MARGIN * math.log(entry.high / entry.low)
            return entry.low * math.exp(width), entry.high * math.exp(-width)
        width = MARGIN * (entry.high - entry.low)
        return entry.low + width, entry.high - width
    if isinstance(entry, Range):
        return entry.low, entry.high
    numbers = [value for value in entry if isinstance(value, int | float) and not isinstance(value, bool)]
    return (min(numbers), max(numbers)) if len(numbers) >= FEWEST else none


def _allowed_beyond(key: str, value: float, way: float, table: Mapping[str, Any]) -> bool:
    """Return whether the option of a key allows a value beyond this one."""
    section, _, name = key.partition(".")
    cls = class_of(section, table)
    within = None if cls is None else ranges(cls).get(name)
    beyond = value + math.copysign(1, way) if isinstance(value, int) else math.nextafter(value, way)
    return within is None or bool(within.holds(beyond))
