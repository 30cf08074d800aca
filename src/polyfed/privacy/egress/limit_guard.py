"""Checks the limits of a device while a task runs, and in its reply.

`LimitedClientData` sees the rows and the arguments of every call of `minimise` and `batch`, and every use of the test
rows. `LimitGuard.check_reply` sees what the reply tells of single classes. docs/egress.md says what the limits do not
prevent.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError
from polyfed.core.messages import LABELS, Message, map_value
from polyfed.core.tree import SHARED, Tree
from polyfed.model import Model
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.training.client_data import FOLD_BATCH, ClientData, Job, Loss, Step, TrainingResult
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import steps_trained, usable_rows


class _BreachError(Exception):
    """Stops a task whose local training breaks a limit. `LimitGuard.refusal` holds the reason."""


@dataclass
class LimitGuard:
    """Checks that one task of one client respects the limits.

    Attributes:
        limits: the limits of the device.
        client: the client's number.
        task: the name of the task.
        objective: says which groups of test rows have sums of their own.
        evaluates: counts a request that reads the test rows in the budget of the device, and returns a refusal if the
            budget is spent. None without a budget.
        trains: returns a refusal of every request that reads the training rows. None if such requests are allowed.
        exact: whether statistics of test rows may leave as they are (`[require] score_noise` forbids it).
        refusal: the refusal, or None while the task has broken no limit.
    """

    limits: Limits
    client: int
    task: str
    objective: Objective = CLASSES
    evaluates: Callable[[str], EgressError | None] | None = None
    trains: Callable[[str], EgressError | None] | None = None
    exact: bool = True
    refusal: EgressError | None = None
    _steps: dict[int, int] = field(default_factory=dict)
    _evaluated: bool = False
    _results: list[TrainingResult] = field(default_factory=list)  # kept alive, so that Python reuses no id

    def watch(self, view: ClientData, model: Model) -> ClientData:
        """Wrap the client dataset so that it checks the limits. Without limits, return the dataset unchanged."""
        return (
            view
            if self.limits == NO_LIMITS and self.evaluates is None and self.trains is None and self.exact
            else LimitedClientData(view, int(view.num_rows), model, self)
        )

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
        self._stop()

    def check_training_rows(self) -> None:
        """Stop the task if it may not read the training rows, whatever it does with them."""
        if self.trains is not None:
            self.refusal = self.refusal or self.trains(self.task)
            self._stop()

    def check_test_rows(self, view: ClientData) -> None:
        """Stop the task if the budget of evaluations is spent, or if a group of these test rows is too small.

        Args:
            view: the test rows of which the task computes something, each of them once.
        """
        if not self._evaluated and self.evaluates is not None:
            self.refusal = self.refusal or self.evaluates(self.task)
        self._evaluated = True
        if self.limits.value("min_test_rows"):
            sizes = view.fold(lambda total, batch: total + self.objective.group_sizes(batch), torch.zeros(()))
            for size in sizes.reshape(-1)[sizes.reshape(-1) > 0].tolist():
                self._note("min_test_rows", int(size))
        self._stop()

    def check_reply(self, reply: Message, view: ClientData, num_classes: int) -> None:
        """Refuse a reply that tells of a class with too few rows.

        `class_means` leaves these classes out. A method that computes something else for each class must leave them out
        too, as zeros.

        Args:
            reply: the reply, before any noise.
            view: the training rows.
            num_classes: number of classes.

        Raises:
            EgressError: a field holds something of such a class, or the labels of its rows; or the budget of
                evaluations is spent.
        """
        self._count_subsets(reply)
        self._refuse_undeclared(reply)
        least = self.limits.value("min_rows_per_class") or 0
        classes = {name: said for name, said in reply.declared.items() if "classes" in (said.shape or ())}
        fields = {name: said for name, said in classes.items() if said.rows is None}
        labels = [name for name, kind in reply.kinds.items() if kind == LABELS]
        if least < 2 or not (fields or labels):
            return
        counts = rows_of_classes(view, num_classes)
        for name, said in fields.items():
            assert said.shape is not None
            axis = said.shape.index("classes")
            value = getattr(reply, name)
            for block, tensor in ({said.of or SHARED: value} if isinstance(value, Tensor) else value).items():
                rows = counts.get(block, counts[SHARED])
                told = (tensor != 0).movedim(axis, 0).reshape(len(rows), -1).any(1)
                self._note_classes(rows[told.to(rows.device)])
        for name in labels:
            map_value(getattr(reply, name), lambda y: self._note_labels(y, counts[SHARED]))
        if self.refusal is not None:
            raise self.refusal

    def _count_subsets(self, reply: Message) -> None:
        """Count every further evaluation of the test rows that one reply reports."""
        sizes = [len(getattr(reply, name)) for name, said in reply.declared.items() if "subsets" in (said.shape or ())]
        for _ in range(max(sizes, default=1) - 1):
            if self.evaluates is not None and self.refusal is None:
                self.refusal = self.evaluates(self.task)
        if self.refusal is not None:
            raise self.refusal

    def _refuse_undeclared(self, reply: Message) -> None:
        """Refuse statistics of test rows that are not declared as scores, because no rule for scores applies to them.

        A field that only counts the entries of another field tells no more than that field.
        """
        if self.exact or not self._evaluated:
            return
        for name, said in reply.declared.items():
            if said.kind == "statistic" and not said.scored and name not in reply.counts.values():
                raise EgressError(
                    f"client {self.client} refused task {self.task}: [require] score_noise of the device, and the task "
                    f"reads test rows, of which {type(reply).__name__}.{name} may tell. Declare the field with "
                    "scored=True, or let a task of its own send it"
                )

    def _note_labels(self, labels: Tensor, counts: Tensor) -> None:
        if not labels.is_floating_point() and labels.ndim == 1:
            self._note_classes(counts[torch.unique(labels).to(counts.device)])

    def _note_classes(self, rows: Tensor) -> None:
        for number in rows[rows > 0].tolist():
            self._note("min_rows_per_class", int(number))

    def _stop(self) -> None:
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
        guard: checks batches, steps and test rows, and records a breach.
        whole: whether these are all training rows of the client.
        tests: whether these are test rows.
    """

    def __init__(
        self,
        view: ClientData,
        num_rows: int,
        model: Model,
        guard: LimitGuard,
        *,
        whole: bool = True,
        tests: bool = False,
    ) -> None:
        self._view, self._num_rows, self._model, self._guard = view, num_rows, model, guard
        self._whole, self._tests = whole, tests
        self.min_rows_per_class = guard.limits.value("min_rows_per_class") or 0
        # under `score_noise`, noise hides each row, and a choice that depends on the rows would void its accounting
        shown = guard.limits if guard.exact else NO_LIMITS
        self.min_group, self.min_test_rows = shown.value("min_group") or 0, shown.value("min_test_rows") or 0
        self.num_rows, self.key, self.round, self.rounds = view.num_rows, view.key, view.round, view.rounds

    def _read(self) -> None:
        if not self._tests:
            self._guard.check_training_rows()

    @override
    def minimise(self, loss: Loss, params: Tree, **options: Any) -> TrainingResult:
        self._read()
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

    @override
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        self._read()
        result = self._view.batch(train, number, model=model, stream=stream)
        self._guard.check_batch(_different(result))
        return result

    @override
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        self._read()
        if not self._whole and not self._tests and self._num_rows:
            self._guard.check_batch(self._num_rows)
        return self._view.fold(step, carry, batch_size=batch_size)

    @override
    def at(self, rows: Tensor) -> ClientData:
        self._read()
        different = torch.unique(rows)
        if self._tests and len(different):
            self._guard.check_test_rows(self._view.at(different))
        view = self._view.at(rows)
        return LimitedClientData(view, len(different), self._model, self._guard, whole=False, tests=self._tests)

    @property
    @override
    def groups(self) -> Mapping[str, Tensor]:
        self._read()
        return self._view.groups

    @property
    @override
    def ids(self) -> Tensor:
        self._read()
        return self._view.ids

    @property
    @override
    def test(self) -> ClientData:
        test = self._view.test
        if rows := int(test.num_rows):
            self._guard.check_test_rows(test)
        return LimitedClientData(test, rows, self._model, self._guard, whole=False, tests=True)


def _different(batch: Batch) -> int:
    """Return the number of different rows in a batch, without padding."""
    rows = batch.rows if batch.ok is None else batch.rows[batch.ok]
    return int(torch.unique(rows).numel())


def rows_of_classes(view: ClientData, num_classes: int) -> dict[str, Tensor]:
    """Return the number of rows of each class, (C,), under `shared`, and for modalities that some rows lack.

    If a row has several labels, its classes are the labels that it has.
    """

    def step(counts: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if batch.y.ndim == 1 and not batch.y.is_floating_point():
            member = torch.nn.functional.one_hot(batch.y, num_classes).to(torch.float32)
        else:
            member = (batch.y.reshape(len(batch.y), -1) > 0).to(torch.float32)
        masks = {SHARED: torch.ones(len(batch.y), device=batch.y.device)} | {
            m: p.float() for m, p in batch.present.items()
        }
        result = {name: batch.sum(member * mask.unsqueeze(-1)) for name, mask in masks.items()}
        return {name: counts[name] + value if name in counts else value for name, value in result.items()}

    counts: dict[str, Tensor] = view.fold(step, {})
    return counts or {SHARED: torch.zeros(num_classes)}
