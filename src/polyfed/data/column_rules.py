"""How a column becomes numbers, as [data.columns] says: words, empty cells, dates, image files and texts.

A table is read in two steps. `Feature.coded` turns the cells of a column into one number each: the place of a word
among the words of the table, a number or NaN, or the time since a start. After the division into clients, the words and
the means are agreed on (`column_fitting.py`), and `Feature.expanded` turns each code into one or several numbers.
Columns of image files and texts are modalities of their own, read in one step (`whole_columns.py`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError, RecipeError, again, typed_verb
from polyfed.core.option_checks import AT_LEAST_ONE, between, check_ranges, checked
from polyfed.core.system.json_and_toml import toml_key, toml_value

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["one-hot", "embedding", "mean", "date", "image", "words"]
KINDS = ("one-hot", "embedding", "mean", "date", "image", "words")

WHOLE = ("image", "words")
"""The kinds of which each column is a modality of its own."""

SIDE = 32
"""The height and width of images, if a rule does not say them."""

SECONDS = {"days": 86_400.0, "hours": 3_600.0, "seconds": 1.0}

MOST_WORDS = 1000
"""The largest number of words of a column (ours). A column with more holds texts or ids."""

_DAY_FIRST = re.compile(r"\s*\d{1,2}[-/.]\d{1,2}[-/.]\d")
"""A date that does not begin with the year. Whether its day or its month comes first, nobody can tell."""

Codes = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ColumnRule:
    """An entry of [data.columns]: how one column of a table, or one array of words, becomes numbers.

    Attributes:
        kind: `one-hot` gives a column of words a 0 or 1 for each word; `embedding` makes a trained vector of each word,
            with the encoder `tabular`; `mean` replaces empty cells of a column of numbers by the mean, and adds a 1
            where it did; `date` gives the time since `start`. Two kinds make a modality of the column alone: `image`
            reads the paths of image files, which begin in the folder of the data file and stay inside it, as their
            middle square in colour; `words` gives a text token ids, hashes of its words.
        size: the length of the vector of a word (`embedding`), or the height and width of an image (`image`, 32).
        buckets: (`words` only) the number of different ids.
        length: (`words` only) the number of words that are read of a text.
        words: the words of the column. If they are not given, the clients agree on those that at least one client has
            in `min_rows` training rows, so each client reveals its own. Other words, such as those that only test rows
            hold, get zeros. An empty cell is the word "".
        min_rows: how many training rows of one client must have a word so that the client names it, or must have the
            number, so that the client tells its sum and its count: the sum of one cell would be that cell.
        mean: (`mean` only) the number for an empty cell. If it is not given, it is the mean over the training rows of
            all clients, each of which reveals its sum and its count.
        start: (`date` only) the date that is 0, such as "2020-01-31".
        unit: (`date` only) the unit of the time since the start.
        format: (`date` only) how dates are written, such as "%d.%m.%Y". Not needed if the year comes first.
        impute: (`date` only) whether empty cells get the mean, with a 1 where they did, as for `mean`.
    """

    kind: Kind
    size: Annotated[int, between(0, 1024)] = 0
    buckets: Annotated[int, between(2, 2**20)] = 4096
    length: Annotated[int, between(1, 4096)] = 32
    words: tuple[str, ...] = ()
    min_rows: Annotated[int, AT_LEAST_ONE] = 5
    mean: float | None = None
    start: str = ""
    unit: Literal["days", "hours", "seconds"] = "days"
    format: str = ""
    impute: bool = False

    @property
    def of_words(self) -> bool:
        """Whether the column holds words."""
        return self.kind in ("one-hot", "embedding")

    @property
    def is_whole(self) -> bool:
        """Whether the column is a modality of its own."""
        return self.kind in WHOLE

    @property
    def side(self) -> int:
        """The height and width of an image."""
        return self.size or SIDE

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample of a column that is a modality of its own."""
        return (3, self.side, self.side) if self.kind == "image" else (self.length,)

    @property
    def fills(self) -> bool:
        """Whether an empty cell has a meaning, so that the row lacks nothing."""
        return self.of_words or self.kind == "mean" or self.impute

    @property
    def is_fitted(self) -> bool:
        """Whether clients must tell something about their rows, because the recipe does not say it."""
        return (self.of_words and not self.words) or (self.fills and not self.of_words and self.mean is None)

    @property
    def start_and_impute(self) -> dict[str, Any]:
        """The options without which a date that gets the mean is no rule."""
        return {"start": self.start, "impute": True} if self.start else {}

    def check(self, where: str) -> None:
        """Check that the options fit the kind.

        Raises:
            RecipeError: an option is out of range, missing, or has no effect.
        """
        check_ranges(where, self)
        used = {
            "one-hot": {"words", "min_rows"},
            "embedding": {"words", "min_rows", "size"},
            "mean": {"mean", "min_rows"},
            "date": {"start", "unit", "format", "impute", "mean", "min_rows"},
            "image": {"size"},
            "words": {"buckets", "length"},
        }[self.kind]
        idle = [f.name for f in fields(self) if f.name not in used | {"kind"} and getattr(self, f.name) != f.default]
        if idle:
            raise RecipeError(f"{where} {idle[0]} has no effect on kind = '{self.kind}'. Remove it")
        if self.kind == "embedding" and not self.size:
            raise RecipeError(f"{where} needs size, the length of the vector of a word, as in size = 8")
        if self.kind == "date" and not self.start:
            raise RecipeError(f'{where} needs start, the date that is 0, as in start = "2020-01-01"')
        if self.mean is not None and not (math.isfinite(self.mean) and self.fills):
            raise RecipeError(f"{where} mean = {self.mean}: give a finite number, and impute = true for a date")
        if len(set(self.words)) < len(self.words) or len(self.words) > MOST_WORDS:
            raise RecipeError(f"{where} words: give at most {MOST_WORDS} words, each of them once")
        if self.start:
            _stamp(self.start, where)


def rules_of(where: str, said: Any) -> dict[str, ColumnRule]:
    """Read the section [data.columns], or the argument `columns`.

    Args:
        where: the name of the section in errors.
        said: column -> a kind, a table of options, or a `ColumnRule`.

    Raises:
        RecipeError: an entry is wrong.
    """
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise RecipeError(
            f'{where} is a {type(said).__name__}: give the rule of each column, as in {{ sex = "one-hot" }} '
            "(in Python: {'sex': 'one-hot'})"
        )
    result = {}
    for column, entry in said.items():
        table: Any = {"kind": entry} if isinstance(entry, str) else entry
        if isinstance(entry, ColumnRule):
            table = {f.name: getattr(entry, f.name) for f in fields(entry)}
        if not isinstance(table, Mapping) or "kind" not in table:
            raise RecipeError(f"{where} {column} = {entry!r}: give a kind ({', '.join(KINDS)}), or a table with a kind")
        place = f"{where} {column}:"
        result[str(column)] = ColumnRule(**checked(place, ColumnRule, table))
        result[str(column)].check(place)
    return result


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One column of a modality.

    Attributes:
        column: the name of the column.
        rule: how it becomes numbers. None if it holds numbers.
        words: the words that the codes count. Before the fit, these are all words of the table; afterwards, those that
            the model knows.
        mean: the number for empty cells, or None before the fit and for columns that need none.
    """

    column: str
    rule: ColumnRule | None = None
    words: tuple[str, ...] = ()
    mean: float | None = None

    @property
    def of_words(self) -> bool:
        """Whether the column holds words."""
        return self.rule is not None and self.rule.of_words

    @property
    def imputes(self) -> bool:
        """Whether empty cells get the mean, and the column a second number that says so."""
        return self.rule is not None and self.rule.fills and not self.rule.of_words

    @property
    def is_whole(self) -> bool:
        """Whether the column is a modality of its own."""
        return self.rule is not None and self.rule.is_whole

    @property
    def width(self) -> int:
        """How many numbers the column gives a sample."""
        if self.rule is not None and self.rule.is_whole:
            return math.prod(self.rule.shape)
        return len(self.words) if self.of_words else 1 + self.imputes

    @property
    def numeric(self) -> list[bool]:
        """For each of these numbers, whether it is a quantity that may be standardised."""
        return [False] * len(self.words) if self.of_words else [True, False][: self.width]

    def coded(self, cells: Sequence[Any], where: str) -> Codes:
        """Return a number for each cell (n,): the place of its word, -1 for others, or the number or NaN.

        Args:
            cells: the cells of the column.
            where: the beginning of an error text.

        Raises:
            DataError: a cell is neither a word nor a date, as the rule says.
        """
        if not self.of_words:
            return dates_of(cells, self.rule, f"{where}: column '{self.column}'")
        places = {word: place for place, word in enumerate(self.words)}
        return np.array([places.get(word_of(cell), -1) for cell in cells], np.float64)

    def expanded(self, codes: Codes, known: Sequence[str] | None = None) -> Codes:
        """Return the numbers (n, width) of a column after the fit.

        Args:
            codes: (n,), from `coded`.
            known: the words that the codes count. None if they count `words`.
        """
        if self.of_words:
            places = {word: place for place, word in enumerate(self.words)}
            moved = np.array([places.get(word, -1) for word in (self.words if known is None else known)] + [-1])
            own = moved[codes.astype(np.int64)]
            result: Codes = (own[:, None] == np.arange(len(self.words))).astype(np.float64)
            return result
        if not self.imputes:
            return codes[:, None]
        assert self.mean is not None, "columns are fitted before they are expanded"
        gone = np.isnan(codes)
        return np.stack([np.where(gone, self.mean, codes), gone.astype(np.float64)], 1)

    def as_table(self) -> dict[str, Any]:
        """Return the feature as JSON values. `read` is the inverse function."""
        rule = None
        if self.rule is not None:
            held = {f.name: getattr(self.rule, f.name) for f in fields(self.rule)}
            rule = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in held.items()
                if name == "kind" or value != getattr(ColumnRule, name)
            }
        return {"column": self.column, "rule": rule, "words": list(self.words), "mean": self.mean}

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Feature":
        """Return the feature of `as_table`.

        Raises:
            ValueError, TypeError, KeyError: the value is damaged.
        """
        rule = value["rule"]
        made = None if rule is None else rules_of("columns", {"it": rule})["it"]
        words = tuple(value["words"])
        if not all(isinstance(word, str) for word in words) or len(words) > MOST_WORDS:
            raise ValueError("the words of a column are damaged")
        mean = None if value["mean"] is None else float(value["mean"])
        if mean is not None and not math.isfinite(mean):
            raise ValueError("the mean of a column is not finite")
        return cls(column=str(value["column"]), rule=made, words=words, mean=mean)


def shape_of(features: Sequence[Feature]) -> tuple[int, ...]:
    """Return the shape of a sample of a modality with these columns, after the fit."""
    rule = features[0].rule if len(features) == 1 else None
    return rule.shape if rule is not None and rule.is_whole else (sum(feature.width for feature in features),)


def word_of(cell: Any) -> str:
    """Return the word of a cell: "" if it is empty, and a whole number without a point."""
    if isinstance(cell, str):
        return cell
    if cell is None or cell != cell or type(cell).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell.item() if isinstance(cell, np.generic) else cell)


def feature_of(column: str, rule: ColumnRule | None, cells: Sequence[Any]) -> Feature:
    """Return a column before the fit, with all words that the table holds in it, in sorted order."""
    if rule is None or not rule.of_words:
        return Feature(column=column, rule=rule)
    return Feature(column=column, rule=rule, words=tuple(sorted({word_of(cell) for cell in cells})))


def dates_of(cells: Sequence[Any], rule: ColumnRule | None, where: str) -> Codes:
    """Return the numbers of a column of numbers or of dates, with NaN for an empty cell.

    Raises:
        DataError: a cell is no number, or no date in the way that the rule says.
    """
    import pandas as pd  # imported here, because the import takes half a second

    series = pd.Series(cells)
    if rule is None or rule.kind != "date":
        numbers: Codes = pd.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        _refuse_others(series, np.isnan(numbers), where, "which is no number", "Give numbers, or leave the cell empty")
        return numbers
    if series.dtype.kind == "m":
        raise DataError(f"{where} holds durations, which need no start. Give numbers")
    written = [cell for cell in series if isinstance(cell, str)]
    if not rule.format and (cell := next(filter(_DAY_FIRST.match, written), None)):
        raise DataError(
            f"{where} holds {cell!r}, in which day and month cannot be told apart. Say how dates are written, as in "
            'format = "%d.%m.%Y"'
        )
    how = rule.format or ("ISO8601" if written else None)  # pandas would guess day or month from the first cell
    stamps = pd.to_datetime(series, format=how, errors="coerce", utc=True)
    gone = stamps.isna().to_numpy()
    _refuse_others(series, gone, where, "which is no date", f"Write it as {rule.format or 'year-month-day'}")
    passed = (stamps - _stamp(rule.start, where)).dt.total_seconds().to_numpy(dtype=np.float64)
    days: Codes = passed / SECONDS[rule.unit]
    return days


def _refuse_others(series: "pd.Series[Any]", gone: NDArray[np.bool_], where: str, what: str, cure: str) -> None:
    wrong = gone & series.notna().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"{where} holds {series.iloc[row]!r} at row {row}, {what}. {cure}")


def _stamp(start: str, where: str) -> "pd.Timestamp":
    import pandas as pd

    try:
        stamp = pd.Timestamp(start)
        stamp = stamp.tz_localize("UTC") if stamp.tzinfo is None else stamp.tz_convert("UTC")
    except ValueError:
        raise RecipeError(f"{where} start = {start!r} is no date. Write it as in 2020-01-31") from None
    return stamp


def suggestion(entries: Mapping[str, str | Mapping[str, Any]]) -> str:
    """Return how to write rules for these columns: the end of an error text.

    It is the command that the user typed, with these rules, or else how to write them in a recipe and in Python.
    """
    lines = ", ".join(f"{toml_key(column)} = {toml_value(entry)}" for column, entry in entries.items())
    plain = {column: dict(entry) if isinstance(entry, Mapping) else entry for column, entry in entries.items()}
    return again(
        *(_option(column, entry) for column, entry in entries.items()),
        otherwise=f"[data] columns = {{ {lines} }} (in Python: columns={plain!r})",
    )


def _option(column: str, entry: str | Mapping[str, Any]) -> tuple[str, str]:
    """Return the option of a command line that gives the rule of a column."""
    if typed_verb() != "init" or "=" in column:
        return "--set", f"data.columns.{toml_key(column)}={toml_value(entry)}"
    return "--column", f"{column}={entry if isinstance(entry, str) else toml_value(entry)}"
