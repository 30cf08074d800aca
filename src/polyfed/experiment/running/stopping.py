"""Which round is the best one, and whether a run ends before its last round: the section [stop].

Both follow from the rows of the rounds and the totals of the run alone. A resumed run therefore finds the same best
round, and ends at the same round, as the uninterrupted run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.experiment.recipes.settings import StopSpec
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.differential.guarantee import Guarantee, number
from polyfed.report.scores import POOLED, is_error, of_main_score


@dataclass(frozen=True)
class Stop:
    """Why a run ended: the entry `stopped` of result.json.

    Attributes:
        round: the last round that ran.
        by: `rounds`, `patience`, `max_seconds`, `max_bytes`, `max_epsilon`, or `budget` (the epsilon of [privacy]).
        why: the reason in a sentence.
    """

    round: int
    by: str
    why: str

    def facts(self) -> dict[str, Any]:
        """Return the entry `stopped` of result.json."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """The metric that chooses the best round.

    Attributes:
        group: a group of metrics, `validation` or `personal_validation`.
        name: a metric of the group.
        lowest: whether a smaller value is better.
    """

    group: str
    name: str
    lowest: bool

    @classmethod
    def of(cls, stop: StopSpec, objective: Objective = CLASSES) -> "Choice":
        """Return the metric that [stop] names, or else the objective's own one."""
        if not stop.metric:
            return cls("validation", objective.BEST, not objective.RISING)
        group, _, name = stop.metric.partition(".")
        score = objective.SCORE if of_main_score(stop.metric) else name.removeprefix(POOLED)
        return cls(group, name, is_error(score))

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric of a round, or None if the round has not measured it."""
        result: float | None = row.get("metrics", {}).get(self.group, {}).get(self.name)
        return result

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether a value is better than another one by more than `by`."""
        return (than - value if self.lowest else value - than) > by


def best_row(rounds: Sequence[dict[str, Any]], choice: Choice) -> dict[str, Any] | None:
    """Return the first row with the best value of the metric, or None if no row has it."""
    best: tuple[float, dict[str, Any]] | None = None
    for row in rounds:
        value = choice.value(row)
        if value is not None and (best is None or choice.better(value, best[0])):
            best = value, row
    return None if best is None else best[1]


def best_round(rounds: Sequence[dict[str, Any]], choice: Choice) -> dict[str, Any] | None:
    """Return the entry `best` of result.json: the best round and its metrics. None if no round has the metric."""
    row = best_row(rounds, choice)
    return None if row is None else {"round": row["round"], "metrics": row["metrics"]}


def out_of_patience(stop: StopSpec, rounds: Sequence[dict[str, Any]], choice: Choice) -> Stop | None:
    """Return the end of a run whose metric has not improved for `patience` evaluations, or None."""
    if stop.patience is None:
        return None
    reference, at, waited = None, 0, 0
    for row in rounds:
        if "metrics" not in row:
            continue
        value = choice.value(row)
        if value is not None and (reference is None or choice.better(value, reference, stop.min_delta)):
            reference, at, waited = value, row["round"], 0
        else:
            waited += 1
    if waited < stop.patience or reference is None:
        return None
    what = f"{choice.group}.{choice.name} was best in round {at} ({reference:.4g}) and has not improved by more than "
    why = f"{what}{stop.min_delta:g} in {waited} evaluations since ([stop] patience = {stop.patience})"
    return Stop(rounds[-1]["round"], "patience", why)


def out_of_budget(
    stop: StopSpec, round: int, seconds: float, sent: int, guarantee: Guarantee | None, repeated: int = 0
) -> Stop | None:
    """Return the end of a run that has used up one of its budgets, or None.

    Args:
        stop: the section [stop].
        round: the last round that ran.
        seconds: the time of the run so far.
        sent: the bytes up and down so far.
        guarantee: the guarantee of [privacy], or None.
        repeated: rounds that ran twice, which the epsilon counts too.
    """
    if stop.max_seconds is not None and seconds >= stop.max_seconds:
        return Stop(round, "max_seconds", f"{seconds:.0f} seconds reach [stop] max_seconds = {stop.max_seconds:g}")
    if stop.max_bytes is not None and sent >= stop.max_bytes:
        return Stop(round, "max_bytes", f"{sent:,} bytes up and down reach [stop] max_bytes = {stop.max_bytes:,}")
    if stop.max_epsilon is not None and guarantee is not None:
        after = guarantee.epsilon(round + repeated + 1)
        if after > stop.max_epsilon:
            what = f"one more round would raise epsilon to {number(after)}, above [stop] max_epsilon = "
            return Stop(round, "max_epsilon", f"{what}{stop.max_epsilon:g}")
    return None


def refuse_unmeasured(stop: StopSpec, choice: Choice, measured: Mapping[str, set[str]]) -> None:
    """Refuse a section [stop] whose metric the run will never measure.

    Args:
        stop: the section [stop].
        choice: its metric.
        measured: group -> names of the metrics that the run will measure.

    Raises:
        RecipeError: the run has no such validation rows, or no such metric on them.
    """
    names = measured.get(choice.group)
    if choice.name in (names or ()) or not (stop.metric or stop.patience):
        return
    where = f"[stop] metric = '{choice.group}.{choice.name}'"
    if names:
        raise RecipeError(
            f"{where}: the run does not measure it; {did_you_mean(choice.name, names)}", ("stop", "metric")
        )
    if choice.group == "validation":
        raise RecipeError(
            f"{where}: the server has no validation rows. Set [clients] validation, as in validation = 0.2, or mark "
            "rows with split 2; or use the clients' own validation rows: [stop] metric = "
            '"personal_validation.weighted"',
            ("stop", "metric"),
        )
    raise RecipeError(
        f"{where}: no client has validation rows of its own, or the method does not score them. Set [clients] "
        "personal_validation, as in personal_validation = 0.2; in a deployment, devices mark rows with split 2",
        ("stop", "metric"),
    )


def refuse_spent(stop: StopSpec, guarantee: Guarantee | None) -> None:
    """Refuse a `max_epsilon` that the first round would exceed.

    Raises:
        RecipeError: the first round exceeds it. The text gives the epsilon of one round.
    """
    if stop.max_epsilon is None or guarantee is None or (one := guarantee.epsilon(1)) <= stop.max_epsilon:
        return
    raise RecipeError(
        f"[stop] max_epsilon = {stop.max_epsilon:g}: one round spends {number(one)}. Raise it, or add noise: "
        "[privacy] noise_multiplier",
        ("stop", "max_epsilon"),
    )
