"""FedMChain: clients train one modality after another, and the server averages updates whose signs agree.

Zhang, Qi, Li, Yang, Xu, "Boosting Multimodal Federated Learning via Chained Modality Optimization", 2026
(arXiv:2606.01856). Local training is a chain of *phases*. In each phase a client trains one modality while the others
stand still, so no modality can outrun another, and a regulariser makes the modality compensate the errors that the
prediction from all modalities still makes. The server combines the updates of a modality by sparse sign-guided
consensus aggregation (SSCA): it keeps the large entries, clusters the clients whose signs agree, and averages no
entries of opposite signs.

We know the paper's abstract and a summary of it, not its equations. The three ideas are the paper's, and all formulas
are polyfed's. With `phases = "joint"`, `density = 1` and `agreement = -1`, the method is FedAvg.
Page: docs/algorithms/fedmchain.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.option_checks import FRACTION, NOT_NEGATIVE, PLACEBO, SearchRange, between
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.aggregation import CHUNK, Group, combined
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.objective import SUPERVISED, Objective
from polyfed.training import ClientData
from polyfed.training.client_data import ONCE, TRAINING_PASSES, Passes
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import there

PHASES = 1100
"""The random stream of the second phase's batches; the third has the next one. The first has that of FedAvg."""

DRAWN = keys.key("phase")
"""The purpose of the draws of a step's modality under the placebo `random-phases`."""


@dataclass(frozen=True)
class ChainState(State):
    """The state of `Averaging`, and for each modality into how many clusters its updates fell."""

    clusters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FedMChain(Averaging[ChainState]):
    """Phases of one modality each, and a mean of updates whose signs agree.

    Attributes:
        phases: `chain` trains the client's modalities one after another, each for the epochs of [train]; `joint` trains
            all at once, as FedAvg does.
        order: the modalities in the order of the phases. Those that it does not name follow in the order of the data.
        compensation: weight of the regulariser; 0 trains every modality as if it were the only one.
        density: share of the entries of a client's update that count, the largest ones, for each modality.
        agreement: how far the signs of two updates must agree for one cluster: -1 joins all clients, 0 those with as
            many equal signs as opposite ones, and 1 those without any opposite sign.
        placebo: two controls: under `random-phases` every step trains a modality drawn at random, in as many steps;
            `random-clusters` deals the clients to clusters of the same sizes at random. `none` is the method.
    """

    phases: Annotated[Literal["chain", "joint"], SearchRange("chain", "joint", fedavg="joint")] = "chain"
    order: tuple[str, ...] = ()
    compensation: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.3, 1.0, 3.0, beside=("phases", "chain"))] = 1.0
    density: Annotated[float, FRACTION, SearchRange(0.2, 0.5, 1.0, fedavg=1.0)] = 0.5
    agreement: Annotated[float, between(-1, 1), SearchRange(-1.0, 0.0, 0.5, 0.7, fedavg=-1.0)] = 0.0
    placebo: Annotated[Literal["none", "random-phases", "random-clusters"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""
    needs_embeddings: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "it trains each modality alone, and pairs of modalities need both"
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    spare: ClassVar[tuple[str, ...]] = ()
    captions: ClassVar[Mapping[str, str]] = {"clusters": "Into how many clusters the updates of each modality fell."}

    @override
    def check_model(self, model: Model) -> None:
        """Check the order.

        Raises:
            RecipeError: it names an unknown modality, or one twice, or the model has no embeddings.
        """
        super().check_model(model)
        for place, modality in enumerate(self.order):
            if modality not in model.modalities:
                fault = f"no such modality '{modality}'; {did_you_mean(modality, model.modalities)}"
            elif modality in self.order[:place]:
                fault = f"'{modality}' is there twice. Name each modality once"
            else:
                continue
            raise RecipeError(f"[algorithm] order: {fault}", ("algorithm", "order"))

    @property
    def averages_all(self) -> bool:
        """Whether the server takes the plain mean: all entries count, and all clients are one cluster."""
        return self.density == 1 and self.agreement == -1

    @property
    @override
    def single_replies(self) -> str:
        compares = "" if self.averages_all else "fedmchain compares the signs of single updates"
        return compares or super().single_replies

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        chain = ("order", "compensation", *(["placebo"] if self.placebo == "random-phases" else []))
        signs = ("density", "agreement", *(["placebo"] if self.placebo == "random-clusters" else []))
        if self.phases == "joint":
            result |= dict.fromkeys(chain, "phases = 'joint'")
        elif all(len(fed.clients.owned(client)) < 2 for client in fed.clients):
            result |= dict.fromkeys(chain, "clients with one modality each")
        elif self.placebo == "random-phases":
            result["order"] = "placebo = 'random-phases'"
        if self.server.aggregate != "mean":
            result |= dict.fromkeys(signs, f"server.aggregate = '{self.server.aggregate}'")
        elif self.averages_all and self.placebo == "random-clusters":
            result["placebo"] = "density = 1 and agreement = -1"
        return result

    # the server

    @override
    def init(self, fed: Federation, params: Tree) -> ChainState:
        return ChainState(**vars(super().init(fed, params)))

    @override
    def merge(self, state: ChainState, replies: Replies, fed: Federation) -> ChainState:
        if self.averages_all or self.server.aggregate != "mean":
            return super().merge(state, replies, fed)  # type: ignore[no-any-return]
        weights = self.selector.weigh(state.memory, self.weights(replies, fed))
        trainable = fed.context.model.trainable(state.params)
        result: dict[str, int] = {}

        def rule(group: Group) -> Tensor:
            draw = keys.key(fed.seed, "placebo", group.block, fed.round) if self.placebo == "random-clusters" else None
            mean, result[group.block] = consensus(group, self.density, self.agreement, draw)
            return mean

        apart = {name for name in trainable if block_of(name) != SHARED}
        mean = replies.mean("params", weights) | combined(replies, "params", weights, state.params, rule, apart)
        params, moments = self.server.apply(state.params, mean, state.moments, trainable)
        return state.with_(params=params, moments=moments, clusters=result)

    @override
    def observe(self, state: ChainState) -> dict[str, float]:
        return super().observe(state) | {f"clusters.{m}": float(num) for m, num in state.clusters.items()}

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        found = {num for one in logged for name, num in one.items() if name.startswith("clusters.")}
        if found != {1.0}:
            return []
        return [
            f"agreement = {self.agreement:g}: so far the updates of each modality have been one cluster in each round, "
            "so it changes nothing. Raise it to have more"
        ]

    # the clients

    @task()
    @override
    def update(  # type: ignore[override]
        self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast
    ) -> tuple[Update, Tree]:
        """Train the client's modalities in the phases of its chain."""
        params, losses, train = got.params, list[Tensor](), self.train
        chain_of = self._chain(context)
        chain: list[str | None] = [*chain_of] if self.phases == "chain" else [None]
        if self.phases == "chain" and self.placebo == "random-phases":
            train, chain = _longer(train, len(chain)), [None]
        for place, modality in enumerate(chain):
            fit = data.minimise(
                self._loss_of(context, modality),
                params,
                train=train,
                only=None if modality is None else (modality, SHARED),
                passes=self._passes(modality, len(chain_of)),
                stream=PHASES + place - 1 if place else 0,
            )
            params = fit.params
            losses.append(fit.loss)
        return Update(params, torch.stack(losses).mean(), data.num_rows), local

    def _passes(self, modality: str | None, num: int) -> Passes:
        """What `_of_phase` computes: the modality alone, and with `compensation` once more with all others."""
        if self.phases == "joint":
            return ONCE
        again = TRAINING_PASSES if self.compensation else 0
        if modality is not None:
            return Passes(others=1, together=again)
        # a term for each of `num` modalities; `whole` has one pass of the fusion already
        return Passes(singly=TRAINING_PASSES, together=again * num - TRAINING_PASSES)

    def _chain(self, context: ClientContext) -> list[str]:
        """Return the client's modalities in the order of its phases."""
        named = [m for m in self.order if m in context.modalities]
        return named + [m for m in context.modalities if m not in named]

    def _loss_of(self, context: ClientContext, modality: str | None) -> Callable[[Tree, Batch], Tensor]:
        """Return the loss of a phase, or of all modalities at once if it is of none."""
        if self.phases == "joint":
            return context.loss

        def loss(w: Tree, batch: Batch) -> Tensor:
            if modality is not None:
                w = alone(w, modality)  # no gradient reaches the other encoders, so none is prepared
                return self._of_phase(context, w, batch, context.model.features(w, batch), modality)
            z = context.model.features(w, batch)
            assert batch.key is not None, "a batch of local training has a key"
            place = (keys.uniform(keys.fold_in(batch.key, DRAWN), 1)[0] * len(z)).floor()
            terms = [self._of_phase(context, alone(w, m), batch, z, m) for m in z]
            return torch.stack([torch.where(place == i, term, 0.0) for i, term in enumerate(terms)]).sum()

        return loss

    def _of_phase(
        self, context: ClientContext, w: Tree, batch: Batch, features: Mapping[str, Tensor], modality: str
    ) -> Tensor:
        """Return the loss of a modality alone and, weighted, that of the prediction in which all others are constant.

        Both cover the rows that have the modality. The gradient of the second reaches the modality through what the
        whole prediction still gets wrong: its probabilities minus the labels.
        """
        rows = replace(batch, ok=there(batch, modality)) if modality in batch.present else batch
        own = context.objective.loss(context.model.unimodal_logits(w, features, modality, batch, "zero"), rows)
        if len(features) < 2 or not self.compensation:
            return own
        fixed = {m: z if m == modality else z.detach() for m, z in features.items()}
        return own + self.compensation * context.objective.loss(context.model.fuse(w, fixed, batch), rows)


def alone(w: Tree, modality: str) -> Tree:
    """Return a Tree in which only the block of a modality and `shared` carry gradients."""
    return {name: value if block_of(name) in (modality, SHARED) else value.detach() for name, value in w.items()}


def consensus(group: Group, density: float, agreement: float, draw: int | None = None) -> tuple[Tensor, int]:
    """Combine the updates of a modality by SSCA.

    Args:
        group: the trained values, weights and values before training.
        density: see `FedMChain`.
        agreement: see `FedMChain`.
        draw: the key with which clients are dealt to the clusters at random; None for the method.

    Returns:
        The combined values (P,), and the number of clusters.
    """
    updates = sparse(group.values - group.centre, density)
    places = clustered(agreements(updates), agreement)
    num = int(places.max()) + 1
    if draw is not None:
        places = places[keys.permutation(draw, len(places))]
    of = torch.zeros(num, len(places), dtype=updates.dtype, device=updates.device)
    of[places.to(updates.device), torch.arange(len(places), device=updates.device)] = group.weights.to(updates)
    share = of.sum(1, keepdim=True)
    means = of @ updates / share
    elected = torch.sign((share * means).sum(0))
    with_it = share * ((torch.sign(means) == elected) & (elected != 0))
    total = with_it.sum(0)
    step = (with_it * means).sum(0) / torch.where(total > 0, total, 1.0)
    return group.centre + step, num


def sparse(updates_KP: Tensor, density: float) -> Tensor:
    """Return updates in which the entries below each row's `density` largest sizes are zero."""
    num = updates_KP.shape[1]
    least = updates_KP.abs().kthvalue(num - max(1, math.ceil(density * num)) + 1, 1, keepdim=True).values
    return torch.where(updates_KP.abs() >= least, updates_KP, 0.0)


def agreements(updates_KP: Tensor) -> Tensor:
    """Return how far the signs of each two updates agree, float64 (K, K), from -1 to 1.

    It is the number of equal signs minus that of opposite ones, over the entries that are not zero in both, divided by
    the number of these entries; 0 without any.
    """
    same, both = (torch.zeros(len(updates_KP), len(updates_KP), dtype=torch.float64) for _ in range(2))
    for start in range(0, updates_KP.shape[1], CHUNK):  # exact in float32, because a chunk has less than 2^24 entries
        signs = torch.sign(updates_KP[:, start : start + CHUNK]).float()
        same += (signs @ signs.T).double().cpu()
        both += (signs.abs() @ signs.abs().T).double().cpu()
    return same / both.clamp(min=1)


def clustered(agreement_KK: Tensor, least: float) -> Tensor:
    """Return the cluster of each client, int64 (K,): clients that agree, directly or through others, share one."""
    _, places = connected_components((agreement_KK >= least).numpy(), directed=False)
    return torch.from_numpy(places.astype(np.int64))


def _longer(train: Train, times: int) -> Train:
    """Return options of training with so many times the epochs or steps."""
    return replace(train, epochs=train.epochs * times, steps=None if train.steps is None else train.steps * times)
