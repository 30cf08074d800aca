"""Modality dropout: rows of a training batch lose modalities at random (`[train] modality_dropout`; docs/missing.md).

Neverova et al., "ModDrop: Adaptive Multi-Modal Gesture Recognition", TPAMI 38(8), 2016.
"""

from dataclasses import replace

import torch

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.option_checks import share_of
from polyfed.training.optimisers import Train

_LOST, _KEPT = keys.key("modality dropout"), keys.key("modality kept")


def with_dropout(batch: Batch, train: Train) -> Batch:
    """Return a training batch whose rows have lost modalities. It runs under `vmap`.

    The draws depend on the key of the batch, the place of the row in it, and the name of the modality. A row that would
    lose all its modalities keeps one, which is drawn uniformly.

    Args:
        batch: the batch, with a key.
        train: the options of the training.
    """
    rates = {m: share_of(train.modality_dropout, m) for m in batch.x}
    if not any(rates.values()) or len(rates) == 1:
        return batch
    assert batch.key is not None, "only batches of a training lose modalities"
    size, device = batch.y.shape[0], batch.y.device
    lost, order = (keys.fold_in(batch.key, purpose) for purpose in (_LOST, _KEPT))
    whole = torch.ones_like(batch.rows, dtype=torch.bool)
    there = {m: batch.present.get(m, whole) for m in rates}
    kept = {m: there[m] & (keys.uniform(keys.fold_in(lost, keys.key(m)), size, device) >= rates[m]) for m in rates}
    draws = (keys.uniform(keys.fold_in(order, keys.key(m)), size, device) for m in rates)
    ranks = torch.stack([torch.where(there[m], draw, -1.0) for m, draw in zip(rates, draws, strict=True)])
    first, bare = ranks.argmax(0), ~torch.stack(list(kept.values())).any(0)
    kept = {m: kept[m] | (bare & there[m] & (first == place)) for place, m in enumerate(rates)}
    x = {m: torch.where(kept[m].view(-1, *(1,) * (value.dim() - 1)), value, 0.0) for m, value in batch.x.items()}
    return replace(batch, x=x, present={**batch.present, **kept})
