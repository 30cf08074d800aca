"""Turns a study into its runs: the recipes of all cells, and the names of the folders with their results."""

import copy
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import PolyfedError, RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data import Columns
from polyfed.data.columns import VALIDATION
from polyfed.data.stacking import stacked
from polyfed.experiment.recipes.recipe import Recipe, off_by_default, parse_recipe, read_table
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.experiment.recipes.settings import APART
from polyfed.experiment.results.round_facts import versions
from polyfed.experiment.study.ranges import at, combinations, edit, end_of, put, remove, sets
from polyfed.experiment.study.run_checks import (
    Measured,
    ModelCheck,
    clients_of,
    measured_by,
    metric_fault,
    misspelt,
    policy_fault,
)
from polyfed.experiment.study.study_file import read_study, refuse
from polyfed.experiment.study.study_schema import NAMES, Search, Study, When
from polyfed.report.comparison.folds import FOLD_KEYS

T = TypeVar("T")

WITHOUT_EFFECT = (*(name for name, section in SECTIONS.items() if not section.result), "versions")
"""Sections of a recipe that do not change a result."""


@dataclass(frozen=True)
class Cell:
    """A method with one combination of the grid, in one scenario: a line in the scenario's table of results.

    Attributes:
        method: The name of the method.
        scenario: The name of the scenario.
        values: The combination of the grid: key -> value.
        table: The recipe, without seed and without searched keys.
        space: The keys whose values a search chooses, with their lists or ranges.
        skip: Why the cell is left out. Empty if the study runs the cell.
        settings_of: The method whose search chooses the values of these keys. Empty if the cell has its own search.
        ranked: Whether the cell counts in the mean ranks.
    """

    method: str
    scenario: str
    values: Mapping[str, Any]
    table: Mapping[str, Any]
    space: Mapping[str, Any]
    skip: str = ""
    settings_of: str = ""
    ranked: bool = True

    @property
    def label(self) -> str:
        """The method and the combination of the grid, as shown in the tables."""
        return self._named(self.values)

    @property
    def compared(self) -> str:
        """The label without the fold: `polyfed compare` pools the folds of a method."""
        return self._named([key for key in self.values if key not in FOLD_KEYS])

    def _named(self, keys: Iterable[str]) -> str:
        return " ".join([self.method, *(f"{short(key)}={value_text(self.values[key])}" for key in keys)])

    def gives_settings_to(self, other: "Cell") -> bool:
        """Return whether another cell takes the settings that the search chooses for this cell.

        This is so if `settings_of` of the other cell names this cell's method, both cells are in the same scenario, and
        both have equal values for the keys of this cell's grid. The grid of the other cell may have further keys.
        """
        return (
            (other.settings_of, other.scenario) == (self.method, self.scenario)
            and self.values.keys() <= other.values.keys()
            and all(other.values[key] == value for key, value in self.values.items())
        )

    def recipe(self, seed: int, chosen: Mapping[str, Any], *, tuning: bool) -> dict[str, Any]:
        """The table of a run's recipe.

        Args:
            chosen: the values of the searched keys.
            tuning: whether the run belongs to the search. Such a run is evaluated on validation rows instead of test
                rows.
        """
        table = copy.deepcopy(dict(self.table))
        for key, value in chosen.items():
            put(table, key, value)
        if tuning:
            put(table, "clients.measure_on", "validation")
        return table | {"seed": seed}


@dataclass
class Planner:
    """Makes the recipes of a study's runs, and names them by their content.

    Attributes:
        study: The study.
        fingerprints: The section [data] of a recipe -> the fingerprint of the data, so that each data set is read once.
        models: Checks whether the algorithms can train the models.
        measured: One entry for each checked cell: the names of the metrics that its runs will have. Cells whose metrics
            are not known before a run have no entry.
        dry: What a dry run of a recipe tells, by the recipe as JSON; see `_dry_run`.
        loaded: A pair: the section [data] of the last data set, as JSON, and the data set itself.
    """

    study: Study
    fingerprints: dict[str, tuple[str, bool]] = field(default_factory=dict)
    models: ModelCheck = field(default_factory=ModelCheck)
    measured: list[Measured] = field(default_factory=list)
    dry: dict[str, tuple[str, tuple[Measured, str] | None]] = field(default_factory=dict)
    loaded: tuple[str, Columns] | None = None

    def cells(self, problems: list[str]) -> list[Cell]:
        """Return all cells, scenario by scenario, and add the problems of all recipes to the list.

        Raises:
            DataError: a data set cannot be read.
        """
        faults: dict[str, list[str]] = {}
        result = []
        for scenario, method in itertools.product(self.study.scenarios, self.study.methods):
            for values in combinations(self.study.grid_of(method) | self.study.curve_of(scenario)):
                errors: list[str] = []
                cell = noted(errors, lambda values=values: self._cell(method, scenario, values))  # type: ignore[misc]  # noqa: B023
                if cell is not None:
                    result.append(cell)
                    self._check(cell, errors)
                for error in dict.fromkeys(errors):
                    faults.setdefault(error, []).append(_cell_text(method, scenario, values))
        for cell, error in _without_settings(result):
            faults.setdefault(error, []).append(_cell_text(cell.method, cell.scenario, cell.values))
        problems += [f"{_all(where)}: {error}" for error, where in faults.items()]
        problems += unknown_keys(self.study.when, [cell.table for cell in result])
        for scenario in self.study.scenarios:
            problems += misspelt(self.study.metrics_of(scenario), self.measured)
        self.loaded = None
        return result

    def name(self, table: Mapping[str, Any]) -> str:
        """Return the name of a run's folder: a short description, and a hash of recipe, data and versions.

        Runs with equal content have equal folder names. A sweep therefore finds an existing result even if the study
        has since renamed the method or the scenario.
        """
        recipe = quiet(table)
        content = _content(recipe)
        used = {name: version for name, version in versions().items() if name != "python"}
        text = json.dumps([content, self.fingerprint(recipe)[0], used], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        words = f"{at(content, 'algorithm.name')}-{at(content, 'data.name')}-s{recipe.seed}"
        return f"{re.sub(r'[^0-9A-Za-z_.-]', '_', words)}-{digest}"

    def fingerprint(self, recipe: Recipe) -> tuple[str, bool]:
        """The fingerprint of a recipe's data, and whether the data itself has validation rows."""
        section = _data_of(recipe)
        if section not in self.fingerprints:
            columns = self._columns(recipe)
            self.fingerprints[section] = columns.fingerprint(), len(columns.rows(VALIDATION)) > 0
        return self.fingerprints[section]

    def _columns(self, recipe: Recipe) -> Columns:
        """Return the data of a recipe. The planner keeps the last data set, because the next cell often uses it too."""
        section = _data_of(recipe)
        if self.loaded is None or self.loaded[0] != section:
            self.loaded = section, stacked(recipe.data.load(), recipe.stack)
        return self.loaded[1]

    def _cell(self, method: str, scenario: str, values: Mapping[str, Any]) -> Cell:
        study, chosen = self.study, self.study.methods[method]
        source = study.scenarios[scenario]
        path = source.recipe or study.recipe
        assert path is not None
        table = read_table(study.folder / path)
        if method in ALGORITHMS:
            if at(table, "algorithm.name") != method:  # options of another algorithm do not apply
                table["algorithm"] = {"name": method}
        elif not {"algorithm", "algorithm.name"} & set(chosen.set):
            hint = did_you_mean(method, ALGORITHMS)
            raise RecipeError(f"'{method}' is no algorithm; {hint}. Or name one: set.algorithm.name = \"...\"")
        for part in (study, source, chosen):
            edit(table, part.set, part.unset)
        for key, value in values.items():
            put(table, key, value)
        skip = ""
        space = {} if source.curve else study.searched_keys(method)
        for number, rule in enumerate(study.when, 1):
            if holds(rule.match, table, {"method": method, "scenario": scenario}):
                if twice := [key for key in space if sets(rule.set, key) or key in rule.unset]:
                    raise RecipeError(f"[[when]] {number} changes {', '.join(twice)}, but a search chooses its value")
                edit(table, rule.set, rule.unset)
                skip = skip or rule.skip
        if at(table, "engine.threads") is None:
            put(table, "engine.threads", 1)
        taken = "" if source.curve else chosen.settings_of or ""
        ranked = chosen.ranked and not source.curve
        return Cell(method, scenario, values, table, space, skip, taken, ranked)

    def _check(self, cell: Cell, errors: list[str]) -> None:
        """Add the faults of a cell's recipe to the list.

        A cell may have keys whose best values a search has to find. Its recipe is then checked twice: with the first
        candidate value of each of these keys, and with the last. The check builds the model, because some algorithms
        refuse some models. It also compares what the algorithm's messages announce with the policy.
        """
        if cell.skip:
            return
        recipe = None
        for last in (False, True):
            recipe = noted(errors, lambda last=last: self._checked(cell, last))  # type: ignore[misc]
        if (engine := at(cell.table, "engine.name")) in APART:
            errors.append(
                f"[engine] name = '{engine}' starts processes of its own, which a study does not. Use 'vectorised' or "
                "'sequential'"
            )
        searched = cell.space and not cell.settings_of
        options = ("validation", "validation_clients", "personal_validation")
        has = any(at(cell.table, f"clients.{option}") for option in options)
        if searched and not has and not self._has_validation_rows(cell):
            errors.append("the search needs validation rows: set clients.validation, as in clients.validation = 0.1")
        if searched and recipe is not None:
            errors += filter(None, [_too_few_evaluations(self.study.search, recipe)])
        if recipe is not None and not errors:
            refused, known = self._dry_run(recipe)
            errors += filter(None, [refused])
            if known is not None:
                self.measured.append(known[0])
                errors += filter(None, [metric_fault(self.study.metrics_of(cell.scenario), *known)])

    def _dry_run(self, recipe: Recipe) -> tuple[str, tuple[Measured, str] | None]:
        """Return why the policy refuses a recipe, or "", and what its runs measure; see `run_checks`.

        Neither depends on the learning rate, so recipes that differ in nothing else have one dry run.
        """
        table = copy.deepcopy(recipe.table())
        remove(table, "train.lr")
        text = json.dumps(table, sort_keys=True, default=str)
        if text not in self.dry:
            clients = clients_of(recipe, self._columns(recipe))
            self.dry[text] = (
                ("", None) if clients is None else (policy_fault(recipe, clients), measured_by(recipe, clients))
            )
        return self.dry[text]

    def _checked(self, cell: Cell, last: bool) -> Recipe:
        """Return the recipe of a cell with the first or the last candidate value of each searched key."""
        chosen = {key: end_of(entry, last=last) for key, entry in cell.space.items()}
        recipe = quiet(cell.recipe(self.study.reported_seeds[0], chosen, tuning=False))
        self.models.refuse(recipe, self._columns(recipe))
        return recipe

    def _has_validation_rows(self, cell: Cell) -> bool:
        """Return whether a cell's data set comes with validation rows. Only the section [data] is checked here."""
        errors: list[str] = []
        recipe = noted(errors, lambda: quiet({"data": cell.table["data"], "algorithm": {"name": "fedavg"}}))
        return recipe is None or self.fingerprint(recipe)[1]


def planned(given: str | Path | Mapping[str, Any]) -> tuple[Planner, list[Cell]]:
    """Read a study and plan its runs.

    Raises:
        RecipeError: the study is wrong. The text lists the problems of the file, and of the recipes of all runs.
        DataError: a data set cannot be read.
    """
    problems: list[str] = []
    study = read_study(given, problems)
    planner = None if study is None else Planner(study)
    cells = [] if planner is None else planner.cells(problems)
    refuse(given, problems)
    assert planner is not None
    return planner, cells


def _without_settings(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """Yield cells that need the settings of a cell that the study leaves out. Yield each with the error text."""
    for cell, source in itertools.product(cells, cells):
        if source.skip and not cell.skip and source.gives_settings_to(cell):
            yield (
                cell,
                f"settings_of = '{source.method}': the study leaves '{source.method}' out here ({source.skip}), so no "
                "search chooses the settings. Leave out this method too: add it to the same [[when]]",
            )


def _cell_text(method: str, scenario: str, values: Mapping[str, Any]) -> str:
    """Name a cell for the text of an error: its method, its scenario and its values of the grid."""
    words = " ".join(f"{key} = {value_text(value)}" for key, value in values.items())
    return f"method '{method}' in scenario '{scenario}'" + (f" with {words}" if words else "")


def _content(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe's results depend on.

    Options that are off, and off by default, are left out: an option that a later version brings must not change the
    names of runs that do not use it, or their results would be lost.
    """
    result = {name: values for name, values in recipe.table().items() if name not in WITHOUT_EFFECT}
    for name in result.keys() & SECTIONS.keys():
        section = SECTIONS[name]
        off = off_by_default(getattr(recipe.algorithm if section.of_algorithm else recipe, section.field))
        result[name] = {key: value for key, value in result[name].items() if key not in off or value != off[key]}
    return result


def _data_of(recipe: Recipe) -> str:
    return json.dumps(recipe.table()["data"], sort_keys=True, default=str)


def _too_few_evaluations(search: Search | None, recipe: Recipe) -> str:
    """Return that a trial has fewer evaluations than its score is the mean of, or ""."""
    if search is None or search.score_over == 1:
        return ""
    every = search.least_rounds if search.prune else recipe.algorithm.evaluation.every
    number = -(-recipe.rounds // every) if every else 1  # 0 evaluates the last round only
    if search.score_over <= number:
        return ""
    most = max(1, recipe.rounds // search.score_over)
    return (
        f"[search] score_over = {search.score_over}: of {recipe.rounds} rounds, {number} are evaluated. Set "
        f"{'least_rounds' if search.prune else 'evaluate.every'} = {most}, or score_over = {number}"
    )


def noted(errors: list[str], make: Callable[[], T]) -> T | None:
    """Call a function. If it raises a RecipeError or DataError, add its faults to the errors, and return None."""
    problems = Problems()
    made = problems.attempt(make)
    errors += map(str, problems.found)
    return made


def quiet(table: Mapping[str, Any]) -> Recipe:
    """Build the recipe that a table describes. Give no warnings, because the run itself warns.

    Raises:
        RecipeError: the recipe is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return parse_recipe(table)
        except RecipeError:
            raise
        except PolyfedError as error:
            raise RecipeError(str(error)) from None


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def value_text(value: Any) -> str:
    """Return the value of a key as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _all(places: list[str]) -> str:
    """Return, as text, the first place where a problem occurs, and the number of other places where it occurs."""
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def holds(match: Mapping[str, Any], table: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether all entries of a condition hold.

    If an entry gives a list of values, it holds if the actual value is in the list.
    """
    for key, wanted in match.items():
        value = names[key] if key in NAMES else at(table, key)
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def unknown_keys(rules: Sequence[When], tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each key of a condition that no recipe of the study sets. Such a condition never holds.

    Args:
        rules: the conditions.
        tables: the recipes of all cells. If there are none, the result is empty.
    """
    return [
        f"[[when]] {number} match: no recipe of the study sets '{key}'; {did_you_mean(key, NAMES)}, or keys of a recipe"
        for number, rule in enumerate(rules, 1)
        for key in rule.match
        if tables and key not in NAMES and all(at(table, key) is None for table in tables)
    ]
