"""An evaluation job for silos, whose devices hold different modalities of the same samples.

The devices of a silo embed their own rows, its edge matches them, and the silo's first device with labels scores the
model from all embeddings, as in `Vertical`. What leaves the silo is its report, `SiteScores`: sums and counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.evaluate import Evaluate, EvaluationState, least_of
from polyfed.algorithms.hfm.messages import Exchange, ToEdge
from polyfed.algorithms.hfm.silo_exchange import FromEmbeddings, Vertical
from polyfed.algorithms.hfm.state import Edge
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation.site_scores import SiteScores, site_scores
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.silos.parts import Ask, Part
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData


@dataclass(frozen=True, kw_only=True)
class EvaluateSilos(Evaluate, Vertical):  # type: ignore[misc]
    """An evaluation job: one model, scored by each silo on its own rows.

    `Evaluate` lists the options, and `Vertical` those that say which samples of a silo count.
    """

    silo_parts: ClassVar[tuple[str, ...]] = ("silo_measured",)
    mixing: ClassVar[str] = ""
    captions: ClassVar[Mapping[str, str]] = {}
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is wrong, or there is a second model.
        """
        super().__post_init__()
        if self.against:
            raise RecipeError(
                "silos cannot compare two models on the same rows; evaluate each with a job of its own: remove against",
                ("algorithm", "against"),
            )

    @override
    def observe(self, state: Any) -> dict[str, float]:
        return {}

    @override
    def calibrate(self, state: Any, fed: Federation) -> None:
        return None

    @override
    def anchors(self, local: Tree, head: Tree) -> Tree:
        return {}

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return {}

    @override
    def will_ask(self, task: str, *, tested: bool) -> bool:
        return task in ("embed_own", "measure_silo")

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        return True

    @override
    def round(self, state: EvaluationState, fed: Federation) -> EvaluationState:
        """Ask every silo for its report. A site has the number of its silo.

        Raises:
            RecipeError: no device has such rows.
            TooFewReplies: no silo could be scored.
        """
        if not (fed.clients.tested if self.rows == "test" else fed.clients.validated):
            raise RecipeError(
                f"no device has {self.rows} rows of its own: there is nothing to evaluate. Mark rows with split 1 "
                "(test) or 2 (validation), the same samples on all devices of a silo",
                ("clients", "personal_test"),
            )
        silos = self.devices(fed)
        found = fed.in_silos(self.silo_measured, silos, {}, ToEdge(state.params), accept=self.possible(fed))
        replies = found.of(self.measure_silo)
        silo_of = {client: silo for silo, members in silos.items() for client in members}
        sites = {str(silo_of[client]): reply for client, reply in sorted(replies.items())}
        if not sites:
            raise TooFewReplies(
                f"no silo could be scored on {self.rows} rows: all devices of a silo must answer, and share samples"
            )
        return EvaluationState(state.params, sites)

    def silo_measured(
        self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation
    ) -> Part[Edge | None]:
        """Score the model on the silo's own rows; a part, as in `polyfed.federation.silos.parts`."""
        send = yield from self._embedded(silo, members, kept, got, fed, self.rows)
        yield Ask(self.measure_silo, send, quorum=False, accept=self.possible(fed), held_out=self.rows)
        return kept

    @task(loop_because="the number of rows decides which classes and groups it shows")
    def measure_silo(
        self, context: ClientContext, data: ClientData, local: Tree, got: Exchange
    ) -> tuple[SiteScores, Tree]:
        """Score the silo's model on its own rows, from the embeddings of all devices."""
        rows, predictor = data.test.at(got.rows), FromEmbeddings(got.embeddings)

        def outputs(batch: Batch) -> Tensor:
            return predictor.logits(context.model, got.head, batch)

        return site_scores(context, got.head, rows, self.groups, least_of(context, data.test), outputs), local
