"""Steps of a stack's local training, written down and replayed.

Under `vmap` and `grad` every operation is handed through two levels of dispatch, which costs more than the operation
itself where models are small, and a layer becomes half a dozen operations of which most only look at the same numbers
in the same shape again. So two steps are taken as they are, and what reaches the bottom is written down: operations on
plain tensors with a client axis. If both read the same, the steps that follow replay the text without the looks.

A replayed step is the step that was written down: the same operations in the same order, hence the same bits. It is
written down afresh in every local training, and reading it twice finds a loss that is not a function of its batch
alone (a counter, a list of masks): such a training is not replayed.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

WORTH = 6
"""Steps that must be left over once a step has been written down twice, which takes as long as four to six steps."""

PATIENCE = 3
"""How often a step is written down in search of two texts that are the same; the first may differ (fresh state)."""

Forms = tuple[Hashable, ...]
"""Of tensors: type, shape, strides, and where the client axis is."""

Advance = Callable[[Any, Any, Sequence[Tensor]], tuple[Any, Tensor]]
"""`advance(kind, state, slices)` -> (state, value): one step; `slices` are what is its own."""


@dataclass(frozen=True)
class Ref:
    """A tensor of a text, by its number."""

    slot: int


@dataclass(frozen=True)
class Constant:
    """Anything else that an operation takes; told apart by type and spelling, because 1 == 1.0 == True in Python."""

    value: Any = field(compare=False)
    spelling: str


@dataclass(frozen=True)
class Call:
    """One operation: what it takes, and the numbers of the tensors that it gives; `many` where it gives a list."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: tuple[int | None, ...]
    many: bool


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

    def repeats(self, other: "Text") -> bool:
        """Whether this is `other` once more, on the very same tensors from outside, and can go on for ever."""
        return (
            self.before == self.after[:-1]
            and self.after == other.after
            and (self.inputs, self.results, self.calls) == (other.inputs, other.results, other.calls)
            and self.outside.keys() == other.outside.keys()
            and all(_same(tensor, other.outside[slot]) for slot, tensor in self.outside.items())
        )

    def program(self) -> Callable[..., tuple[Tensor, ...]]:
        """A function of the inputs, then of the tensors from outside."""
        arguments = (*range(self.inputs), *self.outside)
        return _program(arguments, tuple(self.calls), self.results)


class Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down, while it is on, what reaches the bottom."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.text = Text(len(inputs))
        # weak: a step that is written down takes no more memory than another
        self._slots: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._looks: dict[Hashable, int] = {}
        self._root: list[int] = []  # by slot: whose memory it looks at
        for tensor in inputs:
            self._add(tensor, len(self._root))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and write it down."""
        out = func(*args, **(kwargs or {}))
        refs = self._refs(args)
        root = self._root[refs[0].slot] if _looks(func) and isinstance(refs[0], Ref) else None
        if isinstance(out, Tensor):
            if root is not None and (earlier := self._looks.get(_look(root, out))) is not None:
                self._slots[out] = earlier
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
        return tuple(
            Ref(self.slot(value))
            if isinstance(value, Tensor)
            else self._refs(value)
            if isinstance(value, (list, tuple))
            else Constant(value, f"{type(value).__name__} {value!r}")
            for value in values
        )

    def slot(self, tensor: Tensor) -> int:
        """The number of a tensor; one that nothing here has made comes from outside."""
        found = self._slots.get(tensor)
        if found is None:
            found = self._add(tensor, len(self._root))
            self.text.outside[found] = tensor
        return found

    def _made(self, tensor: Tensor, root: int | None) -> int:
        found = self._slots.get(tensor)  # operations in place give back what they change
        return self._add(tensor, len(self._root) if root is None else root) if found is None else found

    def _add(self, tensor: Tensor, root: int) -> int:
        slot = len(self._root)
        self._slots[tensor] = slot
        self._root.append(root)
        self._looks.setdefault(_look(root, tensor), slot)
        return slot


@cache
def _looks(op: Any) -> bool:
    return bool(op.is_view) or op is torch.ops.aten._unsafe_view.default


def _look(root: int, tensor: Tensor) -> Hashable:
    return root, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _same(mine: Tensor, its: Tensor) -> bool:
    """Whether two tensors from outside are one; numbers made anew in every step (`torch.tensor(7)`) may be equal."""
    if mine is its or mine.dim() or its.dim() or mine.device.type != "cpu":
        return mine is its
    return mine.dtype == its.dtype and bool(mine == its)


def _forms(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Forms:
    return tuple((t.dtype, t.shape, t.stride(), dim) for t, dim in zip(tensors, dims, strict=True))


@lru_cache(maxsize=64)
def _program(
    arguments: tuple[int, ...], calls: tuple[Call, ...], results: tuple[int, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The text as one Python function, which lets go of every tensor after its last use."""
    graph = fx.Graph()
    nodes = {slot: graph.placeholder(f"t{slot}") for slot in arguments}
    for call in calls:
        args, kwargs = _filled(call.args, nodes), {name: _filled((value,), nodes)[0] for name, value in call.kwargs}
        node = graph.call_function(call.op, args, kwargs)
        for i, slot in enumerate(call.made):
            if slot is not None:
                nodes[slot] = graph.call_function(getitem, (node, i)) if call.many else node
    graph.output(tuple(nodes[slot] for slot in results))
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph).forward


def _filled(values: tuple[Any, ...], nodes: Mapping[int, fx.Node]) -> tuple[Any, ...]:
    """Arguments as the operation takes them."""
    return tuple(
        nodes[value.slot]
        if isinstance(value, Ref)
        else value.value
        if isinstance(value, Constant)
        else list(_filled(value, nodes))
        for value in values
    )


class Lower(torch.autograd.Function):
    """Calls `work(tensors, dims)` below `vmap`: with the plain tensors and where each has its client axis.

    It returns tensors and where their client axis is, as any rule for `vmap` does.
    """

    @staticmethod
    def forward(work: Any, *tensors: Tensor) -> Any:
        """There is nothing below outside of `vmap`."""
        raise AssertionError("a stack's steps are taken under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated through a local training."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Any, *tensors: Tensor) -> Any:
        """The rule itself."""
        return work(tensors, in_dims[1:])


def _below(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The plain tensors behind a stack's, and where each has its client axis."""
    found: list[Any] = []

    def work(plain: Any, dims: Any) -> Any:
        found.extend((plain, dims))
        return plain[0].new_zeros(()), None

    Lower.apply(work, *tensors)  # type: ignore[no-untyped-call]
    return found[0], found[1]


def run(
    advance: Advance, state: Any, columns: Sequence[Tensor], kinds: Sequence[Hashable], *, allowed: bool = True
) -> tuple[Any, Tensor]:
    """All steps of a stack's training.

    Args:
        advance: one step.
        state: nest of tensors before the first step.
        columns: what belongs to each step, (T, ...) each.
        kinds: per step, what decides in Python what the step does; steps of one kind do the same.
        allowed: whether steps may be replayed at all.

    Returns:
        The state after the last step, and the value of each step, (T,).
    """
    slices = list(zip(*(column.unbind() for column in columns), strict=True))
    drafts: dict[Hashable, list[Text]] = {kind: [] for kind in kinds}
    texts: dict[Hashable, Text] = {}
    left, values, t = Counter(kinds), [columns[0].new_zeros(0, dtype=torch.float32)], 0
    while t < len(kinds):
        kind, stop = kinds[t], t + 1
        if kind in texts and _forms(*_below(pytree.tree_leaves(state))) == texts[kind].before:
            while stop < len(kinds) and kinds[stop] == kind:
                stop += 1
            state, value = _replayed(texts[kind], state, columns, range(t, stop))
        elif allowed and kind not in texts and len(drafts[kind]) < PATIENCE and left[kind] > WORTH:
            state, value, text = _written(partial(advance, kind), state, slices[t])
            if drafts[kind] and text.repeats(drafts[kind][-1]):
                texts[kind] = text
            drafts[kind].append(text)
        else:
            state, value = advance(kind, state, slices[t])
        values.append(value.reshape(-1))
        left[kind] -= stop - t
        t = stop
    return state, torch.cat(values)


def _written(step: Callable[..., tuple[Any, Tensor]], state: Any, slices: Sequence[Tensor]) -> tuple[Any, Tensor, Text]:
    """Take a step and write it down."""
    leaves = pytree.tree_leaves(state)
    inputs, dims = _below([*leaves, *slices])
    with Writer(inputs) as writer:
        state, value = step(state, slices)
    outputs, dims_after = _below([*pytree.tree_leaves(state), value])
    text = writer.text
    text.results = tuple(writer.slot(tensor) for tensor in outputs)
    text.before, text.after = _forms(inputs, dims)[: len(leaves)], _forms(outputs, dims_after)
    return state, value, text


def _replayed(text: Text, state: Any, columns: Sequence[Tensor], steps: range) -> tuple[Any, Tensor]:
    """Take these steps as the text says; their values, (steps,)."""
    leaves, spec = pytree.tree_flatten(state)
    program = text.program()

    def work(plain: Any, dims: Any) -> Any:
        now, own = plain[: len(leaves)], plain[len(leaves) :]
        values = []
        for t in steps:
            *now, value = program(*now, *(column.select(1, t) for column in own), *text.outside.values())
            values.append(value)
        batched = values[0].dim() == 1  # a loss may be one number for all clients
        return (*now, torch.stack(values)), (*dims[: len(leaves)], 1 if batched else None)

    *after, values = Lower.apply(work, *leaves, *columns)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(after, spec), values
