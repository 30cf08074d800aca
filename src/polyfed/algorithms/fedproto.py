"""FedProto: clients share class prototypes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022 (algorithms.md 5.3). Two methods go by this name. `original`: every client keeps its own model, and only prototypes
travel, to which features are pulled. `mm_fedavg`, the baseline of CMSFed's tables: parameters are averaged as under
FedAvg, and the prototypical cross-entropy of every modality against global prototypes joins the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import OwnScore, Predictor, own_score
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.privacy.policy import Policy
from polyfed.selection import must_be_uniform
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.losses import cross_entropy
from polyfed.training.prototypes import Prototypes, masked_mean, there

PROTOTYPE = ".prototype"
"""Ends the name of a modality's global prototypes in the model that a client is judged with."""


@message
class Shared(Message):
    """The model (`mm_fedavg`) and global prototypes (C, D) by modality, zeros for a class without."""

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))


@message
class Learned(Message):
    """Trained parameters (`mm_fedavg`), the client's prototypes, and its rows per class (C,)."""

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries("statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM)
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class ProtoState(State):
    """Averaging's state and the global prototypes."""

    prototypes: dict[str, Prototypes] = field(default_factory=dict)


@dataclass(frozen=True)
class NearestPrototype(Predictor):
    """By the nearest global prototype; the Tree holds them, (C, D) each, as `<modality>.prototype`.

    Where it holds none of the modalities that are there, by the client's model.

    Attributes:
        feature_norm: length that features are given before; 0 leaves them raw.
    """

    feature_norm: float = 0.0

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Scores (B, C), see `closeness`."""
        near = {m: Prototypes.received(w[m + PROTOTYPE]) for m in batch.x if m + PROTOTYPE in w}
        if not near:
            return model.logits(w, batch)
        return closeness(near, prototypes.at_length(model.vectors(w, batch), self.feature_norm), batch)


@dataclass(frozen=True, kw_only=True)
class FedProto(Averaging):
    """See the module.

    Attributes:
        mode: `mm_fedavg` or `original`.
        proto_weight: global prototypes weigh clients by rows of the class (`count`, the paper's formula) or alike
            (`uniform`, its code).
        lam: strength of the pull of `original`; 1 in the code.
        alpha_p: strength of the term of `mm_fedavg`.
        active_rounds: rounds with the term of `mm_fedavg`, after the first, which has no prototypes; 70 in CMSFed's
            comparison.
        feature_norm: length that features are given before they are held against prototypes; 0 leaves them raw, as
            published. Under `mm_fedavg` raw features can make the term grow without end (docs/algorithms/fedproto.md).
        judge: how `original` judges a client's own test rows: its model's `logits`, or the nearest global
            `prototype`, distances summed over modalities (the paper).
    """

    mode: Literal["mm_fedavg", "original"] = "mm_fedavg"
    proto_weight: Literal["count", "uniform"] = "count"
    lam: Annotated[float, NOT_NEGATIVE] = 1.0
    alpha_p: Annotated[float, NOT_NEGATIVE] = 1.0
    active_rounds: Annotated[int, NOT_NEGATIVE] = 70
    feature_norm: Annotated[float, NOT_NEGATIVE] = 0.0
    predict_by: Literal["logits", "prototype"] = "prototype"

    sends: ClassVar[type[Message]] = Shared
    replies: ClassVar[type[Message]] = Learned

    def __post_init__(self) -> None:
        """Refuse selectors that need a global model, which `original` has not."""
        super().__post_init__()
        if self.mode == "original":
            must_be_uniform(self.selector, "fedproto with mode = 'original'")

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Models stay at home under `original`."""
        return field != "params" or self.mode == "mm_fedavg"

    def init(self, fed: Federation, params: Tree) -> ProtoState:
        """Averaging's state; no prototypes yet."""
        return ProtoState(**vars(super().init(fed, params)))

    def local(self, context: ClientContext, key: int) -> Tree:
        """`original`: the client's own model, from the common start."""
        return dict(context.initial) if self.mode == "original" else {}

    def outgoing(self, state: ProtoState, cohort: list[int], fed: Federation) -> Shared:
        """The model where it is shared, and the global prototypes."""
        return self._shared(state)

    def merge(self, state: ProtoState, replies: Replies, fed: Federation) -> ProtoState:
        """Average where models are shared; pool the prototypes."""
        after = super().merge(state, replies, fed) if self.mode == "mm_fedavg" else state
        reports = [(reply.prototypes, reply.rows_per_class) for reply in replies.values()]
        uniform = self.proto_weight == "uniform"
        return after.with_(
            prototypes=prototypes.gathered(state.prototypes, reports, uniform=uniform),
            train_loss=mean_loss(replies, fed),
        )

    @property
    def own_models(self) -> Literal["none", "clients"]:
        """Under `original` every client keeps its own."""
        return "clients" if self.mode == "original" else "none"

    @property
    def predictor(self) -> Predictor:
        """The global prototypes under the client's model, or its logits."""
        by_prototype = self.mode == "original" and self.predict_by == "prototype"
        return NearestPrototype(self.feature_norm) if by_prototype else Predictor()

    def to_judge(self, state: ProtoState, fed: Federation, clients: Sequence[int]) -> Shared:
        """What a cohort receives."""
        return self._shared(state)

    def own_params(self, got: Shared, local: Tree) -> Tree:
        """The global model; under `original` the client's own and the global prototypes."""
        if self.mode == "mm_fedavg":
            return got.params
        return local | {m + PROTOTYPE: mean for m, mean in got.prototypes.items()}

    def _shared(self, state: ProtoState) -> Shared:
        sent = {m: p.sent for m, p in state.prototypes.items()}
        return Shared(state.params if self.mode == "mm_fedavg" else {}, sent)

    @task()
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Shared) -> tuple[Learned, Tree]:  # type: ignore[override]
        """Train near the global prototypes; report the class means under the trained model."""
        own = self.mode == "original"
        near = {m: Prototypes.received(mean) for m, mean in got.prototypes.items()}
        # the first round has no prototypes, so rounds 2 .. active_rounds + 1 have the term
        if not own and data.round > self.active_rounds + 1:
            near = {}

        def loss(w: Tree, batch: Batch) -> Tensor:
            features = context.model.features(w, batch)
            ce = cross_entropy(context.model.fuse(w, features, batch), batch)
            z = {m: context.model.vector(value) for m, value in features.items()}
            return ce + self._pull(near, prototypes.at_length(z, self.feature_norm), batch) if near else ce

        fit = data.minimise(loss, local if own else got.params, train=self.train)
        return self._report(context, data, fit), (fit.params if own else local)

    @task()
    def score_own(self, context: ClientContext, data: ClientData, local: Tree, got: Shared) -> tuple[OwnScore, Tree]:  # type: ignore[override]
        """Judge the client's model, or the prototypes under it, on its own test rows."""
        return own_score(context.model, self.own_params(got, local), data.test, self.predictor), local

    def _vectors(self, context: ClientContext, params: Tree, batch: Batch) -> dict[str, Tensor]:
        """Features (B, D) by modality, as prototypes see them."""
        return prototypes.at_length(context.model.vectors(params, batch), self.feature_norm)

    def _pull(self, near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if self.mode == "mm_fedavg":
            terms = [prototypes.cross_entropy(near[m], z[m], batch, m) for m in z if m in near]
            return self.alpha_p * torch.stack(terms).sum()
        pulls = [squared_pull(near[m], z[m], batch, m) for m in z if m in near]
        return self.lam * torch.stack(pulls).sum()

    def _report(self, context: ClientContext, data: ClientData, fit: TrainingResult) -> Learned:
        sizes = {m: context.model.feature_size(m) for m in context.modalities}
        vectors = partial(self._vectors, context, fit.params)
        own, rows = prototypes.class_means(data.fold, vectors, sizes, context.num_classes)
        sent = {m: p.sent for m, p in own.items()}
        kept = fit.params if self.mode == "mm_fedavg" else {}
        return Learned(kept, sent, rows, fit.loss, data.num_rows)


def squared_pull(near: Prototypes, z_BD: Tensor, batch: Batch, modality: str) -> Tensor:
    """Mean over rows and coordinates of (z - prototype of the row's class)^2; a class without one counts zero."""
    gaps = (z_BD - near.mean[batch.y]).square().mean(-1)
    known = near.active[batch.y]
    return masked_mean(torch.where(known, gaps, 0.0), there(batch, modality))


def closeness(near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Minus the distances to the prototypes of each class (B, C), summed over the modalities that a row has.

    A class without a prototype in one of them has the least number there is: it is never the nearest, and the row
    still has finite scores.
    """
    least = torch.finfo(torch.float32).min
    parts = [
        torch.where(there(batch, m).unsqueeze(-1), near[m].distances(z[m]).masked_fill(~near[m].active, torch.inf), 0.0)
        for m in z
        if m in near
    ]
    total = torch.stack(parts).sum(0)
    return torch.where(total == torch.inf, least, -total)
