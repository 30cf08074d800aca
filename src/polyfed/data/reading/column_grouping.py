"""Assigns the columns of a table to modalities: by a mapping, by patterns, or by a guess from their names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.core.problems import Problems

REST = "features"
"""The modality of the numeric columns whose names share no prefix with other columns."""

_NUMBERED = re.compile(r"(.+?)[_.\-:/ ]?\d+(?:[_.\-:x]\d+)*")
_PREFIXED = re.compile(r"([^_.\-:/ ]+)[_.\-:/ ].+")


def grouped(columns: Iterable[str], lists: Iterable[str] = ()) -> dict[str, list[str]]:
    """Guess the modalities of a table from the names of its columns.

    Columns that differ only in a number at their end form one modality (`audio_0`, `audio_1`). So do columns with the
    same first word (`audio_mean`, `audio_std`). All remaining columns form one modality `features`.

    Args:
        columns: names of columns of single numbers.
        lists: names of columns whose cells are lists or images; each of these columns is a separate modality.

    >>> grouped(["audio_0", "audio_1", "eeg.a", "eeg.b", "age"], ["image"])
    {'audio': ['audio_0', 'audio_1'], 'eeg': ['eeg.a', 'eeg.b'], 'features': ['age'], 'image': ['image']}
    """
    columns = list(columns)
    groups: dict[str, list[str]] = {}
    for pattern in (_NUMBERED, _PREFIXED):
        placed = {column for group in groups.values() for column in group}
        found: dict[str, list[str]] = {}
        for column in columns:
            if column not in placed and (match := pattern.fullmatch(column)):
                found.setdefault(match[1], []).append(column)
        for prefix, group in found.items():
            if len(group) > 1 or prefix in groups:
                groups.setdefault(prefix, []).extend(group)
    placed = {column for group in groups.values() for column in group}
    if rest := [column for column in columns if column not in placed]:
        groups.setdefault(REST, []).extend(rest)
    place = {column: number for number, column in enumerate(columns)}
    groups = {name: sorted(group, key=place.__getitem__) for name, group in groups.items()}
    return _named(groups | {name: [name] for name in lists})


def is_numbered(group: Sequence[str]) -> bool:
    """Whether columns differ only in a number at their end, so that they may be the positions of one sequence."""
    found = [_NUMBERED.fullmatch(column) for column in group]
    return len(group) > 1 and len({match[1] if match else None for match in found}) == 1 and found[0] is not None


def _named(groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the groups of columns, renamed so that each group name is valid as the name of a modality.

    Raises:
        DataError: a name has no letter or digit that is allowed, or two names become equal.
    """
    problems = Problems()
    found: dict[str, list[str]] = {}
    origin: dict[str, str] = {}
    for name, group in groups.items():
        short = identifier(name)
        cure = f"name the modality yourself, as in modalities={{'my_name': ['{group[0]}', ...]}}"
        if not short:
            problems.add(
                DataError(
                    f"the column '{group[0]}' gives no valid name of a modality, which has letters a to z, digits and "
                    f"_ only: {cure}"
                )
            )
        elif short in found:
            problems.add(DataError(f"the columns '{origin[short]}' and '{name}' both give the name '{short}': {cure}"))
        else:
            found[short], origin[short] = group, name
    problems.raise_all()
    return found


def identifier(name: str) -> str:
    """Return a valid modality name (letters, digits, `_`; no digit first), empty if no allowed character is left.

    >>> identifier("left eye"), identifier("3d")
    ('left_eye', 'm_3d')
    """
    word = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return word if not word or (word.isidentifier() and word not in ("shared", "labels")) else f"m_{word}"


def column_names(modalities: Any) -> dict[str, str | list[str]]:
    """Convert the column names of each modality to strings. In pandas, a column name may also be a number.

    Raises:
        RecipeError: `modalities` is not a dictionary from names to columns.
    """
    if not isinstance(modalities, Mapping):
        raise RecipeError(
            f"modalities = {modalities!r}: for a data frame or a table, give a dictionary from the name of each "
            "modality to its columns, as in modalities={'audio': 'audio_*'}"
        )
    found: dict[str, str | list[str]] = {}
    for name, given in modalities.items():
        group = [given] if isinstance(given, str | Integral) or not isinstance(given, Iterable) else list(given)
        if not group or not all(isinstance(word, str | Integral) for word in group):
            raise RecipeError(
                f"modalities['{name}'] = {given!r}: give the name of a column, a pattern with `*`, or a list of these"
            )
        found[str(name)] = given if isinstance(given, str) else [str(word) for word in group]
    return found


def chosen(modalities: Mapping[str, str | Sequence[str]], columns: Sequence[str], where: str) -> dict[str, list[str]]:
    """Return the columns that a mapping names.

    Args:
        modalities: modality -> a column, a pattern with `*`, or a list of these.
        columns: the columns of the table.
        where: the name of the table in messages.

    Raises:
        DataError: some names match no column, or two modalities name the same column. The message lists all such
            faults.
    """
    problems = Problems()
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for modality, given in modalities.items():
        found[modality] = []
        for word in [given] if isinstance(given, str) else given:
            matching = [column for column in columns if column == word or fnmatchcase(column, word)]
            if not matching:
                hint = did_you_mean(word, columns[:50])
                problems.add(DataError(f"{where} has no column '{word}' for modality '{modality}'; {hint}"))
            for column in matching:
                if owner.setdefault(column, modality) != modality:
                    text = f"{where}: column '{column}' is named by the modalities '{owner[column]}' and '{modality}'"
                    problems.add(DataError(f"{text}. Name it once"))
            found[modality] += [column for column in matching if column not in found[modality]]
    problems.raise_all()
    return found
