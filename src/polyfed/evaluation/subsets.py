"""Scores for subsets of the modalities: `[evaluate] subsets`. docs/missing.md describes the metrics."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

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
from polyfed.training import ClientData

Which = Literal["none", "all", "sizes", "each"]

MOST = 5
"""The largest number of modalities for which `all` scores every subset."""

PER_SIZE = 10
"""The largest number of subsets of one size that `sizes` scores."""

SUBSET, WORST = "subset.", "worst_subset"
"""The names of the metrics: `subset.audio+text`, or `subset.size2`, and the worst of all subsets."""

TELLS = (
    "how well a model that the server chooses predicts the test rows from each subset of the modalities: each subset "
    "can tell about a bit of any row"
)
"""The text for the option `tells` of the scores on a client's own test rows."""


@message
class SubsetScores(Message):
    """A client's report on its own test rows, for S subsets of the modalities.

    `sums` has the objective's sums for each subset, and `num_rows` (S,) the number of rows. Both are 0 for a subset
    with none of the client's modalities.
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
    total, found = len(modalities), list[tuple[str, ...]]()
    by_size = is_by_size(which, total)
    for size in range(1, total + 1):
        of_size = itertools.combinations(modalities, size)
        if by_size and (num := math.comb(total, size)) > PER_SIZE:
            drawn = set(keys.choice(keys.key("subsets", total, size), num, PER_SIZE))
            found += [subset for place, subset in enumerate(of_size) if place in drawn]
        elif which != "each" or size in (1, total - 1, total):
            found += of_size
    return tuple(found)


def is_by_size(which: Which, num: int) -> bool:
    """Return whether the metrics of `num` modalities are means over subsets of one size."""
    return which == "sizes" or (which == "all" and num > MOST)


def named(subset: Sequence[str]) -> str:
    """Return the name of a subset: its modalities, joined by `+`."""
    return "+".join(subset)


def summary(
    which: Which, modalities: Sequence[str], scores: Mapping[tuple[str, ...], float], *, rising: bool
) -> dict[str, float]:
    """Return the metrics for the scores of subsets: one for each subset or each size, and the worst of all subsets."""
    if not scores:
        return {}
    found: dict[str, float] = {}
    if is_by_size(which, len(modalities)):
        for size in sorted({len(subset) for subset in scores}):
            of_size = [score for subset, score in scores.items() if len(subset) == size]
            found[f"{SUBSET}size{size}"] = sum(of_size) / len(of_size)
    else:
        found = {SUBSET + named(subset): score for subset, score in scores.items()}
    return found | {WORST: min(scores.values()) if rising else max(scores.values())}


def global_sums(
    which: Which, model: Model, objective: Objective, w: Tree, features: Mapping[str, Tensor], batch: Batch
) -> Tensor | None:
    """Return the sums of a batch for each of S subsets, (S, ...), or None if no subset is scored.

    A row is predicted from those modalities of the subset that it has. The sums are 0 for a subset with a modality that
    is not in `features`, because the model has no block for it.
    """
    found: list[Tensor | None] = []
    for subset in subsets_of(which, model.modalities):
        if all(m in features for m in subset):
            outputs = objective.outputs(model, w, batch, {m: features[m] for m in subset})
            found.append(objective.sums(outputs, batch, brief=True))
        else:
            found.append(None)
    like = next((sums for sums in found if sums is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if s is None else s for s in found])


def global_metrics(which: Which, model: Model, objective: Objective, sums: Tensor) -> dict[str, float]:
    """Return the metrics of the subsets, from their sums over all rows, (S, ...), which may be empty."""
    scores: dict[tuple[str, ...], float] = {}
    for subset, own in zip(subsets_of(which, model.modalities), sums, strict=False):
        score = objective.measured(own).get(objective.SCORE) if bool(own.any()) else None
        scores |= {} if score is None else {subset: score}
    return summary(which, model.modalities, scores, rising=objective.RISING)


def own_subset_scores(
    context: ClientContext, w: Tree, data: ClientData, logits: Callable[[Model, Tree, Batch], Tensor], which: Which
) -> SubsetScores:
    """Compute a client's report on its own test rows, for each subset of the modalities that its model reads.

    Args:
        w: the client's own model.
        data: the client's test rows.
        logits: returns the logits of the model with the parameters `w`, (B, C).
        which: the option `[evaluate] subsets`.
    """
    model, objective = context.model, context.objective
    kind = torch.float32 if objective.OF_CLASSES else torch.float64
    shape, device = objective.own_shape(context.num_classes), data.num_rows.device
    found, rows = [], []
    for subset in subsets_of(which, model.modalities):
        zero = torch.zeros(shape, dtype=kind, device=device)
        own = [m for m in subset if m in context.modalities]

        def step(total: Tensor, batch: Batch, own: Sequence[str] = tuple(own)) -> Tensor:
            part = replace(batch, x={m: batch.x[m] for m in own})
            return total + objective.own_sums(logits(model, w, part), part)

        found.append(data.fold(step, zero) if own else zero)
        rows.append(data.num_rows if own else torch.zeros_like(data.num_rows))
    return SubsetScores(torch.stack(found), torch.stack(rows))


def possible_subsets(fed: Federation) -> Accept:
    """Return an `accept` function for `fed.ask`, which drops impossible scores."""

    def flaw(client: int, reply: SubsetScores) -> str:
        if len(reply.sums) != len(reply.num_rows):
            return f"has sums for {len(reply.sums)} subsets and rows for {len(reply.num_rows)}"
        pairs = zip(reply.sums, reply.num_rows.tolist(), strict=True)
        return next(filter(None, (fed.context.objective.flaw(sums, float(rows)) for sums, rows in pairs)), "")

    return flaw


def personal_metrics(which: Which, replies: Replies, fed: Federation) -> dict[str, float]:
    """Return the metrics of the subsets over clients: means of the clients' scores.

    A client counts in the subsets that have some of its modalities. Under secure aggregation, the scores are those of
    all rows together.
    """
    model, objective = fed.context.model, fed.context.objective
    told: list[SubsetScores] = []
    if isinstance(replies, SummedReplies):
        told = [SubsetScores(replies.total("sums"), replies.total("num_rows"))]
    else:
        told = list(replies.values())
    scores = {}
    for place, subset in enumerate(subsets_of(which, model.modalities)):
        rows = [float(one.num_rows[place]) for one in told]
        each = [objective.own_score(one.sums[place], n) for one, n in zip(told, rows, strict=True) if n > 0]
        if known := [score for score in each if score is not None]:
            scores[subset] = sum(known) / len(known)
    return summary(which, model.modalities, scores, rising=objective.RISING)
