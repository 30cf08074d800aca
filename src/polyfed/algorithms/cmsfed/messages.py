"""What the server sends to a client of CMSFed, and what the client replies."""

from torch import Tensor

from polyfed.core.messages import HISTOGRAM, MODALITIES, Message, carries, message
from polyfed.core.schema import FLAG, NOT_NEGATIVE, POSITIVE
from polyfed.core.tree import Tree


@message
class Assignment(Message):
    """The message to a client: the model, global prototypes (C, D) by modality, and a flag.

    A class without a prototype has a row of zeros. The flag is stored under the modality whose PCE is added to the
    loss. A client that trains one modality alone receives only the blocks of this modality.
    """

    params: Tree = carries("parameters", optional=True)
    prototypes: Tree = carries("prototypes", shape=("classes", "features"), optional=True)
    target: Tree = carries("statistic", dtype="float32", within=FLAG, optional=True)


@message
class Report(Message):
    """A client's reply after training: mean loss terms, trained blocks, and the mean gradients g and h.

    The reply also describes the client's rows: prototypes (C, D) by modality, class counts (C,), and the imbalance
    ratio of the first modality over every other modality. Trees that the options do not use are empty.
    """

    cross_entropy: Tensor = carries("statistic", dtype="float32")
    prototype_loss: Tensor = carries("statistic", dtype="float32")
    params: Tree = carries("parameters")
    gradient: Tree = carries("gradients")
    encoder_gradient: Tree = carries("gradients", partial=True, blocks=(MODALITIES,))
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries(
        "statistic", dtype="float32", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM
    )
    ratio: Tree = carries("statistic", dtype="float32", within=POSITIVE, blocks=(MODALITIES,))
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
