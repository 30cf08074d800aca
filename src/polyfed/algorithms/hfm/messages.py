"""Messages between the devices of a silo, their edge and the server, and the computations of an edge.

Shape letters: `B_m` rows of the edge's mini-batch, `E` entries of an embedding, `N_m` rows of the silo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.messages import Message, carries, crossings, cut, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.request import Accept
from polyfed.core.tree import Tree, keep_on_host, zip_map
from polyfed.federation.federation import Federation


@message
class Question(Message):
    """Asks a device for its sample ids. Has no fields."""


@message
class Ids(Message):
    """Sample ids of all rows of a device, in the order of the rows, int64 (N_m,)."""

    ids: Tensor = carries("ids", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Sample(Message):
    """The edge's mini-batch: positions of its samples among the device's own rows, int64 (B_m,)."""

    rows: Tensor = carries("ids", shape=("batch",))


@message
class Embedded(Message):
    """Embeddings (B_m, E) of the device's modalities, in the order of the requested rows."""

    embeddings: Tree = carries("embeddings", shape=("batch", "encoded"))


@message
class Exchange(Message):
    """The message Phi from an edge to a device: the head, and the latest embeddings of all modalities.

    The embeddings belong to samples of the mini-batch. `rows` are the positions of these samples in the device's data.
    """

    head: Tree = carries("parameters", whole=True, part="head")
    embeddings: Tree = carries("embeddings", whole=True, shape=("batch", "encoded"))
    rows: Tensor = carries("ids", shape=("batch",))


@message
class Copy(Message):
    """A device's copy of the head after Q local rounds, its training loss, and the drift of its own embeddings.

    The drift is the change of the embeddings during these rounds relative to their norm. During these rounds, the other
    devices use the old embeddings. The drift measures how outdated the old embeddings are at the end.
    """

    head: Tree = carries("parameters", partial=True, whole=True)
    loss: Tensor = carries("statistic", dtype="float32")
    drift: Tensor = carries("statistic", dtype="float32", within=NOT_NEGATIVE)


@message
class Slopes(Message):
    """For each row that was exchanged, the gradient of its loss with respect to the embeddings (B_m, E) by modality."""

    gradients: Tree = carries("embeddings", whole=True, shape=("batch", "encoded"))


@message
class Guidance(Message):
    """What a device without labels receives: the gradients of its embeddings, (B_m, E), by modality.

    `rows` holds, for each embedding, the number of its row in the device's dataset.
    """

    gradients: Tree = carries("embeddings", shape=("batch", "encoded"))
    rows: Tensor = carries("ids", shape=("batch",))


@message
class Followed(Message):
    """The reply of a device without labels: the drift of its own embeddings, as in `Copy`."""

    drift: Tensor = carries("statistic", dtype="float32", within=NOT_NEGATIVE)


@message
class ToEdge(Message):
    """The server's message to the edge of a silo: the global model, without it if the silo uses its own."""

    params: Tree = carries("parameters", partial=True, optional=True)


@message
class Forward(Message):
    """An edge's message to a device of its silo, before the device sends its `Upload` to the server.

    The first device of the silo gets the edge's head, and forwards this head to the server. `num_rows` counts the
    samples of the silo that this device has, `samples` all that take part, N_m. `training` is `Edge.training`.
    """

    head: Tree = carries("parameters", whole=True, part="head", optional=True)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    samples: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    training: Tensor = carries("statistic", dtype="sums", shape=(5,))


@message
class Upload(Message):
    """A device's reply to the server: its encoders, and what the edge says about the silo.

    The first device of an edge also sends the head of the edge.
    """

    params: Tree = carries("parameters", partial=True, whole=True)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    samples: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    training: Tensor = carries("statistic", dtype="sums", shape=(5,))


@message
class Evaluated(Message):
    """Asks a device for embeddings of its own test rows.

    `params` holds the encoders that compute the embeddings. If `params` is empty, the device uses its own encoders.
    """

    params: Tree = carries("parameters", part="encoders", optional=True)


@message
class OwnTest(Message):
    """Embeddings (n, E) of a device's own test rows and the ids of these samples (n,), for its edge."""

    embeddings: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    ids: Tensor = carries("ids", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class Sent:
    """The last embeddings of a device by modality (B_m, E), and the positions of their rows (B_m,)."""

    rows: Tensor
    embeddings: Tree

    def __post_init__(self) -> None:
        """Keep the rows on the CPU, because the edge draws its random mini-batches on the CPU."""
        keep_on_host(self, "rows")


def shuffled_peers(exchange: Exchange, own: Sequence[str], key: int) -> Exchange:
    """Return an exchange for a control experiment: the other devices' embeddings belong to other rows."""
    out = dict(exchange.embeddings)
    for m, h in exchange.embeddings.items():
        if m not in own:
            out[m] = h[keys.permutation(keys.key(key, m), len(h)).to(h.device)]
    return replace(exchange, embeddings=out)


def whole_batch(asked: Mapping[int, Sample]) -> Accept:
    """Accept embeddings of a device only if it sent as many rows as it was asked for."""

    def flaw(client: int, reply: Embedded) -> str:
        sent, wanted = {m: len(h) for m, h in reply.embeddings.items()}, len(asked[client].rows)
        return "" if all(n == wanted for n in sent.values()) else f"sent embeddings of {sent} rows, not of {wanted}"

    return flaw


def some_rows(client: int, reply: Any) -> str:
    """Return the reason to drop a reply without sample ids, or "". Only devices that have such rows are asked."""
    return "" if int(reply.num_rows) else "sent no sample ids"


def mean_tree(trees: Sequence[Tree]) -> Tree:
    """Return the mean of the trees by name, or an empty tree if there are no trees."""
    return zip_map(lambda *parts: torch.stack(parts).mean(0), *trees) if trees else {}


def bytes_down(fed: Federation, send: Mapping[int, Message]) -> int:
    """Return the bytes of these messages as their clients receive them, counted as in the ledger."""
    received = (cut(msg, fed.clients[client].blocks) for client, msg in send.items())
    return sum(crossing.bytes for msg in received for crossing in crossings(msg))


def bytes_up(replies: Mapping[int, Message]) -> int:
    """Return the bytes of replies, counted as in the ledger."""
    return sum(crossing.bytes for reply in replies.values() for crossing in crossings(reply))
