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
from polyfed.objective.report import WITHIN, Estimate, moments, of_moments

RANKS = (1, 5, 10)
"""The k of recall at k."""

REST = 3
"""Further sums: the sum of reciprocal ranks, the sum of the losses, and their weight."""

SHARES = (*(f"recall{k}" for k in RANKS), "mrr")
"""The metrics that are a mean over queries, in the order of their sums."""

ROW = 1 + len(SHARES) + 2
"""Numbers of a row: its queries, the sum of each of `SHARES` over them, and the last two of `_of_rows`."""


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
        result: dict[str, Tensor] = {}
        for m in model.modalities:
            if m in z:
                unit = F.normalize(model.unimodal_logits(w, z, m, batch, "zero"), dim=-1)
                there = batch.present.get(m)
                result[m] = unit if there is None else torch.where(there.unsqueeze(-1), unit, torch.zeros_like(unit))
        some = next(iter(result.values()))
        return torch.stack([result.get(m, torch.zeros_like(some)) for m in model.modalities], 1)

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
        result = self._of_rows(outputs, batch).sum(0)[: 1 + len(SHARES)]
        losses = torch.stack([part.sum() for part in self.row_losses(outputs, batch)]).to(torch.float64)
        broken = batch.sum((~outputs.isfinite()).flatten(1).any(-1).to(torch.float32)) > 0
        return torch.where(broken, torch.nan, torch.cat([result, losses]))

    def _of_rows(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what each row adds to the sums, float64 (B, ROW).

        The last two numbers are the rows that are less similar to a query than its partner (equal ones count half), and
        all rows but the partner, over the row's queries. Their ratio is the AUROC of the partner against the others.
        """
        result = torch.zeros(len(outputs), ROW, dtype=torch.float64, device=outputs.device)
        for query, other, both in _pairs(outputs, batch):
            scores = query @ other.mT
            own = scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            # ties count against the query, so that a model with equal embeddings for all rows has no hits
            better = ((scores >= own) & both.unsqueeze(0)).sum(-1)
            above = ((scores > own) & both.unsqueeze(0)).sum(-1)
            rank = better.clamp(min=1)
            hits = [(rank <= k).to(torch.float64) for k in RANKS]
            others = (both.sum() - 1).to(torch.float64).expand(len(rank))
            farther = others - 0.5 * (above + better - 1).to(torch.float64)
            entries = [torch.ones_like(hits[0]), *hits, 1.0 / rank.to(torch.float64), farther, others]
            result = result + torch.stack(entries, 1) * both.unsqueeze(-1)
        return result

    @override
    def row_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        queries, *values, farther, others = self._of_rows(outputs, batch).unbind(1)
        pairs = {name: (value, queries) for name, value in zip(SHARES, values, strict=True)}
        result = pairs | {WITHIN: (farther, others), "loss": self.row_losses(outputs, batch)}
        return {name: torch.stack(pair, 1).double().unsqueeze(-1) for name, pair in result.items()}

    @override
    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return `sums`, and the `moments` of the rows' numbers (`_of_rows`), from which the intervals follow."""
        rows = self._of_rows(outputs, batch)
        some = (rows[:, :1] > 0).to(rows.dtype)
        return torch.cat([self.sums(outputs, batch), moments(torch.cat([some, rows], 1))])

    @override
    def site_flaw(self, sums: Tensor, rows: float) -> str:
        own, (units, *totals) = sums[: 1 + len(RANKS) + REST], sums[1 + len(RANKS) + REST :][: 1 + ROW].tolist()
        same = torch.allclose(own[: 1 + len(SHARES)], sums.new_tensor(totals[:-2]), rtol=1e-9)
        if units > rows or not same or not 0 <= totals[-2] <= totals[-1] or totals[-1] > totals[0] * max(rows - 1, 0):
            return "counts other queries than its rows have"
        return self.flaw(own, rows)

    @override
    def estimates(self, sums: Tensor, shares: Sequence[float] = (), draws: int = 0) -> dict[str, Estimate]:
        """Return the metrics of `measured`, and the AUROC of `_of_rows`, with intervals that take rows as independent.

        A query searches the rows of its own site, however many sites are added up.
        """
        told = sums[1 + len(RANKS) + REST :].cpu()
        products = told[1 + ROW :].view(ROW, ROW)
        result = {name: Estimate(value) for name, value in self.measured(sums[: 1 + len(RANKS) + REST]).items()}
        places = {name: (1 + place, 0) for place, name in enumerate(SHARES)} | {WITHIN: (ROW - 2, ROW - 1)}
        for name, pair in places.items():
            two = torch.tensor(pair)
            numbers = [float(told[0]), *told[1 + two].tolist(), *products[two][:, two].flatten().tolist()]
            if (one := of_moments(numbers, share=True, clusters=False)) is not None:
                result[name] = one
        return result

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        queries, *hits, reciprocal, loss, weight = sums.tolist()
        if not queries:
            return {}
        result = {f"recall{k}": hit / queries for k, hit in zip(RANKS, hits, strict=True)}
        return result | {"mrr": reciprocal / queries, "loss": loss / weight}

    @override
    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.row_metrics(outputs, batch)[self.SCORE]

    @override
    def own_shape(self, size: int) -> tuple[int, ...]:
        return (1 + len(RANKS) + REST,)

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        return not_counts(sums[:-2], float(sums[0])) or not_counts(sums[-2:], float("inf"))

    @override
    def outputs_shape(self, model: Model) -> tuple[int, ...]:
        return (len(model.modalities), self.dimension)

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
