"""Local: every client trains its own model alone. This is the baseline without any exchange.

The method has no paper. Local is FedAvg without the averaging. It uses the same initial model and the same batches, and
starts a fresh optimiser in every round. Runs with equal numbers of local epochs are therefore comparable. Each client's
model is evaluated on the client's own test rows, and on the server's test rows if clients upload their models
(`global_test`).

In every round, the clients send only training loss and number of rows. They send models only for the server evaluation.
Page: docs/algorithms/local.md.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.base import NO_GLOBAL, Algorithm, Broadcast
from polyfed.core.errors import PolyfedWarning
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, NotSearched
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation import client_statistics
from polyfed.evaluation.scores import Measured, ModelToEvaluate, Scores, joined, rows_alone, total
from polyfed.evaluation.subsets import Interval
from polyfed.federation.client_registry import TEST
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.objective import Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData

MODELS_AT_ONCE = 32
"""The number of clients' models that the server holds at the same time while it evaluates them."""


@message
class Start(Message):
    """Tells a client to start. Has no fields."""


@message
class Done(Message):
    """Training loss and number of rows."""

    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Trained(Message):
    """A client's own model, for evaluation on the server's test rows."""

    params: Tree = carries("parameters")


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm[State]):
    """Clients train alone.

    Attributes:
        selector: the rule from the [selection] section that chooses which clients train in a round. Only `uniform` is
            allowed.
        global_test: when clients upload their models, for a test on the server's rows: after the `last` round, `always`
            (at every evaluation) or `never`.
    """

    mixing: ClassVar[str] = ""
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)
    only_evaluates: ClassVar[tuple[str, ...]] = ("upload",)
    trains_one_model: ClassVar[bool] = False

    selector: Selector = Uniform()
    global_test: Annotated[Literal["last", "always", "never"], NotSearched("says what is measured")] = "last"

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        down = ("network.power_down_w", "network.rate_down_bps")
        result = dict.fromkeys(down, "a method whose server sends no tensors in a round")
        return result | {"evaluate.unimodal": NO_GLOBAL}

    @override
    def init(self, fed: Federation, params: Tree) -> State:
        """Return the first state: the selector's memory and the initial model. The field `params` never changes.

        The clients train alone. Unless `global_test` is `never`, they upload their models so that the server can
        evaluate these models on its own test rows. If the policy forbids these uploads, this function warns.
        """
        if (
            self.global_test != "never"
            and TEST in fed.evaluation_clients
            and not fed.context.policy.allows_models("server")
        ):
            warnings.warn(
                "under [egress] models may not reach the server, so it cannot evaluate them and there will be no "
                "metrics.global. Allow parameters to the server, or set [algorithm] global_test = 'never'",
                PolyfedWarning,
                stacklevel=2,
            )
        return State(params, memory=self.selector.start(params))

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return dict(context.initial)

    @override
    def round(self, state: State, fed: Federation) -> State:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        replies = fed.ask(self.train_own, cohort, Start())
        return state.with_(memory=memory, train_loss=mean_loss(replies, fed)) if replies else state

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        return task != "upload" or (self.global_test != "never" and policy.allows("parameters", block, "server"))

    @property
    @override
    def evaluates_more_at_end(self) -> bool:
        return self.global_test == "last"

    @override
    def evaluate(self, state: State, fed: Federation) -> Measured:
        now = self.global_test == "always" or (self.global_test == "last" and fed.round == fed.rounds)
        possible = TEST in fed.evaluation_clients and fed.context.policy.allows_models("server")
        result = self._evaluate_on_server(fed) if now and possible else Measured({})
        own = super().evaluate(state, fed)
        return joined(result, own)

    def _evaluate_on_server(self, fed: Federation) -> Measured:
        """Evaluate, on the server's test rows, the model of every client that answers; see `over_clients`."""
        scores: dict[int, dict[str, float]] = {}
        matrices: list[Tensor | None] = []
        known: list[Mapping[str, Interval]] = []
        everyone = list(fed.clients.eligible)
        for first in range(0, len(everyone), MODELS_AT_ONCE):
            uploads = fed.ask(self.upload, everyone[first : first + MODELS_AT_ONCE], Start(), quorum=False)
            for client, upload in uploads.items():
                sums: Scores = fed.ask(self.score, [TEST], ModelToEvaluate(upload.params, {}, {}))[TEST]
                scores[client], intervals = self.measured(sums, fed)
                known.append(intervals)
                matrices.append(fed.context.objective.confusion(sums.sums))
        groups = over_clients(scores, fed.clients.rows_of(scores), fed.context.objective)
        return Measured(groups, confusion=total(matrices), intervals={"global": rows_alone(known)} if known else {})

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return local

    @task()
    def train_own(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Done, Tree]:
        """Train the client's own model on its rows."""

        def loss(w: Tree, batch: Any) -> Tensor:
            return context.loss(w, batch)

        fit = data.minimise(loss, local, train=self.train)
        return Done(fit.loss, data.num_rows), fit.params

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Trained, Tree]:
        """Send the client's own model."""
        return Trained(local), local


def over_clients(
    scores: Mapping[int, dict[str, float]], rows: Mapping[int, float], objective: Objective
) -> dict[str, dict[str, float]]:
    """Summarise the scores that the clients' own models reach on the server's rows, as groups of result.json.

    Args:
        scores: client -> its model's metrics on the server's rows.
        rows: client -> number of its training rows. In the statistic `weighted`, this number is the client's weight.
        objective: the objective of the run.

    Returns:
        Two groups. `global` is the unweighted mean of every metric over the clients. `global_by_client` has statistics
        of the objective's `SCORE` over the clients, in the form of `metrics.personal`. The result is empty if there are
        no clients.
    """
    if not scores:
        return {}
    mean = client_statistics.mean_groups([{"global": one} for one in scores.values()])
    each = {client: one[objective.SCORE] for client, one in scores.items() if objective.SCORE in one}
    return mean | {"global_by_client": client_statistics.personal(each, rows, rising=objective.RISING)}
