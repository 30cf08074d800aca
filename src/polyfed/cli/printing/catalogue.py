"""Facts about algorithms and data sources, read from their dataclasses, docstrings and tasks.

An option is a field of the dataclass, and its explanation is the entry under `Attributes:`. The tasks declare which
data is sent. The reference pages of the documentation are generated from these facts, so nobody writes them by hand.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import ALTERS, Algorithm
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.option_checks import SearchRange, Within, default_of, not_searched, search_ranges
from polyfed.core.registry import find
from polyfed.core.tasks import info_of, tasks_of, types_of
from polyfed.data import SOURCES
from polyfed.data.sources import Facts
from polyfed.experiment.checks.privacy_support import can_send, privacy_in_words, secure_in_words
from polyfed.experiment.recipes.sections import PARTS
from polyfed.privacy.egress.announcement import Holder

ALL = Holder(("modalities",), ("modalities",), ("modalities",))
"""A client that holds every modality."""


@dataclass(frozen=True)
class Option:
    """A key of a recipe's section.

    Attributes:
        kind: the type, as in the source code.
        default: the default in TOML. Empty if the key is required.
        about: the explanation.
        search: the values that a search tries by default, or "not searched: " and why. Empty if the option has neither.
    """

    name: str
    kind: str
    default: str
    about: str
    search: str = ""


@dataclass(frozen=True)
class Carried:
    """A field of a message that a client receives or sends.

    Attributes:
        way: `down` for a field that the client receives, otherwise the destination of the reply.
        blocks: the blocks of the model that the field can hold.
    """

    task: str
    way: str
    field: str
    kind: str
    blocks: str


def algorithm_named(name: str) -> type[Algorithm]:
    """The class that `[algorithm] name` selects.

    Raises:
        RecipeError: there is no algorithm of this name; the message suggests a similar one.
    """
    try:
        cls: type[Algorithm] = find(name, ALGORITHMS, Algorithm)
    except RecipeError as error:
        raise type(error)(f"algorithm {error}") from error
    return cls


def source_named(name: str) -> type:
    """The class that `[data] name` selects.

    Raises:
        RecipeError: there is no data source of this name; the message suggests a similar one.
    """
    if name not in SOURCES:
        raise RecipeError(f"no data source '{name}'; {did_you_mean(name, SOURCES)}")
    return SOURCES[name]


def facts_of_source(cls: type) -> Facts:
    """The description of a data source: modalities, licence, how to obtain it."""
    facts: Facts = cls.describe()  # type: ignore[attr-defined]
    return facts


def headline(cls: type) -> str:
    """The first line of the docstring of an algorithm's file: its name and idea."""
    return explanation(cls).partition("\n")[0]


def explanation(cls: type) -> str:
    """The docstring of an algorithm's file: idea, paper, choices."""
    module = inspect.getdoc(sys.modules[cls.__module__])
    return (module or inspect.getdoc(cls) or "").strip()


def options(cls: type, leave_out: tuple[str, ...] = ()) -> list[Option]:
    """Return the keys of a section: first the keys of the class itself, then the inherited keys."""
    about: dict[str, str] = {}
    origin: dict[str, int] = {}
    for depth, base in enumerate(cls.__mro__):
        for name, text in attributes(base).items():
            about.setdefault(name, text)
        for name in vars(base).get("__annotations__", {}):
            origin.setdefault(name, depth)
    own = [f for f in dataclasses.fields(cls) if f.init and f.name not in leave_out]
    ordered = sorted(own, key=lambda f: origin[f.name])
    searched = {name: _values(entry) for name, entry in search_ranges(cls).items()}
    searched |= {name: f"not searched: {entry.why}" for name, entry in not_searched(cls).items()}
    return [
        Option(f.name, _kind(f.type), _default(f), about.get(f.name, ""), searched.get(f.name, "")) for f in ordered
    ]


def hyper_parameters(cls: type[Algorithm]) -> list[Option]:
    """Return the keys of `[algorithm]`, which are the fields without their own section."""
    return options(cls, leave_out=tuple(PARTS))


def attributes(cls: type) -> dict[str, str]:
    """The entries under `Attributes:` of a class's own docstring, each on one line."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    _, _, block = text.partition("Attributes:\n")
    result: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            result[name] = entry[2].strip()
        elif line.strip() and name and line.startswith(" " * 8):
            result[name] += f" {line.strip()}"
        elif line.strip():
            break
    return result


def algorithm_list() -> list[dict[str, str]]:
    """The content that `algorithms --json` prints: the name and the first line of every algorithm."""
    return [{"name": name, "about": headline(ALGORITHMS[name])} for name in sorted(ALGORITHMS)]


def algorithm_facts(name: str) -> dict[str, Any]:
    """The content that `algorithms NAME --json` prints."""
    cls = algorithm_named(name)
    return {
        "name": name,
        "about": explanation(cls),
        "options": [dataclasses.asdict(option) for option in hyper_parameters(cls)],
        "crossings": [dataclasses.asdict(row) for row in crossings(cls)],
        "privacy": protection(cls),
    }


def protection(cls: type[Algorithm]) -> dict[str, str]:
    """Return whether the algorithm supports each `unit` of [privacy], and whether it supports [secure_aggregation].

    Each text is "yes", "yes, with ..." and the required options, or "no: ..." and the reason.
    """
    units = {f'[privacy] unit = "{unit}"': privacy_in_words(cls, unit) for unit in ALTERS}
    return units | {"[secure_aggregation]": secure_in_words(cls)}


def source_list() -> list[dict[str, str]]:
    """The content that `data --json` prints: the name, title and licence of every data source."""
    facts = {name: facts_of_source(SOURCES[name]) for name in sorted(SOURCES)}
    return [{"name": name, "title": found.title, "licence": found.licence} for name, found in facts.items()]


def source_facts(name: str) -> dict[str, Any]:
    """The content that `data NAME --json` prints."""
    cls = source_named(name)
    described = dataclasses.asdict(facts_of_source(cls))
    return {"name": name} | described | {"options": [dataclasses.asdict(option) for option in options(cls)]}


def crossings(cls: type[Algorithm]) -> Iterator[Carried]:
    """Yield the message fields that an algorithm's tasks receive and send under default hyper-parameters."""
    algorithm = cls()
    for name, task in tasks_of(algorithm).items():
        got, reply = types_of(task)
        answers = [field for field in reply.kinds if can_send(algorithm, name, field)]
        if not algorithm.will_ask(name, tested=True) or (reply.kinds and not answers):
            continue  # no client ever receives this request
        for way, kind, fields in (("down", got, got.kinds), (info_of(task).scope, reply, answers)):
            for field in fields:
                yield Carried(
                    name,
                    way,
                    f"{kind.__name__}.{field}",
                    kind.kinds[field],
                    ", ".join(ALL.blocks(kind.declared[field])),
                )


def _kind(annotation: Any) -> str:
    """Return a type as text, with the choices of a Literal or the allowed range."""
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        return ", ".join([_kind(base), *(entry.words for entry in extras if isinstance(entry, Within))])
    if get_origin(annotation) is Union:  # a union of types with a Literal
        return " | ".join(_kind(part) if part is not type(None) else "None" for part in get_args(annotation))
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    text = re.sub(r"\b(?:typing|collections\.abc)\.", "", text)
    return re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | ").replace("'", '"'), text)


def _values(searched: SearchRange) -> str:
    """Return the values that a search tries, and the value of another option that they need."""
    values = ", ".join(_toml(value) for value in searched.values)
    name, *needed = searched.beside or ("",)
    return f"{values} with {name} = {' or '.join(map(_toml, needed))}" if name else values


def _default(field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    return "" if default is dataclasses.MISSING else _toml(default)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return "none" if value is None else str(value)
