"""table: your own table, a CSV, parquet or JSON-lines file with one or several columns for each modality."""

import codecs
import csv
import io
import json
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from polyfed.core.errors import DataError, PolyfedWarning, RecipeError, again, require
from polyfed.core.option_checks import BELOW_ONE, check_ranges
from polyfed.core.problems import Problems
from polyfed.core.system.json_and_toml import toml_value
from polyfed.data.column_rules import rules_of
from polyfed.data.columns import Columns, Standardise
from polyfed.data.reading.array_files import check_expansion, existing
from polyfed.data.reading.column_guess import guessed
from polyfed.data.reading.draft import columns_of as checked_columns
from polyfed.data.reading.frames import FIRST_LINE, drafted
from polyfed.data.reading.given import EmptyRows, Given, Partial, Unmeasured
from polyfed.data.reading.values import Layout
from polyfed.data.sources.base import Facts, Source

if TYPE_CHECKING:
    import pandas as pd

WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,3999}")
DECIMAL = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d*)?([eE][-+]?\d+)?|[-+]?\.\d+([eE][-+]?\d+)?|(?i:nan)")
"""Words that become numbers in a column of labels. A leading zero belongs to a name, as in "01"."""

NOT_A_NUMBER = ("nan", "NaN", "NAN")
"""How programs write a number that is missing. In a column of words, these are words."""


@dataclass(frozen=True)
class Dialect:
    """How the cells of a text file are written; see the options of `Table`."""

    separator: str = ""
    decimal: str = "."
    comment: str = ""
    encoding: str = "utf-8"
    empty: tuple[str, ...] = ()

    @property
    def for_reading(self) -> str:
        """Return the encoding, which also accepts the mark that some programs write before UTF-8."""
        return "utf-8-sig" if self.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else self.encoding

    def check(self) -> None:
        """Check that each option is one character, or empty where it may be, and that there is such an encoding.

        Raises:
            RecipeError: an option is wrong.
        """
        for name, value, most in (("separator", self.separator, 1), ("comment", self.comment, 1)):
            require(len(value) <= most and value not in ('"', "\n"), f"data.{name}", value, "one character, or none")
        require(self.decimal in (".", ","), "data.decimal", self.decimal, '"." or ","')
        require(self.decimal != self.separator, "data.decimal", self.decimal, "another character than data.separator")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            require(False, "data.encoding", self.encoding, 'an encoding of Python, such as "utf-8" or "cp1252"')


PLAIN = Dialect()
"""Commas, decimal points, no comments, UTF-8."""

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")
"""The file endings that this source reads."""


@dataclass(frozen=True, kw_only=True)
class Table(Source):
    """Your own table, without code: a row for each sample, and one or several columns for each modality.

    An empty cell is a missing value. If all cells of a modality are empty in a row, the row lacks this modality. Cells
    of parquet and JSON-lines files may be lists of numbers, of token ids, or of time steps.

    Attributes:
        path: The file: .csv, .tsv (with tabs), .parquet or .jsonl.
        modalities: Modality -> its columns: a name, a pattern with `*`, or a list of these.
        label: Column of the labels, words or class numbers from 0, or a list of columns with targets; empty if the task
            needs none.
        client: Column of the natural client of each row: words or whole numbers.
        split: Column of the splits: the words train, test and validation, or their codes 0, 1 and 2.
        split_personal: Column of the splits within each natural client: 0 train, 1 test, 2 guard row.
        person: Column of the person of each row, words or whole numbers: random splits and partitions keep the rows of
            a person together. It is no feature, and its words are kept nowhere.
        ids: Column of the row ids, distinct whole numbers; by default a column of numbers named `id`, `ids` or `row_id`
            that is in no modality, else, or with "rows", the row numbers.
        relabel: Word of a label -> the class that it means, such as { "yes " = "Yes", no = "No" }; or column -> its
            words and what they mean, such as { site = { "Aachen " = "Aachen" } }.
        class_names: The names of the classes in order, for labels that are numbers, or words whose order matters.
        columns: Column -> how its words, empty cells, dates, image files or texts become numbers (docs/data.md):
            "one-hot", "mean", "image", "words", or a table with a kind and its options.
        shapes: Modality -> shape of a sample, if its columns are the pixels of an image, such as [1, 8, 8], or the
            steps of a series, such as [20, 3].
        layout: Modality -> axes of a sample in lists or pictures, as in the source `npz`.
        partial: A row with only some cells of a modality: "refuse" it, or treat the modality as "absent".
        standardise: As in the source `npz`.
        empty_rows: A row without any modality, or without its class: "refuse" it, or "leave-out" (it is counted).
        unmeasured: A row in which every cell of a modality is empty although [data.columns] fills each: it lacks the
            modality ("absent"), or has it, with means and empty words ("fill"). A modality of one column is filled.
        test_share: Share of every class that is the test set if there is no column of splits.
        seed: Seed for drawing that test set; the run's own seed has no effect.
        separator: The character between the cells of a .csv file, by default a comma.
        decimal: The character between the whole part and the decimals of a number.
        comment: The character that begins a comment, to the end of its line; by default none.
        encoding: The encoding of a .csv or .tsv file, such as "cp1252" or "utf-16".
        empty: Words that count as empty cells, such as "NA".
    """

    path: str
    modalities: Mapping[str, str | list[str]] = field(default_factory=dict)
    label: str | list[str] = "label"
    client: str = "client"
    split: str = "split"
    split_personal: str = "split_personal"
    person: str = ""
    ids: str = ""
    relabel: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    columns: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: Mapping[str, Layout] = field(default_factory=dict)
    partial: Partial = "refuse"
    empty_rows: EmptyRows = "refuse"
    unmeasured: Unmeasured = "absent"
    standardise: Standardise = "uneven"
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0
    separator: str = ""
    decimal: str = "."
    comment: str = ""
    encoding: str = "utf-8"
    empty: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        self.dialect.check()
        rules_of("[data.columns]", self.columns)
        for option in ("shapes", "layout"):
            for name in getattr(self, option):
                require(name in self.modalities, f"data.{option}", name, ", ".join(self.modalities))

    @override
    def load(self) -> Columns:
        path = existing(self.path, "table")
        problems = Problems()
        texts = (self.client, self.split, self.person, *word_columns(self.columns), *self._words_by_column)
        words = dict.fromkeys(filter(None, texts), False) | ({self.label: True} if isinstance(self.label, str) else {})
        return self.columns_of(read(path, problems, lambda _: words, self.dialect), path, problems)

    @property
    def dialect(self) -> Dialect:
        """Return how the cells of the file are written."""
        return Dialect(self.separator, self.decimal, self.comment, self.encoding, self.empty)

    def columns_of(self, frame: "pd.DataFrame", path: Path, problems: Problems) -> Columns:
        """Check a table that `read` has returned. A caller that has this table need not read the file again.

        Args:
            frame: the table.
            path: the file that it comes from, for the name of the data and for messages.
            problems: the faults found so far. They are raised together with the faults found here.

        Raises:
            PolyfedError: the table has faults; the message lists all of them.
        """
        if not self.modalities:
            guess = guessed(frame, self.given.meaning, self.given.columns)
            groups = guess.groups
            if not groups:
                rest = "".join(f". {sentence[0].upper()}{sentence[1:]}" for sentence in guess.left_out)
                raise DataError(f"'{path}' has no column of numbers beside the labels{rest}")
            lines = ", ".join(
                f"{name} = {toml_value(group[0] if len(group) == 1 else group)}" for name, group in groups.items()
            )
            raise RecipeError(
                f"data.modalities is empty; from the names of the columns of '{path}' it could be "
                f"modalities = {{ {lines} }}",
                ("data", "modalities"),
            )
        frame = self.relabelled(frame)
        axes = {name: {1: "F", 2: "TF", 3: "CHW"}.get(len(shape), "") for name, shape in self.shapes.items()}
        more = {"class_names": self.class_names} if self.class_names else {}
        draft = drafted(frame, f"'{path}'", path.stem, self.given, problems, layout=axes | dict(self.layout), **more)
        draft = replace(draft, modalities=self._shaped(draft.modalities, problems))
        return checked_columns(draft, self.given, problems)

    def relabelled(self, frame: "pd.DataFrame", only: Collection[str] | None = None) -> "pd.DataFrame":
        """Return the table with the words that `relabel` gives.

        Args:
            only: the columns to change, by default all that `relabel` names.

        Raises:
            RecipeError: `relabel` names a column that the table lacks or that is a feature, whose words new rows would
                have as they are, or a word that the column lacks.
        """
        listed = ([group] if isinstance(group, str) else group for group in self.modalities.values())
        features = [word for group in listed for word in group]
        for column, words in self._words_by_column.items():
            if only is not None and column not in only:
                continue
            free = not any(column == word or fnmatchcase(column, word) for word in features)
            require(free, "data.relabel", column, "columns of labels, clients, persons and groups, not of a modality")
            if column not in frame.columns:
                require(column == self.label, "data.relabel", column, ", ".join(map(str, frame.columns[:20])))
                continue
            known = {str(cell) for cell in frame[column].dropna().unique()}
            for word in words:
                require(word in known, "data.relabel", word, ", ".join(sorted(known)[:20]))
            frame = frame.assign(**{column: frame[column].map(lambda cell, words=words: words.get(str(cell), cell))})
        return frame

    @property
    def _words_by_column(self) -> dict[str, Mapping[str, str]]:
        """Return column -> its words and what they mean. A word without a column is one of the labels."""
        result = {column: words for column, words in self.relabel.items() if not isinstance(words, str)}
        own = {word: name for word, name in self.relabel.items() if isinstance(name, str)}
        if own and isinstance(self.label, str):
            result[self.label] = {**own, **result.get(self.label, {})}
        return result

    def for_other_rows(self) -> "Table":
        """Return the source of new rows, in which what `relabel` names may be missing: then its rule has no effect."""
        if not self.relabel:
            return self
        rules = self._words_by_column
        texts = {column: column == self.label for column in rules}
        frame = read(existing(self.path, "table"), Problems(), lambda _: texts, self.dialect)
        kept = {
            column: {word: name for word, name in words.items() if word in set(map(str, frame[column].dropna()))}
            for column, words in rules.items()
            if column in frame.columns
        }
        return replace(self, relabel=kept)

    @property
    def given(self) -> Given:
        """Return the meaning of the columns, and how they are read."""
        defaults = [
            ("clients", self.client == Table.client),
            ("split", self.split == Table.split),
            ("split_personal", self.split_personal == Table.split_personal),
            ("person", not self.person),
            ("ids", not self.ids),
        ]
        return Given(
            labels=self.label,
            clients=self.client,
            split=self.split,
            split_personal=self.split_personal,
            person=self.person,
            ids=self.ids,
            modalities=self.modalities,
            partial=self.partial,
            empty_rows=self.empty_rows,
            unmeasured=self.unmeasured,
            standardise=self.standardise,
            test_share=self.test_share,
            seed=self.seed,
            columns=rules_of("[data.columns]", self.columns),
            folder=Path(self.path).expanduser().parent,
            optional=tuple(role for role, may_be_missing in defaults if may_be_missing),
        )

    def _shaped(self, modalities: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
        """Return the values of the modalities in the shapes that the recipe gives."""
        values = dict(modalities)
        for name, shape in self.shapes.items():
            if name not in values:
                continue
            try:
                values[name] = values[name].reshape(len(values[name]), *shape)
            except ValueError:
                found = values[name].shape[1:]
                text = f"data.shapes.{name} = {list(shape)} does not fit: a sample has {found} numbers"
                problems.add(RecipeError(text, ("data", "shapes", name)))
        return values

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data table` prints them."""
        return Facts(
            title="your own table: CSV, parquet or JSON lines, no code needed",
            modalities={"<name>": "several columns of numbers, or one column of lists"},
            licence="yours",
            obtain="polyfed init FILE writes a recipe for it",
            layout="one .csv, .tsv, .parquet or .jsonl file with a header and a row for each sample",
        )


def word_columns(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns whose cells are words according to [data.columns], even if they look like numbers."""
    rules = rules_of("[data.columns]", columns)
    return tuple(column for column, rule in rules.items() if rule.of_words or rule.is_whole)


def read(
    path: Path,
    problems: Problems,
    words: Callable[[list[str]], Mapping[str, bool]] = lambda _: {},
    dialect: Dialect = PLAIN,
) -> "pd.DataFrame":
    """Read a table from a file.

    Args:
        problems: columns that occur twice are added to this object as faults.
        words: returns, for the names of all columns, those whose cells are words even if they look like numbers, since
            in a text file "1" and "01" are two clients. It maps the column of the labels to true: they become numbers
            if all of them are written as numbers.
        dialect: how a text file is written.

    Raises:
        DataError: the file is damaged, has no rows or has a type that polyfed does not read, or a library that reads it
            is not installed.
    """
    import pandas as pd  # imported here, because the import takes half a second

    if path.suffix not in SUFFIXES:
        raise DataError(f"'{path}' is no table that polyfed reads. Allowed: {', '.join(SUFFIXES)}, or an .npz file")
    try:
        if path.suffix == ".parquet":
            frame = _parquet(path)
        elif path.suffix == ".jsonl":
            frame = pd.DataFrame.from_records(_lines(path))
        else:
            separator = dialect.separator or ("\t" if path.suffix == ".tsv" else ",")
            dialect = replace(dialect, separator=separator)
            dialect.check()
            header = _header(path, dialect, problems)
            _check_cells(path, len(header), _rows(path))
            frame = _cells(path, dialect, header, words(header))
            if not dialect.comment and _is_line_by_line(path, len(frame)):
                frame.attrs[FIRST_LINE] = 2
    except (UnicodeError, LookupError) as error:
        raise DataError(_other_encoding(path, dialect, error)) from None
    except (OSError, ValueError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"'{path}' cannot be read as {path.suffix} ({why}). Save or copy it again") from None
    if not len(frame):
        raise DataError(f"'{path}' has no rows, only the names of columns. Check where it comes from")
    _check_whole_numbers(frame, path, problems)
    return frame


def _check_whole_numbers(frame: "pd.DataFrame", path: Path, problems: Problems) -> None:
    """Add a fault for each column with a whole number that no array can hold, such as one of 400 digits."""
    least, most = -(2**63), 2**63 - 1
    faults = []
    for place, name in enumerate(frame.columns):
        column = frame.iloc[:, place]
        if column.dtype != object and str(column.dtype) != "uint64":
            continue
        for row, cell in enumerate(column):
            if isinstance(cell, int) and not least <= cell <= most:
                digits = len(f"{abs(cell):x}") * 6 // 5
                text = f"a number of about {digits} digits" if digits > 24 else str(cell)
                faults.append(
                    DataError(
                        f"'{path}': column '{name}' holds {text} at row {row}. The largest whole number"
                        f" is {most:,}. Correct the cell, or write it as a word"
                    )
                )
                break
    for fault in faults:
        problems.add(fault)
    if faults:
        problems.raise_all()


def _rows(path: Path) -> int:
    """Return the number of lines of a file."""
    with path.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b"")) + 1


def _is_line_by_line(path: Path, rows: int) -> bool:
    """Return whether each row of a text file is one line, after one line of names."""
    with path.open("rb") as stream:
        stream.seek(-1, io.SEEK_END)
        ended = stream.read() == b"\n"
    return _rows(path) - ended == rows + 1


def _check_cells(path: Path, columns: int, rows: int) -> None:
    """Refuse a file whose short rows would be filled up to a huge table."""
    check_expansion(f"'{path}'", path.stat().st_size, 8 * columns * rows, "save it as .parquet or as an .npz file")


def _parquet(path: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading '{path}' needs the package pyarrow: pip install 'polyfed[parquet]'") from None
    from pyarrow import parquet

    size, expanded, parts = path.stat().st_size, 0, []
    try:
        with parquet.ParquetFile(path) as file:
            for part in file.iter_batches(batch_size=512):  # a few bytes can stand for a value that every row repeats
                expanded += part.nbytes
                check_expansion(f"'{path}'", size, expanded, "save it without dictionaries, or as an .npz file")
                parts.append(part)
            frame: pd.DataFrame = pyarrow.Table.from_batches(parts, file.schema_arrow).to_pandas()
            return frame
    except pyarrow.ArrowException as error:
        raise DataError(f"'{path}' is damaged or no parquet file ({str(error)[:200]}). Save or copy it again") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file."""
    rows, names = [], set[str]()
    with path.open(encoding="utf-8-sig") as stream:  # `str.splitlines` would also split a text at U+2028 or U+0085
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"'{path}', line {number} is not JSON ({error}). Each line must be one object"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"'{path}', line {number} is a {type(row).__name__}. Each line must be one object")
            names.update(row)
            rows.append(row)
            _check_cells(path, len(names), len(rows))
    if not rows:
        raise DataError(f"'{path}' has no rows")
    return rows


def _other_encoding(path: Path, dialect: Dialect, error: Exception) -> str:
    """Return the text about a file that is not written in the encoding in which it was read."""
    return (
        f"'{path}' cannot be read as {path.suffix} in the encoding {dialect.encoding} ({error}). Save it as UTF-8, or "
        f"say how it is written: {_written(path)}"
    )


_SNIFFED = 1 << 22  # bytes of a file from which its dialect is guessed

_COMMA, _POINT = re.compile(r"-?\d+,\d+"), re.compile(r"-?\d+\.\d+")


def guessed_dialect(path: Path) -> dict[str, str]:
    """Return the options of [data] that say how a text file seems to be written, without those that need not be said.

    The separator is the mark that divides most lines into as many cells as the header, and into most cells.
    """
    with path.open("rb") as stream:
        head = stream.read(_SNIFFED)
    result: dict[str, str] = {}
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in head[:4]:
        result["encoding"] = "utf-16"
    else:
        try:
            codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=False)
        except UnicodeDecodeError:
            result["encoding"] = "cp1252" if _reads(head, "cp1252") else "latin-1"
    text = head.decode(result.get("encoding", "utf-8-sig"), errors="replace")
    if text[:1] in ("#", "%"):
        result["comment"] = text[0]
    lines = [line for line in text.splitlines() if line.strip() and line[0] != result.get("comment")][:50]
    usual, tables = "\t" if path.suffix == ".tsv" else ",", {}
    for mark in dict.fromkeys((usual, *";\t,|")):
        rows = [*csv.reader(lines, delimiter=mark)]
        width = len(rows[0]) if rows else 0
        tables[mark] = width if 2 * sum(len(row) == width for row in rows) > len(rows) else 0
    mark = max(tables, key=tables.__getitem__)
    mark = " " if tables[mark] <= 1 and lines and " " in lines[0] else mark
    if mark != usual:
        result["separator"] = mark
    cells = [cell.strip() for row in csv.reader(lines[1:], delimiter=mark) for cell in row]
    if mark != "," and sum(map(bool, map(_COMMA.fullmatch, cells))) > sum(map(bool, map(_POINT.fullmatch, cells))):
        result["decimal"] = ","
    return result


def _reads(head: bytes, encoding: str) -> bool:
    try:
        head.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _written(path: Path) -> str:
    """Return the end of an error text: how a file is written, for a recipe, for `polyfed init` and in Python."""
    found = guessed_dialect(path) or {"encoding": "cp1252"}
    lines = "; ".join(f"{name} = {toml_value(value)}" for name, value in found.items())
    options = [("--set", f"data.{name}={toml_value(value)}") for name, value in found.items()]
    python = ", ".join(f"{name}={value!r}" for name, value in found.items())
    words = " ".join(map(shlex.join, options))
    return again(*options, otherwise=f"[data] {lines} (polyfed init: add {words}; in Python: {python})")


def _cells(path: Path, dialect: Dialect, header: Sequence[str], words: Mapping[str, bool]) -> "pd.DataFrame":
    """Return the rows of a CSV file, without columns that have no name.

    In the columns of `words`, only an empty cell is empty. In the others, `nan` is no number either.

    A comma at the end of each row therefore has no effect, whether the header ends with a comma or not.

    Raises:
        DataError: rows hold more cells than the header has names.
    """
    import pandas as pd

    with warnings.catch_warnings():
        # pandas only warns about rows that are too long: by default it moves every cell to another column, and with
        # `index_col=False` it drops the last cells
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            texts = {*words} & {*header}
            gone = ["", *dialect.empty]
            frame = pd.read_csv(
                path,
                sep=dialect.separator,
                decimal=dialect.decimal,
                comment=dialect.comment or None,
                encoding=dialect.for_reading,
                index_col=False,
                dtype=dict.fromkeys(texts, "object"),
                keep_default_na=False,
                na_values={
                    name or f"Unnamed: {place}": gone if name in texts else [*gone, *NOT_A_NUMBER]
                    for place, name in enumerate(header)
                }
                | {len(header): [""]},  # beyond the header, after a last separator
                low_memory=False,  # else pandas guesses the type of each piece of a large file anew
            )
        except pd.errors.ParserWarning:
            raise DataError(
                f"'{path}' has rows with more cells than the header has names ({len(header)}: "
                f"{', '.join(map(repr, header[:5]))}{', ...' if len(header) > 5 else ''}). Name every column in the "
                "header, or remove the other cells and their separators"
            ) from None
    for name in texts:
        frame[name] = as_numbers(frame[name], dialect) if words[name] else frame[name]
    nameless = {
        place: column for place, column in enumerate(frame.columns) if place < len(header) and not header[place]
    }
    if held := [str(place + 1) for place, column in nameless.items() if not frame[column].isna().all()]:
        warnings.warn(
            f"'{path}': left out, because the header has no name for it: column {', '.join(held)}. Such a column often "
            "holds row numbers, as pandas writes them without index=False. To use the column, name it in the header",
            PolyfedWarning,
            stacklevel=3,
        )
    return frame.drop(columns=list(nameless.values()))


def as_numbers(column: "pd.Series[Any]", dialect: Dialect = PLAIN) -> "pd.Series[Any]":
    """Return a column of words as numbers if all of them are written in the one way in which a number is written.

    "1" is such a word, and "01" is not: two different words never become one number.
    """
    held = column.dropna()
    if not len(held):
        return column
    if held.map(lambda word: bool(WHOLE_NUMBER.fullmatch(word))).all() and len(held) == len(column):
        return column.map(int)
    texts = held.str.replace(dialect.decimal, ".", regex=False)
    decimal = texts.map(lambda word: bool(DECIMAL.fullmatch(word)))
    return column.where(column.isna(), texts).astype("float64") if decimal.all() else column


def _header(path: Path, dialect: Dialect, problems: Problems) -> list[str]:
    """Return the names of the columns, and add a fault for names that occur twice, because pandas would rename them.

    Raises:
        DataError: the header seems to be separated by another character, because it has only one name, and this name
            contains such a character.
    """
    with path.open(encoding=dialect.for_reading, newline="") as stream:
        lines = (line for line in stream if not (dialect.comment and line.startswith(dialect.comment)))
        header = next(csv.reader(lines, delimiter=dialect.separator), [])
    first = header[0] if header else ""
    if not dialect.comment and first[:1] in ("#", "%"):
        raise DataError(
            f"'{path}' begins with the line {first[:40]!r}, which looks like a comment. Remove it, or "
            f"write {_written(path)}"
        )
    found = [mark for mark in ";\t,| " if len(header) == 1 and mark in first]
    if found:
        wanted = {"\t": "tabs", ",": "commas"}.get(dialect.separator, repr(dialect.separator))
        raise DataError(
            f"'{path}' has one column, {first!r}: its cells seem to be separated by {found[0]!r}, and polyfed "
            f"reads {wanted} in it. Save it with commas (and decimal points), or write {_written(path)}"
        )
    if doubled := sorted(name for name, count in Counter(header).items() if count > 1 and name):
        names = ", ".join(map(repr, doubled))
        problems.add(DataError(f"'{path}' has several columns named {names}. Rename or remove the copies"))
    return header
