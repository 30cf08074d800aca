"""FedGKT: small models on the clients, a large one on the server, and knowledge passed both ways instead of weights.

He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020, read
through algorithms.md 5.13. A client trains extractor and classifier on its labels and on the server's logits of its own
rows, then uploads features, logits and labels of all rows; the server trains on them a network that goes on from the
features, and returns its logits. No weights are averaged, every client keeps its extractor. Labels leave the device:
that is why PartialFL rejects it, and why the default policy refuses.

Ours: rows are paired by their place among the client's rows, which never changes; one extractor per modality, whose
features the server takes up with one tower each, summed in its first common layer, a missing one contributing nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.algorithms.towers import mlps
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree
from polyfed.evaluation.scores import Predictor
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.selection import Selector, Uniform, must_be_uniform
from polyfed.training import ClientData, TrainingResult
from polyfed.training.losses import cross_entropy, distillation
from polyfed.training.optimisers import Moments

TOP = "top."
"""Prefix of the server's network in the model that a client is judged with."""


@message
class LocalTraining(Message):
    """The server's logits (n, C) of the client's rows, under `shared`; nothing in a client's first round."""

    logits: Tree = carries("predictions", rows="num_rows", shape=("classes",), blocks=(SHARED,))
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Extract(Message):
    """Features (n, E) by modality, the client's logits (n, C) and the labels (n,) of all of its rows."""

    features: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    logits: Tensor = carries("predictions", rows="num_rows", shape=("classes",))
    labels: Tensor = carries("labels", rows="num_rows", shape=())
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class GktState(State):
    """`params` is the server's network; its optimiser after `steps` steps; its logits by client."""

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    server_loss: float = float("nan")


@dataclass(frozen=True)
class ServerOnTop(Predictor):
    """A client's extractor and the server's network as one model; the Tree holds the latter under `top.`.

    Attributes:
        hidden: hidden sizes of the server's towers.
        embedding: their width.
    """

    hidden: tuple[int, ...]
    embedding: int

    def top(self, model: Model) -> Model:
        """The server's network for clients of this model."""
        shapes = tuple((m, (model.feature_size(m),)) for m in model.modalities)
        return mlps(shapes, self.hidden, self.embedding, model.num_classes)

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """See `Predictor.logits`."""
        above = {name.removeprefix(TOP): value for name, value in w.items() if name.startswith(TOP)}
        return self.top(model).logits(above, replace(batch, x=model.vectors(w, batch)))


@dataclass(frozen=True, kw_only=True)
class FedGKT(Algorithm):
    """See the module.

    Attributes:
        alpha: weight of the distillation term on the clients, and of the cross-entropy on the server; the released
            configuration says 0.5 (algorithms.md 5.13).
        temperature: of the distillation; 100 in the released configuration makes targets nearly uniform, so 3 here.
        server_epochs: passes of the server over what a round brought.
        server_hidden: hidden sizes of the server's towers.
        server_embedding: their width.
        selector: which clients take part, the [selection] section.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 3.0
    server_epochs: Annotated[int, NOT_NEGATIVE] = 2
    server_hidden: tuple[int, ...] = (256, 256)
    server_embedding: Annotated[int, AT_LEAST_ONE] = 128
    selector: Selector = Uniform()

    handles_missing_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse selectors that need a global model."""
        super().__post_init__()
        must_be_uniform(self.selector, "fedgkt")

    # the clients' half

    def local(self, context: ClientContext, key: int) -> Tree:
        """The client's own model, from the common start."""
        return dict(context.initial)

    @task()
    def extract(
        self, context: ClientContext, data: ClientData, local: Tree, got: LocalTraining
    ) -> tuple[Extract, Tree]:
        """Train the client's model, then tell what it makes of all rows."""
        model = context.model

        def loss(w: Tree, batch: Batch) -> Tensor:
            logits = model.logits(w, batch)
            value = cross_entropy(logits, batch)
            if not (got.logits and self.alpha):
                return value
            taught = distillation(logits, got.logits["shared"][batch.rows], batch, self.temperature)
            return value + self.alpha * taught

        def tell(batch: Batch) -> Tree:
            z = model.features(fit.params, batch)
            logits = model.fuse(fit.params, z, batch)
            return {m: model.vector(v) for m, v in z.items()} | {"logits": logits, "labels": batch.y}

        fit = data.minimise(loss, local, train=self.train)
        told = data.collect(tell)
        features = {m: told[m] for m in context.modalities}
        return Extract(features, told["logits"], told["labels"], fit.loss, data.num_rows), fit.params

    # the server's half

    def top(self, model: Model) -> Model:
        """The server's network: features of every modality to logits."""
        return self.predictor.top(model)

    def init(self, fed: Federation, params: Tree) -> GktState:
        """The server's network; the recipe's model is the clients'."""
        start = self.top(fed.context.model).init(keys.key(fed.seed, "init", "top"))
        device = next(iter(params.values())).device
        return GktState({n: v.to(device) for n, v in start.items()}, memory=self.selector.start(params))

    def round(self, state: GktState, fed: Federation) -> GktState:
        """The cohort trains and tells, the server learns from it and answers in each client's next round."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        lessons = {k: training(state.logits.get(k)) for k in cohort}
        replies = fed.ask(self.extract, cohort, lessons)
        state = state.with_(memory=memory)
        return self.learn(state, replies, fed) if replies else state

    def learn(self, state: GktState, replies: Replies, fed: Federation) -> GktState:
        """Train the server's network on all features at once, and note its logits for each client."""
        model = self.top(fed.context.model)
        x, present = stacked(replies, model)
        y = torch.cat([replies[k].labels for k in replies])
        told = torch.cat([replies[k].logits for k in replies])

        def loss(w: Tree, batch: Batch) -> Tensor:
            logits = model.logits(w, batch)
            taught = distillation(logits, told[batch.rows], batch, self.temperature)
            return taught + self.alpha * cross_entropy(logits, batch)

        view = fed.server_data(x, y, present=present)
        after = None
        if state.steps:
            after = TrainingResult({}, torch.zeros(()), torch.tensor(state.steps), moments=state.optimiser)
        train = replace(self.train, epochs=self.server_epochs, steps=None)
        fit = view.minimise(loss, state.params, train=train, model=model, after=after)
        logits = view.collect(lambda batch: {"shared": model.logits(fit.params, batch)})["shared"]
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

    # judging: pairs of a client's extractor and the server's network, on the client's own test rows; none is global

    @property
    def predictor(self) -> ServerOnTop:
        """The client's extractor, then the server's network."""
        return ServerOnTop(self.server_hidden, self.server_embedding)

    def to_judge(self, state: GktState, fed: Federation, clients: Sequence[int]) -> Broadcast:
        """The server's network."""
        return Broadcast(state.params)

    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        """The client's model and the server's network, whose names begin with `top.`."""
        return local | {TOP + name: value for name, value in got.params.items()}

    def observe(self, state: GktState) -> dict[str, float]:
        """The server's loss."""
        return {"loss_server": state.server_loss}


def training(logits: Tensor | None) -> LocalTraining:
    """What a client is told."""
    if logits is None:
        return LocalTraining({}, torch.tensor(0))
    return LocalTraining({"shared": logits}, torch.tensor(len(logits)))


def stacked(replies: Mapping[int, Extract], model: Model) -> tuple[Tree, Tree]:
    """Features of all clients under each other, and for a modality that some lack, whose rows have it."""
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
