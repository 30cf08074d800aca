"""A client dataset that counts the work of its client, for simulated time. Tasks use it like any client dataset."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.clock import Count
from polyfed.model import Model
from polyfed.training.client_data import FOLD_BATCH, ClientData, Job, Loss, Step, TrainingResult
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import rows_trained


class MeteredClientData(ClientData):
    """Counts the work of each call, and forwards the call to another client dataset.

    Local training costs `Job.passes` forward passes through each block with a trained parameter, usually three. It
    costs one forward pass through each block that is wholly frozen. A `fold` costs one forward pass through all blocks
    of the client, independent of the computation in its step. A part of the first fusion layer counts only if its
    parameters are among those of the training: the clients of a cut model lack them.

    The number of rows of a given batch (`minimise(on=...)`) is a tensor, which `vmap` hides from Python. Its work is
    therefore summed in `given`, which the task's engine counts after the task.

    Args:
        view: the dataset of one client, or of a stack of clients.
        num_rows: number of rows of each client.
        modalities: the modalities of these clients.
        model: the clients' model.
        count: called with the number of operations for a row and the number of rows of each client.
    """

    def __init__(
        self,
        view: ClientData,
        num_rows: Sequence[int],
        modalities: Collection[str],
        model: Model,
        count: Count,
        given: list[Tensor] | None = None,
    ) -> None:
        self._view, self._num_rows, self._modalities = view, num_rows, modalities
        self._model, self._count, self.given = model, count, [] if given is None else given
        self.num_rows, self.key, self.round, self.rounds = view.num_rows, view.key, view.round, view.rounds

    @override
    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        job = Job(loss=loss, params=params, **options)
        train, model = job.train, job.model or self._model
        # a client in a silo also trains parts of the head for other clients' embeddings, but not their encoders
        owned = self._modalities if job.model is None else model.modalities
        trained = {block_of(name) for name in job.trained(model)} & {*owned, SHARED}
        passes = job.passes.whole * sum(model.flops(block) for block in trained)
        lacking = (trained - {SHARED}) - {block_of(name) for name in params if ".fusion." in name}
        passes -= job.passes.whole * sum(model.part_flops(modality) for modality in lacking)
        others = {block_of(name) for name in job.trained(model) if ".fusion." in name} - {*owned}
        passes += job.passes.whole * sum(model.part_flops(m) for m in others.intersection(model.modalities))
        encoders = {*owned}.intersection(model.modalities)
        passes += job.passes.encoders * sum(model.flops(m) - model.part_flops(m) for m in encoders)
        passes += job.passes.others * sum(model.flops(m) - model.part_flops(m) for m in encoders - trained)
        if len(encoders) > 1:
            parts = [model.part_flops(m) for m in encoders]
            passes += job.passes.singly * sum(model.flops(SHARED) + part for part in parts)
            passes += job.passes.together * (model.flops(SHARED) + sum(parts))
        if job.only is None:  # a block that is wholly frozen needs only the forward pass
            frozen = {*owned}.intersection(model.modalities) - {block_of(name) for name in model.template}
            passes += sum(model.flops(block) for block in frozen)
        if job.on is None:
            self._count(passes, [rows_trained(n, train, skip_single=model.has_batchnorm) for n in self._num_rows])
        else:
            self.given.append(job.on.num_real.to(torch.int64) * passes)
        return self._view.minimise(loss, params, **options)

    @override
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        return self._view.batch(train, number, model=model, stream=stream)

    @override
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        self._count(sum(self._model.flops(block) for block in (*self._modalities, SHARED)), self._num_rows)
        return self._view.fold(step, carry, batch_size=batch_size)

    @override
    def at(self, rows: Tensor) -> ClientData:
        """Return the dataset of these rows; see `ClientData.at`. The new dataset also counts the work of the client."""
        view, sizes = self._view.at(rows), [len(rows)] * len(self._num_rows)
        return MeteredClientData(view, sizes, self._modalities, self._model, self._count, self.given)

    @property
    @override
    def groups(self) -> Mapping[str, Tensor]:
        return self._view.groups

    @property
    @override
    def ids(self) -> Tensor:
        return self._view.ids

    @property
    @override
    def test(self) -> ClientData:
        return self._view.test


def given_work(data: ClientData) -> Tensor:
    """Return the operations on given batches in a task so far, an int64 0-dim tensor; 0 if nothing is counted."""
    result = data.given if isinstance(data, MeteredClientData) else []
    return torch.stack(result).sum() if result else torch.zeros((), dtype=torch.int64)
