"""Recipes: a TOML file, or the same as Python objects, checked before anything runs.

Each section is the frozen dataclass of the part it configures, so there is no second schema. An unknown key is an error
that suggests the nearest one; pydantic checks each value against the field's type in strict mode.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import PolyfedWarning, RecipeError, did_you_mean
from polyfed.core.parsing import parse_toml
from polyfed.core.registry import find, name_of
from polyfed.core.schema import checked
from polyfed.data import PARTITIONS, SOURCES, ClientsSpec, Source
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.display import ShownRecipe
from polyfed.experiment.overrides import apply, called, refuse_unknown
from polyfed.experiment.presets import with_preset
from polyfed.experiment.section_checks import egress_table, refuse_breaches, refuse_no_training
from polyfed.experiment.settings import CheckpointSpec, EngineSpec
from polyfed.experiment.tracking import TRACKERS, Tracker
from polyfed.federation.attack import Attack
from polyfed.federation.network import Network
from polyfed.model import ModelSpec
from polyfed.model.encoders import entry_of
from polyfed.objective import OBJECTIVES, Objective
from polyfed.privacy.limits import NO_LIMITS, Limits
from polyfed.selection import SELECTORS, Selector
from polyfed.training.optimisers import ServerOptimiser, Train

PARTS = {"train": "train", "evaluation": "evaluate", "selector": "selection", "server": "server"}
"""Field of an algorithm -> the section of the recipe that it is written in."""


OPTIONAL = {"network": Network, "attack": Attack}
"""Sections that a recipe may leave out, with the classes that they build."""


ELSEWHERE = ("participation", "overselect", "train")
"""Fields of a selector that are written in other sections than [selection]."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(ShownRecipe):
    """A run as objects. Data, algorithm, encoders, selector, partition and tracker may be of your own classes.

    Attributes:
        data: a source: anything with `load() -> Columns`.
        algorithm: the algorithm; its fields hold the sections [train], [selection], [server] and [evaluate].
        model: the section [model].
        clients: the section [clients].
        task: the section [task], or None, so that the labels decide.
        seed: the seed of every random draw.
        rounds: the number of rounds.
        engine: the section [engine].
        checkpoint: the section [checkpoint].
        egress: the policy table, `{block: {destination: [kinds]}}`.
        limits: the section [limits]: floors that every device keeps in this run, besides its own.
        stack: new modality -> modalities it is stacked from (early fusion, `data.stacking`); `stack` in [data].
        network: the section [network], or None for no simulated time.
        attack: the section [attack], or None for honest clients.
        tracking: the tracker that receives the numbers of the run, or None.
        name: the name of the output folder, unless the user gives one.
    """

    data: Any
    algorithm: Algorithm
    model: ModelSpec
    clients: ClientsSpec = ClientsSpec(num=10)
    task: Objective | None = None
    seed: int = 1
    rounds: int = 10
    engine: EngineSpec = EngineSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    egress: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    limits: Limits = NO_LIMITS
    stack: Mapping[str, Sequence[str]] = field(default_factory=dict)
    network: Any = None
    attack: Attack | None = None
    tracking: Tracker | None = None
    name: str = "run"

    def __post_init__(self) -> None:
        """Refuse a negative seed or number of rounds, and a recipe that breaks its own limits."""
        for name in ("rounds", "seed"):
            if getattr(self, name) < 0:
                raise RecipeError(f"{name} = {getattr(self, name)}: must be 0 or more")
        refuse_breaches(self.limits, self.algorithm.train, self.rounds)

    def table(self) -> dict[str, Any]:
        """The resolved recipe as a table in the layout of the file, with every default written out."""
        algorithm = as_table(self.algorithm)
        table: dict[str, Any] = {"seed": self.seed, "rounds": self.rounds}
        table["data"] = {"name": name_of(self.data, SOURCES)} | as_table(self.data)
        if self.stack:
            table["data"]["stack"] = _toml(self.stack)
        table["clients"] = as_table(self.clients)
        if not isinstance(self.clients.partition, str):
            table["clients"]["partition"] = name_of(self.clients.partition, PARTITIONS)
        table["model"] = model_table(self.model)
        for part, section in PARTS.items():
            if part in algorithm:
                table[section] = algorithm.pop(part)
        if "selection" in table:
            own = {key: entry for key, entry in table["selection"].items() if key not in ELSEWHERE}
            table["selection"] = {"name": name_of(self.algorithm.selector, SELECTORS)} | own  # type: ignore[attr-defined]
        table["algorithm"] = {"name": name_of(self.algorithm, ALGORITHMS)} | algorithm
        table |= {"engine": as_table(self.engine), "checkpoint": as_table(self.checkpoint)}
        optional = {"network": self.network, "attack": self.attack}
        table |= {name: as_table(held) for name, held in optional.items() if held is not None}
        for name, held, registry in (("task", self.task, OBJECTIVES), ("tracking", self.tracking, TRACKERS)):
            if held is not None:
                table[name] = {"name": name_of(held, registry)} | as_table(held)
        if self.limits != NO_LIMITS:
            table["limits"] = as_table(self.limits)
        table["egress"] = {block: {d: list(k) for d, k in row.items()} for block, row in self.egress.items()}
        return table


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file.

    Args:
        path: the TOML file.
        overrides: `section.key=value` as on the command line; the value is TOML, or a word without quotes.

    Raises:
        RecipeError: with the file, the section, the key, what is allowed and the nearest name.
    """
    path = Path(path)
    table = read_table(path, overrides)
    try:
        return parse_recipe(table, name=path.stem)
    except RecipeError as error:
        raise type(error)(f"{called(path, overrides)}: {error}") from None


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe's file as a table and apply overrides; classes that it names are not imported.

    Raises:
        RecipeError: the file cannot be read, is not valid TOML, or an override does not fit it.
    """
    try:
        table = parse_toml(path.read_text(encoding="utf-8-sig"))  # Windows editors put a byte order mark first
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror or error}. Give the path of a TOML file") from None
    except ValueError as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from None
    for override in overrides:
        apply(table, override)
    return table


def recipe_of(given: Recipe | str | Path) -> Recipe:
    """The recipe that is given, or the one at the path that is given.

    Raises:
        RecipeError: it is neither, or the file is not a valid recipe.
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
        RecipeError: with the section, the key, what is allowed and the nearest name.
    """
    sections = dict(table)
    sections.pop("versions", None)  # a resolved recipe names the versions it ran with, and can be run again
    top: dict[str, Any] = {key: sections.pop(key) for key in ("seed", "rounds") if key in sections}
    for key, value in sections.items():
        refuse_unknown(key)
        if not isinstance(value, Mapping):
            raise RecipeError(f"'{key}' is a section: write [{key}] and its keys below it")
    for section in ("data", "algorithm", "model"):
        if section not in sections:
            raise RecipeError(f"section [{section}] is missing")
    refuse_no_training(top, sections.get("train", {}))
    clients = build("[clients]", ClientsSpec, sections.get("clients", {}))
    data = dict(sections["data"])
    stack = {"stack": data.pop("stack")} if "stack" in data else {}
    return Recipe(
        **checked("", Recipe, top),
        data=build("[data]", *_class("[data]", SOURCES, Source, data)),
        **checked("[data]", Recipe, stack),
        clients=clients,
        task=_named("task", OBJECTIVES, Objective, sections),
        model=build("[model]", ModelSpec, sections["model"]),
        algorithm=_algorithm(sections, clients),
        engine=build("[engine]", EngineSpec, sections.get("engine", {})),
        checkpoint=build("[checkpoint]", CheckpointSpec, sections.get("checkpoint", {})),
        egress=egress_table(sections.get("egress", {})),
        limits=build("[limits]", Limits, sections.get("limits", {})),
        **{name: build(f"[{name}]", cls, sections[name]) for name, cls in OPTIONAL.items() if name in sections},
        tracking=_named("tracking", TRACKERS, Tracker, sections),
        name=name,
    )


def build(where: str, cls: type, table: Mapping[str, Any], **given: Any) -> Any:
    """Build a section's dataclass, and warn about options without effect.

    A dataclass may have an attribute `idle`, option -> reason, for the options that have no effect beside others. A
    warning names those that the section sets to something else than the default.

    Args:
        where: the section, for errors, as `[train]`.
        cls: its dataclass.
        table: its keys and values.
        given: fields that are written in another section.

    Raises:
        RecipeError: an unknown option, a wrong value, or a required option is missing.
    """
    values = checked(where, cls, table, frozenset(given))
    try:
        built = cls(**values, **given)
    except TypeError as error:  # a required field
        raise RecipeError(f"{where}: {str(error).removeprefix(f'{cls.__name__}.__init__() ')}") from None
    defaults = {f.name: f.default for f in fields(cls)}
    for key, because in getattr(built, "idle", {}).items():
        if key in table and getattr(built, key) != defaults[key]:  # a resolved recipe writes all defaults out
            warnings.warn(f"{where} {key} has no effect beside {because}", PolyfedWarning, stacklevel=2)
    return built


def as_table(part: Any) -> dict[str, Any]:
    """A section's dataclass as a TOML table, without fields that are None; any other object gives an empty table."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: _toml(value) for f in fields(part) if f.init and (value := getattr(part, f.name)) is not None}


def model_table(spec: ModelSpec) -> dict[str, Any]:
    """The section [model] that describes this specification."""
    encoders = {name: _toml(entry_of(entry)) for name, entry in spec.encoders.items()}
    return as_table(spec) | spec.classes() | {"encoders": encoders}


def _toml(value: Any) -> Any:
    """A value as TOML can hold it; a value that it cannot becomes a string."""
    if dataclasses.is_dataclass(value):
        return as_table(value)
    if isinstance(value, Mapping):
        return {str(key): _toml(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_toml(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _algorithm(sections: Mapping[str, Any], clients: ClientsSpec) -> Algorithm:
    """Build the algorithm with the parts that are written in sections of their own."""
    cls, table = _class("[algorithm]", ALGORITHMS, Algorithm, sections["algorithm"])
    table = with_preset(cls, table)
    own = {f.name for f in fields(cls)}
    given: dict[str, Any] = {}
    for part, section in PARTS.items():
        if part not in own:
            if section in sections:
                raise RecipeError(
                    f"[{section}] has no effect: algorithm '{sections['algorithm']['name']}' does not use it. Remove it"
                )
            continue
        entry = sections.get(section, {})
        if part == "selector":
            kind, rest = _class(f"[{section}]", SELECTORS, Selector, {"name": "uniform"} | dict(entry))
            taken: dict[str, Any] = {"participation": clients.participation, "overselect": clients.overselect}
            if "train" in {f.name for f in fields(kind)}:
                taken["train"] = given["train"]  # a selector that trains clients uses the algorithm's [train]
            given[part] = build(f"[{section}]", kind, rest, **taken)
        else:
            kind = {"train": Train, "evaluation": Evaluation, "server": ServerOptimiser}[part]
            given[part] = build(f"[{section}]", kind, entry)
    if "selector" not in own and clients.participation != 1.0:
        warnings.warn(
            f"[clients] participation = {clients.participation} has no effect: algorithm "
            f"'{sections['algorithm']['name']}' asks every client in every round",
            PolyfedWarning,
            stacklevel=2,
        )
    built: Algorithm = build("[algorithm]", cls, table, **given)
    return built


def _named(section: str, registry: Mapping[str, type], base: type, sections: Mapping[str, Any]) -> Any:
    """The object that a section describes by a name and options; None without the section."""
    found, where = sections.get(section), f"[{section}]"
    return None if found is None else build(where, *_class(where, registry, base, found))


def _class(
    where: str, registry: Mapping[str, type], base: type, table: Mapping[str, Any]
) -> tuple[type, dict[str, Any]]:
    """The class that a section names, and the section's other keys."""
    rest = dict(table)
    name = rest.pop("name", None)
    if name is None:
        raise RecipeError(f"{where} needs a name; {did_you_mean('', registry)}")
    try:
        return find(str(name), registry, base), rest
    except RecipeError as error:
        raise type(error)(f"{where} name = {error}") from error
