"""Tests that a program must pass before it may replace a training step.

A program is the rewritten graph of the step (`step_program.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from polyfed.training.programs.trace import makes_view

TOLERANCE = 1e-5
"""The largest difference of a rewritten step, relative to the largest entry of a tensor's update."""

ROUNDING = 1e-13
"""The largest difference relative to the largest entry of a tensor, for updates that are zero in exact arithmetic."""

SHAKES = 4
"""How many times `agree` repeats a step with inputs that are changed by rounding errors."""

SHAKE = 1e-15
"""The changes of these inputs, relative to each entry."""

NOISE = 100.0
"""The largest difference of such a tensor, relative to the largest difference that these changes make to its update."""

GATHERS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)
"""Operations that take a few rows of a table."""


def reproduces(
    graph: fx.Graph, inputs: Sequence[Tensor], outside: Sequence[Tensor], expected: Sequence[Tensor]
) -> bool:
    """Return whether a graph gives these tensors bit for bit; NaN equals NaN. The inputs do not change."""
    result = fx.Interpreter(nn.Module(), garbage_collect_values=False, graph=graph).run(
        *(tensor.clone() for tensor in inputs), *outside
    )
    return all(map(same_bits, result, expected))


def agree(graph: fx.Graph, rewritten: fx.Graph, inputs: Sequence[Tensor], outside: Sequence[Tensor]) -> bool:
    """Return whether two graphs take the same step in double precision.

    In double precision, rounding errors are far below the tolerance. A correct rewritten graph therefore passes the
    check for all values of the tensors, and the result of the check is the same in every run. The result is False if
    the two graphs compute different steps, or if the rewritten graph cannot run. A rewritten graph cannot run, for
    example, if a rewriting rule changes the strides of a tensor and a later `view` does not work with the new strides.

    Some gradients are zero in exact arithmetic, such as that of a bias before a BatchNorm. An optimiser turns their
    rounding errors into moments and updates that consist of nothing else. The two graphs round differently, so these
    tensors may differ by `NOISE` times as much as the results of the same graph for inputs that differ by rounding.

    Args:
        graph: the operations of a training step.
        rewritten: the operations that may replace those of `graph`.
        inputs: the tensors of the state, followed by the slices, which are the tensors with the data of this one step.
        outside: tensors that the step closes over.
    """
    doubled = [_doubled(tensor) for tensor in inputs]
    one = _taken(graph, doubled, outside)
    try:
        other = _taken(rewritten, doubled, outside)
    except RuntimeError:
        return False
    before = [*doubled[: len(one) - 1], torch.zeros_like(one[-1])]
    apart = [place for place, found in enumerate(map(_close, one, other, before)) if not found]
    if not apart:
        return True
    if not all(one[i].is_floating_point() and one[i].shape == other[i].shape == before[i].shape for i in apart):
        return False
    noise = [torch.zeros((), dtype=torch.float64, device=one[place].device) for place in apart]
    for number in range(1, SHAKES + 1):
        shaken = [_shaken(tensor, number) for tensor in doubled]
        again, start = _taken(graph, shaken, outside), [*shaken[: len(one) - 1], before[-1]]
        moved = [(one[i] - before[i] - (again[i] - start[i])).nan_to_num().abs().max() for i in apart]
        noise = [*map(torch.maximum, noise, moved)]
    return all(_close(one[i], other[i], before[i], NOISE * most) for i, most in zip(apart, noise, strict=True))


def _taken(graph: fx.Graph, inputs: Sequence[Tensor], outside: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of a graph in double precision. The inputs do not change."""
    taken: Sequence[Tensor] = Doubled(graph).run(*(tensor.clone() for tensor in inputs), *outside)
    return taken


def _shaken(value: Tensor, number: int) -> Tensor:
    """Change the entries of a tensor by about as much as rounding does, differently for each number. Zeros stay."""
    if not value.is_floating_point():
        return value
    waves = torch.arange(1, value.numel() + 1, dtype=value.dtype, device=value.device).mul(number).cos()
    return value * (1 + SHAKE * waves.view(value.shape))


class Doubled(fx.Interpreter):
    """Runs a graph in double precision.

    The tensors that the step closes over stay in single precision until an operation computes with them. Such a tensor
    may be a large table, of which the step reads only a few rows.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=graph)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Perform an operation in double precision; views and gathers are performed before the conversion."""
        view = not isinstance(target, torch._ops.OpOverload) or makes_view(target)
        if not view and target not in GATHERS:
            args, kwargs = pytree.tree_map(_doubled, (args, kwargs))
        out = super().call_function(target, args, kwargs)
        return out if view else pytree.tree_map(_doubled, out)


def _doubled(value: Any) -> Any:
    """Return a tensor or a data type in double precision; other values stay as they are."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


def _close(one: Tensor, other: Tensor, before: Tensor, least: Tensor | float = 0.0) -> bool:
    """Return whether a tensor of the two steps agrees. The tolerance is at least `least`."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    largest = TOLERANCE * (one - before).nan_to_num().abs().max() + ROUNDING * one.nan_to_num().abs().max() + least
    return bool(((one - other).abs() <= largest).logical_or(one.isnan() & other.isnan() | (one == other)).all())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; NaN equals NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
