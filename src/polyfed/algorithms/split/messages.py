"""The messages between the two halves of a cut model, and what a client keeps between them."""

import torch.nn.functional as F
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.messages import LABELS, Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.tree import Tree, nested, under
from polyfed.model import Model
from polyfed.training import TrainingResult
from polyfed.training.kept_training import earlier_steps
from polyfed.training.optimisers import Moments, Train


@message
class Half(Message):
    """The client's half of the model. The client receives it at the start of a round and returns it at the end."""

    params: Tree = carries("parameters", partial=True)


@message
class Smashed(Message):
    """Smashed data: activations at the cut (B, ...) by modality, and the labels (B,) unless the model is U-shaped."""

    activations: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    labels: Tree = carries("labels", rows="num_rows", shape=(), blocks=(LABELS,))
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class CutGradients(Message):
    """Gradients of the loss with respect to the activations at the cut, (B, ...) by modality."""

    gradients: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    step: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class HeadInput(Message):
    """Only for U-shaped models: the joint representation (B, J), which is the input of the client's head."""

    joint: Tensor = carries("embeddings", rows="num_rows", shape=("joint",))
    step: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class HeadGradient(Message):
    """Only for U-shaped models: the loss, and its gradient (B, J) with respect to the input of the client's head."""

    gradient: Tensor = carries("embeddings", rows="num_rows", shape=("joint",))
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


WEIGHT, MOMENT = "weight", "moment"
"""Prefixes in the client's local state: one for its half of the model, one for its optimiser's moments."""


def fresh_local(model: Model, half: Tree, train: Train) -> Tree:
    """Return the local state of a client with this half of the model and a fresh optimiser."""
    moments = train.moments(model.trainable(half))
    return nested(WEIGHT, half) | _moments(moments)


def client_half(local: Tree) -> Tree:
    """Return the client's half of the model from its local state."""
    return under(WEIGHT, local)


def steps_before(local: Tree, step: Tensor) -> TrainingResult:
    """Return the client's steps before `step` in the form that `ClientData.minimise(..., after=)` takes."""
    moments: Moments = {}
    for name, value in under(MOMENT, local).items():
        kind, _, of = name.partition("/")
        moments.setdefault(kind, {})[of] = value
    return earlier_steps(moments, step - 1)


def local_after(fit: TrainingResult, local: Tree) -> Tree:
    """Return the client's local state after a step."""
    result = nested(WEIGHT, fit.params) | _moments(fit.moments)
    return {name: result[name] for name in local}


def _moments(moments: Moments) -> Tree:
    """The optimiser's moments, named `moment.<kind>/<parameter>`."""
    return nested(MOMENT, {f"{kind}/{name}": v for kind, tree in moments.items() for name, v in tree.items()})


def last_loss(fit: TrainingResult) -> Tensor:
    """Return the loss of the last step.

    In each task, the client trains one step with `ClientData.minimise`. The argument `after` is the result of
    `steps_before`, so the step continues the earlier training. `fit` is the result of `minimise`. `fit.loss` is the
    mean loss over all steps, where the loss of every earlier step counts as 0. The sum over all steps is therefore the
    loss of the last step.
    """
    return fit.loss * fit.num_steps


def padded(rows: Tensor, batch: Batch) -> Tensor:
    """Append rows of zeros to the received rows, so that there are as many rows as in the batch."""
    missing = batch.y.shape[0] - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
