"""Making modules and leaves, and counting what they compute."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyfed.core import keys

M = TypeVar("M", bound=nn.Module)

Factory = Callable[[], nn.Module]
"""Makes a module; drawn from PyTorch's global generator, which `made` sets and puts back."""


def leaf(value: Tensor) -> Tensor:
    """A tensor for a name that is an algorithm's own (a projection head), not the model's."""
    return value.detach().clone().requires_grad_()


def made(make: Callable[[], M], key: int, block: str) -> M:
    """Runs a block's constructor on the block's own stream and leaves PyTorch's global generator as it was."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(keys.key(key, "init", block))
    try:
        return make().train()
    finally:
        torch.default_generator.set_state(state)


def flops_of(call: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and convolutions in a call, two per multiply-add."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
