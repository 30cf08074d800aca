"""`Classification`: one of C classes for each row, with cross-entropy loss. `base.py` explains the shape letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, counted
from polyfed.data.columns import Columns
from polyfed.objective import class_metrics as matrices
from polyfed.objective import ranking, report
from polyfed.objective.base import UNDEFINED, OfClasses, not_counts
from polyfed.objective.targets import as_classes
from polyfed.training.losses import cross_entropy


@dataclass(frozen=True, kw_only=True)
class Classification(OfClasses):
    """One class for each row. Labels are int64 (N,), or whole numbers of a float type.

    Attributes:
        class_weights: weight of each class in the training loss, then a weighted mean as in PyTorch; empty for 1. The
            reported test loss is not weighted.
        ranking: whether to report AUROC and average precision on the server's rows: of class 1 with two classes, else
            the mean over classes, each against all others.
    """

    NAME: ClassVar[str] = "classification"
    SCORE: ClassVar[str] = "accuracy"
    BEST: ClassVar[str] = "macro_f1"

    class_weights: tuple[float, ...] = ()
    ranking: bool = False

    def __post_init__(self) -> None:
        """Check that the options are in range; see `Objective`."""
        super().__post_init__()
        check_weights("class_weights", self.class_weights)

    @override
    def prepared(self, columns: Columns) -> Columns:
        return as_classes(columns, self.NAME, "For such labels set [task] name = 'regression' or 'multi-label'")

    @override
    def num_outputs(self, size: int) -> int:
        return size

    @override
    def check_size(self, size: int) -> None:
        check_length("class_weights", self.class_weights, size, "classes")

    @property
    @override
    def mixes_rows(self) -> str:
        return "class_weights divide by the weights of the whole batch" if self.class_weights else ""

    @override
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.class_weights:
            rows = F.cross_entropy(outputs, batch.y, reduction="none")
            return rows, torch.ones_like(rows)
        weights = outputs.new_tensor(self.class_weights)
        return F.cross_entropy(outputs, batch.y, weights, reduction="none"), weights[batch.y]

    @override
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs, batch) if self.class_weights else cross_entropy(outputs, batch)

    @override
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        matrix = matrices.confusion(outputs, batch.y, batch.ok, outputs.shape[-1]).flatten()
        if brief:
            return matrix
        rows = F.cross_entropy(outputs, batch.y, reduction="none")
        hits = matrices.top_k_hits(outputs, batch.y, batch.ok)
        return torch.cat([matrix, hits.reshape(1), batch.sum(rows).reshape(1)])

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        matrix = self.confusion(sums)
        if sums.numel() == matrix.numel():
            return {"accuracy": matrices.accuracy(matrix)} if bool(matrix.sum() > 0) else {}
        return matrices.summary(matrix, *sums[matrix.numel() :])

    @override
    def confusion(self, sums: Tensor) -> Tensor:
        size = int(sums.numel() ** 0.5)  # C^2, or C^2 + 2: smaller than (C + 1)^2 for C > 0
        return sums[: size * size].view(size, size)

    @override
    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        right = (outputs.argmax(-1) == batch.y).double()
        return torch.stack([right, torch.ones_like(right)], 1).unsqueeze(-1)

    @override
    def row_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {}

    @override
    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        right = (outputs.argmax(-1) == batch.y).to(torch.float32)
        # non-finite logits make the count NaN, so that reply validation drops the reply as diverged
        return batch.sum(torch.where(outputs.isfinite().all(-1), right, torch.nan))

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        return not_counts(sums.reshape(1), num_rows)

    @property
    @override
    def exact(self) -> tuple[str, ...]:
        return ("auroc", "average_precision") if self.ranking else ()

    @override
    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        share = outputs.double().softmax(-1)
        classes = [1] if share.shape[1] == 2 else range(share.shape[1])
        result = []
        for metric in (ranking.c_index, ranking.average_precision):
            each = [metric((batch.y == c).long(), share[:, c]) if bool((batch.y == c).any()) else None for c in classes]
            mean = ranking.mean_defined(each)
            result.append(UNDEFINED if mean is None else mean)
        return result

    @override
    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the confusion matrix (C, C), top-5 hits, sums of losses and squares, and histograms (2, K, BINS).

        With two classes, the histograms are those of class 1 (K = 1); with more, of each class against the others.
        """
        loss = F.cross_entropy(outputs.double(), batch.y, reduction="none")
        hits = matrices.top_k_hits(outputs, batch.y, batch.ok)
        matrix = matrices.confusion(outputs, batch.y, batch.ok, outputs.shape[-1]).double().flatten()
        bins = report.histograms(*self.ranked_rows(outputs, batch))
        moments = torch.stack([hits.double(), batch.sum(loss), batch.sum(loss.square())])
        result = torch.cat([matrix, moments, bins.flatten()])
        # non-finite logits make the sums NaN, so that reply validation drops the reply as diverged
        broken = batch.sum((~outputs.isfinite()).any(-1).to(torch.float32)) > 0
        return torch.where(broken, torch.nan, result)

    @override
    def ranked_rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        hot = batch.y.unsqueeze(-1) == classes
        real = torch.ones_like(hot) if batch.ok is None else batch.ok.unsqueeze(-1).expand_as(hot)
        read = slice(1, 2) if len(classes) == 2 else slice(None)
        return report.log_odds(outputs)[:, read], (hot & real)[:, read], (~hot & real)[:, read]

    @override
    def ranked_name(self, place: int, count: int, names: Sequence[str] | None) -> str:
        return super().ranked_name(1 if count == 1 else place, count, names)

    @override
    def score_bins(self, sums: Tensor) -> Tensor:
        return self._site_parts(sums)[2]

    def _site_parts(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `site_sums` into the matrix, the three sums, and the histograms."""
        size = _classes_in(len(sums))
        rest = sums[size * size + 3 :].view(2, -1, report.BINS)
        return sums[: size * size].view(size, size), sums[size * size : size * size + 3], rest

    @override
    def site_matrix(self, sums: Tensor) -> Tensor:
        return self._site_parts(sums)[0]

    @override
    def estimates(
        self, sums: Tensor, shares: Sequence[float] = report.UNKNOWN, draws: int = report.DRAWS
    ) -> dict[str, report.Estimate]:
        matrix, (hits, loss, squares), bins = self._site_parts(sums.cpu())
        rows = float(matrix.sum())
        if not rows:
            return {}
        result = self.of_matrix(matrix, {"uar": matrices.uar, "macro_f1": matrices.macro_f1}, draws)
        if len(matrix) > matrices.TOP_K:
            result["top5"] = report.wilson(float(hits), rows)
        mean = float(loss) / rows
        spread = max(float(squares) / rows - mean * mean, 0.0)
        result["loss"] = report.around(mean, report.Z * (spread / rows) ** 0.5, low=0.0)
        return result | report.ranked(bins, shares, draws)

    @override
    def decided(self, predicted: Tensor) -> Tensor:
        """Return the class with the largest logit, int64 (n,)."""
        return predicted.argmax(-1)

    @override
    def probabilities(self, predicted: Tensor) -> Tensor:
        return predicted.double().softmax(-1)


def _classes_in(length: int) -> int:
    """Return the number of classes whose `site_sums` have this length."""
    size = 1
    while size * size + 3 + 2 * report.BINS * (1 if size == 2 else size) < length:
        size += 1
    return size


def check_weights(option: str, weights: tuple[float, ...]) -> None:
    """Check that no weight is negative, and that not all weights are 0.

    Raises:
        RecipeError: a weight is negative, or all weights are 0.
    """
    if weights and not (all(0 <= weight < float("inf") for weight in weights) and any(weights)):
        raise RecipeError(
            f"[task] {option} = {list(weights)}: must be numbers of 0 or more, and not all of them 0", ("task", option)
        )


def check_length(option: str, weights: tuple[float, ...], size: int, what: str) -> None:
    """Check that there are as many weights as classes or targets.

    Raises:
        RecipeError: the numbers differ.
    """
    if weights and len(weights) != size:
        raise RecipeError(
            f"[task] {option} has {counted(len(weights), 'entry', 'entries')}, and the labels have {size} {what}",
            ("task", option),
        )
