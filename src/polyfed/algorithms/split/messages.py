"""The messages between the client's half and the server's half of a cut model."""

from torch import Tensor

from polyfed.core.messages import LABELS, Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import Tree


@message
class Half(Message):
    """The client's half of the model. The client receives it at the start of a round and returns it at the end."""

    params: Tree = carries("parameters", partial=True)


@message
class StepNumber(Message):
    """The number of a training step, from 1."""

    step: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Ready(Message):
    """Confirms that the client has carried out the request."""

    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


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
