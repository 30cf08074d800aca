"""SplitFed: split learning with all clients of a round in parallel, and federated averaging of the halves.

Thapa, Arachchige, Camtepe, Sun, "SplitFed: When federated learning meets split learning", AAAI 2022. In version 1, the
server keeps a copy of the upper half for each client during a round. At the end of the round, the server averages these
copies and also the lower halves. The result equals FedAvg of the uncut model. In version 2, one upper half serves the
clients one after another, in a random order that changes every round. Only the lower halves are averaged, and the
server's optimiser keeps its state over rounds.

The messages are the same as in split learning. Page: docs/algorithms/splitfed.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.split.cut import COMMON, CONFLICTS, Cut, ServerHalf, will_send
from polyfed.algorithms.split.split_learning import SplitState, first_state, shuffled
from polyfed.core.option_checks import IN_RECIPE, NotSearched
from polyfed.core.problems import Conflict
from polyfed.core.tree import Tree, block_of, mean_of
from polyfed.federation.clock import Timetable
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Selector, Uniform


@dataclass(frozen=True, kw_only=True)
class SplitFed(Algorithm[SplitState]):
    """Clients train in parallel.

    Attributes:
        version: 1 keeps one upper half for each client and averages them at the end of a round, 2 one for all clients.
        aggregation: weights of the means: `weighted` by rows, or `uniform` as in the authors' code.
        selector: the rule from the [selection] section that chooses which clients train in a round. Only `uniform` is
            allowed.
        u_shaped: whether the head and the labels stay on the clients, at one more exchange per batch.
        cut: the client tasks and the server's step, made from the other options.
    """

    version: Annotated[Literal[1, 2], NotSearched("another method")] = 1
    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "weighted"
    selector: Selector = Uniform()
    mixing: ClassVar[str] = "the server, which holds the upper half of the model, chooses the gradients at the cut"
    needs_embeddings: ClassVar[bool] = True
    trains_one_model: ClassVar[bool] = False
    conflicts: ClassVar[tuple[Conflict, ...]] = CONFLICTS

    u_shaped: Annotated[bool, NotSearched("decides what leaves a client")] = False
    cut: Cut = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options and make `cut`.

        Raises:
            RecipeError: an option is out of range.
        """
        super().__post_init__()
        object.__setattr__(self, "cut", Cut(train=self.train, u_shaped=self.u_shaped))

    @override
    def received_template(self, task: str, model: Model) -> Tree:
        return self.cut.template(task, model.template)

    @override
    def init(self, fed: Federation, params: Tree) -> SplitState:
        return first_state(self.cut, self.selector, fed, params)

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return self.cut.local(context)

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        return will_send(self.cut, task, field, block)

    @override
    def simulated_seconds(self, state: SplitState, times: Timetable) -> float:
        return times.chains(times.by_client()) if self.version == 1 else times.barriers()

    @override
    def round(self, state: SplitState, fed: Federation) -> SplitState:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        if self.version == 1:
            order, halves = cohort, server_halves(state.params, self.cut, cohort, fed)
        else:
            order = shuffled(cohort, fed)
            halves = {COMMON: ServerHalf(self.cut.upper(state.params), state.optimiser, state.steps)}
        done, loss = self.cut.exchange(fed, order, state.params, halves)
        fed.require_quorum(done, "cut")
        weights = fed.clients.rows_of(done) if self.aggregation == "weighted" else dict.fromkeys(done, 1.0)
        upper = mean_of({k: halves[k].params for k in done}, weights) if self.version == 1 else halves[COMMON].params
        params = state.params | done.mean("params", weights) | upper
        after = state.with_(params=params, memory=memory, train_loss=loss)
        if self.version == 2:
            after = after.with_(optimiser=halves[COMMON].moments, steps=halves[COMMON].steps)
        return after


def server_halves(params: Tree, cut: Cut, clients: Sequence[int], fed: Federation) -> dict[int, ServerHalf]:
    """Return a server's half for each client, with the blocks that the client owns."""
    result = {}
    for k in clients:
        own = {n: v for n, v in cut.upper(params).items() if block_of(n) in fed.clients[k].blocks}
        result[k] = cut.fresh(fed.context.model, own)
    return result
