"""Checks the limits of a device during local training.

`LimitedClientData` sees the rows and the arguments of every call of `minimise` and `batch`. docs/egress.md says what
the limits do not prevent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError
from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.training.client_data import FOLD_BATCH, ClientData, Job, Loss, Step, TrainingResult
from polyfed.training.optimisers import Train
from polyfed.training.step_counts import steps_trained, usable_rows


class _BreachError(Exception):
    """Stops a task whose local training breaks a limit. `LimitGuard.refusal` holds the reason."""


@dataclass
class LimitGuard:
    """Checks that one task of one client respects the limits.

    Attributes:
        limits: the limits of the device.
        client: the client's number.
        task: the name of the task.
        refusal: the refusal, or None while the task has broken no limit.
    """

    limits: Limits
    client: int
    task: str
    refusal: EgressError | None = None
    _steps: dict[int, int] = field(default_factory=dict)
    _results: list[TrainingResult] = field(default_factory=list)  # kept alive, so that Python reuses no id

    def watch(self, view: ClientData, model: Model) -> ClientData:
        """Wrap the client dataset so that it checks the limits. Without limits, return the dataset unchanged."""
        return view if self.limits == NO_LIMITS else LimitedClientData(view, int(view.num_rows), model, self)

    @contextmanager
    def enforced(self, rows: int) -> Iterator[None]:
        """Check the limits while a task runs in the `with` block.

        If the task breaks a limit, the reply is refused, even if the task catches the exception.

        Args:
            rows: number of training rows of the client.

        Raises:
            EgressError: the task broke a limit.
        """
        self.limits.refuse("min_rows", rows, self.client, self.task)
        try:
            yield
        except Exception:
            if self.refusal is None:
                raise
        if self.refusal is None:
            for steps in self._steps.values():
                self._note("min_steps", steps)
        if self.refusal is not None:
            raise self.refusal

    def check_batch(self, rows: int, decay: float = 0.0) -> None:
        """Stop the task if a batch is too small, or if a step undoes too large a share of the earlier steps."""
        self._note("min_batch_size", rows)
        self._refuse(self.limits.decay_breach("lr * weight_decay", decay))
        if self.refusal is not None:
            raise _BreachError(str(self.refusal))

    def add_training(self, steps: int, result: TrainingResult, after: TrainingResult | None) -> None:
        """Count the steps of local training.

        If `after` is a result of the same request, this training continues from that result. The steps of the earlier
        training and of this training then count together.
        """
        before = 0 if after is None else self._steps.pop(id(after), 0)
        if before + steps:
            self._results.append(result)
            self._steps[id(result)] = before + steps

    def _note(self, key: str, value: int) -> None:
        if self.refusal is None:
            self.refusal = self.limits.refusal(key, value, self.client, self.task)

    def _refuse(self, why: str) -> None:
        """Refuse the task for this reason. The server gets the reason, so it must depend on the recipe only."""
        if why and self.refusal is None:
            self.refusal = EgressError(f"client {self.client} refused task {self.task}: {why}")


class LimitedClientData(ClientData):
    """The dataset of one client, which checks the device's limits in every call of local training.

    Args:
        view: the dataset.
        num_rows: number of different rows in the dataset.
        model: the client's model.
        guard: checks batches and steps, and records a breach.
    """

    def __init__(self, view: ClientData, num_rows: int, model: Model, guard: LimitGuard) -> None:
        self._view, self._num_rows, self._model, self._guard = view, num_rows, model, guard
        self.num_rows, self.key, self.round, self.rounds = view.num_rows, view.key, view.round, view.rounds

    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        """Check the batch size, train, and count the steps; see `ClientData.minimise`."""
        job = Job(loss=loss, params=params, **options)
        if job.on is not None:
            rows, steps = _different(job.on), 1
        else:
            skip, size = (job.model or self._model).has_batchnorm, job.train.batch_size
            least = self._guard.limits.min_batch_size
            end = usable_rows(self._num_rows, size, skip, least)
            rows = end % size or min(size, end) if size else end  # the smallest batch, which may be the last one
            steps = steps_trained(self._num_rows, job.train, skip_single=skip, smallest=least)
        if steps:
            self._guard.check_batch(rows, job.train.lr_at(self.round, self.rounds) * job.train.weight_decay)
        result = self._view.minimise(loss, params, **options)
        self._guard.add_training(steps, result, job.after)
        return result

    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        """Return a batch and check its size, also for the last batch of an epoch; see `ClientData.batch`."""
        found = self._view.batch(train, number, model=model, stream=stream)
        self._guard.check_batch(_different(found))
        return found

    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        """Call the fold of the dataset; see `ClientData.fold`. No limit is checked, because a fold does not train."""
        return self._view.fold(step, carry, batch_size=batch_size)

    def at(self, rows: Tensor) -> ClientData:
        """Return the dataset of these rows, with the same limits; see `ClientData.at`. Repeated rows count once."""
        return LimitedClientData(self._view.at(rows), int(torch.unique(rows).numel()), self._model, self._guard)

    @property
    def ids(self) -> Tensor:
        """The ids of the rows; see `ClientData.ids`."""
        return self._view.ids

    @property
    def test(self) -> ClientData:
        """The client's test rows, with the same limits on training; see `ClientData.test`."""
        test = self._view.test
        return LimitedClientData(test, int(test.num_rows), self._model, self._guard)


def _different(batch: Batch) -> int:
    """Return the number of different rows in a batch, without padding."""
    rows = batch.rows if batch.ok is None else batch.rows[batch.ok]
    return int(torch.unique(rows).numel())
