"""`Averaging`: the template of methods that change one thing about federated averaging.

In each round the server sends the model to a cohort, every client trains it on its rows, and the server averages each
block over the clients that have that block. The template without changes is FedAvg (`fedavg.py`).

The table lists the hooks in the order in which they are called. `Algorithm` (`base.py`) has further ones, such as
`local`, `evaluate` and `will_send`:

| hook | called on | when | default |
|---|---|---|---|
| `init` | server | once, before round 1 | `State` with the initial parameters |
| `outgoing` | server | every round, once the cohort is chosen | `Broadcast(state.params)` to every client |
| `direction` | client | before local training | None: the optimiser takes the gradient as it is |
| `loss` | client | in every step of local training | `context.loss`, for classes the cross-entropy of the logits |
| `reply` | client | after local training | `Update` with the trained parameters; the local state stays as it was |
| `merge` | server | once the replies are in | weighted mean per block, then a step of the server optimiser |
| `weights` | server | in `merge` | rows of each client, or 1 with `aggregation = "uniform"` |

A method whose `outgoing` or `reply` returns another message class names that class in `sends` or `replies`. The
template reads the field `params` of the message sent, and the fields `params`, `loss` and `num_rows` of the replies.
"""

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
from polyfed.federation.aggregation import aggregate
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.objective import Objective
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import Direction
from polyfed.training.optimisers import Moments, ServerOptimiser


@message
class Update(Message):
    """A client's trained parameters, its mean training loss and its number of training rows."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class State:
    """The server state of a method that extends `Averaging`; subclasses can add fields.

    Attributes:
        params: the global model.
        moments: moments of the server optimiser.
        memory: what the selector remembers from one round to the next.
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
    """The template: send parameters, train locally, average each block over the clients that trained it.

    Subclasses override the hooks that the module's docstring lists.

    Attributes:
        aggregation: the weights of the mean: `weighted` is by number of rows (McMahan et al., 2017, Algorithm 1),
            `uniform` is the same weight for every client.
        selector: which clients take part; the [selection] section.
        server: what the server does with the mean; the [server] section.
    """

    aggregation: Literal["weighted", "uniform"] = "weighted"
    selector: Selector = Uniform()
    server: ServerOptimiser = ServerOptimiser()

    sends: ClassVar[type[Message]] = Broadcast
    replies: ClassVar[type[Message]] = Update
    sends_class_means: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Clients are asked for class means only under `[evaluate] unimodal = "prototype"`."""
        wanted = task != Averaging.class_means.__name__ or self.evaluation.unimodal == "prototype"
        return wanted and super().will_ask(task, tested=tested)

    def init(self, fed: Federation, params: Tree) -> Any:
        """The first state: initial parameters, fresh moments of the server optimiser, the selector's first memory."""
        return State(params, self.server.moments(fed.context.model.trainable(params)), self.selector.start(params))

    def round(self, state: Any, fed: Federation) -> Any:
        """Choose a cohort, ask it to train, and merge the replies. If nobody replies, the model stays as it is."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        enough = self.selector.enough(fed)
        replies = fed.ask(self.update, cohort, self.outgoing(state, cohort, fed), enough=enough)
        if not replies:
            return state
        memory = self.selector.learn(memory, state.params, replies, fed)
        return self.merge(state.with_(memory=memory, train_loss=mean_loss(replies, fed)), replies, fed)

    def outgoing(self, state: Any, cohort: list[int], fed: Federation) -> Send:
        """What the cohort receives: one message for all clients, or a mapping from client to message."""
        return Broadcast(state.params)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """The local training loss of a batch: a scalar, or (scalar, aux) if `direction` uses aux.

        Args:
            context: the client context.
            w: the parameters being trained.
            batch: some of the client's training rows.
            got: the message that the client received.
            local: the client's local state.
        """
        return context.loss(w, batch)

    def direction(
        self, context: ClientContext, data: ClientData, got: Any, local: Tree
    ) -> tuple[Direction, Tree] | None:
        """A function that changes the gradient of every step, and its first carry; None leaves gradients unchanged.

        Args:
            context: the client context.
            data: the client dataset.
            got: the message that the client received.
            local: the client's local state.
        """
        return None

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Any, local: Tree
    ) -> tuple[Message, Tree]:
        """The reply after local training, and the client's next local state.

        Args:
            context: the client context.
            data: the client dataset.
            fit: the result of local training.
            got: the message that the client received.
            local: the client's local state.
        """
        return Update(fit.params, fit.loss, data.num_rows), local

    def merge(self, state: Any, replies: Replies, fed: Federation) -> Any:
        """The next state: a step of the server optimiser towards the combined replies, per block."""
        weights = self.selector.weigh(state.memory, self.weights(replies, fed))
        mean = aggregate(replies, "params", weights, state.params, self.server)
        trainable = fed.context.model.trainable(state.params)
        params, moments = self.server.apply(state.params, mean, state.moments, trainable)
        return state.with_(params=params, moments=moments)

    def weights(self, replies: Replies, fed: Federation) -> Mapping[int, float]:
        """Weight of each client in the mean: 1, or its row count in the client registry, whatever its reply claims."""
        if self.aggregation == "uniform":
            return dict.fromkeys(replies, 1.0)
        return fed.clients.rows_of(replies)

    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        """Class means of the features over all clients' training rows. Clients receive the encoders only."""
        if self.evaluation.unimodal != "prototype":
            return {}
        model = fed.context.model
        head = set(model.head())
        encoders = {name: params[name] for name in model.names(model.modalities) if name not in head}
        replies = fed.ask(self.class_means, list(fed.clients.eligible), Broadcast(encoders))
        merged = prototypes.gathered({}, [(reply.prototypes, reply.rows_per_class) for reply in replies.values()])
        return {m: near for m, near in merged.items() if bool(near.active.any())}

    @task()
    def class_means(
        self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast
    ) -> tuple[ClassMeans, Tree]:
        """Class means of the client's training rows; the server asks only before evaluating with class prototypes."""
        model = context.model
        sizes = {m: model.feature_size(m) for m in context.modalities if m in model.modalities}
        means, rows = prototypes.class_means(data.fold, partial(model.vectors, got.params), sizes, context.num_classes)
        return ClassMeans({m: p.sent for m, p in means.items()}, rows), local

    @task()
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Message) -> tuple[Message, Tree]:
        """Train the received model on the client's rows."""
        directed = self.direction(context, data, got, local)
        direction, carry = directed if directed is not None else (None, None)
        fit = data.minimise(
            lambda w, batch: self.loss(context, w, batch, got, local),
            got.params,  # type: ignore[attr-defined]
            train=self.train,
            direction=direction,
            carry=carry,
        )
        return self.reply(context, data, fit, got, local)


def mean_loss(replies: Replies, fed: Federation) -> float:
    """Mean training loss of a cohort, weighted by the rows of each client in the client registry."""
    losses, rows = replies.numbers("loss"), fed.clients.rows_of(replies)
    return sum(losses[c] * rows[c] for c in replies) / max(sum(rows.values()), 1)
