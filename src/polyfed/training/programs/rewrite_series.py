"""Rewrites for models of time series: for max-pooling over time, and for recurrent layers with unrolled time steps.

The rules work like those of `step_rewrite.py`.
"""

from collections.abc import Iterator

import torch
from torch import fx

from polyfed.training.programs.memory import Memory, args, calls, form, is_call, put, put_as, size, swap

aten = torch.ops.aten


def pool_pairs(graph: fx.Graph) -> None:
    """Compute the max-pool over pairs of neighbours (a, b) on the last axis as maximum(a, b).

    PyTorch's kernel for max-pooling compares one entry at a time, and `maximum` compares many. The backward pass needs
    the position of each maximum. It is the position of a, plus 1 where b > a.
    """
    for node in calls(graph, aten.max_pool2d_with_indices.default):
        x, kernel, stride, *others = args(node)
        if others or list(kernel) != [1, 2] or list(stride) != [1, 2] or size(x, -1) % 2:
            continue
        *outer, height, width = form(x).shape
        halves = *outer, height, width // 2
        pairs = put_as(node, form(x)._replace(shape=(*halves, 2)), aten.view.default, x, [*halves, 2])
        half = form(x)._replace(shape=halves)
        a, b = (put_as(node, half, aten.select.int, pairs, len(halves), place) for place in (0, 1))
        whole = half._replace(dtype=torch.int64)
        for entry in list(node.users):
            if args(entry)[1] == 0:
                swap(entry, put_as(node, half, aten.maximum.default, a, b))
                continue
            flat = whole._replace(shape=(height * width // 2,))
            places = put_as(
                node, flat, aten.arange.start_step, 0, height * width, 2, dtype=torch.int64, device=half.device
            )
            places = put_as(node, whole._replace(shape=halves[-2:]), aten.view.default, places, [*halves[-2:]])
            second = put_as(node, half._replace(dtype=torch.bool), aten.gt.Tensor, b, a)
            swap(entry, put_as(node, whole, aten.add.Tensor, places, second))


def join_slices(graph: fx.Graph) -> None:
    """Write the gradients of neighbouring slices side by side.

    A recurrent layer computes the inputs of all its gates as one tensor, and cuts it into slices. The backward pass
    pads the gradient of each slice with zeros to the full size, and adds the results. If the slices fill the axis, the
    sum is the concatenation of these gradients.
    """
    memory = Memory(graph)
    for node, terms in _sums(graph):
        if not all(is_call(term, aten.slice_backward.default) for term in terms):
            continue
        slices = sorted((args(term) for term in terms), key=lambda cut: int(cut[3]))
        axis, length = slices[0][2], size(node, slices[0][2])
        ends = [min(end, length) for _, _, _, _, end, _ in slices]
        fills = [start for _, _, _, start, _, _ in slices] == [0, *ends[:-1]] and ends[-1] == length
        alike = all(cut[2] == axis and cut[5] == 1 for cut in slices)
        if fills and alike and all(memory.unchanged((term, args(term)[0]), term, node) for term in terms):
            swap(node, put(node, aten.cat.default, [grad for grad, *_ in slices], axis))


def merge_products(graph: fx.Graph) -> None:
    """Compute a sum of matrix products as one product: a @ x + b @ y becomes [a b] @ [x; y].

    The gradient of a recurrent layer's weights is such a sum, with one product for each time step. The rule applies if
    the concatenated factors together have fewer entries than the results of the additions that it removes.
    """
    memory = Memory(graph)
    for node, terms in _sums(graph):
        products = [t for t in terms if is_call(t, aten.bmm.default) and len(t.users) == 1 and form(t) == form(node)]
        factors = [args(product) for product in products]
        _, rows, columns = form(node).shape if products else (0, 0, 0)
        inner = sum(size(x, 2) for x, _ in factors)
        if len(products) < 2 or inner * (rows + columns) >= (len(products) - 1) * rows * columns:
            continue
        rest = [term for term in terms if term not in products]
        if not all(memory.unchanged(args(product), product, node) for product in products):
            continue
        if not all(memory.unchanged((term,), term, node) for term in rest):  # the sum now reads them at its end
            continue
        left = _joined(node, [x for x, _ in factors], 2)
        right = _joined(node, [y for _, y in factors], 1)
        merged = put(node, aten.bmm.default, left, right)
        for other in rest[1:]:
            rest[0] = put(node, aten.add.Tensor, rest[0], other)
        swap(node, put(node, aten.add.Tensor, rest[0], merged) if rest else merged)


def subtract_from_constant(graph: fx.Graph) -> None:
    """Compute c - x in one operation. The recorded step fills a new tensor with c, and then subtracts x from it."""
    for node in calls(graph, aten.sub_.Tensor):
        filled, x = args(node)
        if node.kwargs or not is_call(filled, aten.fill_.Scalar) or form(filled) != form(x):
            continue
        empty, c = args(filled)
        if is_call(empty, aten.empty_like.default) and len(empty.users) == len(filled.users) == 1:
            swap(node, put(node, aten.rsub.Scalar, x, c))
            graph.erase_node(filled)
            graph.erase_node(empty)


def _joined(node: fx.Node, matrices: list[fx.Node], axis: int) -> fx.Node:
    """Insert the concatenation of matrices, (K, m, n) each, before a node.

    If all matrices are transposes, their originals are concatenated and the result is transposed. A concatenation of
    transposed tensors would copy them entry by entry.
    """
    shape = list(form(matrices[0]).shape)
    shape[axis] = sum(size(x, axis) for x in matrices)
    whole = form(node)._replace(shape=tuple(shape))
    if not all(is_call(x, aten.transpose.int) and {dim % 3 for dim in args(x)[1:]} == {1, 2} for x in matrices):
        return put_as(node, whole, aten.cat.default, matrices, axis)
    upright = whole._replace(shape=(shape[0], shape[2], shape[1]))
    cat = put_as(node, upright, aten.cat.default, [args(x)[0] for x in matrices], 3 - axis)
    return put_as(node, whole, aten.transpose.int, cat, 1, 2)


def _sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each sum of tensors of equal form, with its terms. A sum that is only a term of another sum is left out."""
    inner = set[fx.Node]()
    for node in reversed(calls(graph, aten.add.Tensor)):
        if node in inner or not _adds(node):
            continue
        terms, rest = list[fx.Node](), [*args(node)]
        while rest:
            term = rest.pop()
            if is_call(term, aten.add.Tensor) and _adds(term) and len(term.users) == 1 and form(term) == form(node):
                inner.add(term)
                rest += args(term)
            else:
                terms.append(term)
        yield node, terms[::-1]


def _adds(node: fx.Node) -> bool:
    """Return whether an addition adds two tensors of the same form, without the factor `alpha`."""
    return not node.kwargs and all(form(term) == form(node) for term in args(node))
