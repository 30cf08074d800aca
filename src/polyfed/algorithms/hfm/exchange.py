"""What crosses between the devices of a silo, their edge and the server, and what an edge makes of it .

Shape letters: `B_m` rows of the edge's mini-batch, `E` embedding, `N_m` rows of the silo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.messages import Message, carries, crossings, cut, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import Tree, keep_on_host, zip_map
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies


@message
class Question(Message):
    """Nothing: asks which samples a device holds."""


@message
class Ids(Message):
    """Sample ids of all of a device's rows, in order, int64 (N_m,)."""

    ids: Tensor = carries("ids", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Sample(Message):
    """The edge's mini-batch: positions among the silo's rows, int64 (B_m,)."""

    rows: Tensor = carries("ids", shape=(None,))


@message
class Embedded(Message):
    """Embeddings (B_m, E) of the device's modalities, in the order of the rows that were asked for."""

    embeddings: Tree = carries("embeddings", shape=(None, "encoded"))


@message
class Exchange(Message):
    """What an edge sends its devices (Phi in 3.2): the head, the latest embeddings of all, and their rows."""

    head: Tree = carries("parameters", whole=True)
    embeddings: Tree = carries("embeddings", whole=True, shape=(None, "encoded"))
    rows: Tensor = carries("ids", shape=(None,))


@message
class Copy(Message):
    """A device's copy of the head after Q local rounds, its training loss, and how far its own embeddings moved
    meanwhile, relative to their norm: by so much those that its peers used were stale at the end.
    """

    head: Tree = carries("parameters", partial=True, whole=True)
    loss: Tensor = carries("statistic")
    drift: Tensor = carries("statistic")


@message
class Forward(Message):
    """The head an edge hands over to the server through its first device; empty for the other devices."""

    head: Tree = carries("parameters", whole=True)


@message
class Upload(Message):
    """A device's encoders, and what it forwards for its edge."""

    params: Tree = carries("parameters", partial=True, whole=True)


@dataclass(frozen=True)
class Sent:
    """What a device sent last: positions (B_m,) and embeddings by modality (B_m, E)."""

    rows: Tensor
    embeddings: Tree

    def __post_init__(self) -> None:
        """The edge draws rows on the CPU."""
        keep_on_host(self, "rows")


def stale_embeddings(rows: Tensor, sent: Sequence[Sent]) -> Tree:
    """Embeddings by modality, of those that were sent for these very rows; what is missing counts as zero (3.6)."""
    return {m: h for one in sent if torch.equal(one.rows, rows) for m, h in one.embeddings.items()}


def mean_tree(trees: Sequence[Tree]) -> Tree:
    """The mean by name; nothing of nothing."""
    return zip_map(lambda *parts: torch.stack(parts).mean(0), *trees) if trees else {}


def bytes_down(fed: Federation, send: Mapping[int, Message]) -> int:
    """Bytes that these messages are when their clients receive them, as the ledger counts them."""
    received = (cut(msg, fed.clients[client].blocks) for client, msg in send.items())
    return sum(crossing.bytes for msg in received for crossing in crossings(msg))


def bytes_up(replies: Replies) -> int:
    """Bytes of replies, as the ledger counts them."""
    return sum(len(p.clients) * sum(c.bytes for c in crossings(p.message, stacked=True)) for p in replies.parts)
