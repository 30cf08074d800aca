"""Steps of a stack's local training: taken, or, where that is sooner, written down and replayed.

Under `vmap` and `grad` every operation is handed through two levels of dispatch, which takes longer than the operation
itself where models are small. So a step of a long training is written down (`view.text`), and once two steps in a row
have read the same, that text is replayed: in this training and, when its first step reads the same again, in the next.

Only what no step can change is kept: operations, numbers, shapes. Tensors that the loss closes over are those of the
step that was written down. A loss that is not a function of its batch alone (a counter, a list of masks) does not read
the same twice and is never replayed. Both ways give the same bits, so the choice may follow the clock.
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

from polyfed.view.text import Forms, Program, Text, Writer

TRIAL = 8
"""Steps that must be left over for a first trial; afterwards what was measured decides."""

MARGIN = 2
"""How many times over the time that writing down costs must be won back: times of a busy machine scatter."""

PATIENCE = 3
"""How often a step is written down in vain: in one training, and by one author in a row."""

PROGRAMS = 16
"""Texts of an author that are remembered: stacks of other sizes and other steps of a schedule read differently."""

Advance = Callable[[Any, Any, Sequence[Tensor]], tuple[Any, Tensor]]
"""`advance(kind, state, slices)` -> (state, value): one step; `slices` are what is its own."""


@dataclass
class Habit:
    """What is known of one kind of step of one author.

    Attributes:
        plain: seconds of a step as it is, the quickest seen.
        written: seconds of a step that is written down.
        replayed: seconds of a step that is replayed.
        vain: how often in a row it was written down and did not read as the step before.
        programs: of texts that were read twice, by their words; they hold no tensors.
    """

    plain: float = inf
    written: float = inf
    replayed: float = inf
    vain: int = 0
    programs: dict[Hashable, Program] = field(default_factory=dict)

    def pays(self, left: int) -> bool:
        """Whether to write a step down when, itself included, `left` of its kind are to come."""
        if self.vain >= PATIENCE or self.plain == inf:
            return False
        if self.replayed == inf:
            return left > TRIAL
        return (left - 1) * (self.plain - self.replayed) > MARGIN * (self.written - self.plain)

    def program(self, text: Text, draft: Text | None) -> Program | None:
        """The program of a text that may be replayed: read twice, now or before."""
        words = text.words()
        if words not in self.programs:
            if draft is None:
                return None
            if not (text.goes_on and text.repeats(draft)):
                self.vain += 1
                return None
            if len(self.programs) >= PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[words] = text.program()
        self.vain = 0
        return self.programs[words]


@lru_cache(maxsize=1024)
def _habit(author: Hashable, kind: Hashable) -> Habit:
    return Habit()


class Known(NamedTuple):
    """A text to be replayed, and its program."""

    text: Text
    program: Program


def run(
    advance: Advance, state: Any, columns: Sequence[Tensor], kinds: Sequence[Hashable], *, author: Hashable
) -> tuple[Any, Tensor]:
    """All steps of a stack's training.

    Args:
        advance: one step.
        state: nest of tensors before the first step.
        columns: what belongs to each step, (T, ...) each.
        kinds: per step, what decides in Python what the step does; steps of one kind do the same.
        author: the code behind the step and the size of the stack; None forbids to replay.

    Returns:
        The state after the last step, and the value of each step, (T,).
    """
    slices = list(zip(*(column.unbind() for column in columns), strict=True))
    left, tries, drafts = Counter(kinds), Counter[Hashable](), dict[Hashable, Text]()
    habits = {kind: _habit(author, kind) for kind in left}  # once: the hash of code is that of all its bytes
    known: dict[Hashable, Known] = {}
    values, t = [columns[0].new_zeros(0, dtype=torch.float32)], 0
    while t < len(kinds):
        kind, stop, started = kinds[t], t + 1, perf_counter()
        habit = habits[kind]
        if kind in known and _fits(known[kind].text, state):
            while (
                stop < len(kinds) and kinds[stop] in known and known[kinds[stop]].text.after == known[kind].text.after
            ):
                stop += 1
            state, value = _replayed([known[kind] for kind in kinds[t:stop]], state, columns, t)
            habit.replayed = min(habit.replayed, (perf_counter() - started) / (stop - t))
        elif author is not None and kind not in known and tries[kind] < PATIENCE and habit.pays(left[kind]):
            state, value, text = _written(partial(advance, kind), state, slices[t])
            habit.written = min(habit.written, perf_counter() - started)
            if (program := habit.program(text, drafts.get(kind))) is not None:
                known[kind] = Known(text, program)
            drafts[kind], tries[kind] = text, tries[kind] + 1
        else:
            state, value = advance(kind, state, slices[t])
            habit.plain = min(habit.plain, perf_counter() - started)
        values.append(value.reshape(-1))
        left.subtract(kinds[t:stop])
        t = stop
    return state, torch.cat(values)


def _fits(text: Text, state: Any) -> bool:
    return _forms(*_below(pytree.tree_leaves(state))) == text.before


def _forms(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Forms:
    return tuple((t.dtype, t.shape, t.stride(), dim) for t, dim in zip(tensors, dims, strict=True))


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


def _replayed(steps: Sequence[Known], state: Any, columns: Sequence[Tensor], start: int) -> tuple[Any, Tensor]:
    """Take these steps, the first of them number `start`, as their texts say; their values, (steps,)."""
    leaves, spec = pytree.tree_flatten(state)

    def work(plain: Any, dims: Any) -> Any:
        assert not any(dims[len(leaves) :]), "a column has the client axis first"
        now, own = plain[: len(leaves)], plain[len(leaves) :]
        values = []
        for t, (text, program) in enumerate(steps, start):
            *now, value = program(*now, *(column.select(1, t) for column in own), *text.outside.values())
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
