"""`Batch`: some rows of a client, in the form that a loss receives.

Shapes: B rows of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyfed.core import keys

_REDRAWN = keys.key("redrawn")


@dataclass(frozen=True)
class Batch:
    """Some rows of one client.

    The model runs in training mode if the batch has a `key`, and in evaluation mode if `key` is None. So the mode
    belongs to the batch, and not to the model as with PyTorch's `module.train()`.

    Attributes:
        x: the inputs by modality, float32 (B, ...). Only modalities that the client owns have an entry.
        y: the labels, int64 (B,).
        rows: position of each row among the client's own rows, int64 (B,).
        ok: bool (B,), False for padding, which must not count. None if every row is real.
        present: by modality, whether each row has the modality, bool (B,). There is no entry for a modality that all
            rows have.
        key: dropout key of (run, round, client, step). None means evaluation mode: no dropout, and BatchNorm uses its
            running statistics.
    """

    x: Mapping[str, Tensor]
    y: Tensor
    rows: Tensor
    ok: Tensor | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    key: Tensor | int | None = None

    @property
    def training(self) -> bool:
        """Whether the batch is in training mode: dropout is drawn, and BatchNorm uses the statistics of the batch."""
        return self.key is not None

    def evaluation(self) -> "Batch":
        """Return the same rows in evaluation mode: no dropout, and BatchNorm uses its running statistics."""
        return replace(self, key=None)

    def redrawn(self, number: int = 1) -> "Batch":
        """Return the same rows with other dropout masks, for a second forward pass in the same step.

        The masks are a function of the key. Therefore two forward passes on the same batch have the same masks.

        Args:
            number: number of the further pass, from 1. Each number gives other masks.
        """
        return self if self.key is None else replace(self, key=keys.fold_in(keys.fold_in(self.key, _REDRAWN), number))

    @property
    def num_real(self) -> Tensor:
        """Number of real rows, a 0-dim float32 tensor."""
        if self.ok is None:
            return torch.tensor(float(self.y.shape[0]), device=self.y.device)
        return self.ok.sum().to(torch.float32)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` (B, ...) over the real rows: shape (...)."""
        if self.ok is None:
            return values.sum(0)
        ok = self.ok.view(-1, *(1,) * (values.dim() - 1))
        return torch.where(ok, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of `values` (B, ...) over the real rows: shape (...), zero if there are no real rows."""
        if self.ok is None:
            return values.mean(0)
        return self.sum(values) / self.num_real.clamp(min=1.0)
