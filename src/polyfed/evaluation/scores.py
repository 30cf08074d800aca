"""Scores of models: which models a method has trained, and what clients and evaluation clients report about them.

Server evaluation: the global model is sent to the evaluation clients, which hold the server's test and validation rows
and answer with `Scores`. Personal evaluation: clients answer with an `OwnScore` on their own test rows. Both contain
sums, which `metrics.py` turns into metrics. `TrainedModels` has the hooks by which a method names its models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, READ, Message, carries, cut, message
from polyfed.core.request import Send
from polyfed.core.schema import EVERY, NOT_NEGATIVE, check_ranges
from polyfed.core.tree import SHARED, Tree, blocks
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData
from polyfed.training.prototypes import Prototypes


@message
class ModelToEvaluate(Message):
    """The model to evaluate.

    With `unimodal = "prototype"` also class means (C, E) of its features over the clients' training rows, by modality,
    and which classes have one, bool (C,); both are empty otherwise.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    known: Tree = carries("statistic", shape=("classes",))


@message
class ClassMeans(Message):
    """Class means of a client's training rows.

    Class means (C, E) of the features by modality, zeros for a class without rows, and rows per class (C,), under
    `shared` and under each modality that some rows lack.
    """

    prototypes: Tree = carries("prototypes", shape=("classes", "features"), blocks=(READ,))
    rows_per_class: Tree = carries(
        "statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM, blocks=(READ, SHARED)
    )


@message
class Scores(Message):
    """Sums over the rows of an evaluation client, which make the metrics of the task (`polyfed.objective`).

    The sums over all modalities (S,), the exact metrics that need all rows at once (E,), and for each modality the sums
    of predictions from this modality alone.
    """

    sums: Tensor = carries("statistic", shape=(None,))
    exact: Tensor = carries("statistic", shape=(None,))
    unimodal: Tree = carries("statistic", shape=(None,))


@message
class OwnScore(Message):
    """What a client reports of its own test rows: the task's sums, and how many rows there are.

    For classes the sums are one number, the rows that the client's model predicts correctly.
    """

    sums: Tensor = carries("statistic", shape=("own",))
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how to evaluate: the [evaluate] section.

    Attributes:
        every: rounds between two evaluations; the last round is always evaluated; 0 evaluates only the last.
        personal: whether clients with test rows of their own are evaluated on them.
        unimodal: how one modality alone predicts: `head`, its slice of a linear head (as in OGM-GE); `zero`, the model
            with all other features set to zero; `prototype`, the nearest class mean of its features over the training
            rows, which every client sends before each evaluation (kind `prototypes`; only with methods that average
            parameters). `auto` is `head` where the model has a linear head, else `zero`.
    """

    every: Annotated[int, EVERY] = 1
    personal: bool = True
    unimodal: Literal["auto", "head", "zero", "prototype"] = "auto"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[evaluate]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether round number `round` of `rounds` is evaluated."""
        return round == rounds or (self.every > 0 and round % self.every == 0)


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation.

    Attributes:
        metrics: group -> metric -> value, as in result.json.
        personal: client -> the task's `SCORE`, such as accuracy, on its own test rows.
    """

    metrics: dict[str, dict[str, float]]
    personal: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Predictor:
    """How a client's own model predicts: here by the logits of the recipe's model. A subclass predicts otherwise."""

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the model with parameters `w`, or other scores whose largest is the predicted class's.

        Runs under vmap.
        """
        return model.logits(w, batch)


class TrainedModels(ABC):
    """Which models a method trains. `Algorithm.evaluate` and `Run.predict` both use these hooks, so that they agree."""

    model_for: ClassVar[str] = "client"
    """Whom a personal model belongs to: a `client`, or a `silo`, whose clients share one."""

    @property
    def own_models(self) -> Literal["none", "server", "clients"]:
        """Where personal models are kept: nowhere, in the server's state, or in the clients' local state.

        The default is `clients` for a method that overrides `own_params`, else `none`.
        """
        return "none" if type(self).own_params is TrainedModels.own_params else "clients"

    @property
    def predictor(self) -> Predictor:
        """How a personal model predicts."""
        return Predictor()

    def global_params(self, state: Any) -> Tree | None:
        """The global model, which is evaluated on the server's rows; None where the method has none."""
        return state.params if self.own_models == "none" else None

    @abstractmethod
    def to_judge(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        """What these clients receive for personal evaluation: one message, or a mapping with one for each."""

    def own_params(self, got: Any, local: Tree) -> Tree:
        """The model that a client is evaluated with on its own test rows: the received one unless it keeps its own.

        Args:
            got: the message from `to_judge`.
            local: the client's local state.
        """
        params: Tree = got.params
        return params

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """The modalities that a client's model reads: those of the client."""
        return fed.clients.owned(client)

    def client_model(self, client: int, state: Any, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        """The model that a client is evaluated with, computed in a simulation, where all local states are available.

        Args:
            client: the client's number.
            state: the server's state.
            fed: the federation; this hook sends no requests.
            local: returns the local state of a client, given its number.
        """
        send = self.to_judge(state, fed, [client])
        got = cut(send if isinstance(send, Message) else send[client], fed.clients[client].blocks)
        return self.own_params(got, local(client))


def scores(context: ClientContext, got: ModelToEvaluate, data: ClientData, unimodal: str) -> Scores:
    """Compute the scores of a model on all rows of a client dataset, from all modalities and from each one alone.

    Args:
        context: the context of the evaluation client; its modalities are also evaluated alone, under `prototype` only
            those with class means.
        got: the parameters, and class means under `unimodal = "prototype"`. Parameters of a client that lacks
            modalities predict from the modalities that they have.
        data: the client dataset.
        unimodal: how one modality alone predicts, see `Evaluation`.
    """
    model, objective, w = context.model, context.objective, got.params
    near = {m: Prototypes(mean, got.known[m]) for m, mean in got.prototypes.items()}
    lacking = set(blocks(model.names(model.modalities))) - set(blocks(w))
    # an explicit `head` is passed on even if the model has no linear head, so that the model raises its own error
    by_head = unimodal == "head" or (unimodal == "auto" and model.linear_head)
    mode: Literal["head", "zero"] = "head" if by_head else "zero"
    known = near if unimodal == "prototype" else model.modalities
    alone = [m for m in context.modalities if m in model.modalities and m in known and m not in lacking]
    if objective.BY_MODALITY:
        alone = []

    def single(features: Mapping[str, Tensor], modality: str, batch: Batch) -> Tensor:
        if unimodal == "prototype":
            return class_mean_scores(model, features, modality, batch, near[modality])
        return model.unimodal_logits(w, features, modality, batch, mode)

    def outputs_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        if lacking:
            batch = replace(batch, x={m: x for m, x in batch.x.items() if m not in lacking})
        features = model.features(w, batch)
        return objective.outputs(model, w, batch, features), features

    if objective.WHOLE:
        whole = all_rows(data, lambda batch: outputs_of(batch)[0])
        assert whole is not None, "an evaluation client has rows"
        return Scores(objective.sums(*whole), torch.zeros(0, device=data.num_rows.device), {})

    def step(carry: tuple[dict[str, Tensor], list[Tree]], batch: Batch) -> tuple[dict[str, Tensor], list[Tree]]:
        total, rows = carry
        outputs, features = outputs_of(batch)
        found = {ALL: objective.sums(outputs, batch)}
        found |= {m: objective.sums(single(features, m, batch), batch, brief=True) for m in alone}
        kept = [*rows, {"outputs": outputs, "y": batch.y}] if objective.exact else rows
        return {name: total[name] + value if name in total else value for name, value in found.items()}, kept

    sums, rows = data.fold(step, ({}, []))
    exact: list[float] = []
    if objective.exact:
        outputs, y = (torch.cat([part[name] for part in rows]).cpu() for name in ("outputs", "y"))
        exact = objective.exact_scores(outputs, Batch({}, y, torch.arange(len(y))))
    return Scores(sums.pop(ALL), torch.tensor(exact, device=data.num_rows.device), sums)


ALL = "all modalities"
"""The sums from all modalities, beside those from each one alone; a modality's name has no space."""


def all_rows(data: ClientData, function: Callable[[Batch], Tensor]) -> tuple[Tensor, Batch] | None:
    """The outputs for all rows of a client dataset, and these rows as one batch without samples; None without rows.

    Runs under vmap.
    """
    found = data.collect(lambda batch: {"outputs": function(batch), "y": batch.y})
    if not found:
        return None
    rows = torch.arange(len(found["y"]), device=found["y"].device)
    return found["outputs"], Batch(x={}, y=found["y"], rows=rows, ok=rows < data.num_rows)


def class_mean_scores(
    model: Model, features: Mapping[str, Tensor], modality: str, batch: Batch, near: Prototypes
) -> Tensor:
    """The negative Euclidean distance of each row's feature to each class mean, (B, C); -inf for a class without one.

    A row that lacks the modality has a zero feature, as in training.
    """
    z = model.vector(masked({modality: features[modality]}, batch.present)[modality])
    return (-near.distances(z)).masked_fill(~near.active, float("-inf"))


def own_score(context: ClientContext, w: Tree, data: ClientData, predictor: Predictor = Predictor()) -> OwnScore:
    """Compute what a client reports of its own test rows.

    Args:
        context: the client context.
        w: the client's own model.
        data: the client's test rows.
        predictor: how `w` predicts.
    """
    model, objective = context.model, context.objective
    kind = torch.float32 if objective.OF_CLASSES else torch.float64
    zero = torch.zeros(objective.own_shape(context.num_classes), dtype=kind, device=data.num_rows.device)

    def outputs(batch: Batch) -> Tensor:
        by_modality = objective.BY_MODALITY
        return objective.outputs(model, w, batch) if by_modality else predictor.logits(model, w, batch)

    if objective.WHOLE:
        found = all_rows(data, outputs)
        return OwnScore(zero if found is None else objective.own_sums(*found), data.num_rows)
    sums = data.fold(lambda total, batch: total + objective.own_sums(outputs(batch), batch), zero)
    return OwnScore(sums, data.num_rows)
