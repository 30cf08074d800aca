"""Metrics of classes, all computed from a confusion matrix (C, C): rows are the true, columns the predicted classes.

Matrices are added over batches, clients and folds, so no metric is an average of averages. Definitions:
docs/evaluation.md.
"""

import torch
from torch import Tensor

TOP_K = 5
"""The k of the metric `top5`."""


def confusion(logits_BC: Tensor, y_B: Tensor, ok_B: Tensor | None, num_classes: int) -> Tensor:
    """Confusion matrix (C, C) of a batch, float32, without padding. Runs under vmap.

    Args:
        logits_BC: logits of each row.
        y_B: true classes.
        ok_B: which rows are not padding, bool; None if none is padded.
        num_classes: C.
    """
    truth = torch.nn.functional.one_hot(y_B, num_classes).to(torch.float32)
    predicted = torch.nn.functional.one_hot(logits_BC.argmax(-1), num_classes).to(torch.float32)
    if ok_B is not None:
        truth = truth * ok_B.unsqueeze(-1)
    return truth.T @ predicted


def top_k_hits(logits_BC: Tensor, y_B: Tensor, ok_B: Tensor | None) -> Tensor:
    """Number of rows, float32, whose true class is among the k largest logits; of equal logits, the smaller class wins.

    Args:
        logits_BC: logits of each row.
        y_B: true classes.
        ok_B: which rows are not padding, bool; None if none is padded.
    """
    own = logits_BC.gather(-1, y_B.unsqueeze(-1))
    classes = torch.arange(logits_BC.shape[-1], device=logits_BC.device)
    # written with `not >=`, so that a row whose logits are NaN is no hit
    ahead = ~(own >= logits_BC) | ((logits_BC == own) & (classes < y_B.unsqueeze(-1)))
    hit = ahead.sum(-1) < min(TOP_K, logits_BC.shape[-1])
    return (hit if ok_B is None else hit & ok_B).sum().to(torch.float32)


def accuracy(matrix: Tensor) -> float:
    """Share of correct predictions; 0 for an empty matrix."""
    return float(matrix.diagonal().sum() / matrix.sum().clamp(min=1.0))


def uar(matrix: Tensor) -> float:
    """Unweighted average recall, over the classes that some row has."""
    support = matrix.sum(1)
    seen = support > 0
    return float((matrix.diagonal()[seen] / support[seen]).mean()) if bool(seen.any()) else 0.0


def macro_f1(matrix: Tensor) -> float:
    """Mean F1 over the classes that some row has or that are predicted (as scikit-learn's `average="macro"`)."""
    total = matrix.sum(0) + matrix.sum(1)
    seen = total > 0
    return float((2 * matrix.diagonal()[seen] / total[seen]).mean()) if bool(seen.any()) else 0.0


def summary(matrix: Tensor, top5_hits: Tensor, loss_sum: Tensor) -> dict[str, float]:
    """The `global` group of result.json from sums over a test set; without `top5` for five classes or fewer.

    Args:
        matrix: confusion matrix (C, C).
        top5_hits: number of rows from `top_k_hits`.
        loss_sum: sum over rows of the cross-entropy.
    """
    rows = matrix.sum().clamp(min=1.0)
    top5 = {"top5": float(top5_hits / rows)} if len(matrix) > TOP_K else {}
    scores = {"accuracy": accuracy(matrix), "uar": uar(matrix), "macro_f1": macro_f1(matrix)}
    return scores | top5 | {"loss": float(loss_sum / rows)}


def weighted_kappa(matrix: Tensor) -> float | None:
    """Cohen's kappa with quadratic weights (Cohen, Psychological Bulletin 70, 1968); None if it is undefined."""
    counts = matrix.to(torch.float64)
    levels = torch.arange(len(counts), dtype=torch.float64)
    penalty = (levels.unsqueeze(1) - levels).square()
    by_chance = torch.outer(counts.sum(1), counts.sum(0)) / counts.sum().clamp(min=1.0)
    worst = float((penalty * by_chance).sum())
    return 1.0 - float((penalty * counts).sum()) / worst if worst > 0 else None


def level_error(matrix: Tensor) -> float:
    """Mean distance between the true and the predicted level; 0 for an empty matrix."""
    counts = matrix.to(torch.float64)
    levels = torch.arange(len(counts), dtype=torch.float64)
    return float(((levels.unsqueeze(1) - levels).abs() * counts).sum() / counts.sum().clamp(min=1.0))


def weighted_f1(matrix: Tensor) -> float:
    """Mean F1 over classes, weighted by the rows of each class (scikit-learn's `average="weighted"`)."""
    counts = matrix.to(torch.float64)
    support, total = counts.sum(1), counts.sum(0) + counts.sum(1)
    f1 = 2 * counts.diagonal() / total.clamp(min=1.0)
    return float((f1 * support).sum() / support.sum().clamp(min=1.0))
