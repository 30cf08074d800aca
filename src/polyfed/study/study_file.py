"""A study as a file: methods, scenarios, grids, conditions and the search. All problems of a file are told at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.parsing import parse_toml
from polyfed.core.schema import AT_LEAST_ONE, NOT_NEGATIVE, check_ranges, checked
from polyfed.study.ranges import Range, entry_of, flat_keys, grid_size, values_of

GROUPS = ("global", "personal", "unimodal", "global_by_client")
"""Groups of metrics in result.json that a study may report."""

SECTIONS = ("methods", "scenarios", "when", "search")
"""Keys of a study that hold sections."""

NAMES = ("method", "scenario")
"""Words of `match` that are no keys of a recipe."""

RANGE = ("low", "high")
"""A table with one of these keys is a range."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the methods are compared on: data, clients and rounds.

    Attributes:
        recipe: The recipe that every run of this scenario starts from; a path from the study's file. Default: the
            study's `recipe`.
        metric: What is measured; default: the study's `metric`.
        set: Keys of the recipe and their values.
        unset: Keys or sections that are removed from the recipe.
    """

    recipe: str | None = None
    metric: str | list[str] | None = None
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the table of results.

    Attributes:
        set: Keys of the recipe and their values. Without `algorithm.name`, the name of the method is that of the
            algorithm.
        unset: Keys or sections that are removed from the recipe.
        grid: Keys and their lists or ranges; every combination is a line of the table.
        search: Keys and their lists or ranges; the search chooses a value on validation rows.
    """

    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class When:
    """A condition: where everything in `match` holds, keys are changed, or the runs are left out.

    Attributes:
        match: `method`, `scenario` or keys of the recipe, each with a value or a list of values.
        set: Keys of the recipe and their values.
        unset: Keys or sections that are removed from the recipe.
        skip: Why these runs are left out; empty: they are not.
    """

    match: dict[str, Any]
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    skip: str = ""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How settings are chosen: the same number of trials for every method, on validation rows, on seeds of its own.

    Attributes:
        trials: Settings that are tried for each method in each scenario.
        seeds: The seeds of each trial; none of them may be a reported seed.
        keys: Keys that are searched for every method, with their lists or ranges.
        sampler: Optuna's sampler: "tpe", "random", "qmc" or "grid". "grid" needs lists, or ranges with `count` or
            `step`.
        sampler_seed: The seed of the sampler.
        batch: Trials that the sampler proposes before it sees their scores. They can run at once. The result depends
            on this number, and not on the number of processes.
    """

    trials: Annotated[int, AT_LEAST_ONE]
    seeds: list[int] | dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    sampler: Literal["tpe", "random", "qmc", "grid"] = "tpe"
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0
    batch: Annotated[int, AT_LEAST_ONE] = 4

    def __post_init__(self) -> None:
        """Check types and ranges of the options."""
        check_ranges("[search]", self)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study: every method in every scenario, with every combination of the grid, on every seed.

    Attributes:
        title: What the study asks, for its page.
        recipe: The recipe that every run starts from; a path from the study's file. A scenario may have its own.
        seeds: The reported seeds: a list or a range.
        metric: The metric of result.json that is reported, at the last round; of a list, the first that a run has.
        set: Keys of the recipe and their values, for every run.
        unset: Keys or sections that are removed from every recipe.
        grid: Keys and their lists or ranges, for every method; every combination is a line of the table.
        methods: Name -> method.
        scenarios: Name -> scenario; without any, `recipe` alone is the scenario.
        when: Conditions, which are applied in order.
        search: How settings are chosen; None: no method has keys to search.
        name: The name of the study's folder: that of its file.
        folder: Where paths to recipes start.
    """

    title: str = ""
    recipe: str | None = None
    seeds: list[int] | dict[str, Any]
    metric: str | list[str] = "global.accuracy"
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Method]
    scenarios: Mapping[str, Scenario] = field(default_factory=dict)
    when: Sequence[When] = ()
    search: Search | None = None
    name: str = "study"
    folder: Path = Path()

    @property
    def reported_seeds(self) -> list[int]:
        """The seeds whose runs are reported."""
        return values_of(self.seeds)

    @property
    def tuning_seeds(self) -> list[int]:
        """The seeds of the search; empty without a search."""
        return [] if self.search is None else values_of(self.search.seeds)

    def metrics_of(self, scenario: str) -> list[str]:
        """The metrics of a scenario, of which the first counts that a run has."""
        metric = self.scenarios[scenario].metric or self.metric
        return [metric] if isinstance(metric, str) else list(metric)


def load_study(given: str | Path | Mapping[str, Any]) -> Study:
    """Read a study from a file, or from the table of one.

    Raises:
        RecipeError: with all problems of the file.
    """
    if isinstance(given, Mapping):
        return parse_study(given)
    path = Path(given)
    try:
        table = parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"study {path}: {error.strerror or error}. Give the path of a TOML file") from None
    except ValueError as error:
        raise RecipeError(f"study {path} is not valid TOML: {error}") from None
    try:
        return parse_study(table, path.stem, path.parent)
    except RecipeError as error:
        raise RecipeError(f"study {path}: {error}") from None


def parse_study(table: Mapping[str, Any], name: str = "study", folder: Path = Path()) -> Study:
    """Build a study from the table of its file.

    Args:
        table: the sections, as `tomllib` reads them.
        name: the name of its folder.
        folder: where paths to recipes start.

    Raises:
        RecipeError: with all problems of the table.
    """
    problems: list[str] = []
    known = [f.name for f in fields(Study) if f.name not in ("name", "folder")]
    problems += [f"no key or section '{key}'; {did_you_mean(key, known)}" for key in table if key not in known]
    top = {key: value for key, value in table.items() if key in known and key not in SECTIONS}
    parts: dict[str, Any] = {
        "methods": _named("methods", Method, table.get("methods", {}), problems),
        "scenarios": _named("scenarios", Scenario, table.get("scenarios", {}), problems),
        "when": [
            rule for entry in table.get("when", []) if (rule := _section("[[when]]", When, entry, problems)) is not None
        ],
    }
    if "search" in table:
        parts["search"] = _section("[search]", Search, table["search"], problems)
    if not parts["methods"] and not problems:
        problems.append("[methods.NAME] is missing: a study needs at least one method, as in [methods.fedavg]")
    study = _section("", Study, top, problems, parts | {"name": name, "folder": folder})
    if study is not None:
        study = _with_scenario(study)
        for check in (_check_seeds, _check_values, _check_metrics, _check_recipes, _check_matches):
            check(study, problems)
    refuse(problems)
    assert study is not None
    return study


def refuse(problems: Sequence[str]) -> None:
    """Raise all problems at once, if there are any."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise RecipeError(unique[0])
    if unique:
        raise RecipeError("\n".join([f"{len(unique)} problems:", *(f"  {problem}" for problem in unique)]))


def tried(problems: list[str], where: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, or None after adding its RecipeError to the problems."""
    try:
        return make()
    except RecipeError as error:
        problems.append(f"{where} {error}".strip())
        return None


def _section(
    where: str, cls: type, table: Any, problems: list[str], given: Mapping[str, Any] | None = None
) -> Any | None:
    """Build a dataclass from its table, or add what is wrong with each key to the problems and return None."""
    given = dict(given or {})
    if not isinstance(table, Mapping):
        problems.append(f"{where} must be a table, with its keys below it")
        return None
    before, values = len(problems), {}
    for key, value in table.items():
        found = tried(problems, "", lambda key=key, value=value: checked(where, cls, {key: value}, frozenset(given)))
        values |= found or {}
    for f in fields(cls):
        needed = f.default is MISSING and f.default_factory is MISSING
        if needed and f.name not in table and f.name not in given:
            problems.append(f"{where} {f.name} is missing".strip())
    if len(problems) > before or any(value is None for value in given.values()):
        return None
    for key in ("set", "grid", "search", "keys", "match"):
        if isinstance(values.get(key), Mapping):
            values[key] = flat_keys(values[key], RANGE if key in ("grid", "search", "keys") else ("kind", "name"))
    return tried(problems, where, lambda: cls(**values, **given))


def _named(section: str, cls: type, table: Any, problems: list[str]) -> dict[str, Any]:
    """Build a dataclass for each name of a section."""
    if not isinstance(table, Mapping):
        problems.append(f"'{section}' holds sections: write [{section}.NAME] and the keys below it")
        return {}
    built = {name: _section(f"[{section}.{name}]", cls, entry, problems) for name, entry in table.items()}
    return {name: part for name, part in built.items() if part is not None}


def _with_scenario(study: Study) -> Study:
    """The same study; without scenarios, its recipe becomes the only one."""
    if study.scenarios:
        return study
    name = Path(study.recipe).stem if study.recipe else "recipe"
    return replace(study, scenarios={name: Scenario()})


def _check_seeds(study: Study, problems: list[str]) -> None:
    reported = tried(problems, "seeds", lambda: values_of(study.seeds)) or []
    if study.search is None:
        return
    tuning = tried(problems, "[search] seeds", lambda: values_of(study.tuning_seeds)) or []
    if shared := sorted(set(reported) & set(tuning)):
        problems.append(f"[search] seeds: {shared} are reported seeds too. Choose settings on other seeds")


def _check_values(study: Study, problems: list[str]) -> None:
    places = {"[grid]": study.grid}
    for name, method in study.methods.items():
        places |= {f"[methods.{name}] grid": method.grid, f"[methods.{name}] search": method.search}
        if method.search and study.search is None:
            problems.append(f"[methods.{name}] search needs a section [search] with trials and seeds, the budget")
    if study.search is not None:
        places["[search] keys"] = study.search.keys
    for where, keys in places.items():
        searched = where.endswith(("search", "keys"))
        for key, entry in keys.items():
            found = tried(problems, f"{where} {key}:", lambda entry=entry: entry_of(entry))
            if isinstance(found, Range) and (not searched or _sampler(study) == "grid"):
                tried(problems, f"{where} {key}:", found.values)
    if study.search is not None and _sampler(study) == "grid" and not problems:
        for name, method in study.methods.items():
            size = grid_size(study.search.keys | method.search)
            if size > study.search.trials:
                problems.append(
                    f"[search] trials = {study.search.trials}: the grid of '{name}' has {size} settings. Give as many "
                    "trials, or another sampler"
                )


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
    for name, scenario in study.scenarios.items():
        recipe = scenario.recipe or study.recipe
        if recipe is None:
            problems.append(f"[scenarios.{name}] recipe is missing, and the study has none for all scenarios")
        elif not (study.folder / recipe).is_file():
            problems.append(f"[scenarios.{name}] recipe: {study.folder / recipe} does not exist")


def _check_matches(study: Study, problems: list[str]) -> None:
    known = {"method": study.methods, "scenario": study.scenarios}
    for number, rule in enumerate(study.when, 1):
        for word in NAMES:
            wanted = rule.match.get(word, [])
            for name in wanted if isinstance(wanted, list) else [wanted]:
                if name not in known[word]:
                    problems.append(f"[[when]] {number}: no {word} '{name}'; {did_you_mean(str(name), known[word])}")
        if not (rule.set or rule.unset or rule.skip):
            problems.append(f"[[when]] {number} changes nothing: give set, unset or skip")
