"""SCAFFOLD: control variates that take the drift of local training out of every step.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1 with option II. Letters as there: x the global model, c the server's and c_k the client's control
variate, K steps at rate eta.

Ours goes per block (algorithms.md 5.18): a block a client lacks has no c_k, and the denominator N of the server's
update counts the owners of that block. Buffers have no control variate.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, State
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import SHARED, Tree, add, block_of, like
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Direction


@message
class Controlled(Message):
    """The model and the server's control variate."""

    params: Tree = carries("parameters")
    control: Tree = carries("gradients")


@message
class ControlledUpdate(Message):
    """Trained parameters and the change of the client's control variate."""

    params: Tree = carries("parameters")
    control: Tree = carries("gradients")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class ScaffoldState(State):
    """Averaging's state and the server's control variate c."""

    control: Tree = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Averaging):
    """See the module. The mean is uniform, as in the paper; set `aggregation = "weighted"` for the other.

    Raises:
        RecipeError: with momentum or Adam: option II reads the mean gradient off x - y, which holds for plain SGD only.
    """

    aggregation: Literal["weighted", "uniform"] = "uniform"

    sends: ClassVar[type[Message]] = Controlled
    replies: ClassVar[type[Message]] = ControlledUpdate

    def __post_init__(self) -> None:
        """Refuse optimisers for which option II is wrong."""
        super().__post_init__()
        if self.train.optimiser != "sgd" or self.train.momentum or self.train.clip_norm:
            raise RecipeError("scaffold needs plain SGD: [train] optimiser = 'sgd', momentum = 0, clip_norm = 0")

    def init(self, fed: Federation, params: Tree) -> ScaffoldState:
        """Averaging's state and c = 0."""
        state = super().init(fed, params)
        return ScaffoldState(**vars(state), control=like(fed.context.model.trainable(params)))

    def local(self, context: ClientContext, key: int) -> Tree:
        """c_k = 0."""
        return like(context.model.trainable(context.initial))

    def outgoing(self, state: ScaffoldState, cohort: list[int], fed: Federation) -> Controlled:
        """x and c."""
        return Controlled(state.params, state.control)

    def direction(
        self, context: ClientContext, data: ClientData, got: Controlled, local: Tree
    ) -> tuple[Direction, Tree]:
        """g - c_k + c."""

        def corrected(grads: Tree, w: Tree, aux: Any, carry: Tree) -> tuple[Tree, Tree]:
            return {name: g - local[name] + got.control[name] for name, g in grads.items()}, carry

        return corrected, {}

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Controlled, local: Tree
    ) -> tuple[ControlledUpdate, Tree]:
        """y and the change of c_k, which becomes c_k - c + (x - y) / (K eta)."""
        lr = self.train.lr_at(data.round, data.rounds)
        travelled = {name: got.params[name] - fit.params[name] for name in local}
        scale = 1.0 / (fit.num_steps.clamp(min=1) * lr) if lr else torch.zeros_like(fit.loss)
        moved = (fit.num_steps > 0).to(fit.loss.dtype)
        change = {n: moved * (scale * travelled[n] - got.control[n]) for n in local}
        after = add(local, change)
        return ControlledUpdate(fit.params, change, fit.loss, data.num_rows), after

    def merge(self, state: ScaffoldState, replies: Replies, fed: Federation) -> ScaffoldState:
        """x by the mean of y, c by the mean change times the share of a block's owners that took part."""
        after: ScaffoldState = super().merge(state, replies, fed)
        mean = replies.mean("control", dict.fromkeys(replies, 1.0))
        took_part = {m: sum(m in fed.clients.owned(c) for c in replies) for m in fed.clients.modalities}
        owners = dict(zip(fed.clients.modalities, fed.clients.holds.sum(0).tolist(), strict=True))
        share = {m: took_part[m] / max(owners[m], 1) for m in owners} | {SHARED: len(replies) / len(fed.clients)}
        control = {
            name: c + share[block_of(name)] * mean[name] if name in mean else c for name, c in state.control.items()
        }
        return after.with_(control=control)
