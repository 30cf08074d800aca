"""SplitFed: split learning with all clients of a round side by side, and federated averaging of the halves.

Thapa, Arachchige, Camtepe, Sun, "SplitFed: When federated learning meets split learning", AAAI 2022; algorithms.md
5.12.
Version 1: the server keeps a copy of the upper half per client during a round and averages the copies, as it averages
the lower halves; this is FedAvg of the unsplit model. Version 2: one upper half serves the clients one by one, in an
order drawn afresh every round, and only the lower halves are averaged; its optimiser outlives the rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.split.cut import Cut, Upper, halves_of, will_send
from polyfed.algorithms.split.split_learning import SplitState, first_state, turns
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.privacy.policy import Policy
from polyfed.selection import Selector, Uniform, must_be_uniform


@dataclass(frozen=True, kw_only=True)
class SplitFed(Algorithm):
    """See the module.

    Attributes:
        version: 1 or 2, see above.
        aggregation: weights of the means: `weighted` by rows, or `uniform` as in the authors' code.
        selector: which clients take part, the [selection] section.
        u_shaped: keep the head and the labels on the clients, for one more exchange per batch.
        cut: the tasks; made from the above.
    """

    version: Literal[1, 2] = 1
    aggregation: Literal["weighted", "uniform"] = "weighted"
    selector: Selector = Uniform()
    u_shaped: bool = False
    cut: Cut = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the tasks' owner."""
        super().__post_init__()
        must_be_uniform(self.selector, "splitfed")
        object.__setattr__(self, "cut", Cut(train=self.train, u_shaped=self.u_shaped))

    def init(self, fed: Federation, params: Tree) -> SplitState:
        """See `first_state`."""
        return first_state(self.cut, self.selector, fed, params)

    def local(self, context: ClientContext, key: int) -> Tree:
        """Room for the lower half and its optimiser."""
        return self.cut.local(context)

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Labels only where they do not stay."""
        return will_send(self.cut, task, field, block)

    def round(self, state: SplitState, fed: Federation) -> SplitState:
        """All clients of the cohort at once, then the means."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        if self.version == 1:
            order, uppers = cohort, halves_of(state.params, self.cut, cohort, fed)
        else:
            order = turns(cohort, fed)
            uppers = {-1: Upper(self.cut.upper(state.params), state.optimiser, state.steps)}
        done, loss = self.cut.exchange(fed, order, state.params, uppers)
        fed.require_quorum(done, "cut")
        weights = fed.clients.rows_of(done) if self.aggregation == "weighted" else dict.fromkeys(done, 1.0)
        halves = {k: uppers[k].params for k in done} if self.version == 1 else {}
        upper = mean(halves, weights) if self.version == 1 else uppers[-1].params
        params = state.params | done.mean("params", weights) | upper
        after = state.with_(params=params, memory=memory, train_loss=loss)
        if self.version == 2:
            after = after.with_(optimiser=uppers[-1].moments, steps=uppers[-1].steps)
        return after


def mean(trees: Mapping[int, Tree], weights: Mapping[int, float]) -> Tree:
    """Per name, the weighted mean over the trees that have it, in ascending order of clients."""
    found: Tree = {}
    for name in dict.fromkeys(n for tree in trees.values() for n in tree):
        owners = [k for k in sorted(trees) if name in trees[k]]
        total = sum(weights[k] for k in owners)
        first, *rest = ((weights[k] / total) * trees[k][name] for k in owners)
        found[name] = sum(rest, start=first)
    return found
