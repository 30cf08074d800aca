"""The scores that clients and evaluation clients report.

In server evaluation, the server sends the global model to the evaluation clients, which hold the server's test and
validation rows. They answer with `Scores`. In personal evaluation, clients answer with an `OwnScore` on their own test
rows. Both messages contain sums, and the objective computes metrics from them. The hooks
with which a method says which models they score stand in `Algorithm` (`algorithms/base.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, READ, Message, carries, message
from polyfed.core.option_checks import AT_LEAST_ONE, EVERY, NOT_NEGATIVE, check_ranges
from polyfed.core.request import Accept, HeldOut
from polyfed.core.tree import SHARED, Tree, blocks
from polyfed.evaluation.conformal import GroupBy, Kind
from polyfed.evaluation.subsets import Interval, Which, part_values, with_all
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.objective import Objective
from polyfed.objective.report import moments
from polyfed.training import ClientData
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.prototypes import Prototypes


@message
class ModelToEvaluate(Message):
    """The model to evaluate.

    If `unimodal` is "prototype", `prototypes` holds class means (C, E) of each modality's features over the clients'
    training rows. `known`, bool (C,), says which classes have a mean. Otherwise both trees are empty.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"), optional=True)
    known: Tree = carries("statistic", dtype="bool", optional=True, shape=("classes",))


@message
class ClassMeans(Message):
    """Class means of a client's training rows.

    `prototypes` holds the class means (C, E) of each modality's features, with zeros for classes without rows.
    `rows_per_class` holds the number of rows of each class, (C,), under the key `shared`. If some rows lack a modality,
    the modality's name is another key, whose value (C,) counts only the rows that have the modality.
    """

    prototypes: Tree = carries("prototypes", shape=("classes", "features"), blocks=(READ,))
    rows_per_class: Tree = carries(
        "statistic", dtype="float32", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM, blocks=(READ, SHARED)
    )


@message
class Scores(Message):
    """Sums over the rows of an evaluation client, from which the objective computes its metrics (`polyfed.objective`).

    `sums` (S,) is for predictions from all modalities. `exact` (E,) holds the metrics that need all rows at once.
    `unimodal` holds, for each modality, the sums over the rows that have it, from it alone. `parts` (P, F) holds the
    `moments` of the main score for each part of the rows (`part_values`), and `clusters` those over natural clients
    instead of rows, if the rows belong to several.
    """

    sums: Tensor = carries("statistic", dtype="sums", shape=(None,))
    exact: Tensor = carries("statistic", dtype="sums", shape=(None,))
    unimodal: Tree = carries("statistic", dtype="sums", shape=(None,))
    parts: Tensor = carries("statistic", dtype="sums", shape=(None, None))
    clusters: Tensor = carries("statistic", dtype="sums", shape=(None, None))


SCORED = "how well a model that the server chooses predicts the test rows: each request can tell about a bit of any row"
"""The text for the option `tells` of a score on a client's own test rows."""


@message
class OwnScore(Message):
    """A client's report on its own test rows: the objective's sums, and the number of rows.

    In classification, `sums` is a single number: the number of rows that the client's model predicts correctly. Only
    then are both fields counts, and a device can add noise to them.
    """

    sums: Tensor = carries("statistic", dtype="sums", shape=("own",), sum_only=True, tells=SCORED, counted=True)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, sum_only=True, counted=True)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how to evaluate: the [evaluate] section.

    Attributes:
        every: rounds between two evaluations; 0 evaluates only the last round, which is always evaluated.
        personal: whether to evaluate clients on their own test rows, if they have any.
        clients: number of clients that evaluate on their own test rows, drawn anew each time; None for all, which takes
            long for hundreds of thousands.
        own_validation: whether clients also score the model on their own validation rows (of split 2 on a device), for
            `personal_validation`. `[stop] metric = "personal_validation.weighted"` sets it, and `[clients]
            personal_validation` without `conformal`.
        unimodal: how to predict from a single modality: `head` by its slice of a linear head (OGM-GE), `zero` with the
            features of all others at zero, or `prototype` by the nearest class mean of its features, which every client
            sends before each evaluation (kind `prototypes`); only for algorithms that average parameters. `auto` is
            `head` if the model has a linear head, else `zero`.
        subsets: which subsets of the modalities to score (docs/missing.md): `none`, `each` alone and all but one, `all`
            (up to five modalities), or the mean over those of each of the `sizes`.
        conformal: whether clients count how well the final model predicts their validation rows, so that `predict_set`
            can return sets of classes, or intervals, that hold the truth with a promised probability (docs/missing.md):
            `none`, `split` for all rows together, or `class` for the rows of each class.
        conformal_groups: for which clients the promise holds: `all` together, those with the same `modalities`, or each
            `client`. Under secure aggregation, only `all`.
        shrinkage: whether clients also count by how much each missing modality would shrink the set of classes of a
            row. Intervals need no further counts.
    """

    every: Annotated[int, EVERY] = 1
    personal: bool = True
    clients: Annotated[int | None, AT_LEAST_ONE] = None
    unimodal: Literal["auto", "head", "zero", "prototype"] = "auto"
    own_validation: bool = False
    subsets: Which = "none"
    conformal: Kind = "none"
    conformal_groups: GroupBy = "all"
    shrinkage: bool = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[evaluate]", self)

    @property
    def reads_validation(self) -> bool:
        """Whether clients read their own validation rows."""
        return self.own_validation or self.conformal != "none"

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        result = {} if self.personal else {"clients": "personal = false"}
        without = dict.fromkeys(("conformal_groups", "shrinkage"), "conformal = 'none'")
        return result | (without if self.conformal == "none" else {})

    def due(self, round: int, rounds: int) -> bool:
        """Return whether to evaluate round number `round` of `rounds`."""
        return round == rounds or (self.every > 0 and round % self.every == 0)

    def asked(self, fed: Federation, held_out: HeldOut = "test") -> Sequence[int]:
        """Return the clients that evaluate on their own test or validation rows in this round, in ascending order."""
        tested = fed.clients.tested if held_out == "test" else fed.clients.validated
        if self.clients is None or self.clients >= len(tested):
            return tested
        places = keys.choice(keys.key(fed.seed, "evaluated", fed.round), len(tested), self.clients)
        return [tested[place] for place in places]


class OfClients(NamedTuple):
    """What clients' models reached on the clients' own rows.

    Attributes:
        group: metric -> value, as in result.json.
        scores: client -> its score. Empty under secure aggregation.
        intervals: metric -> its rows and its interval of 95 %.
    """

    group: dict[str, float]
    scores: dict[int, float]
    intervals: dict[str, Interval]


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation.

    Attributes:
        metrics: group -> metric -> value, as in result.json.
        personal: client -> the objective's `SCORE`, such as accuracy, on the client's own test rows.
        intervals: group -> metric -> its rows and its interval of 95 %, as in result.json.
        confusion: the confusion matrix (C, C) of the server's test rows, or None. A method that evaluates several
            models there adds their matrices.
        moments: the `moments` of the global model's score over test rows (`rows`) and over their natural clients
            (`clients`), from which the score of several folds together follows, with its interval.
    """

    metrics: dict[str, dict[str, float]]
    personal: dict[int, float] = field(default_factory=dict)
    confusion: Tensor | None = None
    intervals: dict[str, dict[str, Interval]] = field(default_factory=dict)
    moments: dict[str, list[float]] = field(default_factory=dict)


def _exact(objective: Objective, rows: Sequence[Tree]) -> list[float]:
    """Return the metrics that need all rows at once, from the outputs and labels of each batch."""
    outputs, y = (torch.cat([part[name] for part in rows]).cpu() for name in ("outputs", "y"))
    return objective.exact_scores(outputs, Batch({}, y, torch.arange(len(y))))


def joined(on_server: Measured, on_clients: Measured) -> Measured:
    """Join what was measured on the server's rows with what was measured on the clients' own."""
    return replace(
        on_server,
        metrics=on_server.metrics | on_clients.metrics,
        personal=on_clients.personal,
        intervals=on_server.intervals | on_clients.intervals,
    )


def rows_alone(each: Sequence[Mapping[str, Interval]]) -> dict[str, Interval]:
    """Return how many rows stand behind the mean of a metric over several models on the same rows: no interval."""
    most = {name: max(known[name]["rows"] for known in each if name in known) for known in each for name in known}
    return {name: {"rows": rows, "models": len(each)} for name, rows in most.items()}


def total(matrices: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of the confusion matrices of several models, or None if there is none."""
    there = [matrix for matrix in matrices if matrix is not None]
    return torch.stack(there).sum(0) if there else None


@dataclass(frozen=True)
class Predictor:
    """Predicts with a client's own model, by default with the logits of the recipe's model (method `logits`)."""

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Return scores (B, C). This class returns the logits of the model with parameters `w`.

        The class with the largest score is predicted. This method runs under vmap.
        """
        return model.logits(w, batch)


def scores(
    context: ClientContext, got: ModelToEvaluate, data: ClientData, unimodal: str, subsets: Which = "none"
) -> Scores:
    """Compute a model's scores on all rows of a client dataset: from all modalities, from each one, and from subsets.

    Args:
        context: the context of the evaluation client. Each of its modalities is also evaluated alone. If `unimodal` is
            "prototype", this applies only to modalities with class means.
        got: the parameters, and class means under `unimodal = "prototype"`. If the parameters come from a client that
            lacks modalities, the model predicts from that client's modalities.
        unimodal: how to predict from a single modality; see `Evaluation`.
        subsets: which subsets of the modalities to score.
    """
    model, objective, w = context.model, context.objective, got.params
    near = {m: Prototypes(mean, got.known[m]) for m, mean in got.prototypes.items()}
    lacking = set(blocks(model.names(model.modalities))) - set(blocks(w))
    # with an explicit `head`, a model without a linear head raises its own error
    by_head = unimodal == "head" or (unimodal == "auto" and model.linear_head)
    mode: Literal["head", "zero"] = "head" if by_head else "zero"
    known = near if unimodal == "prototype" else model.modalities
    reads = () if objective.BY_MODALITY else context.modalities
    alone = [m for m in reads if m in model.modalities and m in known and m not in lacking]

    def single(features: Mapping[str, Tensor], modality: str, batch: Batch) -> Tensor:
        if unimodal == "prototype":
            outputs = class_mean_scores(model, features, modality, batch, near[modality])
        else:
            outputs = model.unimodal_logits(w, features, modality, batch, mode)
        return objective.sums(outputs, replace(batch, ok=with_all((modality,), batch)), brief=True)

    def outputs_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        if lacking:
            batch = replace(batch, x={m: x for m, x in batch.x.items() if m not in lacking})
        features = model.features(w, batch)
        return objective.outputs(model, w, batch, features), features

    none = torch.zeros(0, 0, device=data.num_rows.device)
    if objective.WHOLE:
        whole = all_rows(data, lambda batch: outputs_of(batch)[0])
        assert whole is not None, "an evaluation client has rows"
        return Scores(objective.sums(*whole), torch.zeros(0, device=data.num_rows.device), {}, none, none)

    codes, size = data.clusters, 0 if data.clusters is None else int(data.clusters.max()) + 1

    def step(carry: tuple[dict[str, Tensor], list[Tree]], batch: Batch) -> tuple[dict[str, Tensor], list[Tree]]:
        total, rows = carry
        outputs, features = outputs_of(batch)
        result = {ALL: objective.sums(outputs, batch)} | {m: single(features, m, batch) for m in alone}
        values = part_values(subsets, model, objective, w, features, batch, outputs)
        result[PARTS] = moments(values)
        if codes is not None:
            table = values.new_zeros(len(values), size, values.shape[-1])
            result[CLUSTERS] = table.index_add_(1, codes[batch.rows], values)
        kept = [*rows, {"outputs": outputs, "y": batch.y}] if objective.exact else rows
        return {name: total[name] + value if name in total else value for name, value in result.items()}, kept

    sums, rows = data.fold(step, ({}, []))
    exact = _exact(objective, rows) if objective.exact else []
    parts = sums.pop(PARTS)
    clusters = moments(sums.pop(CLUSTERS)) if codes is not None else none
    return Scores(sums.pop(ALL), torch.tensor(exact, device=data.num_rows.device), sums, parts, clusters)


ALL, PARTS, CLUSTERS = "all modalities", "parts of the rows", "parts of the clients"
"""Keys of the sums from all modalities and of the parts, next to single modalities, whose names have no space."""


def all_rows(
    data: ClientData, function: Callable[[Batch], Tensor], batch_size: int = FOLD_BATCH
) -> tuple[Tensor, Batch] | None:
    """Return the outputs for all rows of a client dataset, and one batch of all rows, with labels but without inputs.

    The result is None if there are no rows. This function runs under vmap.
    """
    result = data.collect(lambda batch: {"outputs": function(batch), "y": batch.y}, batch_size=batch_size)
    if not result:
        return None
    rows = torch.arange(len(result["y"]), device=result["y"].device)
    return result["outputs"], Batch(x={}, y=result["y"], rows=rows, ok=rows < data.num_rows)


def class_mean_scores(
    model: Model, features: Mapping[str, Tensor], modality: str, batch: Batch, near: Prototypes
) -> Tensor:
    """Return the negative Euclidean distance of each row's feature to each class mean, (B, C).

    The entry is -inf for a class without a mean.
    """
    z = model.vector(masked({modality: features[modality]}, batch.present)[modality])
    return (-near.distances(z)).masked_fill(~near.active, float("-inf"))


def own_score(context: ClientContext, w: Tree, data: ClientData, predictor: Predictor = Predictor()) -> OwnScore:
    """Compute a client's report on its own test rows.

    Args:
        w: the client's own model.
        data: the client's test rows.
        predictor: how to predict with `w`.
    """
    model, objective = context.model, context.objective
    kind = torch.float32 if objective.OF_CLASSES else torch.float64
    zero = torch.zeros(objective.own_shape(context.num_classes), dtype=kind, device=data.num_rows.device)

    def outputs(batch: Batch) -> Tensor:
        by_modality = objective.BY_MODALITY
        return objective.outputs(model, w, batch) if by_modality else predictor.logits(model, w, batch)

    if objective.WHOLE:
        result = all_rows(data, outputs)
        return OwnScore(zero if result is None else objective.own_sums(*result), data.num_rows)
    sums = data.fold(lambda total, batch: total + objective.own_sums(outputs(batch), batch), zero)
    return OwnScore(sums, data.num_rows)


def possible(fed: Federation) -> Accept:
    """Return an `accept` function for `fed.ask`, which drops impossible scores, such as 11 correct of 10 test rows."""

    def flaw(client: int, reply: OwnScore) -> str:
        return fed.context.objective.flaw(reply.sums, float(reply.num_rows))

    return flaw
