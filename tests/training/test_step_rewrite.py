"""Each rule keeps the numbers of a step, saves operations, and leaves alone what it must not change."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.training.programs import program as step_program
from polyfed.training.programs import rewrite as rules
from polyfed.training.programs.check import agree, reproduces
from polyfed.training.programs.memory import calls
from polyfed.training.programs.program import Program
from polyfed.training.programs.trace import Tracer, Unrecordable

aten = torch.ops.aten
Step = Callable[..., Sequence[Tensor]]
K, B, C = 3, 4, 5


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def traced(step: Step, *inputs: Tensor) -> fx.Graph:
    """The graph of a step on plain tensors. What it closes over becomes a further input."""
    copies = [tensor.clone() for tensor in inputs]
    with Tracer(copies) as tracer:
        out = step(*copies)
    tracer.trace.results = tuple(tracer.slot(tensor) for tensor in out)
    assert not tracer.trace.outside
    return tracer.trace.graph()


def saved(rule: Callable[[fx.Graph], None], step: Step, *inputs: Tensor) -> int:
    """How many operations a rule saves; the rewritten graph must give the numbers of the step, each time anew."""
    before, after = traced(step, *inputs), traced(step, *inputs)
    rule(after)
    after.lint()
    after.eliminate_dead_code()
    again = [tensor.clone() for tensor in inputs]
    found = fx.Interpreter(torch.nn.Module(), graph=after).run(*again)
    expected = step(*(tensor.clone() for tensor in inputs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert agree(before, after, inputs, ())
    return size(before) - size(after)


def size(graph: fx.Graph) -> int:
    return sum(node.op == "call_function" for node in graph.nodes)


def test_a_factor_of_one_is_dropped() -> None:
    assert saved(rules.drop_factors_of_one, lambda x: [(x * 1).exp()], numbers(3)) == 1
    assert saved(rules.drop_factors_of_one, lambda x: [(x * 2).exp()], numbers(3)) == 0
    assert saved(rules.drop_factors_of_one, lambda n: [(n * 1.0).exp()], torch.arange(3)) == 0, "it makes floats"


def test_a_factor_of_one_stays_where_it_makes_a_copy() -> None:
    assert saved(rules.drop_factors_of_one, lambda x: [(x * 1).add_(1), x + 1], numbers(3)) == 0
    assert saved(rules.drop_factors_of_one, lambda x: [x * 1, x.add_(1)], numbers(3)) == 0

    def late(x: Tensor) -> list[Tensor]:
        copy = x * 1
        x.add_(1)
        return [copy.exp(), x]

    assert saved(rules.drop_factors_of_one, late, numbers(3)) == 0


def test_equal_expressions_are_computed_once() -> None:
    assert saved(rules.merge_equal, lambda x: [x.exp() + x.exp()], numbers(3)) == 1
    assert saved(rules.merge_equal, lambda x: [x.sum(0) + x.sum(1)], numbers(3, 3)) == 0

    def changed(x: Tensor) -> list[Tensor]:
        first = x.exp()
        x.add_(1)
        return [first * 2 + x.exp()]

    assert saved(rules.merge_equal, changed, numbers(3)) == 0
    assert saved(rules.merge_equal, lambda x: [x.exp().add_(1), x.exp() * 2], numbers(3)) == 0


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    graph = traced(lambda x: [torch.bernoulli(x) + torch.bernoulli(x)], torch.full((3,), 0.5))
    rules.merge_equal(graph)
    assert len(calls(graph, aten.bernoulli.default)) == 2


def masked(y: Tensor, x: Tensor) -> list[Tensor]:
    mask = y.ne(-100)
    return [torch.where(mask, x, 0.0).sum(1) / mask.sum(1)]


def test_a_mask_of_labels_is_dropped_only_where_all_labels_are_classes() -> None:
    def known(graph: fx.Graph) -> None:
        rules.drop_true_masks(graph, [next(iter(graph.nodes))])

    classes, some = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([[0, -100, 2], [2, 1, 0]])
    assert saved(known, masked, classes, numbers(2, 3)) >= 1
    assert saved(lambda graph: rules.drop_true_masks(graph, []), masked, some, numbers(2, 3)) == 0
    assert saved(known, lambda y, x: [torch.where(y.ne(1), x, 0.0)], classes, numbers(2, 3)) == 0, "1 is a class"


def test_the_mask_of_padded_rows_is_not_dropped() -> None:
    def step(y: Tensor, ok: Tensor, x: Tensor) -> list[Tensor]:
        return [torch.where(ok, x, 0.0).sum(1)]

    classes, ok = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([[True, True, False], [True, True, True]])
    assert saved(lambda g: rules.drop_true_masks(g, [next(iter(g.nodes))]), step, classes, ok, numbers(2, 3)) == 0


def cross_entropy(logits: Tensor, y: Tensor, u: Tensor) -> list[Tensor]:
    """The operations of cross-entropy and its gradient, as autograd records them."""
    logs = aten._log_softmax.default(logits, 2, False)
    minus_e = torch.zeros_like(logs).scatter(2, y.unsqueeze(2), -1.0)
    return [logs, aten._log_softmax_backward_data.default(minus_e * u, logs, 2, torch.float32)]


def test_the_gradient_of_cross_entropy_needs_fewer_operations() -> None:
    inputs = numbers(K, B, C), torch.arange(K * B).view(K, B) % C
    for u in (torch.full((K, 1, 1), 0.25), numbers(K, B, 1), torch.zeros(K, B, 1)):
        assert saved(rules.fuse_cross_entropy, cross_entropy, *inputs, u) == 1
    assert saved(rules.fuse_cross_entropy, cross_entropy, *inputs, numbers(K, B, C)) == 0, "one u for each row only"


def test_the_mean_of_losses_needs_fewer_operations() -> None:
    """Three operations on all rows become one, and the division by a constant stays."""
    c = torch.full((K,), 4.0)
    rule = rules.shorten_means
    assert saved(rule, lambda x, c: [x.neg().sum([1]) / c], numbers(K, B), c) == 0, "-c is a constant"
    assert saved(rule, lambda x, c: [x.squeeze([2]).neg().sum([1]) / c], numbers(K, B, 1), c) == 1
    assert saved(rule, lambda x, c: [x.squeeze([0]).neg().sum([0, -1]) / c.sum()], numbers(1, K, B), c) == 1
    assert saved(rule, lambda x, c: [x.squeeze([1]).neg().sum([1]) / c], numbers(K, 1, B), c) == 1
    kept = {
        "an axis of more than one entry is not dropped": lambda x, c: [x.squeeze([1]).neg().sum([2]).sum(1) / c],
        "the losses are used": lambda x, c: [(y := x.neg()).exp(), y.sum([1, 2]) / c],
        "the sum is used": lambda x, c: [x + (y := x.neg().sum([1, 2])).view(K, 1, 1), y / c],
        "it keeps axes": lambda x, c: [x.neg().sum([1, 2], True) / c.view(K, 1, 1)],
        "another type": lambda x, c: [x.neg().sum([1, 2], dtype=torch.float64) / c],
        "a number": lambda x, c: [x.neg().sum([1, 2]) / 2],
    }
    for why, step in kept.items():
        graph = traced(step, numbers(K, B, C), c)
        before = [node.target for node in graph.nodes]
        rule(graph)
        squeezed = why.startswith("an axis")
        assert squeezed or [node.target for node in graph.nodes] == before, why
        assert saved(rule, step, numbers(K, B, C), c) == 0, why


def test_a_tensor_of_ones_does_not_depend_on_the_step() -> None:
    def step(x: Tensor, z: Tensor) -> list[Tensor]:
        return [x * (torch.ones_like(x) * z + torch.zeros_like(x)).exp(), x.sum()]

    x, z = numbers(2, 3), numbers(2, 3)
    assert saved(rules.fill_constants, step, x, z) == 0
    graph = traced(step, x, z)
    rules.fill_constants(graph)
    with Counted() as counted:
        Program(graph, 1, 0)([x], [], range(5), [z])
    assert counted.calls[aten.full.default] == 2
    assert counted.calls[aten.exp.default] == 1


def test_a_tensor_of_ones_that_a_step_writes_into_is_made_in_every_step() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [x + torch.ones_like(x).add_(1), x.sum()]

    graph = traced(step, numbers(3))
    rules.fill_constants(graph)
    (after,), _ = Program(graph, 1, 0)([numbers(3)], [], range(2), [])
    torch.testing.assert_close(after, numbers(3) + 4)


def test_the_log_softmax_of_few_classes_uses_another_axis() -> None:
    def step(x: Tensor) -> list[Tensor]:
        logs = aten._log_softmax.default(x, 2, False)
        return [logs, logs.exp()]

    def axes(*shape: int) -> list[Any]:
        graph = traced(step, numbers(*shape))
        rules.turn_softmax(graph)
        return [node.args[1] for node in calls(graph, aten._log_softmax.default)]

    assert saved(rules.turn_softmax, step, numbers(20, 10, 7)) == -3
    flat = numbers(20, 10, 7)
    assert saved(rules.turn_softmax, lambda x: [step(x)[1].view(-1)], flat) == -3, "`view` needs the layout of a step"
    assert axes(20, 10, 7) == [1]
    assert axes(20, 10, 16) == [2], "the kernel for the last axis is fast"
    assert axes(3, 4, 7) == [2], "three more operations would take longer than they save"


@pytest.mark.parametrize("factor", [-0.1, 1])
def test_an_update_is_folded_into_its_product(factor: float) -> None:
    inputs = numbers(K, B, C), numbers(K, B, 2), numbers(K, 2, C)
    step = lambda w, x, y: [w.add_(torch.bmm(x, y), alpha=factor)]  # noqa: E731
    assert saved(rules.fold_products, step, *inputs) == 1


def test_another_term_of_an_update_is_added_before_the_product() -> None:
    inputs = numbers(K, B, C), numbers(K, B, 2), numbers(K, 2, C), torch.zeros(K, B, C)

    def step(w: Tensor, x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [w.add_(torch.bmm(x, y) + z, alpha=-0.1)]

    graph, alone = traced(step, *inputs), traced(lambda w, x, y: [w.add_(torch.bmm(x, y), alpha=-0.1)], *inputs[:3])
    for one in (graph, alone):
        rules.fold_products(one)
    assert len(calls(graph, aten.baddbmm_.default)) == 1
    found = [fx.Interpreter(torch.nn.Module(), graph=graph).run(*(t.clone() for t in inputs))]
    found.append(fx.Interpreter(torch.nn.Module(), graph=alone).run(*(t.clone() for t in inputs[:3])))
    assert torch.equal(found[0][0], found[1][0]), "a term of zeros, such as FedProx with mu = 0, changes no bit"


def test_a_product_stays_where_it_is_needed_or_its_factors_change() -> None:
    inputs = numbers(K, C, C), numbers(K, C, C)

    def twice(w: Tensor, x: Tensor) -> list[Tensor]:
        product = torch.bmm(x, x)
        return [w.add_(product), product]

    def own(w: Tensor, x: Tensor) -> list[Tensor]:
        return [w.add_(torch.bmm(w, x))]

    def changed(w: Tensor, x: Tensor) -> list[Tensor]:
        """The gradient of one factor of LoRA needs the other factor as it was before the step."""
        product = torch.bmm(x.mT, x)
        x.add_(1)
        return [w.add_(product), x]

    for step in (twice, own, changed):
        assert saved(rules.fold_products, step, *inputs) == 0


def test_sums_drop_their_axes_at_once() -> None:
    step = lambda x: [x.sum([1], True).view(K, C)]  # noqa: E731
    assert saved(rules.drop_views_of_sums, step, numbers(K, B, C)) == 1
    assert saved(rules.drop_views_of_sums, lambda x: [x.sum([1], True).view(C, K)], numbers(K, B, C)) == 0


def test_updates_of_several_tensors_are_one_call() -> None:
    inputs = [numbers(n) for n in (2, 3, 4)]

    def step(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [t.add_(t.exp(), alpha=-0.1) for t in (a, b, c)]

    def used(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        a.add_(a.exp(), alpha=-0.1)
        return [a, b.add_(a.sum(), alpha=-0.1), c]

    assert saved(rules.group_updates, step, *inputs) == 2
    assert saved(rules.group_updates, used, *inputs) == 0


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[Any]()
        self.looked_up: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        if func is aten.index.Tensor and args[0].dim() == 1 and args[1][0].dim() == 3:
            self.looked_up.append(tuple(args[1][0].shape))
        return func(*args, **(kwargs or {}))


X, W, ENTRIES = numbers(K, B, C), numbers(K, C, B), torch.arange(K * B).view(K, B, 1) % C

ARGUMENTS: dict[Any, Sequence[Any]] = {
    aten._foreach_add_.List: ([X, W], [X * 2, W * 3]),
    aten._log_softmax.default: (X, 1, False),
    aten.add.Tensor: (X, X[:, :1]),
    aten.add_.Tensor: (X, X[:, :1]),
    aten.baddbmm_.default: (X, numbers(K, B, B), X * 2),
    aten.bmm.default: (X, W),
    aten.div.Tensor: (X, X[:, :1]),
    aten.embedding.default: (X[0], ENTRIES[:, :, 0] % B),
    aten.exp.default: (X,),
    aten.gather.default: (X, 2, ENTRIES),
    aten.mul.Tensor: (X, X[:, :1]),
    aten.mul_.Tensor: (X, 0.5),
    aten.relu.default: (X,),
    aten.sum.dim_IntList: (X, [1, 2], True),
    aten.transpose.int: (X, 1, 2),
    aten.unsqueeze.default: (X, 1),
}
FACTORS = {aten._foreach_add_.List, aten.add.Tensor, aten.add_.Tensor, aten.baddbmm_.default}


@pytest.mark.parametrize("op", step_program.PUBLIC, ids=str)
def test_a_public_function_gives_the_bits_of_its_operation(op: Any) -> None:
    found = []
    for function in (op, step_program.PUBLIC[op]):
        given = pytree.tree_map_only(Tensor, Tensor.clone, ARGUMENTS[op])
        out = function(*given, **({"alpha": -0.1} if op in FACTORS else {}))
        found.append((given, None if op is aten._foreach_add_.List else out))  # some write into their arguments
    for one, other in zip(*map(pytree.tree_leaves, found), strict=True):
        assert (torch.equal(one, other) and one.stride() == other.stride()) if isinstance(one, Tensor) else one == other


def test_a_program_makes_constants_and_views_of_its_weights_once() -> None:
    def step(w: Tensor, x: Tensor, z: Tensor) -> list[Tensor]:
        out = x.mm(w.t()) * z.exp()
        return [w.add_(out.t().mm(x), alpha=-0.1), out.sum()]

    w, x, z = numbers(2, 3), numbers(1, 6, 3), numbers(2)
    program = Program(traced(step, w, x[:, 0], z), 1, 1)
    with Counted() as counted:
        (after,), values = program([w.clone()], [x], range(2, 6), [z])
    plain = w.clone()
    expected = [step(plain, x[:, t], z)[1] for t in range(2, 6)]
    assert torch.equal(after, plain)
    assert torch.equal(torch.stack(values), torch.stack(expected))
    assert counted.calls[aten.exp.default] == 1
    assert counted.calls[aten.t.default] == 1 + 4, "the view of w once, that of the product in each step"


def test_a_program_looks_up_small_rows_of_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is written into, or whose rows are computed in the step, stays in its step."""

    def step(w: Tensor, rows: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [w + y[rows] + z[rows].add_(1).sum(-1), y[rows.flip(0)].sum()]

    w, y, z = numbers(K, 5), numbers(9), numbers(9, 2)
    rows = torch.arange(K * 4 * 5).view(K, 4, 5) * 7 % 9
    program = Program(traced(step, w, rows[:, 0], y, z), 1, 1)
    monkeypatch.setattr(step_program, "TOGETHER", 2)
    with Counted() as counted:
        (after,), values = program([w], [rows], range(1, 4), [y, z])
    assert counted.calls[aten.index.Tensor] == 2 + 3 + 3, "two lookups for two and for one step"
    assert counted.looked_up == [(K, 2, 5), (K, 1, 5)], "only rows of the steps that the program computes"
    for t, value in zip(range(1, 4), values, strict=True):
        w, expected = step(w, rows[:, t], y, z)
        assert torch.equal(value, expected)
    assert torch.equal(after, w)


def test_a_program_makes_a_view_anew_if_the_step_returns_another_tensor() -> None:
    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        out = x.mm(w.t())
        return [w - 0.1 * out.t().mm(x), out.sum()]

    w, x = numbers(2, 3), numbers(1, 4, 3)
    program = Program(traced(step, w, x[:, 0]), 1, 1)
    (after,), _ = program([w], [x], range(4), [])
    for t in range(4):
        w = step(w, x[:, t])[0]
    assert torch.equal(after, w)


def test_a_step_of_a_linear_model_loses_a_quarter_of_its_operations() -> None:
    """All rules together, on the operations of a linear model with cross-entropy as autograd records them."""

    def step(w: Tensor, b: Tensor, x: Tensor, y: Tensor, u: Tensor) -> list[Tensor]:
        logits = (b * 1).view(K, 1, C) + torch.bmm(x, w.mT)
        logs, grad = cross_entropy(logits, y, u)
        w.mT.mT.exp()  # autograd makes tensors that nothing uses
        product = torch.bmm(grad.mT, x)
        product.mT.detach()
        w.add_(product, alpha=-0.1)
        b.add_(grad.sum([1], True).view(K, C), alpha=-0.1)
        return [w, b, logs.sum(2).sum(1)]

    y = torch.arange(K * B).view(K, B) % C
    inputs = numbers(K, C, 2), numbers(K, C), numbers(K, B, 2), y, torch.full((K, 1, 1), 0.25)
    graph = traced(step, *inputs)
    before = size(graph)
    rules.rewrite(graph)
    assert size(graph) <= before * 3 // 4
    assert len(calls(graph, aten.baddbmm_.default)) == 1
    assert agree(traced(step, *inputs), graph, inputs, ())


def test_agreement_is_judged_in_double_precision() -> None:
    """An error of 1e-4 of the update is found below the rounding of large weights."""
    w, g = torch.full((3,), 1e3), numbers(3)
    good, wrong = (traced(lambda w, g, c=c: [w.add_(g, alpha=c), g.sum()], w, g) for c in (-1e-5, -1.0001e-5))
    assert agree(good, good, [w, g], ())
    assert not agree(good, wrong, [w, g], ())


def test_a_gradient_of_rounding_errors_agrees() -> None:
    """The sum of centred numbers is zero; an optimiser makes a moment, and an update of any size, of its rounding."""

    def step(first: bool, error: float = 0.0) -> Step:
        def run(b: Tensor, m: Tensor, x: Tensor) -> list[Tensor]:
            centred = x - x.mean(0)
            g = centred.sum(0) if first else centred.flip(0).cumsum(0)[-1] + error
            m.add_(g)
            return [b.add_(m / (m.abs() + 1e-8), alpha=-0.1), m, x.sum()]

        return run

    b, x = numbers(C), numbers(20, C)
    for m in (torch.zeros(C), torch.full((C,), 1e-9)):
        recorded, other = traced(step(True), b, m, x), traced(step(False), b, m, x)
        assert agree(recorded, other, [b, m, x], ())
        assert not agree(recorded, traced(step(False, 1e-9), b, m, x), [b, m, x], ())


def test_a_product_that_is_added_to_a_folded_product() -> None:
    def step(w: Tensor, k: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        k.add_(a @ b)
        return [w.add_(b @ a + k), k]

    square = numbers(K, B, B)
    assert saved(rules.fold_products, step, square, square + 1, square - 1, square * 2) == 2


def test_a_rewritten_graph_that_cannot_run_does_not_agree() -> None:
    """Without the factor, the sliced tensor keeps its strides, and no view of it is possible."""

    def step(x: Tensor) -> list[Tensor]:
        return [torch.ops.aten.view.default(x[:, 1:] * 1, [-1]).exp()]

    before, after = traced(step, numbers(B, C)), traced(step, numbers(B, C))
    rules.drop_factors_of_one(after)
    assert not agree(before, after, [numbers(B, C)], ())


def test_a_graph_must_reproduce_the_bits_of_its_step() -> None:
    graph = traced(lambda x: [x / x.sum()], numbers(3))
    x = numbers(3)
    assert reproduces(graph, [x], (), [x / x.sum()])
    assert not reproduces(graph, [x], (), [x / x.sum() * 1.000001])
    assert reproduces(graph, [x * float("nan")], (), [x * float("nan")])


def test_nothing_happens_to_a_tensor_that_is_not_the_steps_own() -> None:
    outside = torch.ones(3)
    with pytest.raises(Unrecordable), Tracer([torch.ones(3)]):
        outside.view(3).mul_(2)
    assert outside.tolist() == [1, 1, 1]
