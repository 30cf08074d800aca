"""Writes a first recipe for a file of your own: what its arrays or columns are is guessed, and said in comments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.json_and_toml import parse_toml
from polyfed.core.problems import Problems
from polyfed.data import Columns
from polyfed.data.columns import moments
from polyfed.data.files import Arrays, existing
from polyfed.data.frames import guessed
from polyfed.data.sources.npz import Npz
from polyfed.data.sources.table import SUFFIXES, Table, read
from polyfed.experiment.defaults import encoder_for, encoder_text, kind_of, vocabulary_of
from polyfed.experiment.parts import build
from polyfed.experiment.recipe import parse_recipe

LABELS = ("label", "labels", "class", "target", "y", "category", "diagnosis", "emotion")
CLIENTS = (
    "client",
    "client_id",
    "user",
    "user_id",
    "subject",
    "subject_id",
    "speaker",
    "patient",
    "patient_id",
    "site",
)
SPLITS = ("split", "subset", "partition")
"""Names under which labels, natural clients and splits are looked for, in this order."""

FEW = 20
"""Training rows that a client should have: fewer clients are suggested if the rows do not suffice."""


@dataclass(frozen=True)
class Starter:
    """A recipe for a file.

    Attributes:
        text: the recipe, as TOML with comments.
        notes: sentences on everything that was guessed.
    """

    text: str
    notes: tuple[str, ...]


def starter(path: Path, options: Mapping[str, Any]) -> Starter:
    """Write a recipe for a file.

    Args:
        path: an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of .npy files.
        options: keys of [data] that are known, such as `label`.

    Raises:
        PolyfedError: the file cannot be read, or no labels or modalities are found in it.
    """
    source, columns, table = source_of(path, options, lenient=True)
    notes = list(columns.notes)
    if "split" not in table:
        table["test_share"] = source.test_share
    if uneven := _uneven(columns):
        table["standardise"] = uneven
        notes.append(f"{', '.join(uneven)}: features differ in size, so they are shifted and scaled (standardise)")
        columns = build("[data]", type(source), table).load()
    name = "npz" if isinstance(source, Npz) else "table"
    clients, words = _clients(columns, table)
    notes.append(words)
    encoders = {m: encoder_for(m, column, 64) for m, column in columns.modalities.items()}
    lacking = {m: int((~there).sum()) for m, there in columns.present.items()}
    notes += [f"'{m}' is missing in {count:,} of {len(columns):,} rows" for m, count in lacking.items()]
    notes += [f"'{m}' holds {kind_of(columns.column(m))}: {encoder_text(spec)}" for m, spec in encoders.items()]
    lines = [
        f"# A first recipe for {path}, written by `polyfed init`. Every line may be changed.",
        "# `polyfed check` says what this recipe lets leave a client; `polyfed run` trains.",
        "seed = 1",
        "rounds = 20",
        "",
        "[data]",
        f"name = {json.dumps(name)}",
        *(f"{key} = {_toml(value)}" for key, value in table.items()),
        "",
        f"[clients]  # {words}",
        *(f"{key} = {_toml(value)}" for key, value in clients.items()),
        "",
        "[model]",
        "embedding = 64  # width of what each encoder gives",
        'fusion = "concat"',
        "[model.encoders]",
        *(f"{m} = {encoder_text(spec)}  # {kind_of(columns.column(m))}" for m, spec in encoders.items()),
        "",
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
    ]
    text = "\n".join(lines)
    parse_recipe(parse_toml(text))
    return Starter(text, tuple(notes))


def source_of(
    path: Path, options: Mapping[str, Any], *, lenient: bool = False
) -> tuple[Npz | Table, Columns, dict[str, Any]]:
    """The source of a file, with everything guessed that the options do not say.

    Args:
        path: the file.
        options: keys of [data] that are known; None stands for unknown.
        lenient: whether rows that lack some cells of a modality count as rows without it, if there are any.

    Returns:
        The source; its table; and the keys of [data] that give the source.

    Raises:
        PolyfedError: the file cannot be read, or no labels or modalities are found in it.
    """
    found = existing(path, "data")
    is_arrays = found.is_dir() or found.suffix == ".npz"
    if not is_arrays and found.suffix not in SUFFIXES:
        allowed = f".npz, {', '.join(SUFFIXES)}, or a folder of .npy files"
        raise DataError(f"'{path}' is no file that polyfed reads. Allowed: {allowed}")
    table: dict[str, Any] = {"path": str(path)}
    notes: list[str] = []
    table |= _of_arrays(found, options) if is_arrays else _of_table(found, options, notes, lenient)
    source: Npz | Table = build("[data]", Npz if is_arrays else Table, table)
    columns = source.load()
    return source, replace(columns, notes=(*notes, *columns.notes)), table


def _of_arrays(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    arrays = Arrays(path)
    table = _roles(arrays.names, options, str(path))
    if not isinstance(table["label"], str):
        raise DataError(
            f"'{path}': labels = {', '.join(table['label'])} are several arrays. Save the targets of a row as one "
            "array (N, T) of floats, and name this array"
        )
    if "modalities" not in table:
        special = {value for value in table.values() if isinstance(value, str)}
        special |= {"id", "label_name", "split_personal", f"{table['label']}_known"}
        kept = [
            name
            for name in arrays.names
            if name not in special and arrays[name].ndim > 1 and arrays[name].dtype.kind in "fiub"
        ]
        if not kept:
            raise DataError(
                f"'{path}' has no array (N, ...) of numbers beside the labels. Save each modality as an array of at "
                "least two axes"
            )
        table["modalities"] = kept
    return table


def _of_table(path: Path, options: Mapping[str, Any], notes: list[str], lenient: bool) -> dict[str, Any]:
    problems = Problems()
    frame = read(path, problems)
    problems.raise_all()
    frame = frame.rename(columns=str)
    table = _roles(tuple(frame.columns), options, str(path))
    if "modalities" not in table:
        label = table["label"]
        special = {*([label] if isinstance(label, str) else label), table.get("client"), table.get("split")}
        groups = guessed(frame, special, notes)
        table["modalities"] = {name: _pattern(group, list(frame.columns)) for name, group in groups.items()}
    if lenient and "partial" not in table:
        words = {name: [group] if isinstance(group, str) else group for name, group in table["modalities"].items()}
        scalars = [[c for c in frame.columns if _fits(c, group)] for group in words.values()]
        empty = [frame[group].isna().to_numpy() for group in scalars if len(group) > 1]
        if any((gone.any(1) & ~gone.all(1)).any() for gone in empty):
            table["partial"] = "absent"
    return table


def _roles(names: Sequence[str], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The names of the labels, natural clients and splits, given or found."""
    table = {key: value for key, value in options.items() if value is not None}
    for role, candidates in (("label", LABELS), ("client", CLIENTS), ("split", SPLITS)):
        if role not in table:
            lower = {name.lower(): name for name in reversed(names)}
            found = next((lower[word] for word in candidates if word in lower), None)
            if found is not None:
                table[role] = found
    if "label" not in table:
        raise RecipeError(
            f"'{where}' has no labels under the names {', '.join(LABELS)}. Say which are the labels: "
            f"polyfed init {where} --label NAME, or labels='NAME' in Python. It has: {', '.join(names[:30])}"
        )
    return table


def _uneven(columns: Columns) -> list[str]:
    """Modalities of float vectors whose features are far from mean 0 and deviation 1."""
    found = []
    rows = columns.rows(0)
    for name, column in columns.modalities.items():
        vectors = len(column.shape) == 1 and column.values.is_floating_point() and column.shift is None
        if vectors and vocabulary_of(column) is None and len(rows):
            use = rows[columns.present[name][rows]] if name in columns.present else rows
            mean, deviation = moments(column, use)
            if float(mean.abs().max()) > 3 or float(deviation.max()) > 3 or float(deviation.max()) < 1 / 3:
                found.append(name)
    return found


def _clients(columns: Columns, table: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The section [clients], and a sentence on it."""
    train = columns.rows(0)
    if columns.client is not None:
        sizes = np.bincount(columns.client[train].numpy())
        count = int((sizes > 0).sum())
        if 2 <= count <= len(train) // 2:
            role = table.get("client", "client")
            return {"partition": "by-client"}, f"each of the {count} values of '{role}' is a client"
    count = max(2, min(10, len(train) // FEW))
    words = f"nothing names the client of a row, so {count} clients share the rows evenly"
    if columns.client is not None:
        words = (
            f"'{table.get('client', 'client')}' has hardly any value twice, so {count} clients share the rows evenly"
        )
    return {"partition": "iid", "num": count}, words


def _pattern(group: Sequence[str], columns: Sequence[str]) -> str | list[str]:
    """The shortest way to write a group of columns: one name, a pattern, or a list."""
    if len(group) == 1:
        return group[0]
    prefix = group[0]
    while not all(name.startswith(prefix) for name in group):
        prefix = prefix[:-1]
    prefix = prefix.rstrip("0123456789") or prefix
    fits = [column for column in columns if column.startswith(prefix)]
    special = set("*?[")
    return f"{prefix}*" if prefix and sorted(fits) == sorted(group) and not special & set(prefix) else list(group)


def _fits(column: str, words: Sequence[str]) -> bool:
    return any(column == word or (word.endswith("*") and column.startswith(word[:-1])) for word in words)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
