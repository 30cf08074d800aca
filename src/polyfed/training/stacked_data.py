"""The datasets of many similar clients. A client task runs once for all of them under `torch.func.vmap`.

Shape letters: `K` clients of the stack, `T` steps, `B` rows of a batch, `N` rows of the client with the most rows.

Inside the task, `vmap` hides the client axis, so tensors look as if there were one client. Data of the whole stack
(positions of rows, step plans, keys) stays outside of `vmap`, in tensors with a leading axis K. The task selects a
client's part of this data with `lane`, the client's position in the stack. Only `lane`, messages and local state pass
through `vmap`. Clients with fewer rows are padded: padded rows have `ok = False`, and a client that has no steps left
keeps its values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.data import Columns
from polyfed.model import Model
from polyfed.training.client_data import (
    DROPOUT,
    FOLD_BATCH,
    ClientData,
    Job,
    Loss,
    Step,
    TrainingResult,
    stream_key,
    summed,
)
from polyfed.training.gradients import accumulating, gradient_of
from polyfed.training.modality_dropout import with_dropout
from polyfed.training.optimisers import Train
from polyfed.training.per_sample import PerSample, refuse_reading
from polyfed.training.plain_tensors import apart_from, snapshot
from polyfed.training.programs import replay
from polyfed.training.programs.source import Source, Unreadable
from polyfed.training.step_plan import Plan, Rows, make_plan

Kind = tuple[bool, bool]
"""The two facts on which Python branches in a step: whether no row is padding, and whether every client trains."""

WHOLE: Kind = (True, True)


@dataclass(frozen=True)
class Schedule:
    """The steps of one call of `minimise`.

    Attributes:
        kinds: the kind of each step.
        columns: the inputs of the steps, tensors (T, ...). For a single step on a given batch, they have no axis T.
        count: total number of steps that the client has taken at the end of the call, a 0-dim tensor.
        batch: `batch(full, *inputs)` makes the batch of a step. `full` is True if the batch has no padding. `inputs`
            are all inputs of the step except the last two.
    """

    kinds: list[Kind]
    columns: tuple[Tensor, ...]
    count: Tensor
    batch: Callable[..., Batch]


@dataclass
class StackedClientData(ClientData):
    """The datasets of a stack of clients, as a task sees them inside `vmap`.

    Attributes:
        columns: the table.
        stack: the rows of each client.
        keys: random key of (run, round, client) of each client.
        lane: the client's position in the stack, a 0-dim tensor inside `vmap`.
        modalities: the modalities that these clients own; their batches hold no others.
        model: the clients' model.
        round: the round, from 1.
        rounds: number of rounds of the run.
        test_stack: the test rows of each client.
        chosen: the positions of the rows that `at` selected, among the client's own rows, (n,).
        replays: whether training steps may be recorded and replayed as programs; see `programs/replay.py`.
        privacy: how training protects single rows; None for no protection.
    """

    columns: Columns
    stack: Rows
    keys: tuple[int, ...]
    lane: Tensor
    modalities: tuple[str, ...]
    model: Model
    round: int
    rounds: int
    test_stack: Rows | None = None
    chosen: Tensor | None = None
    replays: bool = True
    privacy: PerSample | None = None

    def __post_init__(self) -> None:
        """Select the number of rows and the random key of this client from the values of all clients in the stack."""
        device = self.stack.index.device
        counts = self.stack.counts if self.chosen is None else (len(self.chosen),) * len(self.keys)
        self._sizes = Rows(self.stack.index, counts)
        self.num_rows = torch.tensor(counts, device=device)[self.lane]
        self.key = torch.tensor(self.keys, dtype=torch.int32, device=device)[self.lane]

    @override
    def at(self, rows: Tensor) -> "StackedClientData":
        return replace(self, test_stack=None, chosen=rows if self.chosen is None else self.chosen[rows])

    @property
    @override
    def ids(self) -> Tensor:
        rows = torch.arange(max(self._sizes.counts), device=self.lane.device)
        return self.columns.ids.to(self.lane.device)[self._places(rows)]

    @property
    @override
    def test(self) -> "StackedClientData":
        stack = self.test_stack or Rows(self.stack.index[:, :0], (0,) * len(self.keys))
        return replace(self, stack=stack, test_stack=None, chosen=None)

    @override
    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        job = Job(loss=loss, params=params, **options)
        train, model, after = job.train, job.model or self.model, job.after
        names = job.trained(model)
        w = {name: self._own(value) for name, value in job.params.items()}
        moments = train.moments({name: w[name] for name in names}) if after is None else snapshot(after.moments)
        state = (w, moments, snapshot(dict(job.carry or {})))  # no two tensors of the state share memory
        schedule = self._schedule(job, model)
        gradient = self._gradient_of(job, model)
        lr = train.lr_at(self.round, self.rounds)
        step = _step_of(job, gradient, names, lr, schedule.batch)
        with model.computing(train.precision):
            if job.on is None:
                source = self._source(job, model, names, lr, len(schedule.kinds))
                columns, kinds = schedule.columns, schedule.kinds
                state, values = replay.run(step, state, columns, kinds, source=source)
            else:
                state, value = step(WHOLE, state, schedule.columns)
                values = value.reshape(1)
        w, moments, kept = state
        earlier = torch.zeros((), device=self.lane.device) if after is None else after.loss * after.num_steps
        mean = torch.cat([earlier.reshape(1), values]).sum() / schedule.count.clamp(min=1)
        return TrainingResult(w, mean, schedule.count, kept, moments, (after.num_epochs if after else 0) + train.epochs)

    def _gradient_of(self, job: Job, model: Model) -> Callable[..., Any]:
        """Make `f(trained, rest, batch)` -> (gradient, (value, aux, buffers)) for the training steps."""
        if self.privacy is not None:
            privacy, n = self.privacy, self.num_rows
            privacy.refuse(job)
            size = n.clamp(max=job.train.batch_size) if job.train.batch_size else n

            def protected(trained: Tree, rest: Tree, batch: Batch) -> tuple[Tree, tuple[Any, Any, Tree]]:
                grads, value = privacy.gradient(job.loss, trained, rest, batch, size)
                return grads, (value, {}, {})

            return protected
        gradient = gradient_of(job.loss, model, job.split)
        return accumulating(gradient, job.train) if job.train.accumulate > 1 else gradient

    def _schedule(self, job: Job, model: Model) -> "Schedule":
        """Return the steps of a call of `minimise`, or a single step if `on` gives a batch."""
        after, train = job.after, job.train
        done = 0 if after is None else after.num_steps
        if job.on is not None:
            given, count = job.on, torch.ones_like(self.num_rows) + done
            return Schedule([WHOLE], (torch.ones_like(count, dtype=torch.bool), count), count, lambda *_: given)
        plan = make_plan(
            self.keys,
            self._sizes,
            train,
            skip_single=model.has_batchnorm,
            stream=job.stream,
            first_epoch=after.num_epochs if after else 0,
        )
        count = plan.count[self.lane] + done
        kinds = list(zip(plan.full, plan.live, strict=True))
        return Schedule(kinds, self._steps(plan, done, job.stream), count, partial(self._step_batch, train))

    def _step_batch(
        self, train: Train, full: bool, rows_B: Tensor, where_B: Tensor, ok_B: Tensor, key: Tensor
    ) -> Batch:
        return with_dropout(self._batch(rows_B, where_B, None if full else ok_B, key), train)

    def _source(self, job: Job, model: Model, names: list[str], lr: float, num_steps: int) -> Source | None:
        """Return what the training steps read, or None if the steps are not replayed as a recorded `Program`.

        Whether the result is None depends only on the recipe.
        """
        # a trace does not record the `vmap` inside of a step that protects single rows
        if not self.replays or self.privacy is not None or not replay.pays(job.train, num_steps, self.round):
            return None
        label, columns = self.columns.label, [self.columns.modalities[m] for m in self.modalities]
        present = {m: self.columns.present[m] for m in self.modalities if m in self.columns.present}
        table = columns, label, present, self.modalities
        try:
            return Source(
                (job.loss, job.direction, job.train, job.split, lr, names, model, self.model, len(self.keys)),
                table,
                classes=None if label.is_floating_point() else label,
            )
        except Unreadable:
            return None

    @override
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        refuse_reading(self.privacy)
        skip = (model or self.model).has_batchnorm
        plan = make_plan(self.keys, self._sizes, train, skip_single=skip, stream=stream)
        hit = (plan.number[self.lane] == number) & plan.ok[self.lane].any(-1)
        slot = hit.to(torch.int8).argmax().unsqueeze(0)
        rows, ok = plan.rows[self.lane, slot].squeeze(0), plan.ok[self.lane, slot].squeeze(0)
        dropout_key = stream_key(self.key, DROPOUT, stream)
        return with_dropout(self._batch(rows, self._places(rows), ok, keys.fold_in(dropout_key, number - 1)), train)

    def _steps(self, plan: Plan, done: Tensor | int, stream: int) -> tuple[Tensor, ...]:
        """Return the inputs of all steps, tensors (T, ...).

        Four inputs define the batch of a step. They are the positions of the rows among the client's own rows, the
        positions of the same rows in the table, a mask of the rows that are not padding, and the dropout key. A fifth
        input says whether the client takes the step at all. The sixth input is the step's number.
        """
        # computed for all steps at once, and outside of vmap, because every operation under vmap takes at least 10 us
        rows, ok, alive, number = (value[self.lane] for value in (plan.rows, plan.ok, plan.alive, plan.number))
        if isinstance(done, Tensor):
            number = number + done
            key = keys.fold_in(stream_key(self.key, DROPOUT, stream), number - 1)
            assert isinstance(key, Tensor)
        else:
            key = plan.key[self.lane]
        return rows, self._places(rows), ok, key, alive, number

    @override
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        refuse_reading(self.privacy)
        shortest, longest = min(self._sizes.counts), max(self._sizes.counts)
        for start in range(0, longest, batch_size):
            end = min(start + batch_size, longest)
            rows = torch.arange(start, end, device=self.lane.device)
            ok = None if end <= shortest else rows < self.num_rows
            after = step(carry, self._batch(rows, self._places(rows), ok, None))
            carry = after if start < shortest else _where_alike(start < self.num_rows, after, carry)
        return carry

    def _own(self, value: Tensor) -> Tensor:
        """Return a copy of `value` that has a client axis, because in-place optimiser steps need this axis.

        `value` itself has no client axis if all clients share it.
        """
        return self.lane.new_empty(value.shape, dtype=value.dtype).copy_(value)

    def _places(self, rows: Tensor) -> Tensor:
        """Convert positions among the client's own rows to positions in the table."""
        return self.stack.index[self.lane, rows if self.chosen is None else self.chosen[rows]]

    def _batch(self, rows: Tensor, where: Tensor, ok: Tensor | None, key: int | Tensor | None) -> Batch:
        columns = self.columns
        return Batch(
            x={m: columns.modalities[m].take(where) for m in self.modalities},
            y=columns.label[where],
            rows=rows,
            ok=ok,
            present={m: columns.present[m][where] for m in self.modalities if m in columns.present},
            key=key,
        )


def _step_of(
    job: Job, gradient: Callable[..., Any], names: Sequence[str], lr: float, batch_of: Callable[..., Batch]
) -> Callable[[Kind, Any, Sequence[Tensor]], tuple[Any, Tensor]]:
    """Make the function `step(kind, state, inputs)` -> (state, loss) that takes one training step.

    The state is (params, moments, carry). A client that has no steps left keeps its state.
    """
    train, direction = job.train, job.direction

    def step(kind: Kind, state: Any, own: Sequence[Tensor]) -> tuple[Any, Tensor]:
        (full, everybody), (*drawn, alive, number) = kind, own
        before = None if everybody else snapshot(state)
        w, moments, kept = state
        trained = {name: w[name] for name in names}
        rest = {name: value for name, value in w.items() if name not in trained}
        grads, (value, aux, buffers) = gradient(trained, rest, batch_of(full, *drawn))
        w.update(buffers)
        if job.split:
            value = torch.stack(list(value.values())).sum()
        if direction is not None:
            grads, kept = direction(grads, w, aux, kept)
            kept = apart_from(kept, w.values())  # the optimiser changes the tensors of `w` in place
        elif job.split:
            grads = summed(grads)
        train.step(w, grads, moments, lr, number)
        after = (w, moments, kept)
        if before is None:
            return after, value
        return _unless_done(alive, after, before), torch.where(alive, value, 0.0)

    return step


def _unless_done(alive: Tensor, new: Any, old: Any) -> Any:
    return pytree.tree_map(lambda a, b: torch.where(alive, a, b), new, old)


def _where_alike(alive: Tensor, new: Any, old: Any) -> Any:
    """Return the carry after a step: `old` for clients that had no rows left, and `new` for the others.

    If the step has changed the structure or a shape of the carry, return `new` for all clients.
    """
    (after, spec), (before, spec_before) = pytree.tree_flatten(new), pytree.tree_flatten(old)
    if spec != spec_before or not all(isinstance(leaf, Tensor) for leaf in (*after, *before)):
        return new
    return _unless_done(alive, new, old) if [a.shape for a in after] == [b.shape for b in before] else new
