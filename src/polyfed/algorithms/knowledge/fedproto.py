"""FedProto: clients share class prototypes. A prototype is the mean feature of a class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022. Two methods have this name, and the option `mode` chooses one. In `original`, every client keeps its own model,
and the loss pulls features towards the global prototypes of their classes. `mm_fedavg` is the baseline in the tables of
the CMSFed paper. It averages parameters as FedAvg does. Its loss includes the prototypical cross-entropy of every
modality, computed with the global prototypes.

Clients and server send class prototypes, and under `mm_fedavg` also parameters. The clients also send their number of
rows of each class. Page: docs/algorithms/fedproto.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.base import NO_GLOBAL
from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, READING, NotSearched, SearchRange
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import Predictor
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.prototypes import Prototypes, masked_mean, there

PROTOTYPE = ".prototype"
"""Suffix of the names of global prototypes in the model with which a client is evaluated."""


@message
class Shared(Message):
    """The model (`mm_fedavg` only) and the global prototypes (C, D) by modality.

    A class without a prototype has zeros.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"), optional=True)


@message
class Learned(Message):
    """Trained parameters (`mm_fedavg` only), the client's prototypes (C, D), and its number of rows per class (C,)."""

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries(
        "statistic", dtype="float32", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM
    )
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class ProtoState(State):
    """Server state.

    Attributes:
        prototypes: modality -> global prototypes.
    """

    prototypes: dict[str, Prototypes] = field(default_factory=dict)


@dataclass(frozen=True)
class NearestPrototype(Predictor):
    """Predicts the class of the nearest global prototype.

    The Tree holds the prototypes (C, D) as `<modality>.prototype`.

    If the Tree has no prototypes for any modality of a row, the client's model predicts this row.

    Attributes:
        feature_norm: length to which features are scaled first. 0 does not scale them.
    """

    feature_norm: float = 0.0

    @override
    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Return scores (B, C): `prototype_scores`, or the model's logits for a row that cannot be compared."""
        near = {m: Prototypes.received(w[m + PROTOTYPE]) for m in batch.x if m + PROTOTYPE in w}
        if not near:
            return model.logits(w, batch)
        features = model.features(w, batch)
        z = {m: model.vector(value) for m, value in features.items()}
        scores = prototype_scores(near, prototypes.at_length(z, self.feature_norm), batch)
        if not batch.present:  # every row has every modality
            return scores
        compared = torch.stack([there(batch, m) for m in near]).any(0)
        return torch.where(compared.unsqueeze(-1), scores, model.fuse(w, features, batch))


@dataclass(frozen=True, kw_only=True)
class FedProto(Averaging[ProtoState]):
    """Local training with class prototypes.

    Attributes:
        mode: `original`: every client keeps its own model, and only prototypes are sent. `mm_fedavg`: the server also
            averages the parameters, and clients use the prototypes in their loss.
        proto_weight: how clients are weighted in the global prototypes: by `count`, their rows of the class, or
            `uniform`.
        lam: lambda, weight of the squared distance to the prototypes under `original`.
        alpha_p: weight of the prototypical cross-entropy under `mm_fedavg`.
        active_rounds: number of rounds with the prototypical cross-entropy, from the second, since the first has no
            prototypes.
        feature_norm: length to which features are scaled before they are compared with prototypes; 0 does not scale
            them, as published, and then the term of `mm_fedavg` can grow without bound.
        predict_by: how a client's model predicts under `original`: by its `logits`, or by the nearest global
            `prototype`, with distances summed over modalities.
    """

    mixing: ClassVar[str] = "fedproto adds a loss on the embeddings of all modalities"
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "its prototypes are the mean features of classes"

    mode: Annotated[Literal["mm_fedavg", "original"], NotSearched("original is another method")] = "mm_fedavg"
    proto_weight: Annotated[Literal["count", "uniform"], READING] = "count"
    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 1.0, 5.0, beside=("mode", "original"))] = 1.0
    alpha_p: Annotated[
        float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 1.0, 5.0, fedavg=0.0, beside=("mode", "mm_fedavg"))
    ] = 1.0
    active_rounds: Annotated[int, NOT_NEGATIVE, NotSearched("the rounds of the paper")] = 70
    feature_norm: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 3.0, 6.0, 12.0)] = 0.0
    predict_by: Annotated[Literal["logits", "prototype"], READING] = "prototype"

    needs_embeddings: ClassVar[bool] = True
    sends: ClassVar[type[Message]] = Shared
    replies: ClassVar[type[Message]] = Learned
    evaluates: ClassVar[type[Message]] = Shared

    @property
    @override
    def trains_one_model(self) -> bool:  # type: ignore[override]
        return self.mode == "mm_fedavg" and not self.private

    @property
    @override
    def averages_models(self) -> bool:  # type: ignore[override]
        return self.mode == "mm_fedavg"

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Return whether a field is sent. With `mode = "original"`, models are never sent, so `params` is not."""
        return field != "params" or self.mode == "mm_fedavg"

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        if self.mode == "mm_fedavg":
            return result | dict.fromkeys(("lam", "predict_by"), "mode = 'mm_fedavg'")
        others = ("alpha_p", "active_rounds", "aggregation")
        return result | dict.fromkeys(others, "mode = 'original'") | {"evaluate.unimodal": NO_GLOBAL}

    @override
    def init(self, fed: Federation, params: Tree) -> ProtoState:
        return ProtoState(**vars(super().init(fed, params)))

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return dict(context.initial) if self.mode == "original" else {}

    @override
    def outgoing(self, state: ProtoState, cohort: list[int], fed: Federation) -> Shared:
        return self._shared(state)

    @override
    def merge(self, state: ProtoState, replies: Replies, fed: Federation) -> ProtoState:
        after = super().merge(state, replies, fed) if self.mode == "mm_fedavg" else state
        reports = [(reply.prototypes, reply.rows_per_class) for reply in replies.values()]
        new = prototypes.gathered(
            state.prototypes,
            reports,
            [*fed.clients.rows_of(replies).values()],
            uniform=self.proto_weight == "uniform",
            robust=self.server.aggregate != "mean",
        )
        return after.with_(
            prototypes=new,
            train_loss=mean_loss(replies, fed),
        )

    @property
    @override
    def own_models(self) -> Literal["none", "clients"]:
        return "clients" if self.mode == "original" else "none"

    @property
    @override
    def predictor(self) -> Predictor:
        by_prototype = self.mode == "original" and self.predict_by == "prototype"
        return NearestPrototype(self.feature_norm) if by_prototype else Predictor()

    @override
    def received_template(self, task: str, model: Model) -> Tree:
        return super().received_template(task, model) if self.mode == "mm_fedavg" else {}

    @override
    def evaluation_message(self, state: ProtoState, fed: Federation, clients: Sequence[int]) -> Shared:
        return self._shared(state)

    @override
    def own_params(self, got: Shared, local: Tree) -> Tree:
        """Return the model to evaluate.

        Under `mm_fedavg`, this is the global model. Under `original`, it is the client's own model, to which the global
        prototypes are added as entries.
        """
        if self.mode == "mm_fedavg":
            return got.params
        return local | {m + PROTOTYPE: mean for m, mean in got.prototypes.items()}

    def _shared(self, state: ProtoState) -> Shared:
        sent = {m: p.sent for m, p in state.prototypes.items()}
        return Shared(state.params if self.mode == "mm_fedavg" else {}, sent)

    @task()
    @override
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Shared) -> tuple[Learned, Tree]:  # type: ignore[override]
        own = self.mode == "original"
        near = {m: Prototypes.received(mean) for m, mean in got.prototypes.items()}
        # the first round has no prototypes, so the term is active in rounds 2 to active_rounds + 1
        if not own and data.round > self.active_rounds + 1:
            near = {}

        def loss(w: Tree, batch: Batch) -> Tensor:
            features = context.model.features(w, batch)
            ce = context.loss(w, batch, features)
            z = {m: context.model.vector(value) for m, value in features.items()}
            return ce + self._term(near, prototypes.at_length(z, self.feature_norm), batch) if near else ce

        fit = data.minimise(loss, local if own else got.params, train=self.train)
        return self._report(context, data, fit), (fit.params if own else local)

    def _vectors(self, context: ClientContext, params: Tree, batch: Batch) -> dict[str, Tensor]:
        """Return the features (B, D) by modality, scaled to the length `feature_norm`."""
        return prototypes.at_length(context.model.vectors(params, batch), self.feature_norm)

    def _term(self, near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if self.mode == "mm_fedavg":
            terms = [prototypes.cross_entropy(near[m], z[m], batch, m) for m in z if m in near]
            return self.alpha_p * torch.stack(terms).sum()
        terms = [prototype_distance(near[m], z[m], batch, m) for m in z if m in near]
        return self.lam * torch.stack(terms).sum()

    def _report(self, context: ClientContext, data: ClientData, fit: TrainingResult) -> Learned:
        sizes = {m: context.model.feature_size(m) for m in context.modalities}
        vectors = partial(self._vectors, context, fit.params)
        own, rows = prototypes.class_means(data, vectors, sizes, context.num_classes)
        sent = {m: p.sent for m, p in own.items()}
        kept = fit.params if self.mode == "mm_fedavg" else {}
        return Learned(kept, sent, rows, fit.loss, data.num_rows)


def prototype_distance(near: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """Return the mean over rows and coordinates of (z - prototype of the row's class)^2.

    A row whose class has no prototype contributes 0.
    """
    gaps = (z_BD - near.mean[batch.y]).square().mean(-1)
    known = near.active[batch.y]
    return masked_mean(torch.where(known, gaps, 0.0), there(batch, modality))


def prototype_scores(near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return scores (B, C): the negative distance to each class's prototype, summed over the modalities that a row has.

    If a class has no prototype in one of these modalities, the score of the class is the lowest finite float32. The
    class is then never predicted, and no score is infinite.
    """
    least = torch.finfo(torch.float32).min
    parts = [
        torch.where(there(batch, m).unsqueeze(-1), near[m].distances(z[m]).masked_fill(~near[m].active, torch.inf), 0.0)
        for m in z
        if m in near
    ]
    total = torch.stack(parts).sum(0)
    return torch.where(total == torch.inf, least, -total)
