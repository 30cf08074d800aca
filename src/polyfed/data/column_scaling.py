"""The scaling of the columns of a table, which a trained model needs for new samples."""

import torch

from polyfed.core.scaling import Scaling
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns


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
