"""PartialFL: what may leave a device teaches what may not.

Feng, Bose, Wang, Narayanan, Narayanan, "PartialFL: Multimodal federated learning with partial sharing", read through
algorithms.md 1. Some modalities may go to the server as vectors of a frozen extractor, others may not, and labels never
do. A large tower at the server reads the shared vectors, a small model on each device, which never leaves it, reads the
same vectors together with the labels, and the federated global model is pulled towards the tower's embeddings. The
three are tied by one contrastive loss (Eq. 1 to 4).

Which modalities are shareable is read from the egress policy: those whose `embeddings` may go to the server. With
several of them every contrastive term is the mean over those a client owns (ours; the paper has one).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, State
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
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Direction
from polyfed.training.losses import Negatives, contrastive, cross_entropy
from polyfed.training.optimisers import Moments


@dataclass(frozen=True)
class PartialState(State):
    """Averaging's state, and what the server alone holds.

    Attributes:
        tower: parameters of F_s.
        tower_moments: of its optimiser, which outlives the rounds (algorithms.md P7).
        tower_steps: steps it has taken.
        deposits: client -> modality -> (n, ...).
        logged: see docs/algorithms/partialfl.md.
    """

    tower: Tree = field(default_factory=dict)
    tower_moments: Moments = field(default_factory=dict)
    tower_steps: int = 0
    deposits: dict[int, Tree] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartialFL(Averaging):
    """See the module. The mean is uniform, as in the paper's Algorithm 1 (algorithms.md P3).

    Attributes:
        beta: weight of the contrastive terms on the devices; the paper tunes it in {0.001, 0.01}.
        temperature: of the contrastive terms; {0.05, 0.1, 0.2} in the paper.
        negatives: `intra` as in Eq. 1 and 2, `inter`, or `both` (P1).
        normalise: bring embeddings to length 1 first (P2).
        mu: FedProx pull on the global model; 0 is FedAvg, the paper takes 0.01.
        global_model: what the federated model reads: `private` modalities only, or `all`.
        inputs: what the data's arrays of a shareable modality are, and so which kind the deposit is: `embeddings`, or
            `raw` samples, which the policy must then let go as well.
        local_start: each device draws its local model, as in the paper (`own`), or all start from one draw (`common`),
            so that the embeddings of different devices share their axes from the beginning (ours).
        local_hidden: hidden sizes of the local model's encoders (algorithms.md 1.5).
        server_hidden: hidden sizes of the tower's (algorithms.md 1.5).
    """

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
        """The modalities that a policy lets go to the server in every form the method needs."""
        needed = {"embeddings", self.inputs}
        return tuple(m for m in modalities if needed <= policy.kinds(m, "server"))

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The global model reads the private modalities, or all.

        Raises:
            RecipeError: nothing may be shared, or nothing is private.
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
        """Embeddings of shareable modalities, parameters of the global model's."""
        shared = bool(self.shareable(policy, [block]))
        if field in ("vectors", "samples"):
            return shared and (field == "vectors") == (self.inputs == "embeddings")
        if field == "student":
            return shared
        return field != "params" or self.global_model == "all" or not shared

    @task()
    def deposit(self, context: ClientContext, data: ClientData, local: Tree, got: Call) -> tuple[Deposit, Tree]:
        """Hand over, once, the rows of what this client's own policy lets go."""
        shared = self.shareable(context.policy, context.modalities)
        rows = data.collect(lambda batch: {m: batch.x[m] for m in shared}) if shared else {}
        vectors, samples = (rows, {}) if self.inputs == "embeddings" else ({}, rows)
        return Deposit(vectors, samples, data.num_rows), local

    # the devices' half

    def local(self, context: ClientContext, key: int) -> Tree:
        """The local model, which never leaves."""
        shared = self.shareable(context.policy, context.modalities)
        if not shared:
            return {}
        if self.local_start == "common":  # a key that all devices of a run share and that nobody has to send
            key = keys.key("local model", digest(select(context.initial, [SHARED])))
        return self.local_model(context.model, shared).init(key)

    def local_model(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_k: shared vectors to embeddings and logits."""
        return mlps(shapes_of(model, shared), self.local_hidden, embedding_size(model), model.num_classes)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Guided, local: Tree) -> Any:
        """Eq. 3: cross-entropy, the pull of FedProx, and beta times Eq. 1."""
        z, logits = embed(context.model, w, batch)
        value = cross_entropy(logits, batch)
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
        """The gradient as it is; on the way, how well the embeddings align is summed up."""
        if not got.teacher:
            return None

        def noted(grads: Tree, w: Tree, aux: Tensor, carry: Tree) -> tuple[Tree, Tree]:
            return grads, {"alignment": carry["alignment"] + aux.detach()}

        return noted, {"alignment": torch.zeros((), device=data.num_rows.device)}

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Guided, local: Tree
    ) -> tuple[GuidedUpdate, Tree]:
        """Train the local model on the same batches (Eq. 4), then embed all rows with it."""
        nothing = torch.zeros_like(fit.loss)
        if not got.teacher:
            return GuidedUpdate(fit.params, {}, fit.loss, nothing, nothing, data.num_rows), local
        model = self.local_model(context.model, tuple(got.teacher))

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = model.features(w, batch)
            value = cross_entropy(model.fuse(w, z, batch), batch)
            return value + self.beta * self.contrast(z, got.teacher, batch) if self.beta else value

        own = data.minimise(loss, local, train=self.train, model=model)
        student = data.collect(lambda batch: model.features(own.params, batch))
        alignment = fit.carry["alignment"] / fit.num_steps.clamp(min=1)
        return GuidedUpdate(fit.params, student, fit.loss, own.loss, alignment, data.num_rows), own.params

    # the server's half

    def init(self, fed: Federation, params: Tree) -> PartialState:
        """Averaging's state, the tower, and what the clients deposit.

        Raises:
            RecipeError: a client owns nothing that the global model reads, or that model has no joint embedding.
        """
        check(fed)
        shared = self.shareable(fed.context.policy, fed.clients.modalities)
        start = self.tower(fed.context.model, shared).init(keys.key(fed.seed, "init", "tower"))
        tower = {name: value.to(next(iter(params.values())).device) for name, value in start.items()}
        donors = [k for k in fed.clients.eligible if set(shared) & set(fed.clients.owned(k))]
        given = fed.ask(self.deposit, donors, Call())
        deposits = {k: rows for k in given if (rows := fitting(given[k], fed.context.model.shapes))}
        # the tower has no classifier: there are no labels at the server
        tower = {name: value for name, value in select(tower, shared).items() if ".encoder." in name}
        return PartialState(**vars(super().init(fed, params)), tower=tower, deposits=deposits)

    def tower(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_s: shared vectors to embeddings."""
        return mlps(shapes_of(model, shared), self.server_hidden, embedding_size(model), model.num_classes)

    def outgoing(self, state: PartialState, cohort: list[int], fed: Federation) -> dict[int, Guided]:
        """The global model, and z_T of the client's rows by the tower as it is now, so never stale (P6)."""
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
        """Average the global model; train the tower on one device after the other, carrying it over (P4)."""
        model = self.tower(fed.context.model, self.shareable(fed.context.policy, fed.clients.modalities))
        once = replace(self.train, epochs=1, steps=None)
        after: PartialState = super().merge(state, replies, fed)
        losses = []
        for k, teacher in taught(replies, state.deposits, embedding_size(fed.context.model)).items():

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
        return after.with_(logged=summary(replies, losses))

    def observe(self, state: PartialState) -> dict[str, float]:
        """Losses of the three models and the alignment of paired embeddings."""
        return state.logged


def fitting(given: Deposit, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    """What a client deposited, without rows of another shape than the model reads."""
    return {m: x.clone() for m, x in (given.vectors | given.samples).items() if tuple(x.shape[1:]) == shapes.get(m)}


def taught(replies: Replies, deposits: Mapping[int, Tree], size: int) -> dict[int, Tree]:
    """The embeddings that clients sent of rows they had deposited; others, of a wrong shape, are not used."""
    found = {}
    for k in replies:
        student: Tree = replies[k].student
        had = deposits.get(k, {})
        if student and all(m in had and z.shape == (len(had[m]), size) for m, z in student.items()):
            found[k] = student
    return found


def summary(replies: Replies, server_losses: list[float]) -> dict[str, float]:
    """What a round logs; clients without a shareable modality have no part in it."""
    parts = [part.message for part in replies.parts if part.message.student]  # type: ignore[attr-defined]
    if not parts:
        return {}
    names = {"local_loss": "loss_local", "alignment": "alignment"}
    means = {ours: float(torch.cat([getattr(p, name) for p in parts]).mean()) for name, ours in names.items()}
    return means | {"loss_server": sum(server_losses) / max(len(server_losses), 1)}


def check(fed: Federation) -> None:
    """Refuse what the method cannot serve."""
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
