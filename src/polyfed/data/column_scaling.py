"""The scaling of the columns of a table: standardisation, and the scales that a trained model needs for new samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.core.scaling import Scaling
from polyfed.data.columns import OWN_TRAIN, TEST, TRAIN, VALIDATION, Column, Columns, check_finite, chunks


def standardised(columns: Columns, which: bool | Sequence[str] = True) -> Columns:
    """Return the table with features scaled to mean 0 and deviation 1 over the training rows.

    The training rows are the rows of split 0, except the rows that `split_personal` marks as test rows or guard rows of
    a client. Every feature has its own mean and deviation. In vectors (F,) and sequences (T, F), each position of the
    last axis is a feature. In images (C, H, W) and samples with more axes, each channel is a feature (first axis). The
    statistics are summed in float64, chunk by chunk, so a memory-mapped column is never copied. A constant feature is
    centred, but not scaled.

    Args:
        columns: The table.
        which: The modalities to scale. True means all of them, and False means none.

    Raises:
        DataError: There is no training row, no such modality, or a feature is not finite.
    """
    names = (tuple(columns.modalities) if which else ()) if isinstance(which, bool) else tuple(which)
    if not names:
        return columns
    for name in names:
        columns.column(name)
    train = columns.split == TRAIN
    if columns.split_personal is not None:
        train = train & (columns.split_personal == OWN_TRAIN)
    if not train.any():
        raise DataError(f"data '{columns.name}': no training rows to standardise with. Check the array of split codes")
    modalities = dict(columns.modalities)
    for name in names:
        column = columns.modalities[name]
        use = train & columns.present[name] if name in columns.present else train
        mean, deviation = moments(column, use.nonzero()[:, 0])
        if not mean.isfinite().all():
            check_finite(columns)
        modalities[name] = replace(column, shift=mean.float(), scale=deviation.float())
    return replace(columns, modalities=modalities)


def moments(column: Column, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation of each feature over `rows`, float64. Both broadcast over a sample."""
    kept = 0 if len(column.shape) > 2 else len(column.shape) - 1
    axes = [axis for axis in range(len(column.shape) + 1) if axis != kept + 1]
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for part in chunks(rows, column.shape):
        x = column.raw(part).to(torch.float64)
        n = x.numel() // max(1, x.shape[kept + 1])
        part_mean = x.mean(axes, keepdim=True)
        # pairwise merge of moments (Chan, Golub, LeVeque 1979): no cancellation, whatever the offset
        delta, total = part_mean[0] - mean, count + n
        squares = squares + (x - part_mean).square().sum(axes, keepdim=True)[0] + delta.square() * count * n / total
        mean, count = mean + delta * n / total, total
    deviation = (squares / max(count, 1)).sqrt()
    # a deviation smaller than the spacing of float32 numbers around the mean is rounding, not signal
    constant = deviation <= 1e-6 * mean.abs().clamp(min=1e-30)
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)


def scaling_of(columns: Columns) -> dict[str, Scaling] | None:
    """Return the shift and the scale of each modality that has one of them, on the CPU.

    Returns:
        None if all rows are left out. This happens in a deployment in which the server has no data: its `columns` only
        give the shapes, and each device scales its own rows.
    """
    if not len(columns.rows(TRAIN, TEST, VALIDATION)):
        return None
    return {
        name: Scaling(
            torch.zeros(()) if column.shift is None else column.shift.detach().float().cpu(),
            torch.ones(()) if column.scale is None else column.scale.detach().float().cpu(),
        )
        for name, column in columns.modalities.items()
        if column.shift is not None or column.scale is not None
    }
