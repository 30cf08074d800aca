"""The graph of a training step: which tensors share memory, and which operations write into them.

`node.meta["form"]` is the form of a node's tensor: its data type, shape and device.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from polyfed.training.programs.trace import Form, makes_view, written


class Memory:
    """For each tensor of a graph, which memory it uses, and which nodes read or write this memory.

    `Memory` reads the graph when it is made. It does not follow later changes of the graph.

    A *root* is a node whose tensor has memory of its own: an input, or an operation that allocates its result. A view
    shares the memory of its first argument, and therefore has the same roots. An in-place operation has the roots of
    the tensors that it writes into.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._at: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self._uses: dict[fx.Node, list[int]] = defaultdict(list)
        self._writes: dict[fx.Node, list[int]] = defaultdict(list)
        for place, node in enumerate(graph.nodes):
            self._at[node] = place
            for root in {root for used in node.all_input_nodes for root in self._roots[used]}:
                self._uses[root].append(place)
            targets = writes(node)
            for root in {root for target in targets for root in self._roots[target]}:
                self._writes[root].append(place)
            shared = targets or _viewed(node)
            self._roots[node] = frozenset(root for used in shared for root in self._roots[used]) or frozenset([node])
        self._end = len(self._at) - 1
        self._returned = {root for used in node.all_input_nodes for root in self._roots[used]}

    def unchanged(self, tensors: Iterable[Any], start: fx.Node, end: fx.Node | None = None) -> bool:
        """Return whether nothing writes into these tensors between `start` and `end` (default: the end of the step)."""
        last = self._end if end is None else self._at[end]
        return not any(
            self._at[start] < place < last
            for tensor in tensors
            if isinstance(tensor, fx.Node)
            for root in self._roots[tensor]
            for place in self._writes[root]
        )

    def knows(self, node: fx.Node) -> bool:
        """Return whether the node was already in the graph when this `Memory` was made."""
        return node in self._at

    def overlap(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two tensors may share memory."""
        return bool(self._roots[one] & self._roots[other])

    def constant(self, node: fx.Node) -> bool:
        """Return True if no operation writes into the tensor and the step does not return the tensor."""
        return not any(self._writes[root] or root in self._returned for root in self._roots[node])

    def last_use(self, node: fx.Node) -> bool:
        """Return whether nothing uses the memory of this node's tensor between the node and the end of the step."""
        return not any(self._at[node] < place < self._end for root in self._roots[node] for place in self._uses[root])

    def may_stand_for(self, x: fx.Node, copy: fx.Node) -> bool:
        """Return whether x may replace `copy`, an equal tensor with memory of its own."""
        last = max(self._uses[copy], default=self._at[copy])
        kept = not any(self._at[copy] < place <= last for root in self._roots[x] for place in self._writes[root])
        return kept and self.constant(copy)

    def repeatable(self, node: fx.Node) -> bool:
        """Return whether the node is an operation that gives the same result if it is repeated."""
        if not is_operation(node) or writes(node):
            return False
        return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]

    def may_merge(self, first: fx.Node, again: fx.Node) -> bool:
        """Return whether the result of `first` may replace the result of `again`, which repeats the same operation."""
        if _viewed(first):
            return True
        unchanged = self.unchanged(first.all_input_nodes, first, again)
        return unchanged and self.constant(first) and self.constant(again)

    def lies_in(self, node: fx.Node, base: fx.Node) -> bool:
        """Return whether a tensor lies in the memory of one input of the step."""
        return self._roots[node] == {base}


def is_operation(node: Any) -> bool:
    """Return whether a node is an operation of PyTorch."""
    return isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload)


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes into."""
    result: list[Any] = []
    if is_operation(node):
        for target in written(node.target, node.args):
            result.extend(target if isinstance(target, (list, tuple)) else [target])
    return [target for target in result if isinstance(target, fx.Node)]


def _viewed(node: fx.Node) -> list[fx.Node]:
    """Return a list with the argument whose memory a node shares, or an empty list if the node has its own memory.

    A node shares the memory of its first argument in two cases. Either the node is a view of this argument, or this
    argument is an operation with several results, and the node is one of these results.
    """
    takes = is_part(node) or (node.op == "call_function" and makes_view(node.target))
    return [node.args[0]] if takes else []  # type: ignore[list-item]


def is_part(node: fx.Node) -> bool:
    """Return whether a node is one result of an operation with several results, such as `topk`."""
    return node.op == "call_function" and not is_operation(node)


def args(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node."""
    return node.args


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the tensors that a graph returns."""
    (result,) = args(graph.output_node())
    return tuple(result)


def form(node: Any) -> Form:
    """Return the form of a node's tensor. All arguments that are not tensors have the form `NO_TENSOR`."""
    return node.meta.get("form", NO_TENSOR) if isinstance(node, fx.Node) else NO_TENSOR


NO_TENSOR = Form(torch.bool, (-1,), torch.device("meta"))
"""The form of an argument that is not a tensor. No tensor has a negative size."""


def size(node: Any, axis: int) -> int:
    """Return the size of a node's tensor along one axis."""
    return form(node).shape[axis]


def is_call(node: Any, *ops: Any) -> bool:
    """Return whether a node is one of these operations."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in ops


def calls(graph: fx.Graph, *ops: Any) -> list[fx.Node]:
    """Return the nodes that are one of these operations, in order."""
    return [node for node in graph.nodes if is_call(node, *ops)]


def put(before: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert an operation before the node `before`, and return the new node.

    The new node's tensor has the same data type, shape and device as the tensor of `before`.
    """
    return put_as(before, form(before), op, *args, **kwargs)


def put_as(before: fx.Node, result: Form, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert an operation before the node `before`, and return the new node. Its tensor has the form `result`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(op, args, kwargs)
    node.meta["form"] = result
    return node


def swap(old: fx.Node, new: fx.Node) -> None:
    """Use `new` wherever `old` was used, and remove `old`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    old.graph.erase_node(old)
