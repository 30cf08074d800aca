"""The plain tensors inside the batched tensors of `torch.func.vmap`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PlainTensors(torch.autograd.Function):
    """Calls `work(tensors, dims)` with the plain tensors inside the batched tensors of `vmap`.

    `dims` holds the position of each tensor's client axis. `work` returns tensors and the positions of their client
    axes.
    """

    @staticmethod
    def forward(work: Any, *tensors: Tensor) -> Any:
        """Never called: steps of a stack are always taken under `vmap`."""
        raise AssertionError("a stack's steps are taken under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because no gradient flows through a local training."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Any, *tensors: Tensor) -> Any:
        """Call `work` with the plain tensors."""
        return work(tensors, in_dims[1:])


def below(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Return the plain tensors of these batched tensors, and the position of each tensor's client axis."""
    found: list[Any] = []

    def work(plain: Any, dims: Any) -> Any:
        found.extend((plain, dims))
        return plain[0].new_zeros(()), None

    PlainTensors.apply(work, *tensors)  # type: ignore[no-untyped-call]
    return found[0], found[1]
