"""The layout of samples: the axes of an array, and its conversion to (F), (T, F) or (C, H, W)."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.columns import Column

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
    return Column(_AXES[layout](values), scale=scale)


def _guess(values: Tensor) -> str:
    axes = values.dim() - 1
    if axes == 2:
        return "HW" if values.dtype == torch.uint8 else "TF"
    if axes == 3:
        return "HWC" if values.shape[-1] in (1, 3, 4) else "CHW"
    return "F" if axes == 1 else "other"
