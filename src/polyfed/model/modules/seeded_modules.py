"""Makes modules from a random key, and counts floating-point operations."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from polyfed.core import keys
from polyfed.core.system.operations import SeesOperations

M = TypeVar("M", bound=nn.Module)


def leaf(value: Tensor) -> Tensor:
    """Return a trainable copy of a tensor that belongs to a method and to no module, such as a projection head."""
    return value.detach().clone().requires_grad_()


def leaves(w: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Return an independent copy of a Tree. The tensors whose names are in `trained` require gradients."""
    return {name: leaf(value) if name in trained else value.detach().clone() for name, value in w.items()}


_generator_lock = RLock()
"""Held by the thread that uses PyTorch's global generator in `made`."""


def _new_lock() -> None:
    """Replace the lock in a new process. If another thread holds it during the fork, nobody there can release it."""
    global _generator_lock
    _generator_lock = RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, where there are no forks
    os.register_at_fork(after_in_child=_new_lock)


def made(make: Callable[[], M], key: int, block: str) -> M:
    """Make the module of a block. Its parameters depend only on the key and the block.

    PyTorch's global generator is restored afterwards. Threads make their modules one after another. While this function
    runs, other threads must not draw from the global generator in other ways.
    """
    with _generator_lock:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(keys.key(key, "init", block))
        try:
            return make().train()
        finally:
            torch.default_generator.set_state(state)


@contextmanager
def draws_watched() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the `with` block has so far drawn from PyTorch's global generator.

    The generator is restored afterwards. The same rule for other threads holds as in `made`.
    """
    with _generator_lock:
        state = torch.default_generator.get_state()
        try:
            yield lambda: not torch.equal(state, torch.default_generator.get_state())
        finally:
            torch.default_generator.set_state(state)


def flops_of(call: Callable[[], object]) -> int:
    """Count the floating-point operations of a call's matrix products and convolutions, two per multiply-add."""
    counter = _Counter()
    with torch.no_grad(), counter:
        call()
    return counter.total


def result_bytes_of(call: Callable[[], object]) -> int:
    """Count the bytes of the results of a call's operations that are no views.

    Attention counts as its separate matrix products, which is how a stack of clients computes it.
    """
    counter = _Results()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return counter.total


class _Results(SeesOperations):
    """Adds up the bytes of the results of all operations that allocate memory for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an operation and count it."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(leaf.nbytes for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out


class _Counter(SeesOperations):
    """Adds up the floating-point operations of all operations for which PyTorch has a formula.

    PyTorch's `FlopCounterMode` gives the same numbers, but imports `torch._dynamo`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an operation and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out
