"""The rule for arrays and tensors: a row whose entries are all NaN lacks the modality."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, counted

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


def refuse_bare_rows(present: Mapping[str, Tensor], where: str, cut: Mapping[str, Any]) -> None:
    """Refuse rows that lack every modality.

    Args:
        present: modality -> bool (N,), which rows have it, with an entry for every modality.
        where: the name of the data in error messages.
        cut: modality -> bool (N,), true for each row that has only some of the modality's values. These values were
            left out.

    Raises:
        DataError: some rows lack every modality.
    """
    bare = ~torch.stack(list(present.values())).any(0) if present else torch.zeros(0, dtype=torch.bool)
    if not bool(bare.any()):
        return
    text = (
        f"{where}: {counted(int(bare.sum()), 'row lacks', 'rows lack')} every modality, first row "
        f"{int(bare.nonzero()[0, 0])}. "
    )
    cure = "Leave these rows out"
    for name, rows in cut.items():
        if bool((partly := bare & torch.as_tensor(np.asarray(rows))).any()):
            count = counted(int(partly.sum()), "of these rows has", "of these rows have")
            text += (
                f"{count} some cells of '{name}', which partial = 'absent' leaves out, first row "
                f"{int(partly.nonzero()[0, 0])}. "
            )
            cure = "Fill in the empty cells of these rows, and leave out rows without any cell"
    raise DataError(text + cure)
