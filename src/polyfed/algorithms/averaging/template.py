"""`Averaging`: the template of methods that change one thing about federated averaging.

In each round the server sends the model to a cohort, every client trains it on its rows, and the server averages each
block over the clients that have that block. The template without changes is FedAvg (`fedavg.py`).

The hooks, in the order in which they are called (`Algorithm` in `base.py` has more, such as `local` and `evaluate`):

| hook | called on | when | default |
|---|---|---|---|
| `init` | server | once, before round 1 | `State` with the initial parameters |
| `outgoing` | server | every round, after the cohort is chosen | `Broadcast(state.params)` to every client |
| `kept_at_start` | client | before local training, with private blocks | those that the last round left |
| `tuned_from` | client | before fine-tuning | the model that the client uses |
| `trained_names` | client | before local training | None: all parameters train |
| `direction` | client | before local training | None: the optimiser uses the unchanged gradient |
| `loss` | client | in every step of local training | `context.loss`; for classes, the cross-entropy of the logits |
| `reply` | client | after local training | `Update` with the trained parameters; the local state does not change |
| `merge` | server | after the replies have arrived | weighted mean per block, then a step of the server optimiser |
| `weights` | server | in `merge` | number of rows of each client, or 1 if `aggregation = "uniform"` |

If `outgoing` or `reply` returns another message class, set the class attribute `sends` or `replies` to that class. The
template reads the field `params` of the message sent, and the fields `params`, `loss` and `num_rows` of the replies.

Private blocks (`private`) stay on the client, in its local state. The hooks see the complete model, but neither the
server's message nor the reply contains the private blocks (`private_blocks.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from torch import Tensor
from typing_extensions import TypeVar, override

from polyfed.algorithms.averaging import private_blocks
from polyfed.algorithms.base import NO_GLOBAL, Algorithm, Broadcast
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import COST, IN_RECIPE, NOT_NEGATIVE, PROBABILITY, NotSearched
from polyfed.core.problems import Conflict
from polyfed.core.request import Send
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, nested
from polyfed.evaluation.scores import ClassMeans, Measured
from polyfed.federation import adapters
from polyfed.federation.aggregation import ServerOptimiser, aggregate
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.objective import Objective
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import ONCE, Direction, Passes
from polyfed.training.optimisers import Moments, Train


@message
class Update(Message):
    """A client's trained parameters, its mean training loss and its number of training rows."""

    params: Tree = carries("parameters", sum_only=True, weight="num_rows")
    loss: Tensor = carries("statistic", dtype="float32", sum_only=True, weight="num_rows")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, sum_only=True)


@message
class Tuned(Message):
    """Confirms that the client has fine-tuned its own model. Has no fields."""


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
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


A = TypeVar("A", bound=State, default=Any)
"""The state of a method that extends `Averaging`."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Algorithm[A]):
    """The template: send parameters, train locally, average each block over the clients that trained it.

    Subclasses override the hooks that the module's docstring lists.

    Attributes:
        aggregation: weights of the mean: `weighted` by each client's number of rows (McMahan et al., 2017, Algorithm
            1), or `uniform`.
        selector: the rule from the [selection] section that chooses which clients take part.
        server: how the server uses the mean, as set in the [server] section.
        private: blocks that every client keeps and never sends: `shared`, a modality, `head` (everything after the
            encoders), `encoders`, `norms` (all normalisation layers) or `projections` (the fusion `adapted`); see
            docs/algorithms/private-blocks.md.
        private_epochs: epochs in which a client trains only its private blocks, and afterwards only the others, as in
            FedRep; 0 trains all together, as in FedPer.
        fine_tune: epochs in which every client trains a copy of its model after the last round, before the last
            personal evaluation.
        repair: with LoRA, FediLoRA's layer-wise editing (docs/models.md), for a cosine similarity below this; 0 for
            none (0.95 in the released code).
    """

    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "weighted"
    selector: Selector = Uniform()
    server: ServerOptimiser = ServerOptimiser()
    private: tuple[str, ...] = ()
    private_epochs: Annotated[int, NOT_NEGATIVE, NotSearched("needs private blocks")] = 0
    fine_tune: Annotated[int, NOT_NEGATIVE, COST] = 0
    repair: Annotated[float, PROBABILITY, NotSearched("needs LoRA adapters")] = 0.0

    sends: ClassVar[type[Message]] = Broadcast
    replies: ClassVar[type[Message]] = Update
    completes_private: ClassVar[bool] = False
    """Whether a method that replaces the hooks with which the template keeps private blocks keeps them itself."""
    sends_class_means: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"client": ("update.params",)}
    spare: ClassVar[tuple[str, ...]] = ("update.loss", "update.num_rows")
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("evaluate", "unimodal"),
            when=lambda recipe: bool(recipe.algorithm.private) and recipe.algorithm.evaluation.unimodal == "prototype",
            beside="[algorithm] private",
            because="it scores a global model, and with private blocks there is none",
            instead="Allowed here: 'auto', 'head', 'zero'",
        ),
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range, or the method cannot have private blocks or fine-tuning.
        """
        super().__post_init__()
        private_blocks.check(self, Averaging)

    @property
    @override
    def trains_one_model(self) -> bool:  # type: ignore[override]
        return not self.private

    @override
    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Ask for class means only under `[evaluate] unimodal = "prototype"`, and for fine-tuning only if it is on."""
        if task == Averaging.tune.__name__:
            return self.fine_tune > 0
        wanted = task != Averaging.class_means.__name__ or self.evaluation.unimodal == "prototype"
        return wanted and super().will_ask(task, tested=tested)

    @override
    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.private:
            private_blocks.refuse_all_private(self.private, model)

    @override
    def private_names(self, model: Model) -> frozenset[str]:
        return private_blocks.names_of(self.private, model) if self.private else frozenset()

    @override
    def first_local(self, context: ClientContext, key: int) -> Tree:
        own = self.local(context, key)
        return own | private_blocks.kept_at_first(context, self.private_names(context.model)) if self.private else own

    @override
    def init(self, fed: Federation, params: Tree) -> Any:
        kept = self.private_names(fed.context.model)
        params = {name: value for name, value in params.items() if name not in kept}
        return State(params, self.server.moments(fed.context.model.trainable(params)), self.selector.start(params))

    @override
    def round(self, state: Any, fed: Federation) -> Any:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        replies = fed.ask(
            self.update, cohort, self.outgoing(state, cohort, fed), enough=self.selector.enough(fed.clients)
        )
        if not replies:
            return state
        memory = self.selector.learn(memory, state.params, replies, fed)
        return self.merge(state.with_(memory=memory, train_loss=mean_loss(replies, fed)), replies, fed)

    def merges(self, clients: ClientRegistry) -> int:
        """Return how many replies `merge` gets if no client fails."""
        return self.selector.size(clients)

    def outgoing(self, state: Any, cohort: list[int], fed: Federation) -> Send:
        """Return what the cohort receives: one message for all clients, or a mapping from client to message."""
        return Broadcast(state.params)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """Return the local training loss of a batch: a scalar, or (scalar, aux) if `direction` uses aux.

        Args:
            w: the parameters being trained.
            batch: some of the client's training rows.
            got: the message that the client received.
        """
        return context.loss(w, batch)

    @property
    def local_train(self) -> Train:
        """The options with which clients train the received model: by default, those of [train]."""
        return self.train

    @property
    def passes(self) -> Passes:
        """What `loss` computes in a step, for simulated time; override it if `loss` calls the model more than once."""
        return ONCE

    def trained_names(self, context: ClientContext) -> Collection[str] | None:
        """Return the names of the parameters that train; None for all."""
        return None

    def kept_at_start(self, context: ClientContext, kept: Tree) -> Tree:
        """Return the private parameters with which a client starts a round.

        Args:
            kept: those of its last round.
        """
        return kept

    def tuned_from(self, context: ClientContext, params: Tree) -> Tree:
        """Return the parameters from which a client starts fine-tuning.

        Args:
            params: the model that it uses now.
        """
        return params

    def direction(
        self, context: ClientContext, data: ClientData, got: Any, local: Tree
    ) -> tuple[Direction, Tree] | None:
        """Return a function that changes the gradient in every step, and its first carry; None for no change.

        Args:
            got: the message that the client received.
        """
        return None

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Any, local: Tree
    ) -> tuple[Message, Tree]:
        """Return the reply after local training, and the client's next local state.

        Args:
            fit: the result of local training.
            got: the message that the client received.
        """
        return Update(fit.params, fit.loss, data.num_rows), local

    def merge(self, state: Any, replies: Replies, fed: Federation) -> Any:
        """Return the next state: in each block, the server optimiser takes a step towards the combined replies."""
        weights = self.selector.weigh(state.memory, self.weights(replies, fed))
        private = fed.private_mean(state.moments)
        mean = aggregate(replies, "params", weights, state.params, self.server, private)
        moments = state.moments if private is None else private.adapted(replies, "params", state.params, state.moments)
        params, moments = self.server.apply(state.params, mean, moments, fed.context.model.trainable(state.params))
        return state.with_(params=params, moments=moments)

    def weights(self, replies: Replies, fed: Federation) -> Mapping[int, float]:
        """Return each client's weight in the mean: 1, or its row count in the registry (not the one in its reply)."""
        return dict.fromkeys(replies, 1.0) if self.aggregation == "uniform" else fed.clients.rows_of(replies)

    @override
    def weight_of(self, field: str, kind: type[Message]) -> str | None:
        return None if field == "params" and self.aggregation == "uniform" else super().weight_of(field, kind)

    @override
    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        if self.evaluation.unimodal != "prototype":
            return {}
        model, head = fed.context.model, set(fed.context.model.head())
        encoders = {n: params[n] for n in model.names(model.modalities) if n not in head and n in params}
        replies = fed.ask(self.class_means, list(fed.clients.eligible), prototypes.Encoders(encoders))
        merged = prototypes.gathered(
            {},
            [(reply.prototypes, reply.rows_per_class) for reply in replies.values()],
            [*fed.clients.rows_of(replies).values()],
            robust=self.server.aggregate != "mean",
        )
        return {m: near for m, near in merged.items() if bool(near.active.any())}

    @task()
    def class_means(
        self, context: ClientContext, data: ClientData, local: Tree, got: prototypes.Encoders
    ) -> tuple[ClassMeans, Tree]:
        """Compute class means of the client's training rows.

        The server sends this request only if the evaluation uses class prototypes.
        """
        model = context.model
        sizes = {m: model.feature_size(m) for m in context.modalities if m in model.modalities}
        means, rows = prototypes.class_means(data, partial(model.vectors, got.params), sizes, context.num_classes)
        return ClassMeans({m: p.sent for m, p in means.items()}, rows), local

    @task()
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Message) -> tuple[Message, Tree]:
        """Train the received model and the client's private blocks on the client's rows."""
        kept, own = private_blocks.parted(local)
        whole = private_blocks.completed(got, self.kept_at_start(context, kept))

        def loss(w: Tree, batch: Batch) -> Any:
            return self.loss(context, w, batch, whole, own)

        start, only = whole.params, self.trained_names(context)
        if kept and self.private_epochs:  # first the private parameters alone, then the others alone
            train = private_blocks.epochs_of(self.local_train, self.private_epochs)
            start = data.minimise(
                loss,
                start,
                train=train,
                only=kept.keys(),
                stream=private_blocks.PRIVATE_STREAM,
                passes=self.passes,
            ).params
            only = set(start if only is None else only) - kept.keys()
        directed = self.direction(context, data, whole, own)
        direction, carry = directed if directed is not None else (None, None)
        fit = data.minimise(
            loss, start, train=self.local_train, direction=direction, carry=carry, only=only, passes=self.passes
        )
        if self.repair:
            fit = replace(fit, params=adapters.repaired(fit.params, whole.params, self.repair))
        if not kept:
            return self.reply(context, data, fit, whole, own)
        reply, after = self.reply(context, data, fit, whole, own)
        after = after | nested(private_blocks.PRIVATE, {name: fit.params[name] for name in kept})
        return private_blocks.public(reply, kept.keys()), after

    @task()
    def tune(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Tuned, Tree]:
        """Fine-tune a copy of the client's model with the template's `loss`, and keep the copy."""
        whole = private_blocks.completed(got, private_blocks.parted(local)[0])
        fit = data.minimise(
            lambda w, batch: Averaging.loss(self, context, w, batch, whole, {}),
            self.tuned_from(context, whole.params),
            train=private_blocks.epochs_of(self.train, self.fine_tune),
            only=self.trained_names(context),
            stream=private_blocks.TUNE_STREAM,
        )
        return Tuned(), local | nested(private_blocks.TUNED, fit.params)

    @property
    @override
    def evaluates_more_at_end(self) -> bool:
        return self.fine_tune > 0

    @override
    def evaluate(self, state: Any, fed: Federation) -> Measured:
        if self.fine_tune and fed.round == fed.rounds:
            fed.ask(self.tune, list(fed.clients.eligible), Broadcast(state.params))
        return super().evaluate(state, fed)

    @property
    @override
    def own_models(self) -> Literal["none", "server", "clients"]:
        overridden = type(self).own_params is not Averaging.own_params
        return "clients" if self.private or self.fine_tune or overridden else "none"

    @override
    def global_params(self, state: Any) -> Tree | None:
        if self.fine_tune and not self.private:
            return state.params  # type: ignore[no-any-return]
        return super().global_params(state)

    @override
    def evaluation_message(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        if self.private or self.fine_tune:
            return Broadcast(state.params)
        return super().evaluation_message(state, fed, clients)

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        return {"evaluate.unimodal": NO_GLOBAL} if self.private else {"private_epochs": "no private blocks"}

    @override
    def own_params(self, got: Any, local: Tree) -> Tree:
        return private_blocks.personal(got.params, local)


def mean_loss(replies: Replies, fed: Federation) -> float:
    """Return the mean training loss of a cohort, weighted by rows in the registry; NaN if clients withhold the loss."""
    hidden = fed.privacy is not None and fed.privacy.withholds("loss")
    return float("nan") if hidden else replies.mean_number("loss", fed.clients.rows_of(replies))
