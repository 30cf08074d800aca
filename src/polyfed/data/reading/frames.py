"""Reads a pandas data frame, and decides which columns are modalities, labels, natural clients and splits."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError, PolyfedWarning, counted, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data.column_rules import Feature, feature_of, suggestion
from polyfed.data.reading.column_guess import (
    FOR_EMPTY,
    MOST_NAMED,
    WRITTEN,
    Guess,
    are_dates,
    chosen,
    guessed,
    is_numbered,
    kind_of,
    row_ids,
    rule_for,
    text_among,
)
from polyfed.data.reading.draft import Draft
from polyfed.data.reading.given import Given, Modalities
from polyfed.data.reading.person_columns import names_among
from polyfed.data.reading.row_facts import as_array, ordered_words
from polyfed.data.reading.values import array_of, is_missing, option
from polyfed.data.whole_columns import as_cells, read_cells

if TYPE_CHECKING:
    import pandas as pd


def drafted(frame: "pd.DataFrame", where: str, name: str, given: Given, problems: Problems, **more: Any) -> Draft:
    """Read the parts of a data frame into a draft.

    Args:
        frame: the data frame.
        where: the name of the data frame in messages.
        name: name of the data set.
        given: the meaning of its columns. Labels, clients, split and ids are names of columns, or empty.
        problems: faults are added to this object.
        more: more attributes of `Draft`.
    """
    frame = frame.rename(columns=str)
    if doubled := sorted(set(frame.columns[frame.columns.duplicated()])):
        text = f"{where} has several columns named {', '.join(map(repr, doubled))}. Rename or remove the copies"
        problems.add(DataError(text))
        frame = frame.loc[:, ~frame.columns.duplicated()]
    if not len(frame):
        raise DataError(f"{where} has no rows. Check where it comes from")
    given = replace(given, ids=_ids_column(frame, given))
    roles = ("clients", "split", "split_personal", "person", "ids")
    facts_of: dict[str, Any] = {role: _fact(frame, role, given, where, problems) for role in roles}
    labels, levels = problems.attempt(lambda: _labels(frame, given, where)) or (None, None)
    groups, notes = _groups(frame, given, where, problems)
    values: dict[str, Any] = {}
    present: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    coded: dict[str, tuple[Feature, ...]] = {}
    whole: dict[str, Feature] = {}
    cures: dict[str, str] = {}
    refuse_idle_rules(groups, given, where, problems)
    words = refuse_words(frame, groups, given, where, problems)
    for modality, group in groups.items():
        with problems.noting():
            if words & {*group}:  # the other columns may have faults of their own
                rest = [column for column in group if column not in words]
                values_of(frame, rest, f"{where}: modality '{modality}'", given) if rest else None
                continue
            read = values_of(frame, group, f"{where}: modality '{modality}'", given)
            values[modality] = read.values
            whole |= {modality: read.whole} if read.whole else {}
            if read.coded:
                coded[modality] = read.coded
            if not read.there.all():
                present[modality] = read.there
            if read.cut is not None:
                cut[modality] = read.cut
                cures |= {modality: read.cure} if read.cure else {}
            notes += [f"modality '{modality}': {read.note}"] if read.note else []
    result: dict[str, Any] = {"labels": labels, "modalities": values}
    if labels is None and given.label_columns and "labels" not in given.optional:
        result["labels"] = np.zeros(len(frame), np.int64)  # the fault is among the problems
    names = given.label_columns if len(given.label_columns) > 1 else levels
    facts_of |= {"class_names": names, "ids": "rows" if facts_of["ids"] is None else facts_of["ids"]}
    faulty = tuple(modality for modality in groups if modality not in values)
    told: dict[str, Any] = {"present": present, "cut": cut, "faulty": faulty, "notes": tuple(notes), "coded": coded}
    told |= {"cures": cures, "whole": whole, "names": {modality: tuple(group) for modality, group in groups.items()}}
    told["origin"] = origin_of(groups, given.label_columns, list(frame.columns))
    if facts_of["person"] is None and "person" not in more:
        told["unread_names"] = names_among(frame[[name for name in told["origin"][""] if name not in given.meaning]])
    told["called"] = _called(given, frame)
    return Draft(name=name, where=where, **(told | result | facts_of | more))


def _called(given: Given, frame: "pd.DataFrame") -> dict[str, str]:
    """Return what error messages call the columns that give the labels, the clients, the splits and the ids."""
    roles = {"label": given.labels, "client": given.clients, "split": given.split, "ids": given.ids}
    roles["person"] = given.person
    held = {role: name for role, name in roles.items() if isinstance(name, str) and name in frame.columns}
    return {role: f"the {role} column '{name}'" for role, name in held.items()}


def origin_of(
    groups: Mapping[str, Sequence[str]], labels: Sequence[str], names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return what the modalities and the labels read, and what nothing reads; see `Columns.origin`.

    Args:
        groups: modality -> its columns or arrays.
        labels: the columns of the labels.
        names: all columns of the file.
    """
    read = {name: tuple(group) for name, group in groups.items()} | {"labels": tuple(labels)}
    used = {column for group in read.values() for column in group}
    return {**read, "": tuple(name for name in names if name not in used)}


def _groups(
    frame: "pd.DataFrame", given: Given, where: str, problems: Problems
) -> tuple[Mapping[str, Sequence[str]], list[str]]:
    """Return the columns of each modality, and notes for the user.

    If the user has not named the columns, polyfed guesses them, and the notes describe the guess.
    """
    columns, special = list(frame.columns), {*given.meaning}
    groups: Mapping[str, Sequence[str]]
    guess = Guess({})
    if given.modalities is None:
        guess = problems.attempt(lambda: guessed(frame, special, given.columns)) or guess
        groups = guess.groups
    else:
        groups = problems.attempt(lambda: chosen(_modalities(given), columns, where)) or {}
        _refuse_answers(groups, given, where, problems)
    if not groups and not problems.found:
        beside = ", ".join(sorted(special & {*columns})) or "texts"
        rest = "".join(f". {sentence[0].upper()}{sentence[1:]}" for sentence in guess.left_out)
        problems.add(DataError(f"{where} has no column of numbers beside {beside}{rest}"))
    if not problems.found:
        for sentence in guess.doubtful:
            warnings.warn(f"{where}: {sentence}", PolyfedWarning, stacklevel=3)
    return groups, guess.notes


def _modalities(given: Given) -> Modalities:
    """Return modality -> its columns, empty if the user has not named them."""
    assert given.modalities is None or isinstance(given.modalities, Mapping), "tables name the columns of each modality"
    return given.modalities or {}


def _refuse_answers(groups: Mapping[str, Sequence[str]], given: Given, where: str, problems: Problems) -> None:
    """Add a fault for each column of labels, clients or splits that is also a feature and would reveal the answer."""
    meaning = given.meaning
    for modality, group in groups.items():
        for column in group:
            if column in meaning:
                text = f"{where}: column '{column}' is the {meaning[column]} and also part of modality '{modality}'"
                problems.add(DataError(f"{text}. Name the columns of the modality without it"))


def _fact(frame: "pd.DataFrame", role: str, given: Given, where: str, problems: Problems) -> Any:
    """Return the column of a role, such as the natural clients. Return None if there is no such column."""
    column = getattr(given, role)
    if not column or (column not in frame.columns and role in given.optional):
        return None
    if column not in frame.columns:
        hint = did_you_mean(column, list(frame.columns)[:50])
        problems.add(DataError(f"{where} has no column '{column}' for the {role}; {hint}"))
        return None
    return _facts(frame, column)


def _ids_column(frame: "pd.DataFrame", given: Given) -> str:
    """Return the name of the column of the row ids. Return "" if there is no column that can serve as ids."""
    if "ids" not in given.optional:
        return "" if given.ids == "rows" and "rows" not in frame.columns else str(given.ids)
    groups = _modalities(given).values()
    features = {name for group in groups for name in ([group] if isinstance(group, str) else group)}
    return row_ids(frame, {*replace(given, ids="").meaning, *features})


def _labels(frame: "pd.DataFrame", given: Given, where: str) -> tuple[Any, tuple[str, ...] | None] | None:
    """Return the labels and their levels. Return None if there are no labels.

    The levels are None unless the column is an ordered pandas Categorical.
    """
    if lacking := [column for column in given.label_columns if column not in frame.columns]:
        if "labels" in given.optional:
            return None
        hint = did_you_mean(lacking[0], list(frame.columns)[:50])
        words = ", ".join(f"'{column}'" for column in lacking)
        raise DataError(f"{where} has no column {words} for the labels; name the right ones as label. {hint}")
    if not given.label_columns:
        return None
    if not isinstance(given.labels, str):
        cure = "Several columns of labels are targets, which are numbers. If the labels are words, name one column"
        targets = [_numbers(frame, column, f"{where}: the labels", cure) for column in given.label_columns]
        return np.stack(targets, 1), None
    if (ordered := ordered_words(frame[given.labels])) is not None:
        return ordered
    result = _facts(frame, given.labels)
    if result.dtype.kind == "f" and len(result):
        gone = np.isnan(result)
        if gone.any() and (result[~gone] == np.round(result[~gone])).all():  # whole numbers, except for empty cells
            result = np.array([None if np.isnan(number) else int(number) for number in result], dtype=object)
    return result, None


def _facts(frame: "pd.DataFrame", column: str) -> NDArray[Any]:
    """Return a column as a NumPy array: numbers unchanged, words and anything else as objects."""
    series = frame[column]
    if series.dtype.kind in "iufb" and hasattr(series.dtype, "itemsize") and not hasattr(series.array, "_mask"):
        result: NDArray[Any] = series.to_numpy()
        return result
    return np.array([None if is_missing(cell) else cell for cell in series.tolist()], dtype=object)


def refuse_idle_rules(groups: Mapping[str, Sequence[str]], given: Given, where: str, problems: Problems) -> None:
    """Add a fault for each rule of a column that is in no modality."""
    used = [column for group in groups.values() for column in group]
    for column in given.columns:
        if column not in used and not problems.found:
            meaning = given.meaning.get(column)
            why = f"it is the {meaning}" if meaning else did_you_mean(column, used[:50])
            problems.add(DataError(f"{where}: [data.columns] names '{column}', which is in no modality; {why}"))


def refuse_words(
    frame: "pd.DataFrame", groups: Mapping[str, Sequence[str]], given: Given, where: str, problems: Problems
) -> set[str]:
    """Add one fault for several columns of words or dates without a rule, with the rules of all of them.

    Returns:
        These columns; empty if there is at most one, whose fault `values_of` raises.
    """
    plain = [c for group in groups.values() for c in group if c not in given.columns and len(group) > 1]
    wrong = [c for c in dict.fromkeys(plain) if are_dates(frame[c]) or kind_of(frame[c]) == "text"]
    rules = {column: rule for column in wrong if (rule := rule_for(frame[column])) is not None}
    if len(rules) < 2:
        return set()
    shown = []
    for column in [*rules][:MOST_NAMED]:
        row = int(frame[column].notna().to_numpy().argmax())
        shown.append(f"'{column}', such as {str(frame[column].iloc[row])!r} at row {row}")
    more = f", and {len(rules) - MOST_NAMED} more" if len(rules) > MOST_NAMED else ""
    problems.add(
        DataError(
            f"{where}: {len(rules)} columns of modalities hold words or dates: {', '.join(shown)}{more}. To make "
            f"numbers of them, write {suggestion(rules)}, or leave them out of `modalities`"
        )
    )
    return {*rules}


FIRST_LINE = "first line"
"""The entry of a data frame's `attrs` with the line of its row 0, if each row is one line of a text file."""


@dataclass(frozen=True)
class Read:
    """The values of a modality.

    Attributes:
        values: (N, ...).
        there: bool (N,), which rows have the modality.
        note: a sentence that tells the user how the cells were read, for example that lists were padded; may be empty.
        cut: bool (N,), the rows that have only some of the modality's values. Such a row counts as a row without the
            modality. None if there is no such row.
        cure: the rules of [data.columns] that would fill in the empty cells of the rows in `cut`.
        coded: the columns, if one of them has a rule. The values are then codes, in which NaN is an empty cell.
        whole: the column of image files or texts, if the modality consists of one.
    """

    values: Any
    there: NDArray[np.bool_]
    note: str
    cut: NDArray[np.bool_] | None = None
    coded: tuple[Feature, ...] = ()
    cure: str = ""
    whole: Feature | None = None


def values_of(frame: "pd.DataFrame", group: Sequence[str], where: str, given: Given) -> Read:
    """Return the values of a modality from its columns.

    Raises:
        DataError: cells cannot be read. The message lists all columns with such cells.
    """
    partial, rules = given.partial, given.columns
    ruled = [column in rules for column in group]
    if alone := [column for column in group if column in rules and rules[column].is_whole]:
        return _whole(frame, group, alone[0], where, given)
    if len(group) == 1 and not ruled[0] and kind_of(frame[group[0]]) == "list":
        return Read(*array_of(frame[group[0]].tolist(), where))
    problems = Problems()
    cure = "You can also leave the column out: `modalities` names the columns to use"
    features = [feature_of(column, rules.get(column), frame[column].tolist()) for column in group]
    read = [problems.attempt(lambda feature=feature: _codes(frame, feature, where, cure)) for feature in features]  # type: ignore[misc]
    problems.raise_all()
    values = np.stack([column for column in read if column is not None], 1)
    if any(ruled):
        return _of_codes(frame, features, values, where, given)
    if is_numbered(group) and all(frame[column].dtype.kind in "iu" for column in group):
        return Read(values.astype(np.int64), np.ones(len(frame), np.bool_), "")  # as in arrays, these may be token ids
    empty: NDArray[np.bool_] = np.isnan(values)
    there: NDArray[np.bool_] = ~np.asarray(empty.all(1))
    partly = np.asarray(empty.any(1)) & there
    note = cure = ""
    if partly.any():
        some = [column for place, column in enumerate(group) if empty[:, place].any()][:MOST_NAMED]
        cure = filling(frame, some)
        text = (
            f"{counted(int(partly.sum()), 'row has', 'rows have')} only some of its cells, first row "
            f"{(row := int(partly.argmax()))} without '{group[int(empty[row].argmax())]}'"
        )
        if partial == "refuse":
            raise DataError(
                f"{where}: {text}. Fill the empty cells in, or set partial = 'absent' to treat these rows as rows "
                f"without this modality, or use the mean, as in {cure}"
            )
        there, note = there & ~partly, f"{text}; such rows count as rows without it"
    return Read(np.where(there[:, None], values, 0.0), there, note, partly if note else None, cure=cure)


def _whole(frame: "pd.DataFrame", group: Sequence[str], column: str, where: str, given: Given) -> Read:
    """Return the values of a modality that consists of one column of image files or texts."""
    rule = given.columns[column]
    if len(group) > 1:
        raise DataError(
            f"{where}: column '{column}' of the kind '{rule.kind}' is a modality of its own. Name it alone, as in "
            f"modalities = {{ {column} = {json.dumps(column)} }}"
        )
    first = frame.attrs.get(FIRST_LINE)
    values, there = read_cells(rule, frame[column].tolist(), f"{where}: column '{column}'", given.folder, first)
    if not there.any():
        raise DataError(f"{where}: column '{column}' is empty in every row. Leave it out")
    lacking = int((~there).sum())
    note = f"{counted(lacking, 'row has', 'rows have')} an empty cell of '{column}' and so lack it" if lacking else ""
    return Read(values, there, note, whole=Feature(column=column, rule=rule))


@dataclass
class Joined:
    """The modalities of arrays by name, several of which may form one modality, as the columns of a table do.

    The attributes are those of `Draft`.
    """

    modalities: dict[str, Any] = field(default_factory=dict)
    present: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, Any] = field(default_factory=dict)
    coded: dict[str, tuple[Feature, ...]] = field(default_factory=dict)
    whole: dict[str, Feature] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def joined(arrays: Mapping[str, Any], given: Given, where: str, problems: Problems) -> Joined:
    """Return the modalities of arrays (N,) that `given.modalities` joins, or of which `given.columns` speaks.

    Args:
        arrays: array by name.
        given: `modalities` maps a modality to the names of its arrays. If it is None or a list, each array is one.
        where: the name of the data in messages.
        problems: faults are added to this object.
    """
    said = given.modalities if isinstance(given.modalities, Mapping) else {name: name for name in arrays}
    groups = problems.attempt(lambda: chosen(said, list(arrays), where)) or {}
    refuse_idle_rules(groups, given, where, problems)
    whole = {name for name, rule in given.columns.items() if rule.is_whole and name in arrays}
    arrays = {**arrays, **{name: as_cells(arrays[name]) for name in whole}}
    made = Joined()
    for modality, group in groups.items():
        made.names[modality] = tuple(group)
        if len(group) == 1 and group[0] not in given.columns:
            made.modalities[modality] = arrays[group[0]]
            continue
        with problems.noting():
            place = f"{where}: modality '{modality}'"
            read = values_of(frame_of(arrays, group, place), group, place, given)
            made.modalities[modality] = read.values
            made.whole |= {modality: read.whole} if read.whole else {}
            made.present |= {} if read.there.all() else {modality: read.there}
            made.coded |= {modality: read.coded} if read.coded else {}
            made.cut |= {} if read.cut is None else {modality: read.cut}
            made.notes += (f"modality '{modality}': {read.note}",) if read.note else ()
    return made


def frame_of(arrays: Mapping[str, Any], group: Sequence[str], where: str) -> "pd.DataFrame":
    """Return arrays (N,) as the columns of a table.

    Raises:
        DataError: an array has several axes, or another length.
    """
    import pandas as pd

    columns: dict[str, NDArray[Any]] = {}
    for name in group:
        values = as_array(arrays[name], f"{where}, array '{name}'")
        values = np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values
        values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if values.ndim != 1 or len(values) != len(next(iter(columns.values()), values)):
            raise DataError(
                f"{where}: array '{name}' has shape {values.shape}. Columns that are joined, or of which "
                "[data.columns] speaks, hold one value for each row"
            )
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        columns[name] = native
    return pd.DataFrame({name: pd.Series(list(v) if v.dtype.kind == "U" else v) for name, v in columns.items()})


def _codes(frame: "pd.DataFrame", feature: Feature, where: str, otherwise: str) -> NDArray[np.float64]:
    """Return a number for each cell of a column; see `Feature.coded`."""
    if feature.rule is None or feature.rule.kind == "mean":
        return _numbers(frame, feature.column, where, otherwise)
    if feature.of_words and not feature.rule.words and (text := text_among(feature.words)):
        warnings.warn(
            f"{where}: column '{feature.column}' holds texts, such as {text[:60]!r}. {feature.rule.kind} takes each "
            "whole text for one word, and each client sends its own as they are. Leave the column out, or read texts "
            "with the source `hf`",
            PolyfedWarning,
            stacklevel=3,
        )
    return feature.coded(frame[feature.column].tolist(), where)


def _of_codes(
    frame: "pd.DataFrame", features: Sequence[Feature], values: NDArray[np.float64], where: str, given: Given
) -> Read:
    """Return the values of a modality with rules. Only cells to which no rule gives a meaning are holes.

    A row lacks the modality if all of its cells are empty, except where `fills_rows` says that rules fill them.
    """
    fills = np.array([feature.rule is not None and feature.rule.fills for feature in features])
    empty = frame[[feature.column for feature in features]].isna().to_numpy()
    there: NDArray[np.bool_] = ~empty.all(1) | fills_rows(features, given)
    holes = empty & ~fills & there[:, None]
    partly: NDArray[np.bool_] = holes.any(1)
    note = cure = ""
    if fills.all() and (gone := int((~there).sum())):
        note = (
            f"{counted(gone, 'row has', 'rows have')} only empty cells, which makes it missing there (unmeasured = "
            "'absent'; 'fill' gives them the means)"
        )
    if partly.any():
        row = int(partly.argmax())
        column = features[int(holes[row].argmax())].column
        cure = filling(frame, [f.column for place, f in enumerate(features) if holes[:, place].any()][:MOST_NAMED])
        count = counted(int(partly.sum()), "row has", "rows have")
        note = f"{count} an empty cell to which [data.columns] gives no meaning, first row {row}, '{column}'"
        if given.partial == "refuse":
            raise DataError(f"{where}: {note}. Fill it in, set partial = 'absent', or write {cure}")
        note += "; such rows count as rows without it"
        there = there & ~partly
    cut = partly if partly.any() else None
    return Read(np.where(there[:, None], values, 0.0), there, note, cut, tuple(features), cure)


def fills_rows(features: Sequence[Feature], given: Given) -> bool:
    """Return whether a row has the modality even if all of its cells are empty.

    A rule that fills empty cells would have no effect on a modality of one column, if such a row lacked it.
    """
    fills = all(feature.rule is not None and feature.rule.fills for feature in features)
    return bool(features) and fills and (given.unmeasured == "fill" or len(features) == 1)


def filling(frame: "pd.DataFrame", columns: Sequence[str]) -> str:
    """Return the rules that fill in the empty cells of these columns."""
    kinds = {column: rule_for(frame[column]) for column in columns}
    return suggestion(
        {
            column: "mean" if kind is None else kind if isinstance(kind, str) else {**kind, "impute": True}
            for column, kind in kinds.items()
        }
    )


def _made_numbers(frame: "pd.DataFrame", column: str) -> str:
    """Return how to make numbers of a column of words, dates or texts."""
    rule = rule_for(frame[column])
    if rule is None:
        return "Give numbers, or read texts with a pretrained model by the source `hf`"
    return f"To make numbers of it, write {suggestion({column: rule})}"


def _cure(cell: Any) -> str:
    """Return how to correct a cell that is no number."""
    if isinstance(cell, str) and "," in cell and WRITTEN.fullmatch(cell):
        return f"Write decimal points, or read the decimal commas of a text file with {option('decimal', ',')}"
    if isinstance(cell, str) and cell.strip().lower() in FOR_EMPTY:
        return f"If it stands for an empty cell, leave the cell empty, or write {option('empty', [cell])}"
    return "Give numbers only"


def _numbers(frame: "pd.DataFrame", column: str, where: str, otherwise: str) -> NDArray[np.float64]:
    """Return a column of single numbers as float64, with NaN for empty cells.

    Raises:
        DataError: a cell is not a number. The message tells the user to correct the cell, and ends with the text
            `otherwise`, which gives an alternative.
    """
    import pandas as pd  # imported here, because the import takes half a second

    if are_dates(frame[column]):
        row = int(frame[column].notna().to_numpy().argmax())
        raise DataError(
            f"{where}: column '{column}' holds dates, such as {str(frame[column].iloc[row])!r} at row {row}. "
            f"{_made_numbers(frame, column)}. {otherwise}"
        )
    numbers = pd.to_numeric(frame[column], errors="coerce") if frame[column].dtype.kind not in "iufb" else frame[column]
    values: NDArray[np.float64] = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    gone = np.array([is_missing(cell) for cell in frame[column].tolist()])
    if (large := np.abs(values) > np.finfo(np.float32).max).any():
        row = int(large.argmax())
        raise DataError(
            f"{where}: column '{column}' holds {values[row]:g} at row {row}, and the largest number is "
            f"{np.finfo(np.float32).max:.4g}. Correct the cell. {otherwise}"
        )
    if (wrong := np.isnan(values) & ~gone).any():
        row = int(wrong.argmax())
        cell = frame[column].iloc[row]
        raise DataError(
            f"{where}: column '{column}' holds {cell!r} at row {row} among its numbers. "
            f"{_made_numbers(frame, column) if kind_of(frame[column]) == 'text' else _cure(cell)}. {otherwise}"
        )
    return values
