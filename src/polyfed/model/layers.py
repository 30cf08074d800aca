"""Layers that depend on which rows a batch really has: BatchNorm and dropout; and GRU and attention.

PyTorch keeps "training or evaluation" in the module, counts padding as data and draws dropout from a global
generator. Here all three come from the batch, through one object: every aware layer of a model holds the same
`Rows`, the model fills it in before a call (`see`) and empties it in a `finally` (`clear`). Outside a call
the layers behave as in evaluation, and so does, in every call, a layer that its encoder keeps in evaluation
mode: one whose `training` is off after `train()`.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core import keys
from polyfed.core.batch import Batch


class Rows:
    """What the aware layers know of the current batch.

    Attributes:
        key: dropout key, None in evaluation.
        ok: bool (B,), False for rows that must not enter batch statistics; None when all count.
    """

    def __init__(self) -> None:
        self.key: Tensor | int | None = None
        self.ok: Tensor | None = None
        self._draws: dict[int, int] = {}

    def see(self, batch: Batch, present: Tensor | None = None) -> None:
        """Lets the layers see `batch`; rows that lack the modality (`present`) do not count either."""
        both = batch.ok is not None and present is not None
        self.key = batch.key
        self.ok = batch.ok & present if both else (batch.ok if present is None else present)  # type: ignore[operator]
        self._draws = {}

    def clear(self) -> None:
        """Back to evaluation; always called in the `finally` of the call that called `see`."""
        self.key = self.ok = None

    def dropout_key(self, stream: int) -> Tensor | int:
        """Key of a layer's next mask: a module that is applied twice in one call draws two masks."""
        assert self.key is not None
        draw = self._draws.get(stream, 0)
        self._draws[stream] = draw + 1
        return keys.fold_in(keys.fold_in(self.key, stream), draw)


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe & Szegedy 2015) of (B, C, ...) that leaves out padded rows.

    Equal to `torch.nn.BatchNorm1d/2d/3d` when every row is real. Running statistics are updated in place, in
    the tensors bound at that moment, and only by a training batch with at least two values a channel (one has
    no variance). Nothing counts batches: an integer has no place in an average over clients. A leading
    dimension of B * r is read as r consecutive entries of each row (frames of a clip).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, rows: Rows) -> None:
        super().__init__()
        assert like.momentum is not None
        self.eps, self.momentum, self.rows = like.eps, like.momentum, rows
        self.weight, self.bias = like.weight, like.bias
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised `x`, same shape."""
        mean, var, ok = self.running_mean, self.running_var, self.rows.ok
        if self.rows.key is None or not self.training:
            return nn.functional.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        if ok is None and x.numel() >= 2 * x.shape[1]:
            return nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        return self._masked(x, self._mask(x, ok))

    def _mask(self, x: Tensor, ok: Tensor | None) -> Tensor:
        if ok is None:
            ok = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        repeats = x.shape[0] // ok.shape[0]
        if repeats > 1:
            ok = ok.unsqueeze(1).expand(-1, repeats).reshape(-1)
        return ok.view(-1, *(1,) * (x.dim() - 1))

    def _masked(self, x: Tensor, ok: Tensor) -> Tensor:
        over = [0, *range(2, x.dim())]
        wide = (1, -1, *(1,) * (x.dim() - 2))
        zero = x.new_zeros(())
        count = ok.sum().to(x.dtype) * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = torch.where(ok, x, zero).sum(over) / count.clamp(min=1.0)
        centred = torch.where(ok, x - mean.view(wide), zero)
        var = centred.square().sum(over) / count.clamp(min=1.0)
        self._remember(mean.detach(), var.detach(), count)
        y = centred * torch.rsqrt(var + self.eps).view(wide)
        return y if self.weight is None else y * self.weight.view(wide) + self.bias.view(wide)

    def _remember(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        rate = self.momentum * (count >= 2).to(mean.dtype)
        unbiased = var * (count / (count - 1).clamp(min=1.0))
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (unbiased - self.running_var))


class Dropout(nn.Module):
    """Inverted dropout whose mask is a hash of (batch key, layer, position).

    Both engines therefore draw the same mask, and as the position is row * size of a row + offset, padding a
    batch leaves the masks of its first rows as they are. Dimension 0 must be the rows.

    Args:
        p: probability of dropping, in [0, 1).
        stream: number that tells this layer from the others of the model.
        rows: the model's view of the current batch.
        whole_channels: drop (row, channel) pairs, as `torch.nn.Dropout1d/2d/3d` do.
    """

    def __init__(self, p: float, stream: int, rows: Rows, whole_channels: bool = False) -> None:
        super().__init__()
        self.p, self.stream, self.rows, self.whole_channels = p, stream, rows, whole_channels

    def forward(self, x: Tensor) -> Tensor:
        """`x` with dropped entries at zero and the others scaled by 1 / (1 - p); `x` itself in evaluation."""
        if self.rows.key is None or self.p == 0.0 or not self.training:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        bits = keys.bits(self.rows.dropout_key(self.stream), shape, x.device)
        # bits are uniform over the int32 range: compare there instead of converting to float
        keep = bits >= round(self.p * 2.0**32) - 2**31
        return x * (keep.to(x.dtype) / (1.0 - self.p))


class GRU(nn.Module):
    """Gated recurrent unit over (B, T, F), one layer, one direction, started at zero.

    Same parameters, names and function as `torch.nn.GRU(batch_first=True)` (Cho et al. 2014), written out
    because cuDNN's kernel takes no weights per client. The input's part of all steps is one product.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, like: nn.GRU) -> None:
        super().__init__()
        for name, parameter in like.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All hidden states (B, T, H) and the last (1, B, H) of the input (B, T, F)."""
        size = self.weight_hh_l0.shape[1]
        steps = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0).unbind(1)
        h = x.new_zeros(x.shape[0], size)
        states = []
        for step in steps:
            hidden = nn.functional.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            gates = torch.sigmoid(step[:, : 2 * size] + hidden[:, : 2 * size])
            reset, update = gates[:, :size], gates[:, size:]
            new = torch.tanh(step[:, 2 * size :] + reset * hidden[:, 2 * size :])
            h = torch.lerp(new, h, update)
            states.append(h)
        return torch.stack(states, 1), h.unsqueeze(0)


class Attention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on plain matrix products: the fused kernels have no rule for vmap.

    In evaluation mode PyTorch takes another fused kernel. As `adopt` allows no dropout in it, nothing else depends on
    the mode, so this layer is always in training mode.
    """

    def __init__(self, like: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(like.__dict__)

    def train(self, mode: bool = True) -> Self:
        """Stays in training mode."""
        return super().train(True)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """As in `torch.nn.MultiheadAttention`."""
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(*args, **options)
