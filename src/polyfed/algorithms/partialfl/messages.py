"""The messages of PartialFL, and what the server makes of the clients' deposits.

No message has a field for labels or for a local model, so neither can leave a client.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, PROBABILITY
from polyfed.core.tree import SHARED, Tree, nested
from polyfed.federation.replies import Replies


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


PRESENT = "present"
"""Prefix of the masks that belong to the deposited rows. A mask marks the rows that the client has."""


def flaw(client: int, given: Deposit) -> str:
    """Return the reason to drop a deposit, or "". A client without shareable modalities may deposit nothing."""
    return "deposited modalities without rows" if given.vectors | given.samples and not int(given.num_rows) else ""


def usable_rows(given: Deposit, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    """Return the deposited rows (n, ...) by modality. Modalities whose shape the model cannot read are left out.

    If a client lacks a modality for some rows, `present.<modality>` marks the rows that it has.
    """
    rows = {m: x.clone() for m, x in (given.vectors | given.samples).items() if tuple(x.shape[1:]) == shapes.get(m)}
    has = given.there.get(SHARED)
    columns = sorted(given.vectors | given.samples)
    if has is None or has.shape[1] != len(columns):
        return rows
    return rows | nested(PRESENT, {m: has[:, columns.index(m)].clone() for m in rows})


def usable_embeddings(replies: Replies, deposits: Mapping[int, Tree], size: int) -> dict[int, Tree]:
    """Return, by client, the embeddings z'_T (n, size) of the deposited rows. Wrong shapes are left out."""
    result = {}
    for k in replies:
        student: Tree = replies[k].student
        had = deposits.get(k, {})
        if student and all(m in had and z.shape == (len(had[m]), size) for m, z in student.items()):
            result[k] = student
    return result


def logged(replies: Replies, server_losses: list[float]) -> dict[str, float]:
    """Return the numbers of a round to log: means over the clients that have a shareable modality."""
    messages: list[Any] = [part.message for part in replies.parts]
    parts = [message for message in messages if message.student]
    if not parts:
        return {}
    names = {"local_loss": "loss_local"}
    aligned = [part for part in parts if part.params]
    means = {ours: float(torch.cat([getattr(p, name) for p in parts]).mean()) for name, ours in names.items()}
    if aligned:
        means["alignment"] = float(torch.cat([part.alignment for part in aligned]).mean())
    if parts[0].probe:
        means["teacher_accuracy"] = float(torch.cat([p.probe[SHARED] for p in parts]).mean())
    return means | {"loss_server": sum(server_losses) / max(len(server_losses), 1)}
