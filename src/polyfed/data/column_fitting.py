"""Fits [data.columns] to the training rows of the clients: each tells its words and means, and all use the union.

In a simulation, and on devices, a client tells the same: `statistics` of its own training rows. `agreed` joins them,
and `encoded` turns the codes of a table into the numbers that a model reads.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning, counted
from polyfed.data.column_rules import MOST_WORDS, Feature, shape_of, suggestion, word_of
from polyfed.data.columns import Column, Columns
from polyfed.data.whole_columns import as_cells, read_cells

Features = tuple[Feature, ...]


@dataclass(frozen=True)
class Told:
    """What a client tells about one column: its words, or the number and the sum of its cells that are not empty."""

    words: tuple[str, ...] = ()
    count: int = 0
    total: float = 0.0

    @property
    def bytes(self) -> int:
        """The size in a message: the words in UTF-8, each with its end, or two numbers."""
        return sum(len(word.encode()) + 1 for word in self.words) or 16


Statistics = Mapping[str, Mapping[str, Told]]
"""Modality -> column -> what a client tells about it. Only columns that are fitted are in it."""


def fits(columns: Columns) -> dict[str, Features]:
    """Return the modalities that are not yet turned into numbers, with their columns."""
    return {name: column.coded for name, column in columns.modalities.items() if column.coded is not None}


def statistics(
    columns: Columns, rows: Tensor, held: Iterable[str] | None = None, least: int = 0
) -> dict[str, dict[str, Told]]:
    """Return what a client tells about its training rows.

    Args:
        columns: the table, with codes.
        rows: the training rows of the client, int64 (n,).
        held: the modalities that the client holds. If None, all of them.
        least: how many rows a word or a mean must have so that the client tells it, whatever the rule says.
    """
    result: dict[str, dict[str, Told]] = {}
    for name, features in fits(columns).items():
        if held is not None and name not in held:
            continue
        use = rows[columns.present[name].cpu()[rows]] if name in columns.present else rows
        codes = columns.modalities[name].raw(use).double().numpy()
        told = {
            feature.column: _told(feature, codes[:, place], least)
            for place, feature in enumerate(features)
            if feature.rule is not None and feature.rule.is_fitted
        }
        if told and len(use):
            result[name] = told
    return result


def _told(feature: Feature, codes: Any, least: int) -> Told:
    assert feature.rule is not None
    if not feature.of_words:
        known = codes[~np.isnan(codes)]
        enough = len(known) >= max(feature.rule.min_rows, least)
        return Told(count=len(known), total=float(known.sum())) if enough else Told()
    places, counts = np.unique(codes[codes >= 0].astype(np.int64), return_counts=True)
    often = places[counts >= max(feature.rule.min_rows, least)].tolist()
    return Told(words=tuple(sorted(feature.words[place] for place in often)))


def agreed(
    columns: Mapping[str, Features], told: Sequence[Statistics], where: str, *, lenient: bool = False
) -> dict[str, Features]:
    """Return the columns of each modality after the fit.

    The words of a column are those that a client told or the recipe names. The mean is that over the cells of all
    clients, rounded to float32.

    Args:
        columns: modality -> its columns before the fit.
        told: what each client told.
        where: the name of the data in error texts.
        lenient: whether a column may have no words and no mean, because other clients may have them.

    Raises:
        DataError: no client told a word or a number of a column, or there are too many words.
    """
    return {
        name: tuple(
            _agreed(feature, [one.get(name, {}).get(feature.column) for one in told], where, lenient) for feature in own
        )
        for name, own in columns.items()
    }


def _agreed(feature: Feature, told: Sequence[Told | None], where: str, lenient: bool) -> Feature:
    rule, known = feature.rule, [one for one in told if one is not None]
    if rule is None:
        return feature
    what = f"{where}: column '{feature.column}'"
    if feature.of_words:
        words = rule.words or tuple(sorted({word for one in known for word in one.words}))
        if not words and lenient:
            words = ("",)
        if not words:
            stated = suggestion({feature.column: {"kind": rule.kind, "words": ["..."]}})
            raise DataError(
                f"{what}: no client has a word in {rule.min_rows} of its training rows, so none would be known. Lower "
                f"min_rows, or name the words, as in {stated}"
            )
        if len(words) > MOST_WORDS:
            raise DataError(
                f"{what} has {len(words):,} words, and at most {MOST_WORDS:,} are read. Texts need the source `hf`; "
                "a name of each row is no feature"
            )
        return replace(feature, words=words)
    if not feature.imputes:
        return feature
    count = sum(one.count for one in known)
    if rule.mean is None and not count and lenient:
        return replace(feature, mean=0.0)
    if rule.mean is None and not count:
        stated = suggestion({feature.column: {"kind": rule.kind, **rule.start_and_impute, "mean": 0.0}})
        raise DataError(
            f"{what}: no client has a number in {rule.min_rows} of its training rows, so none tells its sum. Leave it "
            f"out, lower min_rows, or state its mean, as in {stated}"
        )
    mean = rule.mean if rule.mean is not None else float(np.float32(sum(one.total for one in known) / count))
    return replace(feature, mean=mean)


def encoded(columns: Columns, known: Mapping[str, Features]) -> Columns:
    """Return the table with numbers in place of codes.

    Args:
        columns: the table.
        known: the columns of each modality after the fit; see `agreed`.
    """
    modalities, notes = dict(columns.modalities), list(columns.notes)
    for name, before in fits(columns).items():
        column, after = columns.modalities[name], known[name]
        codes = column.values.numpy()
        parts = [
            feature.expanded(codes[:, place], before[place].words if feature.of_words else None)
            for place, feature in enumerate(after)
        ]
        values = torch.from_numpy(np.concatenate(parts, 1))
        if name in columns.present:
            values = torch.where(columns.present[name].cpu()[:, None], values, 0.0)
        made = replace(column, values=values, coded=None, features=after)
        modalities[name] = made
        notes += [line for place, f in enumerate(after) if (line := _line(name, f, before[place], codes[:, place]))]
    return replace(columns, modalities=modalities, notes=tuple(notes))


def _line(modality: str, after: Feature, before: Feature, codes: Any) -> str:
    """Return the sentence about a column, for `polyfed check`."""
    if after.rule is None:
        return ""
    what = f"'{after.column}' of '{modality}'"
    if not after.of_words:
        filled = int(np.isnan(codes).sum())
        result = f"; {counted(filled, 'empty cell gets', 'empty cells get')} {after.mean:g}" if after.imputes else ""
        kind = f"is in {after.rule.unit} since {after.rule.start}" if after.rule.kind == "date" else "is filled in"
        return f"{what} {kind}{result}"
    lost = sorted({*before.words} - {*after.words})
    shown = ", ".join(map(repr, after.words[:5])) + (", ..." if len(after.words) > 5 else "")
    text = f"{what} has {counted(len(after.words), 'word', 'words')}: {shown}"
    if lost:
        rare = np.isin(codes, [before.words.index(word) for word in lost])
        text += (
            f"; {counted(int(rare.sum()), 'row has', 'rows have')} another, such as {lost[0]!r}, and get zeros for it"
        )
    return text


def unseen(after: Feature, words: Iterable[str]) -> str:
    """Return the sentence about cells whose words the model does not know, or "" if there are none.

    Args:
        after: the column after the fit.
        words: the words of the cells that are read.
    """
    strange = [word for word in words if word not in after.words] if after.of_words else []
    if not strange:
        return ""
    shown = ", ".join(map(_quoted, sorted({*strange})[:3])) + (", ..." if len({*strange}) > 3 else "")
    return (
        f"'{after.column}' has {counted(len(strange), 'word', 'words')} that the model has not learnt, such as {shown},"
        f" and counts as none of {', '.join(map(_quoted, after.words[:5]))}"
        f"{', ...' if len(after.words) > 5 else ''}"
    )


def _quoted(word: str) -> str:
    return repr(word) if word else "an empty cell"


def fitted_to(columns: Columns, clients: Iterable[tuple[Tensor, Sequence[str]]]) -> tuple[Columns, list[Statistics]]:
    """Return the table with numbers in place of codes, and what each client told for that.

    Args:
        columns: the table.
        clients: the training rows of each client, and the modalities that it holds.
    """
    before = fits(columns)
    if not before:
        return columns, []
    shares = list(clients)
    result: list[Statistics] = [statistics(columns, rows, held) for rows, held in shares]
    known = agreed(before, result, f"data '{columns.name}'")
    return encoded(columns, known), result


def is_fitted(columns: Mapping[str, Features]) -> bool:
    """Whether a column needs something that clients must tell."""
    return any(f.rule is not None and f.rule.is_fitted for features in columns.values() for f in features)


def told_shape(column: Column) -> tuple[int, ...]:
    """Return the shape of a sample: the number of columns of the table while their words are not agreed on."""
    features = column.features or column.coded
    if features is None:
        return column.shape
    if is_fitted({"": features}):
        return (len(features),)
    return shape_of(agreed({"": features}, [], "")[""])


def samples_from(features: Features, value: Any, where: str) -> Tensor:
    """Return the numbers (n, ...) of new samples: words, empty cells, dates, image files or texts.

    Args:
        features: the columns of the modality, after the fit.
        value: a data frame or a dictionary with these columns, or rows of cells (n, columns), or (n,) for one column.
            An empty cell of image files or texts is a sample that lacks the modality, and its numbers are NaN.
        where: the beginning of an error text.

    Raises:
        DataError: a column is missing, or a cell cannot be read.
    """
    if features[0].rule is not None and features[0].is_whole:
        found, there = read_cells(features[0].rule, _whole(features[0].column, value, where), where)
        samples = torch.from_numpy(found).to(torch.float32)
        samples[~torch.from_numpy(there)] = torch.nan
        return samples
    cells = _cells(features, value, where)
    for feature in features:
        if feature.of_words and (line := unseen(feature, map(word_of, cells[feature.column]))):
            warnings.warn(f"{where}: {line}", PolyfedWarning, stacklevel=4)
    parts = [feature.expanded(feature.coded(cells[feature.column], where)) for feature in features]
    return torch.from_numpy(np.concatenate(parts, 1))


def _whole(column: str, value: Any, where: str) -> list[Any]:
    """Return the cells of the only column of a modality."""
    if isinstance(value, Mapping) or hasattr(value, "columns"):
        if column not in value:
            raise DataError(f"{where} has no column '{column}', which the model reads")
        value = value[column]
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise DataError(
            f"{where} is a {type(value).__name__}: give a list with a cell for each sample, as in [{where}]"
        )
    return list(as_cells(value))


def _cells(features: Features, value: Any, where: str) -> dict[str, list[Any]]:
    names = [feature.column for feature in features]
    if isinstance(value, Mapping) or hasattr(value, "iloc"):
        if lacking := [name for name in names if name not in value]:
            raise DataError(f"{where} has no column '{lacking[0]}'; the model reads {', '.join(names)}")
        return {name: list(value[name]) for name in names}
    rows = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(names) == 1 and not any(isinstance(row, list | tuple) for row in rows):
        rows = [[row] for row in rows]
    if any(not isinstance(row, list | tuple) or len(row) != len(names) for row in rows):
        raise DataError(f"{where}: give each row the columns {', '.join(names)}, or a data frame that has them")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def features_of(columns: Columns) -> dict[str, Features]:
    """Return the columns, after the fit, of each modality that has rules."""
    return {name: column.features for name, column in columns.modalities.items() if column.features is not None}


def as_tables(features: Mapping[str, Features]) -> dict[str, list[dict[str, Any]]]:
    """Return the columns of each modality as JSON values; `read_tables` is the inverse function."""
    return {name: [feature.as_table() for feature in own] for name, own in features.items()}


def read_tables(said: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[int]]) -> dict[str, Features]:
    """Read the columns of each modality from JSON values. They must give a sample of the modality's shape.

    Raises:
        ValueError, TypeError, KeyError: the values are damaged.
    """
    result = {str(name): tuple(Feature.read(value) for value in own) for name, own in (said or {}).items()}
    for name, features in result.items():
        if tuple(shapes[name]) != shape_of(features):
            raise ValueError(f"the columns of '{name}' do not give samples of the shape {tuple(shapes[name])}")
    return result
