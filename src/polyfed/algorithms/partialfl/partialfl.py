"""PartialFL: a server model of the shareable modalities guides a federated model of the private modalities.

Feng, Bose, Wang, Narayanan, Narayanan, "Partial Federated Learning". Some modalities may go to the server as vectors of
a frozen extractor. Other modalities and the labels never do. There are three models. A large server model F_s
(theta_s), here called the tower, reads the shared vectors. A small local model F_k (theta_k) on each device reads the
same vectors with the labels, and never leaves the device. Training pulls the federated global model F_g towards the
embeddings of the tower. One contrastive loss connects the three models (Eq. 1 to 4).

The egress policy defines which modalities are shareable: those whose `embeddings` may go to the server. The paper has
only one shareable modality. If there are several, each contrastive term is the mean over those that a client owns.
Page: docs/algorithms/partialfl.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.knowledge.second_model import embed, embedding_size, second_model, shapes_of
from polyfed.algorithms.partialfl import teacher_rows
from polyfed.algorithms.partialfl.messages import (
    PRESENT,
    Call,
    Deposit,
    Guided,
    GuidedUpdate,
    flaw,
    logged,
    usable_embeddings,
    usable_rows,
)
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    COST,
    IN_RECIPE,
    NOT_NEGATIVE,
    OF_MODEL,
    PLACEBO,
    POSITIVE,
    READING,
    NotSearched,
    SearchRange,
)
from polyfed.core.problems import Conflict
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, digest, select, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model, ModelSpec
from polyfed.model.encoders.catalogue import encoder_spec
from polyfed.objective import SUPERVISED, Classification, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData
from polyfed.training.kept_training import KeptTraining, earlier_steps
from polyfed.training.losses import Negatives, contrastive
from polyfed.training.optimisers import Moments

ALIGNED = 0.05
"""A model whose paired embeddings have a mean cosine below this value counts as not aligned with its teacher. On the
measured data sets the cosine is 0.16 to 0.39 if two modalities describe one thing, otherwise 0.01 to 0.04
(docs/results/partialfl.md)."""


@dataclass(frozen=True)
class PartialState(State):
    """The state of `Averaging`, plus the server model with its optimiser, and the rows that clients have shared.

    Attributes:
        tower: parameters of the server model F_s.
        tower_moments: moments of the tower's optimiser, kept from round to round.
        tower_steps: optimiser steps of the tower so far.
        deposits: shared rows (n, ...) by client and modality. If the client lacks a modality for some rows,
            `present.<modality>` marks the rows that it has.
        logged: losses and alignment of the last round, for the log.
    """

    tower: Tree = field(default_factory=dict)
    tower_moments: Moments = field(default_factory=dict)
    tower_steps: int = 0
    deposits: dict[int, Tree] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


def _without_classes(recipe: Any) -> bool:
    return recipe.task is not None and not isinstance(recipe.task, Classification)


@dataclass(frozen=True, kw_only=True)
class PartialFL(Averaging[PartialState]):
    """PartialFL. The mean over clients is uniform by default, as in the paper's Algorithm 1.

    Attributes:
        beta: weight of the contrastive terms on the devices; the paper searches {0.001, 0.01}.
        beta_local: weight of the contrastive term of the local model, by default `beta`.
        temperature: tau of the contrastive terms; {0.05, 0.1, 0.2} in the paper.
        negatives: negatives of the contrastive terms: `intra` as in Eq. 1 and 2, `inter`, or `both`.
        same_class_negatives: whether the negatives of a row on a device include rows of its class, as in Eq. 1. On the
            server, which has no labels, all other rows are negatives.
        normalise: whether embeddings are scaled to length 1 before they are compared.
        mu: strength of FedProx's proximal term on the global model; 0 is FedAvg, and the paper uses 0.01.
        global_model: the modalities that the federated model reads: only the `private` ones, or `all`.
        inputs: what the data holds for a shareable modality, which clients send to the server: `embeddings`, or `raw`
            samples, for which the policy must allow `raw` too.
        local_start: how local models start: each device draws its `own`, as in the paper, or all get a `common` one, so
            that the axes of all embeddings agree from the start.
        local_hidden: hidden sizes of the local model's encoders, MLPs unless `local_encoders` names others.
        local_encoders: encoders of the local models by modality, written like [model.encoders]; images and series need
            one.
        server_hidden: hidden sizes of the encoders in the tower (the server model), also MLPs.
        server_encoders: encoders of the tower, written likewise.
        server_epochs: passes of the server over a device's rows in a round.
        keep_server_optimiser: whether the tower's optimiser keeps its moments between devices and rounds.
        keep_local_optimiser: whether a local model's optimiser keeps its moments between rounds.
        placebo: a control of the same cost without the teacher's knowledge: `noise` sends new random embeddings in
            every round, `shuffled` those of other rows of the same device, `frozen` those of an untrained tower. `none`
            is the method.
        probe: whether devices measure the teacher's quality, `teacher_accuracy` in the log: the share of rows that are
            nearest to the mean of their class, with class means of z_T from a device's other rows.
    """

    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "uniform"
    beta: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1, 1.0)] = 0.01
    beta_local: Annotated[float | None, NOT_NEGATIVE, NotSearched("equals beta, as in the paper")] = None
    temperature: Annotated[float, POSITIVE, SearchRange(0.05, 0.1, 0.2)] = 0.1
    negatives: Annotated[Negatives, READING] = "intra"
    same_class_negatives: Annotated[bool, READING] = True
    normalise: Annotated[bool, READING] = True
    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1)] = 0.0
    global_model: Annotated[Literal["private", "all"], OF_MODEL] = "private"
    inputs: Annotated[Literal["embeddings", "raw"], NotSearched("depends on the data")] = "embeddings"
    local_start: Annotated[Literal["own", "common"], READING] = "own"
    local_hidden: tuple[int, ...] = (256,)
    local_encoders: Mapping[str, Any] = field(default_factory=dict)
    server_hidden: tuple[int, ...] = (1024, 1024, 512)
    server_encoders: Mapping[str, Any] = field(default_factory=dict)
    server_epochs: Annotated[int, AT_LEAST_ONE, COST] = 1
    keep_server_optimiser: Annotated[bool, READING] = True
    keep_local_optimiser: Annotated[bool, READING] = False
    placebo: Annotated[Literal["none", "noise", "shuffled", "frozen"], PLACEBO] = "none"
    probe: Annotated[bool, NotSearched("says what is measured")] = False

    captions: ClassVar[Mapping[str, str]] = {
        "loss_local": "The training loss of the devices' local models; the mean over devices.",
        "loss_server": "The training loss of the tower, the server's model; the mean over devices.",
        "alignment": "The mean cosine between the global model's embeddings and the teacher's, for the same rows.",
        "teacher_accuracy": "How many rows of a device are nearest to their class's mean in the teacher's embeddings.",
    }
    mixing: ClassVar[str] = "partialfl distils one modality into another"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("algorithm", "probe"),
            when=lambda recipe: recipe.algorithm.probe and _without_classes(recipe),
            beside="a [task] other than classification",
            because="the probe compares class means",
            instead="Remove probe",
        ),
        Conflict(
            key=("algorithm", "same_class_negatives"),
            when=lambda recipe: not recipe.algorithm.same_class_negatives and _without_classes(recipe),
            beside="a [task] other than classification",
            because="only classes say which rows are of the same one",
            instead="Remove same_class_negatives",
        ),
    )
    needs_embeddings: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "a device trains one output of its local model besides the global model"
    sends: ClassVar[type[Message]] = Guided
    replies: ClassVar[type[Message]] = GuidedUpdate
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"client": ("client_train.params",)}
    reads_replies: ClassVar[tuple[str, ...]] = ("server_train",)
    spare: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse options that are out of range, and entries of encoders that cannot be read."""
        super().__post_init__()
        for option in ("local_encoders", "server_encoders"):
            for name, entry in getattr(self, option).items():
                encoder_spec(f"[algorithm.{option}] {name}", entry)

    def tower(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_s, which maps shared vectors to embeddings z_T."""
        shapes, d = shapes_of(model, shared), embedding_size(model)
        return second_model(shapes, self.server_hidden, d, model.num_outputs, self.server_encoders)

    def local_model(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_k, which maps shared vectors to embeddings z'_T and logits."""
        shapes, d = shapes_of(model, shared), embedding_size(model)
        return second_model(shapes, self.local_hidden, d, model.num_outputs, self.local_encoders)

    def shareable(self, policy: Policy, modalities: Iterable[str]) -> tuple[str, ...]:
        """Return the modalities that clients can share with the server.

        For each of them, the policy allows clients to send the server every kind of data that the method needs.
        """
        needed = {"embeddings", self.inputs}
        return tuple(m for m in modalities if needed <= policy.kinds(m, "server"))

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """Return the recipe's model and the modalities that it reads.

        It reads all modalities if `global_model` is `all`, and otherwise only the private modalities.

        Raises:
            RecipeError: the policy does not allow any modality to be shared, or it shares all modalities although
                `global_model` is `private`.
        """
        shared = self.shareable(policy, modalities)
        if not shared:
            kinds = " and ".join(sorted({"embeddings", self.inputs}))
            raise RecipeError(
                f"partialfl shares nothing: no modality may send {kinds} to the server. Say which one may, as in "
                f"{policy.fix(('embeddings',), modalities[-1], 'server')}",
                ("egress",),
            )
        private = tuple(m for m in modalities if m not in shared)
        if self.global_model == "private" and not private:
            raise RecipeError(
                f"partialfl has nothing private to train: the policy shares {', '.join(shared)}. "
                "Set [algorithm] global_model = 'all', or share less",
                ("algorithm", "global_model"),
            )
        return spec, modalities if self.global_model == "all" else private

    @override
    def faults(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy, objective: Objective
    ) -> Iterator[RecipeError]:
        yield from super().faults(spec, modalities, policy, objective)
        shared = self.shareable(policy, modalities)
        for option in ("local_encoders", "server_encoders"):
            allowed = shared or modalities
            if strange := [name for name in getattr(self, option) if name not in allowed]:
                yield RecipeError(
                    f"[algorithm] {option} names '{strange[0]}', which the policy does not share; the local models and "
                    f"the tower read only {', '.join(allowed)}",
                    ("algorithm", option),
                )
        kept = tuple(m for m in modalities if m not in (shared or modalities[-1:]))
        read = modalities if self.global_model == "all" else kept
        if len(read) > 1 and spec.module is None and spec.fusion == "concat" and not spec.head:
            yield no_embedding()

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        if task == "update":  # a task of `Averaging` that this method never asks for
            return False
        shared = block != SHARED and bool(self.shareable(policy, [block]))
        if field in ("vectors", "samples"):
            return shared and (field == "vectors") == (self.inputs == "embeddings")
        if field == "there":
            return block == SHARED
        if field == "probe":
            return self.probe and block == SHARED
        if field == "student":
            return shared
        return field != "params" or self.global_model == "all" or not shared

    # the setup

    @override
    def init(self, fed: Federation, params: Tree) -> PartialState:
        """Return the state of `Averaging`, the initial tower, and the rows that the clients deposit.

        Raises:
            RecipeError: the global model has no joint embedding.
        """
        check(fed)
        shared = self.shareable(fed.context.policy, fed.clients.modalities)
        start = self.tower(fed.context.model, shared).init(keys.key(fed.seed, "init", "tower"))
        tower = {name: value.to(next(iter(params.values())).device) for name, value in start.items()}
        donors = [k for k in fed.clients.eligible if set(shared) & set(fed.clients.owned(k))]
        given = fed.ask(self.deposit, donors, Call(), accept=flaw)
        deposits = {k: rows for k in given if (rows := usable_rows(given[k], fed.context.model.shapes))}
        # the tower has no classifier, because the server has no labels
        tower = {name: value for name, value in select(tower, shared).items() if ".encoder." in name}
        return PartialState(**vars(super().init(fed, params)), tower=tower, deposits=deposits)

    @task()
    def deposit(self, context: ClientContext, data: ClientData, local: Tree, got: Call) -> tuple[Deposit, Tree]:
        """Send, once, the rows of the modalities that this client's own policy allows."""
        shared = self.shareable(context.policy, context.modalities)
        rows = data.collect(lambda batch: teacher_rows.shared_rows(batch, shared)) if shared else {}
        there = {SHARED: rows.pop(PRESENT)} if PRESENT in rows else {}
        vectors, samples = (rows, {}) if self.inputs == "embeddings" else ({}, rows)
        return Deposit(vectors, samples, there, data.num_rows), local

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        shared = self.shareable(context.policy, context.modalities)
        if not shared:
            return {}
        if self.local_start == "common":  # all devices of a run draw the same model, so no key has to be sent
            key = keys.key("local model", digest(select(context.initial, [SHARED])))
        model = self.local_model(context.model, shared)
        theta_k = model.init(key)
        return KeptTraining.fresh(model, theta_k, self.train).tree() if self.keep_local_optimiser else theta_k

    # the round

    @override
    def round(self, state: PartialState, fed: Federation) -> PartialState:
        """Algorithm 1: send model and teachers (1), train on the devices (2, 3), train the tower (4), aggregate (5)."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        replies = fed.ask(self.client_train, cohort, self.outgoing(state, cohort, fed))
        if not replies:
            return state
        memory = self.selector.learn(memory, state.params, replies, fed)
        state = state.with_(memory=memory, train_loss=mean_loss(replies, fed))
        state = self.server_train(state, replies, fed)
        merged: PartialState = self.merge(state, replies, fed)
        return merged

    @override
    def outgoing(self, state: PartialState, cohort: list[int], fed: Federation) -> dict[int, Guided]:
        model = self.tower(fed.context.model, self.shareable(fed.context.policy, fed.clients.modalities))
        sent = {}
        for k in cohort:
            data = teacher_rows.deposited(state.deposits.get(k, {}), k, fed)
            z_T = data.collect(lambda batch: model.features(state.tower, batch)) if data else {}
            if self.placebo in ("noise", "shuffled"):
                z_T = teacher_rows.without_meaning(z_T, state.deposits.get(k, {}), self.placebo, fed, k)
            count = torch.tensor(0) if data is None else data.num_rows
            sent[k] = Guided(state.params, z_T, count)
        return sent

    @task()
    def client_train(
        self, context: ClientContext, data: ClientData, local: Tree, got: Guided
    ) -> tuple[GuidedUpdate, Tree]:
        """Steps 2 and 3: train theta_g with L_glob and theta_k with L_loc on the same batches, then embed all rows.

        A client that owns none of the global model's modalities trains only theta_k.
        """
        z_T, nothing = got.teacher, torch.zeros((), device=data.num_rows.device)
        update = GuidedUpdate({}, {}, nothing, nothing, nothing, {}, data.num_rows)
        if set(context.modalities) & set(context.model.modalities):
            update = self._train_global(context, data, got, update)
        if not z_T:
            return update, local
        model = self.local_model(context.model, tuple(z_T))
        kept = KeptTraining.of(local) if self.keep_local_optimiser else None
        fit = data.minimise(
            lambda theta_k, batch: self.loss_local(context.objective, model, theta_k, batch, z_T),
            kept.params if kept else local,
            train=self.train,
            model=model,
            after=kept.earlier() if kept else None,
        )
        student = data.collect(lambda batch: model.features(fit.params, batch))
        own_loss = kept.loss(fit) if kept else fit.loss
        update = replace(update, student=student, local_loss=own_loss, loss=update.loss if update.params else own_loss)
        if self.probe:
            accuracy = teacher_rows.nearest_mean_accuracy(z_T, data, context.num_classes)
            update = replace(update, probe={SHARED: accuracy})
        return update, kept.after(fit).tree() if kept else fit.params

    def _train_global(
        self, context: ClientContext, data: ClientData, got: Guided, update: GuidedUpdate
    ) -> GuidedUpdate:
        def noted(grads: Tree, w: Tree, aux: Tensor, carry: Tree) -> tuple[Tree, Tree]:
            return grads, {"alignment": carry["alignment"] + aux.detach()}

        fit = data.minimise(
            lambda theta_g, batch: self.loss_global(context.objective, context.model, theta_g, batch, got),
            got.params,
            train=self.train,
            direction=noted if got.teacher else None,
            carry={"alignment": torch.zeros((), device=data.num_rows.device)} if got.teacher else None,
        )
        if got.teacher:
            update = replace(update, alignment=fit.carry["alignment"] / fit.num_steps.clamp(min=1))
        return replace(update, params=fit.params, loss=fit.loss)

    def server_train(self, state: PartialState, replies: Replies, fed: Federation) -> PartialState:
        """Step 4: train the tower with L_server (Eq. 2) on one device after another; no batch mixes devices."""
        model = self.tower(fed.context.model, self.shareable(fed.context.policy, fed.clients.modalities))
        train = replace(self.train, epochs=self.server_epochs, steps=None)
        after, losses = state, list[float]()
        for k, student in usable_embeddings(replies, state.deposits, embedding_size(fed.context.model)).items():
            data = teacher_rows.deposited(state.deposits[k], k, fed)
            assert data is not None, "embeddings are usable where rows were deposited"

            def loss(theta_s: Tree, batch: Batch, student: Tree = student) -> Tensor:
                return self.loss_server(model, theta_s, batch, student)

            leg, taken = None, after.tower_steps if self.keep_server_optimiser else 0
            if taken:
                leg = earlier_steps(after.tower_moments, taken)
            fit = data.minimise(loss, after.tower, train=train, model=model, after=leg)
            steps = int(fit.num_steps)
            losses.append(float(fit.loss) * steps / max(steps - taken, 1))
            after = after.with_(tower=fit.params, tower_moments=fit.moments, tower_steps=steps)
        if self.placebo == "frozen":
            after = after.with_(tower=state.tower)
        return after.with_(logged=logged(replies, losses))

    # the three losses

    def loss_global(self, objective: Objective, model: Model, theta_g: Tree, batch: Batch, got: Guided) -> Any:
        """L_glob (Eq. 3): the task's loss, plus FedProx's proximal term, plus beta times L^{T->A} (Eq. 1).

        L^{T->A} pulls the global z_A towards the tower's z_T. If z_T exists, also return the mean of cos(z_A, z_T).
        """
        z_A, logits = embed(model, theta_g, batch)
        value = objective.loss(logits, batch)
        if self.mu:
            value = value + self.mu / 2 * squared_distance(model.trainable(theta_g), got.params)
        if not (z_T := got.teacher):
            return value
        read = teacher_rows.readable(batch, model.modalities)
        if self.beta:
            value = value + self.beta * self.contrast(dict.fromkeys(z_T, z_A), z_T, batch, batch.y, read)
        near = {m: F.cosine_similarity(z_A.detach(), v[batch.rows]) for m, v in z_T.items()}
        return value, teacher_rows.mean_alignment(near, batch, read)

    def loss_local(self, objective: Objective, model: Model, theta_k: Tree, batch: Batch, z_T: Tree) -> Tensor:
        """L_loc (Eq. 4): the task's loss plus beta times L^{S->L}, over rows that have a shared modality.

        L^{S->L} is the contrastive loss that pulls the local model's embeddings z'_T towards the tower's z_T.
        """
        z = model.features(theta_k, batch)
        beta = self.beta if self.beta_local is None else self.beta_local
        value = objective.loss(model.fuse(theta_k, z, batch), teacher_rows.rows_with(batch, z_T))
        return value + beta * self.contrast(z, z_T, batch, batch.y) if beta else value

    def loss_server(self, model: Model, theta_s: Tree, batch: Batch, student: Tree) -> Tensor:
        """L_server = L^{L->S} (Eq. 2) pulls the tower's embeddings z_T towards the device's z'_T, without labels."""
        return self.contrast(model.features(theta_s, batch), student, batch, None)

    def contrast(
        self,
        students: Mapping[str, Tensor],
        teacher: Tree,
        batch: Batch,
        labels: Tensor | None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Return the contrastive loss between the embeddings of two models, averaged over the modalities.

        Each student embedding of the batch (B, d) is compared with the teacher's embeddings of all rows (n, d).

        Args:
            students: embeddings of the model in training, by modality.
            teacher: embeddings of the other model, by modality.
            batch: the rows of the students.
            labels: classes of the rows (B,), or None. With classes, the option `same_class_negatives` can remove rows
                of the same class from the negatives.
            read: rows that the student's model can read, bool (B,); None means all rows.
        """
        same = labels if labels is not None and not self.same_class_negatives else None
        terms = []
        for modality, rows in teacher.items():
            term = contrastive(
                students[modality],
                rows[batch.rows],
                teacher_rows.paired(batch, modality, read),
                temperature=self.temperature,
                negatives=self.negatives,
                normalise=self.normalise,
                classes_B=same,
            )
            terms.append(term)
        return torch.stack(terms).mean()

    # what is logged

    @override
    def observe(self, state: PartialState) -> dict[str, float]:
        return state.logged

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        seen = [row["alignment"] for row in logged if "alignment" in row]
        if not self.beta:
            return []
        if not seen:
            return [f"no device drawn in {len(logged)} rounds has a shareable modality: partialfl has had no teacher"]
        if max(seen) >= ALIGNED:
            return []
        return [
            f"the global model's embeddings have not aligned with the teacher's in {len(logged)} rounds (largest mean "
            f"cosine {max(seen):.3f}): compare with beta = 0 and placebo = 'shuffled' before you credit the teacher"
        ]


def check(fed: Federation) -> None:
    """Refuse a model without a joint embedding."""
    if not embedding_size(fed.context.model):
        raise no_embedding()


def no_embedding() -> RecipeError:
    """Return the error about a model without a joint embedding."""
    return RecipeError(
        "partialfl needs an embedding of all modalities together: give the model a hidden layer, as in "
        "[model] head = [128], or fusion = 'sum'",
        ("model", "head"),
    )
