"""What does the model learn to predict? The section [task] of a recipe: classes, labels, numbers, levels, or pairs.

Open `base.py` first: an `Objective` knows the width of the model's output, the loss of a batch, the sums that become
metrics, and which targets it refuses. One file holds each kind; `confusion.py` and `ranking.py` hold their metrics.
A *task* in polyfed is a method that runs on a client; the section [task] is an `Objective` in code.
Page: docs/evaluation.md#choose-a-task.
"""

from polyfed.data.columns import Columns
from polyfed.objective.base import Objective
from polyfed.objective.classification import Classification
from polyfed.objective.multi_label import MultiLabel
from polyfed.objective.ordinal import Ordinal
from polyfed.objective.regression import Regression
from polyfed.objective.retrieval import Retrieval
from polyfed.objective.targets import looks_like

OBJECTIVES: dict[str, type[Objective]] = {
    kind.NAME: kind for kind in (Classification, MultiLabel, Regression, Ordinal, Retrieval)
}
"""Kinds of task by the name that `[task] name` gives."""

CLASSES = Classification()
"""The task without options that runs had before there were others, and the default of engines."""

SUPERVISED = (Classification, MultiLabel, Regression, Ordinal)
"""Kinds whose loss reads one output of the whole model, for methods that compute this output in their own way."""

__all__ = [
    "CLASSES",
    "OBJECTIVES",
    "SUPERVISED",
    "Classification",
    "MultiLabel",
    "Objective",
    "Ordinal",
    "Regression",
    "Retrieval",
    "guessed",
]


def guessed(columns: Columns) -> Objective:
    """The kind of task that the labels of a data set suggest; docs/evaluation.md#choose-a-task has the rule."""
    return OBJECTIVES[looks_like(columns.label)]()
