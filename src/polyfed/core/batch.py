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

    def of_enough_rows(self, least: int) -> "Batch":
        """Return the batch without each modality, and without each target, that some but fewer than `least` rows have.

        The gradient of a modality's block comes from the rows that have the modality, and that of a target's output
        from those in which the target is known. Without this, a large batch would tell a single row.

        Args:
            least: the least number of different rows.
        """
        few = {m: there for m, there in self.present.items() if self._are_few(there, least)}
        x = {m: torch.zeros_like(value) if m in few else value for m, value in self.x.items()}
        y = self.y
        if y.is_floating_point():
            targets = self.y.reshape(len(self.y), -1)
            lost = [self._are_few(~target.isnan(), least) for target in targets.unbind(1)]
            hidden = torch.tensor(lost, dtype=torch.bool, device=y.device).expand(targets.shape)
            y = torch.where(hidden, torch.nan, targets).view_as(self.y) if any(lost) else y
        if not few and y is self.y:
            return self
        return replace(self, x=x, y=y, present={**self.present, **{m: torch.zeros_like(few[m]) for m in few}})

    def _are_few(self, there: Tensor, least: int) -> bool:
        """Return whether these are some of the real rows, but fewer than `least` different ones."""
        rows = self.rows[there if self.ok is None else there & self.ok]
        return 0 < int(torch.unique(rows).numel()) < least

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
