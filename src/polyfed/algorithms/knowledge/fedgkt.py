"""FedGKT: small models on the clients, a large model on the server, and distillation in both directions.

He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020. A
client trains its feature extractor and classifier on its labels and on the server's logits for its rows. It then
uploads features, logits and labels of all its rows. The server trains a network of its own on these features, and sends
the logits of this network back to the clients. No parameters are averaged, and every client keeps its extractor.

polyfed's choices: rows are matched by their position in the client's dataset, which never changes. Each modality has
one extractor on the clients and one tower on the server. The first common layer sums the towers' outputs, and a missing
modality adds nothing.

Clients send features, logits and labels of all training rows, and the server sends logits. The default policy refuses
this method, because the policy does not let clients send features, logits or labels. Page: docs/algorithms/fedgkt.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.base import NO_GLOBAL, SCORING, Algorithm, Broadcast
from polyfed.algorithms.knowledge.second_model import second_model
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import AT_LEAST_ONE, COST, NOT_NEGATIVE, OF_MODEL, POSITIVE, SearchRange
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, nested, under
from polyfed.evaluation.scores import Predictor
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData
from polyfed.training.kept_training import earlier_steps
from polyfed.training.losses import distillation
from polyfed.training.optimisers import Moments

TOP = "top"
"""Prefix of the server's network in the model with which a client is evaluated."""


@message
class ServerLogits(Message):
    """The server's logits (n, C) for the client's rows, under `shared`; empty in a client's first round."""

    logits: Tree = carries("predictions", rows="num_rows", shape=("classes",), blocks=(SHARED,), optional=True)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Extract(Message):
    """Features (n, E) by modality, the client's logits (n, C) and the labels (n,) of all its training rows."""

    features: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    logits: Tensor = carries("predictions", rows="num_rows", shape=("classes",))
    labels: Tensor = carries("labels", rows="num_rows", shape=())
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class GktState(State):
    """Server state; `params` is the server's network.

    Attributes:
        optimiser: moments of the network's optimiser.
        steps: training steps of the network so far.
        logits: client -> logits (n, C) of the server's network for the client's rows.
        server_loss: mean training loss of the network in the last round; NaN before the first round.
    """

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    server_loss: float = float("nan")


@dataclass(frozen=True)
class ServerOnTop(Predictor):
    """Predicts with a client's extractor and the server's network.

    In the Tree, the parameter names of the server's network begin with `top.`.

    Attributes:
        hidden: hidden sizes of the server's towers.
        embedding: output size of the server's towers.
    """

    hidden: tuple[int, ...]
    embedding: int

    def top(self, model: Model) -> Model:
        """The server's network for clients of this model."""
        shapes = tuple((m, (model.feature_size(m),)) for m in model.modalities)
        return second_model(shapes, self.hidden, self.embedding, model.num_classes)

    @override
    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the server's network on the features of the client's extractor."""
        top = under(TOP, w)
        return self.top(model).logits(top, replace(batch, x=model.vectors(w, batch)))


@dataclass(frozen=True, kw_only=True)
class FedGKT(Algorithm[GktState]):
    """Group knowledge transfer.

    Attributes:
        alpha: weight of the distillation term on the clients, and of the cross-entropy on the server.
        temperature: temperature of the distillation.
        server_epochs: epochs of the server over the features of a round.
        server_hidden: hidden sizes of the server's towers.
        server_embedding: output size of the server's towers.
        selector: the rule from the [selection] section that chooses which clients take part in a round. Only `uniform`
            is allowed.
    """

    captions: ClassVar[Mapping[str, str]] = {
        "loss_server": "The training loss of the server's network on the clients' features.",
    }
    mixing: ClassVar[str] = "fedgkt distils the predictions from all modalities into each of them"
    objectives_because: ClassVar[str] = "client and server distil the probabilities of classes"

    alpha: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.5, 1.0, 2.0)] = 1.0
    temperature: Annotated[float, POSITIVE, SearchRange(1.0, 3.0, 10.0)] = 3.0
    server_epochs: Annotated[int, NOT_NEGATIVE, COST] = 2
    server_hidden: tuple[int, ...] = (256, 256)
    server_embedding: Annotated[int, AT_LEAST_ONE, OF_MODEL] = 128
    selector: Selector = Uniform()

    needs_embeddings: ClassVar[bool] = True
    handles_missing_rows: ClassVar[bool] = False
    trains_one_model: ClassVar[bool] = False

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        return {"evaluate.unimodal": NO_GLOBAL}

    # the clients' half

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return dict(context.initial)

    @task()
    def extract(self, context: ClientContext, data: ClientData, local: Tree, got: ServerLogits) -> tuple[Extract, Tree]:
        """Train the client's model, then compute features and logits of all rows."""
        model = context.model

        def loss(w: Tree, batch: Batch) -> Tensor:
            logits = model.logits(w, batch)
            value = context.objective.loss(logits, batch)
            if not (got.logits and self.alpha):
                return value
            return value + self.alpha * distillation(logits, got.logits[SHARED][batch.rows], batch, self.temperature)

        def outputs(batch: Batch) -> Tree:
            z = model.features(fit.params, batch)
            logits = model.fuse(fit.params, z, batch)
            return {m: model.vector(v) for m, v in z.items()} | {"logits": logits, "labels": batch.y}

        fit = data.minimise(loss, local, train=self.train)
        rows = data.collect(outputs)
        features = {m: rows[m] for m in context.modalities}
        return Extract(features, rows["logits"], rows["labels"], fit.loss, data.num_rows), fit.params

    # the server's half

    def top(self, model: Model) -> Model:
        """The server's network, which maps features of all modalities to logits."""
        return self.predictor.top(model)

    @override
    def init(self, fed: Federation, params: Tree) -> GktState:
        start = self.top(fed.context.model).init(keys.key(fed.seed, "init", "top"))
        device = next(iter(params.values())).device
        return GktState({n: v.to(device) for n, v in start.items()}, memory=self.selector.start(params))

    @override
    def round(self, state: GktState, fed: Federation) -> GktState:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        sends = {k: server_logits(state.logits.get(k)) for k in cohort}
        replies = fed.ask(self.extract, cohort, sends)
        state = state.with_(memory=memory)
        return self.learn(state, replies, fed) if replies else state

    def learn(self, state: GktState, replies: Replies, fed: Federation) -> GktState:
        """Train the server's network on the features of all replies. Keep the network's logits for each client."""
        model = self.top(fed.context.model)
        x, present = stacked(replies, model)
        y = torch.cat([replies[k].labels for k in replies])
        teacher = torch.cat([replies[k].logits for k in replies])

        def loss(w: Tree, batch: Batch) -> Tensor:
            logits = model.logits(w, batch)
            distilled = distillation(logits, teacher[batch.rows], batch, self.temperature)
            return distilled + self.alpha * fed.context.objective.loss(logits, batch)

        data = fed.server_data(x, y, present=present)
        after = None
        if state.steps:
            after = earlier_steps(state.optimiser, state.steps)
        train = replace(self.train, epochs=self.server_epochs, steps=None)
        fit = data.minimise(loss, state.params, train=train, model=model, after=after)
        logits = data.collect(lambda batch: {SHARED: model.logits(fit.params, batch)})[SHARED]
        parts = torch.split(logits, [len(replies[k].labels) for k in replies])
        answers = {k: part.clone() for k, part in zip(replies, parts, strict=True)}
        steps = int(fit.num_steps)
        return state.with_(
            params=fit.params,
            optimiser=fit.moments,
            steps=steps,
            logits=state.logits | answers,
            server_loss=float(fit.loss) * steps / max(steps - state.steps, 1),
            train_loss=mean_loss(replies, fed),
        )

    # evaluation, on the client's own test rows, uses its extractor with the server's network; no model is global

    @property
    @override
    def predictor(self) -> ServerOnTop:
        return ServerOnTop(self.server_hidden, self.server_embedding)

    @override
    def evaluation_message(self, state: GktState, fed: Federation, clients: Sequence[int]) -> Broadcast:
        return Broadcast(state.params)

    @override
    def received_template(self, task: str, model: Model) -> Tree:
        evaluates = task in SCORING
        return self.top(model).template if evaluates else super().received_template(task, model)

    @override
    def may_lack(self, task: str) -> bool:
        return False

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return local | nested(TOP, got.params)

    @override
    def observe(self, state: GktState) -> dict[str, float]:
        return {"loss_server": state.server_loss}


def server_logits(logits: Tensor | None) -> ServerLogits:
    """The message with the server's logits for a client; it is empty before the client's first upload."""
    if logits is None:
        return ServerLogits({}, torch.tensor(0))
    return ServerLogits({SHARED: logits}, torch.tensor(len(logits)))


def stacked(replies: Mapping[int, Extract], model: Model) -> tuple[Tree, Tree]:
    """Concatenate the features of all clients, with zeros where a client lacks a modality.

    Returns:
        Features (N, ...) by modality, and bool (N,) for every modality that some clients lack.
    """
    x: Tree = {}
    present: Tree = {}
    for m, shape in model.shapes.items():
        parts, there = [], []
        for reply in replies.values():
            n, device = len(reply.labels), reply.labels.device
            parts.append(reply.features.get(m, torch.zeros(n, *shape, device=device)))
            there.append(torch.full((n,), m in reply.features, device=device))
        x[m], flags = torch.cat(parts), torch.cat(there)
        if not bool(flags.all()):
            present[m] = flags
    return x, present
