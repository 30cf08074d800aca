"""The groups of rows by a column of the data, for an evaluation job."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.registry import allowed_arrays
from polyfed.data.reading.array_files import Arrays
from polyfed.data.reading.row_facts import tell_alike
from polyfed.data.sources.own.table_files import Table, read


def group_codes(source: Any, groups: Mapping[str, Sequence[Any]], rows: int) -> dict[str, Tensor]:
    """Return the group of each row by each column: the position of its value in the list.

    Other values have numbers from the list's length on, so that what a device hides does not depend on the list.

    Args:
        source: the source of the data, or the path of an `.npz` file or of a folder of `.npy` files.
        groups: column -> the values that name the groups.
        rows: the number of rows of the data.

    Raises:
        RecipeError: the source has no columns beside its modalities.
        DataError: there is no such column, or it has another number of rows.
    """
    if not groups:
        return {}
    columns, result = _columns(source, groups), {}
    for name, values in groups.items():
        if name not in columns:
            raise DataError(
                f"[algorithm] groups: the data has no array '{name}'; {did_you_mean(name, list(columns))}",
                ("algorithm", "groups"),
            )
        words = columns[name]
        if words.shape != (rows,):
            raise DataError(
                f"[algorithm] groups: the array '{name}' has the shape {words.shape}, and not ({rows},)",
                ("algorithm", "groups"),
            )
        codes = len(values) + np.unique(words, return_inverse=True)[1].astype(np.int64)
        for code, value in enumerate(values):
            codes[words == str(value)] = code
        result[name] = torch.from_numpy(codes)
    return result


def values_of(source: Any, name: str) -> list[str]:
    """Return the different values of a column, without empty cells, in sorted order, and tell those that look alike.

    Raises:
        RecipeError, DataError: see `group_codes`.
    """
    columns = _columns(source, (name,))
    if name not in columns:
        raise DataError(f"--group {name}: the data has no column '{name}'; {did_you_mean(name, list(columns))}")
    counts = Counter(map(str, columns[name].ravel()))
    result = sorted(counts.keys() - {"nan", "None", "<NA>", ""})
    tell_alike(np.array(result, dtype=np.str_), f"--group {name}: the data", "groups", counts, name)
    return result


def device_groups(path: str, groups: Mapping[str, Sequence[Any]], rows: int) -> dict[str, Tensor]:
    """Return `group_codes` of a device, with every other column that its owner allows.

    Two jobs could ask for one column each, so the device compares the groups of all of them.
    """
    if not groups:
        return {}
    more = {name: () for name in allowed_arrays("groups") if name in Arrays(path)}
    return group_codes(path, {**more, **groups}, rows)


def _columns(source: Any, wanted: Collection[str]) -> dict[str, Any]:
    """Return the cells of the wanted columns as words. Other columns have an empty entry, for an error that lists them.

    Raises:
        RecipeError: the source has no such columns.
    """
    if isinstance(source, Table):
        problems = Problems()
        frame = read(Path(source.path).expanduser(), problems, lambda _: dict.fromkeys(wanted, False), source.dialect)
        problems.raise_all()
        frame = source.for_other_rows().relabelled(frame, wanted)  # another file may lack a word of `relabel`
        return {name: frame[name].to_numpy().astype(str) if name in wanted else None for name in frame.columns}
    needs = "[algorithm] groups needs the columns of a table, of an .npz file or of a folder of .npy files"
    path = source if isinstance(source, str | Path) else getattr(source, "path", None)
    if path is None:
        raise RecipeError(
            f"{needs}, and the source '{type(source).__name__}' reads no such file. Score without groups, or the rows "
            "of a file (--data)",
            ("algorithm", "groups"),
        )
    try:
        arrays = Arrays(path)
    except DataError as error:
        raise RecipeError(f"{needs}: {error}", ("algorithm", "groups")) from None
    return {name: np.asarray(arrays[name]).astype(str) if name in wanted else None for name in arrays.names}
