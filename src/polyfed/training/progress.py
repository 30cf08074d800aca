"""What keeps a local training alive when its process dies: its state after some of the steps.

A device writes such states to its disk, and the same task, begun again, goes on from them to the same bits. Nothing but
the state of the steps is needed: order of rows, dropout and all else that is random follows from keys and numbers of
steps.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from polyfed.core.tree import Tree
from polyfed.training.optimisers import Moments

MOST_TRAININGS = 16
"""For so many trainings of a task, states are written. A task that trains more often is begun again at that place."""


@dataclass(frozen=True)
class PartOfTraining:
    """The state of a training after some of its steps.

    Attributes:
        params: the Tree that is trained.
        moments: the state of the optimiser.
        carry: what `direction` has returned.
        losses: the loss of each step so far, 0-dim.
    """

    params: Tree
    moments: Moments
    carry: Tree
    losses: list[Tensor]


@dataclass
class Progress(ABC):
    """The progress of one task. Make a new one for each time that the task begins.

    A task may train several times; the trainings are numbered in their order. One that a step of another training
    contains is a part of this step.

    Attributes:
        seconds: most seconds of work that a killed process loses, in each of two places: in the training that runs,
            and in all earlier trainings of the task together.
        share: a state is kept after at least so many times the seconds that it took to keep the last one, so that this
            takes at most 5 % of the time.
    """

    seconds: float
    share: ClassVar[float] = 20.0
    _count: int = field(default=0, init=False)
    _inside: bool = field(default=False, init=False)
    _unkept: float = field(default=0.0, init=False)
    _took: float = field(default=0.0, init=False)

    @abstractmethod
    def found(self, number: int) -> PartOfTraining | None:
        """Return what was kept of a training, or None."""

    @abstractmethod
    def keep(self, number: int, part: PartOfTraining) -> None:
        """Keep the state of a training in place of what was kept of it before."""

    @contextmanager
    def training(self) -> Iterator["OneTraining"]:
        """Enclose a training. Nothing is kept of one that is part of a step, or beyond the limit."""
        if self._inside:
            yield NOT_KEPT
            return
        self._inside, number, self._count = True, self._count, self._count + 1
        try:
            yield OneTraining(self, number, self.found(number)) if number < MOST_TRAININGS else NOT_KEPT
        finally:
            self._inside = False


class OneTraining:
    """The progress of a training, which is kept unless `task` is None.

    Attributes:
        found: what an earlier process has kept of it, or None.
    """

    def __init__(self, task: Progress | None, number: int, found: PartOfTraining | None) -> None:
        self.task, self.number, self.found, self._kept = task, number, found, time.monotonic()

    def stepped(self, part: Callable[[], PartOfTraining]) -> None:
        """Note that a step is done, and keep the state if it is time to."""
        if self.task is not None:
            self._keep_after(self.task, 0.0, part)

    def ended(self, part: Callable[[], PartOfTraining]) -> None:
        """Note that the last step is done. The state is kept if what is not kept of the task has become long."""
        if self.task is not None:
            self._keep_after(self.task, self.task._unkept, part)
            self.task._unkept += time.monotonic() - self._kept

    def _keep_after(self, task: Progress, more: float, part: Callable[[], PartOfTraining]) -> None:
        now = time.monotonic()
        if more + now - self._kept < max(task.seconds, task.share * task._took):
            return
        task.keep(self.number, part())
        self._kept = time.monotonic()
        task._took = self._kept - now


NOT_KEPT = OneTraining(None, 0, None)
"""A training of which nothing is kept."""
