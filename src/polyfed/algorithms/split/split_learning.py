"""Split learning: one client after the other trains the lower half, the server the upper one.

Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018; algorithms.md 5.11. A
client forwards a batch to the cut and sends activations and labels; the server goes on, steps, and returns the gradient
at the cut. After its epochs the client's half goes to the next, through the server. The cohort's order is drawn afresh
every round. The server's optimiser outlives clients and rounds, a client's does not. With `u_shaped` the head, and with
it the labels, stay on the client (Vepakomma et al., "Split learning for health", 2018).
"""

from dataclasses import dataclass, field

from polyfed.algorithms.averaging import State
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.split.cut import Cut, Upper, one_turn, will_send
from polyfed.core import keys
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies, joined
from polyfed.privacy.policy import Policy
from polyfed.selection import Selector, Uniform, must_be_uniform
from polyfed.training.optimisers import Moments


@dataclass(frozen=True)
class SplitState(State):
    """The whole model, and the server's optimiser after `steps` steps."""

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0


def first_state(cut: Cut, selector: Selector, fed: Federation, params: Tree) -> SplitState:
    """The whole model; a fresh optimiser for the upper half."""
    cut.check(fed.context.model)
    moments = cut.fresh(fed.context.model, cut.upper(params)).moments
    return SplitState(params, memory=selector.start(params), optimiser=moments)


def turns(cohort: list[int], fed: Federation) -> list[int]:
    """The cohort in this round's random order."""
    return [cohort[i] for i in keys.permutation(keys.key(fed.seed, "turns", fed.round), len(cohort)).tolist()]


@dataclass(frozen=True, kw_only=True)
class SplitLearning(Algorithm):
    """See the module.

    Attributes:
        selector: which clients take a turn in a round, the [selection] section.
        u_shaped: keep the head and the labels on the clients, for one more exchange per batch.
        cut: the tasks; made from the above.
    """

    selector: Selector = Uniform()
    u_shaped: bool = False
    cut: Cut = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the tasks' owner."""
        super().__post_init__()
        must_be_uniform(self.selector, "split learning")
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
        """One turn for each of the cohort, in a random order."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        params, losses, rows, requests = state.params, 0.0, 0, list[Replies]()
        uppers = {-1: Upper(self.cut.upper(params), state.optimiser, state.steps)}
        for k in turns(cohort, fed):
            params, loss, done = one_turn(self.cut, fed, params, k, uppers)
            requests.append(done)
            losses, rows = losses + loss * int(fed.clients.num_rows[k]), rows + int(fed.clients.num_rows[k])
        fed.require_quorum(joined(requests), "cut")
        after = uppers[-1]
        return SplitState(
            params, {}, memory, train_loss=losses / max(rows, 1), optimiser=after.moments, steps=after.steps
        )
