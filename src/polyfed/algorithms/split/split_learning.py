"""Split learning: the clients train the lower half of one model in turn, and the server trains the upper half.

Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018. A client computes the
activations of a batch at the cut and sends them together with the labels. The server computes the loss, updates its
half, and returns the gradients at the cut. The client uses them to update its half. After its local epochs, the client
returns its half, and the server sends it to the next client. The order of the clients is random and changes every
round. The server's optimiser keeps its state from client to client and from round to round. A client's optimiser starts
afresh in every round. If `u_shaped` is set, the head and the labels stay on the client (Vepakomma, Gupta, Swedish,
Raskar, "Split learning for health", 2018).

In every step, the client sends activations and labels, and the server sends gradients. In every round, the server sends
the lower half of the model to each client in turn, and each client sends the trained half back. Page:
docs/algorithms/split-learning.md.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from typing_extensions import override

from polyfed.algorithms.averaging import State
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.split.cut import COMMON, CONFLICTS, Cut, ServerHalf, will_send
from polyfed.core import keys
from polyfed.core.option_checks import NotSearched
from polyfed.core.problems import Conflict
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies, joined
from polyfed.model import Model
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Selector, Uniform
from polyfed.training.optimisers import Moments


@dataclass(frozen=True)
class SplitState(State):
    """Server state; `params` is the whole model.

    Attributes:
        optimiser: moments of the optimiser that trains the server's half of the model.
        steps: the number of training steps of this optimiser so far.
    """

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0


def first_state(cut: Cut, selector: Selector, fed: Federation, params: Tree) -> SplitState:
    """Return the state before the first round: the whole model, and a fresh optimiser for the server's half.

    Raises:
        RecipeError: the model cannot be cut; see `Cut.check`.
    """
    cut.check(fed.context.model)
    moments = cut.fresh(fed.context.model, cut.upper(params)).moments
    return SplitState(params, memory=selector.start(params), optimiser=moments)


def shuffled(cohort: list[int], fed: Federation) -> list[int]:
    """Return the cohort in a random order, which is drawn for this round."""
    return [cohort[i] for i in keys.permutation(keys.key(fed.seed, "turns", fed.round), len(cohort)).tolist()]


@dataclass(frozen=True, kw_only=True)
class SplitLearning(Algorithm[SplitState]):
    """Clients train in turn.

    Attributes:
        selector: the rule from the [selection] section that chooses which clients train in a round. Only `uniform` is
            allowed.
        u_shaped: whether the head and the labels stay on the clients, at one more exchange per batch.
        cut: the client tasks and the server's step, made from the other options.
    """

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
    def round(self, state: SplitState, fed: Federation) -> SplitState:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        params, losses, rows, requests = state.params, 0.0, 0, list[Replies]()
        halves = {COMMON: ServerHalf(self.cut.upper(params), state.optimiser, state.steps)}
        for k in shuffled(cohort, fed):
            params, loss, done = train_one(self.cut, fed, params, k, halves)
            requests.append(done)
            losses, rows = losses + loss * int(fed.clients.num_rows[k]), rows + int(fed.clients.num_rows[k])
        fed.require_quorum(joined(requests), "cut")
        after = halves[COMMON]
        return SplitState(
            params, {}, memory, train_loss=losses / max(rows, 1), optimiser=after.moments, steps=after.steps
        )


def train_one(
    cut: Cut, fed: Federation, params: Tree, k: int, halves: dict[int, ServerHalf]
) -> tuple[Tree, float, Replies]:
    """Train with one client. Return the whole model, the loss, and the client's half if the client sent it back."""
    done, loss = cut.exchange(fed, [k], params, halves)
    lower = done[k].params if k in done else {}
    return params | lower | halves[COMMON].params, loss, done
