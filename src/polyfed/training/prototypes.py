"""Class prototypes (the mean embeddings of the classes), and losses and ratios from distances to prototypes.

CMSFed, PMR and FedProto use class prototypes. PMR: Fan, Xu, Wang, Wang, Guo, "PMR: Prototypical Modal Rebalance for
Multimodal Learning", CVPR 2023. The pages docs/algorithms/cmsfed.md, fedpmr.md and fedproto.md give the equations.

A class is *active* if it has a prototype. Probabilities cover active classes only, and rows whose class is not active
do not count.

Shape letters: `B` rows, `C` classes, `D` width of an embedding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import SHARED, Tree
from polyfed.model.stand_ins import distances
from polyfed.training.client_data import ClientData

RATIO_LIMIT = 1e3
"""Imbalance ratios are clamped to [1 / limit, limit]."""

FLOOR = 1e-12
"""Smallest denominator of a ratio (docs/algorithms/conventions.md, Numerics)."""


@message
class Encoders(Message):
    """The encoders of the model, with which clients compute class means."""

    params: Tree = carries("parameters", part="encoders")


@dataclass(frozen=True)
class Prototypes:
    """The class prototypes of one modality.

    Attributes:
        mean: the prototype of each class, (C, D). It has no meaning for classes that are not active.
        active: which classes have a prototype, bool (C,).
    """

    mean: Tensor
    active: Tensor

    @classmethod
    def received(cls, mean_CD: Tensor) -> "Prototypes":
        """Make prototypes from a message (C, D), in which a row of zeros means that the class has no prototype."""
        return cls(mean_CD, (mean_CD != 0).any(-1))

    @property
    def sent(self) -> Tensor:
        """Return the prototypes (C, D) for a message, with zeros for classes that are not active."""
        return self.mean * self.active.unsqueeze(-1)

    @classmethod
    def of(cls, sums_CD: Tensor, counts_C: Tensor) -> "Prototypes":
        """Make prototypes from the sum of embeddings (C, D) and the number of rows (C,) of each class."""
        return cls(sums_CD / torch.where(counts_C > 0, counts_C, 1.0).unsqueeze(-1), counts_C > 0)

    def distances(self, z_BD: Tensor) -> Tensor:
        """Euclidean distance of every row to every prototype, (B, C); its gradient is finite even at distance 0."""
        return distances(z_BD, self.mean)

    def log_probabilities(self, z_BD: Tensor) -> Tensor:
        """Log softmax of the negative distances over the active classes, (B, C); -inf for other classes."""
        scores = (-self.distances(z_BD)).masked_fill(~self.active, float("-inf"))
        scores = torch.where(self.active.any(), scores, torch.zeros_like(scores))
        return torch.log_softmax(scores, -1)

    def own(self, z_BD: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log probability of each row's class, and whether this class is active, (B,) each.

        The log probability of an inactive class is 0.
        """
        there = self.active[y_B]
        log_p = self.log_probabilities(z_BD).gather(-1, y_B.unsqueeze(-1)).squeeze(-1)
        return torch.where(there, log_p, 0.0), there


def random_like(prototypes: Prototypes, key: int) -> Prototypes:
    """Return random vectors as a control. They have the same classes and the same lengths as the prototypes."""
    noise = keys.normal(key, tuple(prototypes.mean.shape), prototypes.mean.device)
    length = prototypes.mean.norm(dim=-1, keepdim=True)
    return Prototypes(torch.nn.functional.normalize(noise, dim=-1) * length, prototypes.active)


def at_length(z: Mapping[str, Tensor], length: float) -> dict[str, Tensor]:
    """Scale each embedding in the batches (B, D) of all modalities to the norm `length`. If it is 0, do not scale.

    Without scaling, training can lower the prototypical cross-entropy without limit by making the embeddings larger
    (docs/algorithms/cmsfed.md).
    """
    return {m: length * torch.nn.functional.normalize(value, dim=-1) if length else value for m, value in z.items()}


def there(batch: Batch, modality: str) -> Tensor:
    """Return which rows of a batch are not padding and have the modality, bool (B,)."""
    rows = torch.ones_like(batch.rows, dtype=torch.bool) if batch.ok is None else batch.ok
    return rows & batch.present[modality] if modality in batch.present else rows


def masked_mean(values_B: Tensor, rows_B: Tensor) -> Tensor:
    """Mean of values (B,) over the rows where `rows_B` is True; zero if there are no such rows."""
    return torch.where(rows_B, values_B, 0.0).sum() / rows_B.sum().clamp(min=1)


def cross_entropy(prototypes: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """Prototypical cross-entropy (PCE; CMSFed, Eq. 10 and 12): mean of -log p of each row's class, a 0-dim tensor."""
    log_p, active = prototypes.own(z_BD, batch.y)
    return -masked_mean(log_p, active & there(batch, modality))


def entropy(prototypes: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """Mean entropy of the prototype probabilities of a batch, a 0-dim tensor: PMR's regulariser."""
    log_p = prototypes.log_probabilities(z_BD)
    finite = torch.where(prototypes.active, log_p, 0.0)
    return masked_mean(-(finite.exp() * finite * prototypes.active).sum(-1), there(batch, modality))


def class_sums(z_BD: Tensor, batch: Batch, modality: str, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum of embeddings (C, D) and number of rows (C,) of each class in a batch."""
    member = torch.nn.functional.one_hot(batch.y, num_classes).to(z_BD.dtype)
    member = member * there(batch, modality).unsqueeze(-1)
    return member.T @ torch.where(there(batch, modality).unsqueeze(-1), z_BD, 0.0), member.sum(0)


def confidence(prototypes: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """For each modality, add up the probabilities of the rows' true classes over a batch; see `imbalance_ratio`.

    A row counts only if it has all of these modalities and its class is active in each of them. The sums are therefore
    comparable.
    """
    own = {name: prototypes[name].own(z[name], batch.y) for name in z}
    rows = torch.stack([active & there(batch, name) for name, (_, active) in own.items()]).all(0)
    return {name: torch.where(rows, log_p.exp(), 0.0).sum() for name, (log_p, _) in own.items()}


def imbalance_ratio(first: Tensor, second: Tensor) -> Tensor:
    """PMR Eq. 8: one modality's `confidence` divided by another's, clamped by `RATIO_LIMIT`. It is 1 if both are 0."""
    ratio = (first / second.clamp(min=FLOOR)).clamp(1 / RATIO_LIMIT, RATIO_LIMIT)
    return torch.where((first == 0) & (second == 0), torch.ones_like(ratio), ratio)


def modulation(ratio: Tensor, alpha: float, mode: str) -> Tensor:
    """PMR Eq. 10-11: the weight of the PCE of the weaker modality.

    Args:
        ratio: `imbalance_ratio` of the stronger modality to the weaker one.
        alpha: largest weight.
        mode: `clip` gives alpha * clip(ratio - 1, 0, 1), as in the paper. `hard` gives alpha where the ratio is above
            1, and otherwise 0, as in the released code.
    """
    if mode == "hard":
        return alpha * (ratio > 1).to(ratio.dtype)
    return alpha * (ratio - 1).clamp(0.0, 1.0)


def class_means(
    data: ClientData,
    features: Callable[[Batch], Mapping[str, Tensor]],
    sizes: Mapping[str, int],
    num_classes: int,
) -> tuple[dict[str, Prototypes], Tree]:
    """A client's own prototypes: the mean embedding of every class in every modality.

    The mean of a few rows reveals them, so classes with fewer rows than `data.min_rows_per_class` have no prototype and
    the count 0.

    Args:
        features: a function that returns the embeddings (B, D) of a batch, by modality.
        sizes: D, by modality.
        num_classes: C.

    Returns:
        The prototypes by modality, and the number of rows of each class, (C,), under `shared`. If some rows lack a
        modality, the second result also holds, under the name of the modality, the number of rows of each class that
        have it, (C,).
    """
    partial: set[str] = set()  # modalities that some rows lack; the same in every batch

    def step(sums: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        # `start` was made on the CPU, because the device of the rows becomes known only here
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
    sums = data.fold(step, start)
    few = data.min_rows_per_class
    rows = {name: torch.where(value < few, 0.0, value) for name, value in sums.items() if name not in sizes}
    counts = {SHARED: rows[SHARED]} | {m: rows[f"{m}.rows"] for m in sizes if m in partial}
    return {m: Prototypes.of(sums[m], rows[f"{m}.rows"]) for m in sizes}, counts


def gathered(
    old: Mapping[str, Prototypes],
    reports: Sequence[tuple[Tree, Tree]],
    rows: Sequence[int] = (),
    *,
    uniform: bool = False,
    robust: bool = False,
) -> dict[str, Prototypes]:
    """Update the global prototypes with the prototypes that clients sent.

    Args:
        old: the global prototypes so far, by modality.
        reports: for each client, what `class_means` returns, as a pair: the prototypes (C, D) by modality, and the
            numbers of rows.
        rows: the training rows that each client registered. A client that counts more rows than it has is weighted
            as if it had registered them all: its counts are scaled down to their sum. Empty if nobody can lie.
        uniform: whether every client that has rows of a class has the same weight. By default, the weight of a client
            is its number of rows of the class.
        robust: take the median of each coordinate over the clients that have rows of the class, each with the same
            weight, instead of the mean (Yin et al., ICML 2018, Definition 1). A minority of liars cannot move it out
            of the range of the others.

    Returns:
        The new prototypes by modality. A class that no client sent keeps its prototype, if it had one.
    """
    new = dict(old)
    for m in dict.fromkeys(m for means, _ in reports for m in means):
        counted = [(means.get(m), counts.get(m, counts.get(SHARED))) for means, counts in reports]
        if rows:
            counted = [(mean, _at_most(counts, most)) for (mean, counts), most in zip(counted, rows, strict=True)]
        owners = [(mean, counts) for mean, counts in counted if mean is not None and counts is not None]
        if not owners:  # means without numbers of rows cannot be weighted
            continue
        means, counts = (torch.stack(list(part)) for part in zip(*owners, strict=True))
        if robust:
            apart = torch.where((counts > 0).unsqueeze(-1), means, torch.nan)
            known = (counts > 0).any(0)
            # the two middle values of an even number, as `federation/aggregation.py` does for parameters
            middle = torch.nanquantile(apart.double(), 0.5, dim=0).to(means.dtype)
            fresh = Prototypes(torch.where(known.unsqueeze(-1), middle, 0.0), known)
        else:
            weights = (counts > 0).to(counts.dtype) if uniform else counts
            fresh = Prototypes.of((weights.unsqueeze(-1) * means).sum(0), weights.sum(0))
        if (before := old.get(m)) is None:
            new[m] = fresh
            continue
        mean = torch.where(fresh.active.unsqueeze(-1), fresh.mean, before.mean)
        new[m] = Prototypes(mean, before.active | fresh.active)
    return new


def _at_most(counts: Tensor | None, rows: int) -> Tensor | None:
    """Return numbers of rows by class, scaled down if their sum exceeds the rows that the client registered."""
    if counts is None or float(counts.sum()) <= rows:  # unchanged to the last bit for an honest client
        return counts
    return counts * (rows / counts.sum())
