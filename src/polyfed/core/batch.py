"""A batch: what a loss sees of a client's rows.

Shape letters: `B` rows of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one client. Whether a model trains or evaluates on them is said here, not in the model.

    Attributes:
        x: per modality the client owns, float32 (B, ...).
        y: labels, int64 (B,).
        rows: position of each row among the client's own rows, int64 (B,).
        ok: bool (B,), False for padding, which must never count; None when every row is real.
        present: bool (B,) for a modality that some of these rows lack.
        key: dropout key of (run, round, client, step); None means evaluation: no dropout, frozen statistics.
    """

    x: Mapping[str, Tensor]
    y: Tensor
    rows: Tensor
    ok: Tensor | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    key: Tensor | int | None = None

    @property
    def training(self) -> bool:
        """Whether dropout is drawn and batch statistics are used."""
        return self.key is not None

    def evaluation(self) -> "Batch":
        """The same rows, to be looked at without dropout and with frozen statistics."""
        return replace(self, key=None)

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
        # where, not a product: padding may hold infinities, and 0 * inf is not a number
        return torch.where(ok, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of `values` (B, ...) over the real rows; zero when there is none."""
        if self.ok is None:
            return values.mean(0)
        return self.sum(values) / self.num_real.clamp(min=1.0)
