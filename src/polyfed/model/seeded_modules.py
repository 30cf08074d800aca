"""Makes modules from a random key, and counts floating-point operations."""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyfed.core import keys

M = TypeVar("M", bound=nn.Module)

Factory = Callable[[], nn.Module]
"""Makes a module with PyTorch's global generator, which `made` seeds and restores."""


def leaf(value: Tensor) -> Tensor:
    """Return a trainable copy of a tensor that belongs to a method and to no module, such as a projection head."""
    return value.detach().clone().requires_grad_()


def leaves(w: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Return an independent copy of a Tree. The tensors whose names are in `trained` require gradients."""
    return {name: leaf(value) if name in trained else value.detach().clone() for name, value in w.items()}


def made(make: Callable[[], M], key: int, block: str) -> M:
    """Make the module of a block. Its parameters depend only on the key and the block.

    PyTorch's global generator is restored afterwards.
    """
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(keys.key(key, "init", block))
    try:
        return make().train()
    finally:
        torch.default_generator.set_state(state)


def flops_of(call: Callable[[], object]) -> int:
    """Count the floating-point operations of a call's matrix products and convolutions, two per multiply-add."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
