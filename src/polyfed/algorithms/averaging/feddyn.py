"""FedDyn: a linear and a quadratic term in every client's loss make its minimum agree with that of the federation.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR
2021, Algorithm 1. With the letters of the paper, client k receives the model theta and minimises

    L_k(w) - <g_k, w> + alpha / 2 ||w - theta||^2                  (Eq. 1)

where g_k estimates the gradient of L_k at the client's last model. After training it keeps
g_k <- g_k - alpha (theta_k - theta) (Eq. 2). The server keeps h, the sum of the mean changes, and corrects the mean of
the models by it: h <- h - alpha / m sum_k (theta_k - theta), theta <- mean_k theta_k - h / alpha.

polyfed's choices: FedDyn works per block, and m is the number of the block's owners. Buffers are averaged.

The messages are the same as under FedAvg. Page: docs/algorithms/feddyn.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from typing_extensions import override

from polyfed.algorithms.averaging.template import Averaging, State, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message
from polyfed.core.option_checks import IN_RECIPE, PLACEBO, POSITIVE, SearchRange
from polyfed.core.problems import Conflict
from polyfed.core.tree import SHARED, Tree, add, block_of, like, squared_distance, subtract
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.training import ClientData, TrainingResult


@dataclass(frozen=True)
class FedDynState(State):
    """Server state.

    Attributes:
        h: the server's correction, one tensor for each parameter; it starts at zero.
    """

    h: Tree = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FedDyn(Averaging):
    """Federated averaging with a dynamic regulariser. The mean is uniform by default, as in the paper.

    Attributes:
        alpha: weight of the regulariser. The paper uses 0.1, 0.01 and 0.001.
        placebo: `random` is a control: the entries of g_k in the local loss get random signs, so the linear term keeps
            its length and loses its meaning. `none` is the method.
    """

    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "uniform"
    alpha: Annotated[float, POSITIVE, SearchRange(0.001, 0.01, 0.1, 1.0)] = 0.01
    placebo: Annotated[Literal["none", "random"], PLACEBO] = "none"
    uncompressed: ClassVar[str] = (
        "the server's correction is the sum of those of the clients, and rounding would let them drift apart"
    )

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"example": ("update.params",)}
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("server", "optimiser"),
            when=lambda recipe: recipe.algorithm.server.optimiser != "none",
            because="feddyn corrects the mean of the models itself",
            instead="Remove optimiser from [server]",
        ),
        Conflict(
            key=("server", "lr"),
            when=lambda recipe: recipe.algorithm.server.lr != 1.0,
            because="feddyn corrects the mean of the models itself",
            instead="Remove lr from [server]",
        ),
    )

    @override
    def init(self, fed: Federation, params: Tree) -> FedDynState:
        """Return the first state, with h = 0."""
        state = super().init(fed, params)
        return FedDynState(**vars(state), h=like(fed.context.model.trainable(state.params)))

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        """Return the client's first gradient estimate, g_k = 0."""
        kept = self.private_names(context.model)
        return like({n: v for n, v in context.model.trainable(context.initial).items() if n not in kept})

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Broadcast, local: Tree) -> Any:
        """Return the loss of Eq. 1. Private parameters have no regulariser."""
        shared = {name: w[name] for name in local}
        linear = torch.stack([(self._direction(name, g) * shared[name]).sum() for name, g in local.items()]).sum()
        pull = squared_distance(shared, got.params)
        return super().loss(context, w, batch, got, local) - linear + self.alpha / 2 * pull

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Broadcast, local: Tree
    ) -> tuple[Message, Tree]:
        """Return the trained parameters, and keep the new g_k (Eq. 2)."""
        moved = subtract({name: fit.params[name] for name in local}, got.params)
        return Update(fit.params, fit.loss, data.num_rows), add(local, moved, -self.alpha)

    @override
    def merge(self, state: FedDynState, replies: Replies, fed: Federation) -> FedDynState:
        after: FedDynState = super().merge(state, replies, fed)  # the mean of the models
        took_part = {m: sum(m in fed.clients.owned(c) for c in replies) for m in fed.clients.modalities}
        owners = dict(zip(fed.clients.modalities, fed.clients.holds.sum(0).tolist(), strict=True))
        share = {m: took_part[m] / max(owners[m], 1) for m in owners}
        share[SHARED] = len(replies) / len(fed.clients.eligible)
        params, h = dict(after.params), dict(state.h)
        for name in (n for n in h if share[block_of(n)]):
            mean = after.params[name]
            h[name] = h[name] - self.alpha * share[block_of(name)] * (mean - state.params[name])
            params[name] = mean - h[name] / self.alpha
        return after.with_(params=params, h=h)

    def _direction(self, name: str, g: torch.Tensor) -> torch.Tensor:
        if self.placebo == "none":
            return g
        signs = keys.normal(keys.key("feddyn-placebo", name), tuple(g.shape)).sign()
        return signs.to(g) * g
