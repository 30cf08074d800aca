"""The dataset of one client, for engines that train one client at a time.

Training uses plain autograd and in-place optimiser steps on the model's own tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, clone, like
from polyfed.data import Columns
from polyfed.model import Model
from polyfed.training.client_data import (
    DROPOUT,
    FOLD_BATCH,
    ORDER,
    ClientData,
    Job,
    Loss,
    Step,
    TrainingResult,
    split_loss,
    stream_key,
    summed,
)
from polyfed.training.gradients import added, parts_of, refuse_aux
from polyfed.training.modality_dropout import with_dropout
from polyfed.training.optimisers import Moments, Train
from polyfed.training.per_sample import PerSample, refuse_reading
from polyfed.training.plain_tensors import apart_from, snapshot
from polyfed.training.progress import NOT_KEPT, OneTraining, PartOfTraining, Progress
from polyfed.training.step_plan import steps_trained, usable_rows


@dataclass
class SingleClientData(ClientData):
    """The dataset of one client, which consists of some rows of a table.

    Attributes:
        columns: the table.
        index: positions of the client's rows in the table, in the client's own order, int64 (n,).
        modalities: the modalities that the client owns. The client's batches hold no other modalities.
        model: the client's model.
        key: random key of (run, round, client).
        round: the round, from 1.
        rounds: number of rounds of the run.
        test_index: positions of the client's own test rows in the table.
        privacy: how training protects single rows. None means no protection.
        smallest: least number of rows of the last batch of an epoch; a smaller batch is left out, see `usable_rows`. A
            modality or a target that fewer rows of a batch have is left out of it.
        progress: keeps the state of a training, so that it survives its process; None keeps nothing.
    """

    columns: Columns
    index: Tensor
    modalities: tuple[str, ...]
    model: Model
    key: int
    round: int
    rounds: int
    test_index: Tensor | None = None
    privacy: PerSample | None = None
    smallest: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Make `num_rows` a tensor on the device of the rows."""
        self.num_rows = torch.tensor(len(self.index), device=self.index.device)

    @override
    def at(self, rows: Tensor) -> "SingleClientData":
        return replace(self, index=self.index[rows], test_index=None)

    @property
    @override
    def ids(self) -> Tensor:
        """Return the sample ids of the client's rows, int64 (n,); see `ClientData.ids`."""
        return self.columns.ids.to(self.index.device)[self.index]

    @property
    @override
    def groups(self) -> Mapping[str, Tensor]:
        return {name: codes.to(self.index.device)[self.index] for name, codes in self.columns.groups.items()}

    @property
    @override
    def clusters(self) -> Tensor | None:
        if self.columns.client is None or not len(self.index):
            return None
        names, codes = torch.unique(self.columns.client.to(self.index.device)[self.index], return_inverse=True)
        return codes if 1 < len(names) < len(codes) else None

    @property
    @override
    def test(self) -> "SingleClientData":
        index = self.index[:0] if self.test_index is None else self.test_index
        return replace(self, index=index, test_index=None)

    @override
    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        job = Job(loss=loss, params=params, **options)
        if self.progress is None or job.on is not None or self.privacy is not None:
            return self._trained(job, NOT_KEPT)  # the noise of [privacy] comes from the system, and does not come again
        with self.progress.training() as one:
            return self._trained(job, one)

    def _trained(self, job: Job, one: OneTraining) -> TrainingResult:
        """Train; see `minimise`. A training that an earlier process has begun goes on."""
        train, model, after, direction = job.train, job.model or self.model, job.after, job.direction
        names = job.trained(model)
        # copies, because a `direction` may change them in place
        kept: Tree = snapshot(dict(job.carry)) if job.carry else {}
        lr = train.lr_at(self.round, self.rounds)
        values: list[Tensor] = []
        count, epochs = (0, 0) if after is None else (int(after.num_steps), after.num_epochs)
        # the Tree is empty if the whole encoder is frozen
        lent = model.live(job.params) if job.params else nullcontext(Tree())
        if self.privacy is not None:
            self.privacy.refuse(job)
            lent = nullcontext(clone(job.params))  # `vmap` differentiates tensors of a Tree, not those of a module
        # a `direction` runs without gradient tracking, and may call `minimise`, which needs it
        with lent as w, model.computing(train.precision), torch.enable_grad():
            leaves = {name: w[name] for name in names}
            moments = train.moments(leaves)
            if after is not None:
                moments = {kind: clone(tree) for kind, tree in after.moments.items()}
            batches = [job.on] if job.on is not None else self._batches(train, model, job.stream, epochs, count)
            if one.found is not None:
                moments, kept, values = _put_back(one.found, w)
                one.found, count = None, count + len(values)

            def part() -> PartOfTraining:
                return PartOfTraining(w, moments, kept, values)

            for batch in islice(batches, len(values), None):
                try:
                    grads, value, aux = self._gradient(job, w, leaves, self._allowed(batch))
                except Exception as error:
                    error.add_note(f"in step {count + 1} of local training, on {len(batch.rows)} rows")
                    raise
                count += 1
                with torch.no_grad():
                    if direction is not None:
                        grads, kept = direction(grads, w, aux, kept)
                        kept = apart_from(kept, w.values())  # later steps change the tensors of `w` in place
                    elif job.split:
                        grads = summed(grads)
                    train.step(w, grads, moments, lr, count)
                values.append(value.detach())
                del grads, aux  # of a large model, memory should hold one gradient, and none while `w` is copied
                one.stepped(part)
            one.ended(part)
            return TrainingResult(
                clone(w), self._mean(values, after), torch.tensor(count), kept, moments, epochs + train.epochs
            )

    def _gradient(self, job: Job, w: Tree, leaves: Tree, batch: Batch) -> tuple[Any, Tensor, Any]:
        """Return gradient, loss and aux of a batch. Under `job.split`, there is one gradient per term of the loss."""
        if self.privacy is None:
            return _step_gradient(job, w, leaves, batch)
        rest = {name: value for name, value in w.items() if name not in leaves}
        size = min(job.train.batch_size or len(self.index), len(self.index))
        return *self.privacy.gradient(job.loss, leaves, rest, batch, size), {}

    def _mean(self, values: list[Tensor], after: TrainingResult | None) -> Tensor:
        """Return the mean loss of all steps, including the steps of the training run that this run continues."""
        mean = torch.stack(values).mean() if values else torch.zeros((), device=self.index.device)
        if after is None:
            return mean
        steps = int(after.num_steps)
        return (after.loss * steps + mean * len(values)) / max(steps + len(values), 1)

    @override
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        refuse_reading(self.privacy)
        with torch.no_grad():
            for start in range(0, len(self.index), batch_size):
                rows = torch.arange(start, min(start + batch_size, len(self.index)), device=self.index.device)
                carry = step(carry, self._gather(rows))
        return carry

    @override
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        refuse_reading(self.privacy)
        n = len(self.index)
        size = train.batch_size or n
        end = usable_rows(n, train.batch_size, (model or self.model).has_batchnorm)
        epoch, slot = divmod(int(number) - 1, -(-end // size))
        order_key = stream_key(self.key, ORDER, stream)
        order = keys.permutation(keys.fold_in(order_key, epoch), n, device=self.index.device)
        dropout_key = stream_key(self.key, DROPOUT, stream)
        rows = order[slot * size : min((slot + 1) * size, end)]
        return self._allowed(with_dropout(self._gather(rows, keys.fold_in(dropout_key, int(number) - 1)), train))

    def _allowed(self, batch: Batch) -> Batch:
        """Return a training batch without what too few of its rows have.

        Under [privacy], noise protects each row; a choice that depends on the other rows would void its accounting.
        """
        return batch if self.smallest < 2 or self.privacy is not None else batch.of_enough_rows(self.smallest)

    def _batches(self, train: Train, model: Model, stream: int, first_epoch: int, first_step: int) -> Iterator[Batch]:
        n = len(self.index)
        size = train.batch_size or n
        end = usable_rows(n, train.batch_size, model.has_batchnorm, self.smallest)
        limit = steps_trained(n, train, skip_single=model.has_batchnorm, smallest=self.smallest)
        order_key = stream_key(self.key, ORDER, stream)
        dropout_key = stream_key(self.key, DROPOUT, stream)
        done = 0
        for epoch in range(limit):  # an epoch has at least one step, so `limit` epochs suffice
            if done >= limit:
                return
            order = keys.permutation(keys.fold_in(order_key, first_epoch + epoch), n, device=self.index.device)
            table = self._gather(order[:end])
            x = {m: torch.split(value, size) for m, value in table.x.items()}
            present = {m: torch.split(value, size) for m, value in table.present.items()}
            for slot, (y, rows) in enumerate(
                zip(torch.split(table.y, size), torch.split(table.rows, size), strict=True)
            ):
                if done >= limit:
                    return
                batch = Batch(
                    x={m: parts[slot] for m, parts in x.items()},
                    y=y,
                    rows=rows,
                    present={m: parts[slot] for m, parts in present.items()},
                    key=keys.fold_in(dropout_key, first_step + done),
                )
                yield with_dropout(batch, train)
                done += 1

    def _gather(self, rows: Tensor, key: int | None = None) -> Batch:
        """Make a batch. `rows` gives the positions of its rows among the client's own rows."""
        where = self.index.index_select(0, rows)  # twice as fast as index[rows] for so few rows
        columns = self.columns
        return Batch(
            x={m: columns.modalities[m].take(where) for m in self.modalities},
            y=columns.label.index_select(0, where),
            rows=rows,
            present={m: columns.present[m].index_select(0, where) for m in self.modalities if m in columns.present},
            key=key,
        )


def _put_back(part: PartOfTraining, w: Tree) -> tuple[Moments, Tree, list[Tensor]]:
    """Put the parameters of a training that goes on into `w`. Return its moments, its carry and its losses."""
    with torch.no_grad():
        for name, value in part.params.items():
            w[name].copy_(value)
    device = next(iter(w.values())).device if w else None
    moments = {kind: {n: v.to(device) for n, v in tree.items()} for kind, tree in part.moments.items()}
    return moments, {n: v.to(device) for n, v in part.carry.items()}, [loss.to(device) for loss in part.losses]


def _step_gradient(job: Job, w: Tree, leaves: Tree, batch: Batch) -> tuple[Any, Tensor, Any]:
    """Return gradient, loss and aux of a batch. Under `job.split`, there is one gradient per term of the loss."""
    if job.train.accumulate > 1:
        return *_accumulated(job, w, leaves, batch), {}
    value, aux = split_loss(job.loss(w, batch))
    if job.split:
        return _term_gradients(value, leaves), torch.stack(list(value.values())).sum(), aux
    return _collected(value, leaves) if job.only is None else _gradient(value, leaves), value, aux


def _accumulated(job: Job, w: Tree, leaves: Tree, batch: Batch) -> tuple[Tree, Tensor]:
    """Return the gradient and the loss of a batch, computed part by part."""
    grads, total = None, torch.zeros((), device=batch.y.device)
    for part, share in parts_of(batch, job.train):
        value, aux = split_loss(job.loss(w, part))
        refuse_aux(aux)
        found = _collected(value, leaves) if job.only is None else _gradient(value, leaves)
        grads, total = added(grads, found, share), total + value.detach() * share
    assert grads is not None
    return grads, total


def _collected(value: Tensor, leaves: Tree) -> Tree:
    """Return the gradient of `value` for all leaves of its graph; zero for leaves on which it does not depend.

    This function calls `backward`, because it is faster than `autograd.grad`, which visits every leaf in Python. These
    visits would take 1/30 of the time of a small training step. To get the gradients of only some leaves, use
    `_gradient`, because `backward` computes the gradients of all leaves.
    """
    if value.requires_grad:  # False if the loss is independent of all parameters
        value.backward()  # type: ignore[no-untyped-call]
    grads: Tree = {}
    for name, leaf in leaves.items():
        found, leaf.grad = leaf.grad, None
        grads[name] = torch.zeros_like(leaf) if found is None else found
    return grads


def _gradient(value: Tensor, leaves: Tree, retain: bool = False) -> Tree:
    """Return the gradient of `value` for these leaves; zero for leaves on which it does not depend."""
    if not (leaves and value.requires_grad):
        return like(leaves)
    found = torch.autograd.grad(value, tuple(leaves.values()), retain_graph=retain, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}


def _term_gradients(terms: Mapping[str, Tensor], leaves: Tree) -> dict[str, Tree]:
    """Return the gradient of each term of a loss; the graph is freed after the last term."""
    *_, last = terms
    return {name: _gradient(value, leaves, retain=name != last) for name, value in terms.items()}
