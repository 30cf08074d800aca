"""`Classification`: one of C classes for each row, with cross-entropy loss. `base.py` explains the shape letters."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

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
        class_weights: weight of each class in the training loss, which is then a weighted mean as in PyTorch. If empty,
            all weights are 1. The reported loss of test rows is not weighted.
        ranking: whether to report AUROC and average precision on the server's rows. With two classes, both metrics are
            computed for class 1. With more classes, each class is compared with all others, and the mean over the
            classes is reported.
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

    def prepared(self, columns: Columns) -> Columns:
        """Return the table with its labels in the form that this objective uses; see `Objective.prepared`."""
        return as_classes(columns, self.NAME, "For such labels set [task] name = 'regression' or 'multi-label'")

    def num_outputs(self, size: int) -> int:
        """Return the number of classes, because there is one logit for each class."""
        return size

    def check_size(self, size: int) -> None:
        """Check the options against the number of classes or targets; see `Objective.check_size`."""
        check_length("class_weights", self.class_weights, size, "classes")

    @property
    def mixes_rows(self) -> str:
        """Why the loss is not a mean over rows: if `class_weights` is set, it is a weighted mean; see `Objective`."""
        return "class_weights divide by the weights of the whole batch" if self.class_weights else ""

    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each row, and its weight; see `Objective.row_losses`."""
        if not self.class_weights:
            rows = F.cross_entropy(outputs, batch.y, reduction="none")
            return rows, torch.ones_like(rows)
        weights = outputs.new_tensor(self.class_weights)
        return F.cross_entropy(outputs, batch.y, weights, reduction="none"), weights[batch.y]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy, weighted by class if there are class weights."""
        return super().loss(outputs, batch) if self.class_weights else cross_entropy(outputs, batch)

    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        """Return the confusion matrix (C, C), the top-5 hits and the summed loss; only the matrix if `brief`."""
        matrix = matrices.confusion(outputs, batch.y, batch.ok, outputs.shape[-1]).flatten()
        if brief:
            return matrix
        rows = F.cross_entropy(outputs, batch.y, reduction="none")
        hits = matrices.top_k_hits(outputs, batch.y, batch.ok)
        return torch.cat([matrix, hits.reshape(1), batch.sum(rows).reshape(1)])

    def measured(self, sums: Tensor) -> dict[str, float]:
        """Return accuracy, UAR, macro-F1, top-5 accuracy for more than five classes, and the mean loss."""
        matrix = self.confusion(sums)
        if sums.numel() == matrix.numel():
            return {"accuracy": matrices.accuracy(matrix)}
        return matrices.summary(matrix, *sums[matrix.numel() :])

    def confusion(self, sums: Tensor) -> Tensor:
        """Return the confusion matrix (C, C) from the sums; see `Objective.confusion`."""
        size = int(sums.numel() ** 0.5)  # C^2, or C^2 + 2: smaller than (C + 1)^2 for C > 0
        return sums[: size * size].view(size, size)

    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return only the number of correct predictions, because a confusion matrix would reveal a client's labels."""
        right = (outputs.argmax(-1) == batch.y).to(torch.float32)
        # non-finite logits make the count NaN, so that reply validation drops the reply as diverged
        return batch.sum(torch.where(outputs.isfinite().all(-1), right, torch.nan))

    def flaw(self, sums: Tensor, num_rows: float) -> str:
        """Return why a client's own sums are impossible, or an empty text; see `Objective.flaw`."""
        return not_counts(sums.reshape(1), num_rows)

    @property
    def exact(self) -> tuple[str, ...]:
        """The names of the metrics that need all rows at once; see `Objective.exact`."""
        return ("auroc", "average_precision") if self.ranking else ()

    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        """Return AUROC and average precision, each class against the others."""
        share = outputs.double().softmax(-1)
        classes = [1] if share.shape[1] == 2 else range(share.shape[1])
        found = []
        for metric in (ranking.c_index, ranking.average_precision):
            each = [metric((batch.y == c).long(), share[:, c]) if bool((batch.y == c).any()) else None for c in classes]
            mean = ranking.mean_defined(each)
            found.append(UNDEFINED if mean is None else mean)
        return found

    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the confusion matrix (C, C), top-5 hits, sums of losses and squares, and histograms (2, K, BINS).

        With two classes, the histograms are those of class 1 (K = 1); with more, of each class against the others.
        """
        loss = F.cross_entropy(outputs.double(), batch.y, reduction="none")
        hits = matrices.top_k_hits(outputs, batch.y, batch.ok)
        matrix = matrices.confusion(outputs, batch.y, batch.ok, outputs.shape[-1]).double().flatten()
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        hot = batch.y.unsqueeze(-1) == classes
        real = torch.ones_like(hot) if batch.ok is None else batch.ok.unsqueeze(-1).expand_as(hot)
        read = slice(1, 2) if len(classes) == 2 else slice(None)
        scores = report.log_odds(outputs)[:, read]
        bins = report.histograms(scores, (hot & real)[:, read], (~hot & real)[:, read])
        moments = torch.stack([hits.double(), batch.sum(loss), batch.sum(loss.square())])
        found = torch.cat([matrix, moments, bins.flatten()])
        # non-finite logits make the sums NaN, so that reply validation drops the reply as diverged
        broken = batch.sum((~outputs.isfinite()).any(-1).to(torch.float32)) > 0
        return torch.where(broken, torch.nan, found)

    def score_bins(self, sums: Tensor) -> Tensor:
        """Return the histograms; see `Objective.score_bins`."""
        return self._site_parts(sums)[2]

    def _site_parts(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `site_sums` into the matrix, the three sums, and the histograms."""
        size = _classes_in(len(sums))
        rest = sums[size * size + 3 :].view(2, -1, report.BINS)
        return sums[: size * size].view(size, size), sums[size * size : size * size + 3], rest

    def site_matrix(self, sums: Tensor) -> Tensor:
        """Return the confusion matrix; see `OfClasses.site_matrix`."""
        return self._site_parts(sums)[0]

    def estimates(self, sums: Tensor) -> dict[str, report.Estimate]:
        """Return accuracy, UAR, macro-F1, top-5, loss, AUROC and average precision; see `Objective.estimates`."""
        matrix, (hits, loss, squares), bins = self._site_parts(sums.cpu())
        rows = float(matrix.sum())
        if not rows:
            return {}
        found = self.of_matrix(matrix, {"uar": matrices.uar, "macro_f1": matrices.macro_f1})
        if len(matrix) > matrices.TOP_K:
            found["top5"] = report.wilson(float(hits), rows)
        mean = float(loss) / rows
        spread = max(float(squares) / rows - mean * mean, 0.0)
        found["loss"] = report.around(mean, report.Z * (spread / rows) ** 0.5, low=0.0)
        return found | report.ranked(bins)

    def decided(self, predicted: Tensor) -> Tensor:
        """Return the class with the largest logit, int64 (n,)."""
        return predicted.argmax(-1)


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
        raise RecipeError(f"[task] {option} = {list(weights)}: must be numbers of 0 or more, and not all of them 0")


def check_length(option: str, weights: tuple[float, ...], size: int, what: str) -> None:
    """Check that there are as many weights as classes or targets.

    Raises:
        RecipeError: the numbers differ.
    """
    if weights and len(weights) != size:
        raise RecipeError(
            f"[task] {option} has {counted(len(weights), 'entry', 'entries')}, and the labels have {size} {what}"
        )
