"""Algorithms: a frozen dataclass of hyper-parameters with both halves, the server's and the clients', in one text.

The server half is `init`, `round` and `evaluate`; the client half are its tasks. `Averaging` is the one template: the
server sends parameters, clients train, the server averages per block. A class here is abstract, one in `algorithms/`
is final; what two algorithms share is a function, not a parent.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from polyfed.evaluation import metrics
from polyfed.training import prototypes
from polyfed.core.request import Send
from polyfed.core.batch import Batch
from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.evaluation.scores import ClassMeans, Evaluation, Examination, Measured, OwnScore, Scores, own_score, scores
from polyfed.federation.federation import TEST, VALIDATION, Federation
from polyfed.training.losses import cross_entropy
from polyfed.core.messages import Message, carries, message
from polyfed.model import ModelSpec
from polyfed.federation.network import Timetable
from polyfed.privacy.gate import Site
from polyfed.training.optimisers import Moments, ServerOptimiser, Train
from polyfed.privacy.policy import Policy
from polyfed.federation.replies import Replies
from polyfed.core.schema import NOT_NEGATIVE, check_ranges
from polyfed.selection import Selector, Uniform
from polyfed.core.tasks import is_task, task
from polyfed.core.tree import Tree
from polyfed.training import Fit, View
from polyfed.training.client_data import Direction


@message
class Broadcast(Message):
    """The model, on its way to clients."""

    params: Tree = carries("parameters")


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
class Algorithm(ABC):
    """Hyper-parameters and both halves of a method.

    Attributes:
        train: local training, the [train] section.
        evaluation: the [evaluate] section.
    """

    train: Train = Train()
    evaluation: Evaluation = Evaluation()

    sees_missing_rows: ClassVar[bool] = True
    """Whether rows that lack a modality which others of the same client have are told apart; else they are refused."""
    sends_class_means: ClassVar[bool] = False
    """Whether clients can send class means of the global model's features, for one modality judged by `prototype`."""

    def __init_subclass__(cls) -> None:
        """Tell of a method that looks like a hook and is none: with `losses` a class is its parent by another name."""
        super().__init_subclass__()
        hooks = {name for base in cls.__mro__[1:] for name in vars(base) if callable(getattr(base, name))}
        for name, value in vars(cls).items():
            new = callable(value) and not name.startswith("_") and name not in hooks and not is_task(value)
            if new and (meant := get_close_matches(name, hooks, n=1, cutoff=0.8)):
                warnings.warn(
                    f"{cls.__name__}.{name} overrides nothing; was '{meant[0]}' meant? A leading _ says it was not",
                    PolyfedWarning,
                    stacklevel=2,
                )

    def __post_init__(self) -> None:
        """Refuse options outside the ranges that their types name; one that refuses more calls this one first."""
        check_ranges("[algorithm]", self)
        if self.evaluation.unimodal == "prototype" and not self.sends_class_means:
            raise RecipeError(
                "[evaluate] unimodal = 'prototype' needs clients that send class means of the global model's features, "
                f"which {type(self).__name__} does not have them do; only methods that average parameters do. Allowed "
                "here: 'auto', 'head', 'zero'"
            )

    @abstractmethod
    def init(self, fed: Federation, params: Tree) -> Any:
        """The server state before the first round: a frozen dataclass with `params` and `train_loss`.

        Args:
            fed: the federation; setup exchanges may be asked here (they are booked under round 0).
            params: the model's initial parameters, drawn from the run's seed.
        """

    @abstractmethod
    def round(self, state: Any, fed: Federation) -> Any:
        """The server state after one round."""

    def modelled(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The model to build, and the modalities it reads, given the [model] section and those of the data."""
        return spec, modalities

    def local(self, site: Site, key: int) -> Tree:
        """What a client keeps before it is first asked; it never leaves. `key` is of (run, client)."""
        return {}

    def observe(self, state: Any) -> dict[str, float]:
        """Numbers of the state worth logging every round."""
        return {}

    def simulated_seconds(self, state: Any, times: Timetable) -> float:
        """How long the round that led to `state` took: every ask waits for its slowest client."""
        return times.barriers()

    def observe_tables(self, state: Any) -> dict[str, list[list[float]]]:
        """Matrices of the state worth logging every round, by name: coefficients, similarities. Keep them small."""
        return {}

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Whether, with these hyper-parameters, a field of a task's reply can hold anything of this block.

        Narrows what `polyfed check` announces; the gate does not ask it.
        """
        return True

    def evaluate(self, state: Any, fed: Federation) -> Measured:
        """Judge the state on the server's test and validation rows, and clients on their own test rows."""
        measured = self.judge_globally(state, fed) if fed.examiners else {}
        if not (self.evaluation.personal and fed.clients.tested):
            return Measured(measured)
        group, accuracies = self.judge_personally(fed, Broadcast(state.params))
        return Measured(measured | {"personal": group}, accuracies)

    def judge_globally(self, state: Any, fed: Federation) -> dict[str, dict[str, float]]:
        """The groups `global`, `validation` and `unimodal` for the global model `state.params`."""
        measured: dict[str, dict[str, float]] = {}
        near = self.class_prototypes(state.params, fed) if TEST in fed.examiners else {}
        send = Examination(state.params, {m: p.mean for m, p in near.items()}, {m: p.active for m, p in near.items()})
        replies = fed.ask(self.score, fed.examiners, send)
        for examiner, group in ((TEST, "global"), (VALIDATION, "validation")):
            if examiner in replies:
                sums: Scores = replies[examiner]
                measured[group] = metrics.summary(sums.confusion, sums.top5_hits, sums.loss_sum)
        if TEST in replies:
            fed.emit("judged", round=fed.round, confusion=replies[TEST].confusion)
            measured["unimodal"] = {m: metrics.accuracy(c) for m, c in replies[TEST].unimodal.items()}
        return measured

    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        """Class means by modality, for the examiners; none unless one modality alone is judged by them."""
        return {}

    def judge_personally(self, fed: Federation, send: Send) -> tuple[dict[str, float], dict[int, float]]:
        """The group `personal`, and accuracy by client."""
        own = fed.ask(self.score_own, fed.clients.tested, send)
        hits, rows = own.numbers("hits"), own.numbers("num_rows")
        return metrics.personal(hits, rows), {c: hits[c] / rows[c] for c in rows if rows[c] > 0}

    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        """The model a client is judged with on its own test rows: the global one unless it keeps its own."""
        return got.params

    @task()
    def score(self, site: Site, data: View, local: Tree, got: Examination) -> tuple[Scores, Tree]:
        """Judge a model on an examiner's rows."""
        return scores(site.model, got, site.modalities, data, self.evaluation.unimodal), local

    @task()
    def score_own(self, site: Site, data: View, local: Tree, got: Broadcast) -> tuple[OwnScore, Tree]:
        """Judge the client's model on its own test rows."""
        return own_score(site.model, self.own_params(got, local), data.test), local


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

    def init(self, fed: Federation, params: Tree) -> Any:
        """Initial parameters, fresh server moments, the selector's first memory."""
        return State(params, self.server.moments(fed.site.model.trainable(params)), self.selector.start(params))

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

    def loss(self, site: Site, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """The local training loss, a scalar or (scalar, aux): here the cross-entropy of the fused logits."""
        return cross_entropy(site.model.logits(w, batch), batch)

    def direction(self, site: Site, data: View, got: Any, local: Tree) -> tuple[Direction, Tree] | None:
        """How a gradient becomes a direction, with the first carry; None leaves the gradient alone."""
        return None

    def reply(self, site: Site, data: View, fit: Fit, got: Any, local: Tree) -> tuple[Message, Tree]:
        """What goes back after training, and what stays."""
        return Update(fit.params, fit.loss, data.num_rows), local

    def merge(self, state: Any, replies: Replies, fed: Federation) -> Any:
        """The state after a round: the server optimiser on the mean per block."""
        mean = replies.mean("params", self.selector.weigh(state.memory, self.weights(replies, fed)))
        trainable = fed.site.model.trainable(state.params)
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
        model = fed.site.model
        head = set(model.head())
        encoders = {name: params[name] for name in model.names(model.modalities) if name not in head}
        told = fed.ask(self.class_means, list(fed.clients.eligible), Broadcast(encoders))
        merged = prototypes.gathered({}, [(reply.prototypes, reply.rows_per_class) for reply in told.values()])
        return {m: near for m, near in merged.items() if bool(near.active.any())}

    @task()
    def class_means(self, site: Site, data: View, local: Tree, got: Broadcast) -> tuple[ClassMeans, Tree]:
        """The class means of the client's training rows, asked before an evaluation by `prototype` and only then."""
        model = site.model
        sizes = {m: model.feature_size(m) for m in site.modalities if m in model.modalities}
        means, rows = prototypes.class_means(data.fold, partial(model.vectors, got.params), sizes, site.num_classes)
        return ClassMeans({m: p.sent for m, p in means.items()}, rows), local

    @task()
    def update(self, site: Site, data: View, local: Tree, got: Message) -> tuple[Message, Tree]:
        """Train the received model on the client's rows."""
        shape = self.direction(site, data, got, local)
        direction, carry = shape if shape is not None else (None, None)
        fit = data.minimise(
            lambda w, batch: self.loss(site, w, batch, got, local),
            got.params,  # type: ignore[attr-defined]
            train=self.train,
            direction=direction,
            carry=carry,
        )
        return self.reply(site, data, fit, got, local)


def mean_loss(replies: Replies, fed: Federation) -> float:
    """Training loss of a cohort, weighted by the rows that the server knows of."""
    losses, rows = replies.numbers("loss"), fed.clients.rows_of(replies)
    return sum(losses[c] * rows[c] for c in replies) / max(sum(rows.values()), 1)
