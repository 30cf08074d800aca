"""Finds columns that nothing reads and that seem to name persons, whose rows a random split may have divided.

The rule shall be silent about dates, sites, scanners and texts, which also occur in several rows (ours): it takes a
column of words or whole numbers with many values, of which each has few rows and enough have several. Whole numbers may
also be quantities, such as an age, and need very many values. A column whose name says that it names persons needs few.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.reading.array_files import Arrays
from polyfed.data.reading.column_guess import LONGEST_NAME, LONGEST_WORD, WRITTEN, are_dates
from polyfed.data.reading.values import is_missing

if TYPE_CHECKING:
    import pandas as pd

FEWEST, FEWEST_NUMBERS, FEWEST_NAMED = 20, 200, 3
"""The fewest different values of words, of whole numbers, and of a column whose name says that it names persons."""

MOST_ROWS, MOST_OF_ONE = 10, 0.05
"""The most rows that a value has on average, and the largest share of the rows that one has, or twice that average."""

LEAST_REPEATED = 0.1
"""The least share of the rows whose value another row has too."""

_WORD = r"(?:^|[^a-z]){}(?:$|[^a-z])"

_PERSONS = re.compile(
    _WORD.format("(patient|subject|participant|proband|person|speaker|user|mrn|pid)s?([_ -]?(id|nr|no|code|name))?"),
    re.IGNORECASE,
)

_OTHERS = re.compile(
    _WORD.format(
        "(site|hospital|clinic|cent(er|re)|ward|room|scanner|device|machine|camera|sensor|model|vendor|batch|plate|city"
        "|country|region|zip|postcode|plz|date|day|week|month|year|time|age|version|protocol|operator|reader|rater)s?"
        "([_ -]?(id|nr|no|code|name))?"
    ),
    re.IGNORECASE,
)
"""Names of columns that group rows by something other than persons."""


def names_among(columns: "Mapping[str, pd.Series[Any]]") -> dict[str, Tensor]:
    """Return the number of each row's value, int64 (N,), of the columns that seem to name persons.

    Args:
        columns: the columns that nothing reads.
    """
    return {name: codes for name, column in columns.items() if (codes := _codes(name, column)) is not None}


def names_in(arrays: Arrays, names: Sequence[str]) -> dict[str, Tensor]:
    """Return `names_among` of those of these arrays that hold one word or whole number for each row."""
    import pandas as pd  # imported here, because the import takes half a second

    single: dict[str, Any] = {}
    for name in names:
        with suppress(DataError):  # of an array that nothing reads
            shape, kind = arrays.form(name)
            if len(shape) == 1 and kind.kind in "iuU" and kind.itemsize <= 4 * LONGEST_WORD:
                single[name] = pd.Series(arrays[name].tolist())
    return names_among(single)


def _codes(name: str, column: "pd.Series[Any]") -> Tensor | None:
    """Return the number of each row's value, -1 for an empty cell, if the column seems to name persons."""
    if _OTHERS.search(name) or column.dtype.kind in "fbmMc" or are_dates(column):
        return None
    cells = column.tolist()
    if not all(isinstance(cell, str | int | np.integer) or is_missing(cell) for cell in cells):
        return None
    known = [(row, str(cell).strip()) for row, cell in enumerate(cells) if not is_missing(cell) and str(cell).strip()]
    if any(len(word) > LONGEST_WORD or len(word.split()) > LONGEST_NAME for _, word in known):
        return None  # texts, of which an array would take the memory of the longest for each row
    words, where, counts = np.unique([word for _, word in known], return_inverse=True, return_counts=True)
    numbers = all(WRITTEN.fullmatch(word) for word in words.tolist())
    least = FEWEST_NAMED if (named := bool(_PERSONS.search(name))) else FEWEST_NUMBERS if numbers else FEWEST
    if len(words) < least or counts[counts > 1].sum() < LEAST_REPEATED * len(known):
        return None
    rare = len(known) <= MOST_ROWS * len(words) and counts.max() <= max(2 * MOST_ROWS, MOST_OF_ONE * len(known))
    if not (named or rare):
        return None
    codes = np.full(len(cells), -1, np.int64)
    codes[[row for row, _ in known]] = where
    return torch.from_numpy(codes)
