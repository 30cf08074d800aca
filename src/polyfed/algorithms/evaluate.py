"""An evaluation job: clients score one model on their own rows, nothing is trained, and only sums and counts leave.

`polyfed evaluate` writes recipes with this job. A device announces and refuses it like every method: its policy must
let statistics leave, and take the model: `accept = ["parameters"]` if its own parameters may not leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.problems import Conflict
from polyfed.core.request import Accept
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import Measured
from polyfed.evaluation.site_scores import (
    Compared,
    SiteScores,
    TwoModels,
    compared,
    flaw_of,
    flaw_of_two,
    metrics_compared,
    of_sites,
    site_scores,
    summary,
)
from polyfed.federation.client_registry import TEST, VALIDATION
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.objective import Objective
from polyfed.training import ClientData

SERVER = "server"
"""The name of the server's own rows among the sites."""


DEVICE_GROUP = 10
"""The smallest number of rows that a device shows if its policy does not set `[limits] min_group`."""


@dataclass(frozen=True)
class EvaluationState:
    """The server's state of an evaluation job: the model, the report of each site, and those about a second model."""

    params: Tree
    sites: Mapping[str, SiteScores] = field(default_factory=dict)
    against: Tree = field(default_factory=dict)
    compared: Mapping[str, Compared] = field(default_factory=dict)
    train_loss: None = None


@dataclass(frozen=True, kw_only=True)
class Evaluate(Algorithm):
    """An evaluation job: one model, scored by each client on its own rows.

    Attributes:
        rows: `test` scores the clients' own test rows, `validation` their own validation rows.
        groups: column -> values: scores of the rows with each value too. The column is an array of the data, such as
            `sex = ["F", "M"]`. A device shows a group only if its policy allows the column (`[allow] groups`) and the
            group has `[limits] min_group` rows.
        against: a second model, as in `[model] init`: sites count on how many rows both, one or none is right, add up
            the rows' errors of both, and compute their AUROCs with DeLong's variance of the difference.
    """

    mixing: ClassVar[str] = ""
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("secure_aggregation",),
            when=lambda recipe: recipe.algorithm.secure_aggregation is not None,
            because="an evaluation job reports each site, and the server would read only sums",
            instead="Remove the section, or read the pooled scores of [evaluate] personal in a run",
        ),
    )

    rows: Literal["test", "validation"] = "test"
    groups: Mapping[str, list[str | int]] = field(default_factory=dict)
    against: str = ""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: a column has no values or twice the same, or [secure_aggregation] would hide the single sites.
        """
        super().__post_init__()
        for name, values in self.groups.items():
            if not values or len({str(value) for value in values}) < len(values):
                raise RecipeError(
                    f"[algorithm] groups: '{name}' = {values}: must be distinct values, at least one",
                    ("algorithm", "groups"),
                )

    @override
    def init(self, fed: Federation, params: Tree) -> EvaluationState:
        return EvaluationState(params)

    @override
    def will_ask(self, task: str, *, tested: bool) -> bool:
        return task == "measure" or (task == "compare" and bool(self.against))

    @override
    def round(self, state: EvaluationState, fed: Federation) -> EvaluationState:
        """Ask every client with such rows, and the server's own evaluation client, for its report."""
        asked = list(fed.clients.tested if self.rows == "test" else fed.clients.validated)
        own = TEST if self.rows == "test" else VALIDATION
        here = [own] if own in fed.evaluation_clients and not asked else []
        if not asked + here:
            raise RecipeError(
                f"no client has {self.rows} rows of its own, and the server has none: there is nothing to evaluate. "
                "Set [clients] personal_test, as in personal_test = 0.2; on devices, mark rows with split 1 (test) or "
                "2 (validation)",
                ("clients", "personal_test"),
            )
        if here:
            text = f"no client has enough {self.rows} rows of its own, so only the server's rows are scored"
            fed.emit("note", text=text)
        replies = fed.ask(
            self.measure, asked or here, Broadcast(state.params), held_out=self.rows, accept=self.possible(fed)
        )
        sites = {_name_of(client): reply for client, reply in sorted(replies.items())}
        if not state.against:
            return EvaluationState(state.params, sites)
        both, labels = TwoModels(state.params, state.against), _ranked_labels(fed.context)
        parts = sum(metrics_compared(fed.context).values())
        rows = replies.numbers("num_rows")

        def wrong(client: int, reply: Compared) -> str:
            return flaw_of_two(fed.context.objective, reply, rows[client], labels, parts)

        answers = fed.ask(self.compare, [*replies], both, held_out=self.rows, accept=wrong)
        compared = {_name_of(client): reply for client, reply in sorted(answers.items())}
        return replace(state, sites=sites, compared=compared)

    def possible(self, fed: Federation) -> Accept:
        """Return a function that says why a report is not possible; see `flaw_of`."""
        objective, size = fed.context.objective, len(_no_rows(fed.context))

        def flaw(client: int, reply: SiteScores) -> str:
            return flaw_of(objective, reply, self.groups, size)

        return flaw

    @override
    def evaluate(self, state: EvaluationState, fed: Federation) -> Measured:
        told = self.told(state, fed).get("evaluation", {})
        values = {name: one["value"] for name, one in told.get("pooled", {}).get("metrics", {}).items()}
        return Measured({"pooled": values} if values else {})

    @override
    def told(self, state: Any, fed: Federation) -> dict[str, Any]:
        if not state.sites:
            return {}
        result = summary(fed.context.objective, state.sites, self.groups)
        if not state.compared:
            return {"evaluation": result}
        rows = {name: int(one.num_rows) for name, one in state.sites.items()}
        compared = of_sites(fed.context, state.compared, rows)
        return {"evaluation": result | {"comparison": compared}}

    @task(loop_because="the number of rows decides which classes and groups it shows")
    def measure(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[SiteScores, Tree]:
        """Score the model on the client's own rows."""
        rows = data if context.evaluation_client else data.test
        return site_scores(context, got.params, rows, self.groups, least_of(context, rows)), local

    @task(loop_because="the number of rows decides which classes it shows")
    def compare(self, context: ClientContext, data: ClientData, local: Tree, got: TwoModels) -> tuple[Compared, Tree]:
        """Count on how many of the client's own rows the models are right."""
        rows = data if context.evaluation_client else data.test
        least = least_of(context, rows)
        return compared(context, got.params, got.against, rows, least, _ranked_labels(context)), local


def least_of(context: ClientContext, rows: ClientData) -> int:
    """Return the smallest number of rows of a class or group that a client shows."""
    return rows.min_group or (DEVICE_GROUP if context.on_device else 0)


def _name_of(client: int) -> str:
    return SERVER if client < 0 else str(client)


def _ranked_labels(context: ClientContext) -> int:
    """Return the number of labels or classes with an AUROC."""
    bins = context.objective.score_bins(_no_rows(context))
    return 0 if bins is None else bins.shape[1]


def _no_rows(context: ClientContext) -> torch.Tensor:
    """Return the sums of no rows, for their length."""
    objective = context.objective
    y = objective.no_labels(context.num_classes)
    outputs = torch.zeros(0, *objective.outputs_shape(context.model))
    return objective.site_sums(outputs, Batch({}, y, torch.arange(0)))
