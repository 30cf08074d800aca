"""PartialFL: modalities that may leave a device guide the model of those that may not.

Feng, Bose, Wang, Narayanan, Narayanan, "PartialFL: Multimodal federated learning with partial sharing". Some modalities
may go to the server as vectors of a frozen extractor, others may not, and labels never do. There are three models: a
large server model (here called the tower) reads the shared vectors; a small local model on each device, which never
leaves it, reads the same vectors together with the labels; the federated global model is pulled towards the tower's
embeddings. One contrastive loss connects the three (Eq. 1 to 4).

The egress policy says which modalities are shareable: those whose `embeddings` may go to the server. With several of
them, each contrastive term is the mean over those that a client owns; the paper has only one. See
docs/algorithms/partialfl.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, State
from polyfed.algorithms.partialfl.deposits import logged, usable_embeddings, usable_rows
from polyfed.algorithms.partialfl.messages import Call, Deposit, Guided, GuidedUpdate
from polyfed.algorithms.towers import embed, embedding_size, mlps, shapes_of
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.schema import NOT_NEGATIVE, POSITIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, digest, select, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model, ModelSpec
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Direction
from polyfed.training.losses import Negatives, contrastive
from polyfed.training.optimisers import Moments


@dataclass(frozen=True)
class PartialState(State):
    """The state of `Averaging`, and what only the server holds.

    Attributes:
        tower: parameters of the server model F_s.
        tower_moments: moments of the tower's optimiser, which are kept from round to round.
        tower_steps: optimiser steps of the tower so far.
        deposits: shared rows (n, ...) by client and modality.
        logged: losses and alignment of the last round, for the log.
    """

    tower: Tree = field(default_factory=dict)
    tower_moments: Moments = field(default_factory=dict)
    tower_steps: int = 0
    deposits: dict[int, Tree] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartialFL(Averaging):
    """PartialFL. The mean over clients is uniform by default, as in the paper's Algorithm 1.

    Attributes:
        beta: weight of the contrastive terms on the devices; the paper tunes it in {0.001, 0.01}.
        temperature: tau of the contrastive terms; {0.05, 0.1, 0.2} in the paper.
        negatives: negatives of the contrastive terms: `intra` as in Eq. 1 and 2, `inter`, or `both`.
        normalise: scale embeddings to length 1 before they are compared.
        mu: strength of FedProx's proximal term on the global model; 0 is FedAvg, the paper takes 0.01.
        global_model: what the federated model reads: `private` modalities only, or `all`.
        inputs: what the data holds of a shareable modality, and so the kind of the deposit: `embeddings`, or `raw`
            samples, which the policy must then allow as well.
        local_start: each device draws its own initial local model, as in the paper (`own`), or all start from the same
            one (`common`), so that the embeddings of different devices have the same axes from the start.
        local_hidden: hidden sizes of the local model's encoders.
        server_hidden: hidden sizes of the tower's encoders.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "a device trains one output of its local model besides the global model"

    aggregation: Literal["weighted", "uniform"] = "uniform"
    beta: Annotated[float, NOT_NEGATIVE] = 0.01
    temperature: Annotated[float, POSITIVE] = 0.1
    negatives: Negatives = "intra"
    normalise: bool = True
    mu: Annotated[float, NOT_NEGATIVE] = 0.0
    global_model: Literal["private", "all"] = "private"
    inputs: Literal["embeddings", "raw"] = "embeddings"
    local_start: Literal["own", "common"] = "own"
    local_hidden: tuple[int, ...] = (256,)
    server_hidden: tuple[int, ...] = (1024, 1024, 512)

    sends: ClassVar[type[Message]] = Guided
    replies: ClassVar[type[Message]] = GuidedUpdate
    handles_missing_rows: ClassVar[bool] = False

    # what is shared

    def shareable(self, policy: Policy, modalities: Iterable[str]) -> tuple[str, ...]:
        """The modalities that a policy lets go to the server in every kind that the method needs."""
        needed = {"embeddings", self.inputs}
        return tuple(m for m in modalities if needed <= policy.kinds(m, "server"))

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The model as it is, for the private modalities, or for all.

        Raises:
            RecipeError: no modality may be shared, or none is private.
        """
        shared = self.shareable(policy, modalities)
        if not shared:
            kinds = " and ".join(sorted({"embeddings", self.inputs}))
            raise RecipeError(
                f"partialfl shares nothing: no modality may send {kinds} to the server. Say which one may, as in "
                f"{policy.fix(('embeddings',), modalities[-1], 'server')}"
            )
        private = tuple(m for m in modalities if m not in shared)
        if self.global_model == "private" and not private:
            raise RecipeError(
                f"partialfl has nothing private to train: the policy shares {', '.join(shared)}. "
                "Set [algorithm] global_model = 'all', or share less"
            )
        return spec, modalities if self.global_model == "all" else private

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Rows and embeddings of shareable modalities only; parameters of those that the global model reads."""
        shared = bool(self.shareable(policy, [block]))
        if field in ("vectors", "samples"):
            return shared and (field == "vectors") == (self.inputs == "embeddings")
        if field == "student":
            return shared
        return field != "params" or self.global_model == "all" or not shared

    @task()
    def deposit(self, context: ClientContext, data: ClientData, local: Tree, got: Call) -> tuple[Deposit, Tree]:
        """Hand over, once, the rows of the modalities that this client's own policy allows."""
        shared = self.shareable(context.policy, context.modalities)
        rows = data.collect(lambda batch: {m: batch.x[m] for m in shared}) if shared else {}
        vectors, samples = (rows, {}) if self.inputs == "embeddings" else ({}, rows)
        return Deposit(vectors, samples, data.num_rows), local

    # the devices' half

    def local(self, context: ClientContext, key: int) -> Tree:
        """The initial local model, which never leaves the device; empty without a shareable modality."""
        shared = self.shareable(context.policy, context.modalities)
        if not shared:
            return {}
        if self.local_start == "common":  # the same for all devices of a run, without sending a key
            key = keys.key("local model", digest(select(context.initial, [SHARED])))
        return self.local_model(context.model, shared).init(key)

    def local_model(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_k, which maps shared vectors to embeddings and logits."""
        return mlps(shapes_of(model, shared), self.local_hidden, embedding_size(model), model.num_outputs)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Guided, local: Tree) -> Any:
        """L_glob (Eq. 3): the task's loss, FedProx's proximal term, and beta times the contrastive loss of Eq. 1."""
        z, logits = embed(context.model, w, batch)
        value = context.objective.loss(logits, batch)
        if self.mu:
            value = value + self.mu / 2 * squared_distance(context.model.trainable(w), got.params)
        if not got.teacher:
            return value
        if self.beta:
            value = value + self.beta * self.contrast(dict.fromkeys(got.teacher, z), got.teacher, batch)
        near = [F.cosine_similarity(z.detach(), v[batch.rows]) for v in got.teacher.values()]
        return value, batch.mean(torch.stack(near).mean(0))

    def contrast(self, students: Mapping[str, Tensor], teachers: Tree, batch: Batch) -> Tensor:
        """Mean over modalities of the contrastive loss of student rows (B, d) against teachers of all rows (n, d)."""
        terms = []
        for modality, teacher in teachers.items():
            there = batch.present.get(modality)
            ok = batch.ok if there is None else there if batch.ok is None else there & batch.ok
            term = contrastive(
                students[modality],
                teacher[batch.rows],
                ok,
                temperature=self.temperature,
                negatives=self.negatives,
                normalise=self.normalise,
            )
            terms.append(term)
        return torch.stack(terms).mean()

    def direction(
        self, context: ClientContext, data: ClientData, got: Guided, local: Tree
    ) -> tuple[Direction, Tree] | None:
        """Leave the gradient unchanged, and sum up how well the embeddings align."""
        if not got.teacher:
            return None

        def noted(grads: Tree, w: Tree, aux: Tensor, carry: Tree) -> tuple[Tree, Tree]:
            return grads, {"alignment": carry["alignment"] + aux.detach()}

        return noted, {"alignment": torch.zeros((), device=data.num_rows.device)}

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Guided, local: Tree
    ) -> tuple[GuidedUpdate, Tree]:
        """Train the local model on the same batches with L_loc (Eq. 4), then embed all rows with it."""
        nothing = torch.zeros_like(fit.loss)
        if not got.teacher:
            return GuidedUpdate(fit.params, {}, fit.loss, nothing, nothing, data.num_rows), local
        model = self.local_model(context.model, tuple(got.teacher))

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = model.features(w, batch)
            value = context.objective.loss(model.fuse(w, z, batch), batch)
            return value + self.beta * self.contrast(z, got.teacher, batch) if self.beta else value

        own = data.minimise(loss, local, train=self.train, model=model)
        student = data.collect(lambda batch: model.features(own.params, batch))
        alignment = fit.carry["alignment"] / fit.num_steps.clamp(min=1)
        return GuidedUpdate(fit.params, student, fit.loss, own.loss, alignment, data.num_rows), own.params

    # the server's half

    def init(self, fed: Federation, params: Tree) -> PartialState:
        """The state of `Averaging`, the initial tower, and the rows that the clients hand over.

        Raises:
            RecipeError: the global model reads none of a client's modalities, or has no joint embedding.
        """
        check(fed)
        shared = self.shareable(fed.context.policy, fed.clients.modalities)
        start = self.tower(fed.context.model, shared).init(keys.key(fed.seed, "init", "tower"))
        tower = {name: value.to(next(iter(params.values())).device) for name, value in start.items()}
        donors = [k for k in fed.clients.eligible if set(shared) & set(fed.clients.owned(k))]
        given = fed.ask(self.deposit, donors, Call())
        deposits = {k: rows for k in given if (rows := usable_rows(given[k], fed.context.model.shapes))}
        # the tower has no classifier, as the server has no labels
        tower = {name: value for name, value in select(tower, shared).items() if ".encoder." in name}
        return PartialState(**vars(super().init(fed, params)), tower=tower, deposits=deposits)

    def tower(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_s, which maps shared vectors to embeddings."""
        return mlps(shapes_of(model, shared), self.server_hidden, embedding_size(model), model.num_outputs)

    def outgoing(self, state: PartialState, cohort: list[int], fed: Federation) -> dict[int, Guided]:
        """The global model, and z_T of the client's rows from the current tower."""
        model = self.tower(fed.context.model, self.shareable(fed.context.policy, fed.clients.modalities))
        sent = {}
        for k in cohort:
            rows = state.deposits.get(k, {})
            view = fed.server_data(rows, number=k) if rows else None
            teacher = view.collect(lambda batch: model.features(state.tower, batch)) if view else {}
            count = torch.tensor(0) if view is None else view.num_rows
            sent[k] = Guided(state.params, teacher, count)
        return sent

    def merge(self, state: PartialState, replies: Replies, fed: Federation) -> PartialState:
        """Average the global model, and train the tower with L_server (Eq. 2) on one device after the other."""
        model = self.tower(fed.context.model, self.shareable(fed.context.policy, fed.clients.modalities))
        once = replace(self.train, epochs=1, steps=None)
        after: PartialState = super().merge(state, replies, fed)
        losses = []
        for k, teacher in usable_embeddings(replies, state.deposits, embedding_size(fed.context.model)).items():

            def loss(w: Tree, batch: Batch, teacher: Tree = teacher) -> Tensor:
                return self.contrast(model.features(w, batch), teacher, batch)

            leg = None
            if after.tower_steps:
                steps = torch.tensor(after.tower_steps)
                leg = TrainingResult({}, torch.zeros(()), steps, moments=after.tower_moments)
            fit = fed.server_data(state.deposits[k], number=k).minimise(
                loss, after.tower, train=once, model=model, after=leg
            )
            taken = int(fit.num_steps)
            losses.append(float(fit.loss) * taken / max(taken - after.tower_steps, 1))
            after = after.with_(tower=fit.params, tower_moments=fit.moments, tower_steps=taken)
        return after.with_(logged=logged(replies, losses))

    def observe(self, state: PartialState) -> dict[str, float]:
        """Losses of the local models and the tower, and the mean cosine of paired embeddings."""
        return state.logged


def check(fed: Federation) -> None:
    """Refuse a model without a joint embedding, and clients of whose modalities the global model reads none."""
    model = fed.context.model
    if not embedding_size(model):
        raise RecipeError(
            "partialfl needs an embedding of all modalities together: give the model a hidden layer, as in "
            "[model] head = [128], or fusion = 'sum'"
        )
    for k in fed.clients:
        if not set(fed.clients.owned(k)) & set(model.modalities):
            raise RecipeError(
                f"client {k} holds {', '.join(fed.clients.owned(k))}, none of which the global model reads "
                f"({', '.join(model.modalities)}): change [clients] or set [algorithm] global_model = 'all'"
            )
