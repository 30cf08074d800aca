"""Checks labels. Labels have two forms: class numbers, and targets.

Shapes: N rows of the whole data set, C classes, T targets of a row.
"""

import torch
from torch import Tensor

from polyfed.core.errors import DataError


def num_targets(label: Tensor) -> int:
    """Return the number of targets T in float labels (N,) or (N, T)."""
    return 1 if label.dim() == 1 else label.shape[1]


def check_labels(data: str, label: Tensor, num_classes: int, class_names: tuple[str, ...] | None) -> None:
    """Check that labels are class numbers or targets, and that they are in range.

    Args:
        data: name of the data set, for error texts.
        label: int64 (N,), or float32 (N,) or (N, T).
        num_classes: C, or T.
        class_names: names of the classes or targets, or None.

    Raises:
        DataError: the labels are neither class numbers nor targets, or are out of range.
    """
    if label.dtype == torch.float32 and label.dim() in (1, 2) and label.shape[1:] != (0,):
        _check_targets(data, label, num_classes)
    elif label.dtype == torch.int64 and label.dim() == 1:
        _check_classes(data, label, num_classes)
    else:
        raise DataError(
            f"data '{data}': labels must be int64 of shape (N,) for classes, or float32 of shape (N,) or (N, T) for "
            f"targets; found {label.dtype} {tuple(label.shape)}"
        )
    if class_names is not None and len(class_names) != num_classes:
        raise DataError(f"data '{data}': {len(class_names)} names for {num_classes} classes")


def _check_targets(data: str, label: Tensor, size: int) -> None:
    if size != num_targets(label):
        raise DataError(
            f"data '{data}': {label.dtype} labels {tuple(label.shape)} hold {num_targets(label)} targets a row, but "
            f"num_classes = {size}. Class labels are int64; for targets, set num_classes to their number"
        )
    if bool((bad := label.isinf()).any()):
        row = int(bad.nonzero()[0, 0])
        raise DataError(f"data '{data}': the label of row {row} is infinite. Write NaN for an unknown target")


def _check_classes(data: str, label: Tensor, num_classes: int) -> None:
    outside = (label < 0) | (label >= num_classes)
    if outside.any():
        row = int(outside.nonzero()[0, 0])
        raise DataError(
            f"data '{data}': {int(outside.sum())} labels outside 0..{num_classes - 1}, first {int(label[row])} at row "
            f"{row}. Number the classes from 0, or give every class a name. Numbers that are no classes are saved as "
            "float32"
        )
