"""`KeptTraining`: a training run that a client stores after a task and continues in a later task."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.tree import Tree, nested, under
from polyfed.model import Model
from polyfed.training.client_data import TrainingResult
from polyfed.training.optimisers import Moments, Train

MOMENT, STEPS = "moment", "steps"
"""Names in a client's local state: the prefix of the optimiser's moments, and the number of steps."""


@dataclass(frozen=True)
class KeptTraining:
    """The parameters of a training run, the moments of its optimiser and the number of its steps.

    Attributes:
        params: the parameters, by name.
        moments: the optimiser's moments.
        steps: optimiser steps so far, a 0-dim int64 tensor.
    """

    params: Tree
    moments: Moments
    steps: Tensor

    @classmethod
    def fresh(cls, model: Model, params: Tree, train: Train) -> "KeptTraining":
        """Return a new training run, without any steps so far, that starts from these parameters."""
        return cls(params, train.moments(model.trainable(params)), torch.zeros((), dtype=torch.int64))

    @classmethod
    def of(cls, local: Tree) -> "KeptTraining":
        """Return the training run that a local state holds. `tree` made this local state."""
        moments: Moments = {}
        for name, value in under(MOMENT, local).items():
            kind, _, of = name.partition("/")
            moments.setdefault(kind, {})[of] = value
        params = {name: value for name, value in local.items() if name != STEPS and not name.startswith(f"{MOMENT}.")}
        return cls(params, moments, local[STEPS])

    def tree(self) -> Tree:
        """Return a client's local state that holds this training run."""
        return self.params | self.state()

    def state(self) -> Tree:
        """Return the moments and the number of steps, for a local state that holds the parameters separately."""
        flat = {f"{kind}/{name}": value for kind, tree in self.moments.items() for name, value in tree.items()}
        return nested(MOMENT, flat) | {STEPS: self.steps}

    def only(self, names: Collection[str]) -> "KeptTraining":
        """Return a copy of this training run that holds only the parameters `names` and their moments."""
        moments = {kind: {n: v for n, v in tree.items() if n in names} for kind, tree in self.moments.items()}
        return KeptTraining({n: v for n, v in self.params.items() if n in names}, moments, self.steps)

    def earlier(self) -> TrainingResult:
        """Return this training run in the form that `ClientData.minimise(..., after=)` takes."""
        return earlier_steps(self.moments, self.steps)

    def after(self, fit: TrainingResult) -> "KeptTraining":
        """Return the state of this training run after `fit`. Parameters and moments that `fit` lacks do not change."""
        params = {name: fit.params.get(name, value) for name, value in self.params.items()}
        moments = {
            kind: {name: fit.moments.get(kind, {}).get(name, value) for name, value in tree.items()}
            for kind, tree in self.moments.items()
        }
        return KeptTraining(params, moments, fit.num_steps)

    def loss(self, fit: TrainingResult) -> Tensor:
        """Return the mean loss of the steps that `fit` added, 0-dim.

        `fit.loss` is the sum of the losses of the steps that `fit` added, divided by the number of all steps,
        including the earlier ones. This function divides the same sum by the number of added steps.
        """
        return fit.loss * fit.num_steps / (fit.num_steps - self.steps).clamp(min=1)


def earlier_steps(moments: Moments, steps: Tensor | int) -> TrainingResult:
    """Return the earlier steps of a training run in the form that `ClientData.minimise(..., after=)` takes.

    Args:
        moments: the optimiser's moments after these steps.
        steps: the number of these steps, a Python number or a 0-dim int64 tensor.
    """
    taken = torch.as_tensor(steps)
    return TrainingResult({}, torch.zeros((), device=taken.device), taken, moments=moments)
