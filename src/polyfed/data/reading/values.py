"""How cells, lists, arrays and tensors become the tensor of a modality: their numbers, missing rows and layout."""

import io
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, again, counted, typed_verb
from polyfed.core.system.json_and_toml import toml_value
from polyfed.data.columns import Column
from polyfed.data.media.clip import optional

Array = NDArray[Any]


def is_missing(cell: Any) -> bool:
    """Whether a cell is empty: None, NaN, or the empty cell of a pandas column."""
    if isinstance(cell, float | np.floating):
        return bool(cell != cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def unmasked(values: Any) -> Any:
    """Return a masked array of NumPy with NaN, or None, in place of its masked entries; other values unchanged.

    Whole numbers become objects, so that labels with masked entries are refused and not taken for targets.
    """
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask = np.ma.getmaskarray(values)
    if not mask.any():
        return values.data
    if values.dtype.kind == "f":
        return np.where(mask, np.nan, values.data).astype(values.dtype)
    result = values.data.astype(object)
    result[mask] = None
    return result


def is_list(cell: Any) -> bool:
    """Whether a cell holds several numbers or a picture, not a single value."""
    return isinstance(cell, list | tuple | dict | np.ndarray) or hasattr(cell, "getbands")


def array_of(cells: Sequence[Any], where: str) -> tuple[Array, NDArray[np.bool_], str]:
    """Return all cells as one array.

    If the cells are lists of numbers, all of them must have the same shape. Only lists of whole numbers (token ids) and
    lists of lists (time series) may differ in length. The shorter ones are then padded with zeros at the end. Encoders
    ignore time steps that hold only zeros.

    Args:
        cells: the cells; None where a row lacks the modality.
        where: the name of the column, for error messages.

    Returns:
        Three values: the array (N, ...), which is zero in rows that lack the modality; a mask, bool (N,), which is True
        for rows that have the modality; and a note on the padding, empty if there is no padding.

    Raises:
        DataError: a cell cannot be read, or the cells differ in shape.
    """
    there = np.array([not is_missing(cell) for cell in cells], dtype=np.bool_)
    if not there.any():
        raise DataError(f"{where} is missing in every row. Leave it out, or look for the file or column it comes from")
    arrays = [_dense(cell, f"{where}, row {row}") if there[row] else None for row, cell in enumerate(cells)]
    held = [array for array in arrays if array is not None]
    ranks = {array.ndim for array in held}
    longest = max(array.shape[0] if array.ndim else 0 for array in held)
    note = ""
    if len({array.shape for array in held}) > 1:
        fits = len(ranks) == 1 and len({array.shape[1:] for array in held}) == 1
        whole = all(array.dtype.kind in "iu" for array in held)
        if not fits or not (ranks == {2} or (ranks == {1} and whole)):
            shapes = ", ".join(map(str, sorted({array.shape for array in held}, key=str)[:3]))
            raise DataError(f"{where}: samples differ in shape: {shapes}. Bring all samples to one shape")
        note = f"samples differ in length; shorter ones are filled up with zeros to {longest}"
    dtype = np.result_type(*{array.dtype for array in held})
    result = np.zeros((len(cells), *((longest,) if held[0].ndim else ()), *held[0].shape[1:]), dtype)
    for row, array in enumerate(arrays):
        if array is not None:
            result[(row, slice(len(array))) if array.ndim else row] = array
    return result, there, note


def digits(number: int) -> int:
    """Return about how many decimal digits a whole number has, without writing it, which takes long."""
    return int(abs(number).bit_length() * 0.30103) + 1


def _dense(cell: Any, where: str) -> Array:
    """Return one cell as an array of numbers."""
    if isinstance(cell, dict):  # the form in which the library `datasets` stores a picture
        if not isinstance(cell.get("bytes"), bytes):
            raise DataError(f"{where} is a table with the keys {', '.join(map(str, cell))}: give lists of numbers")
        image = optional("PIL.Image", "image")
        try:
            return np.asarray(image.open(io.BytesIO(cell["bytes"])))
        except (OSError, ValueError) as error:
            raise DataError(f"{where} holds bytes that are no picture ({error}). Give pictures or lists") from None
    if isinstance(cell, np.ma.MaskedArray) and np.ma.getmaskarray(cell).any():
        cell = unmasked(cell.astype(np.float64))
    try:
        array = np.asarray(cell)
        if array.dtype.kind == "O" and array.ndim == 0 and isinstance(cell, int):
            raise DataError(f"{where} holds a whole number of about {digits(cell)} digits, which no array can hold")
        if array.dtype.kind == "O":
            array = np.stack([_dense(part, where) for part in cell])
    except ValueError:
        raise DataError(f"{where} holds lists of unequal length. Bring all parts of a sample to one shape") from None
    if array.dtype.kind not in "iufb":
        raise DataError(f"{where} holds {str(cell)[:40]!r}, which is no number and no list of numbers")
    return array


_PIECE = 256
"""Rows that are read at a time (ours)."""


def without_nan_rows(values: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows that lack a modality because all their entries are NaN.

    Args:
        values: samples (N, ...). Integers cannot be NaN, so they are returned unchanged.
        there: bool (N,), which rows have the modality so far.

    Returns:
        Three tensors. The first is the samples, with zeros in the rows that lack the modality. The second, bool (N,),
        is true for rows that have the modality. The third, bool (N,), is true for rows in which some entries are NaN
        and others are not. The caller refuses these rows.
    """
    there = there.to(values.device)
    if not values.is_floating_point():
        return values, there, torch.zeros_like(there)
    empty = values.isnan().flatten(1) if values.dim() > 1 else values.isnan()[:, None]
    there = there & ~empty.all(1)
    if not bool(there.all()):
        values = torch.where(there.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
    return values, there, empty.any(1) & there


def zero_nan_rows(values: Tensor, where: str) -> Tensor | None:
    """Set a row to zero if all its entries are NaN. The row then lacks the modality.

    The function changes `values` in place, so that memory-mapped values are not copied.

    Args:
        values: samples (N, ...) with at least two axes. No other code may use this tensor, because it is changed.
        where: the name of the values in error messages.

    Returns:
        bool (N,), false for the rows that were set to zero; None if there was no such row.

    Raises:
        DataError: every row is NaN.
    """
    if not values.is_floating_point() or not values.numel():
        return None
    first = values
    while first.dim() > 1:  # a view, whatever the layout, so that nothing is copied
        first = first.select(1, 0)
    rows = first.isnan().nonzero()[:, 0]  # only these rows can be all NaN, and they are few in most files
    empty = torch.cat([part[values[part].isnan().flatten(1).all(1)] for part in torch.split(rows, _PIECE)])
    if not len(empty):
        return None
    if len(empty) == len(values):
        raise DataError(
            f"{where} is missing in every row, because all values are NaN. Leave it out, or look for the file or "
            "column it comes from"
        )
    values[empty] = 0.0
    there = torch.ones(len(values), dtype=torch.bool)
    there[empty] = False
    return there


def option(name: str, value: Any) -> str:
    """Return how to set an option of [data], for an error text: as the command that was typed, if it reads a file."""
    written = toml_value(value)
    words = ("--set", f"data.{name}={written}")
    return again(words, otherwise=f"[data] {name} = {written} (polyfed init: {shlex.join(words)})")


def bare_rows(present: Mapping[str, Tensor]) -> str:
    """Return how many rows lack every modality, and the first one, or "" if there are none.

    Args:
        present: modality -> bool (N,), which rows have it, with an entry for every modality.
    """
    bare = ~torch.stack(list(present.values())).any(0) if present else torch.zeros(0, dtype=torch.bool)
    if not bool(bare.any()):
        return ""
    count = counted(int(bare.sum()), "row lacks", "rows lack")
    return f"{count} every modality, first row {int(bare.nonzero()[0, 0])}"


def refuse_bare_rows(
    present: Mapping[str, Tensor], where: str, cut: Mapping[str, Any], cures: Mapping[str, str] | None = None
) -> None:
    """Refuse rows that lack every modality.

    Args:
        present: modality -> bool (N,), which rows have it, with an entry for every modality.
        where: the name of the data in error messages.
        cut: modality -> bool (N,), true for each row that has only some of the modality's values. These values were
            left out.
        cures: modality -> the rules that would fill in these values, for tables.

    Raises:
        DataError: some rows lack every modality.
    """
    if not (told := bare_rows(present)):
        return
    bare = ~torch.stack(list(present.values())).any(0)
    text = f"{where}: {told}. "
    gone, plain = ("--set", "data.empty_rows=leave-out"), "empty_rows = 'leave-out'"  # as Python and a recipe write it
    cure = f"Leave these rows out, as {again(gone, otherwise=plain)} does"
    for name, rows in cut.items():
        if bool((partly := bare & torch.as_tensor(np.asarray(rows))).any()):
            count = counted(int(partly.sum()), "of these rows has", "of these rows have")
            text += (
                f"{count} some cells of '{name}', which partial = 'absent' leaves out, first row "
                f"{int(partly.nonzero()[0, 0])}. "
            )
            rules = f", as {cures[name]} does" if cures and name in cures else ""
            how = " ".join(gone) if typed_verb() else plain
            cure = f"Fill in the empty cells of these rows{rules}, and leave out rows without any cell, as {how} does"
    raise DataError(text + cure)


Layout = Literal["F", "TF", "FT", "HW", "HWC", "CHW"]

_AXES: Mapping[str, Any] = {
    "F": lambda x: x,
    "TF": lambda x: x,
    "FT": lambda x: x.transpose(1, 2),
    "HW": lambda x: x.unsqueeze(1),
    "HWC": lambda x: x.permute(0, 3, 1, 2),
    "CHW": lambda x: x,
}

# NumPy types that PyTorch lacks or cannot index, with the nearest type that it can index
_SUBSTITUTES: Mapping[str, str] = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "float64",
    "longdouble": "float64",
    "float128": "float64",
}


def tensor_of(array: Any) -> Tensor:
    """Convert a NumPy array of numbers to a tensor.

    PyTorch has no equivalent of some NumPy types, and cannot index tensors of some other types. Arrays of all these
    types become tensors of the nearest type that PyTorch can index.
    """
    native = array.dtype.newbyteorder("=")
    array = np.asarray(array).astype(_SUBSTITUTES.get(native.name, native), copy=False)
    if any(stride < 0 for stride in array.strides):  # PyTorch cannot step backwards, as in x[::-1]
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes into it
        return torch.from_numpy(array)


def laid_out(values: Tensor, layout: str | None, where: str) -> Column:
    """Return the column for an array (N, ...) whose samples have this layout. uint8 images are scaled to [0, 1].

    Args:
        values: (N, ...).
        layout: axes of a sample. If None, the function guesses the layout from the number of axes. A sample with one
            axis is a vector (F). A sample with two axes is an image (H, W) for the type uint8, and otherwise a sequence
            (T, F). A sample with three axes is (H, W, C) if the last axis has 1, 3 or 4 entries, and otherwise
            (C, H, W).
        where: the name of the array in messages.

    Raises:
        DataError: The samples do not have the axes of the layout.
    """
    layout = layout or _guess(values)
    if layout not in _AXES:
        return Column(values)
    if values.dim() != len(layout) + 1:
        raise DataError(f"{where} has samples of shape {tuple(values.shape[1:])}, not of layout '{layout}'")
    is_image = values.dtype == torch.uint8 and "H" in layout
    scale = torch.tensor(255.0) if is_image else None
    return Column(_AXES[layout](values), scale=scale, layout=layout)


def as_in_training(values: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Return new samples in the shape of the training's samples, as `laid_out` made it; see `Column.layout`.

    Args:
        values: (n, ...), or (n, F) if the columns of a table are the pixels of an image or the steps of a series.
        shape: the shape of a sample in training.
        layout: the axes of a sample in the data.
    """
    sides = {"HW": shape[1:], "HWC": (*shape[1:], *shape[:1]), "FT": shape[::-1]}.get(layout, shape)
    if values.dim() == 2 and values.shape[1] == math.prod(sides):
        values = values.reshape(len(values), *sides)
    return _AXES[layout](values) if layout in _AXES and values.dim() == len(layout) + 1 else values


def _guess(values: Tensor) -> str:
    axes = values.dim() - 1
    if axes == 2:
        return "HW" if values.dtype == torch.uint8 else "TF"
    if axes == 3:
        return "HWC" if values.shape[-1] in (1, 3, 4) else "CHW"
    return "F" if axes == 1 else "other"
