"""Objectives: what the model learns to predict, such as classes, labels, numbers, levels or pairs.

In a recipe, the [task] section sets the objective. In polyfed's code, the word *task* already means a method that runs
on a client. The code therefore calls the content of [task] an `Objective`. Open `base.py` first. An `Objective` defines
the width of the model's output, the loss of a batch, the sums from which metrics are computed, and the targets that it
accepts. Each kind of objective has its own file, and `class_metrics.py` and `ranking.py` hold metrics. See
docs/evaluation.md#choose-a-task.
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
"""Classes of objectives, by their name in `[task] name`."""

CLASSES = Classification()
"""The classification objective without options. It is the default of engines."""

SUPERVISED = (Classification, MultiLabel, Regression, Ordinal)
"""Objectives whose loss needs only the output of the whole model. Some methods compute this output in their own way."""

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
    """Return the objective that the labels of a data set suggest, by the rule in docs/evaluation.md#choose-a-task."""
    return OBJECTIVES[looks_like(columns.label)]()
