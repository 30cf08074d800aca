"""SCAFFOLD: control variates that correct client drift in every step of local training.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II. Client k replaces each gradient g by g - c_k + c. Here c is the server's control
variate, and c_k is the control variate of client k. The code uses the paper's other letters as well:

- x: the global model
- y: the trained model of a client
- K: the number of steps
- eta: the learning rate

polyfed's choices: SCAFFOLD works per block. A client has no c_k for a block that it lacks, and the denominator N of the
server's update of c is the number of the block's owners. Buffers have no control variate.

Clients and server send each other parameters and control variates. Page: docs/algorithms/scaffold.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import IN_RECIPE, NOT_NEGATIVE
from polyfed.core.problems import Conflict
from polyfed.core.tree import SHARED, Tree, add, block_of, like
from polyfed.federation.aggregation import aggregate
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Direction


@message
class Controlled(Message):
    """The global model x and the server's control variate c."""

    params: Tree = carries("parameters")
    control: Tree = carries("gradients")


@message
class ControlledUpdate(Message):
    """The trained parameters y and the change of the client's control variate c_k."""

    params: Tree = carries("parameters", sum_only=True, weight="num_rows")
    control: Tree = carries("gradients", sum_only=True)
    loss: Tensor = carries("statistic", dtype="float32", sum_only=True, weight="num_rows")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, sum_only=True)


@dataclass(frozen=True)
class ScaffoldState(State):
    """Server state.

    Attributes:
        control: the server's control variate c.
    """

    control: Tree = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Averaging[ScaffoldState]):
    """Federated averaging with control variates. The mean is uniform by default, as in the paper."""

    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "uniform"

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "train": {"optimiser": "sgd", "momentum": 0.0, "clip_norm": 0.0}
    }
    mixing: ClassVar[str] = ""
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("train", "optimiser"),
            when=lambda recipe: recipe.algorithm.train.optimiser != "sgd",
            because="only for plain SGD is the mean gradient the difference of the models over the steps",
            instead="Set optimiser = 'sgd'",
        ),
        Conflict(
            key=("train", "momentum"),
            when=lambda recipe: bool(recipe.algorithm.train.momentum),
            because="only for plain SGD is the mean gradient the difference of the models over the steps",
            instead="Set momentum = 0",
        ),
        Conflict(
            key=("train", "clip_norm"),
            when=lambda recipe: bool(recipe.algorithm.train.clip_norm),
            because="only for plain SGD is the mean gradient the difference of the models over the steps",
            instead="Set clip_norm = 0",
        ),
    )
    uncompressed: ClassVar[str] = (
        "the server's control variate is the mean of those of the clients, and rounding would let them drift apart"
    )
    sends: ClassVar[type[Message]] = Controlled
    replies: ClassVar[type[Message]] = ControlledUpdate
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "client": ("update.params",),
        "example": ("update.params", "update.control"),
    }

    @override
    def init(self, fed: Federation, params: Tree) -> ScaffoldState:
        """Return the first state, with c = 0."""
        state = super().init(fed, params)
        return ScaffoldState(**vars(state), control=like(fed.context.model.trainable(state.params)))

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        """Return the client's first control variate, c_k = 0."""
        kept = self.private_names(context.model)
        return like({n: v for n, v in context.model.trainable(context.initial).items() if n not in kept})

    @override
    def outgoing(self, state: ScaffoldState, cohort: list[int], fed: Federation) -> Controlled:
        return Controlled(state.params, state.control)

    @override
    def direction(
        self, context: ClientContext, data: ClientData, got: Controlled, local: Tree
    ) -> tuple[Direction, Tree]:
        """Replace each gradient g by g - c_k + c."""

        def corrected(grads: Tree, w: Tree, aux: Any, carry: Tree) -> tuple[Tree, Tree]:
            moved = {name: g - local[name] + got.control[name] for name, g in grads.items() if name in local}
            return {**grads, **moved}, carry  # private parameters have no control variate

        return corrected, {}

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Controlled, local: Tree
    ) -> tuple[ControlledUpdate, Tree]:
        """Return y and the change of c_k, and keep the new c_k = c_k - c + (x - y) / (K eta) (option II)."""
        lr = self.train.lr_at(data.round, data.rounds)
        moved = {name: got.params[name] - fit.params[name] for name in local}
        scale = 1.0 / (fit.num_steps.clamp(min=1) * lr) if lr else torch.zeros_like(fit.loss)
        trained = (fit.num_steps > 0).to(fit.loss.dtype)  # a client that took no step keeps its c_k
        change = {n: trained * (scale * moved[n] - got.control[n]) for n in local}
        after = add(local, change)
        return ControlledUpdate(fit.params, change, fit.loss, data.num_rows), after

    @override
    def merge(self, state: ScaffoldState, replies: Replies, fed: Federation) -> ScaffoldState:
        """Set x to the mean of y, and update the server's control variate c.

        For each block, c grows by the mean change of the clients' control variates. This change is first multiplied by
        the share of the block's owners that took part in the round.
        """
        after: ScaffoldState = super().merge(state, replies, fed)
        mean = aggregate(replies, "control", dict.fromkeys(replies, 1.0), like(state.control), self.server)
        took_part = {m: sum(m in fed.clients.owned(c) for c in replies) for m in fed.clients.modalities}
        owners = dict(zip(fed.clients.modalities, fed.clients.holds.sum(0).tolist(), strict=True))
        share = {m: took_part[m] / max(owners[m], 1) for m in owners} | {
            SHARED: len(replies) / len(fed.clients.eligible)
        }
        control = {
            name: c + share[block_of(name)] * mean[name] if name in mean else c for name, c in state.control.items()
        }
        return after.with_(control=control)
