"""Recipes, as TOML files or as Python objects. polyfed checks a recipe before the run starts.

Each section configures one part of polyfed, such as the algorithm. The part is a frozen dataclass, and its fields are
the keys that the section may have. An unknown key is an error. The text of the error suggests the most similar known
key. Pydantic checks each value against the field's type in strict mode.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import NOT_NEGATIVE, checked, default_of
from polyfed.core.problems import Problems
from polyfed.core.registry import name_of
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.data import PARTITIONS, ClientsSpec
from polyfed.experiment.recipes.conflicts import refuse_conflicts
from polyfed.experiment.recipes.cross_checks import refuse_breaches, refuse_no_training
from polyfed.experiment.recipes.line_numbers import in_file
from polyfed.experiment.recipes.overrides import apply
from polyfed.experiment.recipes.parts import algorithm_of, build, class_of, egress_of
from polyfed.experiment.recipes.sections import PARTS, SECTIONS, refuse_unknown
from polyfed.experiment.recipes.settings import CheckpointSpec, DeploymentSpec, EngineSpec, StopSpec
from polyfed.experiment.results.display import recipe_html, recipe_line
from polyfed.experiment.results.tracking import Tracker
from polyfed.federation.attack import Attack
from polyfed.federation.wire.compression import Wire
from polyfed.model import ModelSpec
from polyfed.model.encoders.catalogue import entry_of
from polyfed.objective import Objective
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.selection import Selector

ELSEWHERE = ("participation", "overselect", "train")
"""Fields of a selector that are written in other sections than [selection]."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """The description of a run, as Python objects.

    Data, algorithm, encoders, selector, partition and tracker may be objects of your own classes.

    Attributes:
        data: the data source: an object with the method `load() -> Columns`.
        algorithm: the algorithm; its fields hold the sections [train], [selection], [server] and [evaluate].
        model: the section [model].
        clients: the section [clients].
        task: the section [task]. With None, polyfed chooses the task by the type of the labels.
        seed: the seed of every random draw.
        rounds: the number of rounds.
        engine: the section [engine].
        deployment: the section [deployment].
        checkpoint: the section [checkpoint].
        stop: the section [stop].
        egress: the policy table, `{block: {destination: [kinds]}}`.
        limits: the section [limits]: limits for every device in this run, in addition to the device's own limits.
        stack: the key `stack` of [data], for early fusion (`data.stacking`). It maps the name of a new modality to the
            modalities that are joined to form it.
        network: the section [network], or None if the run has no simulated time.
        wire: the section [wire], or None if messages are not compressed.
        attack: the section [attack], or None if all clients are honest.
        privacy: the section [privacy], or None if the run has no differential privacy.
        tracking: the tracker that receives the numbers of the run, or None if there is no tracker.
        name: the name of the output folder, unless the user gives one.
    """

    data: Any
    algorithm: Algorithm
    model: ModelSpec = ModelSpec()
    clients: ClientsSpec = ClientsSpec()
    task: Objective | None = None
    seed: Annotated[int, NOT_NEGATIVE] = 1
    rounds: Annotated[int, NOT_NEGATIVE] = 10
    engine: EngineSpec = EngineSpec()
    deployment: DeploymentSpec = DeploymentSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    stop: StopSpec = StopSpec()
    egress: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    limits: Limits = NO_LIMITS
    stack: Mapping[str, Sequence[str]] = field(default_factory=dict)
    network: Any = None
    wire: Wire | None = None
    attack: Attack | None = None
    privacy: Privacy | None = None
    tracking: Tracker | None = None
    name: str = "run"

    def __post_init__(self) -> None:
        """Refuse a negative seed or number of rounds, breaches of the limits, and options that cannot go together."""
        problems = Problems()
        for name in ("rounds", "seed"):
            if getattr(self, name) < 0:
                problems.add(RecipeError(f"{name} = {getattr(self, name)}: must be 0 or more", (name,)))
        with problems.noting():
            refuse_breaches(self.limits, self.algorithm.train, self.rounds)
        object.__setattr__(self, "clients", self.clients.counted())
        scoring = self.algorithm.evaluation
        unread = bool(self.clients.personal_validation) and not scoring.reads_validation
        if (self.stop.of_clients or unread) and not scoring.own_validation:
            scoring = dataclasses.replace(scoring, own_validation=True)
            object.__setattr__(self, "algorithm", dataclasses.replace(self.algorithm, evaluation=scoring))
        with problems.noting():
            refuse_conflicts(self)
        problems.raise_all()

    def __repr__(self) -> str:
        return recipe_line(self.table())

    def _repr_html_(self) -> str:
        return recipe_html(self.table())

    def untimed(self) -> "Recipe":
        """Return the recipe without simulated time, and so without clients that are too slow."""
        return dataclasses.replace(self, network=None, clients=dataclasses.replace(self.clients, overselect=None))

    def table(self) -> dict[str, Any]:
        """The resolved recipe as a table in the layout of the file, with every default written out."""
        table: dict[str, Any] = {"seed": self.seed, "rounds": self.rounds}
        for name, section in SECTIONS.items():
            value = getattr(self.algorithm if section.of_algorithm else self, section.field, None)
            hidden = section.hides_defaults and section.cls is not None and value == section.cls()
            if value is not None and not hidden:
                named = {} if section.classes is None else {"name": name_of(value, section.classes)}
                table[name] = named | _WRITTEN.get(name, as_table)(value)
        if self.stack:
            table["data"]["stack"] = _toml(self.stack)
        if "selection" in table:  # the selector decides, also where Python gave [clients] another participation
            selector = as_table(getattr(self.algorithm, "selector", None))
            table["clients"] |= {key: selector[key] for key in ELSEWHERE[:2] if key in selector}
        return table


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file.

    Args:
        path: the TOML file.
        overrides: `section.key=value` as on the command line; the value is TOML, or a word without quotes.

    Raises:
        RecipeError: the recipe has faults. The text names the file, and for each fault the line number, the section,
            the key, what is allowed and the nearest name.
    """
    path, problems = Path(path), Problems()
    text = _text(path)
    table = _parsed(text, path)
    made = problems.attempt(lambda: parse_recipe(_overridden(table, overrides), name=path.stem))
    if made is None:
        raise in_file(problems.found, path, text, overrides) from None
    return made


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe's file as a table and apply overrides. This imports none of the classes named in the file.

    Raises:
        RecipeError: the file cannot be read or is not valid TOML, or an override does not fit the file.
    """
    return _overridden(_parsed(_text(path), path), overrides)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows editors put a byte order mark first
    except OSError as error:
        hint = "Give the path of a TOML file"
        if str(path) in ALGORITHMS:
            hint = f"'{path}' is a method: for your own data, call polyfed.run(data=..., algorithm='{path}'). {hint}"
        raise RecipeError(f"recipe {path}: {error.strerror or error}. {hint}") from None
    except ValueError as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from None


def _overridden(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    problems = Problems()
    for override in overrides:
        with problems.noting():
            apply(table, override)
    problems.raise_all()
    return table


def recipe_of(given: Recipe | str | Path) -> Recipe:
    """Return the given recipe, or read the recipe at the given path.

    Raises:
        RecipeError: the argument is neither a recipe nor a path, or the file is not a valid recipe.
    """
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, (str, Path)):
        raise RecipeError(
            f"a {type(given).__name__} is not a recipe. Give a Recipe, the path of one, or parse_recipe(table)"
        )
    return load_recipe(given)


def parse_recipe(table: Mapping[str, Any], name: str = "run") -> Recipe:
    """Build a recipe from the table of its file.

    Args:
        table: the sections, as `tomllib` reads them.
        name: the name of the output folder, unless the user gives one.

    Raises:
        RecipeError: the table has faults. For each fault, the error text gives the section, the key, the allowed values
            and, for a misspelt name, the most similar correct name.
    """
    problems = Problems()
    top: dict[str, Any] = {key: table[key] for key in ("seed", "rounds") if key in table}
    sections = _sections(table, top, problems)
    for section, example in ((name, section.required) for name, section in SECTIONS.items()):
        if example and section not in table:
            problems.add(
                RecipeError(
                    f'section [{section}] is missing. Add it with its name, as in name = "{example}"', (section,)
                )
            )
    with problems.noting():
        refuse_no_training(top, sections.get("train", {}))

    given: dict[str, Any] = {"name": name}
    data = dict(sections.get("data", {}))
    stack = {"stack": data.pop("stack")} if "stack" in data else {}
    sections["data"] = data
    with problems.noting():
        given |= checked("", Recipe, top)
    with problems.noting():
        given |= checked("[data]", Recipe, stack)
    for section, entry in SECTIONS.items():
        named = entry.classes is not None or entry.optional
        if entry.of_algorithm or section == "algorithm" or (named and not (section in table and section in sections)):
            continue
        given[entry.field] = problems.attempt(lambda section=section: _built(section, sections.get(section, {})))  # type: ignore[misc]
    given["algorithm"] = algorithm_of(sections, given["clients"] or ClientsSpec(), problems)
    made = None if problems.found else problems.attempt(lambda: Recipe(**given))
    problems.raise_all()
    assert made is not None
    return made


def _built(name: str, entry: Mapping[str, Any]) -> Any:
    """Build a section that is a field of `Recipe`."""
    section = SECTIONS[name]
    if section.cls is None:
        return egress_of(entry)
    where = f"[{name}]"
    if section.classes is None:
        return build(where, section.cls, entry)
    cls, rest = class_of(where, section.classes, section.cls, entry)
    return build(where, cls, rest)


def _sections(table: Mapping[str, Any], top: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the known sections that are tables. Unknown keys and sections of other types are noted as problems."""
    kept: dict[str, Any] = {}
    for key, value in table.items():
        if key in top or key == "versions":  # a resolved recipe names the versions it ran with, and can be run again
            continue
        with problems.noting():
            refuse_unknown(key)
            if not isinstance(value, Mapping):
                raise RecipeError(f"'{key}' is a section: write [{key}] and its keys below it", (key,))
            kept[key] = value
    return kept


def off_by_default(part: Any) -> dict[str, Any]:
    """Return the options of a section's dataclass that are off by default, with these defaults as TOML holds them."""
    if not dataclasses.is_dataclass(part):
        return {}
    defaults = {f.name: _toml(default_of(f)) for f in fields(part)}
    return {name: value for name, value in defaults.items() if value == "none" or not value}


def as_table(part: Any) -> dict[str, Any]:
    """Return a section's dataclass as a TOML table, without fields that are None. Other objects give an empty table."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: _toml(value) for f in fields(part) if f.init and (value := getattr(part, f.name)) is not None}


def model_table(spec: ModelSpec) -> dict[str, Any]:
    """The section [model] that describes this specification."""
    encoders = {name: _toml(entry_of(entry)) for name, entry in spec.encoders.items()}
    return as_table(spec) | spec.classes() | {"encoders": encoders}


def _clients_table(spec: ClientsSpec) -> dict[str, Any]:
    own = {} if isinstance(spec.partition, str) else {"partition": name_of(spec.partition, PARTITIONS)}
    return as_table(spec) | own


def _algorithm_table(method: Algorithm) -> dict[str, Any]:
    return {key: entry for key, entry in as_table(method).items() if key not in PARTS}


def _selection_table(selector: Selector) -> dict[str, Any]:
    return {key: entry for key, entry in as_table(selector).items() if key not in ELSEWHERE}


def _egress_table(rows: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Any]:
    return {block: {destination: list(kinds) for destination, kinds in row.items()} for block, row in rows.items()}


_WRITTEN: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "clients": _clients_table,
    "model": model_table,
    "algorithm": _algorithm_table,
    "selection": _selection_table,
    "egress": _egress_table,
}
"""How sections that are not only the fields of their dataclass are written."""


def _toml(value: Any) -> Any:
    """Convert a value to a form that TOML can hold. If there is no such form, the value becomes a string."""
    if dataclasses.is_dataclass(value):
        return as_table(value)
    if isinstance(value, Mapping):
        return {str(key): _toml(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_toml(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
