"""A program: the rewritten graph of a training step as Python functions."""

import functools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from polyfed.training.programs.memory import NO_TENSOR, Memory, args, calls, form, is_part, results
from polyfed.training.programs.trace import makes_view

aten = torch.ops.aten

SMALL = 2**14
"""Most entries of a lookup's result in one step. A larger result may no longer be in the processor's cache when its
step begins."""

PUBLIC: dict[Any, Callable[..., Any]] = {
    aten._foreach_add_.List: torch._foreach_add_,
    aten._log_softmax.default: torch._log_softmax,
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.baddbmm_.default: Tensor.baddbmm_,
    aten.bmm.default: torch.bmm,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.gather.default: torch.gather,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.relu.default: torch.relu,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""Frequent operations, and the public functions that compute them with the same arguments. A call of the public
function takes 0.8 us less, and makes rounds of the setting `small` up to 2 % faster (docs/performance.md)."""

TOGETHER = 64
"""Most steps for which a program looks up rows at once. The results then take at most 8 MiB."""


class Program:
    """Computes several training steps with the same graph of operations on plain tensors.

    Some operations give the same result in every step. They run only once, before the first step. There are two kinds
    of such operations. The first kind makes constants. The second kind makes views of parameters that the steps update
    in place. Small lookups in a table, such as that of the labels, run once for many steps.

    Args:
        graph: the graph of a step. Its inputs are the state, the slices and the outside tensors.
        num_state: number of tensors of the state.
        num_slices: number of slices.
    """

    def __init__(self, graph: fx.Graph, num_state: int, num_slices: int) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        state, outside = inputs[:num_state], inputs[num_state + num_slices :]
        slices = inputs[num_state : num_state + num_slices]
        early = _early(graph, state, outside)
        lookups = _lookups(graph, slices, outside)
        late = [n for n in graph.nodes if n.op == "call_function" and n not in early and n not in lookups]
        self._lookups = [(outside.index(table), slices.index(rows)) for table, rows in lookups.values()]
        found = [node for node in early if form(node) is not NO_TENSOR]  # not the tuple of an operation's results
        self._once = _function([*state, *outside], early, found)
        self._used = [any(user not in lookups for user in node.users) for node in slices]
        self._step = _function([*state, *slices, *lookups, *outside, *found], late, results(graph))

    def __call__(
        self, state: Sequence[Tensor], columns: Sequence[Tensor], steps: range, outside: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take steps.

        Args:
            state: tensors of the state; may be changed in place.
            columns: inputs of all steps, with the step on axis 1.
            steps: numbers of the steps.
            outside: tensors that the step closes over.

        Returns:
            The state after the last step, and the value of each step.
        """
        values, now, early = [], list(state), self._once(*state, *outside)
        for start in range(steps.start, steps.stop, TOGETHER):
            some = range(start, min(start + TOGETHER, steps.stop))
            looked = [outside[table][columns[rows][:, some.start : some.stop]] for table, rows in self._lookups]
            for t in some:
                own = [c.select(1, t) if used else None for c, used in zip(columns, self._used, strict=True)]
                found = (result.select(1, t - start) for result in looked)
                *now, value = self._step(*now, *own, *found, *outside, *early)
                values.append(value)
        return now, values


def _lookups(
    graph: fx.Graph, slices: Sequence[fx.Node], outside: Sequence[fx.Node]
) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Return the small lookups `table[rows]` of a step, each with the table and the rows."""
    memory, result = Memory(graph), {}
    for node in calls(graph, aten.index.Tensor):
        table, places = args(node)
        reads = table in outside and len(places) == 1 and places[0] in slices
        if reads and prod(form(node).shape) <= SMALL and memory.constant(node) and memory.constant(table):
            result[node] = table, places[0]
    return result


def _function(inputs: Iterable[fx.Node], nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> Callable[..., Any]:
    """Return some operations of a graph as a Python function, which frees every tensor after its last use."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = _direct(node.target)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule({}, graph).forward


@functools.cache
def _direct(op: Any) -> Any:
    """Return a callable that computes an operation of PyTorch without a call of Python code.

    `torch.ops.aten.bmm.default` is a Python object, whose method calls the function `_op`. In a program, looking up
    this object and calling its method takes 1.7 us for each operation.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return op
    direct = functools.partial(PUBLIC.get(op, op._op))
    direct.__name__ = op.name().replace("::", "_").replace(".", "_")  # type: ignore[attr-defined, no-untyped-call]
    direct.__module__ = __name__  # `fx` names the callable after its module
    return direct


def _early(graph: fx.Graph, state: Sequence[fx.Node], outside: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the operations that give the same tensor in every step, in order."""
    memory = Memory(graph)
    constants = set(outside)
    views = {before for before, after in zip(state, results(graph), strict=False) if memory.lies_in(after, before)}
    result = []
    for node in graph.nodes:
        if not (memory.repeatable(node) or is_part(node)):
            continue
        read = node.all_input_nodes
        if constants.issuperset(read) and memory.constant(node):
            constants.add(node)
            result.append(node)
        elif (is_part(node) or makes_view(node.target)) and views.issuperset(read):
            views.add(node)
            result.append(node)
    return result
