"""Which columns of a table form which modality: by a mapping, by patterns, or by a guess from names and types."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from polyfed.core.errors import DataError, RecipeError, again, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data.column_rules import MOST_WORDS, ColumnRule, suggestion, word_of
from polyfed.data.reading.values import is_list, is_missing
from polyfed.data.whole_columns import are_images, are_texts

if TYPE_CHECKING:
    import pandas as pd


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
    result = [_NUMBERED.fullmatch(column) for column in group]
    return len(group) > 1 and len({match[1] if match else None for match in result}) == 1 and result[0] is not None


def _named(groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the groups of columns, renamed so that each group name is valid as the name of a modality.

    Raises:
        DataError: a name has no letter or digit that is allowed, or two names become equal.
    """
    problems = Problems()
    result: dict[str, list[str]] = {}
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
        elif short in result:
            problems.add(DataError(f"the columns '{origin[short]}' and '{name}' both give the name '{short}': {cure}"))
        else:
            result[short], origin[short] = group, name
    problems.raise_all()
    return result


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
    result: dict[str, str | list[str]] = {}
    for name, given in modalities.items():
        group = [given] if isinstance(given, str | Integral) or not isinstance(given, Iterable) else list(given)
        if not group or not all(isinstance(word, str | Integral) for word in group):
            raise RecipeError(
                f"modalities['{name}'] = {given!r}: give the name of a column, a pattern with `*`, or a list of these"
            )
        result[str(name)] = given if isinstance(given, str) else [str(word) for word in group]
    return result


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
    result: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for modality, given in modalities.items():
        result[modality] = []
        for word in [given] if isinstance(given, str) else given:
            matching = [column for column in columns if column == word or fnmatchcase(column, word)]
            if not matching:
                hint = did_you_mean(word, columns[:50])
                problems.add(DataError(f"{where} has no column '{word}' for modality '{modality}'; {hint}"))
            for column in matching:
                if owner.setdefault(column, modality) != modality:
                    text = f"{where}: column '{column}' is named by the modalities '{owner[column]}' and '{modality}'"
                    problems.add(DataError(f"{text}. Name it once"))
            result[modality] += [column for column in matching if column not in result[modality]]
    problems.raise_all()
    return result


WRITTEN = re.compile(r"\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*")
"""A text that is a number, with decimal point or comma. A column in which at least half of the words are numbers, but
not all, mixes words and numbers (ours)."""

FOR_EMPTY = ("na", "n/a", "#n/a", "null", "none", "nan", "?", "-", "--", ".", "missing", "unknown")
"""Words that other programs write for an empty cell. They are words here, and an error text names the way out."""

UNNAMED = re.compile(r"\s*|Unnamed: \d+(\.\d+)?")
"""The name of a column without a name. pandas writes row numbers under an empty name, and reads this name as
`Unnamed: 0`."""


MOST_NAMED = 8
"""The largest number of columns that a warning names."""


@dataclass(frozen=True)
class Guess:
    """The guessed columns of each modality.

    Attributes:
        groups: modality -> its columns.
        texts: columns that are left out, because they hold texts.
        unnamed: columns that are left out, because they have no name of their own.
        dates: columns that are left out, because they hold dates.
        rules: the entries of [data.columns] that would make numbers of columns that are left out.
        suspects: column of numbers -> why it may be no input: it numbers the rows, tells the time, or never changes.
    """

    groups: dict[str, list[str]]
    texts: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    rules: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Sentences about the guess."""
        notes = []
        for modality, group in self.groups.items():
            shown = group[0] if len(group) == 1 else f"{len(group)} columns {group[0]} to {group[-1]}"
            notes.append(f"modality '{modality}': {shown}")
        return [*notes, *self.left_out]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on the columns that are left out."""
        sentences = []
        if self.unnamed:
            sentences.append(
                f"left out, because it has no name of its own: column {', '.join(map(repr, self.unnamed))}. Such a "
                "column often holds row numbers, as pandas writes them without index=False. To use the column, rename "
                "it, or name it in modalities"
            )
        if self.texts:
            sentences.append(
                f"left out, because they hold texts: {', '.join(self.texts)}. If one of them names the client of a "
                f"row, name it as client. {self._cure(self.texts)}The source `hf` reads texts with a pretrained model"
            )
        if self.dates:
            sentences.append(
                f"left out, because they hold dates: {', '.join(self.dates)}. {self._cure(self.dates)}".strip()[:-1]
            )
        return tuple(sentences)

    def _cure(self, columns: Iterable[str]) -> str:
        """Return the sentence that makes numbers of these columns, or nothing if no rule fits them."""
        result = {column: self.rules[column] for column in columns if column in self.rules}
        return f"To train on {', '.join(result)}, write {suggestion(result)}. " if result else ""

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Warnings for the user about columns that are left out, and about columns that may not be inputs."""
        return (*([self.rest] if self.rest else []), *self.doubts, *self.left_out)

    @property
    def doubts(self) -> tuple[str, ...]:
        """A warning about columns that may be no inputs, if there are any."""
        result = ", ".join(f"'{column}' {why}" for column, why in self.suspects.items())
        options = [("--leave-out", column) for column in [*self.suspects][:MOST_NAMED]]
        words = again(*options, otherwise=f"polyfed init: {' '.join(map(shlex.join, options))}")
        return (f"{MAY_BE_NONE}: {result}. Leave them out ({words})",) if result else ()

    @property
    def rest(self) -> str:
        """A sentence about the columns that nothing but the lack of another place puts into a modality, or ""."""
        rest = self.groups.get(REST, [])
        if not {*rest} - {*self.suspects}:  # `doubts` names them
            return ""
        listed = ", ".join(map(repr, rest[:MOST_NAMED])) + (
            f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
        )
        return (
            f"modality '{REST}' has the columns that are in no other modality: {listed}. The model trains on them, so "
            "another target or a row number among them would reveal the label. Choose the columns of each modality, "
            f"as in modalities={{{', '.join(f'{name!r}: {group[:1]}' for name, group in self.groups.items())}}}"
        )


MAY_BE_NONE = "the model trains on columns that may be no inputs"
"""The beginning of the warning about ids and times."""


def guessed(frame: "pd.DataFrame", special: Iterable[str], rules: Mapping[str, ColumnRule] | None = None) -> Guess:
    """Guess the columns of each modality from the names and types of the columns that are not in `special`.

    Columns that hold text and columns without a name in the header are left out. If a file has a comma at the end of
    each row, pandas reads an unnamed column without values. The result does not mention such an empty column. Columns
    with a rule count as numbers.

    Raises:
        DataError: the names of some columns cannot be made into a valid name for a modality.
    """
    result: dict[str, list[str]] = {"number": [], "list": [], "text": [], "unnamed": [], "date": []}
    for column in frame.columns:
        if column in special:
            continue
        if column in (rules or {}):
            result["list" if (rules or {})[column].is_whole else "number"].append(column)
        elif not UNNAMED.fullmatch(column):
            result["date" if are_dates(frame[column]) else kind_of(frame[column])].append(column)
        elif not frame[column].isna().all():
            result["unnamed"].append(column)
    alone = not result["number"] and not result["list"]  # then texts are what the model is to read
    left = {column: rule_for(frame[column], alone=alone) for column in (*result["text"], *result["date"])}
    groups = grouped(result["number"], result["list"])
    suspects = {column: why for column in result["number"] if (why := _suspicion(column, frame[column]))}
    # in a larger group, as of an image's pixels, such a column keeps the shape
    single = [group for name, group in groups.items() if len(group) == 1 or name == REST]
    for column in (column for group in single for column in group if column in result["number"]):
        if len(frame) >= FEWEST_IDS and frame[column].nunique() == 1:
            suspects[column] = "has the same value in every row that has one"
    return Guess(
        groups,
        tuple(result["text"]),
        tuple(result["unnamed"]),
        tuple(result["date"]),
        {column: rule for column, rule in left.items() if rule is not None},
        suspects,
    )


_TIME = re.compile(r"(.*[_.\- ])?(time|timestamp|datetime|epoch|unixtime)([_.\- ].*)?", re.IGNORECASE)

_BEGIN = re.compile(r"(.*[_.\- ])?(start|onset|begin)([_.\- ].*)?", re.IGNORECASE)

_ID = re.compile(r"(?i:^|[^a-z])(?i:ids?|nr|no|num|number|index|key|code)(?i:$|[^a-z])|[a-z]I[dD]$")

_EPOCHS = tuple((start * unit, end * unit) for start, end in ((1e9, 2.2e9),) for unit in (1, 1e3, 1e6, 1e9))
"""The seconds, milliseconds, microseconds and nanoseconds since 1970 of the years 2001 to 2039."""

FEWEST_IDS = 20
"""The fewest rows whose whole numbers, all of them different, are taken for names of the rows (ours)."""


def times_among(columns: Mapping[str, "pd.Series[Any]"]) -> list[str]:
    """Return the names of the columns that look like the time at which a row begins."""
    return [
        name
        for name, column in columns.items()
        if are_dates(column)
        or (column.dtype.kind in "iuf" and (_BEGIN.fullmatch(name) or _suspicion(name, column) == TIME))
    ]


TIME = "looks like a time"


def _suspicion(name: str, column: "pd.Series[Any]") -> str:
    """Return why a column of numbers may be no input, or an empty text."""
    if column.dtype.kind not in "iuf" or len(column) < FEWEST_IDS:
        return ""
    known = column.dropna()
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if any(start <= low <= high <= end for start, end in _EPOCHS) or _TIME.fullmatch(name):
        return TIME
    whole = column.dtype.kind in "iu" or bool((known == known.round()).all())
    near = high - low < 20 * len(column) or _ID.search(name)
    return "holds another whole number in every row, as an id does" if whole and near and column.is_unique else ""


START = "2000-01-01"
"""The start of suggested dates (ours)."""


def rule_for(column: "pd.Series[Any]", *, alone: bool = False) -> str | Mapping[str, Any] | None:
    """Return the entry of [data.columns] that would make numbers of a column of words, dates, texts or image files.

    Args:
        alone: whether the table has nothing but words to train on, so that few different texts are texts too.
    """
    cells = [cell for cell in column.tolist() if not is_missing(cell) and cell != ""]
    if column.dtype.kind in "miuf" or not cells:
        return None
    if are_images(cells):
        return "image"
    if are_dates(column):
        form = _format_of([cell for cell in cells if isinstance(cell, str)])
        return {"kind": "date", "start": START} | ({"format": form} if form else {})
    words = [word_of(cell) for cell in cells if isinstance(cell, str | int | float | np.generic)]
    few = 2 * len({*words}) <= len(words) and len({*words}) <= MOST_WORDS
    if len(words) == len(cells) and few and not text_among(words) and not (alone and are_texts(cells)):
        return "one-hot"
    return "words" if are_texts(cells) else None


LONGEST_WORD, LONGEST_NAME = 60, 4
"""The most characters of a cell for which one-hot is suggested, and the most words of most cells (ours)."""

_CLAUSES = re.compile(r"\w\W*[,;!?:]\s+\S")


def text_among(words: Iterable[str]) -> str:
    """Return a cell that shows that the cells are texts, which people have written, or "" if they may be names.

    One-hot would send each text as it is. Texts are long, or have many words, or have three words and a mark between
    them (ours).
    """
    distinct = sorted({*words})
    for word in distinct:
        if len(word) > LONGEST_WORD or (len(word.split()) > 2 and _CLAUSES.search(word)):
            return word
    many = [word for word in distinct if len(word.split()) > LONGEST_NAME]
    return many[0] if 2 * len(many) > len(distinct) else ""


def _format_of(cells: Sequence[str]) -> str:
    """Return how dates are written, or "" if the year comes first."""
    if not cells or cells[0].strip()[:4].isdigit():
        return ""
    parts = [re.split(r"[-/.T ]", cell.strip()) for cell in cells]
    day, month = ("%m", "%d") if any(int(part[1]) > 12 for part in parts) else ("%d", "%m")
    mark, year = re.findall(r"[-/.]", cells[0])[0], "%Y" if len(parts[0][2]) == 4 else "%y"
    time = (":".join(("%H", "%M", "%S")[: cells[0].count(":") + 1])) if ":" in cells[0] else ""
    form = mark.join((day, month, year))
    return f"{form}{'T' if 'T' in cells[0] else ' '}{time}" if time else form


DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d))([T ]\d\d?:\d\d.*)?\s*")
"""A date in one of the usual ways, which may be followed by a time."""


def are_dates(column: "pd.Series[Any]") -> bool:
    """Whether a column holds dates or durations, as such or as text."""
    if column.dtype.kind in "mM":
        return True
    if column.dtype.kind in "iufb":
        return False
    held = [cell for cell in column.tolist() if not is_missing(cell)][:100]
    return bool(held) and all(
        hasattr(cell, "isoformat") or (isinstance(cell, str) and DATE.fullmatch(cell)) for cell in held
    )


def kind_of(column: "pd.Series[Any]") -> Literal["number", "list", "text"]:
    """Return what the cells of a column hold: single numbers, several numbers, or words.

    A column that mixes numbers and words counts as numbers. Reading it then raises an error that names the faulty cell.
    """
    if column.dtype.kind in "iufb":
        return "number"
    held = [cell for cell in column.tolist() if not is_missing(cell)]
    if held and all(is_list(cell) for cell in held[:100]):
        return "list"
    known = [cell for cell in held if not (isinstance(cell, str) and cell.strip().lower() in FOR_EMPTY)]
    mixed, held = len(known) < len(held), known or held
    single = [cell for cell in held if isinstance(cell, int | float | np.number)]
    words = [cell for cell in held if isinstance(cell, str)]
    if single:
        return "number" if len(single) + len(words) == len(held) else "text"
    written = sum(bool(WRITTEN.fullmatch(word)) for word in words)
    whole = written == len(words) and not mixed and not any("," in word for word in words)
    return "number" if written and 2 * written >= len(words) and not whole else "text"


IDS = ("id", "ids", "row_id")
"""Names of columns of row ids."""


def row_ids(frame: "pd.DataFrame", special: Iterable[str]) -> str:
    """Return the name of a column of row ids: the first name in `IDS` whose column holds numbers, or an empty text."""
    names = (name for name in IDS if name in frame.columns and name not in special)
    return next((name for name in names if kind_of(frame[name]) == "number"), "")
