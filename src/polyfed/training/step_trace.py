"""One training step of a stack, traced as operations on plain tensors with a client axis.

Under `vmap` and `grad` a layer becomes a dozen operations at the bottom, most of which are views of the same numbers in
the same shape again. A trace leaves those out, and what remains is what the step did: the same operations in the same
order, hence the same bits.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

Program = Callable[..., tuple[Tensor, ...]]
"""A trace as a function of the state's tensors, the slices, and the tensors from outside; gives the results."""

Layout = tuple[Hashable, ...]
"""Of tensors: type, shape, strides, and where the client axis is."""


class Ref(int):
    """A tensor of a trace, by its number."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is Ref and int(self) == int(other)

    __hash__ = int.__hash__


class Call(NamedTuple):
    """One operation: what it takes, and the numbers of the tensors that it gives; `many` where it gives a list.

    What it takes is a `Ref` or a `Constant`, or a tuple of them where the operation wants a list.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: tuple[int | None, ...]
    many: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """Anything else that an operation takes; told apart by type and spelling, because 1 == 1.0 == True in Python."""

    value: Any = field(compare=False)
    kind: type
    spelling: str


@dataclass
class Trace:
    """One step.

    Attributes:
        inputs: how many of the first slots are the state's and the slices' tensors.
        calls: the operations, in order.
        outside: tensors that the step closes over (the table's columns, the global model), by slot.
        results: slots of the state after the step, and of its value.
        before: layout of the state's tensors before the step.
        after: the same after the step, and of the value.
        tampers: whether it wrote into a tensor that it closes over, or gave a tensor another shape in place.
    """

    inputs: int
    calls: list[Call] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    results: tuple[int, ...] = ()
    before: Layout = ()
    after: Layout = ()
    tampers: bool = False

    def signature(self) -> tuple[Any, ...]:
        """All of it but the tensors from outside."""
        return (*range(self.inputs), *self.outside), tuple(self.calls), self.results, self.before, self.after

    @property
    def repeatable(self) -> bool:
        """Whether another such step could follow: the state has the layout that it had, and nothing else changed."""
        return self.before == self.after[:-1] and not self.tampers

    def repeats(self, other: "Trace") -> bool:
        """Whether this is `other` once more, on the very same tensors from outside."""
        return self.signature() == other.signature() and all(
            _same(tensor, other.outside[slot]) for slot, tensor in self.outside.items()
        )

    def program(self) -> Program:
        """The trace as one Python function, which lets go of every tensor after its last use."""
        graph = fx.Graph()
        nodes = {slot: graph.placeholder(f"t{slot}") for slot in (*range(self.inputs), *self.outside)}
        for call in self.calls:
            kwargs = {name: _filled((value,), nodes)[0] for name, value in call.kwargs}
            node = graph.call_function(call.op, _filled(call.args, nodes), kwargs)
            for i, slot in enumerate(call.made):
                if slot is not None:
                    nodes[slot] = graph.call_function(getitem, (node, i)) if call.many else node
        graph.output(tuple(nodes[slot] for slot in self.results))
        graph.eliminate_dead_code()
        return fx.GraphModule({}, graph).forward


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while it is on, what reaches the bottom."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(len(inputs))
        self._slots: dict[int, int] = {}
        self._views: dict[Hashable, int] = {}
        self._base: list[int] = []  # by slot: of which slot's memory it is a view
        self._alive: list[Tensor] = []  # so that no identity is used twice (weak references take ten times as long)
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and note it."""
        out = func(*args, **(kwargs or {}))
        refs = self._refs(args)
        base = self._viewed(args[0]) if _makes_view(func) else None
        if isinstance(out, Tensor):
            if base is not None and (earlier := self._views.get(_view(base, out))) is not None:
                self._slots[id(out)] = earlier
                self._alive.append(out)
                return out
            made: tuple[int | None, ...] = (self._made(out, base),)
        elif isinstance(out, (list, tuple)):
            made = tuple(self._made(t, base) if isinstance(t, Tensor) else None for t in out)
        else:
            return out  # a fact about a tensor, such as its device
        named = tuple((name, *self._refs((value,))) for name, value in kwargs.items()) if kwargs else ()
        self.trace.calls.append(Call(func, refs, named, made, not isinstance(out, Tensor)))
        if torch.Tag.inplace_view in func.tags or any(self._outside(args[place]) for place in _written(func)):
            self.trace.tampers = True
        return out

    def _refs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        found: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(Ref(self.slot(value)))
            elif isinstance(value, (list, tuple)):
                found.append(self._refs(value))
            else:
                found.append(_integer(value) if isinstance(value, int) else _literal(value))
        return tuple(found)

    def slot(self, tensor: Tensor) -> int:
        """The number of a tensor; one that nothing here has made comes from outside."""
        found = self._slots.get(id(tensor))
        if found is None:
            found = self._add(tensor)
            self.trace.outside[found] = tensor
        return found

    def _outside(self, tensor: Tensor) -> bool:
        return self._base[self.slot(tensor)] in self.trace.outside

    def _made(self, tensor: Tensor, base: int | None) -> int:
        found = self._slots.get(id(tensor))  # operations in place give back what they change
        if found is not None:
            return found
        slot = self._add(tensor, base)
        if base is not None:
            self._views[_view(base, tensor)] = slot
        return slot

    def _add(self, tensor: Tensor, base: int | None = None) -> int:
        slot = len(self._base)
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        self._base.append(slot if base is None else base)
        return slot

    def _viewed(self, tensor: Tensor) -> int:
        """Of which slot's memory a tensor is a view; it counts as a known view of it from now on."""
        slot = self.slot(tensor)
        base = self._base[slot]
        self._views.setdefault(_view(base, tensor), slot)
        return base


@cache
def _makes_view(op: Any) -> bool:
    return bool(op.is_view) or op is torch.ops.aten._unsafe_view.default


@cache
def _written(op: Any) -> tuple[int, ...]:
    """Places of the arguments that an operation changes in place."""
    schema = op._schema
    if not schema.is_mutable:
        return ()
    places = [i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    return tuple(i for i in places if not schema.arguments[i].kwarg_only)


def _view(base: int, tensor: Tensor) -> Hashable:
    """What makes two views of one memory equal. Conjugate and negative are flags of a view: the memory is the same."""
    flags = tensor.is_conj(), tensor.is_neg()
    return base, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), flags


def _literal(value: Any) -> Constant:
    return Constant(value, type(value), repr(value))


@lru_cache(maxsize=4096, typed=True)
def _integer(value: int) -> Constant:
    return _literal(value)


def _same(mine: Tensor, its: Tensor) -> bool:
    """Whether two tensors from outside are one; numbers made anew in every step (`torch.tensor(7)`) may be equal."""
    if mine is its or mine.dim() or its.dim() or mine.device.type != "cpu":
        return mine is its
    return mine.dtype == its.dtype and bool(mine == its)


def _filled(values: tuple[Any, ...], nodes: Mapping[int, fx.Node]) -> tuple[Any, ...]:
    """Arguments as the operation takes them."""
    return tuple(
        nodes[int(value)]
        if isinstance(value, Ref)
        else value.value
        if isinstance(value, Constant)
        else list(_filled(value, nodes))
        for value in values
    )
