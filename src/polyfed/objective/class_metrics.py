"""Metrics of classes, computed from a confusion matrix (C, C). Rows are true classes, columns are predicted classes.

Matrices are added over batches, clients and folds, so no metric is an average of averages. docs/evaluation.md defines
the metrics.
"""

import torch
from torch import Tensor

TOP_K = 5
"""The k of the metric `top5`."""


def confusion(logits_BC: Tensor, y_B: Tensor, ok_B: Tensor | None, num_classes: int) -> Tensor:
    """Return the confusion matrix (C, C) of a batch, float32, without padding. This function runs under vmap.

    Args:
        logits_BC: logits of each row.
        y_B: true classes.
        ok_B: bool, False for padding rows, or None if there are no padding rows.
        num_classes: C.
    """
    truth = torch.nn.functional.one_hot(y_B, num_classes).to(torch.float32)
    predicted = torch.nn.functional.one_hot(logits_BC.argmax(-1), num_classes).to(torch.float32)
    if ok_B is not None:
        truth = truth * ok_B.unsqueeze(-1)
    return truth.T @ predicted


def top_k_hits(logits_BC: Tensor, y_B: Tensor, ok_B: Tensor | None) -> Tensor:
    """Return, in float32, the number of rows whose true class has one of the k largest logits.

    Of classes with equal logits, the one with the smaller number comes first.

    Args:
        logits_BC: logits of each row.
        y_B: true classes.
        ok_B: bool, False for padding rows; None if there are no padding rows.
    """
    own = logits_BC.gather(-1, y_B.unsqueeze(-1))
    classes = torch.arange(logits_BC.shape[-1], device=logits_BC.device)
    # written with `not >=`, so that rows with NaN logits are not hits
    ahead = ~(own >= logits_BC) | ((logits_BC == own) & (classes < y_B.unsqueeze(-1)))
    hit = ahead.sum(-1) < min(TOP_K, logits_BC.shape[-1])
    return (hit if ok_B is None else hit & ok_B).sum().to(torch.float32)


def accuracy(matrix: Tensor) -> float:
    """Return the share of correct predictions, or 0 for an empty matrix."""
    return float(matrix.diagonal().sum() / matrix.sum().clamp(min=1.0))


def uar(matrix: Tensor) -> float:
    """Return the unweighted average recall over the classes that are the true class of at least one evaluated row."""
    support = matrix.sum(1)
    seen = support > 0
    return float((matrix.diagonal()[seen] / support[seen]).mean()) if bool(seen.any()) else 0.0


def macro_f1(matrix: Tensor) -> float:
    """Return the mean F1 over all classes that occur as a label or a prediction (scikit-learn's `average="macro"`)."""
    total = matrix.sum(0) + matrix.sum(1)
    seen = total > 0
    return float((2 * matrix.diagonal()[seen] / total[seen]).mean()) if bool(seen.any()) else 0.0


def summary(matrix: Tensor, top5_hits: Tensor, loss_sum: Tensor) -> dict[str, float]:
    """Return the `global` group of result.json from sums over a test set; `top5` only for more than five classes.

    Args:
        matrix: confusion matrix (C, C).
        top5_hits: number of rows whose true class has one of the five largest logits; see `top_k_hits`.
        loss_sum: sum of the rows' cross-entropies.
    """
    rows = matrix.sum().clamp(min=1.0)
    top5 = {"top5": float(top5_hits / rows)} if len(matrix) > TOP_K else {}
    scores = {"accuracy": accuracy(matrix), "uar": uar(matrix), "macro_f1": macro_f1(matrix)}
    return scores | top5 | {"loss": float(loss_sum / rows)}


def weighted_kappa(matrix: Tensor) -> float | None:
    """Return Cohen's quadratically weighted kappa (Psychological Bulletin 70, 1968), or None if kappa is undefined."""
    counts = matrix.to(torch.float64)
    levels = torch.arange(len(counts), dtype=torch.float64)
    penalty = (levels.unsqueeze(1) - levels).square()
    by_chance = torch.outer(counts.sum(1), counts.sum(0)) / counts.sum().clamp(min=1.0)
    worst = float((penalty * by_chance).sum())
    return 1.0 - float((penalty * counts).sum()) / worst if worst > 0 else None


def level_error(matrix: Tensor) -> float:
    """Return the mean distance between the true and the predicted level, or 0 for an empty matrix."""
    counts = matrix.to(torch.float64)
    levels = torch.arange(len(counts), dtype=torch.float64)
    return float(((levels.unsqueeze(1) - levels).abs() * counts).sum() / counts.sum().clamp(min=1.0))


def weighted_f1(matrix: Tensor) -> float:
    """Return the mean F1 over classes, weighted by the rows of each class (scikit-learn's `average="weighted"`)."""
    counts = matrix.to(torch.float64)
    support, total = counts.sum(1), counts.sum(0) + counts.sum(1)
    f1 = 2 * counts.diagonal() / total.clamp(min=1.0)
    return float((f1 * support).sum() / support.sum().clamp(min=1.0))
