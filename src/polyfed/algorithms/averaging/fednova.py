"""FedNova: the server averages what clients learn in one step, so that clients with more steps do not pull harder.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Section 5. Client k moves the model x by its gradients g_1 ... g_tau, each times lr and a factor:
x - y_k = lr * sum_i a_i g_i. The server's update is

    x <- x + (sum_k p_k |a_k|) sum_k p_k (y_k - x) / |a_k|

where p_k is the client's weight and |a_k|, its *length*, the sum of its factors: the number of steps tau for plain SGD,
(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, and (1 - (1 - c)^tau) / c with a proximal term,
where c = lr * mu. The first factor of the update is the *effective* number of steps.

polyfed's choices: FedNova works per block, over the clients that sent the block. The client divides by its length and
multiplies by a reference, the mean length of all clients, which the server sends; so replies stay as large as models,
and every rule of [server] and secure aggregation work as under FedAvg. The server computes the effective number of
steps from registered rows and not from replies, where they could be false.

Page: docs/algorithms/fednova.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging.template import Averaging, State, Update
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, PLACEBO, SearchRange
from polyfed.core.problems import Conflict
from polyfed.core.request import Send
from polyfed.core.tree import SHARED, Tree, block_of, squared_distance
from polyfed.federation.aggregation import aggregate
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.training import ClientData, TrainingResult
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import steps_trained


@message
class NovaModel(Message):
    """The global model, and the length to which the client scales its update."""

    params: Tree = carries("parameters")
    reference: Tensor = carries("statistic", dtype="float32", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class NovaState(State):
    """Server state.

    Attributes:
        effective: the effective number of steps of the last round, for the block `shared`.
        ratio: the largest length of a client in the last cohort, divided by the smallest.
    """

    effective: float = float("nan")
    ratio: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class FedNova(Averaging):
    """Federated averaging of normalised updates.

    Attributes:
        mu: weight of a proximal term in the local loss, as in FedProx.
        placebo: `shuffled` is a control: the lengths of the cohort are permuted among its clients. `none` is the
            method.
    """

    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1, 1.0)] = 0.0
    placebo: Annotated[Literal["none", "shuffled"], PLACEBO] = "none"

    captions: ClassVar[Mapping[str, str]] = {
        "effective_steps": "The effective number of local steps by which the server moves the global model.",
        "length_ratio": "The largest over the smallest number of effective steps in the cohort; at 1, it is FedAvg.",
    }
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"train": {"optimiser": "sgd", "nesterov": False}}
    mixing: ClassVar[str] = ""
    sends: ClassVar[type[Message]] = NovaModel
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"example": ("update.params",)}
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("train", "optimiser"),
            when=lambda recipe: recipe.algorithm.train.optimiser != "sgd",
            because="it needs the factor of each gradient in the update, which it knows for SGD only",
            instead="Set optimiser = 'sgd'",
        ),
        Conflict(
            key=("train", "nesterov"),
            when=lambda recipe: recipe.algorithm.train.nesterov,
            because="it knows the factor of each gradient in the update for plain momentum only",
            instead="Set nesterov = false",
        ),
        Conflict(
            key=("train", "momentum"),
            when=lambda recipe: bool(recipe.algorithm.mu and recipe.algorithm.train.momentum),
            beside="[algorithm] mu",
            because="fednova has no formula for both",
            instead="Set momentum = 0 or mu = 0",
        ),
        Conflict(
            key=("algorithm", "mu"),
            when=lambda recipe: (
                recipe.algorithm.mu * max(recipe.algorithm.train.lr, recipe.algorithm.train.lr_end or 0.0) >= 1
            ),
            beside="[train] lr",
            because="fednova needs lr * mu below 1",
            instead="Lower mu or lr",
        ),
    )

    @override
    def init(self, fed: Federation, params: Tree) -> NovaState:
        return NovaState(**vars(super().init(fed, params)))

    @override
    def outgoing(self, state: NovaState, cohort: list[int], fed: Federation) -> Send:
        reference, lengths = self._reference(fed), self._lengths(cohort, fed)
        if self.placebo == "none":
            return NovaModel(state.params, torch.tensor(reference))
        order = keys.permutation(keys.key(fed.seed, "fednova-placebo", fed.round), len(cohort)).tolist()
        wrong = {client: lengths[cohort[place]] for client, place in zip(cohort, order, strict=True)}
        return {
            client: NovaModel(state.params, torch.tensor(reference * lengths[client] / max(wrong[client], 1e-12)))
            for client in cohort
        }

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: NovaModel, local: Tree) -> Any:
        error = super().loss(context, w, batch, got, local)
        if not self.mu:
            return error
        return error + self.mu / 2 * squared_distance(context.model.trainable(w), got.params)

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: NovaModel, local: Tree
    ) -> tuple[Message, Tree]:
        steps = fit.num_steps.to(torch.float64)
        own = update_length(steps, self.train, self.mu * self.train.lr_at(data.round, data.rounds))
        ratio = got.reference / own.clamp(min=1.0)  # a client without steps has not moved
        scaled = {
            name: got.params[name] + ratio.to(value.dtype) * (value - got.params[name])
            for name, value in context.model.trainable(fit.params).items()
        }
        return Update(fit.params | scaled, fit.loss, data.num_rows), local

    @override
    def merge(self, state: NovaState, replies: Replies, fed: Federation) -> NovaState:
        weights = self.selector.weigh(state.memory, self.weights(replies, fed))
        mean = aggregate(replies, "params", weights, state.params, self.server)
        lengths, reference = self._lengths(list(replies), fed), self._reference(fed)
        effective = {SHARED: weighted(lengths, weights)} | {
            m: weighted({c: lengths[c] for c in replies if m in fed.clients.owned(c)}, weights)
            for m in fed.clients.modalities
        }
        trainable = fed.context.model.trainable(state.params)
        for name in mean.keys() & trainable.keys():
            stretch = effective[block_of(name)] / reference if reference else 0.0
            mean[name] = state.params[name] + stretch * (mean[name] - state.params[name])
        params, moments = self.server.apply(state.params, mean, state.moments, trainable)
        longest, shortest = max(lengths.values()), min(lengths.values())
        ratio = longest / shortest if shortest else float("nan")
        return state.with_(params=params, moments=moments, effective=effective[SHARED], ratio=ratio)

    @override
    def observe(self, state: NovaState) -> dict[str, float]:
        result = {"effective_steps": state.effective, "length_ratio": state.ratio}
        return {name: value for name, value in result.items() if value == value}

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        seen = [row["length_ratio"] for row in logged if "length_ratio" in row]
        if not seen or max(seen) > 1 + 1e-9:
            return []
        return [
            f"the clients of a round took equally many steps in {len(seen)} rounds, so fednova trains like fedavg. "
            "Use [train] epochs instead of steps, with clients of different size"
        ]

    def _lengths(self, clients: Sequence[int], fed: Federation) -> dict[int, float]:
        """Return the length of each client's update, from its registered number of rows."""
        skip, shrink = fed.context.model.has_batchnorm, self.mu * self.train.lr_at(fed.round, fed.rounds)
        rows = fed.clients.rows_of(clients)
        steps = [steps_trained(rows[client], self.train, skip_single=skip) for client in clients]
        result = update_length(torch.tensor(steps, dtype=torch.float64), self.train, shrink)
        return dict(zip(clients, result.tolist(), strict=True))

    def _reference(self, fed: Federation) -> float:
        """Return the mean length of all clients, to which each client scales its update."""
        lengths = self._lengths(list(fed.clients.eligible), fed)
        return sum(lengths.values()) / max(len(lengths), 1)


def update_length(steps: Tensor, train: Train, shrink: float) -> Tensor:
    """Return |a|, the sum of the factors with which a local training adds up its gradients.

    Args:
        steps: number of steps, float64.
        train: its optimiser, SGD with or without momentum.
        shrink: lr * mu of a proximal term; 0 without it.
    """
    rho = train.momentum
    if rho:
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    if shrink:
        return (1 - (1 - shrink) ** steps) / shrink
    return steps


def weighted(values: Mapping[int, float], weights: Mapping[int, float]) -> float:
    """Return the weighted mean of some clients' values; 0 if their weights are all zero."""
    total = sum(weights[client] for client in values)
    return sum(weights[client] * value for client, value in values.items()) / total if total else 0.0
