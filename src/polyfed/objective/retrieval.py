"""`Retrieval`: find the sample of one modality that belongs to a sample of another modality.

`base.py` explains the shape letters. In addition, `M` is the number of the model's modalities, and `D` is the width of
the common embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.option_checks import AT_LEAST_TWO, POSITIVE
from polyfed.core.tree import Tree
from polyfed.data.columns import Columns
from polyfed.model import Model
from polyfed.objective.base import Objective, not_counts

RANKS = (1, 5, 10)
"""The k of recall at k."""

REST = 3
"""Further sums: the sum of reciprocal ranks, the sum of the losses, and their weight."""


@dataclass(frozen=True, kw_only=True)
class Retrieval(Objective):
    """Retrieval of matching samples across modalities. Samples match if they are in the same row. Labels are not used.

    The embedding of a modality is the model's output with all other modalities set to zero, scaled to length 1. The
    loss is the symmetric cross-entropy of cosine similarities within a batch, averaged over all ordered pairs of
    modalities.

    The source of the loss is CLIP: Radford et al., "Learning Transferable Visual Models From Natural Language
    Supervision", ICML 2021, Fig. 3.

    Attributes:
        dimension: D, the width of the common embedding.
        temperature: number by which the similarities are divided; CLIP learns it, from 0.07 on.
    """

    NAME: ClassVar[str] = "retrieval"
    SCORE: ClassVar[str] = "recall1"
    BEST: ClassVar[str] = "recall1"
    LABELLED: ClassVar[bool] = False
    BY_MODALITY: ClassVar[bool] = True
    WHOLE: ClassVar[bool] = True

    dimension: Annotated[int, AT_LEAST_TWO] = 64
    temperature: Annotated[float, POSITIVE] = 0.07

    @override
    def prepared(self, columns: Columns) -> Columns:
        if len(columns.modalities) < 2:
            raise DataError(
                f"data '{columns.name}' has the modality '{next(iter(columns.modalities))}' only; [task] name = "
                "'retrieval' finds samples of one modality by another one. Name two in data.modalities"
            )
        if not columns.label.is_floating_point():
            return replace(columns, labelled=False)  # partitions by class may still use the class numbers
        label = torch.zeros(len(columns), dtype=torch.int64)
        return replace(columns, label=label, num_classes=1, class_names=None, labelled=False)

    @override
    def label_shape(self, size: int) -> tuple[int, ...]:
        return ()

    @override
    def num_outputs(self, size: int) -> int:
        return self.dimension

    @override
    def outputs(self, model: Model, w: Tree, batch: Batch, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return embeddings (B, M, D) of length 1, in the order of the model's modalities; 0 for missing modalities."""
        z = model.features(w, batch) if features is None else features
        found: dict[str, Tensor] = {}
        for m in model.modalities:
            if m in z:
                unit = F.normalize(model.unimodal_logits(w, z, m, batch, "zero"), dim=-1)
                there = batch.present.get(m)
                found[m] = unit if there is None else torch.where(there.unsqueeze(-1), unit, torch.zeros_like(unit))
        some = next(iter(found.values()))
        return torch.stack([found.get(m, torch.zeros_like(some)) for m in model.modalities], 1)

    @property
    @override
    def mixes_rows(self) -> str:
        return "its loss compares the rows of a batch with each other"

    @override
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each row's cross-entropy, summed over its pairs of modalities, and the number of pairs.

        The logits of a row are the similarities between its embedding in one modality and the embeddings of all rows of
        the batch in the other modality. The correct class is the position of the row itself.
        """
        value = weight = outputs.new_zeros(outputs.shape[0])
        for query, other, both in _pairs(outputs, batch):
            scores = (query @ other.mT / self.temperature).masked_fill(~both.unsqueeze(0), float("-inf"))
            scores = torch.where(both.unsqueeze(1), scores, torch.zeros_like(scores))  # rows without the pair
            row = torch.logsumexp(scores, -1) - scores.diagonal(dim1=-2, dim2=-1)
            value = value + torch.where(both, row, torch.zeros_like(row))
            weight = weight + both.to(value.dtype)
        return value, weight

    @override
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        found = torch.zeros(1 + len(RANKS) + 1, dtype=torch.float64, device=outputs.device)
        for query, other, both in _pairs(outputs, batch):
            scores = query @ other.mT
            own = scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            # ties count against the query, so that a model with equal embeddings for all rows has no hits
            better = (scores >= own) & both.unsqueeze(0)
            rank = better.sum(-1).clamp(min=1)
            hits = [(rank <= k).to(torch.float64) for k in RANKS]
            entries = torch.stack([torch.ones_like(hits[0]), *hits, 1.0 / rank.to(torch.float64)], 1)
            found = found + (entries * both.unsqueeze(-1)).sum(0)
        losses = torch.stack([part.sum() for part in self.row_losses(outputs, batch)]).to(torch.float64)
        broken = batch.sum((~outputs.isfinite()).flatten(1).any(-1).to(torch.float32)) > 0
        return torch.where(broken, torch.nan, torch.cat([found, losses]))

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        queries, *hits, reciprocal, loss, weight = sums.tolist()
        if not queries:
            return {}
        found = {f"recall{k}": hit / queries for k, hit in zip(RANKS, hits, strict=True)}
        return found | {"mrr": reciprocal / queries, "loss": loss / weight}

    @override
    def own_shape(self, size: int) -> tuple[int, ...]:
        return (1 + len(RANKS) + REST,)

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        return not_counts(sums[:-2], float(sums[0])) or not_counts(sums[-2:], float("inf"))

    @override
    def outputs_shape(self, model: Model) -> tuple[int, ...]:
        return (len(model.modalities), model.feature_size(model.modalities[0]))

    @override
    def decided(self, predicted: Tensor) -> Tensor:
        return predicted

    @override
    def answers(self, predicted: Tensor, names: Sequence[str] | None) -> dict[str, list[Any]]:
        raise RecipeError(
            "[task] name = 'retrieval' predicts embeddings, which match rows, and no answer for a single row. Use "
            "predict, which returns them",
            ("task", "name"),
        )


def _pairs(outputs: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return both embeddings (B, D) of each ordered pair of modalities, and which rows have both of them, bool (B,)."""
    there = outputs.square().sum(-1) > 0
    if batch.ok is not None:
        there = there & batch.ok.unsqueeze(-1)
    several = range(outputs.shape[1])
    return [(outputs[:, a], outputs[:, b], there[:, a] & there[:, b]) for a in several for b in several if a != b]
