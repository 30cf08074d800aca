"""The caller's description of data in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.data.reading.frames import Modalities, Partial

ROLES = ("labels", "clients", "split")
"""The facts of a row, which a data set or the caller gives."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The caller's description of data in memory.

    Attributes:
        labels: labels of the rows. For data frames and datasets, this may also be the name of a column or key (by
            default `label`).
        clients: natural client of each row, or the name of a column or key.
        split: split of each row, or the name of a column or key.
        modalities: for data frames: modality -> a column, a pattern, or a list of these. For datasets: the names of the
            parts of a sample. If a sample is a dictionary, its other keys are not read.
        present: modality -> bool (N,), False if a row lacks the modality.
        class_names: names of the classes in order of their numbers.
        ids: sample ids of the rows, distinct integers (N,). The word `rows` instead of ids declares that row i of every
            array is the same sample.
        layout: modality -> axes of a sample, for modalities where the guess is wrong; see `laid_out`.
        partial: what to do with rows of a data frame that have only some cells of a modality.
        needs_labels: whether the task needs labels.
        numeric: whether the labels are targets, so that whole numbers are quantities and not class numbers.
    """

    labels: Any = None
    clients: Any = None
    split: Any = None
    modalities: Modalities | Sequence[str] | None = None
    present: Mapping[str, Any] | None = None
    class_names: Sequence[str] | None = None
    ids: Any = None
    layout: Mapping[str, str] | None = None
    partial: Partial = "refuse"
    needs_labels: bool = True
    numeric: bool = False
