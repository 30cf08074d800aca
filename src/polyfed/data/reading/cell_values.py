"""Converts the cells of one column of a table, such as lists, token ids and pictures, to one array."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError
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
    found = values.data.astype(object)
    found[mask] = None
    return found


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
