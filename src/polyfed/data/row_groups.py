"""The groups of rows by a column of the data, for an evaluation job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.data.reading.files import Arrays


def group_codes(path: str | Path, groups: Mapping[str, Sequence[Any]], rows: int) -> dict[str, Tensor]:
    """Return the group of each row by each column: the position of its value in the list, or the list's length.

    Args:
        path: an `.npz` file or a folder of `.npy` files.
        groups: column -> the values that name the groups.
        rows: the number of rows of the data.

    Raises:
        DataError: there is no such array, or it has another number of rows.
    """
    if not groups:
        return {}
    try:
        arrays = Arrays(path)
    except DataError as error:
        raise RecipeError(
            f"[algorithm] groups needs the columns of an .npz file or of a folder of .npy files: {error}",
            ("algorithm", "groups"),
        ) from None
    found = {}
    for name, values in groups.items():
        if name not in arrays:
            raise DataError(f"[algorithm] groups: the data has no array '{name}'; {did_you_mean(name, arrays.names)}")
        column = np.asarray(arrays[name])
        if column.shape != (rows,):
            raise DataError(f"[algorithm] groups: the array '{name}' has the shape {column.shape}, and not ({rows},)")
        words = column.astype(str)
        codes = np.full(rows, len(values), dtype=np.int64)
        for code, value in enumerate(values):
            codes[words == str(value)] = code
        found[name] = torch.from_numpy(codes)
    return found
