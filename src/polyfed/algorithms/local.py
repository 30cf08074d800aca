"""Local: every client trains alone and nothing but statistics leaves while it does. The control for all other methods.

Local is FedAvg without the averaging (algorithms.md 5.10): same initial model, same batches, optimiser fresh every
round, so that equal numbers of local epochs compare. Two things are reported: how right each client's model is on the
client's own test rows, and on the server's, for which models are uploaded once they are trained.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.core.errors import PolyfedWarning
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation import metrics
from polyfed.evaluation.scores import Measured, ModelToEvaluate, Scores
from polyfed.federation.client_registry import TEST
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.privacy.policy import Policy
from polyfed.selection import Selector, Uniform, must_be_uniform
from polyfed.training import ClientData
from polyfed.training.losses import cross_entropy

AT_ONCE = 32
"""Models of clients that the server holds at the same time while it judges them."""


@message
class Start(Message):
    """Nothing: the signal to train."""


@message
class Done(Message):
    """Training loss and number of rows."""

    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Trained(Message):
    """A client's own model, to be judged on the server's test rows."""

    params: Tree = carries("parameters")


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """See the module.

    Attributes:
        selector: which clients train in a round, the [selection] section; only `uniform`.
        global_test: when every client uploads its model to be judged on the server's test rows, one pass over them for
            each: after the `last` round, at every evaluation (`always`), or `never`.
    """

    selector: Selector = Uniform()
    global_test: Literal["last", "always", "never"] = "last"

    def __post_init__(self) -> None:
        """Refuse selectors that judge clients by a global model: there is none, and they would never learn."""
        super().__post_init__()
        must_be_uniform(self.selector, "local")

    def init(self, fed: Federation, params: Tree) -> State:
        """The server keeps nothing but the selector's memory; `params` stay the initial model.

        A policy under which the server cannot judge the models is told, not refused: training needs no upload.
        """
        if (
            self.global_test != "never"
            and TEST in fed.evaluation_clients
            and not fed.context.policy.allows_models("server")
        ):
            warnings.warn(
                "local: under [egress] models may not reach the server, which therefore does not judge them: no "
                "metrics.global. Allow parameters for that, or set [algorithm] global_test = 'never'",
                PolyfedWarning,
                stacklevel=2,
            )
        return State(params, memory=self.selector.start(params))

    def local(self, context: ClientContext, key: int) -> Tree:
        """The client's own model, from the common start."""
        return dict(context.initial)

    def round(self, state: State, fed: Federation) -> State:
        """The cohort trains on."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        replies = fed.ask(self.practise, cohort, Start())
        return state.with_(memory=memory, train_loss=mean_loss(replies, fed)) if replies else state

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Uploads are for judging alone, and nothing is asked for that the policy forbids."""
        return task != "upload" or (self.global_test != "never" and policy.allows("parameters", block, "server"))

    def evaluate(self, state: State, fed: Federation) -> Measured:
        """Every client's own model on its own test rows, and on the server's (algorithms.md 5.10)."""
        now = self.global_test == "always" or (self.global_test == "last" and fed.round == fed.rounds)
        possible = TEST in fed.evaluation_clients and fed.context.policy.allows_models("server")
        measured = self._judged_by_server(fed) if now and possible else {}
        own = super().evaluate(state, fed)
        return Measured(measured | own.metrics, own.personal)

    def _judged_by_server(self, fed: Federation) -> dict[str, dict[str, float]]:
        """The mean over clients of every number, and the accuracy's mean by rows, least and spread.

        A client that does not answer is left out.
        """
        scores: dict[int, dict[str, float]] = {}
        everyone = list(fed.clients.eligible)
        for first in range(0, len(everyone), AT_ONCE):
            uploads = fed.ask(self.upload, everyone[first : first + AT_ONCE], Start(), quorum=False)
            for client, upload in uploads.items():
                sums: Scores = fed.ask(self.score, [TEST], ModelToEvaluate(upload.params, {}, {}))[TEST]
                fed.emit("judged", round=fed.round, confusion=sums.confusion)
                scores[client] = metrics.summary(sums.confusion, sums.top5_hits, sums.loss_sum)
        return over_clients(scores, fed.clients.rows_of(scores))

    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        """A client is judged with its own model."""
        return local

    @task()
    def practise(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Done, Tree]:
        """Train the client's own model."""

        def loss(w: Tree, batch: Any) -> Tensor:
            return cross_entropy(context.model.logits(w, batch), batch)

        fit = data.minimise(loss, local, train=self.train)
        return Done(fit.loss, data.num_rows), fit.params

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Trained, Tree]:
        """Hand the own model over."""
        return Trained(local), local


def over_clients(scores: Mapping[int, dict[str, float]], rows: Mapping[int, float]) -> dict[str, dict[str, float]]:
    """The groups `global`, each number's unweighted mean over clients, and `global_by_client`, of the accuracy.

    Args:
        scores: by client, as `metrics.summary` gives them.
        rows: training rows by client, the weights of `weighted`.
    """
    if not scores:
        return {}
    mean = metrics.mean_groups([{"global": one} for one in scores.values()])
    hits = {client: one["accuracy"] * rows[client] for client, one in scores.items()}
    return mean | {"global_by_client": metrics.personal(hits, rows)}
