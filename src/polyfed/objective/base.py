"""`Objective`: the base class of all objectives, which a recipe sets in its [task] section.

Shape letters: `B` rows of a batch, `T` targets, `C` classes, `O` outputs of the model, `S` sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.option_checks import check_ranges
from polyfed.core.tree import Tree
from polyfed.data.columns import Columns
from polyfed.model import Model
from polyfed.objective.report import DRAWS, UNKNOWN, Estimate, drawn, joint_shares, shown_groups, wilson

UNDEFINED = -1.0
"""Stands for an undefined exact score, such as the AUROC of a single class, because a message must not hold NaN."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """What the model learns to predict.

    The argument `size` is the number of classes or targets of the labels. It is the same for all clients, like the
    shapes of the samples. All methods that take outputs or batches run under `torch.func.vmap`.
    """

    NAME: ClassVar[str]
    SCORE: ClassVar[str]
    """The main metric. It is reported for single modalities, for each client, and in curves."""
    BEST: ClassVar[str]
    """The validation metric that determines the best round."""
    RISING: ClassVar[bool] = True
    """Whether a larger `SCORE` is better. `BEST` has the same direction."""
    OF_CLASSES: ClassVar[bool] = False
    """Whether labels are class numbers, so that a client may lack the last classes."""
    LABELLED: ClassVar[bool] = True
    """Whether the loss reads labels."""
    BY_MODALITY: ClassVar[bool] = False
    """Whether `outputs` returns embeddings of single modalities instead of an output of the whole model."""
    WHOLE: ClassVar[bool] = False
    """Whether `sums` needs all rows of a client as one batch, because it compares rows with each other."""
    PAIRS: ClassVar[bool] = False
    """Whether `site_sums` needs all rows of a site as one batch, because it compares rows with each other."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[task]", self)

    # labels and outputs

    @abstractmethod
    def prepared(self, columns: Columns) -> Columns:
        """Return the table with its labels converted to the form that this objective uses.

        Raises:
            DataError: the labels do not fit the objective.
        """

    @abstractmethod
    def label_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a row's label: () for a class number, (T,) for targets."""

    @abstractmethod
    def num_outputs(self, size: int) -> int:
        """Return the width O of the model's output."""

    def check_size(self, size: int) -> None:  # noqa: B027  # most tasks have nothing to check
        """Check the options against the number of classes or targets.

        Raises:
            RecipeError: an option has the wrong number of entries.
        """

    def outputs(self, model: Model, w: Tree, batch: Batch, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the input of the loss: by default, the model's output (B, O).

        Args:
            w: the model's parameters.
            features: the result of `model.features`, if you have already computed it.
        """
        return model.logits(w, batch) if features is None else model.fuse(w, features, batch)

    # loss

    @abstractmethod
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return two tensors (B,): for each row, the summed losses and the summed weights of its known targets."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the known targets of real rows, a 0-dim tensor; 0 if no target is known."""
        values, weights = self.row_losses(outputs, batch)
        total = batch.sum(weights)
        return batch.sum(values) / torch.where(total > 0, total, torch.ones_like(total))

    @property
    def mixes_rows(self) -> str:
        """A reason for error messages if a batch's loss is not the mean of its rows' losses; otherwise empty."""
        return ""

    # metrics

    @abstractmethod
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        """Return sums (S,) from which the metrics follow. The sums of several batches or clients are added up.

        Args:
            outputs: the model's outputs.
            batch: the rows, with their labels.
            brief: whether only `SCORE` is needed.
        """

    @abstractmethod
    def measured(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics of some rows, given the sums over these rows. Undefined metrics are left out."""

    def row_scores(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what each row adds to `SCORE`, float64 (B, 2, T), for T targets that have a score of their own.

        With the sums a_t of [:, 0, t] and b_t of [:, 1, t], the score is the mean of a_t / b_t over the targets.
        """
        raise NotImplementedError

    def row_metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what each row adds to the metrics by which two models are compared, each as in `row_scores`.

        A metric is the share or the mean a_t / b_t of one target, `rmse` its root. Metrics of class numbers are left
        out, because counts compare their models (`evaluation/site_scores.py`).
        """
        return {self.SCORE: self.row_scores(outputs, batch)}

    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sums that a client reports on its own test rows. The sums of all clients are added up."""
        return self.sums(outputs, batch)

    @abstractmethod
    def own_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of the result of `own_sums`."""

    def group_sizes(self, batch: Batch) -> Tensor:
        """Return the number of rows in each group for which `own_sums` has sums of its own, by default one group."""
        return batch.sum(torch.ones(len(batch.y), device=batch.y.device)).reshape(1)

    def own_score(self, sums: Tensor, num_rows: float) -> float | None:
        """Return a client's `SCORE` from its own sums and its number of test rows, or None if it is undefined."""
        return self.measured(sums).get(self.SCORE)

    def pooled(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics over the test rows of all clients together. `sums` is the total of their `own_sums`."""
        return self.measured(sums)

    @abstractmethod
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        """Return why the `own_sums` that a client reports are impossible for its `num_rows` test rows, or ""."""

    @property
    def exact(self) -> tuple[str, ...]:
        """Names of the metrics that need all rows at once. They are measured on the server's rows only."""
        return ()

    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        """Return the metrics named in `exact`, given all rows as one batch. Undefined metrics are `UNDEFINED`."""
        return []

    def confusion(self, sums: Tensor) -> Tensor | None:
        """Return the confusion matrix (C, C) from the result of `sums`, or None if the objective has no classes."""
        return None

    # reports of sites, in an evaluation job

    def visible(self, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
        """Hide the rows of groups that are too small to be shown, such as a class with fewer than `least` rows.

        Args:
            y: the labels of a site's rows.
            least: the smallest number of rows that may be shown.

        Returns:
            Which rows count, bool (n,), and their labels, in which NaN hides a single target.
        """
        return torch.full((len(y),), len(y) >= least), y

    def no_labels(self, size: int) -> Tensor:
        """Return the labels of no rows, (0, ...).

        Args:
            size: the number of classes or targets.
        """
        shape = self.label_shape(size)
        return torch.zeros(0, *shape) if shape else torch.zeros(0, dtype=torch.int64)

    def outputs_shape(self, model: Model) -> tuple[int, ...]:
        """Return the shape of the model's output of one row, as `outputs` returns it."""
        return (model.num_outputs,)

    def site_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sums of an evaluation job over some rows, float64 (S,). `estimates` explains them."""
        return self.sums(outputs, batch).double()

    def ranked_rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return scores (B, K) of K labels or classes, and which rows are positive and negative; None without any."""
        return None

    def ranked_name(self, place: int, count: int, names: Sequence[str] | None) -> str:
        """Return the name of one of the `count` labels or classes of `ranked_rows`, given those of the data, if any."""
        return str(place) if names is None else names[place]

    def joint_shares(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the `joint_shares` of the ranking metrics of some rows, (2,), or (0,) if there are no such metrics."""
        result = self.ranked_rows(outputs, batch)
        return torch.zeros(0, dtype=torch.float64) if result is None else joint_shares(*result)

    def estimates(self, sums: Tensor, shares: Sequence[float] = UNKNOWN, draws: int = DRAWS) -> dict[str, Estimate]:
        """Return the metrics of some rows with their intervals, given the `site_sums` of these rows.

        Args:
            shares: the `joint_shares` of the rows.
            draws: the number of bootstrap samples; without any, these intervals are left out.
        """
        return {name: Estimate(value) for name, value in self.measured(sums).items()}

    def score_bins(self, sums: Tensor) -> Tensor | None:
        """Return the histograms (2, K, BINS) in `site_sums`, which share its memory; None if it has none."""
        return None

    def support(self, sums: Tensor) -> list[int]:
        """Return the number of rows of each class or with each known label, given `site_sums`; empty without any."""
        return []

    def site_flaw(self, sums: Tensor, rows: float) -> str:
        """Return why `site_sums` of a site are impossible for its number of rows, or ""."""
        return ""

    def group_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sums for the `SCORE` of a group of rows, (W,)."""
        return self.own_sums(outputs, batch).double().reshape(-1)

    def group_score(self, sums: Tensor, rows: float) -> float | None:
        """Return the `SCORE` of a group of rows, given its `group_sums`."""
        return self.own_score(sums.reshape(()) if sums.numel() == 1 else sums, rows)

    # predictions

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the result of `Run.predict` for these outputs. By default, this is `outputs` unchanged."""
        return outputs

    @abstractmethod
    def decided(self, predicted: Tensor) -> Tensor:
        """Return the decision for each row from the result of `predicted`: a class, labels of 0 and 1, or values."""

    def answers(self, predicted: Tensor, names: Sequence[str] | None) -> dict[str, list[Any]]:
        """Return the decision for each row, and its probabilities, as the columns of a table.

        Args:
            predicted: the result of `predicted`, (n, ...).
            names: the names of the classes or targets, or None.

        Raises:
            RecipeError: the task has no answer for a single row.
        """
        return by_target("prediction", self.decided(predicted), names)


def by_target(what: str, values: Tensor, names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Return values (n, T) as a column for each target: `what`, and the target's name, or its number among several."""
    if names is None or len(names) != values.shape[1]:
        if values.shape[1] == 1:
            return {what: values[:, 0].tolist()}
        names = range(values.shape[1])  # type: ignore[assignment]
    return {f"{what}.{name}": values[:, place].tolist() for place, name in enumerate(names or ())}


class OfClasses(Objective):
    """Base class of objectives with class numbers as labels. A client reports one number, a sum over its test rows."""

    OF_CLASSES: ClassVar[bool] = True

    @override
    def label_shape(self, size: int) -> tuple[int, ...]:
        return ()

    @override
    def own_shape(self, size: int) -> tuple[int, ...]:
        return ()

    @override
    def own_score(self, sums: Tensor, num_rows: float) -> float | None:
        return float(sums) / num_rows if num_rows > 0 else None

    @override
    def visible(self, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
        sizes = torch.bincount(y)
        return shown_groups(sizes, least)[y], y

    @override
    def support(self, sums: Tensor) -> list[int]:
        matrix = self.site_matrix(sums)
        return [int(number) for number in matrix.sum(1).tolist()]

    def site_matrix(self, sums: Tensor) -> Tensor:
        """Return the confusion matrix (C, C) in `site_sums`."""
        raise NotImplementedError

    @override
    def site_flaw(self, sums: Tensor, rows: float) -> str:
        if bool((sums[:-1] < 0).any()):
            return "counts fewer than 0 rows"
        return "" if float(self.site_matrix(sums).sum()) == rows else "counts other rows than it says"

    def of_matrix(
        self, matrix: Tensor, metrics: Mapping[str, Callable[[Tensor], float | None]], draws: int
    ) -> dict[str, Estimate]:
        """Return metrics of a confusion matrix with their intervals: Wilson's for the accuracy, else the bootstrap."""
        result = {"accuracy": wilson(float(matrix.diagonal().sum()), float(matrix.sum()))}
        drawings = {name: drawn(matrix, metric, draws) for name, metric in metrics.items()}
        return result | {name: one for name, one in drawings.items() if one is not None}

    @override
    def pooled(self, sums: Tensor) -> dict[str, float]:
        return {}

    @abstractmethod
    def probabilities(self, predicted: Tensor) -> Tensor:
        """Return the probability of each class, float64 (n, C), from the result of `predicted`."""

    @override
    def answers(self, predicted: Tensor, names: Sequence[str] | None) -> dict[str, list[Any]]:
        chances = self.probabilities(predicted)
        called: Sequence[Any] = range(chances.shape[1]) if names is None else names
        result: dict[str, list[Any]] = {"prediction": [called[place] for place in self.decided(predicted).tolist()]}
        return result | {f"probability.{name}": chances[:, place].tolist() for place, name in enumerate(called)}


def summed(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` (B, ...) without padding, in float64, so that sums of squares stay precise."""
    return batch.sum(values.to(torch.float64))


def not_counts(sums: Tensor, rows: float) -> str:
    """Check that sums are possible numbers of rows or targets. Return what is wrong as a clause for an error, or ""."""
    if bool((sums < 0).any()):
        return "counts fewer than 0 rows"
    return f"counts {float(sums.max()):g} of {rows:g} test rows" if len(sums) and float(sums.max()) > rows else ""
