"""Joins the splits of data in memory, where each split is a data frame or a data set of its own."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from os import PathLike
from typing import Any

import numpy as np

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.problems import Problems
from polyfed.data.reading.column_guess import UNNAMED, kind_of
from polyfed.data.reading.row_facts import SPLITS


def refuse_other_columns(data: Mapping[str, Any], modalities: object, named: Sequence[Any]) -> None:
    """Refuse splits that have different columns. Only columns that polyfed reads are compared.

    Args:
        data: split -> a data frame or another data set.
        modalities: the option `modalities`, with which the caller names the columns of each modality. If None, polyfed
            reads all columns of numbers.
        named: the options `labels` and `clients`. If one of them is the name of a column, polyfed reads this column
            too.

    Raises:
        DataError: a split has no rows, or lacks a column that other splits have. The message lists all faults.
    """
    problems = Problems()
    columns: dict[str, Counter[str]] = {}
    held: dict[str, set[str]] = {}
    for name, part in data.items():
        if not len(part):
            problems.add(DataError(f"data: split '{name}' has no rows. Leave it out, or check where it comes from"))
        elif is_frame(part):
            frame = part.rename(columns=str)
            columns[name] = Counter(frame.columns)
            kinds = {column: kind_of(frame[column]) for column, count in columns[name].items() if count == 1}
            roles = {word for word in ("label", "client", *named) if isinstance(word, str)}
            read = {column for column, kind in kinds.items() if kind != "text" and not UNNAMED.fullmatch(column)}
            held[name] = read | (roles & kinds.keys())
    if modalities is None:
        every = sorted(set().union(*held.values()))
        for name in held:
            if lacking := [column for column in every if column not in columns[name]]:
                other = next(part for part in held if lacking[0] in held[part])
                listed = ", ".join(map(repr, lacking[:5]))
                problems.add(
                    DataError(
                        f"data: split '{name}' has no column {listed}, and split '{other}' has. Give all splits the "
                        "same columns, or name the columns of each modality in modalities"
                    )
                )
    problems.raise_all()


def refuse_other_dictionaries(data: Mapping[str, Any], labels: Any) -> None:
    """Check that `data` maps each modality to an array, and that `labels` is not the name of a column.

    The function refuses `data` whose keys are splits, as in {'train': ..., 'test': ...}, if all values are paths of
    files or all values are dictionaries. If `data` holds arrays, `labels` must hold one label for each row, because
    arrays have no column that a name could select.

    Raises:
        RecipeError: `data` maps each split to the path of a file or to a dictionary, or `labels` is a name.
    """
    by_split = all(str(name).lower() in SPLITS for name in data)
    name, part = next(iter(data.items()))
    if by_split and all(isinstance(value, str | PathLike) for value in data.values()):
        raise RecipeError(
            f"data['{name}'] is the path of a file, but a split must be a data frame or a dataset. Read the files, as "
            f"in data={{'{name}': pandas.read_csv('{part}'), ...}}. Or give one file with a column `split`, as in "
            "data='all.csv', split='split'"
        )
    if by_split and all(isinstance(value, Mapping) for value in data.values()):
        raise RecipeError(
            f"data['{name}'] is a {type(part).__name__}, but a split must be a data frame or a dataset. Join the "
            "arrays of all splits, and give the split of each row, as in data={'image': x}, labels=y, split=['train', "
            "..., 'test']"
        )
    if isinstance(labels, str):
        raise RecipeError(
            f"labels = '{labels}' is a name, but data is arrays. Give one label for each row, as in labels=y"
        )


def same_order(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits with their columns in the order of the first split, since features are read in this order."""
    parts = list(data.items())
    first = dict.fromkeys(getattr(parts[0][1], "columns" if is_frame(parts[0][1]) else "column_names", ()))
    found: dict[str, Any] = {}
    for name, part in parts:
        held = list(getattr(part, "columns" if is_frame(part) else "column_names", ()))
        known = set(held)
        if len(known) < len(held) or not first:
            found[name] = part
            continue
        order = [column for column in first if column in known] + [column for column in held if column not in first]
        found[name] = part[order] if is_frame(part) else part.select_columns(order) if held != order else part
    return found


def join_arrays(arrays: Sequence[Any], name: str, problems: Problems) -> Any:
    """Return the arrays of all splits, joined one after another.

    Time series (N, T, F) and token ids (N, T) may differ in length between the splits. They are padded with zeros at
    the end to the longest, as `array_of` pads the samples of one split.
    """
    held = [np.asarray(array) for array in arrays]
    shapes = {array.shape[1:] for array in held}
    if len(shapes) > 1:
        ranks, whole = {len(shape) for shape in shapes}, all(array.dtype.kind in "iu" for array in held)
        if len({shape[1:] for shape in shapes}) > 1 or not (ranks == {2} or (ranks == {1} and whole)):
            found = " and ".join(map(str, sorted(shapes)))
            text = f"data: modality '{name}' has samples of shape {found} in different splits"
            problems.add(DataError(f"{text}. Bring the samples of all splits to one shape"))
            return arrays[0]
        longest = max(shape[0] for shape in shapes)
        rest = [(0, 0)] * (held[0].ndim - 2)
        held = [np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in held]
    return np.concatenate(held)


def has_columns(data: Any) -> bool:
    """Whether data in memory is a table with columns, or consists of such tables, one for each split."""
    parts = list(data.values()) if isinstance(data, Mapping) else [data]
    return bool(parts) and all(is_frame(part) or is_hugging_face(part) for part in parts)


def is_frame(data: Any) -> bool:
    """Whether an object is a pandas data frame."""
    return type(data).__name__ == "DataFrame" and hasattr(data, "iloc")


def is_hugging_face(data: Any) -> bool:
    """Whether an object is a `Dataset` of the library `datasets` by Hugging Face."""
    return hasattr(data, "to_pandas") and hasattr(data, "features") and hasattr(data, "column_names")


def has_rows(values: Any) -> bool:
    """Whether a value can hold one entry for each row: it has a length, and is not a text, a mapping or a set."""
    try:
        return not isinstance(values, str | bytes | Mapping | Set) and len(values) >= 0
    except TypeError:  # None, a number, an array or a tensor without axes
        return False


def shown(value: Any) -> str:
    """Return a value for an error text: itself if it is a word or a number, or else its type."""
    return repr(value) if value is None or np.isscalar(value) else f"a {type(value).__name__}"
