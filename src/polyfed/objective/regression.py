"""`Regression`: one or several numbers for each row. `base.py` explains the shape letters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.option_checks import POSITIVE
from polyfed.data.columns import Columns
from polyfed.objective import ranking, sentiment
from polyfed.objective.base import UNDEFINED, Objective, not_counts, summed
from polyfed.objective.classification import check_length, check_weights
from polyfed.objective.multi_label import known_of
from polyfed.objective.report import Estimate, Z, around, mean_of
from polyfed.objective.targets import as_matrix, in_words, with_targets

MOMENTS = 8
"""Entries for each target: the number of known rows, and the sums of y, p, y^2, p^2, y p, |p - y| and (p - y)^2. Here y
is the target and p the prediction."""

REST = 2
"""Further sums: the sum of the losses, and their weight."""


@dataclass(frozen=True, kw_only=True)
class Regression(Objective):
    """One or several numbers for each row, float32 (N,) or (N, T), or int64 (N,). NaN marks an unknown target.

    The model predicts `(y - shift) / scale`. The loss compares the model's output with targets that are scaled in the
    same way. All metrics are in the unit of the original targets.

    Attributes:
        error: the loss of each known target: the `square` of the error, the `absolute` error, or the `huber` loss.
        delta: threshold of the Huber loss, in units of the model's output, `(y - shift) / scale`: quadratic below,
            linear above.
        shift: number that is subtracted from the targets, one or one for each. By default a simulation takes the mean,
            over the rows that train, of each target that is far from the outputs of a new model, unless [data]
            standardise is false; a deployment, which has no statistics over all clients, takes 0.
        scale: number by which the shifted targets are divided, such as their standard deviation, one or one for each;
            by default as for `shift`.
        target_weights: weight of each target in the loss; empty for 1.
        report: `sentiment` adds Acc-7, Acc-2 and F1 as in papers on CMU-MOSI and CMU-MOSEI, for one target from -3 to
            3.
    """

    NAME: ClassVar[str] = "regression"
    SCORE: ClassVar[str] = "mae"
    PAIRS: ClassVar[bool] = True
    BEST: ClassVar[str] = "mae"
    RISING: ClassVar[bool] = False

    error: Literal["square", "absolute", "huber"] = "square"
    delta: Annotated[float, POSITIVE] = 1.0
    shift: float | tuple[float, ...] | None = None
    scale: float | tuple[float, ...] | None = None
    target_weights: tuple[float, ...] = ()
    report: Literal["none", "sentiment"] = "none"

    def __post_init__(self) -> None:
        """Check that the options are in range; see `Objective`."""
        super().__post_init__()
        check_weights("target_weights", self.target_weights)
        for option, least in (("shift", -math.inf), ("scale", 0.0)):
            value = getattr(self, option)
            if any(not (math.isfinite(number) and number > least) for number in numbers_of(value)):
                words = "finite" if option == "shift" else "above 0 and finite"
                raise RecipeError(f"[task] {option} = {value}: must be {words}", ("task", option))

    @override
    def prepared(self, columns: Columns) -> Columns:
        if not columns.label.is_floating_point() and columns.class_names is not None:
            names = ", ".join(map(repr, columns.class_names[:5]))
            raise DataError(
                f"data '{columns.name}': [task] name = 'regression' needs numbers, and the labels are classes with the "
                f"names {names}. Set [task] name = 'classification', or 'ordinal' for ordered levels, or give numbers"
            )
        targets = as_matrix(columns.label)
        if self.report == "sentiment":
            known = targets[~targets.isnan()]
            if targets.shape[1] != 1 or bool((known.abs() > 3).any()):
                raise DataError(
                    f"data '{columns.name}': [task] report = 'sentiment' is for one target from -3 to 3; the labels "
                    f"are {in_words(columns.label)}, up to {float(known.abs().max()):g}. Leave it out"
                )
        return with_targets(columns, targets)

    @override
    def label_shape(self, size: int) -> tuple[int, ...]:
        return (size,)

    @override
    def num_outputs(self, size: int) -> int:
        return size

    @override
    def check_size(self, size: int) -> None:
        check_length("target_weights", self.target_weights, size, "targets")
        for option in ("shift", "scale"):
            if isinstance(value := getattr(self, option), tuple):
                check_length(option, value, size, "targets")

    @override
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        known, y = known_of((batch.y - self._unit("shift", batch.y)) / self._unit("scale", batch.y))
        if self.target_weights:
            known = known * outputs.new_tensor(self.target_weights)
        if self.error == "huber":
            each = F.huber_loss(outputs, y, reduction="none", delta=self.delta)
        else:
            each = (F.mse_loss if self.error == "square" else F.l1_loss)(outputs, y, reduction="none")
        return (each * known).sum(-1), known.sum(-1)

    @override
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        """Return the sums from which `measured` computes the metrics.

        The result holds `MOMENTS` sums for each target, then `REST` sums for the mean loss. If `report` is `sentiment`,
        the counts of the sentiment metrics follow.
        """
        known, y = (part.to(torch.float64) for part in known_of(batch.y))
        p = self.predicted(outputs.to(torch.float64))
        gap = p - y
        parts = [torch.ones_like(y), y, p, y * y, p * p, y * p, gap.abs(), gap * gap]
        # a product with the mask, so that non-finite outputs make the sums NaN, and validation drops the reply
        moments = summed(torch.stack(parts, 1) * known.unsqueeze(1), batch).flatten()
        result = [moments, summed(torch.stack(self.row_losses(outputs, batch), 1), batch)]
        if self.report == "sentiment":
            result.append(summed(sentiment.counts(p[:, 0], y[:, 0]) * known, batch))
        return torch.cat(result)

    @override
    def measured(self, sums: Tensor) -> dict[str, float]:
        extra = sentiment.SIZE if self.report == "sentiment" else 0
        targets = (len(sums) - REST - extra) // MOMENTS
        values = sums.to(torch.float64).cpu()
        loss, weight = values[MOMENTS * targets : MOMENTS * targets + REST].tolist()
        each = [moment_scores(*column) for column in values[: MOMENTS * targets].view(MOMENTS, targets).T.tolist()]
        names = {name: None for one in each for name in one}
        means = {name: ranking.mean_defined([one.get(name) for one in each]) for name in names}
        result = {name: mean for name, mean in means.items() if mean is not None}
        if weight > 0:
            result["loss"] = loss / weight
        return result | (sentiment.measured(values[len(values) - extra :]) if extra and result else {})

    @override
    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        known, y = (part.to(torch.float64) for part in known_of(batch.y))
        return torch.stack([(self.predicted(outputs.double()) - y).abs() * known, known], 1)

    @override
    def row_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        known, y = (part.to(torch.float64) for part in known_of(batch.y))
        squares = (self.predicted(outputs.double()) - y).square() * known
        return {"mae": self.row_scores(outputs, batch), "rmse": torch.stack([squares, known], 1)}

    @override
    def visible(self, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
        known = (~y.isnan()).sum(0)
        hidden = (known > 0) & (known < least)
        return torch.full((len(y),), len(y) >= least), torch.where(hidden, torch.nan, y)

    @override
    def group_sizes(self, batch: Batch) -> Tensor:
        return batch.sum((~batch.y.isnan()).reshape(len(batch.y), -1).to(torch.float32))

    @override
    def own_shape(self, size: int) -> tuple[int, ...]:
        return (MOMENTS * size + REST + (sentiment.SIZE if self.report == "sentiment" else 0),)

    @override
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        extra = sentiment.SIZE if self.report == "sentiment" else 0
        targets = (len(sums) - REST - extra) // MOMENTS
        n, y, p, yy, pp, yp, gap, square = sums[: MOMENTS * targets].double().cpu().view(MOMENTS, targets)
        if flaw := not_counts(n, num_rows) or not_counts(sums[len(sums) - extra :], num_rows):
            return flaw
        slack = 1 + 1e-6  # for rounding
        pairs = ((y, n, yy), (p, n, pp), (yp, yy, pp), (gap, n, square))  # the inequality of Cauchy and Schwarz
        if any(bool((a * a > b * c * slack + 1e-9).any()) or bool((c < 0).any()) for a, b, c in pairs):
            return "holds sums that no numbers have"
        return not_counts(torch.cat([gap, sums[MOMENTS * targets : MOMENTS * targets + REST].cpu()]), float("inf"))

    @override
    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return `sums`, and four numbers for each target: the sum of (p - y)^4, and `pair_sums`.

        The interval of the RMSE follows from the first, and the C-index from the others.
        """
        known, y = (part.to(torch.float64) for part in known_of(batch.y))
        fourth = (self.predicted(outputs.to(torch.float64)) - y) ** 4 * known
        pairs = [
            ranking.pair_sums(batch.y[some, target].cpu(), outputs[some, target].cpu())
            for target, some in enumerate((~batch.y.isnan()).T)
        ]
        more = torch.stack(pairs, 1).flatten().to(fourth.device)
        return torch.cat([self.sums(outputs, batch).double(), summed(fourth, batch), more])

    def _site_parts(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `site_sums` into `sums`, the fourth powers (T,), and the pairs (3, T)."""
        extra = sentiment.SIZE if self.report == "sentiment" else 0
        targets = (len(sums) - REST - extra) // (MOMENTS + 4)
        rest = sums[len(sums) - 4 * targets :].view(4, targets)
        return sums[: len(sums) - 4 * targets], rest[0], rest[1:]

    @override
    def site_flaw(self, sums: Tensor, rows: float) -> str:
        own, fourth, pairs = self._site_parts(sums)
        right, of, spread = pairs
        if bool((right > of).any()) or bool((of > rows * (rows - 1) / 2).any()):
            return "counts more pairs than its rows have"
        return self.flaw(own, rows) or not_counts(torch.cat([fourth, right, of, spread]), float("inf"))

    @override
    def estimates(self, sums: Tensor, shares: Sequence[float] = (), draws: int = 0) -> dict[str, Estimate]:
        """Return the metrics of `measured`; MAE, RMSE, Pearson's r and R^2 with intervals, as means over targets.

        The intervals are normal, for the RMSE by the delta method, and for r by Fisher's transformation. That of R^2
        takes the variance of the targets as known. The C-index is over pairs of rows of one site; see `pair_sums`.
        """
        own, fourth, pairs = self._site_parts(sums.cpu())
        values = self.measured(own)
        moments = own[: MOMENTS * len(fourth)].view(MOMENTS, -1).T.tolist()
        each = [_intervals(moment, float(power)) for moment, power in zip(moments, fourth, strict=True)]
        result = {name: Estimate(value) for name, value in values.items()}
        for name in ("mae", "rmse", "pearson", "r2"):
            known = [one[name] for one in each if name in one]
            if name in result and (mean := mean_of(known)) is not None:
                result[name] = mean
        of_targets = [
            around(right / of, Z * math.sqrt(spread) / of, low=0.0, high=1.0)
            for right, of, spread in pairs.T.tolist()
            if of
        ]
        if (mean := mean_of(of_targets)) is not None:
            result["c_index_within_sites"] = mean
        return result

    @property
    @override
    def exact(self) -> tuple[str, ...]:
        return ("c_index",)

    @override
    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        each = []
        for target in range(outputs.shape[1]):
            known = ~batch.y[:, target].isnan()
            each.append(ranking.c_index(batch.y[known, target], outputs[known, target]))
        mean = ranking.mean_defined(each)
        return [UNDEFINED if mean is None else mean]

    @override
    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the predicted values (n, T) in the unit of the targets."""
        return outputs * self._unit("scale", outputs) + self._unit("shift", outputs)

    def _unit(self, option: str, like: Tensor) -> Tensor | float:
        """Return the shift or the scale: one number, or a tensor (T,) of the type and on the device of `like`."""
        value = getattr(self, option)
        if isinstance(value, tuple):
            return like.new_tensor(value)
        return {"shift": 0.0, "scale": 1.0}[option] if value is None else value

    @override
    def decided(self, predicted: Tensor) -> Tensor:
        return predicted


def numbers_of(value: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """Return the numbers that an option of one or several numbers holds."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def _intervals(moments: Sequence[float], fourth: float) -> dict[str, Estimate]:
    """Return metrics of one target with their intervals; see `Regression.estimates`."""
    n, y, _, yy, _, _, gap, square = moments
    found = moment_scores(*moments)
    if n < 4 or "mae" not in found:
        return {}
    mse, spread = square / n, max(fourth / n - (square / n) ** 2, 0.0)
    half = Z * math.sqrt(spread / n)
    made = {"mae": around(found["mae"], Z * math.sqrt(max(mse - (gap / n) ** 2, 0.0) / n), low=0.0)}
    made["rmse"] = around(found["rmse"], half / (2 * found["rmse"]) if found["rmse"] else 0.0, low=0.0)
    if "pearson" in found:
        r = min(max(found["pearson"], -1 + 1e-12), 1 - 1e-12)
        low, high = (math.tanh(math.atanh(r) + sign * Z / math.sqrt(n - 3)) for sign in (-1, 1))
        made["pearson"] = Estimate(found["pearson"], low, high)
    if "r2" in found:
        made["r2"] = around(found["r2"], half / (yy / n - (y / n) ** 2), high=1.0)
    return made


def moment_scores(
    n: float, y: float, p: float, yy: float, pp: float, yp: float, gap: float, square: float
) -> dict[str, float]:
    """Return the metrics of one target from its sums (`MOMENTS`). Undefined metrics are left out.

    `pearson` is the correlation. `concordance` is 2 cov / (var y + var p + (mean y - mean p)^2). Its covariance and its
    variances divide by n, not by n - 1. Source: Lin, "A concordance correlation coefficient to evaluate
    reproducibility", Biometrics 45 (1989).
    """
    if n <= 0:
        return {}
    result = {"mae": gap / n, "rmse": (square / n) ** 0.5}
    cov, var_y, var_p = yp / n - y * p / n**2, yy / n - (y / n) ** 2, pp / n - (p / n) ** 2
    floor_y, floor_p = 1e-12 * yy / n, 1e-12 * pp / n  # below these values, a variance is only rounding error
    if var_y > floor_y and var_p > floor_p:
        result["pearson"] = cov / (var_y * var_p) ** 0.5
    if var_y > floor_y or var_p > floor_p:
        result["concordance"] = 2 * cov / (var_y + var_p + (y / n - p / n) ** 2)
    if var_y > floor_y:
        result["r2"] = 1.0 - square / n / var_y
    return result
