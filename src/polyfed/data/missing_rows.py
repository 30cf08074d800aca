"""The rule for arrays and tensors: a row whose entries are all NaN lacks the modality."""

import torch
from torch import Tensor


def without_nan_rows(values: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows that lack a modality because all their entries are NaN.

    Args:
        values: samples (N, ...). Integers cannot be NaN, so they are returned unchanged.
        there: bool (N,), which rows have the modality so far.

    Returns:
        Three values: the samples, with zeros in the rows that lack the modality; a mask, bool (N,), of the rows that
        have the modality; and a mask, bool (N,), of those among them that are partly NaN. The caller refuses rows that
        are partly NaN.
    """
    there = there.to(values.device)
    if not values.is_floating_point():
        return values, there, torch.zeros_like(there)
    empty = values.isnan().flatten(1) if values.dim() > 1 else values.isnan()[:, None]
    there = there & ~empty.all(1)
    if not bool(there.all()):
        values = torch.where(there.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
    return values, there, empty.any(1) & there
