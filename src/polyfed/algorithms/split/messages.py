"""What crosses between the two halves of a cut model."""

from torch import Tensor

from polyfed.core.messages import LABELS, Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import Tree


@message
class Half(Message):
    """The client's half of the model, on its way there or back."""

    params: Tree = carries("parameters", partial=True)


@message
class Cue(Message):
    """The number of a step, from 1."""

    step: Tensor = carries("statistic")


@message
class Ready(Message):
    """The client has done it."""

    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Smashed(Message):
    """Activations at the cut (B, ...) by modality, and the labels (B,) where they may go along."""

    activations: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    labels: Tree = carries("labels", rows="num_rows", shape=(), blocks=(LABELS,))
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Feedback(Message):
    """Gradients of the loss in the activations (B, ...), by modality."""

    gradients: Tree = carries("embeddings", rows="num_rows")
    step: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Joint(Message):
    """U-shaped: what the head reads (B, J)."""

    joint: Tensor = carries("embeddings", rows="num_rows")
    step: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Evaluated(Message):
    """U-shaped: the gradient of the loss in what the head read (B, J), and the loss."""

    gradient: Tensor = carries("embeddings", rows="num_rows")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)
