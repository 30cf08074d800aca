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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError, counted
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.request import Accept
from polyfed.core.tree import Tree
from polyfed.evaluation.shrinkage import LEVELS, WIDTH, SizeCounts, expected_sizes, level_of, own_sizes
from polyfed.evaluation.subsets import Which, named, named_by_row, subsets_of, with_all
from polyfed.federation.context import ClientContext
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.objective.report import raised
from polyfed.training import ClientData

Kind = Literal["none", "split", "class"]
GroupBy = Literal["all", "modalities", "client"]

BINS = 1000
"""Bins of the score of a class, 1 - p, from 0 to 1. Bin b holds the scores up to b / BINS, and bin 0 only 0."""

JOINED = 50
"""How many bins a device joins before it adds noise. The rank that a set needs grows with the root of their number."""

NOISY_BINS = BINS // JOINED + 1
"""Counts with noise of one subset."""

OCTAVES, PER_OCTAVE = 20, 32
"""Bins of an absolute error: from 2^-OCTAVES to 2^OCTAVES, each larger than the one before by 2^(1/PER_OCTAVE)."""

EVERYBODY = "*"
"""The group of all clients."""

TELLS = (
    "how badly a model that the server chooses predicts the validation rows, as a histogram for each subset of the "
    "modalities: a client with few rows reveals the score of each"
)


@message
class ScoreCounts(Message):
    """How many of a client's validation rows have a score in which bin, (S, G, N), for each subset of the modalities.

    The counts are 0 for a subset with a modality that the client does not hold. A row counts if it has all modalities
    of the subset. `noise` bounds the variance of the noise that a device has added to each count of joined bins; it is
    0 without noise.
    """

    in_bins: Tensor = carries(
        "statistic", dtype="int64", shape=("subsets", None, None), sum_only=True, tells=TELLS, counted=True
    )
    noise: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, sum_only=True, counted=True)

    def with_noise(self, add: Callable[[Tensor], Tensor], deviation: float) -> Self:
        """Return the counts with noise, in bins that are joined to a few, because the noise of all bins adds up.

        Args:
            add: adds noise to whole numbers, each with this deviation, and rounds.

        Raises:
            EgressError: there are counts for each class. Whether a class is left out would then depend on one row.
        """
        if self.in_bins.shape[1] > 1:
            raise EgressError(
                "[require] score_noise of the device hides a row in the counts of all classes together. Set [evaluate] "
                "conformal = 'split' in the recipe"
            )
        places = torch.arange(0, BINS + 1, JOINED)
        ends = -(-torch.arange(BINS + 1) // JOINED)
        joined = torch.zeros(*self.in_bins.shape[:2], len(places), dtype=torch.int64)
        joined.index_add_(2, ends, self.in_bins.cpu())
        result = torch.zeros_like(self.in_bins, device="cpu")
        result[:, :, places] = add(joined).to(torch.int64)
        return replace(
            self,
            in_bins=result.to(self.in_bins.device),
            noise=torch.full_like(self.noise, math.ceil((deviation + 0.5) ** 2)),  # rounding adds at most 0.5
        )


def subsets_in(reply: type[Message], which: Which, modalities: tuple[str, ...]) -> int:
    """Return for how many subsets of the modalities a reply has counts.

    Args:
        reply: the message class of the reply.
        which: the option `[evaluate] subsets`.
        modalities: the modalities of the model.
    """
    return len(subsets_of("all" if issubclass(reply, ScoreCounts) else which, modalities))


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
    context: ClientContext,
    w: Tree,
    data: ClientData,
    logits: Callable[[Model, Tree, Batch], Tensor],
    kind: Kind,
    seen: Callable[[Batch], Batch] = lambda batch: batch,
) -> ScoreCounts:
    """Count the scores of a client's own validation rows, for each subset of the modalities that its model reads.

    With "class", a class with fewer rows than the device's limit `min_rows_per_class` is left out. Under `min_group`,
    each bin holds as many rows or none (`raised`), which makes sets larger and keeps the promise.

    Args:
        w: the client's own model.
        data: the client's validation rows.
        logits: returns the logits of the model with the parameters `w`, (B, C).
        kind: the option `[evaluate] conformal`.
        seen: returns a batch as the model reads it, with all modalities of `context`.
    """
    model, objective = context.model, context.objective
    _, *rest = counts_shape(kind, model, objective)
    shape = rest[0], rest[1]
    found = []
    for subset in subsets_of("all", model.modalities):
        total = torch.zeros(shape, dtype=torch.int64, device=data.num_rows.device)

        def step(total: Tensor, batch: Batch, subset: Sequence[str] = subset) -> Tensor:
            batch = seen(batch)
            part = replace(batch, x={m: batch.x[m] for m in subset}, ok=with_all(subset, batch))
            return total + counts_of(kind, objective, shape, logits(model, w, part), part)

        found.append(data.fold(step, total) if set(subset) <= set(context.modalities) else total)
    counts = torch.stack(found)
    if kind == "class" and (least := data.min_rows_per_class) > 1:
        counts = torch.where(counts.sum(-1, keepdim=True) >= least, counts, 0)
    if (least := data.min_group) > 1:
        counts = raised(_without_near(counts, model.modalities, least), least)
    return ScoreCounts(counts, counts.sum() * 0)


def _without_near(counts: Tensor, modalities: tuple[str, ...], least: int) -> Tensor:
    """Return the counts (S, G, N) without subsets whose rows are almost those of a smaller subset.

    The rows of a larger subset are among those of a smaller one, so the difference would tell of the few others.
    """
    subsets, rows, result = subsets_of("all", modalities), counts.sum(-1), counts.clone()
    for larger, of in enumerate(subsets):
        for smaller in range(larger):
            apart = rows[smaller] - result[larger].sum(-1)
            near = (apart > 0) & (apart < least) & (result[smaller].sum(-1) > 0)
            if set(subsets[smaller]) < set(of):
                result[larger][near] = 0
    return result


SIZE_BINS = BINS // WIDTH + 1
"""Bins of `SizeCounts`."""


def own_size_counts(
    context: ClientContext,
    w: Tree,
    data: ClientData,
    logits: Callable[[Model, Tree, Batch], Tensor],
    seen: Callable[[Batch], Batch] = lambda batch: batch,
) -> SizeCounts:
    """Count, on a client's own validation rows, how sets shrink with a further modality: see `own_sizes`."""
    return own_sizes(context, w, data, logits, class_bins, SIZE_BINS, seen)


def sizes_shape(model: Model) -> tuple[int, int, int, int]:
    """Return the shape (S, M, L, N) of `SizeCounts`."""
    return len(subsets_of("all", model.modalities)), len(model.modalities), LEVELS, SIZE_BINS


def possible_counts(wanted: tuple[int, ...]) -> Accept:
    """Return an `accept` function for `fed.ask`, which drops counts of another shape."""

    def flaw(client: int, reply: ScoreCounts | SizeCounts) -> str:
        result = tuple(reply.in_bins.shape)
        exact = isinstance(reply, SizeCounts) or not int(reply.noise)
        if exact and bool((reply.in_bins < 0).any()):
            return "counts fewer than 0 rows"
        return "" if result == wanted else f"has counts of the shape {result}, expected {wanted}"

    return flaw


@dataclass(frozen=True)
class Conformal:
    """The counts of the scores of the validation rows, from which sets and intervals of any coverage follow.

    Attributes:
        kind: "split", or "class" for a promise that holds for the rows of each class.
        group_by: how clients are grouped.
        counts: group of clients -> subset of the modalities -> counts (G, N), int64.
        sizes: group of clients -> `SizeCounts`, (S, M, L, N), if clients counted them.
        noise: group of clients -> a bound on the variance of the noise in each of `NOISY_BINS` counts of a subset.
    """

    kind: str
    group_by: str
    counts: Mapping[str, Mapping[str, Tensor]]
    sizes: Mapping[str, Tensor] = field(default_factory=dict)
    noise: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: Kind,
        group_by: GroupBy,
        replies: Replies,
        modalities: Sequence[str],
        reads: Callable[[int], Sequence[str]],
        sizes: Replies | None = None,
        shares: Callable[[int], Sequence[int]] = lambda client: (client,),
    ) -> Self:
        """Add up the counts of the clients of each group. Under secure aggregation there is only one group.

        Args:
            kind: the option `[evaluate] conformal`.
            group_by: how clients are grouped.
            replies: `ScoreCounts` of each client.
            modalities: the modalities of the model.
            reads: returns the modalities that a client's model reads.
            sizes: `SizeCounts` of each client.
            shares: returns the clients that have the model of a client, such as all devices of its silo.
        """

        def added(replies: Replies, name: str = "in_bins") -> dict[str, Tensor]:
            if isinstance(replies, SummedReplies):
                return {EVERYBODY: replies.total(name).round().long()}
            groups: dict[str, Tensor] = {}
            for client, reply in replies.items():
                own = {"all": [], "client": [*map(str, shares(client))], "modalities": [named(reads(client))]}
                for group in (EVERYBODY, *own[group_by]):
                    value = getattr(reply, name)
                    groups[group] = groups[group] + value if group in groups else value.clone()
            return groups

        names = [named(subset) for subset in subsets_of("all", tuple(modalities))]
        counts = {group: dict(zip(names, total.cpu(), strict=True)) for group, total in added(replies).items()}
        more = {} if sizes is None else {group: total.cpu() for group, total in added(sizes).items()}
        noise = {group: int(total) for group, total in added(replies, "noise").items() if int(total)}
        return cls(kind, group_by, counts, more, noise)

    def group_of(self, client: int | None, modalities: Sequence[str]) -> str:
        """Return the group of a client that holds these modalities, or that of everybody without a client."""
        if client is None or self.group_by == "all":
            return EVERYBODY
        return str(client) if self.group_by == "client" else named(modalities)

    def limits(self, group: str, subset: str, coverage: float) -> tuple[Tensor, Tensor]:
        """Return the last bin that belongs to the sets, int64 (G,), and the number of calibration rows, int64 (G,).

        With n rows, it is the bin of the score with rank ceil((n + 1) * coverage). Under noise, see `_noisy_limits`.

        Raises:
            RecipeError: `coverage` is not between 0 and 1, or so few rows cannot promise it.
        """
        if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0.0 < coverage < 1.0:
            raise RecipeError(f"coverage = {coverage!r}: must be above 0 and below 1, such as 0.9")
        counts = self.counts.get(group, {}).get(subset)
        rows = torch.zeros(1, dtype=torch.int64) if counts is None else counts.sum(-1)
        if counts is not None and self.noise.get(group):
            return self._noisy_limits(group, subset, coverage, counts)
        least = math.ceil(coverage / (1.0 - coverage) - 1e-9)
        if counts is None or bool((rows < least).any()):
            raise RecipeError(self._too_few(group, subset, coverage, rows, least))
        ranks = torch.tensor([math.ceil((n + 1) * coverage - 1e-9) for n in rows.tolist()])
        return (counts.cumsum(-1) < ranks[:, None]).sum(-1), rows

    def _noisy_limits(self, group: str, subset: str, coverage: float, counts: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the same from counts with noise: a bin that is large enough unless the noise is improbably large.

        Let W_k be the noise in the first k counts, and v the variance of all of them. W is a sum of independent
        symmetric numbers that are subgaussian (Canonne, Kamath, Steinke, NeurIPS 2020), so by Levy's inequality W_k
        exceeds sqrt(2 v ln(4 / b)) for any k with probability b / 2 at most, and -W_N exceeds sqrt(2 v ln(2 / b)) with
        probability b / 2 at most. Otherwise, a bin up to which the noisy counts reach the rank for n rows, with both
        margins, reaches it without noise too. The noise does not depend on new rows, so rank and bin of the coverage
        c / (1 - b) hold the truth with probability c. b is a tenth of 1 - c.
        """
        miss = (1.0 - coverage) / 10.0
        level, spread = coverage / (1.0 - miss), math.sqrt(self.noise[group] * NOISY_BINS)
        above, below = spread * math.sqrt(2 * math.log(4 / miss)), spread * math.sqrt(2 * math.log(2 / miss))
        sums, total = counts.cumsum(-1), counts.sum(-1)
        enough = sums >= (level * (total.double() + below + 1.0) + above)[:, None]
        if not bool(enough.any(-1).all()):
            least = math.ceil((level * (below + 1.0) + above) / (1.0 - level))
            raise RecipeError(self._too_few(group, subset, coverage, total.clamp(min=0), least))
        return enough.long().argmax(-1), total

    def _too_few(self, group: str, subset: str, coverage: float, rows: Tensor, least: int) -> str:
        """Return why the coverage is refused, and what to do."""
        place = int(rows.argmin())
        have = int(rows[place])
        of_part = f" of class or target {place}" if len(rows) > 1 else ""
        whose = "" if group == EVERYBODY else f" of the clients in group '{group}'"
        largest = 0.0 if self.noise.get(group) else math.floor(1000 * have / (have + 1)) / 1000
        cures = [f"ask for coverage = {largest:g} at most"] if largest else []
        cures += ["use more validation rows ([clients] personal_validation)"]
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
            group: {subset: _table(own) for subset, own in subsets.items()} for group, subsets in self.counts.items()
        }
        result = {"kind": self.kind, "group_by": self.group_by, "counts": tables}
        result |= {"noise": dict(self.noise)} if self.noise else {}
        return result | ({"sizes": {group: _table(own) for group, own in self.sizes.items()}} if self.sizes else {})

    @classmethod
    def read(cls, said: Mapping[str, Any], shape: tuple[int, int], sizes: tuple[int, ...]) -> Self:
        """Return the counts that `facts` wrote.

        Args:
            said: the entry.
            shape: (G, N) of the model.
            sizes: (S, M, L, N) of the model.

        Raises:
            ValueError: the entry has another form.
        """
        try:
            counts = {
                str(group): {
                    str(subset): _counts(table, shape, group in said.get("noise", {}))
                    for subset, table in subsets.items()
                }
                for group, subsets in said["counts"].items()
            }
            more = {str(group): _counts(table, sizes) for group, table in said.get("sizes", {}).items()}
            noise = {str(group): int(value) for group, value in said.get("noise", {}).items()}
            if any(value < 0 for value in noise.values()):
                raise ValueError("its noise is negative")
            return cls(str(said["kind"]), str(said["group_by"]), counts, more, noise)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"its conformal counts are damaged ({error!r})") from error


def _table(counts: Tensor) -> dict[str, Any]:
    """Return counts as a list of places and numbers, without zeros."""
    return {"shape": list(counts.shape), "rows": [[*at, int(counts[tuple(at)])] for at in counts.nonzero().tolist()]}


def _counts(table: Mapping[str, Any], shape: tuple[int, ...], noisy: bool = False) -> Tensor:
    """Return counts of this shape from the result of `_table`. With noise, they may be negative.

    Raises:
        ValueError: the table does not fit.
    """
    result = torch.zeros(shape, dtype=torch.int64)
    for *at, rows in table["rows"]:
        fits = len(at) == len(shape) and all(type(i) is int and 0 <= i < n for i, n in zip(at, shape, strict=True))
        if not (fits and type(rows) is int and (noisy or rows >= 0) and abs(rows) < 2**53):
            raise ValueError(f"counts {rows!r} rows in bin {at[-1] if at else None!r}")
        result[tuple(at)] = rows
    return result


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
        shrinkage: for each modality, by how many classes, or by how much width (the mean over targets), it would shrink
            the set of a row that lacks it, float64 (n,): an expectation, NaN where it is unknown or the row has it.
            Sets of classes have it with `[evaluate] shrinkage`.
    """

    coverage: float
    group: str
    subsets: tuple[str, ...]
    rows: Tensor
    sets: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    shrinkage: Mapping[str, Tensor] = field(default_factory=dict)

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

    @property
    def helps_most(self) -> list[str | None]:
        """For each row, the missing modality that is expected to shrink its set most; None if none is."""
        if not self.shrinkage:
            return [None] * len(self)
        gains = torch.stack([gain.nan_to_num(0.0) for gain in self.shrinkage.values()])
        best, names = gains.max(0), list(self.shrinkage)
        return [
            names[place] if gain > 0 else None
            for place, gain in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


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
    subsets = tuple(named_by_row(used))
    if "" in subsets:
        raise RecipeError(f"row {subsets.index('')} of x has no modality that the model reads. Leave it out")
    n, predicted = len(subsets), predicted.detach().cpu().double()
    rows = torch.zeros(n, dtype=torch.int64)
    last = torch.zeros(n, predicted.shape[1], dtype=torch.int64)
    for subset in dict.fromkeys(subsets):
        limit, known = conformal.limits(group, subset, coverage)
        here = torch.tensor([one == subset for one in subsets])
        last[here], rows[here] = limit.expand(predicted.shape[1]), known.min()
    sets = class_bins(predicted) <= last if of_classes else None
    now = upper_edge(last).mul(2).mean(1) if sets is None else sets.sum(1).double()
    result = PredictionSets(coverage, group, subsets, rows, sets, class_names=class_names)
    if sets is None:
        wide = upper_edge(last)
        result = replace(result, low=predicted - wide, high=predicted + wide)
    return replace(result, shrinkage=_shrinkage(conformal, predicted, tuple(used), result, now))


def _shrinkage(
    conformal: Conformal, predicted: Tensor, modalities: Sequence[str], found: PredictionSets, now: Tensor
) -> dict[str, Tensor]:
    """Return the attribute `shrinkage` of some sets, whose sizes are `now` (n,)."""
    counts = conformal.sizes.get(found.group)
    every = list(conformal.counts.get(found.group, {}))
    model = tuple(dict.fromkeys(m for subset in every for m in subset.split("+")))
    gains = {m: torch.full((len(found),), torch.nan, dtype=torch.float64) for m in modalities}
    if found.sets is not None and counts is None:
        return {}
    for subset in dict.fromkeys(found.subsets):
        here = torch.tensor([one == subset for one in found.subsets])
        for m in [m for m in modalities if m not in subset.split("+")]:
            both = named([name for name in model if name in subset.split("+") or name == m])
            try:
                limit, _ = conformal.limits(found.group, both, found.coverage)
            except RecipeError:  # too few validation rows have both
                continue
            if counts is None:
                gains[m][here] = now[here] - upper_edge(limit).mul(2).mean()
            else:
                of = counts[every.index(subset), model.index(m)]
                mean = expected_sizes(of, limit.expand(predicted.shape[1]))
                gains[m][here] = now[here] - mean[level_of(predicted[here])]
    return gains
