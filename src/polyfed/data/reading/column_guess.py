"""Guesses what the columns of a data frame hold: the features of a modality, row ids, row numbers or texts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from polyfed.data.reading.cell_values import is_list, is_missing
from polyfed.data.reading.column_grouping import REST, grouped

if TYPE_CHECKING:
    import pandas as pd

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
    """

    groups: dict[str, list[str]]
    texts: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()

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
                "row, name it as client. Texts to train on must be numbers or token ids; the source `hf` reads texts "
                "with a pretrained model"
            )
        return tuple(sentences)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Warnings for the user about columns that are left out, and about columns that may not be inputs."""
        rest = self.groups.get(REST, [])
        if not rest:
            return self.left_out
        listed = ", ".join(map(repr, rest[:MOST_NAMED])) + (
            f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
        )
        return (
            f"modality '{REST}' has the columns that are in no other modality: {listed}. The model trains on them, so "
            "another target or a row number among them would reveal the label. Choose the columns of each modality, "
            f"as in modalities={{{', '.join(f'{name!r}: {group[:1]}' for name, group in self.groups.items())}}}",
            *self.left_out,
        )


def guessed(frame: "pd.DataFrame", special: Iterable[str]) -> Guess:
    """Guess the columns of each modality from the names and types of the columns that are not in `special`.

    Columns that hold text and columns without a name in the header are left out. If a file has a comma at the end of
    each row, pandas reads an unnamed column without values. The result does not mention such an empty column.

    Raises:
        DataError: the names of some columns cannot be made into a valid name for a modality.
    """
    found: dict[str, list[str]] = {"number": [], "list": [], "text": [], "unnamed": []}
    for column in frame.columns:
        if column in special:
            continue
        if not UNNAMED.fullmatch(column):
            found[kind_of(frame[column])].append(column)
        elif not frame[column].isna().all():
            found["unnamed"].append(column)
    return Guess(grouped(found["number"], found["list"]), tuple(found["text"]), tuple(found["unnamed"]))


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
