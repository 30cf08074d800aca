"""The declaration of a message field: the kind of its content, whose data it holds, its shape and its range.

Algorithms import these names from `polyfed.core.messages`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from polyfed.core.schema import Within
from polyfed.core.tree import SHARED

KINDS = (
    "parameters",
    "gradients",
    "embeddings",
    "prototypes",
    "predictions",
    "labels",
    "raw",
    "ids",
    "statistic",
)
"""The kinds of content. `gradients` are gradients of parameters; the gradient of an embedding has kind `embeddings`."""

HISTOGRAM = "how many rows of each class a client has"
"""The text for the option `tells` of a field that counts rows per class."""

LABELS = "labels"
"""The row of the policy that decides about kind `labels`. Labels belong to no modality, in whichever field they are."""

OF_THE_MODEL = ("parameters", "gradients")
"""Kinds whose trees have the names of the model's tensors as keys. Trees of other kinds have blocks as keys."""

MODALITIES, READ = "modalities", "read"
"""Words for the option `blocks`: `modalities` are all modalities of the client, `read` only those of the model."""

HELD_BY_DEFAULT = dict.fromkeys((*OF_THE_MODEL, "statistic"), (MODALITIES, SHARED)) | {
    "labels": (MODALITIES, SHARED, LABELS)
}
"""The default of the option `blocks` for trees, by kind. For kinds that are not listed, it is `modalities`."""

DESTINATIONS = ("server", "silo")
"""Where a client's reply may go. The ledger lists what a client receives under `client`; no policy refuses it."""

SUMMABLE = (*OF_THE_MODEL, "prototypes", "statistic")
"""Kinds whose fields may be declared as sum-only."""

Sizes = tuple[str | None, ...]
"""The shape of a tensor, with a name for each size. `classes` is the number of classes, `features` the width of a
modality's embedding, and `joint` that of the embedding of all modalities together. `own` stands for the sums that a
client reports about its own test rows. `label` stands for the label of a row: a class number or T targets. `encoded`
stands for the shape of the encoder's output, `sample` for the shape of a sample. `batch`, as the first size, is any
number of rows, the same for all tensors of a message. None means any size. `own`, `label`, `encoded` and `sample` may
cover any number of axes."""


@dataclass(frozen=True)
class Declared:
    """The declaration of a field. The docstring of `carries` explains the other attributes.

    Attributes:
        bare: whether the field is annotated as a tensor, not as a tree.
        masked: whether the field holds masked integers in place of the declared values (`core/masked.py`).
    """

    kind: str
    of: str | None
    rows: str | None
    whole: bool
    shape: Sizes | None
    partial: bool
    within: Within | None
    tells: str
    blocks: tuple[str, ...] | None
    bare: bool = False
    sum_only: bool = False
    weight: str | None = None
    masked: bool = False
    random: bool = False
    stacked: bool = False
    part: str = ""


def carries(
    kind: str,
    *,
    of: str | None = None,
    rows: str | None = None,
    whole: bool = False,
    shape: Sizes | None = None,
    partial: bool = False,
    within: Within | None = None,
    tells: str = "",
    blocks: tuple[str, ...] | None = None,
    sum_only: bool = False,
    weight: str | None = None,
    random: bool = False,
    stacked: bool = False,
    part: Literal["", "encoders", "head"] = "",
) -> Any:
    """Declare a field of a message.

    The egress gate refuses to send a reply that holds undeclared names. The server drops a reply that differs from its
    declaration in any other way (shape, range, type).

    Args:
        kind: one of `KINDS`.
        of: for a tensor, the modality that it describes. Default: the tensor belongs to no modality.
        rows: the name of another field of the message, which holds the number of rows without padding (0-dim). Needed
            if the tensors of this field have one entry per row.
        whole: whether a tree is sent with all its blocks. By default, a client receives only the blocks of its own
            modalities and may send no others. A head over the embeddings of several parties needs `whole`, because such
            a head is useless without all of its parts.
        shape: shape of each tensor, without the axis of `rows`; see `Sizes`. None means one number for a `statistic`,
            the model's shapes for parameters and gradients, and any shape for other kinds. Labels of shape () are
            class numbers.
        partial: for parameters and gradients, whether a tree may hold only some tensors of a block.
        within: the range in which every entry must lie.
        tells: what the field reveals in addition to what its kind suggests. `polyfed check` prints this text.
        blocks: for a tree, the blocks that it may hold. Allowed words: `modalities` (all modalities of the client or,
            if `whole` is set, all modalities of the federation), `read` (only the modalities that the model reads),
            `shared` and `labels`. Default: `HELD_BY_DEFAULT`.
        sum_only: whether the server needs only the sum of this field over the clients. If all fields of a message are
            sum-only, secure aggregation can mask the message (docs/secure-aggregation.md).
        weight: for a sum-only field, the name of the 0-dim field by which each client multiplies this field before the
            sum. Default: the field is summed as it is.
        random: whether the field holds only random numbers that depend on no data, such as public keys. A device that
            demands protection ([require] of its policy file) still allows such a field to leave.
        stacked: for parameters and gradients, whether each tensor has one more leading axis, for several models.
        part: for parameters and gradients, the part of the model to which all names belong: its `encoders`, or its
            `head`, which is everything after them. Default: the whole model.
    """
    assert kind in SUMMABLE or not sum_only, f"a field of kind {kind!r} cannot be sum-only; only {SUMMABLE} can"
    assert sum_only or weight is None, "weight= is for sum-only fields"
    assert kind in KINDS, f"kind {kind!r} is not one of {KINDS}"
    shape = () if shape is None and kind == "statistic" else shape
    flags = {"sum_only": sum_only, "weight": weight, "random": random, "stacked": stacked, "part": part}
    declared = Declared(kind, of, rows, whole, shape, partial, within, tells, blocks, **flags)  # type: ignore[arg-type]
    return dataclasses.field(metadata={"carries": declared})
