"""Replacements for PyTorch's BatchNorm, dropout, GRU, LSTM and attention, all of which support `vmap`.

In PyTorch, the mode (training or evaluation) of BatchNorm and dropout belongs to the module, padding counts as data,
and dropout draws from a global generator. Here, the batch decides all three. Every BatchNorm and dropout layer of a
model holds the same `Rows` object. The model fills this object before a call (`see`) and empties it in a `finally`
(`clear`). Outside of a call, these layers are in evaluation mode. A layer that its encoder keeps in evaluation mode
(its `training` is False after `train()`) is always in this mode. All other modules, such as the user's own, have
PyTorch's attribute `training`. `Rows` sets it to the mode of the current call (`follow`).
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core import keys
from polyfed.core.batch import Batch


class Rows:
    """The current batch, as BatchNorm and dropout layers see it.

    Attributes:
        key: dropout key. None in evaluation mode.
        ok: False for rows that must not enter batch statistics, bool (B,); None if all rows count.
        draws: how many masks each dropout layer has drawn in this call, by stream.
        bound: True if the parameters are assigned to the modules only for the duration of the current call. False for
            the parameters that `Model.live` yields, because the modules keep those parameters after the call.
    """

    def __init__(self) -> None:
        self.key: Tensor | int | None = None
        self.ok: Tensor | None = None
        self.draws: dict[int, int] = {}
        self.bound = True
        self._followers: list[dict[str, Any]] = []
        self._training = True

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """From now on, set `training` of these modules to the mode of each call.

        If a module is in evaluation mode now, after `train()`, it stays in evaluation mode. BatchNorm and dropout read
        the mode from this object, and `Attention` has no mode, so this method does not change `training` of these
        layers.

        Args:
            modules: all modules of the model, in training mode.
        """
        ours = (BatchNorm, Dropout, Attention)
        # their dictionaries, because an assignment to an attribute of an nn.Module takes a hundred times as long
        self._followers = [vars(m) for m in modules if m.training and not isinstance(m, ours)]

    def see(self, batch: Batch, present: Tensor | None = None) -> None:
        """Set the current batch. Rows for which `present`, bool (B,), is False lack the modality and do not count."""
        both = batch.ok is not None and present is not None
        self.key = batch.key
        self.ok = batch.ok & present if both else (batch.ok if present is None else present)  # type: ignore[operator]
        self.draws = {}
        if self._training is (batch.key is None):
            self._training = batch.key is not None
            for attributes in self._followers:
                attributes["training"] = self._training

    def clear(self) -> None:
        """Return to evaluation mode. The function that calls `see` calls this method in a `finally` block."""
        self.key = self.ok = None

    def dropout_key(self, stream: int) -> Tensor | int:
        """Return the key of a layer's next mask. A layer that is applied twice in one call draws two masks."""
        assert self.key is not None
        draw = self.draws.get(stream, 0)
        self.draws[stream] = draw + 1
        return keys.fold_in(keys.fold_in(self.key, stream), draw)


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe & Szegedy 2015) of (B, C, ...) that leaves out padded rows.

    The result equals that of `torch.nn.BatchNorm1d/2d/3d` if no row is padding. A training batch updates the running
    statistics in place, in the tensors that are bound to the module. A batch with only one value per channel does not
    update them, because the variance of one value is not defined. There is no `num_batches_tracked`, because clients
    cannot average an integer. The input may also hold several entries for each row, such as the r frames of a clip. The
    first axis of such an input has B * r entries: first the r entries of row 0, then those of row 1, and so on.
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

    @property
    def trains(self) -> bool:
        """Whether this is a training batch, which the layer normalises with the statistics of the batch itself."""
        return self.rows.key is not None and self.training

    def forward(self, x: Tensor) -> Tensor:
        """The normalised `x`, of the same shape."""
        return self._normalised(x, self.weight, self.bias)

    def standardised(self, x: Tensor) -> Tensor:
        """Return `forward(x)` without the factors `weight` and the terms `bias`: mean 0 and variance 1 per channel.

        In a training batch, this method updates the running statistics, as `forward` does.
        """
        return self._normalised(x, None, None)

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, var, ok = self.running_mean, self.running_var, self.rows.ok
        if not self.trains:
            return nn.functional.batch_norm(x, mean, var, weight, bias, eps=self.eps)
        if ok is None and x.numel() >= 2 * x.shape[1]:
            # the backward pass keeps these copies, because a second call in the same step changes `mean` and `var`
            own_mean, own_var = mean.clone(), var.clone()
            y = nn.functional.batch_norm(x, own_mean, own_var, weight, bias, True, self.momentum, self.eps)
            mean.copy_(own_mean)
            var.copy_(own_var)
            return y
        return self._masked(x, self._mask(x, ok), weight, bias)

    def _mask(self, x: Tensor, ok: Tensor | None) -> Tensor:
        if ok is None:
            ok = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        repeats = x.shape[0] // ok.shape[0]
        if repeats > 1:
            ok = ok.unsqueeze(1).expand(-1, repeats).reshape(-1)
        return ok.view(-1, *(1,) * (x.dim() - 1))

    def _masked(self, x: Tensor, ok: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        over = [0, *range(2, x.dim())]
        wide = (1, -1, *(1,) * (x.dim() - 2))
        zero = x.new_zeros(())
        count = ok.sum().to(x.dtype) * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = torch.where(ok, x, zero).sum(over) / count.clamp(min=1.0)
        centred = torch.where(ok, x - mean.view(wide), zero)
        var = centred.square().sum(over) / count.clamp(min=1.0)
        self._remember(mean.detach(), var.detach(), count)
        y = centred * torch.rsqrt(var + self.eps).view(wide)
        return y if weight is None or bias is None else y * weight.view(wide) + bias.view(wide)

    def _remember(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        rate = self.momentum * (count >= 2).to(mean.dtype)
        unbiased = var * (count / (count - 1).clamp(min=1.0))
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (unbiased - self.running_var))


class Dropout(nn.Module):
    """Inverted dropout whose mask is a hash of (batch key, layer, position).

    All engines therefore draw the same mask. The position is row * size of a row + offset, so padding at the end of a
    batch does not change the masks of its real rows. The first axis must be the rows.

    Args:
        p: probability of dropping an entry, in [0, 1).
        stream: number that distinguishes this layer from the others of the model.
        rows: the current batch.
        whole_channels: whether to drop whole channels of a row, like `torch.nn.Dropout1d/2d/3d`.
    """

    def __init__(self, p: float, stream: int, rows: Rows, whole_channels: bool = False) -> None:
        super().__init__()
        self.p, self.stream, self.rows, self.whole_channels = p, stream, rows, whole_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with dropped entries set to 0 and the others divided by 1 - p; in evaluation mode, `x` itself."""
        if self.rows.key is None or self.p == 0.0 or not self.training:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        bits = keys.bits(self.rows.dropout_key(self.stream), shape, x.device)
        # bits are uniform over the int32 range; comparing integers saves a conversion to float
        keep = bits >= round(self.p * 2.0**32) - 2**31
        return x * (keep.to(x.dtype) / (1.0 - self.p))


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014) over (B, T, F): one layer, one direction, initial state zero.

    It has the same parameters, names and results as `torch.nn.GRU(batch_first=True)`. The layer is implemented here
    because the cuDNN kernel cannot use different weights for each client of a stack. One matrix product handles the
    inputs of all time steps.
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
        """From (B, T, F) to all hidden states (B, T, H) and the last one (1, B, H)."""
        size = self.weight_hh_l0.shape[1]
        steps = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0).unbind(1)
        h = steps[0].new_zeros(x.shape[0], size)  # of the same type as the steps, which autocast may have lowered
        states = []
        for step in steps:
            hidden = nn.functional.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            gates = torch.sigmoid(step[:, : 2 * size] + hidden[:, : 2 * size])
            reset, update = gates[:, :size], gates[:, size:]
            new = torch.tanh(step[:, 2 * size :] + reset * hidden[:, 2 * size :])
            h = torch.lerp(new, h, update)
            states.append(h)
        return torch.stack(states, 1), h.unsqueeze(0)


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997) over (B, T, F), with an initial state of zero.

    It has the same parameters, names and results as `torch.nn.LSTM(batch_first=True)`, with any number of layers, in
    one or both directions. The layer is implemented here for the same reason as `GRU`.
    """

    def __init__(self, like: nn.LSTM) -> None:
        super().__init__()
        self.size, self.layers = like.hidden_size, like.num_layers
        self.directions = ("", "_reverse") if like.bidirectional else ("",)
        for name, parameter in like.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """From (B, T, F) to the hidden states of the last layer (B, T, D * H) and the final states.

        The final hidden and cell states are (L * D, B, H) each, for L layers and D directions.
        """
        hidden, cells = [], []
        for layer in range(self.layers):
            parts = [self._pass(x, f"_l{layer}{direction}") for direction in self.directions]
            x = torch.cat([states for states, _, _ in parts], -1)
            hidden += [h for _, h, _ in parts]
            cells += [c for _, _, c in parts]
        return x, (torch.stack(hidden), torch.stack(cells))

    def _pass(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        """One layer in one direction: all hidden states (B, T, H), and the final hidden and cell state (B, H)."""
        ih, hh, bias_ih, bias_hh = (
            getattr(self, name + suffix, None) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        assert ih is not None
        assert hh is not None
        steps = list(nn.functional.linear(x, ih, bias_ih).unbind(1))
        backwards = suffix.endswith("_reverse")
        h = c = x.new_zeros(x.shape[0], self.size)
        states = []
        for step in reversed(steps) if backwards else steps:
            enter, forget, new, leave = (step + nn.functional.linear(h, hh, bias_hh)).chunk(4, -1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
            h = torch.sigmoid(leave) * torch.tanh(c)
            states.append(h)
        return torch.stack(states[::-1] if backwards else states, 1), h, c


class Attention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with plain matrix products, because `vmap` cannot batch the fused kernels.

    The layer is always in training mode, because PyTorch uses another fused kernel in evaluation mode. The mode has no
    other effect, because `adopt` refuses dropout in attention.
    """

    def __init__(self, like: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(like.__dict__)

    def train(self, mode: bool = True) -> Self:
        """Ignore `mode` and stay in training mode."""
        return super().train(True)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The same as `torch.nn.MultiheadAttention.forward`."""
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(*args, **options)
