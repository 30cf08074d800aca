"""Rewrites the linear layers of a step: their outputs, and everything computed from these outputs, are transposed.

A stack of K clients with B rows each computes the output of a linear layer as a tensor (K, B, F). The rule of this
file stores the output as (K, F, B) instead. Such a tensor is called *turned*. The rule works like those of
`step_rewrite.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from polyfed.training.programs.memory import args, form, is_call, is_operation, put_as, swap
from polyfed.training.programs.trace import Form

aten = torch.ops.aten

ROWS = (16, 32, 48, 64)
"""Numbers of rows in a batch for which the products of turned layers are faster. They fill the vector registers of a
CPU (16 float32 entries with AVX-512). With 8, 17 and 128 rows, turned products of the largest layer of `food` take 1.0
to 1.3 times as long as the others (docs/performance.md)."""

ALONG_AN_AXIS: dict[Any, int] = {
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten.gather.default: 1,
    aten.scatter_.value_reduce: 1,
}
"""Operations along one axis, and the place of the axis among their arguments. The arguments before it are turned."""

READERS = (aten.bmm.default, aten.baddbmm_.default, aten.transpose.int, aten.sum.dim_IntList)
"""Operations that take as long with a transposed view of a turned tensor as with a tensor that is not turned."""


def turn_layers(graph: fx.Graph) -> None:
    """Compute x @ w^T as (w @ x^T)^T, where the transposition of the result is only a view.

    The weights w of a linear layer are stored as (outputs, inputs), so w @ x^T reads both factors by rows, and MKL
    computes it up to 1.7 times as fast. The result is then turned. An operation that reads a turned tensor and one that
    is not turned takes up to 8 times as long as an operation on two tensors of the same layout, because it reads one of
    them in large steps. An output is therefore turned only if all operations that follow from it can be turned too, up
    to the next matrix product or sum.
    """
    nodes = _turnable(graph)
    turned: dict[fx.Node, fx.Node] = {}
    views: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        turned[node] = _copy(node, turned, views)
    for node in nodes:
        _hand_over(node, turned)
    for node in reversed(nodes):
        graph.erase_node(node)


def _turnable(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations whose results are turned, in order."""
    result = dict.fromkeys(node for node in graph.nodes if _is_candidate(node))
    size = -1
    while len(result) != size:
        size = len(result)
        for node in reversed([*result]):
            if not all(user in result or _may_read(user) for user in node.users):
                del result[node]
        for node in [*result]:
            if not _reads_turned(node, result):
                del result[node]
    return [*result]


def _is_candidate(node: fx.Node) -> bool:
    """Return whether the operation can be computed on turned tensors, if the operations around it are turned too."""
    shape, device = form(node).shape, form(node).device
    if not is_operation(node) or len(shape) != 3 or device.type != "cpu":
        return False
    if is_call(node, aten.bmm.default):
        return not _is_transposed(args(node)[0])  # the gradient of a weight is a product with a transposed first factor
    if is_call(node, *ALONG_AN_AXIS):
        return args(node)[ALONG_AN_AXIS[node.target]] in (2, -1)
    tags = node.target.tags  # type: ignore[union-attr]
    alone = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return alone and not any(isinstance(value, fx.Node) for value in node.kwargs.values())


def _may_read(user: fx.Node) -> bool:
    """Return whether an operation may read a transposed view of a turned tensor."""
    if is_call(user, aten.squeeze.dims):  # one number for each row, with the same strides as without the rule
        return form(args(user)[0]).shape[2] == 1 and [dim % 3 for dim in args(user)[1]] == [2]
    return is_call(user, *READERS)


def _reads_turned(node: fx.Node, found: Mapping[fx.Node, None]) -> bool:
    """Return whether the operation reads turned tensors wherever it has to."""
    if is_call(node, aten.bmm.default):
        x, y = args(node)
        return x in found or (_is_transposed(y) and form(node).shape[1] in ROWS)
    if is_call(node, *ALONG_AN_AXIS):
        return all(x in found for x in args(node)[: ALONG_AN_AXIS[node.target]])
    others = [x for x in node.all_input_nodes if x not in found]
    return len(others) < len(node.all_input_nodes) and all(map(_spreads, others, [form(node)] * len(others)))


def _spreads(x: fx.Node, result: Form) -> bool:
    """Return whether an operation repeats the entries of x along an axis of its result, as it does with a bias."""
    shape = form(x).shape
    return not shape or (len(shape) == 3 and shape != result.shape)


def _copy(node: fx.Node, turned: Mapping[fx.Node, fx.Node], views: dict[fx.Node, fx.Node]) -> fx.Node:
    """Insert the operation on turned tensors before a node, and return it."""
    if is_call(node, aten.bmm.default):
        x, y = args(node)
        return put_as(
            node, _transposed(node), aten.bmm.default, _flip(node, y, turned, views), _flip(node, x, turned, views)
        )
    new = [_flip(node, x, turned, views) for x in args(node)]
    if is_call(node, *ALONG_AN_AXIS):
        new[ALONG_AN_AXIS[node.target]] = 1
    return put_as(node, _transposed(node), node.target, *new, **node.kwargs)


def _flip(node: fx.Node, x: Any, turned: Mapping[fx.Node, fx.Node], views: dict[fx.Node, fx.Node]) -> Any:
    """Return the transpose of an argument. If the graph has no tensor for it, insert a view before a node."""
    if not isinstance(x, fx.Node) or not form(x).shape:
        return x
    if x in turned:
        return turned[x]
    if _is_transposed(x):
        return args(x)[0]
    if x not in views:
        views[x] = put_as(node, _transposed(x), aten.transpose.int, x, 1, 2)
    return views[x]


def _hand_over(node: fx.Node, turned: Mapping[fx.Node, fx.Node]) -> None:
    """Let the operations that are not turned read the turned result of a node, or a view of it."""
    new, view = turned[node], None
    for user in [user for user in node.users if user not in turned]:
        if _is_transposed(user):
            swap(user, new)
        elif _adds_up(user):
            user.args = (new, [(0, 2, 1)[dim] for dim in args(user)[1]])
        else:
            if view is None:
                with node.graph.inserting_after(new):
                    view = node.graph.call_function(aten.transpose.int, (new, 1, 2))
                view.meta["form"] = form(node)
            user.replace_input_with(node, view)


def _adds_up(user: fx.Node) -> bool:
    """Return whether a node is a sum over one or both of the last two axes, which gives the same for turned tensors."""
    if not is_call(user, aten.sum.dim_IntList) or len(args(user)) > 2 or user.kwargs:
        return False
    return any(dim % 3 for dim in args(user)[1])


def _is_transposed(x: Any) -> bool:
    """Return whether x is a transposition of the last two axes of a tensor with three axes."""
    return is_call(x, aten.transpose.int) and len(form(x).shape) == 3 and {d % 3 for d in args(x)[1:]} == {1, 2}


def _transposed(x: fx.Node) -> Form:
    """Return the form of x with its last two axes transposed."""
    return form(x)._replace(shape=(form(x).shape[0], form(x).shape[2], form(x).shape[1]))
