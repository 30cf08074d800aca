"""Targets of a data set: which kind of task they suggest, and their form for each kind.

A table holds labels as int64 (N,), class numbers, or as float32 (N,) or (N, T), T targets for each row. NaN in a float
label is a target that nobody knows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.columns import Columns


def looks_like(label: Tensor) -> str:
    """The name of the task that labels suggest.

    int64 (N,) are classes. Float labels of which every known one is 0 or 1 are the labels of `multi-label`. All other
    float labels are the targets of a `regression`.
    """
    if not label.is_floating_point():
        return "classification"
    known = label[~label.isnan()]
    return "multi-label" if bool(((known == 0) | (known == 1)).all()) else "regression"


def in_words(label: Tensor) -> str:
    """Type and shape of labels, for texts."""
    return f"{str(label.dtype).removeprefix('torch.')} {tuple(label.shape)}"


def with_targets(columns: Columns, targets: Tensor) -> Columns:
    """The table with float targets (N, T) as labels.

    Raises:
        DataError: no target is known.
    """
    if bool(targets.isnan().all()):
        raise DataError(f"data '{columns.name}': every label is NaN, so there is nothing to learn")
    names = columns.class_names
    fits = names is not None and len(names) == targets.shape[1]
    return replace(columns, label=targets, num_classes=targets.shape[1], class_names=names if fits else None)


def as_matrix(label: Tensor) -> Tensor:
    """Labels as float32 (N, T)."""
    wide = label.to(torch.float32)
    return wide.unsqueeze(1) if wide.dim() == 1 else wide


def as_classes(columns: Columns, task: str, cure: str) -> Columns:
    """The table with class numbers as labels; whole numbers of a float type are converted.

    Args:
        columns: the table.
        task: the name of the task, for the text of an error.
        cure: another task that such labels fit, for the text of an error.

    Raises:
        DataError: the labels are not one whole number for each row.
    """
    label = columns.label
    if not label.is_floating_point():
        return columns
    where = f"data '{columns.name}': [task] name = '{task}' needs one class number a row; the labels are"
    if label.dim() == 2 and label.shape[1] > 1:
        raise DataError(f"{where} {in_words(label)}, {label.shape[1]} targets a row. {cure}")
    flat = label.reshape(-1)
    if missing := int(flat.isnan().sum()):
        raise DataError(
            f"{where} {in_words(label)} and {missing} of them are NaN. Mark rows without a label as left out (split 3)"
        )
    if not bool(((flat == flat.round()) & (flat >= 0)).all()):
        odd = float(flat[(flat != flat.round()) | (flat < 0)][0])
        raise DataError(f"{where} {in_words(label)}, with {odd:g} among them. {cure}")
    return replace(columns, label=flat.to(torch.int64), num_classes=int(flat.max()) + 1, class_names=None)
