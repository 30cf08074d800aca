"""`Algorithm`: the base class of every method. A method is a frozen dataclass; its fields are its hyper-parameters.

One part of a method's code runs on the server: `init`, `round` and `evaluate`. The other part runs on the clients: the
functions marked `@task`. A method that sends parameters, trains them locally and averages the results extends
`Averaging` (`averaging.py`), which has more hooks. Every other method extends `Algorithm`. No method extends another
method. If two methods share code, this code is a plain function that both of them call.

The table lists the hooks in the order in which they are called. All hooks except `init` and `round` have a default:

| hook | called on | when | returns |
|---|---|---|---|
| `model_spec` | server | before the model is built | the model to build, and the modalities that it reads |
| `check_model` | server | after the model is built | nothing; refuses a model that the method cannot train |
| `will_ask`, `will_send`, `private_names` | both | in `polyfed check`, and in the egress gate | what can leave |
| `init` | server | once, as round 0 | the first state |
| `local` | client | before the client's first task | its first local state |
| `round` | server | every round; it asks clients with `fed.ask` | the next state |
| `simulated_seconds` | server | after every round, if there is a network model | how long the round would take |
| `pending` | server | after every round | the clients that still work, each with its round |
| `observe`, `observe_tables` | server | after every round | numbers and matrices for the log |
| `idle_options` | server | before the first round | the options that change nothing, each with what makes it idle |
| `concerns` | server | once, after a third of the rounds | warnings about options that have had no effect so far |
| `evaluate` | server | after every round that `[evaluate] every` names | scores; it calls the hooks below |
| `global_params` | server | around every round, in `evaluate`, and in `Run.predict` | the global model, or None |
| `calibrate` | server | once, after the last round | the counts for `Run.predict_set` |
| `class_prototypes` | server | in `evaluate` | class means, for `[evaluate] unimodal = "prototype"` |
| `evaluation_message` | server | in `evaluate`, and in `Run.predict` | what clients receive for personal evaluation |
| `own_params` | client | in personal evaluation, and in `Run.predict` | the model with which the client is evaluated |

The properties `own_models` and `predictor` say where personal models are kept and how they predict. The task `score`
evaluates the global model on the evaluation clients. The tasks `score_own` and `score_subsets` evaluate a client's
model on the client's own test rows. The class variables `protects` and `spare` are about [privacy]. docs/own-method.md
explains how to write a method.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, runtime_checkable

import torch
from typing_extensions import TypeVar

from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.core.messages import Message, carries, cut, message
from polyfed.core.option_checks import check_ranges
from polyfed.core.problems import Conflict
from polyfed.core.request import HeldOut, Send
from polyfed.core.tasks import is_task, parts, task
from polyfed.core.tree import Tree
from polyfed.evaluation import client_statistics
from polyfed.evaluation.conformal import (
    Conformal,
    ScoreCounts,
    counts_shape,
    own_counts,
    own_size_counts,
    possible_counts,
    sizes_shape,
)
from polyfed.evaluation.scores import (
    Evaluation,
    Measured,
    ModelToEvaluate,
    OfClients,
    OwnScore,
    Predictor,
    Scores,
    own_score,
    possible,
    scores,
)
from polyfed.evaluation.shrinkage import SizeCounts
from polyfed.evaluation.subsets import (
    Interval,
    SubsetScores,
    global_metrics,
    moments_of,
    own_intervals,
    own_subset_scores,
    personal_metrics,
    possible_subsets,
)
from polyfed.federation.client_registry import TEST, VALIDATION
from polyfed.federation.clock import Timetable
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.model import Model, ModelSpec
from polyfed.model.whole_module import require_embeddings
from polyfed.objective import Classification, Objective
from polyfed.objective.base import UNDEFINED
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData, prototypes
from polyfed.training.optimisers import Train

SCORING = ("score_own", "score_subsets", "count_scores", "count_sizes")
"""The tasks in which clients score a model on rows of their own."""

ALTERS: Mapping[str, tuple[str, ...]] = {
    "client": ("round", "merge", "weights"),
    "example": ("loss", "direction", "update", "reply"),
}
"""For each unit of [privacy], the hooks on which a method's declaration `protects` rests. A class that overrides one of
them has to define `protects` again."""

UPDATES: Mapping[str, tuple[str, ...]] = {"client": ("update.params",), "example": ("update.params",)}
"""The declaration of a method that extends `Averaging` and whose loss of a row depends on no other row."""

OTHERWISE: Mapping[str, str] = {
    "client": "its server does not only average the updates of the clients",
    "example": "its clients may use several rows of a batch together",
}
"""For each unit of [privacy], what polyfed must assume about a method that does not declare the unit."""

NO_GLOBAL = "a method without a global model, which alone is scored by modality"
"""What makes the option `[evaluate] unimodal` idle in methods with one model for each client."""


@message
class Broadcast(Message):
    """The model that the server sends to clients."""

    params: Tree = carries("parameters")


@runtime_checkable
class ServerState(Protocol):
    """What the server keeps between rounds: the fields that the state of every method has."""

    @property
    def params(self) -> Tree:
        """The global model, or the common initial model of a method without one. Replies must match its tensors."""

    @property
    def train_loss(self) -> float:
        """The mean training loss of the last round; NaN before the first round."""


S = TypeVar("S", bound=ServerState, default=Any)
"""The state of a method."""


IMAGES: Mapping[str, Any] = {"shapes": {"a": [1, 8, 8], "b": [3, 8, 8]}}
"""An entry of `Algorithm.needs` for methods that need an encoder with norms or convolutions."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[S]):
    """The base class of every method. Its fields are the hyper-parameters, its methods the server and client halves.

    The module's docstring lists the hooks in the order in which they are called.

    Attributes:
        train: options of local training, from the [train] section.
        evaluation: when and how to evaluate, as set in the [evaluate] section.
        secure_aggregation: options of secure aggregation, from the [secure_aggregation] section; None if it is not
            used.
    """

    secure_aggregation: SecureAggregation | None = None
    train: Train = Train()
    evaluation: Evaluation = Evaluation()

    handles_missing_rows: ClassVar[bool] = True
    """Whether the method accepts clients that have a modality for only some of their rows. If not, it refuses them."""
    silo_parts: ClassVar[tuple[str, ...]] = ()
    """The parts (`federation/silos/parts.py`) that the edge of a silo may run. Without any, the method has no edges."""
    aligns_rows: ClassVar[bool] = False
    """Whether clients match their rows by sample ids. If so, a device whose data has no ids is refused."""
    captions: ClassVar[Mapping[str, str]] = {}
    """For each name that `observe` logs, or for its part before the first dot, a sentence for the chart. Names with a
    common first part share a chart."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options. With `preset = "paper"`, a recipe uses this set for every option that it does not give."""
    evaluates: ClassVar[type[Message]] = Broadcast
    """The class of `evaluation_message`, which every task of `SCORING` receives."""
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What a recipe must say beyond its [algorithm] and [egress], by section, for data with the modalities `a` and `b`:
    `polyfed algorithms NAME --recipe` prints it."""
    only_evaluates: ClassVar[tuple[str, ...]] = ()
    """Tasks whose replies only serve evaluation. A simulated attacker answers them truthfully."""
    sends_class_means: ClassVar[bool] = False
    """Whether clients can send class means of the global model's features, for `[evaluate] unimodal = "prototype"`."""
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    """The kinds of objective that the method can train: classes of `polyfed.objective`; `Objective` means every kind. A
    method can train every kind if it computes its loss with `context.loss` or `context.objective.loss`."""
    objectives_because: ClassVar[str] = "its loss reads class numbers"
    """Why the method trains no other kind of objective; this text completes the message "cannot train ..., because"."""
    trains_one_model: ClassVar[bool] = True
    """Whether all clients train one global model. Without one, only the selector `uniform` can choose clients."""
    averages_models: ClassVar[bool] = True
    """Whether the server averages models, if the method has the section [server]."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """The options of other sections that the method cannot use; those of its base classes count too."""
    uncompressed: ClassVar[str] = ""
    """Why [wire] cannot compress the method's messages; this text completes "cannot go with ..., because"."""
    reads_rates: ClassVar[bool] = False
    """Whether the rates of the clients (`fed.rates`) decide anything. If not, `[network] channel = "measured"` is
    refused."""
    needs_embeddings: ClassVar[bool] = False
    """Whether the method needs an embedding of each modality. A whole module may not have such embeddings."""
    mixing: ClassVar[str] = "the method can use them together"
    """Why the method mixes modalities whatever the model is, and the option that avoids it. Empty if the training of a
    modality's block reads other modalities only through the error at the model's outputs. The text counts only for the
    class that contains it: a subclass can train in another way. See `privacy/egress/mixing.py`."""
    model_for: ClassVar[str] = "client"
    """The owner of a personal model: a `client`, or a `silo` whose clients share a model."""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each unit of [privacy] that the method can honour, the fields `task.field` of its replies that the mechanism
    protects. With `client`, such a field holds trained parameters, and the server uses it only in the mean of
    `Averaging.merge`. With `example`, such a field is computed only from results of `ClientData.minimise`, and the loss
    of a row depends on no other row."""
    reads_replies: ClassVar[tuple[str, ...]] = ()
    """Server methods of the class besides those in `ALTERS` that read or make single replies. A subclass that overrides
    one of them has to declare `protects` again, because it could use the protected fields outside of the mean."""
    spare: ClassVar[tuple[str, ...]] = ()
    """Fields `task.field` of replies that the server only logs. Under [privacy], clients fill them with zeros."""
    private_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which the method can honour [privacy], if it cannot with its default options."""

    def __init_subclass__(cls) -> None:
        """Warn if a subclass seems to misspell a hook. For example, `losses` does not override the hook `loss`."""
        super().__init_subclass__()
        hooks = {name for base in cls.__mro__[1:] for name in vars(base) if callable(getattr(base, name))}
        for name, value in vars(cls).items():
            new = callable(value) and not name.startswith("_") and name not in hooks and not is_task(value)
            if new and (meant := get_close_matches(name, hooks, n=1, cutoff=0.8)):
                text = f"{cls.__name__}.{name} overrides nothing; was '{meant[0]}' meant? A leading _ says it was not"
                warnings.warn(text, PolyfedWarning, stacklevel=2)

    def __post_init__(self) -> None:
        """Check that every option lies in the range of its type. A subclass with more checks calls this method first.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[algorithm]", self)

    # rounds

    @abstractmethod
    def init(self, fed: Federation, params: Tree) -> S:
        """Return the server state before the first round: a frozen dataclass with the fields of `ServerState`.

        Args:
            fed: the federation. The method may already send requests; the ledger lists them as round 0.
            params: the model's initial parameters, drawn from the run's seed.
        """

    @abstractmethod
    def round(self, state: S, fed: Federation) -> S:
        """Run one round and return the next server state.

        Args:
            state: the state after the previous round.
            fed: the federation; `fed.ask(task, clients, message)` sends a request, and `fed.round` is the round.
        """

    # the model

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """Return the model to build and the modalities that it reads.

        Args:
            spec: the [model] section of the recipe.
            modalities: the modalities of the data.
            policy: what may leave the clients.
        """
        return spec, modalities

    def faults(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy, objective: Objective
    ) -> Iterator[RecipeError]:
        """Yield everything that a recipe gets wrong for this method, before the model is built.

        They are shown together with all other faults. By default, the fault of `model_spec`.

        Args:
            spec: the section [model].
            modalities: the modalities of the data.
            policy: the policy of the recipe.
            objective: the task.
        """
        try:
            self.model_spec(spec, modalities, policy)
        except RecipeError as error:
            yield error

    def check_model(self, model: Model) -> None:
        """Raise a RecipeError for a model that the method cannot train, such as one without embeddings."""
        if self.needs_embeddings:
            require_embeddings(model, type(self).__name__)

    def received_template(self, task: str, model: Model) -> Tree:
        """Return the names, shapes and types of the parameters that a task receives. By default, those of the model."""
        return model.template

    def private_names(self, model: Model) -> frozenset[str]:
        """Return the names of tensors that clients keep. The egress gate refuses a reply that has one of them."""
        return frozenset()

    # the local state of a client

    def first_local(self, context: ClientContext, key: int) -> Tree:
        """Return a client's first local state: the result of `local`. `Averaging` adds private parameters to it."""
        return self.local(context, key)

    def local(self, context: ClientContext, key: int) -> Tree:
        """Return a client's local state before its first task. It never leaves the client.

        Args:
            key: random key of the client in this run, for random initial values.
        """
        return {}

    # the log

    def observe(self, state: S) -> dict[str, float]:
        """Return numbers about the state to log after every round, by name; `captions` explains the names."""
        return {}

    def simulated_seconds(self, state: S, times: Timetable) -> float:
        """Return the simulated duration of the round in seconds. By default, each request waits for its slowest client.

        Args:
            state: the state after the round.
            times: the time at which each client would answer each request under the network model.
        """
        return times.barriers()

    def pending(self, state: S) -> Mapping[int, int]:
        """Return the clients that still work when the round ends, each with the round in which it was asked.

        A resumed run may ask them again, so devices keep what they need for an answer. By default, there are none.
        """
        return {}

    def settled(self, state: S, round: int) -> int:
        """Return the newest round that a run never repeats if it goes on after `round`, from `pending`."""
        return min([round, *(asked - 1 for asked in self.pending(state).values())])

    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        """Return warnings for the user: sentences about parts of the method that have had no effect so far.

        Args:
            logged: what `observe` returned, round by round. The hook runs once, after the first third of the rounds.
        """
        return []

    def idle_options(self, fed: Federation) -> dict[str, str]:
        """Return the options that change nothing in this run, each with what makes it idle.

        Before the first round, the run warns of each of them that differs from its default.

        Args:
            fed: the federation, with the number of rounds, the clients and the model.

        Returns:
            The name of an option of the method, or `section.option`, such as `train.batch_size`, or `section.*` for
            all options of a section. The value completes the sentence "... has no effect beside". An empty value says
            that the method uses an option that would otherwise count as idle.
        """
        return {}

    def observe_tables(self, state: S) -> dict[str, list[list[float]]]:
        """Return small matrices to log after every round, by name, such as coefficients or similarities."""
        return {}

    def told(self, state: Any, fed: Federation) -> dict[str, Any]:
        """Return entries that the method adds to result.json, by name.

        Args:
            state: the state after the last round.
            fed: the federation. This hook sends no requests.
        """
        return {}

    # what may leave a client

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Return whether the server may send a task to clients, given these hyper-parameters.

        If the result is False, `polyfed check` does not list the task's reply, and the egress gate refuses the reply.

        Args:
            task: the task's name.
            tested: whether some clients have their own test rows, or their own validation rows if they are scored.
        """
        if task == Algorithm.score_own.__name__:
            return tested and (self.evaluation.personal or self.evaluation.own_validation)
        if task == Algorithm.score_subsets.__name__:
            return tested and self.evaluation.personal and self.evaluation.subsets != "none"
        if task == Algorithm.count_scores.__name__:
            return tested and self.evaluation.conformal != "none"
        if task == Algorithm.count_sizes.__name__:
            return tested and self.evaluation.conformal != "none" and self.evaluation.shrinkage
        return task != Algorithm.score.__name__  # only evaluation clients are asked, and their replies leave nobody

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Return whether a field of a task's reply can contain data of a block, given these hyper-parameters.

        If the result is False, `polyfed check` does not list this part of the reply, and the egress gate refuses it.

        Args:
            task: the task's name.
            field: a field of the reply's message.
            block: a modality or `shared`.
            policy: the client's policy.
        """
        return True

    @property
    def single_replies(self) -> str:
        """Return why the server needs the replies of single clients, or an empty text if sums are enough.

        By default, this is the `single_replies` of the method's selector or server optimiser. A method needs its own
        version of this hook only if it has sum-only messages (`carries(sum_only=True)`) and reads single replies for
        another reason.
        """
        reasons = (getattr(part, "single_replies", "") for _, part in parts(self) if part is not self)
        return next(filter(None, reasons), "")

    def weight_of(self, field: str, kind: type[Message]) -> str | None:
        """Return the name of the field that holds a client's weight for `field`, or None if `field` is not weighted.

        Before the sum, every client multiplies `field` by its weight.

        Args:
            field: a field of a sum-only message.
            kind: the class of the message.
        """
        return kind.declared[field].weight

    @classmethod
    def honours(cls, unit: str) -> tuple[str, ...]:
        """Return the reply fields that the mechanism protects, each written as `task.field`.

        The result is empty if the method cannot be used with this `unit` of [privacy].
        """
        fields: Mapping[str, tuple[str, ...]] = vars(cls._declaring())["protects"]
        return () if cls._altered(unit) else fields.get(unit, ())

    @classmethod
    def dishonour(cls, unit: str) -> str:
        """Return why the method cannot be used with this unit of [privacy].

        For example, the text is "its clients may use several rows of a batch together".
        """
        if unit in vars(cls._declaring())["protects"]:
            return f"{OTHERWISE[unit]} ({cls.__name__} overrides {cls._altered(unit)[0]})"
        return OTHERWISE[unit]

    @classmethod
    def _declaring(cls) -> type["Algorithm"]:
        """Return the class that defines `protects`: this class, or the nearest base class with a definition."""
        return next(base for base in cls.__mro__ if "protects" in vars(base))

    @classmethod
    def _altered(cls, unit: str) -> list[str]:
        """List the overridden hooks that make `protects` invalid.

        With `protects`, a class declares which reply fields the mechanism protects. The declaration relies on
        certain hooks of this class, which `ALTERS` and `reads_replies` list. If a subclass overrides one of them, the
        declaration is no longer valid, and the subclass has to define `protects` again.
        """
        declaring = cls._declaring()
        below = cls.__mro__[: cls.__mro__.index(declaring)]
        hooks = (*ALTERS[unit], *(declaring.reads_replies if unit == "client" else ()))
        return [hook for base in below for hook in hooks if hook in vars(base)]

    @property
    def needs_own_validation(self) -> bool:
        """Whether clients choose something by their own validation rows. A recipe without any is then refused."""
        return False

    # which models the method trains, for `evaluate` and `Run.predict`

    @property
    def own_models(self) -> Literal["none", "server", "clients"]:
        """Where personal models are stored: nowhere, in the server's state, or in the clients' local states.

        The default is `clients` for an algorithm that overrides `own_params`, else `none`.
        """
        return "none" if type(self).own_params is Algorithm.own_params else "clients"

    @property
    def predictor(self) -> Predictor:
        """The predictor for personal models."""
        return Predictor()

    def global_params(self, state: S) -> Tree | None:
        """Return the global model for evaluation on the server's rows, or None if the algorithm has no global model."""
        return state.params if self.own_models == "none" else None

    def evaluation_message(self, state: S, fed: Federation, clients: Sequence[int]) -> Send:
        """Return the message for personal evaluation: the global model, or an empty Tree if clients have own models.

        Args:
            fed: the federation; this hook sends no requests.
            clients: the clients that will be evaluated.
        """
        return Broadcast({} if self.own_models == "clients" else state.params)

    def own_params(self, got: Any, local: Tree) -> Tree:
        """Return the model for a client's personal evaluation. By default, this is the model in the message `got`.

        Args:
            got: the message from `evaluation_message`.
        """
        params: Tree = got.params
        return params

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """Return the modalities that a client's model reads. By default, these are the client's modalities."""
        return fed.clients.owned(client)

    def client_model(self, client: int, state: S, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        """Return the model for a client's personal evaluation, computed from the client's local state.

        This works only in a simulation, where all local states are available.

        Args:
            client: the client's number.
            fed: the federation. This hook sends no requests.
            local: returns the local state of a client, given its number.
        """
        send = self.evaluation_message(state, fed, [client])
        got = cut(send if isinstance(send, Message) else send[client], fed.clients[client].blocks)
        return self.own_params(got, local(client))

    def may_lack(self, task: str) -> bool:
        """Return whether a task may receive parameters without blocks that the client has.

        A field with `carries(optional=True)` may lack blocks in every task. A device refuses any other message that
        lacks one. By default, only the evaluation of models that clients have may receive no model.
        """
        return task in SCORING and self.own_models == "clients"

    # evaluation

    @property
    def evaluates_more_at_end(self) -> bool:
        """Whether `evaluate` does more after the last round, so that it runs again if [stop] ends the run."""
        return False

    def evaluate(self, state: S, fed: Federation) -> Measured:
        """Evaluate the global model, if any, on the server's rows, and each client's model on its own test rows."""
        params = self.global_params(state) if fed.evaluation_clients else None
        result = Measured({}) if params is None else self.evaluate_globally(params, fed)
        own: dict[str, dict[str, float]] = {}
        intervals = dict(result.intervals)
        accuracies: dict[int, float] = {}
        if self.evaluation.personal and fed.clients.tested:
            send = self.evaluation_message(state, fed, self.evaluation.asked(fed))
            own["personal"], accuracies, known = self.evaluate_personally(fed, send)
            subsets, of_subsets = self.evaluate_subsets(fed, send)
            own["personal"] |= subsets
            intervals["personal"] = known | of_subsets
        if self.evaluation.own_validation and fed.clients.validated:
            send = self.evaluation_message(state, fed, self.evaluation.asked(fed, "validation"))
            own["personal_validation"] = self.evaluate_personally(fed, send, "validation").group
        return replace(result, metrics=result.metrics | own, personal=accuracies, intervals=intervals)

    def evaluate_globally(self, params: Tree, fed: Federation) -> Measured:
        """Evaluate a model on the server's rows: the groups `global`, `validation` and `unimodal` of result.json."""
        measured: dict[str, dict[str, float]] = {}
        intervals: dict[str, dict[str, Interval]] = {}
        near = self.class_prototypes(params, fed) if TEST in fed.evaluation_clients else {}
        send = ModelToEvaluate(params, {m: p.mean for m, p in near.items()}, {m: p.active for m, p in near.items()})
        replies = fed.ask(self.score, fed.evaluation_clients, send)
        for evaluation_client, group in ((TEST, "global"), (VALIDATION, "validation")):
            if evaluation_client in replies:
                measured[group], intervals[group] = self.measured(replies[evaluation_client], fed)
        if TEST not in replies:
            return Measured(measured, intervals=intervals)
        objective = fed.context.objective
        alone = {m: objective.measured(sums) for m, sums in replies[TEST].unimodal.items()}
        if not objective.BY_MODALITY:
            measured["unimodal"] = {m: one[objective.SCORE] for m, one in alone.items() if objective.SCORE in one}
        confusion = objective.confusion(replies[TEST].sums)
        moments = moments_of(replies[TEST].parts, replies[TEST].clusters)
        return Measured(measured, confusion=confusion, intervals=intervals, moments=moments)

    def measured(self, scores: Scores, fed: Federation) -> tuple[dict[str, float], dict[str, Interval]]:
        """Compute the metrics from the scores of an evaluation client, and their rows and intervals."""
        objective = fed.context.objective
        exact = zip(objective.exact, scores.exact.tolist(), strict=True)
        result = objective.measured(scores.sums) | {name: value for name, value in exact if value != UNDEFINED}
        model = fed.context.model
        parts, known = global_metrics(self.evaluation.subsets, model, objective, scores.parts, scores.clusters)
        return result | parts, known

    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        """Return class means by modality for `[evaluate] unimodal = "prototype"`, else an empty dictionary."""
        return {}

    def evaluate_personally(self, fed: Federation, send: Send, held_out: HeldOut = "test") -> OfClients:
        """Evaluate clients' models on their own rows."""
        asked = self.evaluation.asked(fed, held_out)
        replies = fed.ask(self.score_own, asked, send, accept=possible(fed), held_out=held_out)
        return self.over_clients(replies, fed)

    def evaluate_subsets(self, fed: Federation, send: Send) -> tuple[dict[str, float], dict[str, Interval]]:
        """Evaluate clients' models on their own test rows, from the subsets that `[evaluate] subsets` names."""
        which = self.evaluation.subsets
        if which == "none":
            return {}, {}
        replies = fed.ask(self.score_subsets, self.evaluation.asked(fed), send, accept=possible_subsets(fed))
        return personal_metrics(which, replies, fed)

    def calibrate(self, state: Any, fed: Federation) -> Conformal | None:
        """Have clients count the scores of their validation rows, for `predict_set`, if `[evaluate] conformal` is set.

        This happens once, after the last round, with the models that clients then have.
        """
        kind, clients = self.evaluation.conformal, fed.clients.validated
        if kind == "none" or not clients:
            return None
        send = self.evaluation_message(state, fed, clients)
        model, by = fed.context.model, self.evaluation.conformal_groups
        accept = possible_counts(counts_shape(kind, model, fed.context.objective))
        replies, sizes = fed.ask(self.count_scores, clients, send, accept=accept, held_out="validation"), None
        if self.evaluation.shrinkage:
            accept = possible_counts(sizes_shape(model))
            sizes = fed.ask(self.count_sizes, clients, send, accept=accept, held_out="validation")
        reads = partial(self.client_modalities, fed=fed)
        return Conformal.of(kind, by, replies, model.modalities, reads, sizes)

    def over_clients(self, replies: Replies, fed: Federation) -> OfClients:
        """Return statistics of the clients' scores, the metrics of all their rows, and the score of each client.

        Args:
            replies: `OwnScore` of each client.
        """
        objective = fed.context.objective
        if isinstance(replies, SummedReplies):
            sums, total = replies.total("sums"), float(replies.total("num_rows"))  # of no single client
            pooled = {f"pooled_{name}": value for name, value in objective.pooled(sums).items()}
            return OfClients(pooled or {"weighted": objective.own_score(sums, total) or 0.0}, {}, {})
        rows = replies.numbers("num_rows")
        sums = {client: reply.sums for client, reply in replies.items()}
        each = {client: objective.own_score(sums[client], rows[client]) for client in sums}
        scores = {client: score for client, score in each.items() if score is not None}
        counted = fed.capped(rows)
        group = client_statistics.personal(scores, counted, rising=objective.RISING)
        if scores:
            shares = [counted[client] / rows[client] if counted[client] < rows[client] else 1.0 for client in sums]
            parts = [own * share for own, share in zip(sums.values(), shares, strict=True)]
            together = objective.pooled(torch.stack(parts).sum(0))
            group |= {f"pooled_{name}": value for name, value in together.items()}
        return OfClients(group, scores, own_intervals(objective, scores, counted))

    @task()
    def score(self, context: ClientContext, data: ClientData, local: Tree, got: ModelToEvaluate) -> tuple[Scores, Tree]:
        """Compute the scores of a model on the rows of an evaluation client."""
        return scores(context, got, data, self.evaluation.unimodal, self.evaluation.subsets), local

    @task(sends="evaluates")
    def score_own(self, context: ClientContext, data: ClientData, local: Tree, got: Message) -> tuple[OwnScore, Tree]:
        """Compute what the client reports about its own test rows, such as the number of correct predictions."""
        return own_score(context, self.own_params(got, local), data.test, self.predictor), local

    @task(sends="evaluates")
    def score_subsets(
        self, context: ClientContext, data: ClientData, local: Tree, got: Message
    ) -> tuple[SubsetScores, Tree]:
        """Compute what the client reports about its own test rows, predicted from subsets of the modalities."""
        w, which = self.own_params(got, local), self.evaluation.subsets
        return own_subset_scores(context, w, data.test, self.predictor.logits, which), local

    @task(sends="evaluates")
    def count_scores(
        self, context: ClientContext, data: ClientData, local: Tree, got: Message
    ) -> tuple[ScoreCounts, Tree]:
        """Count how well the client's model predicts its own validation rows, for conformal prediction."""
        w, kind = self.own_params(got, local), self.evaluation.conformal
        return own_counts(context, w, data.test, self.predictor.logits, kind), local

    @task(sends="evaluates")
    def count_sizes(
        self, context: ClientContext, data: ClientData, local: Tree, got: Message
    ) -> tuple[SizeCounts, Tree]:
        """Count how the sets of the client's own validation rows shrink with a further modality."""
        return own_size_counts(context, self.own_params(got, local), data.test, self.predictor.logits), local
