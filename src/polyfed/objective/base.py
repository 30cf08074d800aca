"""`Objective`: the base class of the kinds of task, the section [task] of a recipe.

Shape letters: `B` rows of a batch, `T` targets, `C` classes, `O` outputs of the model, `S` sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.schema import check_ranges
from polyfed.core.tree import Tree
from polyfed.data.columns import Columns
from polyfed.model import Model

UNDEFINED = -1.0
"""Stands for an exact score that is undefined, such as the AUROC of a single class, because a message holds no NaN."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """What the model learns to predict.

    `size` is the number that the labels fix: the number of classes, or the number of targets. The federation agrees on
    it like on the shapes of the samples. All methods on outputs and batches run under `torch.func.vmap`.
    """

    NAME: ClassVar[str]
    SCORE: ClassVar[str]
    """The metric that stands for the others: of one modality alone, of each client, in curves."""
    BEST: ClassVar[str]
    """The validation metric by which the best round is chosen."""
    RISING: ClassVar[bool] = True
    """Whether a larger `SCORE` is better; `BEST` has the same direction."""
    OF_CLASSES: ClassVar[bool] = False
    """Whether labels are class numbers, so that a client may lack the last classes."""
    BY_MODALITY: ClassVar[bool] = False
    """Whether `outputs` are embeddings of single modalities, so that there is no output of the whole model."""
    WHOLE: ClassVar[bool] = False
    """Whether `sums` needs all rows of a client as one batch, because it compares rows with each other."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[task]", self)

    # labels and outputs

    @abstractmethod
    def prepared(self, columns: Columns) -> Columns:
        """The table with its labels in the form that this task uses.

        Raises:
            DataError: the labels do not fit the task.
        """

    @abstractmethod
    def label_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the label of a row: () for a class number, (T,) for targets."""

    @abstractmethod
    def num_outputs(self, size: int) -> int:
        """Width O of the model's output."""

    def check_size(self, size: int) -> None:  # noqa: B027  # most tasks have nothing to check
        """Check the options against the number of classes or targets.

        Raises:
            RecipeError: an option has another number of entries.
        """

    def outputs(self, model: Model, w: Tree, batch: Batch, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """What the loss reads: by default, the model's output (B, O).

        Args:
            model: the model.
            w: its parameters.
            batch: the rows.
            features: the result of `model.features`, if it is known already.
        """
        return model.logits(w, batch) if features is None else model.fuse(w, features, batch)

    # loss

    @abstractmethod
    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """For each row the sum of the losses of its known targets, and the sum of their weights: both (B,)."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss over the known targets of the real rows, a 0-dim tensor; 0 where no target is known."""
        values, weights = self.row_losses(outputs, batch)
        total = batch.sum(weights)
        return batch.sum(values) / torch.where(total > 0, total, torch.ones_like(total))

    # metrics

    @abstractmethod
    def sums(self, outputs: Tensor, batch: Batch, *, brief: bool = False) -> Tensor:
        """Sufficient statistics of the metrics (S,); those of several batches or clients are added.

        Args:
            outputs: what the model gave.
            batch: the rows, with their labels.
            brief: whether `SCORE` alone is wanted.
        """

    @abstractmethod
    def measured(self, sums: Tensor) -> dict[str, float]:
        """The metrics of some rows, from the sums over these rows; an undefined metric is left out."""

    def own_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """What a client reports of its own test rows: sums that are added over clients."""
        return self.sums(outputs, batch)

    @abstractmethod
    def own_shape(self, size: int) -> tuple[int, ...]:
        """Shape of `own_sums`."""

    def own_score(self, sums: Tensor, num_rows: float) -> float | None:
        """A client's `SCORE`, from its own sums and its number of test rows; None if it is undefined."""
        return self.measured(sums).get(self.SCORE)

    def pooled(self, sums: Tensor) -> dict[str, float]:
        """The metrics of all clients' own test rows together, from the total of their sums."""
        return self.measured(sums)

    @abstractmethod
    def flaw(self, sums: Tensor, num_rows: float) -> str:
        """What is impossible in the own sums of a client that reports `num_rows` test rows; empty if nothing is."""

    @property
    def exact(self) -> tuple[str, ...]:
        """Names of the metrics that need all rows at once. They are measured on the server's rows only."""
        return ()

    def exact_scores(self, outputs: Tensor, batch: Batch) -> list[float]:
        """The metrics named in `exact`, from all rows as one batch; `UNDEFINED` where one is undefined."""
        return []

    def confusion(self, sums: Tensor) -> Tensor | None:
        """The confusion matrix (C, C) in the result of `sums`; None if the task has no classes."""
        return None

    # predictions

    def predicted(self, outputs: Tensor) -> Tensor:
        """What `Run.predict` returns for these outputs. Default: the outputs."""
        return outputs

    @abstractmethod
    def decided(self, predicted: Tensor) -> Tensor:
        """The decision for each row, from the result of `predicted`: a class, labels of 0 and 1, values."""


def summed(values: Tensor, batch: Batch) -> Tensor:
    """Sum of `values` (B, ...) over the real rows in float64, in which sums of squares keep their digits."""
    return batch.sum(values.to(torch.float64))


def not_counts(sums: Tensor, rows: float) -> str:
    """What is impossible in numbers of rows, or of targets of rows: empty, or "counts ..." for a text."""
    if bool((sums < 0).any()):
        return "counts fewer than 0 rows"
    return f"counts {float(sums.max()):g} of {rows:g} test rows" if len(sums) and float(sums.max()) > rows else ""
