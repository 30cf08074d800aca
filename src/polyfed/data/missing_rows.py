"""The rule for arrays and tensors: a row whose entries are all NaN lacks the modality."""

import torch
from torch import Tensor


def without_nan_rows(values: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows that lack a modality because all their entries are NaN.

    Args:
        values: samples (N, ...). Integers cannot be NaN, so they are returned unchanged.
        there: bool (N,), which rows have the modality so far.

    Returns:
        The samples, with zeros in the rows that lack the modality; bool (N,), which rows have the modality; and bool
        (N,), which of these rows are partly NaN. The caller refuses the latter.
    """
    there = there.to(values.device)
    if not values.is_floating_point():
        return values, there, torch.zeros_like(there)
    empty = values.isnan().flatten(1) if values.dim() > 1 else values.isnan()[:, None]
    there = there & ~empty.all(1)
    if not bool(there.all()):
        values = torch.where(there.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
    return values, there, empty.any(1) & there
