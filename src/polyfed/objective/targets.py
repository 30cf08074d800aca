"""Targets of a data set: the objective that they suggest, and their conversion for each objective.

A table holds labels in one of two forms. Class numbers are int64 (N,). Targets are float32 (N,) or (N, T), with T
targets for each row. NaN in a float label marks an unknown target.
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError, counted
from polyfed.data.columns import Columns


def looks_like(label: Tensor) -> str:
    """Return the name of the objective that labels suggest.

    Labels int64 (N,) suggest `classification`. Float labels suggest `multi-label` if every known label is 0 or 1. All
    other float labels suggest `regression`.
    """
    if not label.is_floating_point():
        return "classification"
    known = label[~label.isnan()]
    return "multi-label" if bool(((known == 0) | (known == 1)).all()) else "regression"


def doubtful_targets(columns: Columns) -> str:
    """Return a remark if float targets look like classes that are stored in an unusual form, otherwise an empty text.

    There are two such forms. In the first, each row has one number, which is whole but stored as a float. The second
    form is one-hot: each row has T numbers, one of them 1 and the others 0. `looks_like` suggests regression or
    multi-label for these two forms, and never classification.
    """
    label = columns.label
    if not label.is_floating_point():
        return ""
    known = label[~label.isnan()]
    if label.dim() == 2 and label.shape[1] > 1:
        one_hot = len(known) == label.numel() and looks_like(label) == "multi-label" and bool((label.sum(1) == 1).all())
        if not one_hot:
            return ""
        return (
            f"data '{columns.name}': exactly one of the {label.shape[1]} labels of each row is 1, as in one-hot "
            "labels. Labels of several columns are targets, so the task is 'multi-label'. If they are classes, give "
            "one class number for each row, as in labels.argmax(1). Otherwise, name the task, as in [task] name = "
            "'multi-label'"
        )
    if not len(known) or bool((known != known.round()).any()):
        return ""
    return (
        f"data '{columns.name}': the labels are whole numbers that are stored as floats, so the task is "
        f"'{looks_like(label)}'. If they are classes, store them as integers. Otherwise, name the task, as in [task] "
        f"name = '{looks_like(label)}'"
    )


Units = float | tuple[float, ...]


def units_of(label: Tensor, rows: Tensor) -> tuple[Units, Units] | None:
    """Return the shifts and the scales by which a regression standardises its targets, or None if none is far from 0.

    They are the means and the standard deviations of the known targets. An untrained model has outputs near 0. If a
    target is far from 0 or has a large or small spread, training therefore spends its first rounds on the mean. A
    target keeps its unit if its mean is at most three standard deviations from 0 and the standard deviation is from 0.1
    to 10.

    Args:
        label: float targets (N,) or (N, T).
        rows: the rows that train, int64 (n,).

    Returns:
        One number each for one target, and T numbers for T targets.
    """
    targets = as_matrix(label)[rows.to(label.device)].double()
    result = [_far(target) for target in targets.unbind(1)]
    if all(units is None for units in result):
        return None
    shifts, scales = zip(*(units or (0.0, 1.0) for units in result), strict=True)
    return (shifts, scales) if len(result) > 1 else (shifts[0], scales[0])


def _far(target: Tensor) -> tuple[float, float] | None:
    """Return mean and standard deviation of the known values of a target if it is far from 0; see `units_of`."""
    known = target[~target.isnan()]
    if len(known) < 2:
        return None
    mean, deviation = float(known.mean()), float(known.std())
    near = abs(mean) <= 3 * deviation and 0.1 <= deviation <= 10
    return None if near or deviation == 0 else (mean, deviation)


def in_words(label: Tensor) -> str:
    """Return type and shape of labels as a text for error messages."""
    return f"{str(label.dtype).removeprefix('torch.')} {tuple(label.shape)}"


def with_targets(columns: Columns, targets: Tensor) -> Columns:
    """Return the table with float targets (N, T) as labels.

    Raises:
        DataError: no target is known.
    """
    if bool(targets.isnan().all()):
        raise DataError(f"data '{columns.name}': every label is NaN, so there is nothing to learn")
    names = columns.class_names or columns.origin.get("labels")
    fits = names is not None and len(names) == targets.shape[1]
    return replace(columns, label=targets, num_classes=targets.shape[1], class_names=tuple(names) if fits else None)  # type: ignore[arg-type]


def as_matrix(label: Tensor) -> Tensor:
    """Return labels as float32 (N, T)."""
    wide = label.to(torch.float32)
    return wide.unsqueeze(1) if wide.dim() == 1 else wide


def as_classes(columns: Columns, task: str, cure: str) -> Columns:
    """Return the table with class numbers as labels. Whole numbers of a float type are converted.

    Args:
        task: the name of the objective, for an error text.
        cure: a hint at another objective that fits the labels, for an error text.

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
            f"{where} {in_words(label)} and {counted(missing, 'label is', 'labels are')} NaN. Mark rows without "
            "a label as left out (split 3)"
        )
    if not bool(((flat == flat.round()) & (flat >= 0)).all()):
        odd = float(flat[(flat != flat.round()) | (flat < 0)][0])
        raise DataError(f"{where} {in_words(label)}, with {odd:g} among them. {cure}")
    return replace(columns, label=flat.to(torch.int64), num_classes=int(flat.max()) + 1, class_names=None)
