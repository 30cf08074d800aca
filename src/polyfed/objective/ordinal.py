"""`Ordinal`: one of C ordered levels for each row. `base.py` explains the shape letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, RecipeError
from polyfed.data.columns import Columns
from polyfed.objective import class_metrics as matrices
from polyfed.objective import report
from polyfed.objective.base import OfClasses, not_counts, summed
from polyfed.objective.classification import check_length, check_weights
from polyfed.objective.targets import as_classes


@dataclass(frozen=True, kw_only=True)
class Ordinal(OfClasses):
    """One of the levels 0 < 1 < ... < C-1 for each row. Labels are int64 (N,), or whole numbers of a float type.

    The model has C-1 outputs, and output k predicts whether the level is above k. The loss is the mean binary
    cross-entropy of these outputs. The predicted level is the number of outputs that predict yes. Source: Niu, Zhou,
    Wang, Gao, Hua, "Ordinal Regression With Multiple Output CNN for Age Estimation", CVPR 2016, Eq. 4 to 6.

    Attributes:
        class_weights: weight of the rows of each level in the training loss; empty for 1.
    """

    NAME: ClassVar[str] = "ordinal"
    SCORE: ClassVar[str] = "mae"
    BEST: ClassVar[str] = "mae"
    RISING: ClassVar[bool] = False

    class_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that the options are in range; see `Objective`."""
        super().__post_init__()
        check_weights("class_weights", self.class_weights)

    @override
    def prepared(self, columns: Columns) -> Columns:
        if columns.words_sorted:
            names = ", ".join(map(repr, (columns.class_names or ())[:5]))
            raise DataError(
                f"data '{columns.name}': [task] name = 'ordinal' needs the order of the levels, and the labels are "
                f"words: {names}. Give all words from the lowest level to the highest: class_names=[...] in Python and "
                "in [data] of a table, --class-name WORD for each in `polyfed init`, or an array 'label_name' in an "
                ".npz. Or use an ordered pandas Categorical, or numbers from 0"
            )
        return as_classes(columns, self.NAME, "For such labels set [task] name = 'regression'")

    @override
    def num_outputs(self, size: int) -> int:
        return size - 1

    @override
    def check_size(self, size: int) -> None:
        check_length("class_weights", self.class_weights, size, "levels")
        if size < 2:
            raise RecipeError("[task] name = 'ordinal' needs two levels or more; the labels have one", ("task", "name"))

    @property
    @override
    def mixes_rows(self) -> str:
        return "class_weights divide by the weights of the whole batch" if self.class_weights else ""

    @override
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        levels = torch.arange(outputs.shape[-1], device=outputs.device)
        above = (batch.y.unsqueeze(-1) > levels).to(outputs.dtype)
        rows = F.binary_cross_entropy_with_logits(outputs, above, reduction="none").mean(-1)
        weights = outputs.new_tensor(self.class_weights)[batch.y] if self.class_weights else torch.ones_like(rows)
        return rows * weights, weights

    @override
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        size = outputs.shape[-1] + 1
        hot = [F.one_hot(level, size).to(torch.float64) for level in (batch.y, self.decided(outputs))]
        matrix = summed(hot[0].unsqueeze(2) * hot[1].unsqueeze(1), batch).flatten()
        # a loss that is not finite makes the sums NaN, so that reply validation drops the reply as diverged
        return torch.cat([matrix, summed(torch.stack(self.row_losses(outputs, batch), 1), batch)])

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        matrix, (loss, weight) = self.confusion(sums).cpu(), sums[-2:].tolist()
        if not bool(matrix.sum() > 0):
            return {}
        result = {"mae": matrices.level_error(matrix), "accuracy": matrices.accuracy(matrix)}
        result |= {"uar": matrices.uar(matrix), "macro_f1": matrices.macro_f1(matrix)}
        kappa = matrices.weighted_kappa(matrix)
        result |= {} if kappa is None else {"weighted_kappa": kappa}
        return result | ({"loss": loss / weight} if weight > 0 else {})

    @override
    def confusion(self, sums: Tensor) -> Tensor:
        size = int((len(sums) - 2) ** 0.5)
        return sums[:-2].view(size, size)

    @override
    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        gap = (self.decided(outputs) - batch.y).abs().double()
        return torch.stack([gap, torch.ones_like(gap)], 1).unsqueeze(-1)

    @override
    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        gap = (self.decided(outputs) - batch.y).abs().to(torch.float32)
        return batch.sum(torch.where(outputs.isfinite().all(-1), gap, torch.nan))

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        return not_counts(sums.reshape(1), float("inf"))

    @override
    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return `sums`, and for each question "is the level above k?" histograms of its logit, (2, C - 1, BINS)."""
        bins = report.histograms(*self.ranked_rows(outputs, batch))
        return torch.cat([self.sums(outputs, batch).double(), bins.flatten()])

    @override
    def ranked_rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        levels = torch.arange(outputs.shape[-1], device=outputs.device)
        above = batch.y.unsqueeze(-1) > levels
        real = torch.ones_like(above) if batch.ok is None else batch.ok.unsqueeze(-1).expand_as(above)
        return outputs, above & real, ~above & real

    @override
    def ranked_name(self, place: int, count: int, names: Sequence[str] | None) -> str:
        return f"above {super().ranked_name(place, count, names)}"

    @override
    def score_bins(self, sums: Tensor) -> Tensor:
        return self._site_parts(sums)[1]

    def _site_parts(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        size = 2
        while size * size + 2 + 2 * report.BINS * (size - 1) < len(sums):
            size += 1
        own = size * size + 2
        return sums[:own], sums[own:].view(2, size - 1, report.BINS)

    @override
    def site_matrix(self, sums: Tensor) -> Tensor:
        return self.confusion(self._site_parts(sums)[0])

    @override
    def estimates(
        self, sums: Tensor, shares: Sequence[float] = report.UNKNOWN, draws: int = report.DRAWS
    ) -> dict[str, report.Estimate]:
        own, bins = self._site_parts(sums.cpu())
        matrix = self.confusion(own)
        if not bool(matrix.sum() > 0):
            return {}
        metrics = {"mae": matrices.level_error, "uar": matrices.uar, "macro_f1": matrices.macro_f1}
        result = self.of_matrix(matrix, metrics | {"weighted_kappa": matrices.weighted_kappa}, draws)
        loss, weight = own[-2:].tolist()
        result |= {"loss": report.Estimate(loss / weight)} if weight > 0 else {}
        return result | report.ranked(bins, shares, draws)

    @override
    def decided(self, predicted: Tensor) -> Tensor:
        """Return the predicted level, int64 (n,)."""
        return (predicted > 0).sum(-1)

    @override
    def probabilities(self, predicted: Tensor) -> Tensor:
        # "above k" cannot be more probable than "above k - 1", which the model does not ensure
        above = predicted.double().sigmoid().cummin(-1).values
        edges = torch.cat([torch.ones_like(above[:, :1]), above, torch.zeros_like(above[:, :1])], 1)
        return edges[:, :-1] - edges[:, 1:]
