"""APFL: every client predicts with a mixture of a model of its own and the global one, and learns the mixing weight.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461, Algorithm 1. In each step on
a batch, client i updates its version w of the global model, and its own model v at the mixture u = alpha v +
(1 - alpha) w:

    w <- w - eta grad f(w),    v <- v - eta alpha grad f(u),    alpha <- alpha - eta <v - w, grad f(u)>

Both gradients are taken before the step. The server averages w as in federated averaging.

polyfed's choices: the first batch of a round gives the gradient of alpha, and the new alpha, kept within 0 and 1, holds
from the client's next round. A client is evaluated with the mixture of its v and the newest global model.

The messages are the same as under FedAvg; v and alpha never leave the client. Page: docs/algorithms/apfl.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.option_checks import PLACEBO, PROBABILITY, SearchRange
from polyfed.core.request import Send
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, nested, under
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.training import ClientData
from polyfed.training.client_data import TRAINING_PASSES, Passes

OWN, STATISTICS, PARTNER, ALPHA = "@own", "@statistics", "@partner", "@alpha"
"""Names in a client's local state: the prefixes of the parameters and buffers of its own model and of the model that
replaces the global one under the placebo, and the mixing weight."""


@dataclass(frozen=True, kw_only=True)
class Apfl(Averaging):
    """Federated averaging, and a mixture of local and global model for each client.

    Attributes:
        alpha: the first weight of a client's own model in its mixture (0.25, 0.5 and 0.75 in the paper): 0 predicts
            with the global model, 1 with the own one.
        adaptive: whether every client learns its alpha.
        placebo: `initial` is a control: the own model is mixed with the initial one, which knows nothing of other
            clients. `none` is the method.
    """

    alpha: Annotated[float, PROBABILITY, SearchRange(0.0, 0.25, 0.5, 0.75, 1.0, fedavg=0.0)] = 0.5
    adaptive: Annotated[bool, SearchRange(True, False, fedavg=False)] = True
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        partner = nested(PARTNER, context.initial) if self.placebo == "initial" else {}
        return kept(context, context.initial) | partner | {ALPHA: torch.tensor(self.alpha)}

    @task()
    @override
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Update, Tree]:  # type: ignore[override]
        alpha = local[ALPHA]
        other = under(PARTNER, local)  # empty without the placebo

        def loss(w: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
            v = under(OWN, w)
            partner = other or {n: w[n].detach() for n in v}
            # its value is the mixture, and the gradient of v is that at the mixture, even where alpha is zero
            mixture = {n: v[n] + (1 - alpha) * (partner[n] - v[n].detach()) for n in v}
            error = context.loss({n: w[n] for n in got.params}, batch)
            return error + context.loss(under(STATISTICS, w) | mixture, batch), error.detach()

        def direction(grads: Tree, w: Tree, error: Tensor, carry: Tree) -> tuple[Tree, Tree]:
            v, at_mixture, partner = under(OWN, w), under(OWN, grads), other or w
            slope = torch.stack([((v[n] - partner[n]) * g).sum() for n, g in at_mixture.items()]).sum()
            after = {
                "slope": torch.where(carry["steps"] == 0, slope, carry["slope"]),
                "error": carry["error"] + error,
                "steps": carry["steps"] + 1,
            }
            return grads | nested(OWN, {n: alpha * g for n, g in at_mixture.items()}), after

        fit = data.minimise(
            loss,
            got.params | {n: value for n, value in local.items() if n.startswith((f"{OWN}.", f"{STATISTICS}."))},
            train=self.train,
            direction=direction,
            carry=dict.fromkeys(("slope", "error", "steps"), torch.zeros_like(alpha)),
            passes=Passes(whole=2 * TRAINING_PASSES),  # w and the mixture
        )
        rate = self.train.lr_at(data.round, data.rounds) if self.adaptive else 0.0
        after = {n: fit.params.get(n, value) for n, value in local.items()}
        after[ALPHA] = (alpha - rate * fit.carry["slope"]).clamp(0.0, 1.0)
        error = fit.carry["error"] / fit.num_steps.clamp(min=1)
        return Update({n: fit.params[n] for n in got.params}, error, data.num_rows), after

    @override
    def global_params(self, state: Any) -> Tree:
        params: Tree = state.params
        return params

    @override
    def evaluation_message(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        return Broadcast(state.params)

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        own, partner = under(OWN, local), under(PARTNER, local) or got.params
        return under(STATISTICS, local) | {n: v + (1 - local[ALPHA]) * (partner[n] - v) for n, v in own.items()}


def kept(context: ClientContext, params: Tree) -> Tree:
    """Return the local state of an own model: its parameters and its buffers under their prefixes."""
    own = context.model.trainable(params)
    return nested(OWN, own) | nested(STATISTICS, {n: value for n, value in params.items() if n not in own})
