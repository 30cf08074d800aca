"""Runs the training steps of a stack of clients, either directly or by replaying recorded steps.

Under `vmap` and `grad`, every operation passes two levels of dispatch, which often take longer than the operation. A
step is therefore traced once (`step_trace.py`), and its trace is rewritten (`step_rewrite.py`) into a *program*. The
program then computes all steps in which Python takes the same branches (steps of one *kind*). Later local trainings use
the program too if their loss has the same code and reads equal values (`step_source.py`).

A program's results differ from those of the direct step in the last bits. A run must give the same bits whether a
program is already stored or must first be made. The recipe alone therefore decides whether a run uses programs. Tracing
changes only a copy of the state, so the program computes all steps, even the traced one.

A program must pass three tests before it is used. Two traces of the same step must be equal. For example, a loss that
counts its calls fails this test and is computed directly. The trace must reproduce the step bit for bit. The rewritten
trace must agree with the trace in double precision (`step_check.py`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyfed.training.optimisers import WHOLE_RUN_SCHEDULES, Train
from polyfed.training.plain_tensors import below, on_plain, only_stacked
from polyfed.training.programs.check import agree, reproduces
from polyfed.training.programs.program import Program
from polyfed.training.programs.rewrite import rewrite
from polyfed.training.programs.source import Source
from polyfed.training.programs.trace import Layout, Tracer, Unrecordable

FEW = 16
"""A local training with at least this many steps uses programs from the first round on. A program costs as much as 10
to 20 direct steps and saves about a third of each step (docs/decisions/0009-replayed-steps.md), so with this many steps
it pays after two or three rounds."""

EARLIER = 40
"""A shorter local training uses programs only after the earlier rounds have had this many steps. A program saves about
a third of a step, so these rounds could have paid for a program. Short runs therefore make no program."""

MANY = 32
"""If the learning rate changes from round to round, a local training needs this many steps to use programs. The rate is
part of a program, so each round makes its own programs."""

PROGRAMS = 256
"""The largest number of sources and layouts whose programs are stored. Sources differ with the size of the stack."""

TRIES = 2
"""How often a training run asks for the program of a kind of step. The first step may change the state's layout."""

Advance = Callable[[Any, Any, Sequence[Tensor]], tuple[Any, Tensor]]
"""`advance(kind, state, slices)` -> (state, value) takes one step; `slices` are the inputs of this step."""


@dataclass(frozen=True)
class Known:
    """An entry of `_known`: a program, and what is needed to run it. It holds no parameters or data of a client.

    Attributes:
        program: the program.
        outside: an entry for each tensor that the step closes over: its index in `Source.tensors`, or the tensor itself
            if the step makes it from a Python number (0-dim).
        value_dim: position of the client axis in the value of the loss; None if all clients have the same value.
        named: the objects of `Source.named`, stored because Python may give a deleted object's `id` to a new object.
    """

    program: Program
    outside: tuple[int | Tensor, ...]
    value_dim: int | None
    named: list[Any]

    @property
    def places(self) -> list[int]:
        """Which entries of `Source.tensors` the step closes over, as indices."""
        return [place for place in self.outside if isinstance(place, int)]


_known: OrderedDict[Hashable, dict[Hashable, Known | None]] = OrderedDict()
"""For each source and layout of the state: programs by kind of step and by the tensors that a training run shares. None
stands for a step that has no program."""


def pays(train: Train, num_steps: int, number: int) -> bool:
    """Whether local training may replay its steps as programs. With few steps, a program costs more than it saves.

    The answer must not depend on which programs are known, so that a resumed run gives the same bits.

    Args:
        train: the options of the local training. If its learning rate changes from round to round, programs need more
            steps. A trace does not record the decisions of autocast, so bfloat16 has no programs.
        num_steps: number of steps of the local training run.
        number: the round, from 1.
    """
    if train.precision != "float32":
        return False
    if train.lr_schedule in WHOLE_RUN_SCHEDULES:
        return num_steps >= MANY
    return num_steps >= FEW or num_steps * (number - 1) >= EARLIER


def run(
    advance: Advance,
    state: Any,
    columns: Sequence[Tensor],
    kinds: Sequence[Hashable],
    *,
    source: Source | None,
) -> tuple[Any, Tensor]:
    """Take all steps of a stack's training.

    Args:
        advance: takes one step.
        state: nested structure of tensors before the first step.
        columns: inputs of the steps, tensors (T, ...).
        kinds: the kind of each step. Steps are of the same kind if Python takes the same branches in them.
        source: the values that a step reads. They identify its program. If None, no step uses a program. No step uses a
            program inside another transform than the `vmap` of the stack either.

    Returns:
        The state after the last step, and the value of the loss in each step, (T,).
    """
    usable = kinds and _plain(state) and only_stacked()
    replay = Replay(columns, source, state) if source is not None and usable else None
    slices = cache(lambda: list(zip(*(column.unbind() for column in columns), strict=True)))  # for direct steps
    values, t, tried = [columns[0].new_zeros(0, dtype=torch.float32)], 0, Counter[Hashable]()
    while t < len(kinds):
        known = []
        if replay is not None and tried[kinds[t]] < TRIES:
            replay.look(state)
            if replay.lacks(kinds[t]):
                # twice: if the traces differ, the step reads more than its inputs, and no program can repeat it
                takes = [Recording(state, slices()[t]) for _ in range(2)]
                with suppress(Unrecordable):
                    for take in takes:
                        with take.tracer:  # here, because a user who debugs a loss then sees a short stack
                            out = advance(kinds[t], take.state, slices()[t])
                        take.end(*out)
                replay.learn(kinds[t], *takes)
            known = replay.programs(kinds[t:])
        if replay is not None and known:
            state, value = replay.steps(known, state, t)
        else:
            tried[kinds[t]] += 1
            state, value = advance(kinds[t], state, slices()[t])
        values.append(value.reshape(-1))
        t += max(len(known), 1)
    return state, torch.cat(values)


class Replay:
    """Finds the programs of one local training, makes those that are missing, and runs them.

    Args:
        columns: inputs of the steps, tensors (T, ...).
        source: what a step reads.
        state: the state before the first step.
    """

    def __init__(self, columns: Sequence[Tensor], source: Source, state: Any) -> None:
        self._columns, self._source = columns, source
        plain, dims = below([*columns, *source.tensors, *pytree.tree_leaves(state)])
        own, end = len(columns), len(columns) + len(source.tensors)
        inputs = [(c.dtype, c.shape[:1] + c.shape[2:], dim) for c, dim in zip(plain[:own], dims[:own], strict=True)]
        self._tensors = plain[own:end]
        self._key = (*source.parts, *inputs, *_layout(self._tensors, dims[own:end]))
        first = {id(tensor): place for place, tensor in reversed(list(enumerate(self._tensors)))}
        self._same = tuple(first[id(tensor)] for tensor in self._tensors)
        self._find(state, _layout(plain[end:], dims[end:]))

    def look(self, state: Any) -> None:
        """Look up the programs for this layout of the state."""
        if state is not self._state:
            self._find(state, _layout(*below(pytree.tree_leaves(state))))

    def _find(self, state: Any, layout: Layout) -> None:
        self._state = state
        key = self._key, layout, pytree.tree_structure(state)
        self._here: dict[Hashable, Known | None] = _known.setdefault(key, {})
        _known.move_to_end(key)
        if len(_known) > PROGRAMS:
            _known.popitem(last=False)

    def lacks(self, kind: Hashable) -> bool:
        """Whether this kind of step must still be traced, because nothing is stored about it."""
        return self._name(kind) not in self._here

    def learn(self, kind: Hashable, first: "Recording", second: "Recording") -> None:
        """Make the program of a step from two recordings, and store it; or store that the step has no program."""
        made = self._made(first, second) if first.ended and second.ended else None
        self._here[kind, self._same if self._shares(made) else None] = made

    def programs(self, kinds: Sequence[Hashable]) -> list[Known]:
        """Return the programs of the next steps, as many as are known."""
        result: list[Known] = []
        for kind in kinds:
            one = self._here.get(self._name(kind))
            if one is None or (result and one.value_dim != result[0].value_dim):
                break
            result.append(one)
        return result

    def _shares(self, made: Known | None) -> bool:
        """Whether a tensor that a program reads occurs several times in `Source.tensors`.

        For example, the initial model and the server's model are the same tensors in round 1. Another training run can
        use the program only if its own `Source.tensors` has repeated tensors at the same positions.
        """
        return made is not None and any(self._same.count(place) > 1 for place in made.places)

    def _name(self, kind: Hashable) -> Hashable:
        """Return the key under which `_here` stores this kind of step for this local training."""
        general = self._here.get((kind, None))
        places = [] if general is None else [self._same[place] for place in general.places]
        # if two of the places hold the same tensor in a training run, the trace of this run is a different one
        usable = (kind, None) in self._here and len(set(places)) == len(places)
        return kind, None if usable else self._same

    def _made(self, first: "Recording", second: "Recording") -> Known | None:
        """Return the program of a step; None if the step has none."""
        trace, places = first.tracer.trace, {id(self._tensors[place]): place for place in set(self._same)}
        found = [places.get(id(tensor), _number(tensor)) for tensor in trace.outside.values()]
        bound = [place for place in found if place is not None]
        if len(bound) < len(found) or not trace.repeatable or not trace.repeats(second.tracer.trace):
            return None
        inputs, outside = first.inputs, list(trace.outside.values())
        recorded, graph = trace.graph(), trace.graph()
        if not reproduces(recorded, inputs, outside, first.outputs):
            return None
        closed = [node for node in graph.nodes if node.op == "placeholder"][len(inputs) :]
        classes = None if self._source.classes is None else self._same[self._source.classes]
        labels = [
            node for node, place in zip(closed, bound, strict=True) if isinstance(place, int) and place == classes
        ]
        rewrite(graph, labels)
        if not agree(recorded, graph, inputs, outside):
            return None
        program, (*_, value_dim) = Program(graph, len(trace.before), len(self._columns)), trace.after[-1]
        return Known(program, tuple(bound), value_dim, self._source.named)

    def steps(self, known: Sequence[Known], state: Any, start: int) -> tuple[Any, Tensor]:
        """Compute one step with each of these programs, from step `start` on. Return state and losses, (steps,)."""
        leaves, spec = pytree.tree_flatten(state)

        def work(plain: Any, dims: Any) -> Any:
            now, own, t, values = list(plain[: len(leaves)]), plain[len(leaves) :], start, list[Tensor]()
            for _, group in groupby(known, key=id):
                one, *more = group
                stop = t + 1 + len(more)
                outside = [self._tensors[p] if isinstance(p, int) else p for p in one.outside]
                now, found = one.program(now, own, range(t, stop), outside)
                values, t = [*values, *found], stop
            return (*now, torch.stack(values)), (*dims[: len(leaves)], None if known[0].value_dim is None else 1)

        *after, values = on_plain(work, *leaves, *self._columns)
        return pytree.tree_unflatten(after, spec), values


class Recording:
    """Records one training step. The step runs on a copy of the state, inside `with recording.tracer`.

    Args:
        state: the state before the step; it does not change.
        slices: the inputs of the step.

    Attributes:
        state: the copy.
        tracer: records the step.
        inputs: the tensors of `state` and `slices`, without the batching of `vmap`.
        outputs: the results of the step, without the batching of `vmap`: the new state's tensors and the loss.
        ended: whether the step ended without an exception, with a state that consists of tensors only.
    """

    def __init__(self, state: Any, slices: Sequence[Tensor]) -> None:
        leaves, spec = pytree.tree_flatten(state)
        copies = [leaf.clone() for leaf in leaves]
        self.inputs, _ = below([*leaves, *slices])
        plain, dims = below([*copies, *slices])
        self.state, self.tracer = pytree.tree_unflatten(copies, spec), Tracer(plain)
        self.tracer.trace.before = _layout(plain, dims)[: len(leaves)]
        self.outputs: Sequence[Tensor] = []
        self.ended = False

    def end(self, state: Any, value: Tensor) -> None:
        """Note the results of the step."""
        if not _plain(state):
            return
        self.outputs, dims = below([*pytree.tree_leaves(state), value])
        trace = self.tracer.trace
        trace.results = tuple(self.tracer.slot(tensor) for tensor in self.outputs)
        trace.after, self.ended = _layout(self.outputs, dims), True


def _number(tensor: Tensor) -> Tensor | None:
    """Return the tensor if the step made it from a Python number, as `torch.tensor(7.0)` does; otherwise None."""
    return tensor if not tensor.dim() and tensor.device.type == "cpu" else None


def _plain(state: Any) -> bool:
    """Whether a training state holds only tensors. A method may have put other objects into the state's carry."""
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(state))


def _layout(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Layout:
    return tuple((t.dtype, t.shape, t.stride(), dim) for t, dim in zip(tensors, dims, strict=True))
