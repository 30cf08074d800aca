"""How the user says that data is to be read, in one form for arrays, frames, datasets and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.option_checks import BELOW_ONE, checked
from polyfed.data.column_rules import ColumnRule, rules_of
from polyfed.data.columns import Standardise
from polyfed.data.reading.row_facts import as_array
from polyfed.data.reading.values import Layout

Partial = Literal["refuse", "absent"]
EmptyRows = Literal["refuse", "leave-out"]
Unmeasured = Literal["absent", "fill"]
Modalities = Mapping[str, str | Sequence[str]]

ROLES = ("labels", "clients", "split", "split_personal", "person")
"""The facts of a row, which a data set or the caller gives."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the user says about data: which columns or arrays hold what, and how they are read.

    Attributes:
        labels: labels of the rows. For tables and datasets, this may also be the name of a column or key (by default
            `label`), or a list of columns of targets; empty if there are no labels.
        clients: natural client of each row, or the name of a column or key.
        split: split of each row, or the name of a column or key.
        split_personal: split of each row within its natural client, see `Columns`, or the name of a column.
        person: the person of each row, of whose rows no random split divides any, or the name of a column.
        ids: sample ids of the rows, distinct integers (N,), or the name of their column. The word `rows` declares that
            row i of every array is the same sample.
        modalities: for tables: modality -> a column, a pattern with `*`, or a list of these; if None, they are guessed.
            For datasets: the names of the parts of a sample. If a sample is a dictionary, its other keys are not read.
        present: modality -> bool (N,), False if a row lacks the modality.
        class_names: names of the classes in order of their numbers.
        layout: modality -> axes of a sample, for modalities where the guess is wrong; see `laid_out`.
        partial: what to do with rows of a table that have only some cells of a modality.
        empty_rows: what to do with rows that lack every modality, or their class.
        unmeasured: what a row is in which every cell of a modality is empty and rules fill each.
        standardise: the modalities to standardise; see `Columns.standardise`.
        test_share: share of every class that becomes the test set, if there is no split.
        seed: seed for drawing that test set.
        columns: column -> how its words, empty cells or dates become numbers.
        folder: the folder of the data file, in which the paths of image files begin; None for data in memory.
        needs_labels: whether the task needs labels.
        numeric: whether the labels are targets, so that whole numbers are quantities and not class numbers.
        optional: the roles among `labels`, `clients`, `split`, `split_personal`, `person` and `ids` whose column may be
            missing, because the user did not name it. `labels` is among them only if the task needs no labels.
    """

    labels: Any = None
    clients: Any = None
    split: Any = None
    split_personal: Any = None
    person: Any = None
    ids: Any = None
    modalities: Modalities | Sequence[str] | None = None
    present: Mapping[str, Any] | None = None
    class_names: tuple[str, ...] | None = None
    layout: Mapping[str, Layout] | None = None
    partial: Partial = "refuse"
    empty_rows: EmptyRows = "refuse"
    unmeasured: Unmeasured = "absent"
    standardise: Standardise = "uneven"
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0
    columns: Mapping[str, ColumnRule] = field(default_factory=dict)
    folder: Path | None = None
    needs_labels: bool = True
    numeric: bool = False
    optional: tuple[str, ...] = ()

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Return the names of the label columns of a table."""
        if isinstance(self.labels, str):
            return (self.labels,) if self.labels else ()
        return tuple(self.labels or ())

    @property
    def meaning(self) -> dict[str, str]:
        """Return the meaning of each column of a table that has one."""
        facts = {
            self.person: "person",
            self.ids: "row id",
            self.split_personal: "split within a client",
            self.split: "split",
            self.clients: "client",
        }
        return {column: role for column, role in facts.items() if column} | dict.fromkeys(self.label_columns, "label")

    def without_roles(self, modalities: Modalities | None) -> "Given":
        """Return how the modalities of arrays are read, whose facts of the rows were read before."""
        facts: dict[str, Any] = dict.fromkeys(ROLES)
        return replace(self, modalities=modalities, ids="", **facts)

    def options_checked(self) -> "Given":
        """Return the same, after a check of the options that do not depend on the form of the data.

        Arrays count as lists, and class names may be whole numbers.

        Raises:
            RecipeError: an option has an invalid type or value. The message lists all such options.
        """
        names = ("class_names", "layout", "partial", "empty_rows", "unmeasured", "standardise", "test_share")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if options["layout"] is not None:
            _refuse_no_dictionary("layout", options["layout"], "'HWC'")
        classes = options["class_names"]
        classes = classes.tolist() if hasattr(classes, "tolist") else classes
        if isinstance(classes, Sequence) and not isinstance(classes, str):
            options["class_names"] = [str(name) if isinstance(name, Integral) else name for name in classes]
        return replace(self, columns=rules_of("columns", self.columns), **checked("data:", Given, options))


def with_masks(present: Mapping[str, Any], masks: Any) -> dict[str, Any]:
    """Return which rows have each modality: those that have it according to both the data and the caller's mask.

    Args:
        present: modality -> bool (N,), according to the data.
        masks: modality -> bool (N,), given by the caller. None if the caller gave no masks.

    Raises:
        RecipeError: `masks` is not a dictionary.
        DataError: a mask holds values other than true and false.
    """
    result = dict(present)
    if masks is None:
        return result
    _refuse_no_dictionary("present", masks, "mask")
    for name, mask in masks.items():
        array: NDArray[Any] = as_array(mask, f"data: present['{name}']")
        if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
            raise DataError(
                f"data: present['{name}'] holds other values than true and false. Give an array with true for each "
                "row that has the modality"
            )
        known = result.get(name)
        fits = known is not None and np.shape(known) == array.shape
        result[name] = array.astype(bool) & known if fits else array.astype(bool)
    return result


def _refuse_no_dictionary(name: str, value: Any, entry: str) -> None:
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{name} is of the type {type(value).__name__}: give a dictionary with an entry for each modality, as in "
            f"{name}={{'image': {entry}}}"
        )
