"""Steps of a stack's local training: taken, or, where that is sooner, traced and replayed.

Under `vmap` and `grad` every operation is handed through two levels of dispatch, which takes longer than the operation
itself where models are small. So a step of a long training is traced (`view.trace`), and once two steps in a row have
left the same trace, it is replayed: in this training and, when its first traced step is the same again, in the next.

Only what no step can change is kept: operations, numbers, shapes. Tensors that the loss closes over are those of the
step that was traced. A loss that is not a function of its batch alone (a counter, a list of masks) leaves another trace
each time and is never replayed. A program must also have given the bits of the very step it was made from before it
takes another's place. Both ways give the same bits, so the choice may follow the clock.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyfed.training.step_trace import Layout, Program, Trace, Tracer

TRIAL = 8
"""Steps that must be left over for a first trial; afterwards what was measured decides."""

MARGIN = 2
"""How many times over the time that tracing costs must be won back: times of a busy machine scatter."""

PATIENCE = 3
"""How often a step is traced without use: in one training, and of one source in a row."""

PROGRAMS = 16
"""Programs of a source that are kept: stacks of other sizes and other steps of a schedule leave other traces."""

Advance = Callable[[Any, Any, Sequence[Tensor]], tuple[Any, Tensor]]
"""`advance(kind, state, slices)` -> (state, value): one step; `slices` are what is its own."""


@dataclass
class Profile:
    """What is known of one kind of step of one source.

    Attributes:
        plain: seconds of a step as it is, the quickest seen.
        traced: seconds of a step that is traced.
        replayed: seconds of a step that is replayed.
        misses: how often in a row it was traced without use.
        programs: of traces that were seen twice, by their signature; they hold no tensors.
    """

    plain: float = inf
    traced: float = inf
    replayed: float = inf
    misses: int = 0
    programs: dict[Hashable, Program] = field(default_factory=dict)

    def pays(self, left: int) -> bool:
        """Whether to trace a step when, itself included, `left` of its kind are to come."""
        if self.misses >= PATIENCE or self.plain == inf:
            return False
        if self.replayed == inf:
            return left > TRIAL
        return (left - 1) * (self.plain - self.replayed) > MARGIN * (self.traced - self.plain)

    def program(self, step: "Step", before: Trace | None) -> Program | None:
        """The program of a traced step that may take the place of others: its trace was seen twice, now or earlier."""
        signature = step.trace.signature()
        if signature not in self.programs:
            if before is None:
                return None
            program = step.program() if step.trace.repeatable and step.trace.repeats(before) else None
            if program is None:
                self.misses += 1
                return None
            if len(self.programs) >= PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[signature] = program
        self.misses = 0
        return self.programs[signature]


@lru_cache(maxsize=1024)
def _profile(source: Hashable, kind: Hashable) -> Profile:
    return Profile()


@dataclass
class Step:
    """A step that was taken and traced; without layouts where the state after it is not one of tensors.

    Attributes:
        state: after it.
        value: of the loss.
        trace: what it did.
        inputs: copies of the plain tensors that it began with, or none.
        outputs: the plain tensors that it gave.
    """

    state: Any
    value: Tensor
    trace: Trace
    inputs: list[Tensor]
    outputs: Sequence[Tensor]

    def program(self) -> Program | None:
        """Its program, if that gives the very bits that the step gave."""
        program = self.trace.program()
        again = program(*self.inputs, *self.trace.outside.values())
        return program if all(map(_same_bits, again, self.outputs)) else None


class Known(NamedTuple):
    """A trace to be replayed, and its program."""

    trace: Trace
    program: Program


def run(
    advance: Advance, state: Any, columns: Sequence[Tensor], kinds: Sequence[Hashable], *, source: Hashable
) -> tuple[Any, Tensor]:
    """All steps of a stack's training.

    Args:
        advance: one step.
        state: nest of tensors before the first step.
        columns: what belongs to each step, (T, ...) each.
        kinds: per step, what decides in Python what the step does; steps of one kind do the same.
        source: the code behind the step and the size of the stack; None forbids to replay.

    Returns:
        The state after the last step, and the value of each step, (T,).
    """
    if not _plain(state):
        source = None
    slices = list(zip(*(column.unbind() for column in columns), strict=True))
    left, tries, earlier = Counter(kinds), Counter[Hashable](), dict[Hashable, Trace]()
    profiles = {kind: _profile(source, kind) for kind in left}  # once: the hash of code is that of all its bytes
    known: dict[Hashable, Known] = {}
    values, t = [columns[0].new_zeros(0, dtype=torch.float32)], 0
    while t < len(kinds):
        kind, stop, started = kinds[t], t + 1, perf_counter()
        profile = profiles[kind]
        if kind in known and _fits(known[kind].trace, state):
            while (
                stop < len(kinds) and kinds[stop] in known and known[kinds[stop]].trace.after == known[kind].trace.after
            ):
                stop += 1
            state, value = _replayed([known[kind] for kind in kinds[t:stop]], state, columns, t)
            profile.replayed = min(profile.replayed, (perf_counter() - started) / (stop - t))
        elif source is not None and kind not in known and tries[kind] < PATIENCE and profile.pays(left[kind]):
            step = _traced(partial(advance, kind), state, slices[t], copies=kind in earlier)
            state, value = step.state, step.value
            profile.traced = min(profile.traced, perf_counter() - started)
            if (program := profile.program(step, earlier.get(kind))) is not None:
                known[kind] = Known(step.trace, program)
            earlier[kind], tries[kind] = step.trace, tries[kind] + 1
        else:
            state, value = advance(kind, state, slices[t])
            profile.plain = min(profile.plain, perf_counter() - started)
        values.append(value.reshape(-1))
        left.subtract(kinds[t:stop])
        t = stop
    return state, torch.cat(values)


def _plain(state: Any) -> bool:
    """Whether a state holds tensors only; what a direction carries along is its author's."""
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(state))


def _fits(trace: Trace, state: Any) -> bool:
    return _layout(*_below(pytree.tree_leaves(state))) == trace.before


def _layout(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Layout:
    return tuple((t.dtype, t.shape, t.stride(), dim) for t, dim in zip(tensors, dims, strict=True))


def _traced(advance: Callable[..., tuple[Any, Tensor]], state: Any, slices: Sequence[Tensor], *, copies: bool) -> Step:
    """Take a step and trace it; steps work in place, so what it began with must be copied first."""
    leaves = pytree.tree_leaves(state)
    inputs, dims = _below([*leaves, *slices])
    began = [tensor.clone() for tensor in inputs] if copies else []
    with Tracer(inputs) as tracer:
        state, value = advance(state, slices)
    trace = tracer.trace
    if not _plain(state):
        return Step(state, value, trace, [], [])
    outputs, dims_after = _below([*pytree.tree_leaves(state), value])
    trace.results = tuple(tracer.slot(tensor) for tensor in outputs)
    trace.before, trace.after = _layout(inputs, dims)[: len(leaves)], _layout(outputs, dims_after)
    return Step(state, value, trace, began, outputs)


def _replayed(steps: Sequence[Known], state: Any, columns: Sequence[Tensor], start: int) -> tuple[Any, Tensor]:
    """Take these steps, the first of them number `start`, as their traces say; their values, (steps,)."""
    leaves, spec = pytree.tree_flatten(state)

    def work(plain: Any, dims: Any) -> Any:
        assert not any(dims[len(leaves) :]), "a column has the client axis first"
        now, own = plain[: len(leaves)], plain[len(leaves) :]
        values = []
        for t, (trace, program) in enumerate(steps, start):
            *now, value = program(*now, *(column.select(1, t) for column in own), *trace.outside.values())
            values.append(value)
        batched = values[0].dim() == 1  # a loss may be one number for all clients
        return (*now, torch.stack(values)), (*dims[: len(leaves)], 1 if batched else None)

    *after, values = Lower.apply(work, *leaves, *columns)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(after, spec), values


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


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
