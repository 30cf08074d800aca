"""Algorithms: a frozen dataclass of hyper-parameters with both halves, the server's and the clients', in one text.

The server half is `init`, `round` and `evaluate`; the client half are its tasks. `Averaging` is the one template: the
server sends parameters, clients train, the server averages per block. A class here is abstract, one in `algorithms/`
is final; what two algorithms share is a function, not a parent.
"""

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.request import Send
from polyfed.core.schema import check_ranges
from polyfed.core.tasks import is_task, task
from polyfed.core.tree import Tree
from polyfed.evaluation import metrics
from polyfed.evaluation.scores import (
    Evaluation,
    Measured,
    ModelToEvaluate,
    OwnScore,
    Scores,
    TrainedModels,
    own_score,
    scores,
)
from polyfed.federation.client_registry import TEST, VALIDATION
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.network import Timetable
from polyfed.model import ModelSpec
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, prototypes
from polyfed.training.optimisers import Train


@message
class Broadcast(Message):
    """The model, on its way to clients."""

    params: Tree = carries("parameters")


@dataclass(frozen=True, kw_only=True)
class Algorithm(TrainedModels):
    """Hyper-parameters and both halves of a method.

    Attributes:
        train: local training, the [train] section.
        evaluation: the [evaluate] section.
    """

    train: Train = Train()
    evaluation: Evaluation = Evaluation()

    handles_missing_rows: ClassVar[bool] = True
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

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The model to build, and the modalities it reads, given the [model] section and those of the data."""
        return spec, modalities

    def local(self, context: ClientContext, key: int) -> Tree:
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

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Whether, with these hyper-parameters, clients can be asked for a task at all. Where it says no,
        `polyfed check` announces nothing and the gate lets nothing out. `tested`: some have test rows of their own.
        """
        if task == Algorithm.score_own.__name__:
            return tested and self.evaluation.personal
        return task != Algorithm.score.__name__  # asked of the server's own rows, whose replies cross no border

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Whether, with these hyper-parameters, a field of a task's reply can hold anything of this block. Where it
        says no, `polyfed check` announces nothing and the gate lets nothing out. `policy` is the client's.
        """
        return True

    def evaluate(self, state: Any, fed: Federation) -> Measured:
        """Judge the global model, where there is one, on the server's rows, and clients on their own test rows."""
        params = self.global_params(state) if fed.evaluation_clients else None
        measured = {} if params is None else self.evaluate_globally(params, fed)
        if not (self.evaluation.personal and fed.clients.tested):
            return Measured(measured)
        group, accuracies = self.evaluate_personally(fed, self.to_judge(state, fed, fed.clients.tested))
        return Measured(measured | {"personal": group}, accuracies)

    def to_judge(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        """The global model; nothing where clients judge what they keep."""
        return Broadcast({} if self.own_models == "clients" else state.params)

    def evaluate_globally(self, params: Tree, fed: Federation) -> dict[str, dict[str, float]]:
        """The groups `global`, `validation` and `unimodal` for a model, by the server's test and validation rows."""
        measured: dict[str, dict[str, float]] = {}
        near = self.class_prototypes(params, fed) if TEST in fed.evaluation_clients else {}
        send = ModelToEvaluate(params, {m: p.mean for m, p in near.items()}, {m: p.active for m, p in near.items()})
        replies = fed.ask(self.score, fed.evaluation_clients, send)
        for evaluation_client, group in ((TEST, "global"), (VALIDATION, "validation")):
            if evaluation_client in replies:
                sums: Scores = replies[evaluation_client]
                measured[group] = metrics.summary(sums.confusion, sums.top5_hits, sums.loss_sum)
        if TEST in replies:
            fed.emit("judged", round=fed.round, confusion=replies[TEST].confusion)
            measured["unimodal"] = {m: metrics.accuracy(c) for m, c in replies[TEST].unimodal.items()}
        return measured

    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, prototypes.Prototypes]:
        """Class means by modality, for the evaluation_clients; none unless one modality alone is judged by them."""
        return {}

    def evaluate_personally(self, fed: Federation, send: Send) -> tuple[dict[str, float], dict[int, float]]:
        """The group `personal`, and accuracy by client."""
        own = fed.ask(self.score_own, fed.clients.tested, send)
        hits, rows = own.numbers("hits"), own.numbers("num_rows")
        return metrics.personal(hits, rows), {c: hits[c] / rows[c] for c in rows if rows[c] > 0}

    @task()
    def score(self, context: ClientContext, data: ClientData, local: Tree, got: ModelToEvaluate) -> tuple[Scores, Tree]:
        """Judge a model on an examiner's rows."""
        return scores(context.model, got, context.modalities, data, self.evaluation.unimodal), local

    @task()
    def score_own(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[OwnScore, Tree]:
        """Judge the client's model on its own test rows."""
        return own_score(context.model, self.own_params(got, local), data.test, self.predictor), local
