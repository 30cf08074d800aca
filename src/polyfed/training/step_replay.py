"""Runs the training steps of a stack, either directly, or traced once and then replayed, whichever is faster.

Under `vmap` and `grad`, every operation passes two levels of dispatch. For small models, the dispatch takes longer than
the operation itself. The steps of a long training are therefore traced (`step_trace.py`). If two consecutive steps have
the same trace, the following steps replay it. The next training also replays it, if its first traced step has the same
trace.

A trace holds operations, constants and shapes, but no tensor that a step could change. Tensors that the loss closes
over are those of the traced step. A loss that depends on more than its batch (a counter, a list of masks) has a
different trace in each step, so it is never replayed. Before a program replaces any step, it must reproduce the traced
step bit for bit. Both ways give the same bits, so the choice may depend on measured times.
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
"""Tracing is tried for the first time if more than this number of steps remain. Later, measured times decide."""

MARGIN = 2
"""The factor by which the saved time must exceed the cost of tracing, because measured times vary."""

PATIENCE = 3
"""Number of useless traces after which tracing stops: within one training, and consecutively for one source."""

PROGRAMS = 16
"""The largest number of stored programs for one source. Traces differ with stack size and step of a schedule."""

Advance = Callable[[Any, Any, Sequence[Tensor]], tuple[Any, Tensor]]
"""`advance(kind, state, slices)` -> (state, value) takes one step; `slices` are the inputs of this step."""


@dataclass
class Profile:
    """Measurements and programs for one kind of step of one source.

    Attributes:
        plain: shortest time of a step that runs directly, in seconds.
        traced: shortest time of a step that is traced.
        replayed: shortest time of a step that is replayed.
        misses: number of useless traces in a row.
        programs: programs of traces that occurred twice, by signature; they hold no tensors.
    """

    plain: float = inf
    traced: float = inf
    replayed: float = inf
    misses: int = 0
    programs: dict[Hashable, Program] = field(default_factory=dict)

    def pays(self, left: int) -> bool:
        """Whether tracing a step saves time if `left` steps of its kind remain, including this one."""
        if self.misses >= PATIENCE or self.plain == inf:
            return False
        if self.replayed == inf:
            return left > TRIAL
        return (left - 1) * (self.plain - self.replayed) > MARGIN * (self.traced - self.plain)

    def program(self, step: "Step", before: Trace | None) -> Program | None:
        """Return the program that may replay this step; None if its trace occurred only once or cannot be repeated.

        Args:
            step: the step that was just traced.
            before: trace of the step before it.
        """
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
    """A step that was taken and traced. The trace has no layouts if the state contains anything other than tensors.

    Attributes:
        state: state after the step.
        value: value of the loss.
        trace: the operations of the step.
        inputs: copies of the step's plain input tensors, or empty if none were made.
        outputs: plain output tensors of the step.
    """

    state: Any
    value: Tensor
    trace: Trace
    inputs: list[Tensor]
    outputs: Sequence[Tensor]

    def program(self) -> Program | None:
        """Return the program of the step's trace; None if the program does not reproduce the step bit for bit."""
        program = self.trace.program()
        again = program(*self.inputs, *self.trace.outside.values())
        return program if all(map(_same_bits, again, self.outputs)) else None


class Known(NamedTuple):
    """A trace that may be replayed, and its program."""

    trace: Trace
    program: Program


def run(
    advance: Advance, state: Any, columns: Sequence[Tensor], kinds: Sequence[Hashable], *, source: Hashable
) -> tuple[Any, Tensor]:
    """Take all steps of a stack's training.

    Args:
        advance: takes one step.
        state: nest of tensors before the first step.
        columns: inputs of the steps, tensors (T, ...).
        kinds: kind of each step; Python takes the same branches in all steps of one kind.
        source: the code of the step and the size of the stack; None forbids replaying steps.

    Returns:
        The state after the last step, and the value of the loss in each step, (T,).
    """
    if not _plain(state):
        source = None
    slices = list(zip(*(column.unbind() for column in columns), strict=True))
    left, tries, earlier = Counter(kinds), Counter[Hashable](), dict[Hashable, Trace]()
    profiles = {kind: _profile(source, kind) for kind in left}  # looked up once, because hashing code objects is slow
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
    """Whether a state consists of tensors only; the carry of a method may hold anything."""
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(state))


def _fits(trace: Trace, state: Any) -> bool:
    return _layout(*_below(pytree.tree_leaves(state))) == trace.before


def _layout(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Layout:
    return tuple((t.dtype, t.shape, t.stride(), dim) for t, dim in zip(tensors, dims, strict=True))


def _traced(advance: Callable[..., tuple[Any, Tensor]], state: Any, slices: Sequence[Tensor], *, copies: bool) -> Step:
    """Take a step and trace it. With `copies`, copy its inputs first, because steps work in place."""
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
    """Replay these steps, starting with number `start`. Return the state and the values of the steps, (steps,)."""
    leaves, spec = pytree.tree_flatten(state)

    def work(plain: Any, dims: Any) -> Any:
        assert not any(dims[len(leaves) :]), "a column has the client axis first"
        now, own = plain[: len(leaves)], plain[len(leaves) :]
        values = []
        for t, (trace, program) in enumerate(steps, start):
            *now, value = program(*now, *(column.select(1, t) for column in own), *trace.outside.values())
            values.append(value)
        batched = values[0].dim() == 1  # False if the loss is one number for all clients
        return (*now, torch.stack(values)), (*dims[: len(leaves)], 1 if batched else None)

    *after, values = Lower.apply(work, *leaves, *columns)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(after, spec), values


class Lower(torch.autograd.Function):
    """Calls `work(tensors, dims)` below `vmap`, with the plain tensors and the position of each one's client axis.

    `work` returns tensors and the positions of their client axes, like every batching rule of `vmap`.
    """

    @staticmethod
    def forward(work: Any, *tensors: Tensor) -> Any:
        """Never called: steps of a stack are always taken under `vmap`."""
        raise AssertionError("a stack's steps are taken under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because no gradient flows through a local training."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Any, *tensors: Tensor) -> Any:
        """Call `work` with the plain tensors."""
        return work(tensors, in_dims[1:])


def _below(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Return the plain tensors of these batched tensors, and the position of each one's client axis."""
    found: list[Any] = []

    def work(plain: Any, dims: Any) -> Any:
        found.extend((plain, dims))
        return plain[0].new_zeros(()), None

    Lower.apply(work, *tensors)  # type: ignore[no-untyped-call]
    return found[0], found[1]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
