"""Build the parts of a run from the sections of a recipe."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from polyfed.algorithms import NAMED
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import PolyfedError, RecipeError, did_you_mean
from polyfed.core.messages import KINDS
from polyfed.core.option_checks import checked, choices, key_of, ranges, sifted
from polyfed.core.problems import Problems
from polyfed.core.registry import find
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.sections import PARTS, SECTIONS, misplaced
from polyfed.selection import SELECTORS, Selector
from polyfed.training.optimisers import Train


def build(where: str, cls: type, table: Mapping[str, Any], **given: Any) -> Any:
    """Build a section's dataclass.

    Args:
        where: the section, for errors, such as `[train]`.
        cls: the dataclass of the section.
        table: the keys and values of the section.
        given: fields that are written in another section.

    Raises:
        RecipeError: an option is unknown or has a wrong value, or a required option is missing.
    """
    values, problems = sifted(where, cls, table, frozenset(given), misplaced)
    if problems.found:
        try:
            cls(**values, **given)
        except TypeError:  # a required option is missing or wrong
            problems.found += _missing(where, cls, {**table, **given})
        except RecipeError as error:
            wrong = table.keys() - values.keys()
            problems.found += [fault for fault in error.several or (error,) if _stands(fault, values, wrong)]
        problems.raise_all()
    problems.found += _missing(where, cls, {**values, **given})
    problems.raise_all()
    return cls(**values, **given)


def _stands(fault: PolyfedError, values: Mapping[str, Any], wrong: Iterable[str]) -> bool:
    """Return whether an option is wrong by itself, and not only because wrong options that it names were left out."""
    names = set(re.findall(r"\w+", str(fault)))
    return bool(fault.key) and fault.key[-1] in values and names.isdisjoint(wrong)


def _missing(where: str, cls: type, given: Mapping[str, Any]) -> list[RecipeError]:
    """Return a fault for each required option that is missing, with its range or its allowed words."""
    required = (f for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING)
    result = []
    for name in (f.name for f in required if f.name not in given):
        words = [ranges(cls)[name].words] if name in ranges(cls) else []
        words += [" or ".join(map(json.dumps, choices(cls)[name]))] if name in choices(cls) else []
        result.append(RecipeError(f"{where} needs {name}{''.join(f': {text}' for text in words)}", key_of(where, name)))
    return result


def algorithm_of(sections: Mapping[str, Any], clients: ClientsSpec, problems: Problems) -> Algorithm | None:
    """Build the algorithm with the parts that have their own sections. Return None if there is a problem."""
    cls: Any = None
    table: dict[str, Any] = {}
    with problems.noting():
        if "algorithm" in sections:
            cls, table = class_of("[algorithm]", NAMED, Algorithm, sections["algorithm"])
            preset = table.pop("preset", None)  # if there is no such preset, this is the only fault of the key
            table = with_preset(cls, preset, table)
    own = set(PARTS) if cls is None else {f.name for f in fields(cls)}
    given: dict[str, Any] = {}
    for part, section in PARTS.items():
        if SECTIONS[section].optional and section not in sections:
            continue
        if part in own:
            entry = sections.get(section, {})
            given[part] = problems.attempt(lambda part=part, entry=entry: _part(part, entry, given, clients))  # type: ignore[misc]
        elif section in sections:
            text = f"[{section}] has no effect: algorithm '{sections['algorithm']['name']}' does not use it. Remove it"
            problems.add(RecipeError(text, (section,)))
    if cls is None:
        return None
    if None in given.values():  # the algorithm cannot be built, but its keys can be checked
        problems.attempt(lambda: checked("[algorithm]", cls, table, frozenset(given), misplaced))
        return None
    made: Algorithm | None = problems.attempt(lambda: build("[algorithm]", cls, table, **given))
    return made


def _part(part: str, entry: Mapping[str, Any], given: Mapping[str, Any], clients: ClientsSpec) -> Any:
    """Build a part of the algorithm from its section. `given` holds the parts that were built before."""
    where, kind = f"[{PARTS[part]}]", SECTIONS[PARTS[part]].cls
    if part != "selector":
        assert kind is not None
        return build(where, kind, entry)
    cls, rest = class_of(where, SELECTORS, Selector, {"name": "uniform"} | dict(entry))
    taken: dict[str, Any] = {"participation": clients.participation, "overselect": clients.overselect}
    if "train" in {f.name for f in fields(cls)}:
        taken["train"] = given["train"] or Train()  # a selector that trains clients uses the algorithm's [train]
    return build(where, cls, rest, **taken)


def class_of(
    where: str, registry: Mapping[str, type], base: type, table: Mapping[str, Any]
) -> tuple[type, dict[str, Any]]:
    """The class that a section names, and the section's other keys."""
    rest = dict(table)
    name = rest.pop("name", None)
    if name is None:
        raise RecipeError(f"{where} needs a name; {did_you_mean('', registry)}", key_of(where))
    try:
        return find(str(name), registry, base), rest
    except RecipeError as error:
        raise type(error)(f"{where} name = {error}", key_of(where, "name")) from error


def egress_of(rows: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the [egress] table of a recipe, after checking its form.

    `Policy.parse`, which knows the modalities, later checks the names of blocks, destinations and kinds in the table.
    """
    problems = Problems()
    for block, row in rows.items():
        if not isinstance(row, Mapping):
            text = f'[egress] {block} = {row!r}: write [egress.{block}] and below it server = ["parameters"]'
            problems.add(RecipeError(text, ("egress", block)))
            continue
        for destination, kinds in row.items():
            if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
                text = (
                    f'[egress.{block}] {destination} = {kinds!r}: must be a list of kinds, as in ["parameters"]; '
                    f"Allowed: {', '.join(KINDS)}"
                )
                problems.add(RecipeError(text, ("egress", block, destination)))
    problems.raise_all()
    return {block: {destination: list(kinds) for destination, kinds in row.items()} for block, row in rows.items()}


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
