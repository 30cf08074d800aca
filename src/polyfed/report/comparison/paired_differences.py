"""The tests of a comparison: paired differences to a baseline, and mean ranks over scenarios or seeds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.report.comparison.compare import Comparison, Group
from polyfed.report.comparison.labels import flat, without_placebo
from polyfed.report.comparison.paired_tests import MeanRanks, Test, holm, mean_ranks, paired
from polyfed.report.scores import Metric, first_metric

DEFAULTS = ("global.accuracy", "personal.mean")
"""The default metrics. If neither the user nor a study names a metric, the first of these that every run has is
tested."""


@dataclass(frozen=True)
class Difference:
    """The difference of a method and the baseline in one scenario, over the runs of the same seed and fold.

    Attributes:
        scenario: the scenario.
        method: the method.
        baseline: the baseline.
        n: the number of pairs.
        mean: the mean difference.
        low: lower end of the 95 % interval of the mean.
        high: upper end of the interval.
        p: two-sided p-value.
        p_holm: the p-value after Holm's correction over the differences of the same table in the same scenario.
    """

    scenario: str
    method: str
    baseline: str
    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None


@dataclass(frozen=True)
class Evidence:
    """The tests of a comparison.

    Attributes:
        metrics: the metric of each scenario. A study may list several metrics, and the score of a run is the first of
            them that the run has. If the runs of a scenario use different metrics, the name lists all of them.
        test: "t" or "wilcoxon".
        differences: one for each scenario and each method other than the baseline.
        placebos: the differences of methods and their placebos, one for each scenario, method and placebo. `baseline`
            is the placebo.
        methods: the ranked methods.
        ranks: the mean ranks. None if there are fewer than three methods or fewer than two blocks.
        blocks: the blocks over which the ranks are averaged, such as "scenarios" or "seeds".
        scores: (scenario, method) -> (seed, fold) -> score.
    """

    metrics: Mapping[str, Metric]
    test: Test
    differences: tuple[Difference, ...]
    placebos: tuple[Difference, ...]
    methods: tuple[str, ...]
    ranks: MeanRanks | None
    blocks: str
    scores: Mapping[tuple[str, str], Mapping[tuple[int, str], float]]

    @property
    def metric(self) -> str:
        """Return the names of the scenarios' metrics as one text, such as `accuracy or macro_f1`."""
        return " or ".join(dict.fromkeys(metric.name for metric in self.metrics.values()))

    @property
    def units(self) -> str:
        """Return over what the runs of a method vary: "seed", "fold", or "seed and fold"."""
        runs = {run for own in self.scores.values() for run in own}
        result = [word for place, word in enumerate(("seed", "fold")) if len({run[place] for run in runs}) > 1]
        return " and ".join(result) or "seed"

    @property
    def folded(self) -> bool:
        """Whether the runs of a method are folds of the same data."""
        return "fold" in self.units

    @property
    def mixed(self) -> bool:
        """Return whether the scenarios' metrics differ in unit (percent or not) or direction (error or not)."""
        return len({(metric.lowest, metric.share) for metric in self.metrics.values()}) > 1

    def lowest(self, scenario: str) -> bool:
        """Return whether a smaller score is better in a scenario."""
        return self.metrics[scenario].lowest

    def share(self, scenario: str) -> bool:
        """Return whether the scores of a scenario are written in percent."""
        return self.metrics[scenario].share

    def table(self) -> dict[str, Any]:
        """Return the tests in a form that JSON can hold."""
        ranks = None
        if self.ranks is not None:
            ranks = asdict(self.ranks) | {
                "ranks": dict(zip(self.methods, self.ranks.ranks, strict=True)),
                "over": self.blocks,
                "not_different": [[self.methods[place] for place in clique] for clique in self.ranks.cliques],
            }
        differences = [asdict(difference) for difference in self.differences]
        metrics = {scenario: metric.name for scenario, metric in self.metrics.items()}
        return {
            "metric": self.metric,
            "metrics": metrics,
            "test": self.test,
            "differences": differences,
            "placebos": [asdict(difference) for difference in self.placebos],
            "mean_ranks": ranks,
        }


def evidence(
    comparison: Comparison, metric: str | None = None, baseline: str | None = None, test: Test = "t"
) -> Evidence:
    """Test the differences of a comparison.

    Args:
        metric: a metric of result.json, such as `global.uar`. None uses the metric of the study, or else the first of
            `DEFAULTS` that all runs have.
        baseline: the method with which the others are compared. None uses the first method.
        test: the paired test, "t" or "wilcoxon".

    Raises:
        RecipeError: no run has the metric, or there is no such method.
    """
    metrics = metrics_of(comparison, metric)
    methods = list(dict.fromkeys(group.method for group in comparison.groups))
    if baseline is None:
        baseline = methods[0]
    elif baseline not in methods:
        raise RecipeError(f"--baseline '{baseline}' is not a method of these runs; {did_you_mean(baseline, methods)}")
    by_place = {
        (group.scenario, group.method): scores_of(group, wanted)
        for group, wanted in zip(comparison.groups, metrics, strict=True)
    }
    scenarios = list(dict.fromkeys(group.scenario for group in comparison.groups))
    others = [(scenario, m, baseline) for scenario in scenarios for m in methods if m != baseline]
    by_scenario = metric_by_scenario(comparison, metrics)
    counted = {(group.scenario, group.method) for group in comparison.groups if group.ranked}
    of_ranks = {place: own for place, own in _rising(by_place, by_scenario).items() if place in counted}
    ranked, ranks, blocks = _ranks(
        of_ranks,
        [method for method in methods if any(method == other for _, other in counted)],
        [scenario for scenario in scenarios if any(scenario == other for other, _ in counted)],
    )
    return Evidence(
        by_scenario,
        test,
        _tested(others, by_place, test),
        _tested(placebos_of(comparison), by_place, test),
        ranked,
        ranks,
        blocks,
        by_place,
    )


def placebos_of(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return (scenario, method, placebo) for each placebo of a method; see `labels.without_placebo`."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group in comparison.groups:
        rest, placebo = without_placebo(group.folders[0], group.searched)
        if placebo:
            alike.setdefault((group.scenario, rest), {}).setdefault(placebo, []).append(group.method)
    return [
        (scenario, method, name)
        for (scenario, _), found in alike.items()
        for method in found.pop("none", [])
        for names in found.values()
        for name in names
    ]


def _tested(
    pairs: Iterable[tuple[str, str, str]],
    scores: Mapping[tuple[str, str], dict[tuple[int, str], float]],
    test: Test,
) -> tuple[Difference, ...]:
    """Test the differences of each (scenario, method, baseline), with Holm's correction over those of a scenario."""
    found = [
        (scenario, method, baseline, paired(differences, test))
        for scenario, method, baseline in pairs
        if (differences := _differences(scores.get((scenario, method)), scores.get((scenario, baseline))))
    ]
    families: dict[str, list[int]] = {}
    for place, (scenario, *_) in enumerate(found):
        families.setdefault(scenario, []).append(place)
    corrected: dict[int, float | None] = {}
    for places in families.values():
        corrected |= zip(places, holm([found[place][-1].p for place in places]), strict=True)
    return tuple(
        Difference(scenario, method, baseline, **vars(result), p_holm=corrected[place])
        for place, (scenario, method, baseline, result) in enumerate(found)
    )


def scores_of(group: Group, metrics: Sequence[str]) -> dict[tuple[int, str], float]:
    """Return (seed, fold) -> the value of the first of these metrics that the run has. Repeated seeds are averaged."""
    found: dict[tuple[int, str], list[float]] = {}
    for folder, seed, fold in zip(group.folders, group.seeds, group.folds, strict=True):
        if (first := first_metric(folder.result, metrics)) is not None:
            found.setdefault((seed, fold), []).append(first[1])
    return {run: statistics.fmean(values) for run, values in found.items()}


def metrics_of(comparison: Comparison, metric: str | None = None) -> list[tuple[str, ...]]:
    """Return the metrics of each group, in order. The score of a run is the first of these metrics that the run has.

    Raises:
        RecipeError: no run has the metric.
    """
    known = [set(flat(folder.result.get("metrics", {}))) for group in comparison.groups for folder in group.folders]
    if metric is not None:
        metric = metric.removeprefix("metrics.")
        if not any(metric in names for names in known):
            raise RecipeError(f"--metric '{metric}': no run has it; {did_you_mean(metric, set().union(*known))}")
        return [(metric,)] * len(comparison.groups)
    default = next((word for word in DEFAULTS if all(word in names for names in known)), DEFAULTS[0])
    return [group.metrics or (default,) for group in comparison.groups]


def metric_by_scenario(comparison: Comparison, metrics: Sequence[Sequence[str]]) -> dict[str, Metric]:
    """Return scenario -> its metric, given the metrics of each group as `metrics_of` returns them."""
    result: dict[str, list[tuple[Group, Sequence[str]]]] = {}
    for group, words in zip(comparison.groups, metrics, strict=True):
        result.setdefault(group.scenario, []).append((group, words))
    return {scenario: _metric_of(groups) for scenario, groups in result.items()}


def _metric_of(groups: Sequence[tuple[Group, Sequence[str]]]) -> Metric:
    """Return the metric of a scenario. If its runs use different metrics, the first run decides direction and unit."""
    firsts = (first_metric(folder.result, words) for group, words in groups for folder in group.folders)
    used = [first[0] for first in firsts if first is not None] or [Metric.of(groups[0][1][0])]
    return replace(used[0], name=" or ".join(dict.fromkeys(metric.name for metric in used)))


def _rising(
    scores: Mapping[tuple[str, str], Mapping[tuple[int, str], float]], metrics: Mapping[str, Metric]
) -> dict[tuple[str, str], dict[tuple[int, str], float]]:
    """Return the scores with the opposite sign where a smaller score is better."""
    signs = {scenario: -1.0 if metric.lowest else 1.0 for scenario, metric in metrics.items()}
    return {place: {run: signs[place[0]] * score for run, score in own.items()} for place, own in scores.items()}


def _differences(own: dict[tuple[int, str], float] | None, other: dict[tuple[int, str], float] | None) -> list[float]:
    """Return the differences for the seeds and folds that both methods have."""
    return [] if own is None or other is None else [own[run] - other[run] for run in own if run in other]


def _ranks(
    by_place: dict[tuple[str, str], dict[tuple[int, str], float]], methods: Sequence[str], scenarios: Sequence[str]
) -> tuple[tuple[str, ...], MeanRanks | None, str]:
    """Mean ranks of the methods that have all runs in every block. The largest score gets rank 1.

    If there are several scenarios, they are the blocks, and the score is the mean over seeds, because the seeds of one
    scenario are not independent data sets. In a single scenario, the seeds are the blocks. A method some of whose runs
    diverged has no rank, because its mean over the others would flatter it.
    """
    if len(scenarios) > 1:
        blocks = "scenarios"
        every = {s: set().union(*(own for (name, _), own in by_place.items() if name == s)) for s in scenarios}
        columns = {
            m: {
                s: statistics.fmean(own.values())
                for s in scenarios
                if (own := by_place.get((s, m))) and own.keys() == every[s]
            }
            for m in methods
        }
        wanted: set[Any] = set(scenarios)
    else:
        runs = {run for own in by_place.values() for run in own}
        seeds, folds = ({run[place] for run in runs} for place in (0, 1))
        blocks = "seeds" if len(folds) < 2 else "folds" if len(seeds) < 2 else "seeds and folds"
        columns = {m: dict(by_place.get((*scenarios, m), {})) for m in methods}  # type: ignore[arg-type]
        wanted = set().union(*columns.values())
    ranked = tuple(method for method in methods if set(columns[method]) == wanted)
    if len(ranked) < 3 or len(wanted) < 2:
        return ranked, None, blocks
    order = sorted(wanted)
    rows = [[columns[method][block] for method in ranked] for block in order]
    return ranked, mean_ranks(rows), blocks
