"""Reads new rows, whose labels nobody knows, as the rows of a run were read, for predictions."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning, counted, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.tree import Tree
from polyfed.data.column_fitting import Features, unseen
from polyfed.data.column_rules import word_of
from polyfed.data.columns import Columns
from polyfed.data.reading.array_files import Arrays
from polyfed.data.reading.column_guess import IDS, MOST_NAMED, kind_of
from polyfed.data.reading.frames import fills_rows, frame_of, values_of
from polyfed.data.reading.given import Given, Partial, Unmeasured
from polyfed.data.reading.values import array_of, as_in_training, is_missing, tensor_of
from polyfed.data.sources.own.table_files import PLAIN, SUFFIXES, Dialect, read

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Form:
    """How the data of a run held one modality.

    Attributes:
        names: its columns, or its arrays, in order.
        layout: the axes of a sample in the data; see `Column.layout`.
    """

    names: tuple[str, ...]
    layout: str = ""


@dataclass(frozen=True)
class RowForm:
    """How a row of the data of a run became a sample.

    Attributes:
        modalities: modality -> its form. Modalities that came from no column are not in it.
        dialect: how the cells of a text file are written.
        ids: the column of row ids, if the recipe names one.
        partial: what to do with a row that has only some cells of a modality.
        unmeasured: what a row is in which every cell of a modality is empty.
    """

    modalities: Mapping[str, Form] = field(default_factory=dict)
    dialect: Dialect = PLAIN
    ids: str = ""
    partial: Partial = "refuse"
    unmeasured: Unmeasured = "absent"

    @classmethod
    def of(cls, columns: Columns, source: Any) -> "RowForm":
        """Return the form of the rows of a table.

        Args:
            columns: the table of a run.
            source: its source, which knows how the cells of a file are written.
        """
        held = {n: Form(c.names, c.layout) for n, c in columns.modalities.items() if c.names}
        ids = str(getattr(source, "ids", ""))
        partial: Partial = "absent" if getattr(source, "partial", "refuse") == "absent" else "refuse"
        unmeasured: Unmeasured = "fill" if getattr(source, "unmeasured", "absent") == "fill" else "absent"
        return cls(held, getattr(source, "dialect", PLAIN), "" if ids == "rows" else ids, partial, unmeasured)

    def given(self, folder: Path | None) -> Given:
        """Return how new rows are read, whose file is in this folder."""
        return Given(partial=self.partial, unmeasured=self.unmeasured, folder=folder)

    def as_table(self) -> dict[str, Any]:
        """Return the form as JSON values. `read` is the inverse function."""
        held = {name: {"names": list(form.names), "layout": form.layout} for name, form in self.modalities.items()}
        dialect = asdict(self.dialect)
        result = {"dialect": dialect | {"empty": list(self.dialect.empty)}, "ids": self.ids, "partial": self.partial}
        return {"modalities": held} | result | {"unmeasured": self.unmeasured}

    @classmethod
    def read(cls, value: Mapping[str, Any] | None) -> "RowForm":
        """Return the form of `as_table`; for None, one that knows no column.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, RecipeError: the value is damaged.
        """
        if value is None:
            return cls()
        held = {
            str(name): Form(tuple(map(str, f["names"])), str(f["layout"])) for name, f in value["modalities"].items()
        }
        said = dict(value["dialect"])
        dialect = Dialect(**said | {"empty": tuple(map(str, said["empty"]))})
        dialect.check()
        partial: Partial = "absent" if value["partial"] == "absent" else "refuse"
        unmeasured: Unmeasured = "fill" if value["unmeasured"] == "fill" else "absent"
        return cls(held, dialect, str(value["ids"]), partial, unmeasured)


@dataclass(frozen=True)
class NewRows:
    """New rows as samples, before shift and scale.

    Attributes:
        x: modality -> samples (n, ...).
        present: modality -> which rows have it, bool (n,).
        ids: the columns that name the rows, with the index of the rows. None if there are none.
        filled: sentences about empty cells that got a mean, as [data.columns] asks.
    """

    x: Tree
    present: Tree
    ids: "pd.DataFrame | None"
    filled: tuple[str, ...] = ()


def new_rows(
    rows: Any,
    form: RowForm,
    features: Mapping[str, Features],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    ids: Sequence[str] = (),
    folder: Path | None = None,
) -> NewRows:
    """Return the samples of new rows, and warn of what they lack. Other columns are not read.

    A modality without any of its columns is one that the rows lack.

    Args:
        rows: a data frame, or arrays by name.
        form: how the rows of the run were read.
        features: the columns of each modality with rules in [data.columns], after the fit.
        shapes: the shape of a sample of each modality in training.
        where: the name of the rows in messages.
        ids: the columns that name the rows. If empty, the run's column of ids.
        folder: the folder of the rows' file; see `Given.folder`.

    Raises:
        DataError: a column of `ids` or of a modality is missing, or cells cannot be read. The message lists all faults.
    """
    table = rows.rename(columns=str) if hasattr(rows, "iloc") else None
    held, given = rows if table is None else table, form.given(folder)
    problems, notes, filled = Problems(), list[str](), list[str]()
    x: Tree = {}
    present: Tree = {}
    lacking = {name: [column for column in one.names if column not in held] for name, one in form.modalities.items()}
    absent = [name for name, gone in lacking.items() if len(gone) == len(form.modalities[name].names)]
    if len(absent) == len(lacking):
        wanted = ", ".join(f"{name}: {_listed(one.names)}" for name, one in form.modalities.items())
        raise DataError(f"{where} has none of the columns that the model reads ({wanted}). Name them so in its header")
    for name, one in form.modalities.items():
        if name in absent:
            notes.append(f"no column of '{name}' ({_listed(one.names)}), so the model predicts all rows without it")
            continue
        if lacking[name]:
            problems.add(
                DataError(
                    f"{where}: modality '{name}' lacks {counted(len(lacking[name]), 'column', 'columns')} "
                    f"{_listed(lacking[name])}. {_adding(lacking[name], features.get(name, ()))}, or leave all columns "
                    f"of '{name}' out, and the model predicts from the other modalities"
                )
            )
            continue
        with problems.noting():
            place = f"{where}: modality '{name}'"
            values, there, told = _read(held, one, given, features.get(name), shapes[name], place)
            x[name], present[name] = values, there
            filled += _filled(held, features.get(name, ()), there)
            notes += [f"modality '{name}': {line}" for line in told]
    named = _ids(held, ids, form.ids, where, problems)
    problems.raise_all()
    notes += [] if named is None or not len(named.columns) else _repeated(named)
    for note in notes:
        warnings.warn(f"{where}: {note}", PolyfedWarning, stacklevel=4)
    return NewRows(x, present, named, tuple(filled))


def _adding(lacking: Sequence[str], features: Features) -> str:
    """Return how to add columns of a modality: empty, as far as [data.columns] says what an empty cell means."""
    filled = {f.column for f in features if f.rule is not None and f.rule.fills}
    if not (empty := [column for column in lacking if column in filled]):
        return "Add them"
    how = "get the mean of the training, or count as an empty word"
    which = "empty ones are enough" if len(empty) == len(lacking) else f"{_listed(empty)} may be empty"
    return f"Add them ({which}: the cells {how}, as [data.columns] says)"


def _repeated(named: "pd.DataFrame") -> list[str]:
    """Return a note about rows whose ids other rows have too, if there are any."""
    words = named.astype(str)
    twice = words.duplicated(keep=False)
    if not twice.any():
        return []
    names, shown = ", ".join(map(repr, named.columns)), ", ".join(words[twice].iloc[0])
    return [
        f"{int(twice.sum()):,} rows share their {names} with another row, such as {shown}; one more column of ids "
        "(--id) tells them apart"
    ]


def _ids(held: Any, ids: Sequence[str], usual: str, where: str, problems: Problems) -> "pd.DataFrame | None":
    """Return the columns that name the rows."""
    import pandas as pd  # imported here, because the import takes half a second

    for name in ids:
        if name not in held:
            problems.add(
                DataError(f"{where} has no column '{name}' for the ids; {did_you_mean(name, list(held)[:50])}")
            )
    if problems.found:
        return None
    names = list(ids) or [name for name in (usual, *IDS) if name and name in held][:1]
    if hasattr(held, "iloc"):
        return held[names] if names else pd.DataFrame(index=held.index)
    return pd.DataFrame({name: np.asarray(held[name]).tolist() for name in names}) if names else None


def _read(
    rows: Any, form: Form, given: Given, features: Features | None, shape: tuple[int, ...], where: str
) -> tuple[Tensor, Tensor, list[str]]:
    """Return the samples of a modality (n, ...), which rows have it, bool (n,), and what is to be said."""
    whole = None if hasattr(rows, "iloc") else np.asarray(rows[form.names[0]])
    if features is None and len(form.names) == 1 and whole is not None and whole.ndim > 1:
        values = as_in_training(tensor_of(whole), shape, form.layout)
        return values, _marked(rows, form.names[0], len(values)), []
    frame = rows if hasattr(rows, "iloc") else frame_of(rows, form.names, where)
    group, nothing = list(form.names), torch.zeros(len(frame), dtype=torch.bool)
    if len(group) == 1 and features is None and kind_of(frame[group[0]]) == "list":
        array, has, _ = array_of(frame[group[0]].tolist(), where)
        return _padded(as_in_training(tensor_of(array), shape, form.layout), shape), torch.from_numpy(has), []
    if not fills_rows(features or (), given) and bool(frame[group].isna().all(axis=None)):
        return torch.zeros(len(frame), *shape), nothing, ["its cells are empty in every row"]
    rules = {feature.column: feature.rule for feature in features or () if feature.rule is not None}
    result = values_of(frame, group, where, replace(given, columns=rules))
    # of rows whose columns have rules and that lack all of them, `used` says enough
    told = [result.note] if result.note and (result.cut is not None or not result.coded) else []
    if result.whole is not None:
        return torch.from_numpy(result.values), torch.from_numpy(result.there), told
    values = torch.from_numpy(np.asarray(result.values, dtype=np.float64))
    there = torch.from_numpy(np.asarray(result.there))
    if features is not None:
        told += [line for f in features if f.of_words and (line := unseen(f, _words(frame[f.column], result.there)))]
        parts = [
            feature.expanded(values[:, place].numpy(), result.coded[place].words if feature.of_words else None)
            for place, feature in enumerate(features)
        ]
        values = torch.from_numpy(np.concatenate(parts, 1))
    return as_in_training(torch.where(there[:, None], values, 0.0), shape, form.layout), there, told


def _filled(rows: Any, features: Features, there: Tensor) -> Iterator[str]:
    """Yield a sentence for each column whose empty cells get a mean."""
    for feature in features:
        if feature.imputes:
            column = np.array([is_missing(cell) for cell in np.asarray(rows[feature.column]).tolist()])
            if empty := int((column & there.numpy()).sum()):
                cells = counted(empty, "empty cell gets", "empty cells get")
                yield f"'{feature.column}': {cells} {feature.mean:g}, the mean of the training"


def _words(column: "pd.Series[Any]", there: NDArray[np.bool_]) -> list[str]:
    return [word_of(cell) for cell, read in zip(column.tolist(), there.tolist(), strict=True) if read]


def _marked(arrays: Mapping[str, Any], name: str, rows: int) -> Tensor:
    """Return which rows have a modality according to the array `NAME_present`; all of them without such an array."""
    mask = arrays.get(f"{name}_present")
    return torch.ones(rows, dtype=torch.bool) if mask is None else torch.as_tensor(np.asarray(mask, dtype=bool))


def _padded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return sequences with zeros at their end, to the length of those of the training."""
    if values.dim() != 1 + len(shape) or values.shape[2:] != shape[1:] or values.shape[1] >= shape[0]:
        return values
    longer = values.new_zeros(len(values), *shape)
    longer[:, : values.shape[1]] = values
    return longer


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more


def rows_of_file(path: str | Path, form: RowForm, features: Mapping[str, Features], more: Iterable[str] = ()) -> Any:
    """Read the rows of a file as the run's data were read: a data frame, or for an .npz file arrays by name.

    Args:
        more: columns whose cells are words, even if they look like numbers, such as row ids.

    Raises:
        DataError: the file is missing or damaged, or of a kind that polyfed does not read.
    """
    path = Path(path).expanduser()
    if path.is_dir() or path.suffix == ".npz":
        arrays = Arrays(path)
        wanted = {name for one in form.modalities.values() for name in one.names} | {*more}
        wanted |= {f"{name}_present" for name in wanted}
        return {name: arrays[name] for name in arrays.names if name in wanted}
    if not path.exists():
        raise DataError(f"'{path}' does not exist (looked from '{Path.cwd()}'). Name the file with the new rows")
    if path.suffix not in SUFFIXES:
        raise DataError(f"'{path}' holds no rows that polyfed reads. Allowed: {', '.join((*SUFFIXES, '.npz'))}")
    inputs = {name for one in form.modalities.values() for name in one.names}
    words = (
        {f.column for own in features.values() for f in own if f.of_words or f.is_whole}
        | {*more}
        | ({form.ids, *IDS} - inputs)
    )
    problems = Problems()
    result = read(path, problems, lambda _: dict.fromkeys(words, False), form.dialect)
    problems.raise_all()
    return result
