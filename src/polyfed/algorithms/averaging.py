"""`Averaging`: the server sends parameters, clients train them, the server averages per block."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.request import Send
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import ClassMeans
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import Direction
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Moments, ServerOptimiser


@message
class Update(Message):
    """A client's trained parameters, its training loss and how many rows it has."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class State:
    """Server state of an averaging algorithm; subclasses add fields.

    Attributes:
        params: the global model.
        moments: of the server's optimiser.
        memory: of the selector.
        train_loss: mean training loss of the last cohort, weighted by rows; NaN before the first round.
    """

    params: Tree
    moments: Moments = field(default_factory=dict)
    memory: Any = field(default_factory=dict)
    train_loss: float = float("nan")

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Averaging(Algorithm):
    """The template: send parameters, train locally, average per block over the clients that trained it.

    A subclass overrides hooks: `outgoing`, `loss`, `direction`, `reply`, `merge`. One that sends or returns other
    messages names them in `sends` and `replies`.

    Attributes:
        aggregation: weights of the mean: `weighted` by rows (McMahan et al. 2017, Algorithm 1) or `uniform`.
        selector: which clients take part, the [selection] section.
        server: what the server does with the mean, the [server] section.
    """

    aggregation: Literal["weighted", "uniform"] = "weighted"
    selector: Selector = Uniform()
    server: ServerOptimiser = ServerOptimiser()

    sends: ClassVar[type[Message]] = Broadcast
    replies: ClassVar[type[Message]] = Update
    sends_class_means: ClassVar[bool] = True

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Clients are asked for class means only where one modality alone is judged by them."""
        wanted = task != Averaging.class_means.__name__ or self.evaluation.unimodal == "prototype"
        return wanted and super().will_ask(task, tested=tested)

    def init(self, fed: Federation, params: Tree) -> Any:
        """Initial parameters, fresh server moments, the selector's first memory."""
        return State(params, self.server.moments(fed.context.model.trainable(params)), self.selector.start(params))

    def round(self, state: Any, fed: Federation) -> Any:
        """Choose a cohort, have it train, merge what comes back."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        replies = fed.ask(self.update, cohort, self.outgoing(state, cohort, fed))
        if not replies:
            return state
        memory = self.selector.learn(memory, state.params, replies, fed)
        return self.merge(state.with_(memory=memory, train_loss=mean_loss(replies, fed)), replies, fed)

    def outgoing(self, state: Any, cohort: list[int], fed: Federation) -> Send:
        """What the cohort receives: one message for all, or one for each client."""
        return Broadcast(state.params)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """The local training loss, a scalar or (scalar, aux): here the cross-entropy of the fused logits."""
        return cross_entropy(context.model.logits(w, batch), batch)

    def direction(
        self, context: ClientContext, data: ClientData, got: Any, local: Tree
    ) -> tuple[Direction, Tree] | None:
        """How a gradient becomes a direction, with the first carry; None leaves the gradient alone."""
        return None

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Any, local: Tree
    ) -> tuple[Message, Tree]:
        """What goes back after training, and what stays."""
        return Update(fit.params, fit.loss, data.num_rows), local

    def merge(self, state: Any, replies: Replies, fed: Federation) -> Any:
        """The state after a round: the server optimiser on the mean per block."""
        mean = replies.mean("params", self.selector.weigh(state.memory, self.weights(replies, fed)))
        trainable = fed.context.model.trainable(state.params)
        params, moments = self.server.apply(state.params, mean, state.moments, trainable)
        return state.with_(params=params, moments=moments)

    def weights(self, replies: Replies, fed: Federation) -> Mapping[int, float]:
        """Weight of each client in a mean: its rows as the server has known them from the start, or 1."""
        if self.aggregation == "uniform":
            return dict.fromkeys(replies, 1.0)
        return fed.clients.rows_of(replies)

    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        """Class means of the features over all training rows, merged by rows; clients receive encoders only."""
        if self.evaluation.unimodal != "prototype":
            return {}
        model = fed.context.model
        head = set(model.head())
        encoders = {name: params[name] for name in model.names(model.modalities) if name not in head}
        told = fed.ask(self.class_means, list(fed.clients.eligible), Broadcast(encoders))
        merged = prototypes.gathered({}, [(reply.prototypes, reply.rows_per_class) for reply in told.values()])
        return {m: near for m, near in merged.items() if bool(near.active.any())}

    @task()
    def class_means(
        self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast
    ) -> tuple[ClassMeans, Tree]:
        """The class means of the client's training rows, asked before an evaluation by `prototype` and only then."""
        model = context.model
        sizes = {m: model.feature_size(m) for m in context.modalities if m in model.modalities}
        means, rows = prototypes.class_means(data.fold, partial(model.vectors, got.params), sizes, context.num_classes)
        return ClassMeans({m: p.sent for m, p in means.items()}, rows), local

    @task()
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Message) -> tuple[Message, Tree]:
        """Train the received model on the client's rows."""
        shape = self.direction(context, data, got, local)
        direction, carry = shape if shape is not None else (None, None)
        fit = data.minimise(
            lambda w, batch: self.loss(context, w, batch, got, local),
            got.params,  # type: ignore[attr-defined]
            train=self.train,
            direction=direction,
            carry=carry,
        )
        return self.reply(context, data, fit, got, local)


def mean_loss(replies: Replies, fed: Federation) -> float:
    """Training loss of a cohort, weighted by the rows that the server knows of."""
    losses, rows = replies.numbers("loss"), fed.clients.rows_of(replies)
    return sum(losses[c] * rows[c] for c in replies) / max(sum(rows.values()), 1)
