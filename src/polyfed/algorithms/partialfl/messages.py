"""Messages of PartialFL. No message has a field for labels or for a local model, so neither can leave a client."""

from torch import Tensor

from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE, PROBABILITY
from polyfed.core.tree import Tree


@message
class Call(Message):
    """A request for the rows that the client may share. The message has no fields."""


@message
class Deposit(Message):
    """A client's rows (n, ...) of its shareable modalities: vectors of an extractor, or the samples themselves.

    If some rows lack a modality, the field `there` holds a table (n, M) of ones and zeros, under the name `shared`. An
    entry is one if the row has the modality. The M columns are the modalities in alphabetical order.
    """

    vectors: Tree = carries(
        "embeddings",
        rows="num_rows",
        shape=("sample",),
        tells="the rows as the data holds them: inputs = 'embeddings' says that they are embeddings",
    )
    samples: Tree = carries("raw", rows="num_rows", shape=("sample",))
    there: Tree = carries("statistic", dtype="float32", within=PROBABILITY, rows="num_rows", shape=(None,))
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Guided(Message):
    """The global model, and the server model's embeddings z_T (n, d) of the client's own rows, by modality."""

    params: Tree = carries("parameters")
    teacher: Tree = carries("embeddings", optional=True, rows="num_rows", shape=("joint",))
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class GuidedUpdate(Message):
    """The trained global model, the local model's embeddings z'_T (n, d) by modality, losses and alignment.

    If the option `probe` is on, the field `probe` has one entry, with the key `shared`: the teacher's accuracy.
    """

    params: Tree = carries("parameters")
    student: Tree = carries("embeddings", rows="num_rows", shape=("joint",))
    loss: Tensor = carries("statistic", dtype="float32")
    local_loss: Tensor = carries("statistic", dtype="float32")
    alignment: Tensor = carries("statistic", dtype="float32")
    probe: Tree = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
