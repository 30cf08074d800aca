"""One training step of a stack, written down as operations on plain tensors with a client axis.

Under `vmap` and `grad` a layer becomes a dozen operations at the bottom, most of which only look at the same numbers in
the same shape again. A text leaves those looks out, and what is left is what the step did: the same operations in the
same order, hence the same bits.
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
"""A text as a function of the state's tensors, the slices, and the tensors from outside; gives the results."""

Forms = tuple[Hashable, ...]
"""Of tensors: type, shape, strides, and where the client axis is."""


class Ref(int):
    """A tensor of a text, by its number."""

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
class Text:
    """One step, written down.

    Attributes:
        inputs: how many of the first slots are the state's and the slices' tensors.
        calls: the operations, in order.
        outside: tensors that the step closes over (the table's columns, the global model), by slot.
        results: slots of the state after the step, and of its value.
        before: forms of the state's tensors before the step.
        after: the same after the step, and of the value.
    """

    inputs: int
    calls: list[Call] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    results: tuple[int, ...] = ()
    before: Forms = ()
    after: Forms = ()

    def words(self) -> tuple[Any, ...]:
        """What it says, whatever the tensors from outside."""
        return (*range(self.inputs), *self.outside), tuple(self.calls), self.results, self.before, self.after

    @property
    def goes_on(self) -> bool:
        """Whether the state after the step has the form of the state before it."""
        return self.before == self.after[:-1]

    def repeats(self, other: "Text") -> bool:
        """Whether this is `other` once more, on the very same tensors from outside."""
        return self.words() == other.words() and all(
            _same(tensor, other.outside[slot]) for slot, tensor in self.outside.items()
        )

    def program(self) -> Program:
        """The text as one Python function, which lets go of every tensor after its last use."""
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


class Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down, while it is on, what reaches the bottom."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.text = Text(len(inputs))
        self._slots: dict[int, int] = {}
        self._looks: dict[Hashable, int] = {}
        self._root: list[int] = []  # by slot: whose memory it looks at
        self._alive: list[Tensor] = []  # so that no identity is used twice (weak references take ten times as long)
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and write it down."""
        out = func(*args, **(kwargs or {}))
        refs = self._refs(args)
        root = self._seen(args[0]) if _looks(func) else None
        if isinstance(out, Tensor):
            if root is not None and (earlier := self._looks.get(_look(root, out))) is not None:
                self._slots[id(out)] = earlier
                self._alive.append(out)
                return out
            made: tuple[int | None, ...] = (self._made(out, root),)
        elif isinstance(out, (list, tuple)):
            made = tuple(self._made(t, root) if isinstance(t, Tensor) else None for t in out)
        else:
            return out  # a fact about a tensor, such as its device
        named = tuple((name, *self._refs((value,))) for name, value in kwargs.items()) if kwargs else ()
        self.text.calls.append(Call(func, refs, named, made, not isinstance(out, Tensor)))
        return out

    def _refs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        found: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(Ref(self.slot(value)))
            elif isinstance(value, (list, tuple)):
                found.append(self._refs(value))
            else:
                found.append(_constant(value) if isinstance(value, int) else _spelt(value))
        return tuple(found)

    def slot(self, tensor: Tensor) -> int:
        """The number of a tensor; one that nothing here has made comes from outside."""
        found = self._slots.get(id(tensor))
        if found is None:
            found = self._add(tensor)
            self.text.outside[found] = tensor
        return found

    def _made(self, tensor: Tensor, root: int | None) -> int:
        found = self._slots.get(id(tensor))  # operations in place give back what they change
        if found is not None:
            return found
        slot = self._add(tensor, root)
        if root is not None:
            self._looks[_look(root, tensor)] = slot
        return slot

    def _add(self, tensor: Tensor, root: int | None = None) -> int:
        slot = len(self._root)
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        self._root.append(slot if root is None else root)
        return slot

    def _seen(self, tensor: Tensor) -> int:
        """Whose memory a tensor looks at; the tensor counts as a look at it from now on."""
        slot = self.slot(tensor)
        root = self._root[slot]
        self._looks.setdefault(_look(root, tensor), slot)
        return root


@cache
def _looks(op: Any) -> bool:
    return bool(op.is_view) or op is torch.ops.aten._unsafe_view.default


def _look(root: int, tensor: Tensor) -> Hashable:
    return root, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _spelt(value: Any) -> Constant:
    return Constant(value, type(value), repr(value))


@lru_cache(maxsize=4096, typed=True)
def _constant(value: int) -> Constant:
    return _spelt(value)


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
