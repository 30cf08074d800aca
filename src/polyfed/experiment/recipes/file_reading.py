"""Reads a file of your own and guesses what its arrays or columns mean, for `polyfed init` and for Python functions."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import DataError, PolyfedError, RecipeError, again, command, counted, did_you_mean, typed_verb
from polyfed.core.option_checks import checked
from polyfed.core.problems import Problems, copied
from polyfed.data import Columns
from polyfed.data.column_rules import WHOLE, rules_of, suggestion
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.reading.column_guess import (
    MAY_BE_NONE,
    MOST_NAMED,
    column_names,
    guessed,
    row_ids,
    rule_for,
    times_among,
)
from polyfed.data.reading.frames import filling
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import SUFFIXES, Dialect, Table, read, word_columns
from polyfed.data.whole_columns import SUFFIXES as IMAGES
from polyfed.experiment.recipes.parts import build

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("label", "labels", "class", "target", "y", "category", "diagnosis", "emotion", "activity", "outcome")
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
    "person",
    "person_id",
    "participant",
    "participant_id",
    "site",
    "hospital",
    "clinic",
)
SPLITS = ("split", "subset", "partition")
"""In `LABELS`, `CLIENTS` and `SPLITS`: the names that polyfed looks for in a file, in this order."""

_ARGUMENTS = {"label": "labels", "client": "clients", "split": "split"}
"""A map from the keys of [data] to the arguments of `polyfed.run`."""


@dataclass(frozen=True)
class Reading:
    """A file as polyfed reads it.

    Attributes:
        source: the source.
        columns: the table that the file holds. The table's notes name everything that was guessed.
        table: the section [data] of a recipe that reads the same source, as a table of options.
        remarks: sentences about the guesses that change or leave out values. The Python functions issue them as
            warnings.
        doubts: those of `remarks` about columns that may be no inputs.
        times: the columns or arrays that look like the time at which a row begins.
    """

    source: Npz | Table
    columns: Columns
    table: dict[str, Any]
    remarks: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    times: tuple[str, ...] = ()


def read_file(path: Path, options: Mapping[str, Any], *, needs_labels: bool = True) -> Reading:
    """Read a file and guess everything that the options do not give.

    A row that lacks some cells of a modality counts as a row without this modality.

    Args:
        path: an .npz, .csv, .tsv, .parquet or .jsonl file, or a folder of .npy files.
        options: the options of [data] that the user has given, and `leave_out`, the columns or arrays that form no
            modality if the user names none. An option with the value None counts as not given.
        needs_labels: whether the task needs labels.

    Raises:
        PolyfedError: the file cannot be read, or no labels or modalities are found in it.
    """
    found = existing(path, "data")
    is_arrays = found.is_dir() or found.suffix == ".npz"
    if found.is_dir() and not any(found.glob("*.npy")):
        raise DataError(_of_folder(found))
    if not is_arrays and found.suffix not in SUFFIXES:
        allowed = f".npz, {', '.join(SUFFIXES)}, or a folder of .npy files"
        raise DataError(f"'{path}' is no file that polyfed reads. Allowed: {allowed}")
    options = dict(options)
    left = tuple(options.pop("leave_out", None) or ())
    if left and options.get("modalities"):
        raise RecipeError("leave_out says what the guess leaves out, and modalities is given. Name its columns there")
    notes: list[str] = [f"left out, as you said: {', '.join(left)}"] if left else []
    remarks: list[str] = []
    problems = Problems()
    source: Npz | Table
    columns: Columns | None = None
    table: dict[str, Any] = {}
    times: list[str] = []
    with problems.noting():
        if is_arrays:
            left = _known(left, Arrays(found).names, str(found), problems)
            table = {"path": str(path)} | _of_arrays(found, options, notes, remarks, needs_labels, left)
            source = build("[data]", Npz, table)
            columns = source.load()
            times = times_among(_single(Arrays(found)))
        else:
            frame = read(found, problems, partial(_words, options), dialect_of(options))
            problems.raise_all()
            left = _known(left, [str(name) for name in frame.columns], str(found), problems)
            table = {"path": str(path)} | _of_table(frame, str(found), options, notes, remarks, needs_labels, left)
            reader: Table = build("[data]", Table, table)
            source, columns = reader, reader.columns_of(frame, found, Problems())
            times = times_among({str(name): frame[name] for name in frame.columns})
    problems.found = [_with_guess(fault, options, table) for fault in problems.found]
    problems.raise_all()
    assert columns is not None
    notes += columns.notes
    doubts = tuple(remark for remark in remarks if MAY_BE_NONE in remark)
    return Reading(source, replace(columns, notes=tuple(notes)), table, tuple(remarks), doubts, tuple(times))


def _with_guess(fault: PolyfedError, options: Mapping[str, Any], table: Mapping[str, Any]) -> PolyfedError:
    """Return a fault of a column, which says so if only its name made it the column of labels, clients or splits."""
    for role, argument in _ARGUMENTS.items():
        if options.get(role) is None and f"the {role} column {table.get(role)!r}" in str(fault):
            other = again((f"--{role}", "NAME"), otherwise=f"{argument}='NAME'")
            return copied(
                fault, f"{fault}. Only its name made it the column of the {argument}; to name another: {other}"
            )
    return fault


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    """Return how a text file is written, according to the options of [data].

    Raises:
        RecipeError: an option is wrong.
    """
    names = {f.name for f in fields(Dialect)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    made = Dialect(**checked("[data]", Dialect, given))
    made.check()
    return made


def _words(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, bool]:
    """Return the columns whose cells are words even if they look like numbers; true for the labels; see `read`."""
    table = _roles(names, options, "", False, [], [])
    roles = {role: name for role in ("client", "split", "person", "label") if isinstance(name := table.get(role), str)}
    words = dict.fromkeys(word_columns(options.get("columns") or {}), False)
    words |= {column: False for column, given in (options.get("relabel") or {}).items() if isinstance(given, Mapping)}
    return words | {name: role == "label" for role, name in roles.items()}


def _of_arrays(
    path: Path,
    options: Mapping[str, Any],
    notes: list[str],
    remarks: list[str],
    needs_labels: bool,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the options of [data] for an .npz file or a folder, and add the guesses to `notes` and `remarks`."""
    arrays = Arrays(path)
    table = _roles(arrays.names, options, str(path), needs_labels, notes, remarks)
    if not isinstance(table["label"], str):
        raise DataError(
            f"'{path}': labels = {', '.join(table['label'])} are several arrays. Save the targets of a row as one "
            "array (N, T) of floats, and name this array"
        )
    if "modalities" in table:
        return table
    special = {value for value in table.values() if isinstance(value, str)}
    special |= {"id", "label_name", Npz.split_personal, f"{table['label']}_known"}
    special |= {name for name in arrays.names if name == Npz.person and len(arrays.form(name)[0]) == 1}
    special |= {f"{name}_present" for name in arrays.names}
    rest = [name for name in arrays.names if name not in special and name not in left_out]
    rules = rules_of("[data.columns]", options.get("columns"))
    kept = [name for name in rest if name in rules or (arrays[name].ndim > 1 and arrays[name].dtype.kind in "fiub")]
    if not kept:
        told = _rules_told(str(path), _rules_for(arrays, rest), table)
        raise DataError(
            f"'{path}' has no array (N, ...) of numbers beside the labels. Save each modality as an array of at "
            f"least two axes{'. ' + told if told else ''}"
        )
    if left := [name for name in rest if name not in kept]:
        text = f"left out, because they are no arrays (N, ...) of numbers with two axes or more: {', '.join(left)}"
        told = _rules_told(str(path), _rules_for(arrays, left), table)
        text += f". {told}" if told else ""
        notes.append(text)
        remarks.append(f"'{path}': {text}")
    return table | {"modalities": kept}


def _of_table(
    frame: "pd.DataFrame",
    path: str,
    options: Mapping[str, Any],
    notes: list[str],
    remarks: list[str],
    needs_labels: bool,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the options of [data] for a table, and add the guesses to `notes` and `remarks`."""
    frame = frame.rename(columns=str)
    columns = list(frame.columns)
    rules = rules_of("[data.columns]", options.get("columns"))
    table = _roles(tuple(columns), options, path, needs_labels, notes, remarks)
    if "modalities" in table:
        table["modalities"] = column_names(table["modalities"])
    label = table["label"]
    special = {*([label] if isinstance(label, str) else label), table.get("client", ""), table.get("split", "")}
    special |= {table.get("split_personal", Table.split_personal), table.get("person", "")}
    if "modalities" not in table:
        if "ids" not in table and (ids := row_ids(frame, {*special, *left_out})):
            table["ids"] = ids
        guess = guessed(frame, {*special, table.get("ids", ""), *left_out}, rules)
        if not guess.groups and any(rule in WHOLE for rule in guess.rules.values()):
            also = "The source `hf` reads texts with a pretrained model. " if "words" in guess.rules.values() else ""
            raise DataError(
                f"'{path}' has no column of numbers beside the labels. {also}{_rules_told(path, guess.rules, table)}"
            )
        more = again(("--leave-out", "COLUMN"), otherwise="polyfed init: --leave-out COLUMN")
        notes += [*guess.notes, *([f"{guess.rest} ({more})"] if guess.rest else [])]
        notes += [told] if (told := _people_told(guess.rules, table)) else []
        remarks += [f"'{path}': {sentence}" for sentence in (*guess.doubts, *guess.left_out)]
        table["modalities"] = {name: _pattern(group, columns) for name, group in guess.groups.items()}
    if "partial" not in table:
        words = {name: [group] if isinstance(group, str) else group for name, group in table["modalities"].items()}
        scalars = [[c for c in columns if any(fnmatchcase(c, word) for word in group)] for group in words.values()]
        several = [group for group in scalars if len(group) > 1]
        plain = [[c for c in group if c not in rules or not rules[c].fills] for group in several]
        empty = [frame[group].isna().to_numpy() for group in plain]
        whole = [frame[group].isna().to_numpy().all(1) for group in several]
        if count := sum(int((gone.any(1) & ~every).sum()) for gone, every in zip(empty, whole, strict=True)):
            table["partial"] = "absent"
            remarks.append(
                f"'{path}': {counted(count, 'sample has', 'samples have')} only some of the cells of a modality and "
                "count as samples without it. Fill the cells in, set partial='refuse', or use the mean, as in "
                f"{filling(frame, [c for group in plain for c in group if frame[c].isna().any()][:MOST_NAMED])}"
            )
    return table


def _known(left_out: Sequence[str], names: Sequence[str], where: str, problems: Problems) -> tuple[str, ...]:
    """Return the columns or arrays to leave out that the file has, and note those that it does not have."""
    for name in left_out:
        if name not in names:
            problems.add(RecipeError(f"leave_out: '{where}' has no '{name}'; {did_you_mean(name, names[:50])}"))
    return tuple(name for name in left_out if name in names)


def _single(arrays: Arrays) -> "dict[str, pd.Series[Any]]":
    """Return the arrays (N,) of numbers as columns of a table."""
    import pandas as pd

    held = {name: arrays[name] for name in arrays.names}
    return {name: pd.Series(a.tolist()) for name, a in held.items() if a.ndim == 1 and a.dtype.kind in "iuf"}


def _rules_told(path: str, rules: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """Return how `polyfed init` reads columns of image files and texts, or "" if there are none.

    Args:
        path: the data file.
        rules: the entries of [data.columns] that would make numbers of columns that are left out.
        table: the options of [data] so far, which the printed command repeats.
    """
    whole = {column: rule for column, rule in rules.items() if rule in WHOLE}
    people = _people_told(rules, table)
    if not whole:
        return people
    label = ["--label", table["label"]] if isinstance(table.get("label"), str) and table["label"] != "label" else []
    label += ["--client", table["client"]] if table.get("client", "client") != "client" else []
    known = {column: rule for column, rule in (table.get("columns") or {}).items() if isinstance(rule, str)}
    words = [word for column, rule in {**known, **whole}.items() for word in ("--column", f"{column}={rule}")]
    means = " and ".join(f"{column} as {MEANS[rule]}" for column, rule in whole.items())
    result = suggestion(whole) if typed_verb() else command("init", path, *label, *words)
    return f"To read {means}, write {result}" + (f". {people}" if people else "")


def _people_told(rules: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """Return how to name the clients, if none is named and a column of few words may name them, or ""."""
    few = [column for column, rule in rules.items() if rule == "one-hot"] if "client" not in table else []
    return f"If {few[0]} names the client of a row, add {shlex.join(['--client', few[0]])}" if few else ""


MEANS = {"image": "images", "words": "texts"}
"""What the kinds in `WHOLE` read."""


def _rules_for(arrays: Arrays, names: Sequence[str]) -> dict[str, Any]:
    """Return the entry of [data.columns] that reads each array of words, if one does."""
    import pandas as pd  # imported here, because the import takes half a second

    held = {name: arrays[name] for name in names}
    result = {
        name: rule_for(pd.Series(values.astype(str).tolist()))
        for name, values in held.items()
        if values.ndim == 1 and values.dtype.kind in "US"
    }
    return {name: rule for name, rule in result.items() if rule is not None}


def _of_folder(folder: Path) -> str:
    """Return why a folder without .npy files is no data, and what to do with the tables and images in it."""
    tables = sorted(file for file in folder.iterdir() if file.suffix in (*SUFFIXES, ".npz"))
    if tables:
        commands = " or ".join(again(otherwise=command("init", table), file=table) for table in tables[:3])
        return f"'{folder}' is a folder without .npy files. Give the file in it: {commands}"
    if any(file.suffix.lower() in IMAGES for file in itertools.islice(folder.rglob("*"), 10_000)):
        table = folder / "images.csv"
        result = command("init", table, "--column", "path=image")
        result = again(("--column", "path=image"), otherwise=result, file=table) if typed_verb() == "init" else result
        return (
            f"'{folder}' holds image files and no table. Write '{table}' with a line for each image, such as "
            f"path,label,client and then cats/1.png,cat,ana. Then {result}"
        )
    return f"'{folder}' is a folder without .npy files; give an .npz file, a table, or a folder of .npy files"


def _roles(
    names: Sequence[str],
    options: Mapping[str, Any],
    where: str,
    needs_labels: bool,
    notes: list[str],
    remarks: list[str],
) -> dict[str, Any]:
    """Return the column names of labels, natural clients and splits, given in `options` or guessed from `names`.

    Each guess adds a note to `notes`. If a guessed name is not the usual one, `remarks` asks the user to confirm it.
    """
    table = {key: value for key, value in options.items() if value is not None}
    picked: dict[str, str] = {}
    for role, candidates in (("label", LABELS), ("client", CLIENTS), ("split", SPLITS)):
        if role not in table:
            lower = {name.lower(): name for name in reversed(names)}
            found = next((lower[word] for word in candidates if word in lower), None)
            if found is not None:
                table[role] = found
                notes.append(f"'{found}' gives the {_ARGUMENTS[role]}")
                if found.lower() != role:
                    picked[_ARGUMENTS[role]] = found
    if picked:
        words = ", ".join(f"'{found}' gives the {role}" for role, found in picked.items())
        named = ", ".join(f"{role}='{found}'" for role, found in picked.items())
        remarks.append(f"'{where}': {words}, because of the name. Write {named} to confirm this, or name others")
    if "label" not in table and needs_labels:
        typed = again(("--label", "NAME"), otherwise=command("init", where, "--label", "NAME"))
        raise RecipeError(
            f"'{where}' has no labels under the names {', '.join(LABELS)}. Say which are the labels: {typed}, or "
            f"labels='NAME' in Python. It has: {_listed(names)}"
        )
    return {"label": ""} | table


def _listed(names: Sequence[str]) -> str:
    """Return names for a sentence: of numbered ones the first and the last, of very many those at both ends.

    >>> _listed(["speaker", "text_0", "text_1", "text_2", "mood"])
    'speaker, text_0 to text_2, mood'
    """
    runs = [list(run) for _, run in itertools.groupby(names, key=lambda name: name.rstrip("0123456789"))]
    shown = [" to ".join((run[0], run[-1])) if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(shown if len(shown) <= 30 else [*shown[:15], "...", *shown[-15:]])


def _pattern(group: Sequence[str], columns: Sequence[str]) -> str | list[str]:
    """Return the shortest way to write a group of columns: one name, a pattern, or a list."""
    if len(group) == 1:
        return group[0]
    prefix = group[0]
    while not all(name.startswith(prefix) for name in group):
        prefix = prefix[:-1]
    prefix = prefix.rstrip("0123456789") or prefix
    fits = [column for column in columns if column.startswith(prefix)]
    special = set("*?[")
    return f"{prefix}*" if prefix and sorted(fits) == sorted(group) and not special & set(prefix) else list(group)
