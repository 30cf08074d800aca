"""Scores for subsets of the modalities: `[evaluate] subsets`. docs/missing.md describes the metrics."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.request import Accept
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.model import Model
from polyfed.objective import Objective
from polyfed.objective.report import Estimate, around, of_moments, t_quantile
from polyfed.training import ClientData

Which = Literal["none", "all", "sizes", "each"]

MOST = 5
"""The largest number of modalities for which `all` scores every subset."""

PER_SIZE = 10
"""The largest number of subsets of one size that `sizes` scores."""

SUBSET, WORST = "subset.", "worst_subset"
"""The names of the metrics: `subset.audio+text`, or `subset.size2`, and the worst of all subsets."""

GAIN = "gain."
"""The name of the metric `gain.text`: by how much the score of all modalities is better than that of the text, on the
rows that have all."""

LACKS, NOTHING = "lacks.", "nothing"
"""The names of the metrics of the rows that lack modalities: `lacks.nothing`, `lacks.audio`, or `lacks.size2`."""

TELLS = (
    "how well a model that the server chooses predicts the test rows from each subset of the modalities: each subset "
    "can tell about a bit of any row"
)
"""The text for the option `tells` of the scores on a client's own test rows."""


@message
class SubsetScores(Message):
    """A client's report on its own test rows, for S subsets of the modalities.

    `sums` has the objective's sums for each subset, over the rows that have all of it, and `num_rows` (S,) the number
    of these rows. Both are 0 for a subset with a modality that the client lacks.
    """

    sums: Tensor = carries(
        "statistic", dtype="sums", shape=("subsets", "own"), sum_only=True, tells=TELLS, counted=True
    )
    num_rows: Tensor = carries(
        "statistic", dtype="int64", shape=("subsets",), within=NOT_NEGATIVE, sum_only=True, counted=True
    )


@cache
def subsets_of(which: Which, modalities: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the subsets to score, the smallest first; empty for "none".

    With "all" and at most `MOST` modalities, these are all subsets except the empty one. With "each", they are each
    modality alone, all modalities but one, and all modalities. With "sizes", and with "all" for more modalities, they
    are all subsets of each size, or `PER_SIZE` of them, which are drawn once for all runs.
    """
    if which == "none":
        return ()
    total, result = len(modalities), list[tuple[str, ...]]()
    by_size = is_by_size(which, total)
    for size in range(1, total + 1):
        of_size = itertools.combinations(modalities, size)
        if by_size and (num := math.comb(total, size)) > PER_SIZE:
            drawn = set(keys.choice(keys.key("subsets", total, size), num, PER_SIZE))
            result += [subset for place, subset in enumerate(of_size) if place in drawn]
        elif which != "each" or size in (1, total - 1, total):
            result += of_size
    return tuple(result)


def is_by_size(which: Which, num: int) -> bool:
    """Return whether the metrics of `num` modalities are means over subsets of one size."""
    return which == "sizes" or (which == "all" and num > MOST)


def compared(which: Which, modalities: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the subsets whose scores are compared with that of all modalities, row by row; see `GAIN`."""
    if is_by_size(which, len(modalities)):
        return ()
    return tuple(subset for subset in subsets_of(which, modalities) if len(subset) < len(modalities))


def named(subset: Sequence[str]) -> str:
    """Return the name of a subset: its modalities, joined by `+`."""
    return "+".join(subset)


def named_by_row(used: Mapping[str, Tensor]) -> list[str]:
    """Return the name of the subset that each row uses, "" for none.

    Args:
        used: modality -> which rows use it, bool (n,).
    """
    table = torch.stack(list(used.values()), 1).tolist() if used else []
    return [named([m for m, reads in zip(used, row, strict=True) if reads]) for row in table]


def summary(
    which: Which, modalities: Sequence[str], scores: Mapping[tuple[str, ...], float], *, rising: bool
) -> dict[str, float]:
    """Return the metrics for the scores of subsets: one for each subset or each size, and the worst of all subsets."""
    if not scores:
        return {}
    result: dict[str, float] = {}
    if is_by_size(which, len(modalities)):
        for size in sorted({len(subset) for subset in scores}):
            of_size = [score for subset, score in scores.items() if len(subset) == size]
            result[f"{SUBSET}size{size}"] = sum(of_size) / len(of_size)
    else:
        result = {SUBSET + named(subset): score for subset, score in scores.items()}
    return result | {WORST: min(scores.values()) if rising else max(scores.values())}


def patterns_of(modalities: Sequence[str]) -> tuple[str, ...]:
    """Return a name for what a row may lack, in the order of `lacking`: "nothing", "audio", "audio+text", or "size2".

    With more than `MOST` modalities, only their number counts.
    """
    num = len(modalities)
    if num > MOST:
        return (NOTHING, *(f"size{size}" for size in range(1, num + 1)))
    result = (named([m for place, m in enumerate(modalities) if code >> place & 1]) for code in range(1 << num))
    return tuple(name or NOTHING for name in result)


def lacking(modalities: Sequence[str], batch: Batch) -> Tensor:
    """Return the place in `patterns_of` of what each row lacks, int64 (B,)."""
    result = torch.zeros_like(batch.rows)
    for place, modality in enumerate(modalities):
        if modality in batch.present:
            result = result + (~batch.present[modality]).long() * (1 if len(modalities) > MOST else 1 << place)
    return result


def with_all(subset: Sequence[str], batch: Batch) -> Tensor:
    """Return which real rows have all modalities of a subset, bool (B,)."""
    result = torch.ones_like(batch.rows, dtype=torch.bool) if batch.ok is None else batch.ok
    for modality in subset:
        result = result & batch.present[modality] if modality in batch.present else result
    return result


def names_of_parts(which: Which, modalities: tuple[str, ...], present: Mapping[str, Tensor], rows: Tensor) -> set[str]:
    """Return the names of the metrics that some rows of a table have, as `global_metrics` returns them.

    Args:
        which: the option `[evaluate] subsets`.
        modalities: those of the model.
        present: by modality, whether each row of the table has it, bool (N,); all have it without an entry.
        rows: positions in the table, int64 (n,).
    """
    batch = Batch({}, rows, rows, present={m: mask.cpu()[rows] for m, mask in present.items() if m in modalities})
    scored = {subset for subset in subsets_of(which, modalities) if bool(with_all(subset, batch).any())}
    result = set(summary(which, modalities, dict.fromkeys(scored, 0.0), rising=True))
    if bool(with_all(modalities, batch).any()):
        result |= {GAIN + named(subset) for subset in compared(which, modalities)}
    names = patterns_of(modalities)
    lacks = {names[place] for place in lacking(modalities, batch).tolist()}
    return result | (set() if lacks == {NOTHING} else {LACKS + name for name in lacks})


def part_values(
    which: Which,
    model: Model,
    objective: Objective,
    w: Tree,
    features: Mapping[str, Tensor],
    batch: Batch,
    outputs: Tensor,
) -> Tensor:
    """Return what each row adds to each part of the rows, (P, B, 1 + W): 1 if it counts, and its `row_scores`.

    The parts are all rows as they come; for each subset, the rows that have all of it, predicted from it alone; for
    each of `patterns_of`, the rows that lack exactly this, as they come; and for each subset of `compared`, the rows
    that have all modalities, with the difference of both scores.

    Args:
        which: the option `[evaluate] subsets`.
        objective: the task.
        w: the parameters.
        features: the features of the rows. A subset with another modality has no rows.
        batch: the rows.
        outputs: the outputs for the rows as they come.
    """
    everyone = with_all((), batch)

    def scored(outputs: Tensor) -> Tensor:
        scores = objective.row_scores(outputs, batch).flatten(1)
        return torch.cat([torch.ones_like(scores[:, :1]), scores], 1)

    def of(values: Tensor, counted: Tensor) -> Tensor:
        return torch.where(counted.unsqueeze(-1), values, 0.0)

    as_they_come, alone = scored(outputs), dict[tuple[str, ...], Tensor]()
    result = [of(as_they_come, everyone)]
    for subset in subsets_of(which, model.modalities):
        if all(m in features for m in subset):
            alone[subset] = scored(objective.outputs(model, w, batch, {m: features[m] for m in subset}))
            result.append(of(alone[subset], with_all(subset, batch)))
        else:
            result.append(torch.zeros_like(result[0]))
    lacks = lacking(model.modalities, batch)
    result += [of(as_they_come, everyone & (lacks == place)) for place in range(len(patterns_of(model.modalities)))]
    for subset in compared(which, model.modalities):
        whole, sign = alone.get(model.modalities), 1.0 if objective.RISING else -1.0
        if whole is None or subset not in alone:
            result.append(torch.zeros_like(result[0]))
            continue
        one, width = whole.clone(), (whole.shape[1] - 1) // 2  # only the numerators of the score depend on outputs
        one[:, 1 : 1 + width] = sign * (whole - alone[subset])[:, 1 : 1 + width]
        result.append(of(one, with_all(model.modalities, batch)))
    return torch.stack(result)


Interval = dict[str, float]
"""An entry of `intervals` in result.json: `rows`, `low` and `high`. If the rows belong to natural clients, `low` and
`high` are those by client, with the number of `clients`; the interval by rows is `low_by_rows` and `high_by_rows`."""


def global_metrics(
    which: Which, model: Model, objective: Objective, parts: Tensor, clusters: Tensor
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the metrics of the parts of the rows, with their intervals; `SCORE` itself has only an interval.

    Args:
        which: the option `[evaluate] subsets`.
        objective: the task.
        parts: the `moments` of the values of each part over rows, (P, F), which may be empty.
        clusters: the same over natural clients, or empty.
    """
    if not parts.numel():
        return {}, {}
    values: list[float | None] = []
    intervals: list[Interval] = []
    gains = compared(which, model.modalities)
    for place, told in enumerate(parts.tolist()):
        of_clients = clusters[place].tolist() if clusters.numel() else None
        value, interval = _interval(objective, told, of_clients, gain=place >= len(parts) - len(gains))
        values.append(value)
        intervals.append(interval)
    subsets = subsets_of(which, model.modalities)
    of_subsets = dict(zip(subsets, values[1:], strict=False))
    scores = {subset: value for subset, value in of_subsets.items() if value is not None}
    result = summary(which, model.modalities, scores, rising=objective.RISING)
    known = {SUBSET + named(subset): one for subset, one in zip(subsets, intervals[1:], strict=False)}
    if scores:
        worst = next(subset for subset, value in scores.items() if value == result[WORST])
        known[WORST] = known[SUBSET + named(worst)]
    first = 1 + len(subsets)
    patterns = dict(
        zip(patterns_of(model.modalities), zip(values[first:], intervals[first:], strict=True), strict=False)
    )
    there = {LACKS + name: one for name, one in patterns.items() if one[0] is not None}
    if set(there) > {LACKS + NOTHING} or (there and LACKS + NOTHING not in there):
        result |= {name: value for name, (value, _) in there.items() if value is not None}
        known |= {name: interval for name, (_, interval) in there.items()}
    for place, subset in enumerate(gains, len(parts) - len(gains)):
        if (value := values[place]) is not None:
            result[GAIN + named(subset)], known[GAIN + named(subset)] = value, intervals[place]
    told = {name: one for name, one in known.items() if name in result or not (one["rows"] or which == "sizes")}
    return result, {objective.SCORE: intervals[0]} | told


def _interval(
    objective: Objective, told: Sequence[float], of_clients: Sequence[float] | None, *, gain: bool
) -> tuple[float | None, Interval]:
    how: dict[str, Any] = {"share": is_share_score(objective.SCORE) and not gain}
    how["metric"] = "" if gain else objective.SCORE
    rows = of_moments(told, clusters=False, **how)
    result: Interval = {"rows": round(told[0])}
    if rows is None:
        return None, result
    by_client = None if of_clients is None else of_moments(of_clients, clusters=True, **how)
    result |= _ends(rows, "")
    if by_client is not None and by_client.low is not None and of_clients is not None:
        result |= _ends(rows, "_by_rows") | _ends(by_client, "") | {"clients": round(of_clients[0])}
    return rows.value, result


MOST_MOMENTS = 2000
"""The most numbers that `moments_of` returns for a kind of unit."""


def moments_of(parts: Tensor, clusters: Tensor) -> dict[str, list[float]]:
    """Return the moments of all rows, `rows` and `clients`, from the arguments of `global_metrics`; see `Measured`."""
    units = {"rows": parts, "clients": clusters}
    return {name: one[0].tolist() for name, one in units.items() if one.numel() and len(one[0]) <= MOST_MOMENTS}


def _ends(one: Estimate, by: str) -> Interval:
    return {} if one.low is None or one.high is None else {f"low{by}": one.low, f"high{by}": one.high}


def is_share_score(metric: str) -> bool:
    """Return whether a main score is a share of rows, as the accuracy."""
    return metric == "accuracy"


def over_clients(scores: Sequence[float], rows: float, metric: str) -> Interval:
    """Return the interval of a mean of clients' scores: Student's t, which takes the clients as a sample of others."""
    result: Interval = {"rows": round(rows), "clients": len(scores)}
    if len(scores) < 2:
        return result
    values = torch.tensor(scores, dtype=torch.float64)
    half, mean = t_quantile(len(scores)) * float(values.std()) / math.sqrt(len(scores)), float(values.mean())
    return result | _ends(around(mean, half).within(metric), "")


def own_intervals(objective: Objective, scores: Mapping[int, float], rows: Mapping[int, float]) -> dict[str, Interval]:
    """Return the interval over clients of `personal.mean`, and the rows behind it and behind `personal.worst`.

    Args:
        objective: the task.
        scores: client -> the score of its model on its own rows.
        rows: client -> number of these rows.
    """
    if not scores:
        return {}
    worst = (min if objective.RISING else max)(scores, key=lambda client: scores[client])
    total = sum(rows[client] for client in scores)
    return {
        "mean": over_clients([*scores.values()], total, objective.SCORE),
        "worst": {"rows": round(rows[worst])},
    }


def own_subset_scores(
    context: ClientContext, w: Tree, data: ClientData, logits: Callable[[Model, Tree, Batch], Tensor], which: Which
) -> SubsetScores:
    """Compute a client's report on its own test rows, for each subset of the modalities that it holds.

    A subset of which fewer than `data.min_test_rows` rows have all, or lack some, has no rows in the report, and
    neither has one whose rows are almost those of a smaller subset: together, two scores would tell of few rows.

    Args:
        w: the client's own model.
        data: the client's test rows.
        logits: returns the logits of the model with the parameters `w`, (B, C).
        which: the option `[evaluate] subsets`.
    """
    model, objective = context.model, context.objective
    kind = torch.float32 if objective.OF_CLASSES else torch.float64
    shape, device = objective.own_shape(context.num_classes), data.num_rows.device
    zero, none = torch.zeros(shape, dtype=kind, device=device), torch.zeros_like(data.num_rows)
    sizes = data.fold(lambda total, batch: total + objective.group_sizes(batch), torch.zeros((), device=device))
    result, rows = [], []
    told: list[tuple[Sequence[str], Tensor, Tensor]] = []
    for subset in subsets_of(which, model.modalities):
        if not set(subset) <= set(context.modalities):
            result.append(zero)
            rows.append(none)
            continue

        def step(
            carry: tuple[Tensor, Tensor, Tensor], batch: Batch, subset: Sequence[str] = subset
        ) -> tuple[Tensor, Tensor, Tensor]:
            part = replace(batch, x={m: batch.x[m] for m in subset}, ok=with_all(subset, batch))
            sums = objective.own_sums(logits(model, w, part), part), part.sum(torch.ones_like(part.rows))
            total = zip(carry, (*sums, objective.group_sizes(part)), strict=True)
            return tuple(before + now for before, now in total)  # type: ignore[return-value]

        sums, count, held = data.fold(step, (zero, none, torch.zeros_like(sizes)))
        apart = [torch.where(known, wider - held, 0) for smaller, wider, known in told if set(smaller) < set(subset)]
        few = [(part > 0) & (part < data.min_test_rows) for part in (held, sizes - held, *apart)]
        shown = ~torch.stack(few).any()
        told.append((subset, held, shown))
        result.append(torch.where(shown, sums, zero))
        rows.append(torch.where(shown, count, none))
    return SubsetScores(torch.stack(result), torch.stack(rows))


def possible_subsets(fed: Federation) -> Accept:
    """Return an `accept` function for `fed.ask`, which drops impossible scores."""

    def flaw(client: int, reply: SubsetScores) -> str:
        if len(reply.sums) != len(reply.num_rows):
            return f"has sums for {len(reply.sums)} subsets and rows for {len(reply.num_rows)}"
        pairs = zip(reply.sums, reply.num_rows.tolist(), strict=True)
        return next(filter(None, (fed.context.objective.flaw(sums, float(rows)) for sums, rows in pairs)), "")

    return flaw


def personal_metrics(which: Which, replies: Replies, fed: Federation) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the metrics of the subsets over clients, which are means of the clients' scores, with their intervals.

    A client counts in the subsets of which it has all modalities, in some of its rows. Under secure aggregation, the
    scores are those of all rows together.
    """
    objective = fed.context.objective
    told: list[SubsetScores] = []
    if isinstance(replies, SummedReplies):
        told = [SubsetScores(replies.total("sums"), replies.total("num_rows"))]
    else:
        told = list(replies.values())
    parts = {}
    for place, subset in enumerate(subsets_of(which, fed.context.model.modalities)):
        rows = [float(one.num_rows[place]) for one in told]
        parts[subset] = [(objective.own_score(one.sums[place], n), n) for one, n in zip(told, rows, strict=True) if n]
    return metrics_over_clients(which, parts, fed)


def metrics_over_clients(
    which: Which, parts: Mapping[tuple[str, ...], Sequence[tuple[float | None, float]]], fed: Federation
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the metrics of the subsets, with their intervals, from the scores of clients or silos.

    Args:
        which: the option `[evaluate] subsets`.
        parts: subset -> (score, rows) of each client that has such rows; None is an undefined score.
        fed: the federation.
    """
    objective, scores, known = fed.context.objective, {}, dict[str, Interval]()
    for subset, each in parts.items():
        there = [(score, rows) for score, rows in each if score is not None and rows > 0]
        if there:
            scores[subset] = sum(score for score, _ in there) / len(there)
            total = sum(rows for _, rows in there)
            known[SUBSET + named(subset)] = over_clients([s for s, _ in there], total, objective.SCORE)
    result = summary(which, fed.context.model.modalities, scores, rising=objective.RISING)
    if scores:
        worst = next(subset for subset, value in scores.items() if value == result[WORST])
        known[WORST] = known[SUBSET + named(worst)]
    return result, {name: one for name, one in known.items() if name in result}
