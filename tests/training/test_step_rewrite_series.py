"""The rules for models of time series keep the numbers of a step, and leave alone what they must not change."""

import pytest
import torch
from test_step_rewrite import numbers, saved, size, traced
from torch import Tensor
from torch.nn.functional import max_pool1d

from polyfed.training.programs import rewrite_series as rules
from polyfed.training.programs.memory import calls

aten = torch.ops.aten
K, B, C = 3, 4, 5


def pooled(x: Tensor, kernel: list[int], stride: list[int], grad: Tensor) -> list[Tensor]:
    """Max-pooling and its gradient, as autograd records them."""
    out, places = aten.max_pool2d_with_indices(x, kernel, stride)
    return [aten.max_pool2d_with_indices_backward(grad, x, kernel, stride, [0, 0], [1, 1], False, places), out]


def test_pairs_are_pooled_without_the_kernel() -> None:
    x = numbers(B, C, 2, 6).round()  # many equal neighbours
    step = lambda x, grad: pooled(x, [1, 2], [1, 2], grad)  # noqa: E731
    graph = traced(step, x, numbers(B, C, 2, 3))
    rules.pool_pairs(graph)
    graph.eliminate_dead_code()
    assert not calls(graph, aten.max_pool2d_with_indices.default)
    assert saved(rules.pool_pairs, step, x, numbers(B, C, 2, 3)) < 0, "several fast operations replace one slow one"


@pytest.mark.parametrize(("kernel", "width"), [([1, 3], 6), ([2, 2], 6), ([1, 2], 7)])
def test_other_windows_keep_the_kernel(kernel: list[int], width: int) -> None:
    x = numbers(B, C, 2, width)
    grad = numbers(B, C, 2 // kernel[0], width // kernel[1])
    assert saved(rules.pool_pairs, lambda x, grad: pooled(x, kernel, kernel, grad), x, grad) == 0


def test_pairs_are_those_of_pytorch() -> None:
    x = numbers(B, C, 6)
    x[0, 0, 1] = float("nan")
    a, b = x.unflatten(-1, (3, 2)).unbind(-1)
    torch.testing.assert_close(torch.maximum(a, b), max_pool1d(x, 2), equal_nan=True)


def cut(grad: Tensor, start: int, end: int, length: int = C, step: int = 1) -> Tensor:
    """The gradient of x[:, :, start:end:step] with regard to x of this length."""
    return aten.slice_backward(grad, [K, B, length], 2, start, end, step)  # type: ignore[no-any-return]


def test_gradients_of_neighbouring_slices_are_joined() -> None:
    parts = numbers(K, B, 2), numbers(K, B, 3)
    assert saved(rules.join_slices, lambda a, b: [cut(b, 2, 2**63 - 1) + cut(a, 0, 2)], *parts) == 2

    def three(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [cut(a, 0, 1, 4) + cut(b, 3, 4, 4) + cut(c, 1, 3, 4)]

    assert saved(rules.join_slices, three, numbers(K, B, 1), numbers(K, B, 1) + 1, numbers(K, B, 2)) == 4


def test_gradients_of_other_slices_are_added() -> None:
    a, b = numbers(K, B, 2), numbers(K, B, 3)

    def gap(a: Tensor, b: Tensor) -> list[Tensor]:
        return [cut(a, 0, 2, 6) + cut(b, 3, 6, 6)]

    def overlap(a: Tensor, b: Tensor) -> list[Tensor]:
        return [cut(a, 0, 2, 4) + cut(b, 1, 4, 4)]

    def strided(a: Tensor, b: Tensor) -> list[Tensor]:
        return [cut(b, 0, 5, 5, 2) + cut(a, 1, 5, 5, 2)]

    def changed(a: Tensor, b: Tensor) -> list[Tensor]:
        first = cut(a, 0, 2)
        a.add_(1)
        return [a, first + cut(b, 2, 5)]

    def changed_through_a_view(a: Tensor, b: Tensor) -> list[Tensor]:
        first = cut(a, 0, 2)
        first.view(-1).mul_(2)
        return [first + cut(b, 2, 5)]

    def mixed(a: Tensor, b: Tensor) -> list[Tensor]:
        return [cut(a, 0, 2) + cut(b, 2, 5) + a.sum() * torch.ones_like(cut(a, 0, 2))]

    for step in (gap, overlap, strided, changed, changed_through_a_view, mixed):
        assert saved(rules.join_slices, step, a, b) == 0, step.__name__


def products(*factors: Tensor) -> Tensor:
    """The sum of x @ y over pairs (x, y), one after another."""
    total, *others = [torch.bmm(x, y) for x, y in zip(factors[::2], factors[1::2], strict=True)]
    for other in others:
        total = total + other
    return total


def test_a_sum_of_products_is_one_product() -> None:
    factors = [
        numbers(K, 8, 2),
        numbers(K, 2, 9),
        numbers(K, 8, 1),
        numbers(K, 1, 9),
        numbers(K, 8, 2),
        numbers(K, 2, 9),
    ]
    assert saved(rules.merge_products, lambda *f: [products(*f)], *factors) == 2  # 5 operations; 2 cat and 1 bmm

    def gradient(*factors: Tensor) -> list[Tensor]:
        return [products(*(t.mT if place % 2 == 0 else t for place, t in enumerate(factors)))]

    upright = [t.mT.contiguous() if place % 2 == 0 else t for place, t in enumerate(factors)]
    graph = traced(gradient, *upright)
    rules.merge_products(graph)
    graph.eliminate_dead_code()
    assert len(calls(graph, aten.bmm.default)) == 1
    (cat, _) = calls(graph, aten.cat.default)
    assert cat.args[0] == [node for node in graph.nodes if node.op == "placeholder"][::2], "the upright tensors"
    assert saved(rules.merge_products, gradient, *upright) == 4

    def rest(w: Tensor, *factors: Tensor) -> list[Tensor]:
        return [w + products(*factors) + w.exp()]

    assert saved(rules.merge_products, rest, numbers(K, 8, 9), *factors) == 2


def test_products_stay_apart_where_merging_saves_nothing_or_changes_numbers() -> None:
    wide = numbers(K, 3, 20), numbers(K, 20, 3), numbers(K, 3, 20) + 1, numbers(K, 20, 3)
    assert saved(rules.merge_products, lambda *f: [products(*f)], *wide) == 0, "the factors are larger than the sum"
    x, y = numbers(K, 8, 1), numbers(K, 1, 9)

    def used_twice(x: Tensor, y: Tensor) -> list[Tensor]:
        one, other = torch.bmm(x, y), torch.bmm(x + 1, y)
        return [one + other + one.exp() * other.exp()]

    def changed(x: Tensor, y: Tensor) -> list[Tensor]:
        one = torch.bmm(x, y)
        x.add_(1)
        return [x, one + torch.bmm(x, y)]

    def other_term_changed(x: Tensor, y: Tensor) -> list[Tensor]:
        m = torch.bmm(x, y).exp()
        total = m + (torch.bmm(x, y + 1) + torch.bmm(x + 1, y))
        m.mul_(0.5)
        return [total + m.exp()]

    def scaled(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.add(torch.bmm(x, y), torch.bmm(x + 1, y), alpha=2)]

    for step in (used_twice, changed, other_term_changed, scaled):
        assert saved(rules.merge_products, step, x, y) == 0, step.__name__


def test_a_constant_minus_a_tensor_is_one_operation() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x).fill_(2.5).sub_(x).exp()]

    def used(x: Tensor) -> list[Tensor]:
        filled = torch.empty_like(x).fill_(1)
        before = filled.exp()
        return [before + filled.sub_(x)]

    assert saved(rules.subtract_from_constant, step, numbers(K)) == 2
    assert saved(rules.subtract_from_constant, used, numbers(K)) == 0


def test_the_gradient_of_an_unrolled_layer_needs_one_product() -> None:
    """Three time steps of h = tanh(x + h W): the weights' gradient is a sum of three products."""

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        def loss(w: Tensor) -> Tensor:
            h = x[:, 0]
            for t in range(1, 4):
                h = torch.tanh(x[:, t] + torch.bmm(h, w))
            return h.square().sum()

        return [torch.func.grad(loss)(w)]

    w, x = numbers(K, 16, 16), numbers(K, 4, B, 16)
    graph = traced(step, w, x)
    before = len(calls(graph, aten.bmm.default))
    rules.merge_products(graph)
    graph.eliminate_dead_code()
    assert len(calls(graph, aten.bmm.default)) == before - 2
    assert size(graph) < size(traced(step, w, x)) + 4
