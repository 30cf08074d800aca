"""Calibration: whether the confidence of a model matches its accuracy.

The definitions are from Guo et al., "On Calibration of Modern Neural Networks", ICML 2017. The confidence of a model
for a row is the largest probability that the model gives to a class. Rows are sorted into bins of equal width according
to this confidence. Each bin has an accuracy and a mean confidence. The expected calibration error is the weighted mean,
over the bins, of the absolute difference between these two values. The weight of a bin is its number of rows. The
numbers that `bins_of` returns can be added over several parts of a data set.
"""

from typing import Any

import torch
from torch import Tensor

from polyfed.data import Population
from polyfed.experiment.results.models import Models
from polyfed.objective import Classification

BINS = 15
"""The number of bins of Guo et al."""

ROWS_AT_ONCE = 4096
"""Rows that are predicted at the same time, so that memory does not grow with the test set."""


def bins_of(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Return three numbers for each bin, float64 (BINS, 3): rows, summed confidence, and correct predictions.

    Args:
        logits_BC: logits of each row.
        y_B: true classes.
    """
    confidence, predicted = logits_BC.double().softmax(-1).max(-1)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper edge
    facts = torch.stack([torch.ones_like(confidence), confidence, (predicted == y_B).double()], -1)
    return torch.zeros(BINS, 3, dtype=torch.float64).index_add_(0, place, facts)


def expected_error(bins: Tensor) -> float:
    """Return the expected calibration error, from 0 to 1. The error is 0 if there are no rows.

    Args:
        bins: a result of `bins_of`, or a sum of such results.
    """
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum().clamp(min=1.0))


def calibration_of(models: Models, population: Population) -> dict[str, Any] | None:
    """Return the group `calibration` of result.json, for the global model on the server's test rows.

    Args:
        models: the trained models.
        population: the data of the run.

    Returns:
        `ece` and, for each bin, `rows`, `confidence` and `right`. The result is None if there is no global model or no
        test row, if the task has no classes, or if a prediction is not finite.
    """
    columns, rows = population.columns, population.test_rows.cpu()
    if models.shared is None or not len(rows) or not isinstance(models.task, Classification):
        return None
    total = torch.zeros(BINS, 3, dtype=torch.float64)
    for part in torch.split(rows, ROWS_AT_ONCE):
        x = {m: column.raw(part.to(column.values.device)) for m, column in columns.modalities.items()}
        present = {m: there[part.to(there.device)] for m, there in columns.present.items()}
        logits = models.computed(x, present=present).cpu()
        if logits.dim() != 2 or not bool(logits.isfinite().all()):
            return None
        total += bins_of(logits, columns.label[part.to(columns.label.device)].cpu())
    counts, sure, right = (total[:, column].tolist() for column in range(3))
    return {"ece": expected_error(total), "rows": counts, "confidence": sure, "right": right}
