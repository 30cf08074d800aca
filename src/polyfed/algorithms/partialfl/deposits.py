"""Checks what PartialFL's clients send, and computes the values that a round logs.

A client deposits rows at the server: it sends the rows of its shareable modalities, and the server keeps them. Later,
the client returns embeddings of these rows. This module checks the deposited rows and the returned embeddings.
"""

from collections.abc import Mapping
from typing import Any

import torch

from polyfed.algorithms.partialfl.messages import Deposit
from polyfed.core.tree import SHARED, Tree, nested
from polyfed.federation.replies import Replies

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
    found = {}
    for k in replies:
        student: Tree = replies[k].student
        had = deposits.get(k, {})
        if student and all(m in had and z.shape == (len(had[m]), size) for m, z in student.items()):
            found[k] = student
    return found


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
