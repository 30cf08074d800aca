"""`MultiLabel`: T labels with the values 0 and 1 for each row. `base.py` explains the shape letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import DataError
from polyfed.core.option_checks import INSIDE
from polyfed.data.columns import Columns
from polyfed.objective import ranking, report
from polyfed.objective.base import UNDEFINED, Objective, by_target, not_counts, summed
from polyfed.objective.classification import check_length, check_weights
from polyfed.objective.targets import as_matrix, in_words, with_targets

COUNTS = 4
"""Counts for each label: true positives, false positives, false negatives and true negatives."""

REST = 4
"""Further sums: rows with a known label, those of them with only correct labels, summed losses, and their weight."""

OWN = COUNTS + 2 * ranking.BINS
"""Entries for each label in a client's own sums: `COUNTS`, and histograms of positive and of negative rows."""


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Objective):
    """Several labels of 0 and 1 for each row, float32 (N, T). NaN marks an unknown label.

    Class numbers int64 (N,) of two classes are read as a single label with the values 0 and 1. The loss is the binary
    cross-entropy, averaged over all known labels.

    Attributes:
        threshold: a label is predicted if its probability is above this number.
        positive_weights: weight of each label's positive rows in the training loss; empty for 1.
    """

    NAME: ClassVar[str] = "multi-label"
    SCORE: ClassVar[str] = "accuracy"
    BEST: ClassVar[str] = "macro_f1"

    threshold: Annotated[float, INSIDE] = 0.5
    positive_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that the options are in range; see `Objective`."""
        super().__post_init__()
        check_weights("positive_weights", self.positive_weights)

    @override
    def prepared(self, columns: Columns) -> Columns:
        label, where = columns.label, f"data '{columns.name}': [task] name = 'multi-label' needs labels of 0 and 1"
        if not label.is_floating_point() and columns.num_classes != 2:
            raise DataError(
                f"{where}; the labels are {in_words(label)}, one of {columns.num_classes} classes a row. Set [task] "
                "name = 'classification', or save an array (N, T) with a column of 0 and 1 for each label"
            )
        targets = as_matrix(label)
        known = targets[~targets.isnan()]
        if odd := known[(known != 0) & (known != 1)].tolist():
            raise DataError(f"{where}, and NaN where a label is unknown; {odd[0]:g} is among them. [task] regression?")
        return with_targets(columns, targets)

    @override
    def label_shape(self, size: int) -> tuple[int, ...]:
        return (size,)

    @override
    def num_outputs(self, size: int) -> int:
        return size

    @override
    def check_size(self, size: int) -> None:
        check_length("positive_weights", self.positive_weights, size, "labels a row")

    @override
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        known, y = known_of(batch.y)
        weight = outputs.new_tensor(self.positive_weights) if self.positive_weights else None
        each = F.binary_cross_entropy_with_logits(outputs, y, pos_weight=weight, reduction="none")
        return (each * known).sum(-1), known.sum(-1)

    @override
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        known, y = known_of(batch.y)
        yes = (outputs.sigmoid() > self.threshold).to(y.dtype)
        parts = [y * yes, (1 - y) * yes, y * (1 - yes), (1 - y) * (1 - yes)]
        counts = summed(torch.stack(parts, 1) * known.unsqueeze(1), batch).flatten()
        right = (((yes == y) | (known == 0)).all(-1)).to(y.dtype)
        some = (known.sum(-1) > 0).to(y.dtype)
        loss, weight = self.row_losses(outputs, batch)
        result = torch.cat([counts, summed(torch.stack([some, some * right, loss, weight], 1), batch)])
        # non-finite logits make the sums NaN, so that reply validation drops the reply as diverged
        broken = batch.sum((~outputs.isfinite()).any(-1).to(torch.float32)) > 0
        return torch.where(broken, torch.nan, result)

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        labels = (len(sums) - REST) // COUNTS
        tp, fp, fn, tn = sums[: COUNTS * labels].view(COUNTS, labels).to(torch.float64).cpu()
        rows, right, loss, weight = sums[COUNTS * labels :].tolist()
        known = float((tp + fp + fn + tn).sum())
        if not known:
            return {}
        seen = 2 * tp + fp + fn > 0
        f1 = 2 * tp[seen] / (2 * tp + fp + fn)[seen]
        return {
            "accuracy": float((tp + tn).sum()) / known,
            "exact_match": right / rows,
            "macro_f1": float(f1.mean()) if len(f1) else 0.0,
            "micro_f1": float(2 * tp.sum() / (2 * tp + fp + fn).sum().clamp(min=1.0)),
            "loss": loss / weight,
        }

    @override
    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        known, y = known_of(batch.y)
        right = ((outputs.sigmoid() > self.threshold).to(y.dtype) == y).to(y.dtype) * known
        return torch.stack([right.sum(-1), known.sum(-1)], 1).double().unsqueeze(-1)

    @override
    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        known, y = known_of(batch.y)
        real = known.bool() if batch.ok is None else known.bool() & batch.ok.unsqueeze(-1)
        bins = [ranking.histogram(outputs, real & (y == side)).flatten() for side in (1, 0)]
        return torch.cat([self.sums(outputs, batch), *bins])

    @override
    def group_sizes(self, batch: Batch) -> Tensor:
        return batch.sum(torch.cat([batch.y == 1, batch.y == 0], 1).to(torch.float32))

    @override
    def own_shape(self, size: int) -> tuple[int, ...]:
        return (OWN * size + REST,)

    @override
    def own_score(self, sums: Tensor, num_rows: float) -> float | None:
        return self.measured(_parts(sums)[0]).get(self.SCORE)

    @override
    def pooled(self, sums: Tensor) -> dict[str, float]:
        own, bins = _parts(sums)
        return self.measured(own) | _ranked(bins.cpu())

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        own, bins = _parts(sums)
        counts, losses = torch.cat([own[:-2], bins.flatten()]), own[-2:]
        # a loss has no upper bound, but it cannot be negative
        return not_counts(counts, num_rows) or not_counts(losses, float("inf"))

    @property
    @override
    def exact(self) -> tuple[str, ...]:
        return ("auroc", "average_precision")

    @override
    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        result = []
        for metric in (ranking.c_index, ranking.average_precision):
            each = []
            for label in range(outputs.shape[1]):
                known = ~batch.y[:, label].isnan()
                each.append(metric(batch.y[known, label], outputs[known, label]))
            mean = ranking.mean_defined(each)
            result.append(UNDEFINED if mean is None else mean)
        return result

    @override
    def visible(self, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
        sizes = torch.stack([(y == side).sum(0) for side in (0, 1)])
        hidden = ((sizes > 0) & (sizes < least)).any(0)
        return torch.ones(len(y), dtype=torch.bool), torch.where(hidden, torch.nan, y)

    @override
    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        bins = report.histograms(*self.ranked_rows(outputs, batch))
        return torch.cat([self.sums(outputs, batch).double(), bins.flatten()])

    @override
    def ranked_rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        real = torch.ones_like(batch.y, dtype=torch.bool) if batch.ok is None else batch.ok.unsqueeze(-1)
        return outputs, real & (batch.y == 1), real & (batch.y == 0)

    @override
    def score_bins(self, sums: Tensor) -> Tensor:
        return self._site_parts(sums)[1]

    def _site_parts(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        labels = (len(sums) - REST) // (COUNTS + 2 * report.BINS)
        own = COUNTS * labels + REST
        return sums[:own], sums[own:].view(2, labels, report.BINS)

    @override
    def support(self, sums: Tensor) -> list[int]:
        return [int(number) for number in self._site_parts(sums)[1][0].sum(-1).tolist()]

    @override
    def site_flaw(self, sums: Tensor, rows: float) -> str:
        own, bins = self._site_parts(sums)
        return not_counts(torch.cat([own[:-2], bins.sum(-1).flatten()]), rows)

    @override
    def estimates(
        self, sums: Tensor, shares: Sequence[float] = report.UNKNOWN, draws: int = report.DRAWS
    ) -> dict[str, report.Estimate]:
        own, bins = self._site_parts(sums.cpu())
        values = self.measured(own)
        if not values:
            return {}
        result = {name: report.Estimate(value) for name, value in values.items()}
        counts = own[:-REST].view(COUNTS, -1).T
        single_shares = [
            report.wilson(float(tp + tn), float(tp + fp + fn + tn))
            for tp, fp, fn, tn in counts
            if known(tp, fp, fn, tn)
        ]
        rows, right = own[-REST : -REST + 2].tolist()
        result["exact_match"] = report.wilson(right, rows)
        single = report.mean_of(single_shares)
        assert single is not None, "a label is known"
        result["accuracy"] = report.around(
            values["accuracy"],
            max(single.value - (single.low or 0.0), (single.high or 0.0) - single.value),
            0.0,
            0.0,
            1.0,
        )
        return result | report.ranked(bins, shares, draws)

    @override
    def group_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        known, y = known_of(batch.y)
        right = ((outputs.sigmoid() > self.threshold).to(y.dtype) == y).to(y.dtype) * known
        return torch.stack([batch.sum(right.sum(-1)), batch.sum(known.sum(-1))]).double()

    @override
    def group_score(self, sums: Tensor, rows: float) -> float | None:
        return float(sums[0] / sums[1]) if float(sums[1]) > 0 else None

    @override
    def decided(self, predicted: Tensor) -> Tensor:
        """Return labels of 0 and 1, int64 (n, T), according to `threshold`."""
        return (predicted.sigmoid() > self.threshold).to(torch.int64)

    @override
    def answers(self, predicted: Tensor, names: Sequence[str] | None) -> dict[str, list[Any]]:
        chances = by_target("probability", predicted.double().sigmoid(), names)
        return super().answers(predicted, names) | chances


def known(*counts: Tensor) -> bool:
    """Return whether a label with these counts is known in any row."""
    return bool(sum(counts) > 0)


def known_of(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask of known targets (0 or 1, in the targets' type), and the targets with unknown ones set to 0."""
    unknown = y.isnan()
    # replaced before any arithmetic: a NaN would reach the gradient even with weight 0
    return (~unknown).to(y.dtype), torch.where(unknown, torch.zeros_like(y), y)


def _parts(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Split the result of `own_sums` into its two parts: the result of `sums`, and the histograms (2, T, BINS)."""
    labels = (len(sums) - REST) // OWN
    own = COUNTS * labels + REST
    return sums[:own], sums[own:].view(2, labels, ranking.BINS)


def _ranked(bins: Tensor) -> dict[str, float]:
    """Return three values from histograms (2, T, BINS): AUROC, its largest possible error, and average precision."""
    areas = [ranking.auroc_of(*pair) for pair in bins.unbind(1)]
    known = [area for area in areas if area is not None]
    result = {}
    if known:
        result = {"auroc": sum(a for a, _ in known) / len(known), "auroc_error": sum(e for _, e in known) / len(known)}
    precision = ranking.mean_defined([ranking.precision_of(*pair) for pair in bins.unbind(1)])
    return result | ({} if precision is None else {"average_precision": precision})
