"""What a client keeps of a cut model between two tasks: its half of the model and the moments of its optimiser."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, nested, under
from polyfed.model import Model
from polyfed.training import TrainingResult
from polyfed.training.optimisers import Moments, Train

WEIGHT, MOMENT = "weight", "moment"
"""Prefixes of a client's half and of its optimiser's moments in the client's local state."""


def fresh_local(model: Model, half: Tree, train: Train) -> Tree:
    """The local state of a client with this half of the model and a fresh optimiser."""
    moments = train.moments(model.trainable(half))
    return nested(WEIGHT, half) | _moments(moments)


def client_half(local: Tree) -> Tree:
    """The client's half of the model in its local state."""
    return under(WEIGHT, local)


def earlier_steps(local: Tree, step: Tensor) -> TrainingResult:
    """The client's training before this step, for `ClientData.minimise(..., after=)`."""
    moments: Moments = {}
    for name, value in under(MOMENT, local).items():
        kind, _, of = name.partition("/")
        moments.setdefault(kind, {})[of] = value
    return TrainingResult({}, torch.zeros((), device=step.device), step - 1, moments=moments)


def local_after(fit: TrainingResult, local: Tree) -> Tree:
    """The client's local state after a step."""
    found = nested(WEIGHT, fit.params) | _moments(fit.moments)
    return {name: found[name] for name in local}


def _moments(moments: Moments) -> Tree:
    """The optimiser's moments, named `moment.<kind>/<parameter>`."""
    return nested(MOMENT, {f"{kind}/{name}": v for kind, tree in moments.items() for name, v in tree.items()})


def last_loss(fit: TrainingResult) -> Tensor:
    """The loss of the last step, from the mean over all steps, where the loss of the steps before was set to 0."""
    return fit.loss * fit.num_steps


def padded(rows: Tensor, batch: Batch) -> Tensor:
    """Rows received for a batch, padded with zeros to the length of the batch."""
    missing = batch.y.shape[0] - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
