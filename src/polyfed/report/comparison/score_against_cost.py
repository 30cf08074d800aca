"""A score as a function of rounds, bytes and simulated seconds, for each group of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from polyfed.report.comparison.compare import Comparison, Group
from polyfed.report.comparison.paired_differences import metric_by_scenario, metrics_of
from polyfed.report.pages.charts import Chart, Series, Unit
from polyfed.report.reading import history

COSTS = {
    "rounds": ("round", 1.0),
    "bytes": ("MB, both ways", 1e-6),
    "simulated seconds": ("simulated seconds", 1.0),
}
"""A map from each cost to the label of its axis, and to the factor from the unit of the files."""


@dataclass(frozen=True)
class Progression:
    """The score of one group at each round in which at least one of its runs was evaluated.

    Attributes:
        label: the name of the group.
        scenario: the scenario of the group.
        runs: the number of runs of the group.
        x: at each of these rounds, the cost since the start of the run, averaged over runs.
        mean: at each of these rounds, the mean of the runs' scores.
        low: at each of these rounds, the lowest of the runs' scores.
        high: at each of these rounds, the highest of the runs' scores.
    """

    label: str
    scenario: str
    runs: int
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def progressions(comparison: Comparison, metric: str | None = None) -> dict[str, list[Progression]]:
    """Return, for each cost, how the score of each group progresses with this cost.

    A group is left out if its runs do not record the cost. Simulated seconds need a section [network].

    Args:
        metric: a metric of the rounds, such as `global.uar`. If None, it is chosen as in `evidence`.
    """
    result: dict[str, list[Progression]] = {cost: [] for cost in COSTS}
    for group, metrics in zip(comparison.groups, metrics_of(comparison, metric), strict=True):
        pasts = [history.read(folder) for folder in group.folders]
        column = next((m for m in metrics if any(m in past.columns for past in pasts)), None)
        if column is None:
            continue
        for cost in COSTS:
            points = _points(pasts, column, cost)
            if points:
                result[cost].append(_progression(group, points))
    return {cost: groups for cost, groups in result.items() if groups}


def price_charts(comparison: Comparison, metric: str | None = None) -> list[Chart]:
    """Charts for the page: the score against bytes and simulated seconds, one chart for each scenario and cost."""
    charts: list[Chart] = []
    tested = metric_by_scenario(comparison, metrics_of(comparison, metric))
    for cost, groups in progressions(comparison, metric).items():
        if cost == "rounds":  # `curves_of` draws it
            continue
        for scenario in dict.fromkeys(group.scenario for group in groups):
            own = [group for group in groups if group.scenario == scenario]
            x = sorted({place for group in own for place in group.x})
            unit: Unit = "share" if tested[scenario].share else "number"
            title = f"Score against {cost}" + (f", {scenario}" if scenario else "")
            caption = "Mean over runs. The x axis is the total since round 1, training messages only."
            series = [
                Series(group.label, [dict(zip(group.x, group.mean, strict=True)).get(p) for p in x], colour)
                for colour, group in enumerate(own)
            ]
            charts.append(Chart(f"cost-{len(charts)}", title, caption, unit, x, series, COSTS[cost][0]))
    return charts


def _points(pasts: Sequence[history.History], column: str, cost: str) -> dict[int, list[tuple[float, float]]]:
    """Round -> (cost so far, score) of each run that was evaluated in this round."""
    points: dict[int, list[tuple[float, float]]] = {}
    for past in pasts:
        spent = _spent(past, cost)
        scores = past.columns.get(column, [])
        for number, x, score in zip(past.rounds, spent, scores, strict=False):
            if score is not None:
                points.setdefault(number, []).append((x, score))
    return points


def _spent(past: history.History, cost: str) -> list[float]:
    """The cost after each round, from the first round on; empty if the run does not record this cost."""
    factor = COSTS[cost][1]
    if cost == "rounds":
        return [float(number) for number in past.rounds]
    if cost == "bytes":
        return [value * factor for value in spent(past, "bytes_up", "bytes_down")]
    seconds = spent(past, "simulated_seconds")
    return [value * factor for value in seconds] if any(seconds) else []


def spent(past: history.History, *columns: str) -> list[float]:
    """Return the sum of these columns over all rounds up to each one; empty if the run has none of them."""
    known = [past.columns[name] for name in columns if name in past.columns]
    return list(accumulate(sum(value or 0.0 for value in row) for row in zip(*known, strict=True)))


def _progression(group: Group, points: dict[int, list[tuple[float, float]]]) -> Progression:
    rounds = sorted(points)
    scores = {number: [score for _, score in points[number]] for number in rounds}
    return Progression(
        label=group.method or group.label,
        scenario=group.scenario,
        runs=len(group.folders),
        x=tuple(sum(x for x, _ in points[number]) / len(points[number]) for number in rounds),
        mean=tuple(sum(scores[number]) / len(scores[number]) for number in rounds),
        low=tuple(min(scores[number]) for number in rounds),
        high=tuple(max(scores[number]) for number in rounds),
    )
