"""Makes a recipe from data in memory or a data file, and from the recipe's sections as keyword arguments."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, Unpack
from warnings import warn

import numpy as np

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import ModelError, PolyfedWarning, RecipeError, did_you_mean
from polyfed.core.option_checks import checked
from polyfed.core.vocabulary import argument_for
from polyfed.data import Source
from polyfed.data.columns import Columns
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources.own.memory import Memory
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.sections import PARTS, SECTIONS, homes, misplaced
from polyfed.model import ModelSpec
from polyfed.objective import Objective, Regression
from polyfed.objective.targets import doubtful_targets


class DataOptions(TypedDict, total=False):
    """What `make_recipe` and `polyfed.run` take in addition to the data.

    Attributes:
        labels: labels of the rows (N,): words, class numbers or floats. For data frames, datasets and files, this is
            the name of a column or key, by default `label`.
        clients: the number of clients, the section [clients] as a dictionary, or the natural client of each row (N,),
            so that each natural client becomes a client. For data frames, datasets and files, you can also give the
            name of the column or key that holds the natural client of each row.
        split: split of each row (`train`, `test`, `validation`, or their codes), or the name of a column or key.
        split_personal: split of each row within its natural client (0 training, 1 own test row, 2 guard row), or the
            name of the column or array; `personal_test = "split_personal"` of [clients] uses it.
        person: person of each row, or the name of a column, key or array: random splits and partitions keep the rows of
            a person together.
        modalities: modality -> columns of a data frame or file; or names of the parts of a dataset's samples. If these
            samples are dictionaries, their other keys are not read.
        present: modality -> bool (N,), false where a row lacks the modality.
        class_names: names of the classes.
        ids: sample ids of the rows, or `rows`. The devices of a silo match their rows by these ids.
        layout: modality -> axes of a sample, such as `HWC`.
        standardise: whether to standardise all modalities, the names of those to standardise, or `uneven` (the
            default) for those whose features differ in size.
        columns: column -> how its words, empty cells or dates become numbers, as in {"sex": "one-hot", "age": "mean"}.
        partial: `refuse` or `absent`, for rows of a table that lack some cells of a modality.
        empty_rows: `refuse` or `leave-out`, for rows that lack every modality, or their class.
        unmeasured: `absent` or `fill`, for rows in which all cells of a modality are empty and `columns` fills each.
        separator: for a .csv file: the character between cells; `decimal`, `comment`, `encoding` and `empty` say more
            about how it is written, as the options of the source `table` do.
        test_share: share of every class that becomes the test set, if there is no split.
        algorithm: name of the algorithm, an object, or the section [algorithm] as a dictionary.
        rounds: number of rounds.
        seed: seed of the run.
        model: the section [model] as a dictionary, in which `module` and `fusion` may be classes or objects, and the
            `kind` of an encoder may be a class; or a `ModelSpec`. A modality without an encoder gets one that fits.
        train: the section [train] as a dictionary. Every other section is given in the same way: `selection`, `server`,
            `evaluate`, `egress`, `limits`, `privacy`, `secure_aggregation`, `attack`, `network`, `wire`, `checkpoint`,
            `stop`, `tracking`, `task`, `deployment`.
    """

    labels: Any
    clients: Any
    split: Any
    split_personal: Any
    person: Any
    modalities: Any
    present: Mapping[str, Any]
    class_names: Sequence[str]
    ids: Any
    layout: Mapping[str, str]
    standardise: bool | str | Sequence[str]
    columns: Mapping[str, Any]
    partial: str
    empty_rows: str
    unmeasured: str
    separator: str
    decimal: str
    comment: str
    encoding: str
    empty: Sequence[str]
    test_share: float
    algorithm: str | Mapping[str, Any] | Algorithm
    rounds: int
    seed: int
    model: Mapping[str, Any] | ModelSpec
    train: Mapping[str, Any]
    selection: Mapping[str, Any]
    server: Mapping[str, Any]
    evaluate: Mapping[str, Any]
    egress: Mapping[str, Any]
    limits: Mapping[str, Any]
    privacy: Mapping[str, Any]
    secure_aggregation: Mapping[str, Any]
    attack: Mapping[str, Any]
    network: Mapping[str, Any]
    wire: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    stop: Mapping[str, Any]
    tracking: Mapping[str, Any]
    task: Mapping[str, Any]
    deployment: Mapping[str, Any]


OF_TEXT_FILES = ("separator", "decimal", "comment", "encoding", "empty")
"""Options that say how a text file is written."""

OF_THE_DATA = (
    "split",
    "split_personal",
    "person",
    "modalities",
    "present",
    "class_names",
    "ids",
    "layout",
    "standardise",
    "columns",
    "partial",
    "empty_rows",
    "unmeasured",
    "test_share",
    *OF_TEXT_FILES,
)
"""Options that say how the data is read, in addition to `labels` and `clients`."""


OF_A_RUN = ("data", "out", "resume", "engine", "device", "listeners", "progress")
"""Arguments of `polyfed.run` beside the options."""


OBJECTS = ("module", "fusion")
"""Options of [model] that in Python also take a class or an object."""


def make_recipe(data: Any, **options: Unpack[DataOptions]) -> Recipe:
    """Make a recipe for your own data; `polyfed.run(data=..., ...)` runs exactly this recipe.

    Args:
        data: a dictionary of tensors or arrays by modality; a pandas data frame; a `torch.utils.data.Dataset`; a data
            set of the Hugging Face library `datasets`; a dictionary with one of these for each split; `Columns`; a
            source; or the path of an .npz, .csv, .parquet or .jsonl file.
        options: labels, clients, and the sections of a recipe; see `DataOptions`.

    Returns:
        The recipe. If the data has natural clients, each of them is a client (`by-client`). Otherwise 10 clients share
        the rows evenly. The algorithm is FedAvg unless `options` name another one.

    Raises:
        PolyfedError: the options or the data have faults. The message lists all faults of the options or, if there are
            none, of the data.
    """
    given: dict[str, Any] = dict(options)
    _refuse_unknown(given)
    read = {name: given.pop(name) for name in ("labels", *OF_THE_DATA) if name in given}
    natural, section = _clients(given.pop("clients", None))
    algorithm = given.pop("algorithm", "fedavg")
    table = {name: value for name, value in given.items() if name in ("rounds", "seed")}
    table |= {name: _section(name, value) for name, value in given.items() if name not in table}
    table["algorithm"] = _algorithm(algorithm, table)
    model = table.pop("model") if isinstance(table.get("model"), ModelSpec) else None
    table["clients"] = section
    table["data"] = {"name": "memory"}
    if natural is not None:
        section.setdefault("partition", "by-client")
    made = parse_recipe(table, name="memory")  # faults of the options come before those of the data
    source, columns = _source(data, read, natural, made.task)
    # for data in files, each run warns anew, because a recipe's file can name them
    if made.task is None and isinstance(source, Memory) and (remark := doubtful_targets(columns)):
        warn(remark, PolyfedWarning, stacklevel=3)
    if columns.client is not None and "partition" not in section and "num" not in section:
        section["partition"] = "by-client"
        made = parse_recipe(table, name="memory")
    changes: dict[str, Any] = {"data": source} | ({} if model is None else {"model": model})
    if isinstance(algorithm, Algorithm):
        changes["algorithm"] = algorithm
    if not isinstance(source, Memory):
        changes["name"] = Path(str(getattr(source, "path", "run"))).stem or "run"
    return replace(made, **changes)


def with_data(recipe: Recipe, data: Any, options: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other data, for example to supply the data of a run whose data was in memory.

    Raises:
        RecipeError: an option that does not describe the data is given. Such an option would contradict the recipe. The
            option `clients` describes the data if it is an array with the natural client of each row, or the name of
            the column with the natural clients. Other values of `clients`, such as a number of clients, are refused.
    """
    if strange := [name for name in options if name not in ("labels", "clients", *OF_THE_DATA)]:
        raise RecipeError(
            f"{strange[0]} is given beside a recipe, which has it already. Change the recipe, as in "
            "load_recipe(path, ['rounds=5']), or leave the recipe out"
        )
    natural, section = _clients(options.get("clients"))
    if section:
        raise RecipeError(
            f"clients gives '{next(iter(section))}' beside a recipe, which has the section [clients] already. Beside a "
            "recipe, clients is only the natural client of each row, an array or the name of a column. Change the "
            "recipe, as in load_recipe(path, ['clients.num=5']), or leave the recipe out"
        )
    read = {name: value for name, value in options.items() if name != "clients"}
    return replace(recipe, data=_source(data, read, natural, recipe.task)[0])


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    allowed = tuple(DataOptions.__annotations__)
    for name in [name for name in options if name not in allowed]:
        if name in OF_A_RUN:
            raise RecipeError(f"'{name}' is an argument of polyfed.run: write polyfed.run(data=..., {name}=...)")
        if sections := homes(name):
            section, value = sections[0], options[name]
            raise RecipeError(f"'{name}' belongs in a section: write {section}={{'{name}': {value!r}}}")
        advice = argument_for(name) or did_you_mean(name, (*allowed, *OF_A_RUN))
        raise RecipeError(f"there is no option '{name}'; {advice}")
    for name, value in options.items():
        if name == "model" and isinstance(value, ModelSpec):
            continue
        if name in SECTIONS and name not in ("algorithm", "clients") and not isinstance(value, Mapping):
            options_of = '{"module": ..., "blocks": {...}}' if name == "model" and callable(value) else "{...}"
            keys = f'{{"name": "{value}"}}' if isinstance(value, str) else options_of
            raise RecipeError(f"{name} is a section: write its keys in a dictionary, as in {name}={keys}")


def _clients(clients: Any) -> tuple[Any, dict[str, Any]]:
    """Return the natural clients, or None if there are none, and the section [clients]."""
    if clients is None:
        return None, {}
    if isinstance(clients, Integral) and not isinstance(clients, bool):
        return None, {"num": int(clients)}
    if isinstance(clients, Mapping):
        section = dict(clients)
        return section.pop("ids", None), section
    if not isinstance(clients, str) and np.isscalar(clients):
        raise RecipeError(
            f"clients = {clients!r}: give one client for each row, the name of a column, or the number of clients"
        )
    return clients, {}


def _section(name: str, value: Any) -> Any:
    """Return the section as a table of a recipe. A section [model] with Python objects becomes a `ModelSpec`."""
    if isinstance(value, ModelSpec):
        return value
    if name == "model" and isinstance(value.get("encoders"), Mapping):
        value = {**value, "encoders": {m: _named_encoder(m, entry) for m, entry in value["encoders"].items()}}
    objects = {key: value[key] for key in OBJECTS if not isinstance(value.get(key, ""), str)}
    if name != "model" or not objects:
        return dict(value)
    rest = {key: option for key, option in value.items() if key not in objects}
    return ModelSpec(**checked("[model]", ModelSpec, rest, advice=misplaced), **objects)


def _named_encoder(modality: str, entry: Any) -> Any:
    """Return the entry of an encoder with the path of its class instead of the class itself.

    Raises:
        ModelError: the class cannot be imported from its module, so that no recipe could name it.
    """
    entry = {"kind": entry} if isinstance(entry, type) else entry
    if not isinstance(entry, Mapping) or not isinstance(cls := entry.get("kind"), type):
        return entry
    path = f"{cls.__module__}:{cls.__qualname__}"
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls:
        raise ModelError(
            f"[model.encoders] {modality}: the class {cls.__qualname__} cannot be imported from the module "
            f'{cls.__module__}. Define it at the top level of a module, and give it as "package.module:Class"',
            ("model", "encoders", modality),
        )
    return {**entry, "kind": path}


def _algorithm(algorithm: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(algorithm, Algorithm):
        written = [name for name in PARTS.values() if name in table]
        if written:
            raise RecipeError(f"{written[0]} is given beside an algorithm object, whose fields hold it. Give it there")
        return {"name": "fedavg"}  # a placeholder, which the object itself replaces
    if isinstance(algorithm, str):
        return {"name": algorithm}
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if isinstance(algorithm, type):
        raise RecipeError(f"algorithm is the class {algorithm.__name__}: give an object, as in {algorithm.__name__}()")
    raise RecipeError(
        f"algorithm = {algorithm!r}: give its name, an object such as FedAvg(), or the section [algorithm] as a "
        "dictionary"
    )


def _refuse_values(given: Mapping[str, Any]) -> None:
    """If the data is a file, refuse arrays of values: the options must name the file's arrays or columns."""
    for name, value in given.items():
        several = name == "labels" and isinstance(value, list | tuple) and bool(value)
        named = value is None or all(isinstance(word, str) for word in (value if several else [value]))
        wrong = name in ("labels", "clients", "split", "split_personal", "person", "ids") and not named
        is_array = hasattr(value, "dtype") and not np.isscalar(value)
        if is_array or wrong:
            kind = "an array" if is_array else repr(value) if np.isscalar(value) else f"a {type(value).__name__}"
            raise RecipeError(f"{name} is {kind}, but data is a file: name the array or column of the file")


def _source(data: Any, read: Mapping[str, Any], natural: Any, task: Objective | None) -> tuple[Any, Columns]:
    """Return the data source and its table."""
    needs_labels = task is None or task.LABELLED
    if isinstance(data, str | Path):
        _refuse_values(read if natural is None else {**read, "clients": natural})
        options = {"label": read["labels"]} if "labels" in read else {}
        options |= {"client": natural} if natural is not None else {}
        options |= {name: value for name, value in read.items() if name != "labels"}
        reading = read_file(Path(data), options, needs_labels=needs_labels)
        for remark in reading.remarks:
            warn(remark, PolyfedWarning, stacklevel=5)
        return reading.source, reading.columns
    if hasattr(data, "load") and not isinstance(data, Columns):
        if read or natural is not None:
            raise RecipeError(f"{next(iter(read), 'clients')} is given, but a source reads its own")
        source_data: Source = data
        return source_data, source_data.load()
    if strange := [name for name in OF_TEXT_FILES if name in read]:
        raise RecipeError(f"{strange[0]} says how a text file is written, and data is no path of a file. Leave it out")
    given = Given(clients=natural, needs_labels=needs_labels, numeric=isinstance(task, Regression), **read)
    columns = table_of(data, given)
    return Memory.of(columns, given.standardise, given.partial, given.unmeasured), columns
