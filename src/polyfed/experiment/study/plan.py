"""Turns a study into its runs: the recipes of all cells, and the names of the folders with their results."""

import copy
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import PolyfedError, RecipeError, did_you_mean
from polyfed.data.columns import VALIDATION, Columns
from polyfed.data.stacking import stacked
from polyfed.experiment.recipe import Recipe, parse_recipe, read_table
from polyfed.experiment.round_facts import versions
from polyfed.experiment.study.model_check import ModelCheck
from polyfed.experiment.study.ranges import at, combinations, put, remove
from polyfed.experiment.study.study_file import refuse
from polyfed.experiment.study.study_schema import NAMES, Study

WITHOUT_EFFECT = ("checkpoint", "tracking", "versions")
"""Sections of a recipe that do not change a result."""


@dataclass(frozen=True)
class Cell:
    """A method with one combination of the grid, in one scenario: a line in the scenario's table of results.

    Attributes:
        method: The name of the method.
        scenario: The name of the scenario.
        values: The combination of the grid: key -> value.
        table: The recipe, without seed and without searched keys.
        space: The keys to search, with their lists or ranges.
        skip: Why the cell is left out. Empty if the study runs the cell.
    """

    method: str
    scenario: str
    values: Mapping[str, Any]
    table: Mapping[str, Any]
    space: Mapping[str, Any]
    skip: str = ""

    @property
    def label(self) -> str:
        """The method and the combination of the grid, as shown in the tables."""
        return " ".join([self.method, *(f"{short(key)}={value_text(value)}" for key, value in self.values.items())])

    def recipe(self, seed: int, chosen: Mapping[str, Any], *, tuning: bool) -> dict[str, Any]:
        """The table of a run's recipe.

        Args:
            seed: the seed of the run.
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
        models: The check of the models.
    """

    study: Study
    fingerprints: dict[str, tuple[str, bool]] = field(default_factory=dict)
    models: ModelCheck = field(default_factory=ModelCheck)
    _latest: tuple[str, Columns] | None = None

    def cells(self) -> list[Cell]:
        """All cells, scenario by scenario.

        Raises:
            RecipeError: a recipe is wrong. The text lists all problems of all recipes.
            DataError: a data set cannot be read.
        """
        problems: dict[str, list[str]] = {}
        found = []
        for scenario, method in itertools.product(self.study.scenarios, self.study.methods):
            for values in combinations(self.study.grid | self.study.methods[method].grid):
                try:
                    cell = self._cell(method, scenario, values)
                    if not cell.skip:
                        self._check(cell)
                    found.append(cell)
                except RecipeError as error:
                    words = " ".join(f"{key} = {value_text(value)}" for key, value in values.items())
                    where = f"method '{method}' in scenario '{scenario}'" + (f" with {words}" if words else "")
                    problems.setdefault(str(error), []).append(where)
        self._latest = None  # the runs read their own data
        refuse([f"{_all(where)}: {error}" for error, where in problems.items()])
        return found

    def name(self, table: Mapping[str, Any]) -> str:
        """Return the name of a run's folder: a short description, and a hash of recipe, data and versions.

        Runs with equal content have equal folder names. A sweep therefore finds an existing result even if the study
        has since renamed the method or the scenario.
        """
        recipe = quiet(table)
        content = {key: value for key, value in recipe.table().items() if key not in WITHOUT_EFFECT}
        used = {name: version for name, version in versions().items() if name != "python"}
        text = json.dumps([content, self.fingerprint(recipe)[0], used], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        words = f"{at(content, 'algorithm.name')}-{at(content, 'data.name')}-s{recipe.seed}"
        return f"{re.sub(r'[^0-9A-Za-z_.-]', '_', words)}-{digest}"

    def fingerprint(self, recipe: Recipe) -> tuple[str, bool]:
        """The fingerprint of a recipe's data, and whether the data itself has validation rows."""
        section = json.dumps(recipe.table()["data"], sort_keys=True, default=str)
        if section not in self.fingerprints:
            columns = self._columns(recipe)
            self.fingerprints[section] = columns.fingerprint(), len(columns.rows(VALIDATION)) > 0
        return self.fingerprints[section]

    def _columns(self, recipe: Recipe) -> Columns:
        """The data of a recipe. Only the latest data set stays in memory, because a scenario's cells share one."""
        section = json.dumps(recipe.table()["data"], sort_keys=True, default=str)
        if self._latest is None or self._latest[0] != section:
            self._latest = section, stacked(recipe.data.load(), recipe.stack)
        return self._latest[1]

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
        for rule in study.when:
            if _holds(rule.match, table, {"method": method, "scenario": scenario}):
                edit(table, rule.set, rule.unset)
                skip = skip or rule.skip
        if at(table, "engine.threads") is None:
            put(table, "engine.threads", 1)
        keys = chosen.search if study.search is None else study.search.keys | chosen.search
        return Cell(method, scenario, values, table, keys, skip)

    def _check(self, cell: Cell) -> None:
        """Refuse a cell whose recipe is wrong.

        A cell may have keys whose best values a search has to find. Its recipe is then checked twice: with the first
        candidate value of each of these keys, and with the last. The check builds the model, because some algorithms
        refuse some models.
        """
        for last in (False, True):
            chosen = {key: _end(entry, last) for key, entry in cell.space.items()}
            recipe = quiet(cell.recipe(self.study.reported_seeds[0], chosen, tuning=False))
            self.models.refuse(recipe, self._columns(recipe))
        if recipe.engine.name == "flower":
            raise RecipeError(
                "[engine] name = 'flower' starts processes of its own, which a study does not. Use 'vectorised' or "
                "'sequential'"
            )
        if cell.space and recipe.clients.validation == 0.0 and not self.fingerprint(recipe)[1]:
            raise RecipeError(
                "the search needs validation rows: set clients.validation, as in clients.validation = 0.1"
            )


def edit(table: dict[str, Any], changes: Mapping[str, Any], removed: list[str]) -> None:
    """Remove some keys from a recipe's table and set others, in place."""
    for key in removed:
        remove(table, key)
    for key, value in changes.items():
        put(table, key, deepcopy(value))  # a later change to this table must not reach the table of another cell


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


def _holds(match: Mapping[str, Any], table: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether all entries of a condition hold.

    If an entry gives a list of values, it holds if the actual value is in the list.
    """
    for key, wanted in match.items():
        value = names[key] if key in NAMES else at(table, key)
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _end(entry: Any, last: bool) -> Any:
    """The first or the last value of a list or a range."""
    if isinstance(entry, Mapping):
        return entry["high" if last else "low"]
    return entry[-1 if last else 0]


def _all(places: list[str]) -> str:
    """Return, as text, the first place where a problem occurs, and the number of other places where it occurs."""
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
