"""What a table of methods shows: whether its validation rows could judge, what a score costs, and a paragraph.

The sentences of the paragraph claim a difference only where a test at 5 % shows it, after Holm's correction over the
tests of the scenario, and otherwise say that none is shown.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyfed.core.errors import counted
from polyfed.report.comparison.compare import Comparison, Group
from polyfed.report.comparison.paired_differences import Difference, Evidence
from polyfed.report.comparison.paired_tests import LEVEL, ROUNDING, seeds_to_show
from polyfed.report.comparison.score_against_cost import spent
from polyfed.report.reading import history
from polyfed.report.reading.run_folder import Folder
from polyfed.report.scores import POOLED, Metric, first_metric, of_main_score

TOO_HIGH = 0.10
"""Validation rows on which the baseline scores so much higher than on the test rows are unlike the test rows."""

WANTED = 0.02
"""The difference for which `seeds_needed` says how many seeds would show it: two points."""

VALIDATION = "validation"
"""The group of result.json with the scores on the validation rows."""


@dataclass(frozen=True)
class Judgement:
    """Whether the validation rows of a scenario can choose settings, by the reported runs of one method.

    Attributes:
        validation: the mean score on the validation rows after the last round.
        test: the mean score on the test rows.
    """

    validation: float
    test: float

    @property
    def holds(self) -> bool:
        """Whether validation is at most `TOO_HIGH` above the test, so that a choice by it says something."""
        return self.validation - self.test <= TOO_HIGH


def judgements(comparison: Comparison, baseline: str) -> dict[str, Judgement]:
    """Return by scenario whether its validation rows can choose settings; only for shares, such as accuracies."""
    pairs_of: dict[str, list[tuple[float, float]]] = {}
    for group in comparison.groups:
        if group.method == baseline or group.method.startswith(f"{baseline} "):
            for folder in group.folders:
                score = first_metric(folder.result, group.metrics)
                if score is None or not score[0].share:
                    continue
                name = score[0].name  # validation rows have no groups: there, `uar` stands for `personal.pooled_uar`
                word = folder.headline.score if of_main_score(name) else name.rpartition(".")[2].removeprefix(POOLED)
                own = folder.result["metrics"].get(VALIDATION, {}).get(word)
                if own is not None:
                    pairs_of.setdefault(group.scenario, []).append((float(own), score[1]))
    return {
        scenario: Judgement(*(statistics.fmean(values) for values in zip(*pairs, strict=True)))
        for scenario, pairs in pairs_of.items()
    }


@dataclass(frozen=True)
class Cost:
    """What a run had spent when it first reached a score: bytes in both directions, and seconds of training."""

    bytes: float
    seconds: float


def cost_to(folder: Folder, metrics: Sequence[str], target: float) -> Cost | None:
    """Return what a run had spent at its first evaluated round with at least this score, or None if it has none.

    Of an error, at most this score. If the run evaluates every n rounds, the result can be up to n - 1 rounds late.
    """
    past = history.read(folder)
    column = next((metric for metric in metrics if metric in past.columns), None)
    if column is None:
        return None
    sign = -1.0 if Metric.of(column, folder.result.get("task")).lowest else 1.0
    scores = past.columns[column]
    place = next((n for n, score in enumerate(scores) if score is not None and sign * (score - target) >= 0), None)
    if place is None:
        return None
    traffic, seconds = spent(past, "bytes_up", "bytes_down"), spent(past, "seconds.train")
    return Cost(*(each[place] if each else 0.0 for each in (traffic, seconds)))


def costs_of(group: Group, target: float) -> Cost | None:
    """Return the median cost of a score over the runs of a group; None if half of them or more do not reach it.

    A run that does not reach it costs more than all others: the median of the others alone would favour methods that
    rarely reach it.
    """
    costs = [cost_to(folder, group.metrics, target) or Cost(math.inf, math.inf) for folder in group.folders]
    median = Cost(statistics.median(c.bytes for c in costs), statistics.median(c.seconds for c in costs))
    return median if math.isfinite(median.bytes) else None


def seeds_needed(proof: Evidence, scenario: str, method: str, baseline: str) -> int | None:
    """Return how many seeds a test needs to show two points between a method and the baseline, or None if unknown."""
    own, other = proof.scores.get((scenario, method), {}), proof.scores.get((scenario, baseline), {})
    return seeds_to_show([own[run] - other[run] for run in own if run in other], WANTED)


def conclusion(proof: Evidence, what: str) -> str:
    """Return a paragraph about what a comparison shows, in which every number is computed.

    Args:
        proof: the tests of the comparison.
        what: what is compared, such as "methods with a global model".
    """
    return " ".join([*_of_ranks(proof, what), *_of_differences(proof), *_of_placebos(proof), *_of_seeds(proof)])


def _of_ranks(proof: Evidence, what: str) -> Iterator[str]:
    if proof.ranks is None:
        yield f"There are too few scenarios or methods to rank {what}."
        return
    ranks = sorted(zip(proof.ranks.ranks, proof.methods, strict=True))
    first, critical = ranks[0][0], proof.ranks.critical
    best = [name for rank, name in ranks if rank - first < ROUNDING]  # several, if they are tied
    who, has, are = " and ".join(best), *(("has", "is") if len(best) == 1 else ("share", "are"))
    yield (
        f"Of {len(ranks)} {what}, {who} {has} the best mean rank, {first:.2f} over {proof.ranks.blocks} {proof.blocks}."
    )
    if proof.ranks.p >= LEVEL:
        yield f"Friedman's test does not tell the methods apart (p = {proof.ranks.p:.2g}), so no order is shown."
        return
    worse = [name for rank, name in ranks if rank - first >= critical]
    yield (
        f"Friedman's test gives p = {proof.ranks.p:.2g}; by Nemenyi's critical difference of {critical:.2f}, {who} "
        f"{are} better than {', '.join(worse) or 'none of the others'}, and not distinguishable from the rest."
    )


def _of_differences(proof: Evidence) -> Iterator[str]:
    if not proof.differences:
        return
    baseline = proof.differences[0].baseline
    above, below = _shown(proof, proof.differences)
    scenarios = len({row.scenario for row in proof.differences})
    yield f"In single scenarios, of which there are {scenarios}, these differ from {baseline} after Holm's correction:"
    only, both = [m for m in above if m not in below], [m for m in above if m in below]
    parts = [
        f"above it {_named(above, only)}" if only else "none is only above it",
        *([f"above in some and below in others: {', '.join(both)}"] if both else []),
        f"below it {_named(below, [m for m in below if m not in above])}" if set(below) - set(above) else "none below",
    ]
    yield f"{'; '.join(parts)}."


def _of_placebos(proof: Evidence) -> Iterator[str]:
    if not proof.placebos:
        return
    above, _ = _shown(proof, proof.placebos)
    rest = [m for m in dict.fromkeys(row.method for row in proof.placebos) if m not in above]
    if above:
        yield f"Better than its placebo with the same settings in a scenario: {_named(above, list(above))}."
    if rest:
        yield f"Not shown to be better than the placebo anywhere: {', '.join(rest)}."


def _of_seeds(proof: Evidence) -> Iterator[str]:
    needed = [seeds_needed(proof, row.scenario, row.method, row.baseline) for row in proof.differences]
    known = [number for number in needed if number is not None]
    if known:
        most = max(row.n for row in proof.differences)
        yield (
            f"Each cell has {counted(most, 'seed', 'seeds')}; to show two points, half of the tests would need "
            f"{statistics.median_low(known)} or more."
        )


def _shown(proof: Evidence, rows: Sequence[Difference]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return in how many scenarios each method is shown to be better, and in how many worse."""
    better: dict[str, int] = {}
    worse: dict[str, int] = {}
    for row in rows:
        if row.p_holm is not None and row.p_holm < LEVEL:
            times = better if (row.mean < 0) == proof.lowest(row.scenario) else worse
            times[row.method] = times.get(row.method, 0) + 1
    return better, worse


def _named(times: Mapping[str, int], methods: Sequence[str]) -> str:
    """Return methods with the number of scenarios of each, the most frequent first."""
    ordered = sorted(methods, key=lambda method: -times[method])
    return ", ".join(f"{method} ({times[method]})" for method in ordered)
