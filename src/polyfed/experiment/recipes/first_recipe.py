"""Writes a first recipe for a file of your own. It guesses what the arrays or columns mean, and says so in comments."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from warnings import warn

import numpy as np
import torch

from polyfed.core.errors import PolyfedWarning, again, typed_verb
from polyfed.core.system.json_and_toml import parse_toml, toml_value
from polyfed.data import Column, Columns
from polyfed.data.column_scaling import asked, uneven_modalities
from polyfed.data.columns import GUARD, LEFT_OUT, OWN_TEST, TEST, TRAIN, VALIDATION
from polyfed.data.leaked_labels import repeated_rows
from polyfed.data.partitions import PARTITIONS
from polyfed.data.partitions.persons import told_of_persons
from polyfed.data.population.splits import drawn_note
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.recipes.defaults import encoder_for, encoder_text, kind_of, told_of_missing, told_of_whole
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.task_choice import needs_labels, prepared
from polyfed.model import EncoderSpec, ResNet18
from polyfed.objective.targets import doubtful_targets, looks_like, units_of

REST = (
    "[train]",
    "epochs = 2  # passes over a client's rows in each round",
    "batch_size = 32",
    'optimiser = "adam"',
    "lr = 0.003",
    "",
    "[algorithm]",
    'name = "fedavg"  # `polyfed algorithms` lists the others; some need [egress] rows, which --recipe prints',
    "",
    "[engine]",
    "threads = 1  # small models are fastest with one",
    "",
)
"""The last lines of every first recipe."""

FEW = 20
"""The least training rows that a client should have. If the data has too few rows, fewer clients are suggested."""


@dataclass(frozen=True)
class Starter:
    """A recipe for a file.

    Attributes:
        text: the recipe, as TOML with comments.
        notes: sentences about everything that was guessed.
    """

    text: str
    notes: tuple[str, ...]


def starter(
    path: Path, options: Mapping[str, Any], task: str | None = None, chosen: Mapping[str, Any] = MappingProxyType({})
) -> Starter:
    """Write a recipe for a file.

    Args:
        path: an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of .npy files.
        options: the known options of [data], such as `label`.
        task: name of the task. If None, the task follows from the labels.
        chosen: the known options of [clients].

    Raises:
        PolyfedError: the file cannot be read, there is no such task, the labels do not fit it, no labels or modalities
            are found in the file, or an option of [clients] is wrong.
    """
    reading = read_file(path, options, needs_labels=needs_labels(task))
    source, columns, table, notes = reading.source, reading.columns, dict(reading.table), [*reading.columns.notes]
    doubtful = doubtful_targets(columns) if task is None else ""
    for remark in (*reading.doubts, *([doubtful] if doubtful else [])):
        warn(remark, PolyfedWarning, stacklevel=3)
    columns, drawn = _splits(columns, table, source, held_out=(apart := _held_out(chosen)))
    notes = [*(note for note in notes if note != drawn), *_scaled(columns, table)]
    name = "npz" if isinstance(source, Npz) else "table"
    clients, words = _clients(columns, table, task)
    notes += _marked(columns, clients, source.split_personal)
    clients, words = _with_chosen(clients, words, chosen)
    notes += [words, *(seen := [] if apart else _seen(columns)), *([] if apart else told_of_persons(columns))]
    if seen and reading.times and not _marks(columns) and "split" not in table:
        warn(_overlap(path, reading.times[0], table.get("client", "client")), PolyfedWarning, stacklevel=3)
    found = {m: affordable(column, encoder_for(m, column, 64)) for m, column in columns.modalities.items()}
    encoders = {m: spec for m, (spec, _) in found.items()}
    notes += _of_samples(columns, encoders)
    lines = [
        f"# A first recipe for {path}, written by `polyfed init`. Every line may be changed.",
        "# `polyfed check` says what this recipe lets leave a client; `polyfed run` trains.",
        "seed = 1",
        "rounds = 20",
        "",
        "[data]",
        f"name = {json.dumps(name)}",
        *(f"{key} = {toml_value(value)}" for key, value in table.items()),
        "",
        f"[clients]  # {words}",
        *(f"{key} = {toml_value(value)}" for key, value in clients.items()),
        "",
        "[model]",
        "embedding = 64  # width of what each encoder gives",
        'fusion = "concat"',
        "[model.encoders]",
        *(f"{m} = {encoder_text(spec)}  # {kind_of(columns.column(m))}{cost}" for m, (spec, cost) in found.items()),
        "",
        *_task(
            columns, task, sets=_has_sets(columns, task) and bool({"personal_validation", "validation"} & {*clients})
        ),
        *REST,
    ]
    text = "\n".join(lines)
    made = parse_recipe(parse_toml(text))
    if task is not None:
        prepared(made, columns)
    return Starter(text, tuple(notes))


def _of_samples(columns: Columns, encoders: Mapping[str, EncoderSpec]) -> list[str]:
    """Return notes about what the modalities hold, about rows that lack them, and about copies in the test set."""
    notes = [told_of_missing(columns, m) for m in columns.present]
    notes += [f"'{m}' holds {kind_of(columns.column(m))}: {encoder_text(spec)}" for m, spec in encoders.items()]
    notes += [line for m, spec in encoders.items() for line in told_of_whole(m, columns.column(m), spec)]
    return [*notes, *filter(None, [repeated_rows(columns, columns.rows(TRAIN), columns.rows(TEST))])]


PER_PIXEL = 2.2e-6
"""Seconds that a CPU core trains for each pixel of an image, with the default encoder of images: 71 ms for 32 images of
32 x 32 pixels. With the stem `imagenet` it takes 11 ms, a perceptron 0.6 ms."""

SLOW = 10.0
"""Seconds of a round from which images get the faster stem (ours)."""


def affordable(column: Column, spec: EncoderSpec) -> tuple[EncoderSpec, str]:
    """Return the encoder of a modality, a faster one if a round would take long, and what to say of its cost.

    Args:
        column: the modality, of whose rows about two thirds train, twice in a round.
        spec: its default encoder.
    """
    if not isinstance(spec, ResNet18) or spec.stem != "cifar":
        return spec, ""
    seconds = PER_PIXEL * math.prod(column.shape) / column.shape[0] * len(column) * 4 / 3
    if seconds > SLOW:
        return replace(spec, stem="imagenet"), f'; stem = "cifar" takes about {seconds:.0f} s a round on one CPU core'
    return spec, (
        f'; about {max(1, round(seconds))} s a round on one CPU core, stem = "imagenet" a sixth of it, '
        'kind = "mlp" a hundredth'
    )


def _has_holes(columns: Columns, task: str | None) -> bool:
    """Return whether some rows lack a modality, and some test rows have each of them, so that subsets can be scored."""
    rows = columns.rows(TEST)
    there = [bool(present.cpu()[rows].any()) for present in columns.present.values()]
    return task != "retrieval" and len(columns.modalities) > 1 and bool(there) and all(there)


def _has_sets(columns: Columns, task: str | None) -> bool:
    """Return whether conformal sets or intervals can be promised."""
    known = task or looks_like(columns.label)
    marked = len(columns.rows(VALIDATION)) > 0
    if columns.person is not None and columns.client is not None:  # a share of a client of one person would divide it
        pairs = torch.unique(torch.stack([columns.client, columns.person]), dim=1)
        marked |= pairs.shape[1] == len(torch.unique(columns.client))
    return _has_holes(columns, task) and known in ("classification", "regression") and not marked


def _evaluate(columns: Columns, task: str | None, sets: bool) -> list[str]:
    """Return the section [evaluate] for rows that lack modalities, empty without such rows."""
    if not _has_holes(columns, task):
        return []
    line = 'conformal = "split"  # run.predict_set(x): what holds the truth with 90 %, from personal_validation'
    return [
        "[evaluate]",
        'subsets = "all"  # how good the model is if modalities are missing',
        *[line] * sets,
        "",
    ]


def _marks(columns: Columns) -> bool:
    """Return whether the data marks the own test rows of its natural clients."""
    return columns.split_personal is not None and columns.client is not None


def _splits(columns: Columns, table: dict[str, Any], source: Npz | Table, *, held_out: bool) -> tuple[Columns, str]:
    """Add `test_share` to the options if there is no split.

    Args:
        columns: the table.
        table: the section [data], which this function changes.
        source: its source.
        held_out: whether [clients] says which rows are the test rows.

    Returns:
        The table, with the marked rows as test rows if nothing else says which they are; and the note about a drawn
        test set that no longer holds, or an empty text.
    """
    if _marks(columns) and not {"split", "test_share"} & table.keys():
        table["test_share"] = 0.0
        return _as_marked(columns), drawn_note(source.test_share)
    if held_out and not {"split", "test_share"} & table.keys():
        table["test_share"] = 0.0
        return columns, drawn_note(source.test_share)
    if "split" not in table:
        table["test_share"] = source.test_share
    return columns, ""


def _as_marked(columns: Columns) -> Columns:
    """Return the table with each client's own test rows as test rows, and without guard rows and a drawn test set."""
    assert columns.split_personal is not None
    split = columns.split.masked_fill(columns.split == TEST, TRAIN)
    for mark, code in ((OWN_TEST, TEST), (GUARD, LEFT_OUT)):
        split = split.masked_fill((columns.split_personal == mark) & (split == TRAIN), code)
    return replace(columns, split=split)


def _scaled(columns: Columns, table: dict[str, Any]) -> list[str]:
    """Add the modalities to standardise to the options if the user has named none, and return a note about them."""
    if "standardise" in table or not (uneven := uneven_modalities(columns, columns.rows(TRAIN))):
        return []
    table["standardise"] = list(uneven)
    every = replace(columns, standardise="uneven")
    others = [m for m in columns.modalities if m not in uneven and asked(every, m)]
    also = f", and standardise = true also scales {', '.join(others)}" if others else ""
    return [
        f"{', '.join(uneven)}: features differ in size, so they are shifted and scaled; standardise = false turns this "
        f"off{also}"
    ]


def _marked(columns: Columns, clients: dict[str, Any], name: str) -> list[str]:
    """Take the own test rows and guard rows that the data marks, if it does, and return a note about them.

    Args:
        columns: the table.
        clients: the section [clients], which this function changes.
        name: the column or array of the marks.
    """
    if not _marks(columns):
        return []
    clients.pop("personal_validation", None)
    clients["personal_test"] = "split_personal"
    assert columns.split_personal is not None
    own, guard = (int((columns.split_personal == mark).sum()) for mark in (OWN_TEST, GUARD))
    return [
        f"'{name}' marks {own:,} test rows of their own clients and {guard:,} guard rows, which are left out "
        "(personal_test). No other row is drawn at random, so there are no prediction sets"
    ]


def _overlap(path: Path, time: str, client: str) -> str:
    """Return the warning that random test rows may overlap training rows in time."""
    last, unseen = ("clients.personal_test=0.2", "clients.row_split=blocks"), ("clients.test_clients=0.2",)
    force = [("--force",)] if typed_verb() == "init" else []  # a warned init has written its recipe
    blocks, whole = (again(*(("--set", o) for o in way), *force, otherwise=", ".join(way)) for way in (last, unseen))
    return (
        f"'{path}': '{time}' looks like the time of a row, and test rows are drawn at random among the rows of each "
        f"'{client}' (test_share). If the rows are windows that overlap or follow each other, the score is too high. "
        f"If they are in the order of time, test the last ones of each '{client}' and class: {blocks}; or mark test "
        f"rows in a column split_personal (`polyfed docs partitions`); or test whole clients: {whole}"
    )


def _seen(columns: Columns) -> list[str]:
    """Return a note if natural clients have rows in training and in the test set."""
    if columns.client is None:
        return []
    train, test = (torch.unique(columns.client[columns.rows(split)]) for split in (TRAIN, TEST))
    if not (both := int(torch.isin(train, test).sum())):
        return []
    who = "people who were" if columns.person is None else "clients that were"
    return [
        f"{both} of the natural clients have rows in training and in the test set, so the score is about {who} seen in "
        "training. [clients] test_clients = 0.2 tests whole clients that take no part in it"
    ]


def _task(columns: Columns, task: str | None, *, sets: bool) -> list[str]:
    """Return the sections [task], empty if the labels alone decide the task, and [evaluate]."""
    rest = _evaluate(columns, task, sets)
    label = columns.label.float()
    units = units_of(label, columns.rows(TRAIN)) if (task or looks_like(columns.label)) == "regression" else None
    if units is None or isinstance(units[0], tuple) or isinstance(units[1], tuple):
        return ["[task]", f"name = {json.dumps(task)}", "", *rest] if task else rest
    shift, scale = (float(f"{number:.4g}") for number in units)
    return [
        "[task]",
        'name = "regression"',
        f"shift = {shift}  # mean of the training targets; the model learns (target - shift) / scale",
        f"scale = {scale}  # their standard deviation",
        "",
        *rest,
    ]


def _held_out(chosen: Mapping[str, Any]) -> bool:
    """Return whether options of [clients] say which rows are tested, so that no others are drawn."""
    own = chosen.get("row_split") == "blocks" and "personal_test" in chosen
    return own or bool({"test_clients", "folds"} & {*chosen})


def _with_chosen(clients: dict[str, Any], words: str, chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the section [clients] with the user's options in place of the guesses that they contradict."""
    if "validation" in chosen:
        clients = {key: value for key, value in clients.items() if key != "personal_validation"}
    if "partition" not in chosen:
        return clients | dict(chosen), words
    given = chosen["partition"]
    kind: Any = PARTITIONS.get(given) if isinstance(given, str) else None
    gone = {"partition", *(() if kind is not None and "num" in {f.name for f in fields(kind)} else ("num",))}
    kept = {key: value for key, value in clients.items() if key not in gone}
    return kept | dict(chosen), f"clients are those of the partition '{given}', as you said"


def _clients(columns: Columns, table: Mapping[str, Any], task: str | None) -> tuple[dict[str, Any], str]:
    """Return the section [clients], and a sentence about it."""
    train, held = columns.rows(0), dict[str, Any](personal_validation=0.2) if _has_sets(columns, task) else {}
    if columns.client is not None:
        sizes = np.bincount(columns.client[train].numpy())
        count = int((sizes > 0).sum())
        if 2 <= count <= len(train) // 2:
            role = table.get("client", "client")
            return {"partition": "by-client"} | held, f"each of the {count} values of '{role}' is a client"
    count = max(2, min(10, len(train) // FEW))
    words = f"nothing names the client of a row, so {count} clients share the rows evenly"
    if columns.client is not None:
        words = (
            f"'{table.get('client', 'client')}' has hardly any value twice, so {count} clients share the rows evenly"
        )
    return {"partition": "iid", "num": count} | held, words
