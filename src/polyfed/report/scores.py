"""The names and units of metrics, and the main metric of a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyfed.core.errors import command
from polyfed.core.system.files import RECIPE
from polyfed.evaluation.subsets import GAIN, LACKS, NOTHING, SUBSET, WORST
from polyfed.report.formatting import counted, number_of

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
    "c_index_within_sites": "C-index within sites",
    "weighted_kappa": "weighted kappa",
    "acc7": "Acc-7",
    "acc2": "Acc-2",
    "acc2_with_zero": "Acc-2 with zeros",
    "f1": "F1",
    "recall1": "recall at 1",
    "recall5": "recall at 5",
    "recall10": "recall at 10",
    "mrr": "reciprocal rank",
    "auroc_within_sites": "AUROC within sites",
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
    "c_index_within_sites",
    "weighted_kappa",
    "mrr",
    "auroc_within_sites",
}
"""The metrics that are written as numbers. All other metrics are shares, which are written in percent."""


ERRORS = {"loss", "mae", "rmse"}
"""The metrics of which a smaller value is better."""

POOLED = "pooled_"
"""The beginning of the names of metrics over the own rows of all clients together."""

OF_MAIN_SCORE = ("personal", "unimodal")
"""The groups of result.json that hold values of a run's main metric, such as its accuracy or its MAE."""


def of_main_score(metric: str) -> bool:
    """Return whether a metric holds values of the run's main metric, as `personal.mean` and `global.worst_subset`."""
    group, _, name = metric.partition(".")
    subset = name.startswith((SUBSET, LACKS, GAIN)) or name == WORST
    return subset or (group.removesuffix("_validation") in OF_MAIN_SCORE and not name.startswith(POOLED))


def subsets_in(metrics: Iterable[str], group: str = "global.") -> list[str]:
    """Return the names of the scored subsets of the modalities, such as `audio+text` or `size2`, the smallest first.

    Args:
        metrics: the names of metrics.
        group: the beginning of the names, before `subset.`.
    """
    result = [name.removeprefix(group + SUBSET) for name in metrics if name.startswith(group + SUBSET)]
    return sorted(dict.fromkeys(result), key=lambda name: name.count("+"))


def subset_title(name: str) -> str:
    """Return the heading of a subset: `audio + text`, or `2 modalities` for the mean over all subsets of this size."""
    size = name.removeprefix("size")
    if size != name and size.isdigit():
        return "1 modality, mean" if size == "1" else f"{size} modalities, mean"
    return name.replace("+", " + ")


def lacks_in(metrics: Iterable[str], group: str = "global.") -> list[str]:
    """Return what the rows lack that are scored apart: `nothing`, `audio`, `audio+text`, or `size2`."""
    return [name.removeprefix(group + LACKS) for name in metrics if name.startswith(group + LACKS)]


def lacks_title(name: str) -> str:
    """Return the heading of such rows: `rows that lack audio + text`, or `rows that lack 2 modalities`."""
    return f"rows that lack {NOTHING if name == NOTHING else subset_title(name).removesuffix(', mean')}"


AS_THEY_COME = "rows as they come"
"""What the main score is about if some rows lack modalities."""

FEW = 30
"""With fewer rows, a score is marked as one of few rows."""


def scored_rows(metrics: Iterable[str]) -> str:
    """Return what the main score on the server's rows is about."""
    return AS_THEY_COME if lacks_in(metrics, "") else "all modalities"


def interval_of(known: Mapping[str, Any] | None, unit: str, sign: str = "") -> str:
    """Return the interval and the rows of a score in words, as in `48.1 % to 61.7 %, 200 rows`; empty without both.

    Args:
        known: an entry of `intervals` in result.json.
        unit: how the score is written.
        sign: what stands before a number above 0.
    """
    if not known:
        return ""
    result = []
    if (low := known.get("low")) is not None:
        ends = low, known.get("high", low)
        result.append(" to ".join((sign if end > 0 else "") + number_of(end, unit) for end in ends))
    rows, clients = int(known.get("rows") or 0), known.get("clients")
    few = ", too few to tell" if rows < FEW else ""
    result.append(counted(rows, "row") + (f" of {counted(int(clients), 'client')}" if clients else "") + few)
    return ", ".join(result)


def with_interval(value: float | None, unit: str, known: Mapping[str, Any] | None) -> str:
    """Return a score with its interval and rows, as in `55.0 % (48.1 % to 61.7 %, 200 rows)`."""
    words = interval_of(known, unit)
    return number_of(value, unit) + (f" ({words})" if words else "")


def gain_words(value: float, unit: str, known: Mapping[str, Any] | None) -> str:
    """Return a difference of two scores on the same rows, as in `+5.1 points (+3.0 to +7.2, 200 rows)`."""
    words, plus = interval_of(known, unit, "+").replace(" %", ""), "+" if value > 0 else ""
    number = f"{100 * value:.1f} points" if unit == "share" else number_of(value, unit)
    return plus + number + (f" ({words})" if words else "")


GAINS = "all modalities gain, same rows"
"""The heading of a difference to the score of all modalities."""


def not_beaten(result: Mapping[str, Any]) -> str:
    """Return the sentence about a model that is no better than one answer for all rows, or ""."""
    head, known = Headline.of(result.get("task")), result.get("baseline")
    groups = result.get("metrics", {})
    score = groups.get("global", {}).get(head.score, groups.get("personal", {}).get("weighted"))
    if known is None or score is None or (score > known["score"] if head.rising else score < known["score"]):
        return ""
    own, other = (number_of(value, head.unit) for value in (score, known["score"]))
    return (
        f"the model is no better than one answer for all test rows: {head.title} {own}, and {known['answer']} {other}"
    )


def goes_on(result: Mapping[str, Any], folder: object) -> str:
    """Return the sentence about a run whose training loss still falls, with the next command, or "".

    Args:
        result: the content of result.json.
        folder: the folder of the run, or None.
    """
    told = result.get("still_falls")
    if told is None:
        return ""
    first, last = (number_of(told[name], "number") for name in ("first", "last"))
    more = 2 * int(result["rounds"])
    text = f"the training loss still falls, from {first} to {last} in the last {told['rounds']} rounds"
    if folder is None or result.get("engine") == "flower":
        return f"{text}: more rounds may help, such as rounds = {more}"
    again = command("run", f"{folder}/{RECIPE}", "--set", f"rounds={more}", "--resume", "--out", folder)
    return f"{text}. To go on to {more} rounds: {again}"


def sets_title(result: Mapping[str, Any]) -> str:
    """Return the heading of the entry `sets` of a result."""
    kind = "intervals" if "targets" in result else "sets"
    return f"prediction {kind}, {number_of(result['sets']['coverage'], 'share')}"


def sets_words(result: Mapping[str, Any], folder: object) -> str:
    """Return what a result tells of the sets that `predict_set` returns, and how to get them.

    Args:
        result: the content of result.json, with the entry `sets`.
        folder: the folder of the run, or None.
    """
    told = result["sets"]
    if "refused" in told:
        return str(told["refused"])
    size = f"{told['size']:.3g} wide" if "targets" in result else f"{told['size']:.2f} classes"
    own = not result.get("metrics", {}).get("global")
    rows = "own test row" if own else "test row"
    how = "run.predict_set(x, client=...)" if own else "run.predict_set(x)"
    if folder is not None:
        whose = ("--client", "NAME") if own else ()
        how = command("predict", folder, "FILE", *whose, "--coverage", told["coverage"])
    unseen = "unseen_clients" in result and told["holds"] < told["coverage"]
    why = ", fewer than promised, because no validation row is of these clients" if unseen else _by_chance(told)
    if least := told.get("least"):
        why += (
            f" (but only of {number_of(least['holds'], 'share')} of {counted(least['rows'], 'row')} of class "
            f"'{least['class']}': the promise is over all rows, and [evaluate] conformal = 'class' gives one for each "
            "class)"
        )
    return (
        f"{size} on average; they hold the truth of {number_of(told['holds'], 'share')} of "
        f"{counted(told['rows'], rows)}{why}, by {counted(told['validation_rows'], 'validation row')} at least: "
        f"{how}"
    )


def _by_chance(told: Mapping[str, Any]) -> str:
    """Return whether chance explains that sets hold the truth less often than promised; empty if they do not."""
    missing, spread = told["coverage"] - told["holds"], told["coverage"] * (1 - told["coverage"])
    if missing <= 0:
        return ""
    chance = 2 * math.sqrt(spread / max(told["rows"], 1) + spread / max(told["validation_rows"], 1))
    if missing <= chance:
        return ", which chance explains"
    return ", fewer than chance explains: these rows are unlike the validation rows, so do not trust the sets on them"


def of_target(result: Mapping[str, Any]) -> str:
    """Return the words that name the only target of a result, as in ` of 'age'`, or ""."""
    targets = result.get("targets", ())
    return f" of '{targets[0]}'" if len(targets) == 1 else ""


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


@dataclass(frozen=True)
class Metric:
    """A metric of result.json, and how to read its values. All runs of one scenario share these facts.

    Attributes:
        name: the metric, such as `global.uar`.
        lowest: whether a smaller value is better.
        share: whether the values are written in percent.
    """

    name: str
    lowest: bool
    share: bool

    @property
    def title(self) -> str:
        """Return the name, with the unit if it is percent."""
        return f"{self.name} (%)" if self.share else self.name

    @classmethod
    def of(cls, name: str, task: Mapping[str, Any] | None = None) -> "Metric":
        """Return the facts about a metric, given the entry `task` of the run's result.json."""
        score = Headline.of(task).score if of_main_score(name) else name.replace(f".{POOLED}", ".")
        rises = name.partition(".")[2].startswith(GAIN)
        return cls(name, is_error(score) and not rises, is_share(score))


def first_metric(result: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Metric, float] | None:
    """Return the first of these metrics that a run has, with its value.

    Args:
        result: the content of the run's result.json.
        metrics: names such as `global.accuracy`.

    Returns:
        The metric and its value, or None if the run has none of these metrics.
    """
    for name in metrics:
        group, _, word = name.partition(".")
        value = result.get("metrics", {}).get(group, {}).get(word)
        if value is not None:
            return Metric.of(name, result.get("task")), float(value)
    return None
