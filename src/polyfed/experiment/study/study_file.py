"""Reads a study from its file. All problems of a file are reported together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.option_checks import checked
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.experiment.study.default_ranges import default_space
from polyfed.experiment.study.ranges import (
    WHOLE,
    entry_of,
    flat_keys,
    grid_size,
    lines_size,
    refuse_many,
    sets,
    values_of,
)
from polyfed.experiment.study.study_schema import NAMES, WITH_VALUES, Method, Scenario, Search, Study, When

GROUPS = ("global", "personal", "unimodal", "global_by_client")
"""Groups of metrics in result.json that a study may report."""

SECTIONS = ("methods", "scenarios", "when", "search")
"""Keys of a study that hold sections."""

SIZES = {"grid": grid_size, "lines": lines_size}
"""The samplers that try all their settings, and how many these are."""

RANGE = ("low", "high")
"""A table that has one of these keys is a range."""


def read_study(given: str | Path | Mapping[str, Any], problems: list[str]) -> Study | None:
    """Read a study, and add the problems of its file to the list.

    Args:
        given: the path of a TOML file, or a mapping with the content of such a file.
        problems: the list of problems.

    Returns:
        The study without its wrong keys. Further checks can thus find more problems. None if it has no usable seeds or
        lacks a key that it needs.

    Raises:
        RecipeError: the file cannot be read.
    """
    if isinstance(given, Mapping):
        return parse_study(given, problems)
    path = Path(given)
    try:
        table = parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"study {path}: {error.strerror or error}. Give the path of a TOML file") from None
    except ValueError as error:
        raise RecipeError(f"study {path} is not valid TOML: {error}") from None
    return parse_study(table, problems, path.stem, path.parent)


def parse_study(
    table: Mapping[str, Any], problems: list[str], name: str = "study", folder: Path = Path()
) -> Study | None:
    """Build a study from the table of its file, and add the problems to the list.

    Args:
        table: the sections, as `tomllib` reads them.
        problems: the list of problems.
        name: the name of the study's folder.
        folder: the folder to which paths to recipes are relative.

    Returns:
        See `read_study`.
    """
    known = [f.name for f in fields(Study) if f.name not in ("name", "folder")]
    problems += [f"no key or section '{key}'; {did_you_mean(key, known)}" for key in table if key not in known]
    top = {key: value for key, value in table.items() if key in known and key not in SECTIONS}
    rules = table.get("when", [])
    if not isinstance(rules, list):
        problems.append("'when' holds sections: write [[when]] and the keys below it")
        rules = []
    parts: dict[str, Any] = {
        "methods": _named("methods", Method, table.get("methods", {}), problems),
        "scenarios": _named("scenarios", Scenario, table.get("scenarios", {}), problems),
        "when": [rule for entry in rules if (rule := _section("[[when]]", When, entry, problems)) is not None],
    }
    if "search" in table:
        parts["search"] = _section("[search]", Search, table["search"], problems)
    if not parts["methods"] and not problems:
        problems.append("[methods.NAME] is missing: a study needs at least one method, as in [methods.fedavg]")
    study = _section("", Study, top, problems, parts | {"name": name, "folder": folder})
    if study is None:
        return None
    study = _with_default_ranges(_with_scenario(study))
    checks = (
        _check_matches,
        _check_curves,
        _check_values,
        _check_sizes,
        _check_pruning,
        _check_settings_of,
        _check_metrics,
    )
    for check in (*checks, _check_recipes):
        check(study, problems)
    return study if _check_seeds(study, problems) else None


def refuse(given: str | Path | Mapping[str, Any], problems: Sequence[str]) -> None:
    """Raise all problems of a study at once, if there are any.

    Args:
        given: the study, as in `read_study`. If it is a path, the error names it.
    """
    unique = list(dict.fromkeys(problems))
    where = "" if isinstance(given, Mapping) else f"study {given}: "
    if len(unique) == 1:
        raise RecipeError(where + unique[0])
    if unique:
        raise RecipeError(
            "\n".join([f"{where}{len(unique)} problems:", *(f"  {_indented(problem)}" for problem in unique)])
        )


def _indented(text: str) -> str:
    """Return the text with further lines indented, so that each problem of a list is seen as one."""
    return text.replace("\n", "\n    ")


def tried(problems: list[str], where: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns. If `make` raises a RecipeError, add the error to the problems and return None."""
    try:
        return make()
    except RecipeError as error:
        problems.append(f"{where} {error}".strip())
        return None


def _section(
    where: str, cls: type, table: Any, problems: list[str], given: Mapping[str, Any] | None = None
) -> Any | None:
    """Build a dataclass from the correct keys of its table, and add each problem to the list.

    Return None if the table lacks a key that it needs.
    """
    given = dict(given or {})
    if not isinstance(table, Mapping):
        problems.append(f"{where} must be a table, with its keys below it")
        return None
    values = dict[str, Any]()
    for key, value in table.items():
        found = tried(problems, "", partial(checked, where, cls, {key: value}, frozenset(given)))
        values |= found or {}
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    problems += [f"{where} {name} is missing".strip() for name in needed if name not in (table.keys() | given.keys())]
    if not set(needed) <= values.keys() | given.keys() or None in given.values():
        return None
    for key in ("set", "grid", "search", "keys", "match"):
        if isinstance(values.get(key), Mapping):
            values[key] = flat_keys(values[key], RANGE if key in ("grid", "search", "keys") else WHOLE)
    return tried(problems, where, lambda: cls(**values, **given))


def _named(section: str, cls: type, table: Any, problems: list[str]) -> dict[str, Any]:
    """Build a dataclass for each name of a section."""
    if not isinstance(table, Mapping):
        problems.append(f"'{section}' holds sections: write [{section}.NAME] and the keys below it")
        return {}
    built = {name: _section(f"[{section}.{name}]", cls, entry, problems) for name, entry in table.items()}
    return {name: part for name, part in built.items() if part is not None}


def _with_scenario(study: Study) -> Study:
    """Return the study. If the study has no scenarios, its recipe becomes the only scenario."""
    if study.scenarios:
        return study
    name = Path(study.recipe).stem if study.recipe else "recipe"
    return replace(study, scenarios={name: Scenario()})


def _with_default_ranges(study: Study) -> Study:
    """Return the study. With `[search] ranges = "default"`, each method with a search has the values of its options."""
    if study.search is None or not study.search.ranges:
        return study
    methods = {}
    for name, method in study.methods.items():
        fixed = study.set | method.set | study.grid | method.grid
        found = {} if method.settings_of else default_space(name, fixed)
        kept = {} if method.settings_of else study.search.keys
        methods[name] = replace(method, search=found | kept | method.search)
    return replace(study, methods={**methods})


def _check_seeds(study: Study, problems: list[str]) -> bool:
    """Check the seeds. Return whether there are any seeds."""
    reported = tried(problems, "seeds", lambda: study.reported_seeds) or []
    tuning = tried(problems, "[search] seeds", lambda: study.tuning_seeds) or []
    if shared := sorted(set(reported) & set(tuning)):
        problems.append(f"[search] seeds: {shared} are reported seeds too. Choose settings on other seeds")
    return bool(reported)


def _check_values(study: Study, problems: list[str]) -> None:
    """Check the lists and ranges of values in the grids and searches, and remove keys with wrong values."""
    places = {"[grid]": study.grid}
    for name, method in study.methods.items():
        places |= {f"[methods.{name}] grid": method.grid, f"[methods.{name}] search": method.search}
        if method.search and study.search is None:
            problems.append(f"[methods.{name}] search needs a section [search] with trials and seeds, the budget")
    if study.search is not None:
        places["[search] keys"] = study.search.keys
    for where, keys in places.items():
        whole = not where.endswith(("search", "keys")) or _sampler(study) in WITH_VALUES
        for key, entry in list(keys.items()):
            if tried(problems, f"{where} {key}:", partial(values_of if whole else entry_of, entry)) is None:
                del keys[key]
    if study.search is not None and (size_of := SIZES.get(_sampler(study))) is not None:
        for name, method in study.methods.items():
            size = 0 if method.settings_of else size_of(study.searched_keys(name))
            if size > study.search.trials:
                problems.append(
                    f"[search] trials = {study.search.trials}: the {study.search.sampler} of '{name}' has {size} "
                    "settings. Give as many trials, or another sampler"
                )


def _check_sizes(study: Study, problems: list[str]) -> None:
    """Check how many combinations each grid has, and empty a grid that has too many, so that nothing plans them."""
    for name, method in study.methods.items():
        try:
            refuse_many(grid_size(study.grid_of(name)))
        except RecipeError as error:
            problems.append(f"the grid of '{name}': {error}")
            method.grid.clear()
            study.grid.clear()


def _check_curves(study: Study, problems: list[str]) -> None:
    """Check that a scenario with a curve has keys to draw it over."""
    for name, scenario in study.scenarios.items():
        if scenario.curve and not study.curve_of(name):
            problems.append(f"[scenarios.{name}] curve needs [search] keys, whose values are its lines")


def _check_pruning(study: Study, problems: list[str]) -> None:
    """Check that trials which are compared after equal rounds have equal numbers of them."""
    if study.search is None or not study.search.prune:
        return
    if any("rounds" in study.searched_keys(name) for name in study.methods):
        problems.append("[search] prune compares trials after equal rounds, so the search cannot choose `rounds`")


def _check_settings_of(study: Study, problems: list[str]) -> None:
    """Check the methods that take the settings of another method."""
    for name, method in study.methods.items():
        if method.settings_of is not None:
            where = f"[methods.{name}] settings_of = '{method.settings_of}':"
            problems += [f"{where} {fault}" for fault in _settings_faults(study, name, method)]


def _settings_faults(study: Study, name: str, method: Method) -> Iterator[str]:
    """Yield why a method cannot take the settings of the method that it names."""
    wanted = method.settings_of or ""
    if method.search:
        yield "this method has search too. Give search or settings_of, not both"
    if wanted == name:
        yield "a method cannot take its own settings. Name another method"
        return
    if wanted not in study.methods:
        yield f"no method '{wanted}'; {did_you_mean(wanted, study.methods)}"
        return
    if study.methods[wanted].settings_of:
        yield f"'{wanted}' has settings_of too, so it has no search. Name a method that has a search"
        return
    if not study.searched_keys(name):
        yield (
            f"no search chooses settings for '{wanted}'. Give [search] with trials, seeds and "
            f"keys, or [methods.{wanted}] search"
        )
        return
    grid, own = study.grid_of(wanted), study.grid_of(name)
    if lacking := [key for key, entry in grid.items() if not _includes(entry, own.get(key))]:
        yield (
            f"the search chooses settings for each value in the grid of '{wanted}'. Give this method the same values "
            f"of {', '.join(lacking)} in its grid, or fewer of them"
        )
    if twice := [key for key in study.searched_keys(name) if sets(method.set | own, key)]:
        yield f"the search chooses {', '.join(twice)}, so remove this from set and grid"


def _includes(entry: Any, part: Any) -> bool:
    """Return whether `part` is given and `entry` has all its values. Both are lists or ranges of values."""
    return part is not None and all(value in values_of(entry) for value in values_of(part))


def _sampler(study: Study) -> str:
    return "" if study.search is None else study.search.sampler


def _check_metrics(study: Study, problems: list[str]) -> None:
    for name in study.scenarios:
        for metric in study.metrics_of(name):
            group, _, word = metric.partition(".")
            if group not in GROUPS or not word:
                hint = did_you_mean(group, GROUPS)
                problems.append(f"metric = '{metric}': write GROUP.NAME, as in 'global.accuracy'; {hint}")


def _check_recipes(study: Study, problems: list[str]) -> None:
    """Check that each scenario has a recipe, and remove the other scenarios from the study."""
    for name, scenario in list(study.scenarios.items()):
        recipe = scenario.recipe or study.recipe
        if recipe is None:
            problems.append(f"[scenarios.{name}] recipe is missing, and the study has none for all scenarios")
        elif not _is_file(study.folder / recipe):
            problems.append(f"[scenarios.{name}] recipe: {study.folder / recipe} does not exist")
        else:
            continue
        del study.scenarios[name]


def _is_file(path: Path) -> bool:
    """Return whether there is a file at a path, which may be too long for the system or hold a zero byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _check_matches(study: Study, problems: list[str]) -> None:
    known = {"method": study.methods, "scenario": study.scenarios}
    for number, rule in enumerate(study.when, 1):
        for word in NAMES:
            wanted = rule.match.get(word, [])
            for name in wanted if isinstance(wanted, list) else [wanted]:
                if not isinstance(name, str) or name not in known[word]:
                    problems.append(f"[[when]] {number}: no {word} '{name}'; {did_you_mean(str(name), known[word])}")
        if not (rule.set or rule.unset or rule.skip):
            problems.append(f"[[when]] {number} changes nothing: give set, unset or skip")
