"""A view that counts the work its client does, for simulated time. It changes nothing that a task can see."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.network import TRAINING_PASSES, Count
from polyfed.model import Model
from polyfed.training.client_data import FOLD_BATCH, ClientData, Job, Loss, Step, TrainingResult, rows_trained
from polyfed.training.optimisers import Train


class MeteredClientData(ClientData):
    """Hands everything to another view and counts rows, on the host, before it does.

    Training costs `TRAINING_PASSES` forward passes through the blocks trained, even in part, of the model that is
    trained, and one through those that are wholly frozen; a `fold` counts as one through all of the client's blocks,
    whatever its step does with the rows.

    Args:
        view: of one client, or of a stack.
        num_rows: rows of each of its clients.
        modalities: what they own.
        model: theirs.
        count: takes the note.
    """

    def __init__(
        self, view: ClientData, num_rows: Sequence[int], modalities: Collection[str], model: Model, count: Count
    ) -> None:
        self._view, self._num_rows, self._modalities = view, num_rows, modalities
        self._model, self._count = model, count
        self.num_rows, self.key, self.round, self.rounds = view.num_rows, view.key, view.round, view.rounds

    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        """Count the work, then train; see `ClientData.minimise`."""
        job = Job(loss=loss, params=params, **options)
        train, model = job.train, job.model or self._model
        if job.on is not None:
            train = replace(train, steps=1)
        rows = [rows_trained(n, train, skip_single=model.has_batchnorm) for n in self._num_rows]
        # a device of a silo also trains the parts of the head that read others' embeddings; their encoders rest
        owned = self._modalities if job.model is None else model.modalities
        trained = {block_of(name) for name in job.trained(model)} & {*owned, SHARED}
        passes = TRAINING_PASSES * sum(model.flops(block) for block in trained)
        if job.only is None:  # a block that is wholly frozen is passed through forward, and no gradient comes back
            frozen = {*owned}.intersection(model.modalities) - {block_of(name) for name in model.template}
            passes += sum(model.flops(block) for block in frozen)
        self._count(passes, rows)
        return self._view.minimise(loss, params, **options)

    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        """See `ClientData.batch`."""
        return self._view.batch(train, number, model=model, stream=stream)

    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        """See `ClientData.fold`."""
        self._count(sum(self._model.flops(block) for block in (*self._modalities, SHARED)), self._num_rows)
        return self._view.fold(step, carry, batch_size=batch_size)

    def at(self, rows: Tensor) -> ClientData:
        """See `ClientData.at`."""
        view, sizes = self._view.at(rows), [len(rows)] * len(self._num_rows)
        return MeteredClientData(view, sizes, self._modalities, self._model, self._count)

    @property
    def ids(self) -> Tensor:
        """See `ClientData.ids`."""
        return self._view.ids

    @property
    def test(self) -> ClientData:
        """See `ClientData.test`; judging is not counted."""
        return self._view.test
