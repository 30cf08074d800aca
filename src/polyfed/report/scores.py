"""The names and units of metrics, and the main metric of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TITLES = {
    "accuracy": "accuracy",
    "uar": "UAR",
    "macro_f1": "macro-F1",
    "micro_f1": "micro-F1",
    "top5": "top-5",
    "exact_match": "exact match",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "mae": "MAE",
    "rmse": "RMSE",
    "pearson": "Pearson",
    "concordance": "concordance",
    "r2": "R²",
    "c_index": "C-index",
    "weighted_kappa": "weighted kappa",
    "acc7": "Acc-7",
    "acc2": "Acc-2",
    "acc2_with_zero": "Acc-2 with zeros",
    "f1": "F1",
    "recall1": "recall at 1",
    "recall5": "recall at 5",
    "recall10": "recall at 10",
    "mrr": "reciprocal rank",
}
"""A map from each metric of the server's rows to its heading, in the order of the tables. docs/evaluation.md defines
the metrics."""

NUMBERS = {
    "auroc",
    "average_precision",
    "mae",
    "rmse",
    "pearson",
    "concordance",
    "r2",
    "c_index",
    "weighted_kappa",
    "mrr",
}
"""The metrics that are written as numbers. All other metrics are shares, which are written in percent."""


ERRORS = {"loss", "mae", "rmse"}
"""The metrics of which a smaller value is better."""


def is_error(metric: str) -> bool:
    """Return whether a smaller value of a metric is better, as with `global.loss`."""
    return metric.rpartition(".")[2] in ERRORS


def is_share(metric: str) -> bool:
    """Return whether a metric is written in percent, as with `personal.mean` and `global.accuracy`."""
    return not is_error(metric) and metric.rpartition(".")[2] not in NUMBERS


def title_of(metric: str) -> str:
    """The heading of a metric."""
    return TITLES.get(metric, metric.replace("_", " "))


def unit_of(metric: str) -> Literal["share", "number"]:
    """How the values of a metric are written."""
    return "share" if metric in TITLES and metric not in NUMBERS else "number"


@dataclass(frozen=True)
class Headline:
    """The metrics by which a run is judged.

    Attributes:
        score: the main metric.
        best: the validation metric that chooses the best round.
        rising: whether larger values are better.
    """

    score: str = "accuracy"
    best: str = "macro_f1"
    rising: bool = True

    @classmethod
    def of(cls, task: Mapping[str, Any] | None) -> "Headline":
        """Read the entry `task` of run.json or result.json. A run without this entry is a classification."""
        return cls(**{name: task[name] for name in ("score", "best", "rising") if name in task}) if task else cls()

    @property
    def title(self) -> str:
        """The heading of the score."""
        return title_of(self.score)

    @property
    def unit(self) -> Literal["share", "number"]:
        """How the score is written."""
        return unit_of(self.score)

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics to show for the best round."""
        return tuple(dict.fromkeys((self.score, self.best)))
