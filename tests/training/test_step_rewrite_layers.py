"""Linear layers are computed transposed exactly where all operations that follow can be, and give the same numbers."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from polyfed.training.programs import rewrite as step_rewrite
from polyfed.training.programs.memory import calls, form, writes
from polyfed.training.programs.rewrite_layers import ROWS, turn_layers
from training.test_step_rewrite import cross_entropy, numbers, traced

aten = torch.ops.aten
Step = Callable[..., Sequence[Tensor]]
K, F, C = 3, 6, 5


def turned(step: Step, *inputs: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the matrix products after the rule, in order. The rewritten step must give the step's numbers."""
    graph = traced(step, *inputs)
    return rewritten(graph, step, *inputs)


def rewritten(graph: fx.Graph, step: Step, *inputs: Tensor) -> list[tuple[int, ...]]:
    """The shapes of a graph's products after the rule, in order. The graph must then give the numbers of the step."""
    turn_layers(graph)
    graph.lint()
    for _ in range(2):
        found = fx.Interpreter(torch.nn.Module(), graph=graph).run(*(tensor.clone() for tensor in inputs))
        for one, other in zip(found, step(*(tensor.clone() for tensor in inputs)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or bool(writes(node)))
    return [form(node).shape for node in calls(graph, aten.bmm.default)]


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return b.unsqueeze(1) + torch.bmm(x, w.mT)


def inputs(rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a batch, and the weights and biases of a linear layer, for K clients."""
    return numbers(K, rows, C), numbers(K, F, C), numbers(K, F)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 24, 48, 64, 80])
def test_the_number_of_rows_decides(rows: int) -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [layer(x, w, b).relu().sum([1])]

    assert turned(step, *inputs(rows)) == [(K, F, rows) if rows in ROWS else (K, rows, F)]


def test_both_layers_and_the_gradient_between_them_are_turned() -> None:
    """A network with a hidden layer and its gradients: the products that give weight gradients stay as they are."""

    def step(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, y: Tensor, u: Tensor) -> list[Tensor]:
        h = layer(x, w, b).relu()
        logs, g = cross_entropy(layer(h, v, c), y, u)
        gv, gh = torch.bmm(g.mT, h), torch.bmm(g, v)
        gh = aten.threshold_backward.default(gh, h, 0)
        return [torch.bmm(gh.mT, x), gh.sum([1]), gv, g.sum([1]), logs.gather(2, y.unsqueeze(2)).sum([1, 2])]

    y = torch.arange(K * 16).view(K, 16) % C
    given = (*inputs(), numbers(K, C, F), numbers(K, C), y, torch.full((K, 1, 1), 0.25))
    assert turned(step, *given) == [(K, 16, F), (K, 16, C), (K, C, F), (K, 16, F), (K, F, C)], "one-hot labels"
    graph = traced(step, *given)
    step_rewrite.fuse_cross_entropy(graph)
    step_rewrite.drop_unused(graph)
    assert rewritten(graph, step, *given) == [(K, F, 16), (K, C, 16), (K, C, F), (K, F, 16), (K, F, C)]


def test_a_mask_that_is_not_turned_keeps_a_layer_as_it_is() -> None:
    """A turned tensor and a mask that is not turned would be read in different orders."""

    def step(x: Tensor, w: Tensor, b: Tensor, mask: Tensor) -> list[Tensor]:
        return [(layer(x, w, b) * mask).sum([1])]

    assert turned(step, *inputs(), numbers(K, 16, F)) == [(K, 16, F)]
    assert turned(step, *inputs(), numbers(K, 16, 1)) == [(K, F, 16)], "one factor for each row is repeated"
    assert turned(step, *inputs(), numbers(16, F)) == [(K, 16, F)], "two axes are not transposed"
    assert turned(step, *inputs(), numbers(1)[0]) == [(K, F, 16)]


@pytest.mark.parametrize(
    "reader",
    [
        lambda z: z.view(K, 4, 4, F).sum([1, 2]),
        lambda z: z,
        lambda z: z[:, :8],
        lambda z: torch.cat([z, z], 2),
        lambda z: z.cumsum(1),
        lambda z: z.amax(1),
        lambda z: aten._log_softmax.default(z, 1, False),
    ],
)
def test_a_layer_stays_as_it_is_if_an_operation_needs_its_layout(reader: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [reader(layer(x, w, b).relu()).exp()]

    assert turned(step, *inputs()) == [(K, 16, F)]
    # a later layer may still be turned
    v = numbers(K, C, F)
    two: Step = lambda x, w, b, v: [reader(h := layer(x, w, b).relu()), torch.bmm(h, v.mT).exp().sum([1])]  # noqa: E731
    assert turned(two, *inputs(), v) == [(K, 16, F), (K, C, 16)]


@pytest.mark.parametrize("dims", [[1], [2], [0], [1, 2], [-1], [-2, 0], [0, 1, 2]])
def test_sums_over_all_axes(dims: list[int]) -> None:
    for keep in (False, True):
        step: Step = lambda x, w, b, keep=keep: [aten.sum.dim_IntList(layer(x, w, b).relu(), dims, keep)]  # noqa: E731
        assert turned(step, *inputs()) == [(K, F, 16)]


def test_writes_into_a_turned_tensor_are_seen_by_all_its_readers() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        z = layer(x, w, b)
        before, across = z.sum([1]), z.mT
        z.mul_(2).add_(1)
        return [before, across.sum(2), z.exp().sum([1]), torch.bmm(across, x)]

    assert turned(step, *inputs()) == [(K, F, 16), (K, F, C)]


def test_one_number_for_each_row_may_lose_its_axis() -> None:
    """The mean over the rows that are not padding reads the loss of each row without the axis of classes."""

    def step(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> list[Tensor]:
        loss = layer(x, w, b).gather(2, y.unsqueeze(2)).squeeze([2])
        return [loss.view(K * 16).exp(), (loss * (y > 0)).sum(1)]

    y = torch.arange(K * 16).view(K, 16) % F
    assert turned(step, *inputs(), y) == [(K, F, 16)]
    flat: Step = lambda x, w, b: [layer(x, w, b).squeeze([0]).exp()]  # noqa: E731
    assert turned(flat, *(tensor[:1] for tensor in inputs())) == [(1, 16, F)], "the strides would differ"
    assert turned(lambda *given: [layer(*given).squeeze([2])], *inputs()) == [(K, 16, F)], "nothing is dropped"


def test_random_numbers_are_drawn_in_the_order_of_the_recorded_step() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.bernoulli(layer(x, w, b).sigmoid()).sum([1])]

    graph = traced(step, *inputs())
    turn_layers(graph)
    assert form(calls(graph, aten.bmm.default)[0]).shape == (K, 16, F)


def test_a_gpu_keeps_the_layout() -> None:
    graph = traced(lambda x, w, b: [layer(x, w, b).sum([1])], *inputs())
    for node in graph.nodes:
        if "form" in node.meta:
            node.meta["form"] = form(node)._replace(device=torch.device("cuda"))
    turn_layers(graph)
    assert form(calls(graph, aten.bmm.default)[0]).shape == (K, 16, F)


OPERATIONS: list[Callable[[list[Tensor], Any], Tensor]] = [
    lambda t, pick: pick(t).relu(),
    lambda t, pick: pick(t).tanh() * 0.5,
    lambda t, pick: pick(t) + pick(t),
    lambda t, pick: pick(t) * pick(t).sigmoid(),
    lambda t, pick: torch.bmm(pick(t), t[1].mT).relu(),
    lambda t, pick: torch.bmm(pick(t), t[1]),
    lambda t, pick: torch.bmm(pick(t), torch.bmm(pick(t).mT, pick(t))).tanh(),
    lambda t, pick: aten._log_softmax.default(pick(t), 2, False),
    lambda t, pick: pick(t).add_(pick(t), alpha=0.5),
    lambda t, pick: torch.where(pick(t) > 0, pick(t), 0.1),
    lambda t, pick: pick(t).mT.contiguous().mT,
    lambda t, pick: pick(t) + pick(t).sum([1], True) * 0.1,
    lambda t, pick: pick(t).reshape(K, 16 * F).reshape(K, 16, F) * 0.3,
]
"""Ways to make a tensor (K, 16, F) from the tensors that a step has so far. The second one holds weights (K, F, F)."""


@pytest.mark.parametrize("seed", range(40))
def test_random_steps_keep_their_numbers(seed: int) -> None:
    """An independent check of the rule: steps of random operations, with writes and views among them."""

    def step(*given: Tensor) -> list[Tensor]:
        draw, found = random.Random(seed), list(given)  # the same operations in each call

        def pick(tensors: list[Tensor]) -> Tensor:
            return draw.choice([tensors[0], *tensors[2:]][-4:])

        for _ in range(10):
            found.append(draw.choice(OPERATIONS)(found, pick))
        return [found[-1].sum([1]), found[-2].sum([2]), found[-3].exp().sum([0, 1])]

    given = numbers(K, 16, F) * 0.3, numbers(K, F, F) * 0.3
    turned(step, *given)
