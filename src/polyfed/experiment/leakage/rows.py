"""Finds which row of the data each entry of a client's reply describes.

For example, a reply with n embeddings describes n training rows of the client. `rows_of` returns the numbers of these
rows in the table of the run's data, or None if neither the receiver nor this audit can determine them.
"""

import torch
from torch import Tensor

from polyfed.core.messages import LABELS, tensors
from polyfed.core.tree import SHARED
from polyfed.experiment.leakage.capture import Capture, CapturedReply
from polyfed.experiment.leakage.findings import Target

Described = dict[int, tuple[Tensor, Tensor]]
"""A map from each client to the values that it sent about its rows, (n, ...), and the rows' numbers in the table, int64
(n,)."""


def embedded(found: Capture, kind: str, attack: str) -> dict[Target, Described]:
    """Collect what clients sent for single rows, field by field. Only the last reply of each client counts.

    Args:
        found: the captured replies.
        kind: a kind with one entry for each row: embeddings or predictions.
        attack: the name of the attack, which becomes a part of each key of the result.
    """
    values: dict[Target, Described] = {}
    for reply in found.replies:
        for name, block, value in reply.parts(kind):
            rows = rows_of(found, reply, value)
            if rows is not None and value.is_floating_point() and value.dim() > 1:
                flat = value.flatten(1)
                field = f"{type(reply.message).__name__}.{name}"
                target = Target(attack, kind, block, reply.seen_by, field)
                values.setdefault(target, {})[reply.client] = (flat, rows)
    return values


def as_sent(found: Capture, kind: str, attack: str) -> dict[Target, dict[int, Tensor]]:
    """Collect labels or samples that clients sent unchanged. Only the last reply of each client counts.

    Args:
        found: the captured replies.
        kind: labels or raw.
        attack: the name of the attack, which becomes a part of each key of the result.
    """
    values: dict[Target, dict[int, Tensor]] = {}
    for reply in found.replies:
        for name, block, value in reply.parts(kind):
            if value.dim() and len(value):
                field = f"{type(reply.message).__name__}.{name}"
                values.setdefault(Target(attack, kind, block, reply.seen_by, field), {})[reply.client] = value
    return values


def rows_of(found: Capture, reply: CapturedReply, value: Tensor) -> Tensor | None:
    """Find which row of the table each entry of a tensor describes. Return None if these rows are not known.

    A client sends either all of its training rows in their order, or the rows whose positions the request named.
    """
    own = found.rows(reply.client)
    if not value.dim() or not len(value):
        return None
    for name, _, asked in tensors(reply.sent):
        if reply.sent.kinds[name] == "ids" and asked.dim() == 1 and len(asked) == len(value):
            return own[asked] if bool((asked >= 0).all() and (asked < len(own)).all()) else None
    return own if len(own) == len(value) else None


def samples_of(found: Capture, block: str, rows: Tensor) -> Tensor:
    """Return the samples of these rows, flattened to vectors: (n, F).

    The samples are those of the modality `block`. If the block is `shared` or `labels`, the vector of a row is the
    concatenation of its samples of all modalities.
    """
    modalities = found.population.columns.modalities
    names = [*modalities] if block in (SHARED, LABELS) else [block]
    return torch.cat([found.samples(name, rows) for name in names], 1)
