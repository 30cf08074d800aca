"""Reads a pandas data frame: decides which columns are modalities, labels, natural clients and splits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data.cell_values import array_of, is_list, is_missing
from polyfed.data.column_grouping import chosen, grouped
from polyfed.data.row_facts import missing
from polyfed.data.table_draft import Draft

if TYPE_CHECKING:
    import pandas as pd

Partial = Literal["refuse", "absent"]
Modalities = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The meaning of a table's columns.

    Attributes:
        modalities: modality -> its column, a pattern with `*`, or a list of these; None guesses with `grouped`.
        label: column of the labels, or a list of columns of targets.
        client: column of the natural clients; empty if there is none.
        split: column of the splits; empty if there is none.
        partial: what to do with a row that has only some cells of a modality.
        optional: columns of `client` and `split` that may be missing, because the user did not name them.
    """

    modalities: Modalities | None = None
    label: str | Sequence[str] = "label"
    client: str = "client"
    split: str = "split"
    partial: Partial = "refuse"
    optional: tuple[str, ...] = ("client", "split")

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the label columns."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)


def drafted(frame: "pd.DataFrame", where: str, name: str, roles: Roles, problems: Problems, **more: Any) -> Draft:
    """Read the parts of a data frame into a draft.

    Args:
        frame: the data frame.
        where: the name of the data frame in messages.
        name: name of the data set.
        roles: the meaning of its columns.
        problems: faults are added to this object.
        more: more attributes of `Draft`.
    """
    frame = frame.rename(columns=str)
    if doubled := sorted(set(frame.columns[frame.columns.duplicated()])):
        text = f"{where} has several columns named {', '.join(map(repr, doubled))}. Rename or remove the copies"
        problems.add(DataError(text))
        frame = frame.loc[:, ~frame.columns.duplicated()]
    columns = list(frame.columns)
    facts = {role: _fact(frame, role, getattr(roles, role), roles, where, problems) for role in ("client", "split")}
    labels = problems.attempt(lambda: _labels(frame, roles, where))
    special = {roles.client, roles.split, *roles.labels}
    notes: list[str] = []
    if roles.modalities is None:
        groups = guessed(frame, special, notes)
    else:
        groups = problems.attempt(lambda: chosen(roles.modalities or {}, columns, where)) or {}
        _refuse_answers(groups, roles, where, problems)
    if not groups and not problems.found:
        problems.add(DataError(f"{where} has no column of numbers beside {', '.join(sorted(special & {*columns}))}"))
    values: dict[str, Any] = {}
    present: dict[str, Any] = {}
    for modality, group in groups.items():
        with problems.noting():
            values[modality], there, note = _values(frame, group, f"{where}: modality '{modality}'", roles.partial)
            if not there.all():
                present[modality] = there
            notes += [f"modality '{modality}': {note}"] if note else []
    found: dict[str, Any] = {
        "labels": labels if labels is not None else np.zeros(len(frame), np.int64),
        "modalities": values,
    }
    names = roles.labels if not isinstance(roles.label, str) and len(roles.labels) > 1 else None
    facts_of: dict[str, Any] = {"clients": facts["client"], "split": facts["split"], "class_names": names}
    return Draft(name=name, where=where, present=present, notes=tuple(notes), **(found | facts_of | more))


def guessed(frame: "pd.DataFrame", special: Iterable[str], notes: list[str]) -> dict[str, list[str]]:
    """Guess the columns of each modality from names and types, and add a sentence about the guess to `notes`."""
    found: dict[str, list[str]] = {"number": [], "list": [], "text": []}
    for column in frame.columns:
        if column in special:
            continue
        found[kind_of(frame[column])].append(column)
    groups, texts = grouped(found["number"], found["list"]), found["text"]
    for modality, group in groups.items():
        shown = group[0] if len(group) == 1 else f"{len(group)} columns {group[0]} to {group[-1]}"
        notes.append(f"modality '{modality}': {shown}")
    if texts:
        notes.append(
            f"left out, because they hold texts: {', '.join(texts)}. If one of them names the client of a row, name it "
            "as client. Texts to train on must be numbers or token ids; the source `hf` reads texts with a pretrained "
            "model"
        )
    return groups


def kind_of(column: "pd.Series[Any]") -> Literal["number", "list", "text"]:
    """Return what the cells of a column hold: single numbers, several numbers, or words."""
    if column.dtype.kind in "iufb":
        return "number"
    held = [cell for cell in column.head(100).tolist() if not is_missing(cell)]
    if held and all(is_list(cell) for cell in held):
        return "list"
    numbers = all(isinstance(cell, int | float | np.number) for cell in held)
    return "number" if held and numbers else "text"


def _refuse_answers(groups: Mapping[str, Sequence[str]], roles: Roles, where: str, problems: Problems) -> None:
    """Note columns of labels, clients or splits that are also features, since a model would read the answer there."""
    meaning = {roles.split: "split", roles.client: "client"} | dict.fromkeys(roles.labels, "label")
    for modality, group in groups.items():
        for column in group:
            if column in meaning:
                text = f"{where}: column '{column}' is the {meaning[column]} and also part of modality '{modality}'"
                problems.add(DataError(f"{text}. Name the columns of the modality without it"))


def _fact(frame: "pd.DataFrame", role: str, column: str, roles: Roles, where: str, problems: Problems) -> Any:
    """Return the column of the natural clients or of the splits; None if there is no such column."""
    if not column or (column not in frame.columns and role in roles.optional):
        return None
    if column not in frame.columns:
        hint = did_you_mean(column, list(frame.columns)[:50])
        problems.add(DataError(f"{where} has no column '{column}' for the {role}s; {hint}"))
        return None
    return _facts(frame, column)


def _labels(frame: "pd.DataFrame", roles: Roles, where: str) -> Any:
    for column in roles.labels:
        if column not in frame.columns:
            hint = did_you_mean(column, list(frame.columns)[:50])
            raise DataError(f"{where} has no column '{column}' for the labels; name the right one as label. {hint}")
    if not isinstance(roles.label, str):
        return frame[list(roles.labels)].to_numpy(np.float32)
    found = _facts(frame, roles.label)
    if found.dtype.kind == "f" and len(found):
        gone = np.isnan(found)
        if gone.any() and (found[~gone] == np.round(found[~gone])).all():  # whole numbers, except for empty cells
            raise missing(gone, f"{where}: column '{roles.label}'")
    return found


def _facts(frame: "pd.DataFrame", column: str) -> NDArray[Any]:
    """Return a column as a NumPy array: numbers unchanged, words and anything else as objects."""
    series = frame[column]
    if series.dtype.kind in "iufb" and hasattr(series.dtype, "itemsize") and not hasattr(series.array, "_mask"):
        found: NDArray[Any] = series.to_numpy()
        return found
    return np.array(
        [None if is_missing(cell) or str(cell) == "<NA>" else cell for cell in series.tolist()], dtype=object
    )


def _values(
    frame: "pd.DataFrame", group: Sequence[str], where: str, partial: Partial
) -> tuple[Any, NDArray[np.bool_], str]:
    """Return the values of a modality (N, ...), which rows have it, and a note."""
    if len(group) == 1 and kind_of(frame[group[0]]) == "list":
        return array_of(frame[group[0]].tolist(), where)
    problems = Problems()
    read = [problems.attempt(lambda column=column: _numbers(frame, column, where)) for column in group]  # type: ignore[misc]
    problems.raise_all()
    values = np.stack([column for column in read if column is not None], 1)
    empty: NDArray[np.bool_] = np.isnan(values)
    there: NDArray[np.bool_] = ~np.asarray(empty.all(1))
    partly = np.asarray(empty.any(1)) & there
    note = ""
    if partly.any():
        text = f"{int(partly.sum())} rows have some of its cells and lack others, first row {int(partly.argmax())}"
        if partial == "refuse":
            raise DataError(
                f"{where}: {text}. Fill the empty cells in, or set partial = 'absent' to treat these rows as rows "
                "without this modality"
            )
        there, note = there & ~partly, f"{text}; they count as rows without it"
    return np.where(there[:, None], values, np.float32(0.0)), there, note


def _numbers(frame: "pd.DataFrame", column: str, where: str) -> NDArray[np.float32]:
    """Return a column of single numbers as float32, with NaN for empty cells."""
    import pandas as pd  # imported here, because the import takes half a second

    numbers = pd.to_numeric(frame[column], errors="coerce") if frame[column].dtype.kind not in "iufb" else frame[column]
    values: NDArray[np.float32] = numbers.to_numpy(dtype=np.float32, na_value=np.nan)
    gone = np.array([is_missing(cell) for cell in frame[column].tolist()])
    if (wrong := np.isnan(values) & ~gone).any():
        row = int(wrong.argmax())
        raise DataError(
            f"{where}: column '{column}' holds {frame[column].iloc[row]!r} at row {row} among its numbers. Give "
            "numbers only, or leave the column out"
        )
    return values
