"""PEPSY: embedding controls of each client say what its rows lack, and the server shares them between like clients.

Nguyen, Hoang, Huynh, Nguyen, Le Nguyen, "Learning Reconfigurable Representations for Multimodal Federated Learning with
Missing Data", NeurIPS 2025 (arXiv:2510.22880). The fusion `controlled` (`model/fusion.py`) reconfigures every modality
of a row by the controls that are most relevant to it. Each client trains controls of its own, its *profile*. The server
averages all other parameters as FedAvg does. It clusters the controls of the cohort without a given number of clusters,
and a client receives the centres of the clusters to which its own controls belong: clients with like patterns thereby
share controls.

The page lists what is inferred. Controls cross in a field of their own, of the kind `prototypes`. Page:
docs/algorithms/pepsy.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State
from polyfed.algorithms.modalities.fedmac import with_fusion
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, PLACEBO, POSITIVE, SearchRange, between
from polyfed.core.request import Send
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model, ModelSpec
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData
from polyfed.training.losses import between_modalities, contrastive
from polyfed.training.prototypes import there

FUSION = "controlled"

CONTROLS = f"{SHARED}.controls"
"""The name of the controls in a Tree. They cross in fields of their own, and never among the parameters."""

PATTERNS = "which modalities the client's rows lack, and how these rows differ"
"""The text for the option `tells` of a client's controls."""


@message
class Profiled(Message):
    """The model without its controls, and the profile of the client: its controls (P, E)."""

    params: Tree = carries("parameters")
    controls: Tensor = carries("prototypes", shape=("controls", "features"))


@message
class ProfiledUpdate(Message):
    """The trained parameters without controls, the trained controls (P, E), the loss, and the number of rows."""

    params: Tree = carries("parameters")
    controls: Tensor = carries("prototypes", shape=("controls", "features"), tells=PATTERNS)
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class PepsyState(State):
    """Server state; `params` has no controls.

    Attributes:
        common: the profile (P, E) of the global model, and of clients that have not trained yet.
        profiles: client -> its profile (P, E).
        clusters: number of clusters in the last round; 0 before the first.
    """

    common: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    profiles: dict[int, Tensor] = field(default_factory=dict)
    clusters: int = 0


@dataclass(frozen=True, kw_only=True)
class Pepsy(Averaging[PepsyState]):
    """Embedding controls for what rows lack, shared between clients with like patterns.

    Attributes:
        lam: lambda, weight of both contrastive terms.
        eta: weight of the relevance of the chosen controls, which is maximised; with 0, nothing trains the choice.
        temperature: temperature of the contrastive terms.
        join: the least cosine similarity at which a control joins the cluster of another client's; -1 aligns the
            controls of all clients, 1 shares only equal ones.
        placebo: `shuffled` is a control: every client receives the profile of another one. `none`, the default, is the
            method of the paper.
    """

    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.01, 0.1, 1.0)] = 0.1
    eta: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.01, 0.1, 1.0)] = 0.1
    temperature: Annotated[float, POSITIVE, SearchRange(0.1, 0.5, 1.0, beside=("lam", 0.01, 0.1, 1.0))] = 0.5
    join: Annotated[float, between(-1, 1), SearchRange(-1.0, 0.99, 0.995, 0.999, 1.0)] = 0.995
    placebo: Annotated[Literal["none", "shuffled"], PLACEBO] = "none"

    mixing: ClassVar[str] = "pepsy completes a modality from the others, and compares their embeddings in its loss"
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "it completes modalities that rows lack, and pairs of modalities lack none"
    sends: ClassVar[type[Message]] = Profiled
    replies: ClassVar[type[Message]] = ProfiledUpdate
    evaluates: ClassVar[type[Message]] = Profiled
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    spare: ClassVar[tuple[str, ...]] = ()
    captions: ClassVar[Mapping[str, str]] = {"clusters": "Into how many clusters the controls of the cohort fell."}

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        return with_fusion(spec, FUSION, "pepsy"), modalities

    @override
    def private_names(self, model: Model) -> frozenset[str]:
        return frozenset({CONTROLS})

    @property
    @override
    def single_replies(self) -> str:
        return "pepsy clusters the controls of single clients"

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed) | {"model.controls": "", "model.controls_chosen": ""}
        return result if self.lam else result | {"temperature": "lam = 0"}

    # the server

    @override
    def init(self, fed: Federation, params: Tree) -> PepsyState:
        return PepsyState(**vars(super().init(fed, params)), common=params[CONTROLS])

    @override
    def outgoing(self, state: PepsyState, cohort: list[int], fed: Federation) -> Send:
        return self._profiled(state, cohort, fed)

    def _profiled(self, state: PepsyState, clients: Sequence[int], fed: Federation) -> Send:
        """Return the model for each client, with its own profile, or under the placebo with another client's."""
        known = sorted(state.profiles)
        whose = dict(zip(known, known, strict=True))
        if self.placebo == "shuffled" and len(known) > 1:
            by = 1 + keys.choice(keys.key(fed.seed, "placebo", fed.round), len(known) - 1, 1)[0]
            whose = dict(zip(known, (*known[by:], *known[:by]), strict=True))
        profiles = {k: state.profiles[whose[k]] if k in whose else state.common for k in clients}
        return {k: Profiled(state.params, profile) for k, profile in profiles.items()}

    @override
    def merge(self, state: PepsyState, replies: Replies, fed: Federation) -> PepsyState:
        after: PepsyState = super().merge(state, replies, fed)
        sent = {client: reply.controls.clone() for client, reply in replies.items()}
        rows = fed.clients.rows_of(replies)
        places = clustered(sent, rows, self.join)
        centres, weights = _centres(sent, places, rows, robust=self.server.aggregate != "mean")
        heaviest = sorted(range(len(centres)), key=lambda cluster: -weights[cluster])[: len(state.common)]
        profiles = {client: centres[at] for client, at in places.items()}
        return after.with_(common=centres[sorted(heaviest)], profiles=state.profiles | profiles, clusters=len(centres))

    @override
    def observe(self, state: PepsyState) -> dict[str, float]:
        return super().observe(state) | {"clusters": float(state.clusters)}

    # the clients

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        model, features = context.model, context.model.features(w, batch)
        views = model.views(w, features, batch)
        loss = context.objective.loss(views["logits"], batch)
        loss = loss - self.eta * batch.mean(views["relevance"].mean(1))
        if not self.lam:
            return loss
        rows = {m: there(batch, m) for m in features}
        terms = between_modalities(features, rows, self.temperature)
        return loss + self.lam * (terms + self._of_whole(views["reconfigured"], batch))

    def _of_whole(self, full_BME: Tensor, batch: Batch) -> Tensor:
        """Return the contrastive loss of each reconfigured modality and the row's mean, averaged over modalities."""
        whole = full_BME.mean(1)
        terms = [
            contrastive(own, whole, batch.ok, temperature=self.temperature, negatives="inter")
            for own in full_BME.unbind(1)
        ]
        return torch.stack(terms).mean()

    @task()
    @override
    def update(  # type: ignore[override]
        self, context: ClientContext, data: ClientData, local: Tree, got: Profiled
    ) -> tuple[ProfiledUpdate, Tree]:
        """Train the received model and profile together."""

        def loss(w: Tree, batch: Batch) -> Tensor:
            value: Tensor = self.loss(context, w, batch, got, local)
            return value

        fit = data.minimise(loss, self.own_params(got, local), train=self.train)
        params = {name: value for name, value in fit.params.items() if name != CONTROLS}
        return ProfiledUpdate(params, fit.params[CONTROLS], fit.loss, data.num_rows), local

    # evaluation

    @property
    @override
    def own_models(self) -> Literal["server"]:
        """Return where the clients' own models are kept: on the server, as profiles beside the common parameters."""
        return "server"

    @override
    def global_params(self, state: PepsyState) -> Tree:
        return state.params | {CONTROLS: state.common}

    @override
    def evaluation_message(self, state: PepsyState, fed: Federation, clients: Sequence[int]) -> Send:
        return self._profiled(state, clients, fed)

    @override
    def own_params(self, got: Profiled, local: Tree) -> Tree:
        return got.params | {CONTROLS: got.controls}


def clustered(sent: Mapping[int, Tensor], weights: Mapping[int, float], join: float) -> dict[int, list[int]]:
    """Cluster the controls of clients, without a given number of clusters.

    The clients come one after the other, in ascending order. Each matches its controls one to one with the clusters so
    far, at the least sum of 1 - cosine similarity to their weighted means; for a control, a new cluster costs 1 - join.

    Args:
        sent: client -> its controls (P, E).
        weights: client -> its weight.
        join: see `Pepsy.join`.

    Returns:
        client -> the cluster of each of its controls. Clusters are numbered from 0 in the order in which they opened.
    """
    sums: list[Tensor] = []
    result: dict[int, list[int]] = {}
    for client in sorted(sent):
        own = sent[client].double().cpu()
        costs = torch.full((len(own), len(sums) + len(own)), 1 - join, dtype=torch.float64)
        if sums:
            costs[:, : len(sums)] = 1 - normalize(own, dim=-1) @ normalize(torch.stack(sums), dim=-1).T
        _, columns = linear_sum_assignment(costs.numpy())
        result[client] = []
        for control, column in zip(own, columns.tolist(), strict=True):
            share = weights[client] * control
            if column < len(costs[0]) - len(own):
                sums[column] = sums[column] + share
                result[client].append(column)
            else:
                sums.append(share)
                result[client].append(len(sums) - 1)
    return result


def _centres(
    sent: Mapping[int, Tensor], places: Mapping[int, list[int]], weights: Mapping[int, float], *, robust: bool
) -> tuple[Tensor, list[float]]:
    """Return the centres of the clusters (G, E), and their weights.

    Args:
        sent: client -> its controls (P, E).
        places: client -> the cluster of each of its controls.
        weights: client -> its weight.
        robust: take the median of each coordinate instead of the weighted mean.
    """
    members: dict[int, list[tuple[float, Tensor]]] = {}
    for client in sorted(places):
        for control, cluster in zip(sent[client], places[client], strict=True):
            members.setdefault(cluster, []).append((float(weights[client]), control))
    centres, total = [], []
    for cluster in range(len(members)):
        shares, controls = zip(*members[cluster], strict=True)
        stack, sizes = torch.stack(controls), torch.tensor(shares, device=controls[0].device)
        middle = torch.quantile(stack, 0.5, dim=0) if robust else (sizes.unsqueeze(1) * stack).sum(0) / sizes.sum()
        centres.append(middle)
        total.append(sum(shares))
    return torch.stack(centres), total
