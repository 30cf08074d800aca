"""Checks the options for reading data in memory. The check takes place before any data is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.schema import BELOW_ONE, checked
from polyfed.data.columns import Standardise
from polyfed.data.reading.frames import Partial
from polyfed.data.reading.layout import Layout
from polyfed.data.reading.row_facts import as_array


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """The options that do not depend on the form of the data.

    Attributes:
        class_names: names of the classes in order of their numbers.
        layout: modality -> axes of a sample; see `laid_out`.
        partial: what to do with rows of a data frame that have only some cells of a modality.
        standardise: the modalities to standardise; see `Columns.standardise`.
        test_share: share of every class that becomes the test set, if there is no split.
    """

    class_names: tuple[str, ...] | None = None
    layout: Mapping[str, Layout] | None = None
    partial: Partial = "refuse"
    standardise: Standardise = "uneven"
    test_share: Annotated[float, BELOW_ONE] = 0.2

    @classmethod
    def of(cls, **options: Any) -> "ReadingOptions":
        """Check the options. Arrays count as lists, and class names may be whole numbers.

        Raises:
            RecipeError: an option has an invalid type or value. The message lists all such options.
        """
        if options.get("layout") is not None:
            _refuse_no_dictionary("layout", options["layout"], "'HWC'")
        names: Any = options.get("class_names")
        names = names.tolist() if hasattr(names, "tolist") else names
        if isinstance(names, Sequence) and not isinstance(names, str):
            options["class_names"] = [str(name) if isinstance(name, Integral) else name for name in names]
        return cls(**checked("data:", cls, options))


def with_masks(present: Mapping[str, Any], masks: Any) -> dict[str, Any]:
    """Return which rows have each modality: those that have it according to both the data and the caller's mask.

    Args:
        present: modality -> bool (N,), according to the data.
        masks: modality -> bool (N,), given by the caller. None if the caller gave no masks.

    Raises:
        RecipeError: `masks` is not a dictionary.
        DataError: a mask holds values other than true and false.
    """
    found = dict(present)
    if masks is None:
        return found
    _refuse_no_dictionary("present", masks, "mask")
    for name, mask in masks.items():
        array: NDArray[Any] = as_array(mask, f"data: present['{name}']")
        if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
            raise DataError(
                f"data: present['{name}'] holds other values than true and false. Give an array with true for each "
                "row that has the modality"
            )
        known = found.get(name)
        fits = known is not None and np.shape(known) == array.shape
        found[name] = array.astype(bool) & known if fits else array.astype(bool)
    return found


def _refuse_no_dictionary(name: str, value: Any, entry: str) -> None:
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{name} is of the type {type(value).__name__}: give a dictionary with an entry for each modality, as in "
            f"{name}={{'image': {entry}}}"
        )
