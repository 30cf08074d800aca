"""Conformal prediction: sets of classes, or intervals, that hold the truth with a promised probability.

Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005; the score of classes is that of Sadinle, Lei,
Wasserman, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels", JASA 2019. A row's score says how badly
a prediction fits its truth. Every client counts the scores of its own validation rows in the bins of a histogram, and
the server adds the counts up. The number of a score's bin is a score too, so the sets from the bins keep the promise of
Lu et al., "Federated Conformal Predictors", ICML 2023, without sending scores. docs/missing.md explains the use.

Shape letters: S subsets of the modalities, G groups of scores (1, the C classes, or the T targets), N bins, B rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, counted
from polyfed.core.messages import Message, carries, message
from polyfed.core.request import Accept
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import Tree
from polyfed.evaluation.subsets import named, subsets_of
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.training import ClientData

Kind = Literal["none", "split", "class"]
GroupBy = Literal["all", "modalities", "client"]

BINS = 1000
"""Bins of the score of a class, 1 - p, from 0 to 1. Bin b holds the scores up to b / BINS, and bin 0 only 0."""

OCTAVES, PER_OCTAVE = 20, 32
"""Bins of an absolute error: from 2^-OCTAVES to 2^OCTAVES, each larger than the one before by 2^(1/PER_OCTAVE)."""

EVERYBODY = "all"
"""The group of all clients."""

TELLS = (
    "how badly a model that the server chooses predicts the validation rows, as a histogram for each subset of the "
    "modalities: a client with few rows reveals the score of each"
)


@message
class ScoreCounts(Message):
    """How many of a client's validation rows have a score in which bin, (S, G, N), for each subset of the modalities.

    The counts are 0 for a subset with a modality that the client does not hold. A row counts if it has all modalities
    of the subset.
    """

    in_bins: Tensor = carries(
        "statistic",
        dtype="int64",
        shape=("subsets", None, None),
        within=NOT_NEGATIVE,
        sum_only=True,
        tells=TELLS,
        scored=True,
    )


def counts_shape(kind: Kind, model: Model, objective: Objective) -> tuple[int, int, int]:
    """Return the shape (S, G, N) of the counts."""
    subsets = len(subsets_of("all", model.modalities))
    if not isinstance(objective, Classification):
        return subsets, model.num_classes, 2 * OCTAVES * PER_OCTAVE + 2
    return subsets, model.num_classes if kind == "class" else 1, BINS + 1


def class_bins(logits: Tensor) -> Tensor:
    """Return the bin of the score 1 - p of each class, int64 (B, C). A prediction that is not finite has the last."""
    scores = 1.0 - logits.double().softmax(-1)
    return (scores * BINS).ceil().nan_to_num(BINS).clamp(0, BINS).long()


def error_bins(errors: Tensor) -> Tensor:
    """Return the bin of each absolute error, int64. An error that is too large, or not finite, has the last bin."""
    last = 2 * OCTAVES * PER_OCTAVE + 1
    place = (errors.double().log2() + OCTAVES) * PER_OCTAVE
    return place.ceil().nan_to_num(last, posinf=last, neginf=0).clamp(0, last).long()


def upper_edge(bin: Tensor) -> Tensor:
    """Return the largest absolute error in each bin, float64; infinity for the last bin."""
    edge = torch.exp2(bin.double() / PER_OCTAVE - OCTAVES)
    return torch.where(bin > 2 * OCTAVES * PER_OCTAVE, torch.inf, edge)


def counts_of(kind: Kind, objective: Objective, shape: tuple[int, int], outputs: Tensor, batch: Batch) -> Tensor:
    """Return how many of the real rows of a batch have a score in which bin, int64 (G, N). It runs under `vmap`."""
    groups, bins = shape
    ok = torch.ones_like(batch.rows, dtype=torch.bool) if batch.ok is None else batch.ok
    if isinstance(objective, Classification):
        own = class_bins(outputs).gather(1, batch.y[:, None])
        of = batch.y[:, None] if kind == "class" else torch.zeros_like(own)
        known = ok[:, None]
    else:
        y = batch.y.double()
        own = error_bins((objective.predicted(outputs.double()) - y).abs())
        of = torch.arange(groups, device=y.device).expand(own.shape)
        known = ok[:, None] & ~y.isnan()
    places = (of * bins + own).flatten()
    none = torch.zeros(groups * bins, dtype=torch.int64, device=places.device)
    return none.scatter_add(0, places, known.flatten().long()).view(groups, bins)


def own_counts(
    context: ClientContext, w: Tree, data: ClientData, logits: Callable[[Model, Tree, Batch], Tensor], kind: Kind
) -> ScoreCounts:
    """Count the scores of a client's own validation rows, for each subset of the modalities that its model reads.

    With "class", a class with fewer rows than the device's limit `min_rows_per_class` is left out.

    Args:
        context: the client context.
        w: the client's own model.
        data: the client's validation rows.
        logits: returns the logits of the model with the parameters `w`, (B, C).
        kind: the option `[evaluate] conformal`.
    """
    model, objective = context.model, context.objective
    _, *rest = counts_shape(kind, model, objective)
    shape = rest[0], rest[1]
    found = []
    for subset in subsets_of("all", model.modalities):
        total = torch.zeros(shape, dtype=torch.int64, device=data.num_rows.device)

        def step(total: Tensor, batch: Batch, subset: Sequence[str] = subset) -> Tensor:
            ok = torch.ones_like(batch.rows, dtype=torch.bool) if batch.ok is None else batch.ok
            for m in subset:
                ok = ok & batch.present[m] if m in batch.present else ok
            part = replace(batch, x={m: batch.x[m] for m in subset}, ok=ok)
            return total + counts_of(kind, objective, shape, logits(model, w, part), part)

        found.append(data.fold(step, total) if set(subset) <= set(context.modalities) else total)
    counts = torch.stack(found)
    if kind == "class" and (least := data.min_rows_per_class) > 1:
        counts = torch.where(counts.sum(-1, keepdim=True) >= least, counts, 0)
    return ScoreCounts(counts)


def possible_counts(fed: Federation, kind: Kind) -> Accept:
    """Return an `accept` function for `fed.ask`, which drops counts of another shape."""
    wanted = counts_shape(kind, fed.context.model, fed.context.objective)

    def flaw(client: int, reply: ScoreCounts) -> str:
        found = tuple(reply.in_bins.shape)
        return "" if found == wanted else f"has counts of the shape {found}, expected {wanted}"

    return flaw


@dataclass(frozen=True)
class Conformal:
    """The counts of the scores of the validation rows, from which sets and intervals of any coverage follow.

    Attributes:
        kind: "split", or "class" for a promise that holds for the rows of each class.
        group_by: how clients are grouped.
        counts: group of clients -> subset of the modalities -> counts (G, N), int64.
    """

    kind: str
    group_by: str
    counts: Mapping[str, Mapping[str, Tensor]]

    @classmethod
    def of(
        cls,
        kind: Kind,
        group_by: GroupBy,
        replies: Replies,
        modalities: Sequence[str],
        reads: Callable[[int], Sequence[str]],
    ) -> Self:
        """Add up the counts of the clients of each group. Under secure aggregation there is only one group.

        Args:
            kind: the option `[evaluate] conformal`.
            group_by: how clients are grouped.
            replies: `ScoreCounts` of each client.
            modalities: the modalities of the model.
            reads: returns the modalities that a client's model reads.
        """
        if isinstance(replies, SummedReplies):
            groups = {EVERYBODY: replies.total("in_bins").round().long()}
        else:
            groups = {}
            for client, reply in replies.items():
                own = {"all": EVERYBODY, "client": str(client), "modalities": named(reads(client))}
                for group in dict.fromkeys((EVERYBODY, own[group_by])):
                    groups[group] = groups[group] + reply.in_bins if group in groups else reply.in_bins
        names = [named(subset) for subset in subsets_of("all", tuple(modalities))]
        counts = {group: dict(zip(names, total.cpu(), strict=True)) for group, total in groups.items()}
        return cls(kind, group_by, counts)

    def group_of(self, client: int | None, modalities: Sequence[str]) -> str:
        """Return the group of a client that holds these modalities, or that of everybody without a client."""
        if client is None or self.group_by == "all":
            return EVERYBODY
        return str(client) if self.group_by == "client" else named(modalities)

    def limits(self, group: str, subset: str, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the last bin that belongs to the sets, int64 (G,), and the number of calibration rows, int64 (G,).

        With n rows, it is the bin of the score with rank ceil((n + 1) * coverage).

        Raises:
            RecipeError: `coverage` is not between 0 and 1, or so few rows cannot promise it.
        """
        if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0.0 < coverage < 1.0:
            raise RecipeError(f"coverage = {coverage!r}: must be above 0 and below 1, such as 0.9")
        counts = self.counts.get(group, {}).get(subset)
        rows = torch.zeros(1, dtype=torch.int64) if counts is None else counts.sum(-1)
        least = math.ceil(coverage / (1.0 - coverage) - 1e-9)
        if counts is None or bool((rows < least).any()):
            raise RecipeError(self._too_few(group, subset, coverage, rows, least))
        ranks = torch.tensor([math.ceil((n + 1) * coverage - 1e-9) for n in rows.tolist()])
        return (counts.cumsum(-1) < ranks[:, None]).sum(-1), rows

    def _too_few(self, group: str, subset: str, coverage: float, rows: Tensor, least: int) -> str:
        """Return why the coverage is refused, and what to do."""
        place = int(rows.argmin())
        have = int(rows[place])
        of_part = f" of class or target {place}" if len(rows) > 1 else ""
        whose = "" if group == EVERYBODY else f" of the clients in group '{group}'"
        largest = math.floor(1000 * have / (have + 1)) / 1000
        cures = [f"ask for coverage = {largest:g} at most"] if largest else []
        cures += ["use more validation rows ([clients] validation)"]
        cures += [] if group == EVERYBODY else ["leave `client` out to use the rows of all clients"]
        text = ", or ".join(cures)
        return (
            f"coverage = {coverage:g} from {subset.replace('+', ' + ')} needs "
            f"{counted(least, 'validation row', 'validation rows')}{of_part}, and there {'is' if have == 1 else 'are'} "
            f"{have}{whose} with these modalities. {text[0].upper()}{text[1:]}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the entry `conformal` of result.json. Counts are lists of [group, bin, rows] without zeros."""
        tables = {
            group: {
                subset: {
                    "shape": list(own.shape),
                    "rows": [[*at, int(own[tuple(at)])] for at in own.nonzero().tolist()],
                }
                for subset, own in subsets.items()
            }
            for group, subsets in self.counts.items()
        }
        return {"kind": self.kind, "group_by": self.group_by, "counts": tables}

    @classmethod
    def read(cls, said: Mapping[str, Any], shape: tuple[int, int]) -> Self:
        """Return the counts that `facts` wrote.

        Args:
            said: the entry.
            shape: (G, N) of the model.

        Raises:
            ValueError: the entry has another form.
        """
        counts: dict[str, dict[str, Tensor]] = {}
        try:
            for group, subsets in said["counts"].items():
                for subset, table in subsets.items():
                    found = torch.zeros(shape, dtype=torch.int64)
                    for of, bin, rows in table["rows"]:
                        if not (type(rows) is int and 0 <= rows < 2**53 and 0 <= of < shape[0] and 0 <= bin < shape[1]):
                            raise ValueError(f"counts {rows!r} rows in bin {bin!r}")
                        found[of, bin] = rows
                    counts.setdefault(str(group), {})[str(subset)] = found
            return cls(str(said["kind"]), str(said["group_by"]), counts)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"its conformal counts are damaged ({error!r})") from error


@dataclass(frozen=True)
class PredictionSets:
    """The result of `predict_set`, for n rows.

    Attributes:
        coverage: the promised probability that a row's set, or the interval of each target, holds the truth.
        group: the group of clients whose validation rows the promise rests on.
        subsets: for each row, the modalities that its prediction uses, such as `audio+text`.
        rows: for each row, the least number of validation rows behind its set, int64 (n,).
        sets: which classes are in a row's set, bool (n, C); None in regression. A set may be empty.
        low: the lower ends of the intervals, float64 (n, T); None in classification.
        high: the upper ends.
        class_names: the names of the classes, if the data has names.
    """

    coverage: float
    group: str
    subsets: tuple[str, ...]
    rows: Tensor
    sets: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    class_names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.subsets)

    def __repr__(self) -> str:
        what = "intervals" if self.sets is None else f"sets of {self.sizes.double().mean():.2f} classes on average"
        return f"PredictionSets({len(self)} rows, coverage {self.coverage:g}, {what}, group '{self.group}')"

    @property
    def sizes(self) -> Tensor:
        """The number of classes in each set, int64 (n,), or the width of each interval, float64 (n, T)."""
        if self.sets is not None:
            return self.sets.sum(1)
        assert self.low is not None
        assert self.high is not None
        return self.high - self.low

    @property
    def classes(self) -> list[tuple[str | int, ...]]:
        """The classes in each set, by name if they have names. Empty in regression."""
        rows = [] if self.sets is None else self.sets.tolist()
        names: Sequence[str | int] = self.class_names or range(0 if self.sets is None else self.sets.shape[1])
        return [tuple(name for name, held in zip(names, row, strict=True) if held) for row in rows]


def prediction_sets(
    conformal: Conformal,
    predicted: Tensor,
    used: Mapping[str, Tensor],
    group: str,
    coverage: float,
    *,
    of_classes: bool,
    class_names: tuple[str, ...] | None = None,
) -> PredictionSets:
    """Return the sets or intervals of some rows.

    Args:
        conformal: the counts.
        predicted: the result of `predict`: logits (n, C), or values (n, T).
        used: modality -> which rows use it, bool (n,), as `used` returns it.
        group: the group of clients.
        coverage: the promised probability.
        of_classes: whether `predicted` holds logits of classes.
        class_names: the names of the classes, if the data has names.

    Raises:
        RecipeError: a row has no modality, or there are too few calibration rows.
    """
    table = torch.stack(list(used.values()), 1).tolist()
    subsets = tuple("+".join(m for m, reads in zip(used, row, strict=True) if reads) for row in table)
    if "" in subsets:
        raise RecipeError(f"row {subsets.index('')} of x has no modality that the model reads. Leave it out")
    n, predicted = len(subsets), predicted.detach().cpu().double()
    rows = torch.zeros(n, dtype=torch.int64)
    last = torch.zeros(n, predicted.shape[1], dtype=torch.int64)
    for subset in dict.fromkeys(subsets):
        limit, known = conformal.limits(group, subset, coverage)
        here = torch.tensor([one == subset for one in subsets])
        last[here], rows[here] = limit.expand(predicted.shape[1]), known.min()
    if of_classes:
        sets = class_bins(predicted) <= last
        return PredictionSets(coverage, group, subsets, rows, sets, class_names=class_names)
    wide = upper_edge(last)
    return PredictionSets(coverage, group, subsets, rows, low=predicted - wide, high=predicted + wide)
