"""Records one training step of a stack as operations on plain tensors with a client axis.

Under `vmap` and `grad`, a layer becomes a dozen low-level operations. Most of these operations only make a view that an
earlier operation has made already. A trace leaves them out. The remaining operations are the same and in the same
order, so the bits are the same.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from polyfed.core.system.operations import SeesOperations


class Form(NamedTuple):
    """The data type, shape and device of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


Layout = tuple[tuple[Any, ...], ...]
"""The data type, shape, strides and position of the client axis, for each of some tensors."""


INDEX = torch.ops.aten.index.Tensor
BATCH_NORMS = torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default


class Ref(int):
    """The slot number of a tensor in a trace."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is Ref and int(self) == int(other)

    __hash__ = int.__hash__


class Call(NamedTuple):
    """One operation.

    Attributes:
        op: the operation.
        args: arguments of the operation, each a `Ref` or a `Constant`, or a tuple of them if the operation takes a
            list.
        kwargs: keyword arguments of the operation.
        made: slots of the tensors that the operation returns, None for other values.
        many: whether the operation returns a list.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: tuple[int | None, ...]
    many: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is not a tensor. It is compared by type and `repr`, because 1 == 1.0 == True in Python."""

    value: Any = field(compare=False)
    kind: type
    spelling: str


@dataclass
class Trace:
    """The record of one step. Each tensor of the step has a number, its slot; the first slot is 0.

    Attributes:
        inputs: number of input tensors. Their slots are 0 to `inputs` - 1. The tensors of the state come first, then
            the slices, which are the data of this one step.
        calls: the operations, in order.
        outside: tensors that the step closes over (columns of the table, the global model), by slot.
        results: slots of the state after the step, and of the value of the loss.
        before: layout of the state at the start of the step.
        after: layout of the state at the end of the step, followed by the layout of the value of the loss.
        forms: the form of every tensor, by slot.
    """

    inputs: int
    calls: list[Call] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    results: tuple[int, ...] = ()
    before: Layout = ()
    after: Layout = ()
    forms: list[Form] = field(default_factory=list)

    def signature(self) -> tuple[Any, ...]:
        """Return a description of the trace. If two steps perform the same operations, their signatures are equal."""
        return (*range(self.inputs), *self.outside), tuple(self.calls), self.results, self.before, self.after

    @property
    def repeatable(self) -> bool:
        """Whether the same operations can compute the next step. They can if this step kept the state's layout."""
        return self.before == self.after[:-1]

    def repeats(self, other: "Trace") -> bool:
        """Whether the two steps run the same operations on the same outside tensors."""
        return self.signature() == other.signature() and all(
            _same(tensor, other.outside[slot]) for slot, tensor in self.outside.items()
        )

    def graph(self) -> fx.Graph:
        """Return the trace as a graph. It takes the tensors of the state, the slices and the outside tensors."""
        graph = fx.Graph()
        nodes = {slot: graph.placeholder(f"t{slot}") for slot in (*range(self.inputs), *self.outside)}
        for slot, node in nodes.items():
            node.meta["form"] = self.forms[slot]
        for call in self.calls:
            kwargs = {name: _filled((value,), nodes)[0] for name, value in call.kwargs}
            node = graph.call_function(call.op, _filled(call.args, nodes), kwargs)
            for i, slot in enumerate(call.made):
                if slot is not None:
                    nodes[slot] = graph.call_function(getitem, (node, i)) if call.many else node
                    nodes[slot].meta["form"] = self.forms[slot]
        graph.output(tuple(nodes[slot] for slot in self.results))
        return graph


class Unrecordable(Exception):
    """The next operation of a step cannot be recorded, because replaying it in later steps would be wrong.

    Such an operation writes into a tensor that the step closes over, changes the shape of a tensor in place, or derives
    a Python number or a shape from the values of a tensor. In the last case, the trace would contain the number or the
    shape of the recorded step, although it may differ in later steps.
    """


class Tracer(SeesOperations):
    """While active, records the operations on plain tensors into which `vmap` and `grad` translate a step."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(len(inputs))
        self._slots: dict[int, int] = {}
        self._views: dict[Hashable, int] = {}
        self._base: list[int] = []  # by slot: the slot whose memory it is a view of
        self._alive: list[Tensor] = []  # keeps `id` unique; weak references would take ten times as long
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform the operation and record it.

        Raises:
            Unrecordable: the operation writes into a tensor that the step closes over, changes a shape in place, or
                derives a number or a shape from the values of a tensor. When this error is raised, the operation has
                not been performed.
        """
        if not _recordable(func) or _selects(func, args) or any(map(self._outside, written(func, args))):
            raise Unrecordable
        out = func(*args, **(kwargs or {}))
        refs = self._refs(args)
        base = self._viewed(args[0]) if makes_view(func) else None
        if isinstance(out, Tensor):
            if base is not None and (earlier := self._views.get(_view(base, out))) is not None:
                self._slots[id(out)] = earlier
                self._alive.append(out)
                return out
            made: tuple[int | None, ...] = (self._made(out, base),)
        elif isinstance(out, (list, tuple)):
            made = tuple(self._made(t, base) if isinstance(t, Tensor) else None for t in out)
        else:
            return out  # a property of a tensor, such as its device
        named = tuple((name, *self._refs((value,))) for name, value in kwargs.items()) if kwargs else ()
        self.trace.calls.append(Call(func, refs, named, made, not isinstance(out, Tensor)))
        return out

    def _refs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        result: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                result.append(Ref(self.slot(value)))
            elif isinstance(value, (list, tuple)):
                result.append(self._refs(value))
            else:
                result.append(_integer(value) if isinstance(value, int) else _literal(value))
        return tuple(result)

    def slot(self, tensor: Tensor) -> int:
        """Return the slot of a tensor. A tensor that no recorded operation has made is an outside tensor."""
        result = self._slots.get(id(tensor))
        if result is None:
            result = self._add(tensor)
            self.trace.outside[result] = tensor
        return result

    def _outside(self, target: Any) -> bool:
        if isinstance(target, (list, tuple)):
            return any(map(self._outside, target))
        return isinstance(target, Tensor) and self._base[self.slot(target)] in self.trace.outside

    def _made(self, tensor: Tensor, base: int | None) -> int:
        result = self._slots.get(id(tensor))  # in-place operations return a tensor that has a slot
        if result is not None:
            return result
        slot = self._add(tensor, base)
        if base is not None:
            self._views[_view(base, tensor)] = slot
        return slot

    def _add(self, tensor: Tensor, base: int | None = None) -> int:
        slot = len(self._base)
        self.trace.forms.append(Form(tensor.dtype, tuple(tensor.shape), tensor.device))
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        self._base.append(slot if base is None else base)
        return slot

    def _viewed(self, tensor: Tensor) -> int:
        """Return the slot of the tensor that owns the memory of `tensor`. Record `tensor` as a view of this owner."""
        slot = self.slot(tensor)
        base = self._base[slot]
        self._views.setdefault(_view(base, tensor), slot)
        return base


@cache
def _recordable(op: Any) -> bool:
    """Return whether a trace can record an operation.

    An operation cannot be recorded if it changes a tensor's shape in place. It also cannot be recorded if the
    values of a tensor determine the Python number that the operation returns (as in `item`), or the shape of the
    operation's result (as in `nonzero`).
    """
    tags = torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return op is INDEX or not any(tag in op.tags for tag in tags)  # only masks select, see `_selects`


def _selects(op: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation selects entries by a mask, so that the size of its result depends on the mask."""
    masks = (torch.bool, torch.uint8)
    return op is INDEX and any(i is not None and i.dtype in masks for i in args[1])


@cache
def makes_view(op: Any) -> bool:
    """Return whether the result of an operation is a view of its first argument."""
    return bool(op.is_view) or op is torch.ops.aten._unsafe_view.default


def written(op: Any, args: Sequence[Any]) -> list[Any]:
    """Return the arguments that an operation changes in place."""
    if op in BATCH_NORMS:  # they change the running statistics in training, and their schemas do not say so
        return list(args[3:5]) if args[5] else []
    return [args[place] for place in _written_places(op) if place < len(args)]


@cache
def _written_places(op: Any) -> tuple[int, ...]:
    schema = op._schema
    if not schema.is_mutable:
        return ()
    places = [i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    return tuple(i for i in places if not schema.arguments[i].kwarg_only)


def _view(base: int, tensor: Tensor) -> Hashable:
    """Return a description of a view. Two views of the same memory with the same description show the same values."""
    flags = tensor.is_conj(), tensor.is_neg()
    return base, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), flags


def _literal(value: Any) -> Constant:
    return Constant(value, type(value), repr(value))


@lru_cache(maxsize=4096, typed=True)
def _integer(value: int) -> Constant:
    return _literal(value)


def _same(mine: Tensor, its: Tensor) -> bool:
    """Whether two tensors are one object. For 0-dim CPU tensors, such as `torch.tensor(7)`, equality is sufficient."""
    if mine is its or mine.dim() or its.dim() or mine.device.type != "cpu":
        return mine is its
    return mine.dtype == its.dtype and bool(mine == its)


def _filled(values: tuple[Any, ...], nodes: Mapping[int, fx.Node]) -> tuple[Any, ...]:
    """Turn recorded arguments into arguments of a graph node: each `Ref` becomes a node, each `Constant` a value."""
    return tuple(
        nodes[int(value)]
        if isinstance(value, Ref)
        else value.value
        if isinstance(value, Constant)
        else list(_filled(value, nodes))
        for value in values
    )
