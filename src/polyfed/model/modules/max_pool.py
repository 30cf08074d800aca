"""A replacement for PyTorch's MaxPool2d that is faster on a CPU, with the same results to the last bit."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from polyfed.model.modules.layers import Rows

aten = torch.ops.aten

ENTRIES, CHANNELS = 2**16, 16
"""The smallest input, and the smallest number of its channels, for which the fast kernel is used. For smaller inputs,
copying the input can cost more than the fast kernel saves (docs/performance.md)."""


class MaxPool2d(nn.MaxPool2d):
    """Max-pooling over (B, C, H, W).

    On a CPU, PyTorch's kernel for tensors with the memory format `channels_last` is several times as fast as its kernel
    for other tensors. While parameters are trained with plain autograd, the forward pass therefore copies its input to
    this format. The backward pass is PyTorch's, because it is fast with every format. Under `torch.func.vmap` and
    `grad`, this layer is `torch.nn.MaxPool2d`.

    Args:
        like: the PyTorch layer with the options.
        rows: the current batch. It knows whether parameters are trained with plain autograd.
    """

    def __init__(self, like: nn.MaxPool2d, rows: Rows) -> None:
        super().__init__(like.kernel_size)
        self.__dict__.update(like.__dict__)  # all options, and the user's hooks and attributes
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """The maximum of each window, (B, C, H', W')."""
        trains = not self.rows.bound and x.requires_grad and x.device.type == "cpu" and not _transformed()
        # asked only while training, because in an export the answer would bound the number of rows of the program
        large = trains and x.dim() == 4 and x.numel() >= ENTRIES and x.shape[1] >= CHANNELS
        copies = large and not x.is_contiguous(memory_format=torch.channels_last)
        if self.return_indices or not copies:
            return super().forward(x)  # type: ignore[no-any-return]
        options = (_pair(v) for v in (self.kernel_size, self.stride, self.padding, self.dilation))
        return _ChannelsLast.apply(x, *options, self.ceil_mode)  # type: ignore[no-any-return, no-untyped-call]


class _ChannelsLast(torch.autograd.Function):
    """Max-pooling whose forward pass uses the kernel for `channels_last`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        found = aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *options)
        out, where = (t.contiguous() for t in found)
        ctx.save_for_backward(x, where)
        ctx.options = options
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, where = ctx.saved_tensors
        grad = aten.max_pool2d_with_indices_backward(grads[0].contiguous(), x, *ctx.options, where)
        return grad, *(None for _ in ctx.options)


def _transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active; a loss may use either."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _pair(option: int | tuple[int, ...]) -> tuple[int, ...]:
    return (option, option) if isinstance(option, int) else tuple(option)
