"""Metrics, all computed from sums that can be added over batches, clients and folds.

Most come from the confusion matrix (C, C), whose rows are the true and whose columns the predicted classes, so no
metric is an average of averages. Definitions: docs/evaluation.md.
"""

from collections.abc import Mapping, Sequence

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


def personal(hits: Mapping[int, float], rows: Mapping[int, float]) -> dict[str, float]:
    """The `personal` group of result.json: statistics over clients of the accuracy on their own test rows.

    Args:
        hits: client -> number of correct predictions.
        rows: client -> number of test rows; clients without any do not count.

    Returns:
        `mean`, `weighted` (by test rows), `worst` and `std` over clients. Empty if no client has test rows.
    """
    tested = [client for client in sorted(rows) if rows[client] > 0]
    if not tested:
        return {}
    scores = torch.tensor([hits[client] / rows[client] for client in tested], dtype=torch.float64)
    weights = torch.tensor([rows[client] for client in tested], dtype=torch.float64)
    return {
        "mean": float(scores.mean()),
        "weighted": float((scores * weights).sum() / weights.sum()),
        "worst": float(scores.min()),
        "std": float(scores.std(correction=0)),
    }


def mean_groups(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean of every metric over several models, each over the models that have it. Empty without models."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in measured:
        for group, numbers in one.items():
            for name, value in numbers.items():
                found.setdefault(group, {}).setdefault(name, []).append(value)
    return {
        group: {name: sum(values) / len(values) for name, values in numbers.items()} for group, numbers in found.items()
    }


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, over the seeds of a run for example; the deviation of one value is 0."""
    sample = torch.tensor(values, dtype=torch.float64)
    return float(sample.mean()), float(sample.std()) if len(values) > 1 else 0.0
