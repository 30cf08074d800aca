"""Rewrites the graph of a training step, so that the step needs fewer operations and less memory.

Each rule is a function that changes a graph in place, and its docstring gives the algebra. Up to rounding, a rewritten
step computes the same numbers as the recorded step. The graph alone decides which rules apply.
"""

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import fx

from polyfed.training.programs.memory import Memory, args, calls, form, is_call, put, put_as, size, swap, writes
from polyfed.training.programs.rewrite_layers import turn_layers
from polyfed.training.programs.rewrite_series import join_slices, merge_products, pool_pairs, subtract_from_constant

aten = torch.ops.aten

REGISTER = 16
"""Number of float32 entries in the largest vector register of a CPU (AVX-512)."""

TURNED = 1000
"""The smallest log-softmax that `turn_softmax` changes. For 50 clients, 16 rows and 7 classes, it takes 16 us instead
of 84 us on one thread. For 320 entries, it takes as long as before (docs/performance.md)."""


def rewrite(graph: fx.Graph, labels: Collection[fx.Node] = ()) -> None:
    """Apply all rules to the graph of a step.

    Args:
        graph: the operations of the step.
        labels: inputs that hold class numbers, none of which is negative.
    """
    drop_unused(graph)
    drop_true_masks(graph, labels)
    drop_factors_of_one(graph)
    merge_equal(graph)
    subtract_from_constant(graph)
    pool_pairs(graph)
    join_slices(graph)
    drop_unused(graph)
    merge_products(graph)
    drop_unused(graph)
    fuse_cross_entropy(graph)
    shorten_means(graph)
    fill_constants(graph)
    drop_views_of_sums(graph)
    drop_unused(graph)
    turn_layers(graph)
    turn_softmax(graph)
    fold_products(graph)
    group_updates(graph)
    drop_unused(graph)


def drop_unused(graph: fx.Graph) -> None:
    """Remove operations with an unused result, unless they write into a tensor."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or bool(writes(node)))


def drop_true_masks(graph: fx.Graph, labels: Collection[fx.Node]) -> None:
    """Remove masks that are true everywhere: where(mask, x, y) becomes x, and the sum of the mask becomes a constant.

    Cross-entropy ignores rows with the label -100, so it computes the mask `labels != -100`. A table of class numbers
    has no negative label, so this mask is true everywhere. The mask of padded rows is false for padding, so it
    stays in the graph.
    """
    true = {
        node
        for node in calls(graph, aten.ne.Scalar)
        if isinstance(args(node)[1], int) and args(node)[1] < 0 and _entries_of(args(node)[0]) in labels
    }
    for node in calls(graph, aten.where.self):
        mask, x, _ = args(node)
        if mask in true and form(x).dtype == form(node).dtype:
            swap(node, x if form(x) == form(node) else put(node, aten.expand.default, x, list(form(node).shape)))
    for node in calls(graph, aten.sum.dim_IntList):
        if args(node)[0] in true:
            count = prod(size(args(node)[0], dim) for dim in args(node)[1])
            dtype, shape, device = form(node)
            swap(node, put(node, aten.full.default, list(shape), count, dtype=dtype, device=device))


def drop_factors_of_one(graph: fx.Graph) -> None:
    """Replace 1 * x by x.

    This is done only if nothing writes into x before the last use of 1 * x, and nothing writes into 1 * x itself.
    """
    memory = Memory(graph)
    for node in calls(graph, aten.mul.Scalar, aten.mul.Tensor):
        x, factor = args(node)
        one = type(factor) in (int, float) and factor == 1
        if one and form(node) == form(x) and memory.may_stand_for(x, node):
            swap(node, x)


def merge_equal(graph: fx.Graph) -> None:
    """Compute equal expressions once: f(x) + f(x) becomes y + y with y = f(x).

    This is done only if nothing writes into x between the two evaluations of f, and nothing writes into either result.
    """
    memory, found = Memory(graph), dict[Any, fx.Node]()
    for node in graph.nodes:
        if not memory.repeatable(node):
            continue
        key = node.target, repr(args(node)), repr(node.kwargs)
        first = found.setdefault(key, node)
        if first is not node and memory.may_merge(first, node):
            swap(node, first)
        else:
            found[key] = node


def fuse_cross_entropy(graph: fx.Graph) -> None:
    """Compute the gradient of cross-entropy with fewer operations.

    Let l be the log-probabilities of a row, e its one-hot label, and u the gradient of the row's loss. The recorded
    step computes g = -u * e, and then g - exp(l) * sum(g). This equals u * (exp(l) - e), because sum(g) = -u. The
    rewritten step computes u * (exp(l) - e) directly.
    """
    for node in calls(graph, aten._log_softmax_backward_data.default):
        grad, logs, dim, _ = args(node)
        if not is_call(grad, aten.mul.Tensor):
            continue
        minus_e, u = args(grad)
        if not is_call(minus_e, aten.scatter.value) or args(minus_e)[1] != dim or args(minus_e)[3] != -1.0:
            continue
        zeros, _, label, _ = args(minus_e)
        if is_call(zeros, aten.zeros_like.default) and size(label, dim) == 1 and size(u, dim) == 1:
            p = put(node, aten.exp.default, logs)
            p = put(node, aten.scatter_.value_reduce, p, dim, label, -1.0, reduce="add")
            swap(node, put(node, aten.mul_.Tensor, p, u))


def shorten_means(graph: fx.Graph) -> None:
    """Compute the mean of -x, as in the loss of cross-entropy, with fewer operations on all rows.

    The recorded step drops an axis of length one, negates all entries, adds them up and divides by their number c. The
    rewritten step adds up the entries as they are, and divides by -c. If c is a constant, so is -c.
    """
    for node in calls(graph, aten.div.Tensor):
        total, c = args(node)
        minus = _only_argument(total, aten.sum.dim_IntList)
        x = _only_argument(minus, aten.neg.default)
        if x is None or not isinstance(c, fx.Node) or args(total)[2:] or total.kwargs or not args(total)[1]:
            continue
        dims = [dim % len(form(x).shape) for dim in args(total)[1]]
        whole = _only_argument(x, aten.squeeze.dims)
        if whole is not None and len(args(x)[1]) == 1 and len(form(whole).shape) > len(form(x).shape):
            dropped = args(x)[1][0] % len(form(whole).shape)
            x, dims = whole, [*(dim + (dim >= dropped) for dim in dims), dropped]
        total = put_as(node, form(total), aten.sum.dim_IntList, x, dims)
        swap(node, put(node, aten.div.Tensor, total, put_as(node, form(c), aten.neg.default, c)))


def fill_constants(graph: fx.Graph) -> None:
    """Compute `ones_like(x)` and `zeros_like(x)` as `full(shape, c)`, which does not read x.

    A program then computes it, and all operations that follow from it, once instead of in every step.
    """
    for op, value in ((aten.ones_like.default, 1), (aten.zeros_like.default, 0)):
        for node in calls(graph, op):
            dtype, shape, device = form(node)
            swap(node, put(node, aten.full.default, list(shape), value, dtype=dtype, device=device))


def turn_softmax(graph: fx.Graph) -> None:
    """Compute the log-softmax of few classes with the classes on the first axis of a matrix instead of the last.

    PyTorch's CPU kernel for the last axis handles one entry at a time if the axis has fewer entries than a vector
    register. Its kernel for other axes always handles many.
    """
    for node in calls(graph, aten._log_softmax.default):
        x, dim, half = args(node)
        shape = form(x).shape
        small = dim == len(shape) - 1 >= 1 and shape[-1] < REGISTER and prod(shape) >= TURNED
        if not small or form(x).device.type != "cpu":
            continue
        turned = form(x)._replace(shape=(*shape[:-2], shape[-1], shape[-2]))
        x = put_as(node, turned, aten.transpose.int, x, dim - 1, dim)
        logs = put_as(node, turned, aten._log_softmax.default, x, dim - 1, half)
        back = put(node, aten.transpose.int, logs, dim - 1, dim)
        # a copy, because a later operation may need the memory layout of the recorded step
        swap(node, put(node, aten.clone.default, back, memory_format=torch.contiguous_format))


def fold_products(graph: fx.Graph) -> None:
    """Add a matrix product to a tensor in one operation: w += c * (x @ y) becomes `baddbmm_(w, x, y, alpha=c)`.

    The product x @ y then needs no memory of its own. If there is another term, as in w += c * (x @ y + z), the step
    first computes w += c * z, and then w += c * (x @ y). A term z of zeros therefore changes no bit of the result.
    """
    memory = Memory(graph)
    for node in calls(graph, aten.add_.Tensor):
        w, total = args(node)
        product, rest = _product_of(total)
        if product is None or form(product) != form(w):
            continue
        x, y = args(product)
        if not all(memory.knows(tensor) for tensor in (w, x, y, rest) if isinstance(tensor, fx.Node)):
            memory = Memory(graph)  # an earlier product was folded into one of them
        kept = memory.unchanged((x, y), product, node) and memory.unchanged((rest,), total, node)
        if not kept or memory.overlap(w, x) or memory.overlap(w, y):
            continue
        factor = node.kwargs.get("alpha", 1)
        into = w if rest is None else put(node, aten.add_.Tensor, w, rest, alpha=factor)
        swap(node, put(node, aten.baddbmm_.default, into, x, y, beta=1, alpha=factor))
        for unused in (total, product) if rest is not None else (product,):
            graph.erase_node(unused)


def drop_views_of_sums(graph: fx.Graph) -> None:
    """If a view removes the axes that a sum with `keepdim=True` has kept, replace both by a sum without `keepdim`."""
    for node in calls(graph, aten.view.default):
        total = args(node)[0]
        if is_call(total, aten.sum.dim_IntList) and args(total)[2:] == (True,) and len(total.users) == 1:
            x, dims, _ = args(total)
            shape = [length for axis, length in enumerate(form(x).shape) if axis not in dims]
            if shape == list(form(node).shape) and form(x).dtype == form(node).dtype:
                swap(node, put(node, aten.sum.dim_IntList, x, dims))
                graph.erase_node(total)


def group_updates(graph: fx.Graph) -> None:
    """Combine the last updates of several tensors in one call: w += c * g and v += c * h become `_foreach_add_`.

    Nothing may use w or write into g between the update and the end of the step.
    """
    groups: dict[Any, list[fx.Node]] = {}
    memory = Memory(graph)
    for node in calls(graph, aten.add_.Tensor):
        w, g = args(node)
        if isinstance(g, fx.Node) and form(w) == form(g) and memory.last_use(node) and memory.unchanged((g,), node):
            groups.setdefault((node.kwargs.get("alpha", 1), form(w).dtype), []).append(node)
    for (factor, _), group in groups.items():
        if len(group) < 2:
            continue
        end = next(iter(reversed(graph.nodes)))
        put(end, aten._foreach_add_.List, [args(n)[0] for n in group], [args(n)[1] for n in group], alpha=factor)
        for node in group:
            swap(node, args(node)[0])


def _entries_of(node: Any) -> Any:
    """Follow indexing, `unsqueeze` and `view` backwards, and return the tensor to which they were applied."""
    while is_call(node, aten.index.Tensor, aten.unsqueeze.default, aten.view.default):
        node = args(node)[0]
    return node


def _only_argument(node: Any, op: Any) -> Any:
    """Return the first argument of a node if the node is this operation and only one operation uses its result."""
    return args(node)[0] if is_call(node, op) and len(node.users) == 1 else None


def _product_of(total: Any) -> tuple[Any, Any]:
    """Split x @ y + z into (x @ y, z), and x @ y into (x @ y, None).

    Return (None, None) if `total` contains no matrix product, or if another operation also uses x @ y or `total`.
    """
    if not isinstance(total, fx.Node) or len(total.users) != 1:
        return None, None
    if is_call(total, aten.bmm.default):
        return total, None
    if is_call(total, aten.add.Tensor) and not total.kwargs:
        for one, other in (args(total), args(total)[::-1]):
            if is_call(one, aten.bmm.default) and len(one.users) == 1 and form(one) == form(other):
                return one, other
    return None, None
