"""What a client keeps of a cut model between two tasks: its half of the model and the moments of its optimiser."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.training import TrainingResult
from polyfed.training.optimisers import Moments, Train

WEIGHT, MOMENT = "weight.", "moment."
"""Prefixes of a client's half and of its optimiser's moments in the client's local state."""


def fresh_local(model: Model, half: Tree, train: Train) -> Tree:
    """The local state of a client with this half of the model and a fresh optimiser."""
    moments = train.moments(model.trainable(half))
    kept = {f"{MOMENT}{kind}/{n}": v for kind, tree in moments.items() for n, v in tree.items()}
    return {WEIGHT + n: v for n, v in half.items()} | kept


def client_half(local: Tree) -> Tree:
    """The client's half of the model in its local state."""
    return {n.removeprefix(WEIGHT): v for n, v in local.items() if n.startswith(WEIGHT)}


def earlier_steps(local: Tree, step: Tensor) -> TrainingResult:
    """The client's training before this step, for `ClientData.minimise(..., after=)`."""
    moments: Moments = {}
    for name, value in local.items():
        if name.startswith(MOMENT):
            kind, _, of = name.removeprefix(MOMENT).partition("/")
            moments.setdefault(kind, {})[of] = value
    return TrainingResult({}, torch.zeros((), device=step.device), step - 1, moments=moments)


def local_after(fit: TrainingResult, local: Tree) -> Tree:
    """The client's local state after a step."""
    kept = {f"{MOMENT}{kind}/{n}": v for kind, tree in fit.moments.items() for n, v in tree.items()}
    found = {WEIGHT + n: v for n, v in fit.params.items()} | kept
    return {name: found[name] for name in local}


def last_loss(fit: TrainingResult) -> Tensor:
    """The loss of the last step, from the mean over all steps, where the loss of the steps before was set to 0."""
    return fit.loss * fit.num_steps


def padded(rows: Tensor, batch: Batch) -> Tensor:
    """Rows received for a batch, padded with zeros to the length of the batch."""
    missing = batch.y.shape[0] - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
