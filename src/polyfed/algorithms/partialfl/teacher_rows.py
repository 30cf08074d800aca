"""Functions for the teachers that the server sends, and for the rows that devices have deposited at the server.

A row's teacher is the server model's embedding of this row. The functions select the rows of a batch that have a
teacher, and build a dataset from the rows that a device deposited. For control experiments, they also replace the
teachers by meaningless vectors.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.partialfl.messages import PRESENT
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, under
from polyfed.federation.federation import Federation
from polyfed.training import ClientData
from polyfed.training.prototypes import masked_mean


def shared_rows(batch: Batch, shared: tuple[str, ...]) -> Tree:
    """Return what a client deposits for one batch: samples (B, ...) by modality, with zeros where one is missing.

    If the client lacks a modality for some rows, `present` (B, M) marks which row has which modality. The M modalities
    are in alphabetical order.
    """
    there = {m: batch.present[m] for m in shared if m in batch.present}
    rows = {m: batch.x[m] for m in shared}
    for m, has in there.items():
        rows[m] = torch.where(has.view(-1, *(1,) * (rows[m].dim() - 1)), rows[m], torch.zeros_like(rows[m]))
    if not there:
        return rows
    everywhere = torch.ones_like(batch.y, dtype=torch.bool)
    has = torch.stack([there.get(m, everywhere) for m in sorted(shared)], 1)
    return rows | {PRESENT: has.to(torch.float32)}


def deposited(deposit: Tree, client: int, fed: Federation) -> ClientData | None:
    """Return a dataset, held by the server, with the rows that a client deposited; None if it deposited no rows."""
    there = {m: has.bool() for m, has in under(PRESENT, deposit).items()}
    rows = {name: value for name, value in deposit.items() if not name.startswith(f"{PRESENT}.")}
    return fed.server_data(rows, present=there, number=client) if rows else None


def without_meaning(z_T: Tree, deposit: Tree, placebo: str, fed: Federation, client: int) -> Tree:
    """Return teacher vectors (n, d) without information about their rows, for a control experiment.

    The placebo `noise` replaces each teacher vector by a random vector of the same length. The placebo `shuffled`
    exchanges the teacher vectors between rows at random.
    """
    out = {}
    for m, z in z_T.items():
        key = keys.key(fed.seed, "placebo", client, fed.round, m)
        if placebo == "noise":
            noise = F.normalize(keys.normal(key, tuple(z.shape), z.device), dim=-1)
            out[m] = noise * z.norm(dim=-1, keepdim=True)
            continue
        there = under(PRESENT, deposit).get(m)
        rows = torch.arange(len(z)) if there is None else there.nonzero().flatten().cpu()
        out[m] = z.clone()
        out[m][rows] = z[rows[keys.permutation(key, len(rows))]]
    return out


def paired(batch: Batch, modality: str, read: Tensor | None = None) -> Tensor | None:
    """Return the rows that enter a contrastive term, bool (B,); None means all rows.

    A row enters the term if it is not padding, has the modality, and can be read by the student's model.
    """
    masks = [mask for mask in (batch.ok, batch.present.get(modality), read) if mask is not None]
    return torch.stack(masks).all(0) if masks else None


def readable(batch: Batch, modalities: tuple[str, ...]) -> Tensor | None:
    """Return the rows that have one of these modalities, bool (B,); None means all rows."""
    own = [m for m in modalities if m in batch.x]
    if any(m not in batch.present for m in own):
        return None
    return torch.stack([batch.present[m] for m in own]).any(0)


def rows_with(batch: Batch, z_T: Tree) -> Batch:
    """Return the batch, in which rows that lack every shareable modality are marked as padding."""
    there = readable(batch, tuple(z_T))
    if there is None:
        return batch
    ok = there if batch.ok is None else there & batch.ok
    return Batch(x=batch.x, y=batch.y, rows=batch.rows, ok=ok, present=batch.present, key=batch.key)


def mean_alignment(near: Mapping[str, Tensor], batch: Batch, read: Tensor | None) -> Tensor:
    """Return a 0-dim tensor: the mean of the cosines (B,) over modalities and over the rows that have a teacher."""
    if read is None and not batch.present.keys() & near.keys():
        return batch.mean(torch.stack([*near.values()]).mean(0))
    masks = {m: paired(batch, m, read) for m in near}
    means = [batch.mean(value) if (ok := masks[m]) is None else masked_mean(value, ok) for m, value in near.items()]
    return torch.stack(means).mean()


def nearest_mean_accuracy(z_T: Tree, data: ClientData, num_classes: int) -> Tensor:
    """Return how well a device's teachers separate the classes of its rows, as an accuracy (a 0-dim tensor).

    The function uses the first shareable modality, and computes its class means from the rows with even positions. It
    assigns each row with an odd position to the class mean with the largest cosine. The accuracy counts only rows whose
    class has a mean. It is therefore meaningful only if a device has several rows of a class.
    """
    first = next(iter(z_T))
    z = F.normalize(z_T[first], dim=-1)
    width = z.shape[1]

    def members(batch: Batch, even: bool) -> Tensor:
        rows = paired(batch, first)
        side = (batch.rows % 2 == 0) == even
        return side if rows is None else side & rows

    def add(total: Tensor, batch: Batch) -> Tensor:
        one_hot = F.one_hot(batch.y, num_classes).to(z.dtype) * members(batch, True).unsqueeze(-1)
        return total + one_hot.T @ z[batch.rows]

    sums = data.fold(add, torch.zeros(num_classes, width, device=z.device))
    known = (sums != 0).any(-1)
    means = F.normalize(sums, dim=-1)

    def hit(counts: Tensor, batch: Batch) -> Tensor:
        scores = (z[batch.rows] @ means.T).masked_fill(~known, float("-inf"))
        asked = members(batch, False) & known[batch.y]
        right = asked & (scores.argmax(-1) == batch.y)
        return counts + torch.stack([right.sum(), asked.sum()]).to(counts.dtype)

    hits: Tensor = data.fold(hit, torch.zeros(2, device=z.device))
    return hits[0] / hits[1].clamp(min=1)
