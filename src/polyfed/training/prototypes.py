"""Class prototypes: the mean feature of a class, and what can be read off the distances to them.

Used by CMSFed, PMR and FedProto (algorithms.md 2.2, 5.3, 5.5). PMR: Fan, Xu, Wang, Wang, Guo, "PMR: Prototypical Modal
Rebalance for Multimodal Learning", CVPR 2023.

A class is *active* when it has a prototype. Probabilities are over active classes only, a row whose own class is not
active does not count, and a class nobody has seen never becomes a point at the origin.

Shape letters: `B` rows, `C` classes, `D` entries of a feature.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree

RATIO_LIMIT = 1e3
"""Imbalance ratios are kept within [1 / limit, limit] (algorithms.md 2.9)."""

FLOOR = 1e-12
"""Smallest denominator of a ratio (algorithms.md 0.7)."""


@dataclass(frozen=True)
class Prototypes:
    """Prototypes of one modality.

    Attributes:
        mean: (C, D); meaningless where not active.
        active: bool (C,).
    """

    mean: Tensor
    active: Tensor

    @classmethod
    def received(cls, mean_CD: Tensor) -> "Prototypes":
        """From a message, in which a row of zeros says that a class has no prototype."""
        return cls(mean_CD, (mean_CD != 0).any(-1))

    @property
    def sent(self) -> Tensor:
        """For a message: (C, D), zeros where not active."""
        return self.mean * self.active.unsqueeze(-1)

    @classmethod
    def of(cls, sums_CD: Tensor, counts_C: Tensor) -> "Prototypes":
        """From sums of features and row counts per class."""
        return cls(sums_CD / torch.where(counts_C > 0, counts_C, 1.0).unsqueeze(-1), counts_C > 0)

    def distances(self, z_BD: Tensor) -> Tensor:
        """Euclidean distance of every row to every prototype, (B, C); its gradient at zero is finite."""
        difference = z_BD.unsqueeze(1) - self.mean
        return (difference.square().sum(-1) + 1e-12).sqrt()

    def log_probabilities(self, z_BD: Tensor) -> Tensor:
        """Log softmax over active classes of -distance, (B, C); -inf where not active."""
        scores = (-self.distances(z_BD)).masked_fill(~self.active, float("-inf"))
        # with no active class at all the softmax has no meaning, and must still not be a NaN under `where`
        scores = torch.where(self.active.any(), scores, torch.zeros_like(scores))
        return torch.log_softmax(scores, -1)

    def own(self, z_BD: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        """Log probability of each row's own class (B,), zero where that class is not active; and where it is."""
        there = self.active[y_B]
        log_p = self.log_probabilities(z_BD).gather(-1, y_B.unsqueeze(-1)).squeeze(-1)
        return torch.where(there, log_p, 0.0), there


def at_length(z: Mapping[str, Tensor], length: float) -> dict[str, Tensor]:
    """Features (B, D) by modality, all brought to one length; 0 leaves them as they are.

    PCE on raw features can fall by their mere growth, without end: see docs/algorithms/cmsfed.md.
    """
    return {m: length * torch.nn.functional.normalize(value, dim=-1) if length else value for m, value in z.items()}


def there(batch: Batch, modality: str) -> Tensor:
    """Rows that are real and have the modality, bool (B,)."""
    rows = torch.ones_like(batch.y, dtype=torch.bool) if batch.ok is None else batch.ok
    return rows & batch.present[modality] if modality in batch.present else rows


def masked_mean(values_B: Tensor, rows_B: Tensor) -> Tensor:
    """Mean over some rows; zero when there is none."""
    return torch.where(rows_B, values_B, 0.0).sum() / rows_B.sum().clamp(min=1)


def cross_entropy(prototypes: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """The prototypical cross-entropy (PCE; CMSFed Eq. 10, 12): mean of -log p of the own class."""
    log_p, active = prototypes.own(z_BD, batch.y)
    return -masked_mean(log_p, active & there(batch, modality))


def entropy(prototypes: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """Mean entropy of a batch's prototype probabilities: PMR's regulariser of the dominant modality."""
    log_p = prototypes.log_probabilities(z_BD)
    finite = torch.where(prototypes.active, log_p, 0.0)
    return masked_mean(-(finite.exp() * finite * prototypes.active).sum(-1), there(batch, modality))


def class_sums(z_BD: Tensor, batch: Batch, modality: str, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sums of features per class (C, D) and rows per class (C,) of a batch."""
    member = torch.nn.functional.one_hot(batch.y, num_classes).to(z_BD.dtype)
    member = member * there(batch, modality).unsqueeze(-1)
    return member.T @ torch.where(there(batch, modality).unsqueeze(-1), z_BD, 0.0), member.sum(0)


def confidence(prototypes: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Per modality the sum over a batch of the own class's probability: what the imbalance ratio is made of.

    Only rows that have all of these modalities, and a prototype in each, count: a ratio compares like with like.
    """
    own = {name: prototypes[name].own(z[name], batch.y) for name in z}
    rows = torch.stack([active & there(batch, name) for name, (_, active) in own.items()]).all(0)
    return {name: torch.where(rows, log_p.exp(), 0.0).sum() for name, (log_p, _) in own.items()}


def imbalance_ratio(first: Tensor, second: Tensor) -> Tensor:
    """PMR Eq. 8: a modality's sum of confidences over another's, within `RATIO_LIMIT`; 1 where nothing was counted."""
    ratio = (first / second.clamp(min=FLOOR)).clamp(1 / RATIO_LIMIT, RATIO_LIMIT)
    return torch.where((first == 0) & (second == 0), torch.ones_like(ratio), ratio)


def modulation(ratio: Tensor, alpha: float, mode: str) -> Tensor:
    """PMR Eq. 10-11, the weight of the weak modality's PCE, for the strong modality's ratio over it.

    `clip`: alpha * clip(ratio - 1, 0, 1), the paper; `hard`: alpha wherever ratio > 1, the released code.
    """
    if mode == "hard":
        return alpha * (ratio > 1).to(ratio.dtype)
    return alpha * (ratio - 1).clamp(0.0, 1.0)


def class_means(
    fold: Callable[..., Any],
    features: Callable[[Batch], Mapping[str, Tensor]],
    sizes: Mapping[str, int],
    num_classes: int,
) -> tuple[dict[str, Prototypes], Tree]:
    """A client's own prototypes: the mean feature of every class, per modality.

    Args:
        fold: a view's `fold`.
        features: vectors (B, D) by modality of a batch.
        sizes: D by modality.
        num_classes: C.

    Returns:
        Prototypes by modality, and rows per class (C,): under `shared`, and by itself for a modality that rows lack.
    """
    partial: set[str] = set()  # which modalities rows can lack is a fact of the table, the same in every batch

    def step(sums: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        # the start is made before any row is seen, so only here it is known on which device rows live
        z, after = features(batch), {name: value.to(batch.y.device) for name, value in sums.items()}
        for m in sizes:
            partial.update({m} & batch.present.keys())
            more, rows = class_sums(z[m], batch, m, num_classes)
            after[m], after[f"{m}.rows"] = after[m] + more, after[f"{m}.rows"] + rows
        labels = torch.nn.functional.one_hot(batch.y, num_classes).to(torch.float32)
        after[SHARED] = after[SHARED] + batch.sum(labels)
        return after

    start = {m: torch.zeros(num_classes, size) for m, size in sizes.items()}
    start |= {f"{m}.rows": torch.zeros(num_classes) for m in sizes} | {SHARED: torch.zeros(num_classes)}
    sums = fold(step, start)
    counts = {SHARED: sums[SHARED]} | {m: sums[f"{m}.rows"] for m in sizes if m in partial}
    return {m: Prototypes.of(sums[m], sums[f"{m}.rows"]) for m in sizes}, counts


def gathered(
    old: Mapping[str, Prototypes], reports: Sequence[tuple[Tree, Tree]], momentum: float = 0.0, *, uniform: bool = False
) -> dict[str, Prototypes]:
    """Global prototypes after some clients reported theirs.

    Args:
        old: before.
        reports: per client, prototypes (C, D) by modality and class counts as `class_means` gives them.
        momentum: share of the old prototype where a class was known before and is reported again.
        uniform: every client that holds a class counts the same, instead of by its rows.

    Returns:
        By modality; a class that nobody reported keeps its prototype, or stays without one.
    """
    new = dict(old)
    for m in dict.fromkeys(m for means, _ in reports for m in means):
        counted = ((means.get(m), counts.get(m, counts.get(SHARED))) for means, counts in reports)
        owners = [(mean, counts) for mean, counts in counted if mean is not None and counts is not None]
        if not owners:  # means that come without counts cannot be weighed
            continue
        weights = torch.stack([(counts > 0).to(counts.dtype) if uniform else counts for _, counts in owners])
        sums = (weights.unsqueeze(-1) * torch.stack([means for means, _ in owners])).sum(0)
        fresh = Prototypes.of(sums, weights.sum(0))
        if (before := old.get(m)) is None:
            new[m] = fresh
            continue
        blended = momentum * before.mean + (1 - momentum) * fresh.mean
        mean = torch.where(before.active.unsqueeze(-1), blended, fresh.mean)
        mean = torch.where(fresh.active.unsqueeze(-1), mean, before.mean)
        new[m] = Prototypes(mean, before.active | fresh.active)
    return new
