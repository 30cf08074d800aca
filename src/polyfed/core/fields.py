"""What a field of a message declares: its kind, whose data it holds, its shape and its range.

Methods import these names from `polyfed.core.messages`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

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
"""What a field can carry. `gradients` are gradients of parameters; the gradient of an embedding is `embeddings`."""

HISTOGRAM = "how many rows of each class a client has"
"""The text for `tells` of a field that counts rows per class."""

LABELS = "labels"
"""The policy row that decides about kind `labels`: labels belong to no modality, whichever field carries them."""

OF_THE_MODEL = ("parameters", "gradients")
"""Kinds whose trees are keyed by the names of the model's tensors; the trees of other kinds are keyed by block."""

MODALITIES, READ = "modalities", "read"
"""Words for `blocks`: `modalities` are all modalities of the client, `read` only those that the model reads."""

HELD_BY_DEFAULT = dict.fromkeys((*OF_THE_MODEL, "statistic"), (MODALITIES, SHARED)) | {
    "labels": (MODALITIES, SHARED, LABELS)
}
"""The `blocks` of a tree that does not declare any, by kind; for kinds not listed here they are `modalities`."""

DESTINATIONS = ("server", "silo")
"""Where a client's reply may go. The ledger books what a client receives under `client`, and no policy refuses it."""

Sizes = tuple[str | None, ...]
"""The shape of a tensor, with a name for each size: `classes`, the number of classes; `features`, the width of a
modality's embedding; `own`, the sums that a client reports of its own test rows; `label`, the label of a row, a class
number or T targets; `encoded`, the shape of its encoder's output; `sample`, the shape of its samples. None stands for
any size. `own`, `label`, `encoded` and `sample` may be
any number of axes."""


@dataclass(frozen=True)
class Declared:
    """What a field declares; the docstring of `carries` explains the other attributes.

    Attributes:
        bare: whether the field is annotated as a tensor, not as a tree.
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
) -> Any:
    """Declare a field of a message.

    The egress gate refuses to send a reply that holds names that its fields do not declare. The server drops a reply
    that differs from its declaration in any other way (shape, range, type).

    Args:
        kind: one of `KINDS`.
        of: for a tensor, the modality that it describes. Default: the tensor belongs to no modality.
        rows: for a field whose tensors have one entry per row, the name of the 0-dim field that holds the number of
            rows without padding.
        whole: for a tree that crosses with all its blocks. By default, a client receives only the blocks of its own
            modalities and may send no others. A head over the embeddings of several parties needs `whole`,
            because it is useless without all of its parts.
        shape: shape of each tensor, without the axis of `rows`; see `Sizes`. None means one number for a `statistic`,
            the model's shapes for parameters and gradients, and any shape for other kinds. Labels of shape () are
            class numbers.
        partial: for parameters and gradients, whether a tree may hold only some tensors of a block.
        within: the range in which every entry must lie.
        tells: what the field reveals beyond what its kind suggests; `polyfed check` prints it.
        blocks: for a tree, the blocks that it may hold: any of `modalities` (those of the client, or with `whole` those
            of the federation), `read` (only those that the model reads), `shared` and `labels`. Default:
            `HELD_BY_DEFAULT`.
    """
    assert kind in KINDS, f"kind {kind!r} is not one of {KINDS}"
    shape = () if shape is None and kind == "statistic" else shape
    declared = Declared(kind, of, rows, whole, shape, partial, within, tells, blocks)
    return dataclasses.field(metadata={"carries": declared})
