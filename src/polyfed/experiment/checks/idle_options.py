"""Options of a recipe that change nothing, because of another option, of the method or of the data.

A section lists its own idle options in its attribute `idle`, and a method lists more in `Algorithm.idle_options`: each
option with what makes it idle. This file adds those that depend on more than one section. `tests/laws/test_options.py`
changes every option of every method, one at a time, and demands that the run changes, is refused or says so.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.errors import PolyfedWarning
from polyfed.core.messages import LABELS, OF_THE_MODEL
from polyfed.core.option_checks import default_of
from polyfed.core.registry import name_of
from polyfed.core.tasks import tasks_of, types_of
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.experiment.running.assembly import Assembly
from polyfed.privacy.egress.limits import NO_LIMITS

COUNTED_BY_DEVICES = ("max_requests", "max_requests_per_day", "max_runs_per_day", "max_evaluations_per_day")
"""Limits on how often a server may ask. A device counts requests in a file, and a simulated client has no such file."""


def warn_idle(assembly: Assembly) -> None:
    """Warn of every option that differs from its default and changes nothing in this run."""
    if isinstance(assembly.algorithm, Evaluate):
        return  # its recipe is that of a run that trained, where the options had their effect
    for text in idle_options(assembly.recipe, assembly):
        warnings.warn(text, PolyfedWarning, stacklevel=3)


def idle_options(recipe: Recipe, assembly: Assembly | None = None) -> Iterator[str]:
    """Yield a sentence for every option that differs from its default and changes nothing.

    Args:
        assembly: the parts of its run. Without them, only options are found that are idle whatever the data is.
    """
    parts, found = _sections(recipe), dict[tuple[str, str], str]()
    for section, part in parts.items():
        found |= {(section, option): because for option, because in getattr(part, "idle", {}).items()}
    if assembly is not None:
        found |= _across(assembly)
        for path, because in assembly.algorithm.idle_options(assembly.fed).items():
            section, _, option = path.rpartition(".")
            found[section or "algorithm", option] = because
    for (section, option), because in found.items():
        part = parts.get(section)
        if part is None or not because:
            continue
        if option == "*":
            yield f"[{section}] has no effect beside {because}"
        elif (value := getattr(part, option)) != _default(part, option):
            yield f"[{section}] {option} = {_written(value)} has no effect beside {because}"


def _sections(recipe: Recipe) -> dict[str, Any]:
    """Return the object of each section that the recipe has."""
    parts = {
        name: getattr(recipe.algorithm if section.of_algorithm else recipe, section.field, None)
        for name, section in SECTIONS.items()
    }
    return {name: part for name, part in parts.items() if is_dataclass(part)}


def _default(part: Any, option: str) -> Any:
    """Return the default of an option. Without a default, return an object that equals no value."""
    return default_of(next(one for one in fields(part) if one.name == option))


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _across(assembly: Assembly) -> Mapping[tuple[str, str], str]:
    """Return the options that are idle because of another section, of the method or of the data."""
    recipe, fed = assembly.recipe, assembly.fed
    method, clients = recipe.algorithm, recipe.clients
    name = name_of(method, ALGORITHMS)
    result: dict[tuple[str, str], str] = {}
    drawn = getattr(method, "selector", None)
    if drawn is None:
        result["clients", "participation"] = f"algorithm '{name}', which asks every client in every round"
    elif drawn.participation != clients.participation:
        result["clients", "participation"] = f"the algorithm's selector, whose participation is {drawn.participation}"
    if not fed.clients.tested:
        without = "clients without test rows of their own ([clients] personal_test)"
        result |= {("evaluate", option): without for option in ("personal", "clients")}
        result["limits", "min_test_rows"] = without
    if not fed.clients.validated and not clients.personal_validation:  # which switches the option on itself
        result["evaluate", "own_validation"] = (
            "clients without validation rows of their own ([clients] personal_validation)"
        )
    if len(fed.context.model.modalities) < 2:
        result["evaluate", "unimodal"] = "a model of one modality"
    elif fed.context.objective.BY_MODALITY or fed.context.objective.WHOLE:
        result["evaluate", "unimodal"] = (
            f"a task that scores no modality alone ({type(fed.context.objective).__name__})"
        )
    if hasattr(method, "stand_in") and _rows_are_whole(assembly):
        result["algorithm", "stand_in"] = "training rows that all have every modality of their client"
    if method.evaluation.subsets == "none" and _nothing_is_absent(assembly):
        result["model", "absent"] = "rows that all have every modality"
    result |= {("wire", option): because for option, because in _wire(assembly)}
    if recipe.limits != NO_LIMITS:
        result |= {("limits", limit): because for limit, because in _limits(assembly)}
    return result


def _wire(assembly: Assembly) -> Iterator[tuple[str, str]]:
    """Yield the options of [wire] that no message of this run has anything for, each with the reason."""
    rows = assembly.engine.announcement(assembly.fed.clients.modalities).rows.values()
    sent = {row.block for row in rows if row.kind in OF_THE_MODEL}
    if (wire := assembly.recipe.wire) is None or any(map(wire.of, sent)):
        return
    yield "compress", "a method that sends no parameters or gradients of these blocks"
    if not sent and not isinstance(assembly.algorithm, Evaluate):
        yield "down", "a method that sends no parameters"


def _rows_are_whole(assembly: Assembly) -> bool:
    """Return whether all training rows have all modalities of their client; False in a deployment."""
    columns, rows = assembly.population.columns, assembly.population.train.rows
    dropped = assembly.algorithm.train.modality_dropout
    if bool((rows < 0).any()) or (any(dropped.values()) if isinstance(dropped, Mapping) else dropped):
        return False
    return all(bool(there[rows].all()) for there in columns.present.values())


def _nothing_is_absent(assembly: Assembly) -> bool:
    """Return whether every client, every training row and every test row has all modalities of the model."""
    columns, read = assembly.population.columns, assembly.model.modalities
    whole = all(bool(there.all()) for m, there in columns.present.items() if m in read)
    held = all({*read} <= {*own} for own in assembly.fed.clients.holdings())
    return whole and held and _rows_are_whole(assembly)


def _limits(assembly: Assembly) -> Iterator[tuple[str, str]]:
    """Yield the limits that nothing in this run can exceed, each with the reason."""
    if not assembly.recipe.engine.apart:
        yield from ((limit, "a simulation: only devices count requests") for limit in COUNTED_BY_DEVICES)
    if not isinstance(assembly.algorithm, Evaluate):
        yield "min_group", "a run that trains: only an evaluation job shows groups of rows"
    replies = {name: types_of(task)[1].declared for name, task in tasks_of(assembly.algorithm).items()}
    listed = assembly.engine.announcement(assembly.fed.clients.modalities).rows.values()
    sent = [replies[row.task][row.field] for row in listed if row.task in replies]
    if not any("classes" in (said.shape or ()) or said.kind == LABELS for said in sent):
        name = name_of(assembly.algorithm, ALGORITHMS)
        yield "min_rows_per_class", f"algorithm '{name}', whose replies tell of no single class"
