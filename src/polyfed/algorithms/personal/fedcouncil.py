"""FedCouncil: every client predicts with a mixture of global, own and uni-modal models, weighed by its held-out rows.

polyfed's own method; it has no paper. Beside a *composed* global model, to which server momentum, losses of single
modalities, modulated gradients, modality dropout and private blocks can be added, the clients train the model of FedAvg
(the *anchor*) and, each alone, the model of Local. Each model, each uniform mean of several models' probabilities, and
each model from a single modality is an *expert*. With the prior pi over experts and the likelihood
L_t(e) = p_e(y_1 | x_1) ... p_e(y_t | x_t) of the first t of a client's n held-out rows, the weight of expert e is

    w(e) = 1 / (n + 1) sum_{t=0}^{n} pi(e) L_t(e) / sum_f pi(f) L_t(f)

the mean over t of the Bayesian posteriors (the progressive mixture; Catoni, "Statistical Learning Theory and Stochastic
Optimization", 2004; Yang, "Mixing Strategies for Density Estimation", Annals of Statistics 28(1), 2000). In expectation
over held-out rows that are distributed as new rows, its log loss on a new row is at most that of any expert e plus
log(1 / pi(e)) / (n + 1); docs/algorithms/fedcouncil.md derives this. Each subset of the modalities has its own weights.

The messages are those of FedAvg, with two models instead of one. Own models and weights never leave the client.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State
from polyfed.algorithms.averaging.private_blocks import TUNE_STREAM, epochs_of, personal
from polyfed.algorithms.modalities.fedogm import coefficient, modality_score
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import (
    BELOW_ONE,
    NOT_NEGATIVE,
    PLACEBO,
    POSITIVE,
    NotSearched,
    SearchRange,
)
from polyfed.core.problems import Conflict
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, block_of, nested, under
from polyfed.evaluation.scores import Measured, ModelToEvaluate, Predictor
from polyfed.federation.aggregation import ServerOptimiser, aggregate
from polyfed.federation.client_registry import VALIDATION
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import TRAINING_PASSES, Direction, Passes
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import there

ANCHOR, ADAPTED, ADAPTED_ANCHOR, OWN, WEIGHTS = "@anchor", "@adapted", "@adapted-anchor", "@own", "@weights"
"""Names in the tree with which a client predicts: the prefixes of the model of FedAvg, of the client's trained copies
of the composed model and of the anchor, and of its own model, and the weights. The composed model has the plain
names."""

TEMPERATURES = (1.0, 2.0, 4.0)
"""What the logits of an expert are divided by; each is an expert of its own, because networks are overconfident."""

Prior = Literal["flat", "global"]

Placebo = Literal["none", "random", "momentum", "own", "adapted", "unimodal", "modality_loss", "modulation", "dropout"]

TWIN_STREAM = 1005
"""The random stream of the anchor's batches where the composed model is a second model of FedAvg."""

_LEFT_OUT = keys.key("council row left out")

MOST = 6
"""The largest number of modalities for which every subset has weights of its own."""

AT_ONCE = 64
"""Rows of a batch in which experts are weighed; a row has a number for each expert and subset."""

FLOOR = -1e4
"""The smallest log probability; a model with parameters that are not finite has this one."""


@message
class BothModels(Message):
    """The composed global model and that of FedAvg, which is empty if it is not trained."""

    params: Tree = carries("parameters")
    anchor: Tree = carries("parameters", optional=True)


@message
class BothTrained(Message):
    """Both models after local training, the mean loss of the composed one, and the number of rows."""

    params: Tree = carries("parameters", sum_only=True, weight="num_rows")
    anchor: Tree = carries("parameters", sum_only=True, weight="num_rows")
    loss: Tensor = carries("statistic", dtype="float32", sum_only=True, weight="num_rows")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, sum_only=True)


@message
class Weighed(Message):
    """Confirms that the client has weighed its models. Has no fields."""


@dataclass(frozen=True)
class CouncilState(State):
    """Server state.

    Attributes:
        anchor: the model of FedAvg; empty if it is not trained.
        anchor_leads: whether it is the global model: until the server's validation rows prefer the composed one.
        weighed: the round in which clients last weighed their models.
        adapted: whether they adapted the global models before that.
    """

    anchor: Tree = field(default_factory=dict)
    anchor_leads: bool = True
    weighed: int = 0
    adapted: bool = False


@dataclass(frozen=True)
class Experts:
    """The experts as distributions over *atoms*: a model j, a view v (all modalities, or one), a temperature t.

    Attributes:
        num_models: J; the first `num_global` of them are global models.
        num_global: how many models are the same for all clients.
        num_views: V: 1, or 1 plus the number of modalities.
        num_temperatures: T.
    """

    num_models: int
    num_global: int
    num_views: int
    num_temperatures: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (J, V, T) of the atoms."""
        return self.num_models, self.num_views, self.num_temperatures

    @cached_property
    def _listed(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Return (models, view, temperature) of each expert: means of models from all modalities, then single views."""
        models = range(self.num_models)
        means = [several for size in range(1, len(models) + 1) for several in combinations(models, size)]
        whole = [(several, 0, t) for several in means for t in range(self.num_temperatures)]
        alone = [((j,), v, t) for j in models for v in range(1, self.num_views) for t in range(self.num_temperatures)]
        return whole + alone

    @cached_property
    def matrix(self) -> Tensor:
        """The weights of the atoms in each expert, float64 (E, J * V * T); each row adds up to 1."""
        result = torch.zeros(len(self._listed), *self.shape, dtype=torch.float64)
        for place, (several, view, t) in enumerate(self._listed):
            result[place, list(several), view, t] = 1 / len(several)
        return result.flatten(1)

    def log_likelihoods(self, atoms: Tensor) -> Tensor:
        """Return the log probabilities (..., E) that the experts give, from those of the atoms (..., J, V, T)."""
        size = len(self._listed) - self.num_models * (self.num_views - 1) * self.num_temperatures
        means = self.matrix[:size].view(-1, self.num_temperatures, *self.shape)[:, 0, :, 0, 0].log().to(atoms)
        whole = (atoms[..., None, :, 0, :] + means.unsqueeze(-1)).logsumexp(-2)
        return torch.cat([whole.flatten(-2), atoms[..., 1:, :].flatten(-3)], -1)

    def prior(self, views: Sequence[int], towards: Prior = "flat") -> Tensor:
        """Return pi, float64 (E,).

        Args:
            views: the single modalities, numbered from 1, whose predictions count; the experts of others have 0.
            towards: `flat`, the same for all experts, or `global`: half for the global models alone at temperature 1,
                and half for all others.
        """
        allowed = [view == 0 or view in views for _, view, _ in self._listed]
        head = [len(m) == 1 and m[0] < self.num_global and v == 0 and t == 0 for m, v, t in self._listed]
        rest = sum(allowed) - sum(head)
        share = 0.5 if rest else 1.0
        if towards == "flat":
            share = sum(head) / sum(allowed)
        values = [
            share / sum(head) if h else (1 - share) / max(rest, 1) * a for a, h in zip(allowed, head, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64)


def unless_diverged(trained: Tree, before: Tree) -> Tree:
    """Return the trained parameters if all are finite, else those before. It runs under vmap."""
    real = [value for value in trained.values() if value.is_floating_point()]
    finite = torch.stack([value.isfinite().all() for value in real]).all()
    return {name: torch.where(finite, value, before[name]) for name, value in trained.items()}


def class_frequencies(context: ClientContext, w: Tree, batch: Batch) -> Tensor:
    """Return the mean loss over all ways to shuffle the labels of the batch: of its rows, only these can be learned."""
    out = context.model.logits(w, batch)
    classes = torch.arange(out.shape[-1], device=out.device).view(-1, 1).expand(-1, len(batch.y))
    rows = torch.ones_like(batch.y, dtype=torch.bool) if batch.ok is None else batch.ok
    share = ((classes == batch.y) & rows).sum(1) / rows.sum().clamp(min=1)
    each = torch.stack([context.objective.loss(out, replace(batch, y=label)) for label in classes])
    return (share * each).sum()


def fused(model: Model, members: Sequence[Tree], features: Sequence[Mapping[str, Tensor]], batch: Batch) -> Tensor:
    """Return the logits (B, J, 1, C) of each model from its features."""
    result = [model.fuse(tree, z, batch) for tree, z in zip(members, features, strict=True)]
    return torch.stack(result, 1).unsqueeze(2)


@dataclass(frozen=True)
class Council(Predictor):
    """Predicts with the weighted mean of the probabilities of all models in the tree.

    Attributes:
        unimodal: whether predictions from single modalities count.
        calibrated: whether the temperatures `TEMPERATURES` count, or only 1.
        prior: the prior over experts; see `Experts.prior`.
        blind: for the placebo: predictions from single modalities read zeros instead of embeddings.
    """

    unimodal: bool = True
    calibrated: bool = True
    prior: Prior = "flat"
    blind: bool = False

    @override
    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Return the logarithm of the mixed probabilities (B, C). A row is predicted with the weights of its subset."""
        members = self.members(w)
        features = [model.features(tree, batch) for tree in members]
        logits = torch.cat([fused(model, members, features, batch), self.singly(model, members, features, batch)], 2)
        weights = w[WEIGHTS][self._places(model, batch, len(w[WEIGHTS]))].unsqueeze(-1)
        terms = torch.where(weights > 0, self.log_probabilities(logits) + weights.clamp(min=1e-30).log(), -math.inf)
        return terms.flatten(1, 3).logsumexp(1)

    def experts(self, model: Model, w: Mapping[str, Tensor]) -> Experts:
        """Return the experts of a client with these models."""
        views = 1 + len(model.modalities) if self.unimodal and len(model.modalities) > 1 else 1
        members = self.members(w)
        return Experts(len(members), 1 + bool(under(ANCHOR, w)), views, len(self._temperatures))

    def first(self, model: Model, w: Mapping[str, Tensor]) -> Tensor:
        """Return the weights (2^M, J, V, T) of a client without held-out rows: it predicts with the first model."""
        table = torch.zeros(
            2 ** len(model.modalities) if len(model.modalities) <= MOST else 1, *self.experts(model, w).shape
        )
        table[:, 0, 0, 0] = 1.0
        return table

    def weighed(self, context: ClientContext, w: Tree, data: ClientData) -> Tensor:
        """Return the weights (2^M, J, V, T) after the client's held-out rows. It runs under vmap.

        Args:
            context: the client's context.
            w: the models.
            data: the held-out rows.
        """
        model, members, table = context.model, self.members(w), self.first(context.model, w)
        experts, subsets = self.experts(model, w), list(self._subsets(context))
        device = data.num_rows.device
        matrix, table = experts.matrix.to(device), table.to(device)
        prior = torch.stack([experts.prior(self._views(model, s), self.prior) for s in subsets]).to(device)

        def step(carry: tuple[Tensor, Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            likelihood, total, count = carry
            features = [model.features(tree, batch) for tree in members]
            alone = self._of_the_label(self.singly(model, members, features, batch), batch)
            rows, found = [], []
            for subset in subsets:
                own = [{m: z[m] for m in subset} for z in features]
                whole = self._of_the_label(fused(model, members, own, batch), batch)
                found.append(experts.log_likelihoods(torch.cat([whole, alone], 2)))
                rows.append(self._counted(model, batch, subset).unsqueeze(-1))
            each, real = torch.stack(found, 1), torch.stack(rows, 1)  # (B, S, E), (B, S, 1)
            after = likelihood + torch.where(real, each, 0.0).cumsum(0)
            posterior = (prior.log() + after).softmax(-1)
            return after[-1], total + torch.where(real, posterior, 0.0).sum(0), count + real.sum(0)

        zero = torch.zeros_like(prior)
        start = (zero, zero, torch.zeros(len(subsets), 1, dtype=torch.int64, device=device))
        _, total, count = data.fold(step, start, batch_size=AT_ONCE)
        return self._placed(context, table, (prior + total) / (count + 1), count, matrix)

    def drawn(self, context: ClientContext, w: Tree, data: ClientData, key: int | Tensor) -> Tensor:
        """Return weights for the placebo: uniform over the simplex of the experts, whatever the held-out rows say."""
        experts, subsets = self.experts(context.model, w), list(self._subsets(context))
        device = data.num_rows.device
        prior = torch.stack([experts.prior(self._views(context.model, s)) for s in subsets]).to(device)
        draws = -torch.log1p(-keys.uniform(key, tuple(prior.shape), device)).double()
        weights = torch.where(prior > 0, draws, 0.0)
        count = data.num_rows.expand(len(subsets), 1)
        table = self.first(context.model, w).to(device)
        return self._placed(context, table, weights / weights.sum(-1, keepdim=True), count, experts.matrix.to(device))

    def members(self, w: Mapping[str, Tensor]) -> list[Tree]:
        """Return the models that a tree has: anchor, composed model, adapted copies of both, own model."""
        composed = {name: value for name, value in w.items() if not name.startswith("@")}
        result = [under(ANCHOR, w), composed, *(under(prefix, w) for prefix in (ADAPTED, ADAPTED_ANCHOR, OWN))]
        return [tree for tree in result if tree]

    def singly(
        self, model: Model, members: Sequence[Tree], features: Sequence[Mapping[str, Tensor]], batch: Batch
    ) -> Tensor:
        """Return the logits of each model from each modality alone, (B, J, V - 1, C), 0 for an absent one."""
        none = torch.zeros(len(batch.y), len(members), 0, model.num_classes, device=batch.y.device)
        if not self.unimodal or len(model.modalities) < 2:
            return none
        absent = torch.zeros(len(batch.y), len(members), 1, model.num_classes, device=batch.y.device)
        own = {m: [{m: torch.zeros_like(z[m]) if self.blind else z[m]} for z in features] for m in features[0]}
        return torch.cat([fused(model, members, own[m], batch) if m in own else absent for m in model.modalities], 2)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return the log probabilities (B, J, V, T, C), no smaller than `FLOOR`, of logits (B, J, V, C)."""
        result = torch.stack([(logits / heat).log_softmax(-1) for heat in self._temperatures], 3)
        return torch.nan_to_num(result, nan=FLOOR).clamp(min=FLOOR)

    def _of_the_label(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the log probabilities of the rows' classes, float64 (B, J, V, T), of logits (B, J, V, C)."""
        log_p = self.log_probabilities(logits)
        labels = batch.y.view(-1, 1, 1, 1, 1).expand(*log_p.shape[:-1], 1)
        return log_p.gather(-1, labels).squeeze(-1).double()

    @property
    def _temperatures(self) -> tuple[float, ...]:
        return TEMPERATURES if self.calibrated else TEMPERATURES[:1]

    def _subsets(self, context: ClientContext) -> Iterator[tuple[str, ...]]:
        """Yield the subsets of the client's modalities that have weights of their own."""
        names = [m for m in context.model.modalities if m in context.modalities]
        if len(context.model.modalities) > MOST:
            yield tuple(names)
            return
        for size in range(1, len(names) + 1):
            yield from combinations(names, size)

    def _views(self, model: Model, subset: Sequence[str]) -> list[int]:
        """Return the numbers of the single modalities that count beside a subset; a subset of one is one already."""
        return [1 + place for place, m in enumerate(model.modalities) if m in subset] if len(subset) > 1 else []

    def _counted(self, model: Model, batch: Batch, subset: Sequence[str]) -> Tensor:
        """Return which rows have the whole subset, bool (B,); all real rows if all subsets have the same weights."""
        real = torch.ones_like(batch.y, dtype=torch.bool) if batch.ok is None else batch.ok
        if len(model.modalities) > MOST:
            return real
        return torch.stack([real, *(there(batch, m) for m in subset)]).all(0)

    def _places(self, model: Model, batch: Batch, size: int) -> Tensor:
        """Return the place of each row's subset in the table of weights, int64 (B,)."""
        result = torch.zeros_like(batch.y)
        if size > 1:
            for place, m in enumerate(model.modalities):
                if m in batch.x:
                    result = result + 2**place * batch.present.get(m, torch.ones_like(result)).to(result)
        return result

    def _placed(self, context: ClientContext, table: Tensor, weights: Tensor, count: Tensor, matrix: Tensor) -> Tensor:
        """Return the table with the experts' weights (S, E) of the client's subsets, where rows were counted."""
        atoms = (weights @ matrix).view(-1, *table.shape[1:]).to(table.dtype)
        result = list(table)
        for number, subset in enumerate(self._subsets(context)):
            place = sum(2**p for p, m in enumerate(context.model.modalities) if m in subset) if len(result) > 1 else 0
            result[place] = torch.where(count[number] > 0, atoms[number], result[place])
        return torch.stack(result)


@dataclass(frozen=True, kw_only=True)
class FedCouncil(Averaging[CouncilState]):
    """A mixture of global, own and uni-modal models for each client. With everything switched off, it is FedAvg.

    Attributes:
        momentum: momentum of the server for the composed model, as in FedAvgM; 0 for none. Another optimiser in
            [server] replaces it.
        momentum_lr: the server's learning rate beside it.
        modality_loss: weight of the mean loss of the single modalities in the training of the composed model.
        modulation: strength of FedOGM's modulation of its encoders' gradients; 0 for none.
        dropout: probability with which a row loses a modality in its training, as in [train] modality_dropout.
        anchor: whether the model of FedAvg is trained beside the composed one, and leads until the server's validation
            rows prefer that one.
        own: whether each client trains a model alone, as in Local.
        adapted: epochs in which every client trains copies of both global models after the last round, as in FedAvg
            with fine-tuning; before, the copies are those of its last local training.
        unimodal: whether predictions from single modalities take part in the mixture.
        calibrated: whether flattened probabilities (temperatures 2 and 4) take part.
        prior: the weights before the first held-out row: `flat`, the same for all experts, or `global`, half for the
            global models.
        placebo: a control of the same cost: with `random`, clients draw their weights at random. The others make the
            ingredient of that name useless. `momentum`: the composed model is a second one of FedAvg, from other
            batches than the first. `own`, `adapted`: these models learn the frequencies of the classes only.
            `unimodal`: predictions from single modalities read zeros. `modality_loss`: the loss of all modalities
            counts again. `modulation`: all factors are their mean. `dropout`: a row is left out instead of one of its
            modalities. `none` is the method.
    """

    momentum: Annotated[float, BELOW_ONE, SearchRange(0.0, 0.5, 0.9, fedavg=0.0)] = 0.9
    momentum_lr: Annotated[float, POSITIVE, SearchRange(0.1, 0.3, 1.0, beside=("momentum", 0.5, 0.9))] = 0.3
    modality_loss: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.3, 1.0, fedavg=0.0)] = 0.0
    modulation: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.3, 0.8, fedavg=0.0)] = 0.0
    dropout: Annotated[float, BELOW_ONE, SearchRange(0.0, 0.2, 0.5, fedavg=0.0)] = 0.0
    anchor: Annotated[bool, NotSearched("the promise rests on it")] = True
    own: Annotated[bool, SearchRange(True, False, fedavg=False)] = True
    adapted: Annotated[int, NOT_NEGATIVE, SearchRange(0, 2, 5, fedavg=0)] = 2
    unimodal: Annotated[bool, SearchRange(True, False, fedavg=False)] = True
    calibrated: Annotated[bool, NotSearched("costs nothing")] = True
    prior: Annotated[Prior, SearchRange("flat", "global")] = "flat"
    placebo: Annotated[Placebo, PLACEBO] = "none"

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"clients": {"validation": 0.2}}
    sends: ClassVar[type[Message]] = BothModels
    replies: ClassVar[type[Message]] = BothTrained
    evaluates: ClassVar[type[Message]] = BothModels
    completes_private: ClassVar[bool] = True
    only_evaluates: ClassVar[tuple[str, ...]] = ("weigh",)
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "it mixes probabilities of classes"
    captions: ClassVar[Mapping[str, str]] = {
        "anchor_leads": "1 while the model of FedAvg is the global model, 0 while the composed one is.",
    }
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("evaluate", "conformal"),
            when=lambda recipe: recipe.algorithm.evaluation.conformal != "none",
            because="its clients choose their mixtures by the same validation rows, so no promise would hold",
            instead="Remove conformal, or take a method that reads no validation rows",
        ),
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range, or private blocks would have to be sent.
        """
        super().__post_init__()
        if self.private and self.keeps_anchor:
            raise RecipeError(
                f"[algorithm] private = {list(self.private)}: clients send every block of the model of FedAvg. Set "
                "anchor = false",
                ("algorithm", "private"),
            )

    # what is switched on

    @property
    def composed_server(self) -> ServerOptimiser:
        """How the server updates the composed model."""
        if not self.momentum or self.server.optimiser != "none" or self.twins:
            return self.server
        return replace(self.server, optimiser="avgm", momentum=self.momentum, lr=self.momentum_lr)

    @property
    def plain_server(self) -> ServerOptimiser:
        """How the server updates the model of FedAvg."""
        return self.server if self.server.optimiser == "none" else replace(self.server, optimiser="none", lr=1.0)

    @property
    def twins(self) -> bool:
        """Whether, as the placebo of the momentum, the composed model is a second one of FedAvg."""
        return self.placebo == "momentum" and self.momentum > 0 and self.server.optimiser == "none"

    @property
    def keeps_anchor(self) -> bool:
        """Whether the model of FedAvg is trained beside the composed one, which would otherwise be the same."""
        changed = self.composed_server != self.plain_server or self.twins
        return self.anchor and bool(changed or self.modality_loss or self.modulation or self.dropout)

    @property
    @override
    def needs_own_validation(self) -> bool:
        return bool(self.keeps_anchor or self.own or self.adapted or self.unimodal)

    @property
    @override
    def local_train(self) -> Train:
        drops = self.dropout and self.placebo != "dropout"
        return replace(self.train, modality_dropout=self.dropout) if drops else self.train

    @property
    @override
    def mixing(self) -> str:  # type: ignore[override]
        why = "fedcouncil scales the gradient of each modality by the scores of all others; modulation = 0 avoids this"
        return why if self.modulation else ""

    @property
    @override
    def own_models(self) -> Literal["none", "clients"]:
        return "clients" if self.needs_own_validation or self.private else "none"

    @property
    def council(self) -> Council:
        """What mixes the models."""
        return Council(self.unimodal, self.calibrated, self.prior, blind=self.placebo == "unimodal")

    @property
    @override
    def predictor(self) -> Predictor:
        return self.council if self.needs_own_validation else Predictor()

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        several = ("modality_loss", "modulation", "dropout", "unimodal")
        if not bool((fed.clients.holds.sum(1) > 1).any()):
            result |= dict.fromkeys(several, "clients that have one modality each")
        if self.server.optimiser != "none":
            result |= dict.fromkeys(("momentum", "momentum_lr"), f"[server] optimiser = '{self.server.optimiser}'")
        elif not self.momentum:
            result["momentum_lr"] = "momentum = 0"
        if not self.needs_own_validation:
            result |= dict.fromkeys(("calibrated", "prior", "placebo"), "a single model for all clients")
        elif self.placebo not in ("none", "random") and not getattr(self, self.placebo):
            result["placebo"] = f"{self.placebo}, which it replaces, switched off"
        if self.anchor and not self.keeps_anchor:
            result["anchor"] = "a composed model that is the one of FedAvg"
        return result

    # the server

    @override
    def init(self, fed: Federation, params: Tree) -> CouncilState:
        state = super().init(fed, params)
        moments = self.composed_server.moments(fed.context.model.trainable(state.params))
        return CouncilState(**vars(state) | {"moments": moments}, anchor=dict(params) if self.keeps_anchor else {})

    @override
    def round(self, state: CouncilState, fed: Federation) -> CouncilState:
        """Run a round of both models. If it is evaluated, choose the global model, and let all clients weigh theirs."""
        after: CouncilState = super().round(state, fed)
        if not self.evaluation.due(fed.round, fed.rounds):
            return after
        return self._weighed(after.with_(anchor_leads=self._anchor_leads(after, fed)), fed)

    @override
    def outgoing(self, state: CouncilState, cohort: list[int], fed: Federation) -> BothModels:
        return BothModels(state.params, state.anchor)

    @override
    def merge(self, state: CouncilState, replies: Replies, fed: Federation) -> CouncilState:
        trainable, weights = fed.context.model.trainable, self.selector.weigh(state.memory, self.weights(replies, fed))
        mean = aggregate(replies, "params", weights, state.params, self.server)
        params, moments = self.composed_server.apply(state.params, mean, state.moments, trainable(state.params))
        anchor = state.anchor
        if anchor:
            mean = aggregate(replies, "anchor", weights, anchor, self.server)
            anchor, _ = self.plain_server.apply(anchor, mean, {}, trainable(anchor))
        return state.with_(params=params, moments=moments, anchor=anchor)

    @override
    def weight_of(self, field: str, kind: type[Message]) -> str | None:
        return None if field == "anchor" and self.aggregation == "uniform" else super().weight_of(field, kind)

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        return field != "anchor" or self.keeps_anchor

    @override
    def observe(self, state: CouncilState) -> dict[str, float]:
        return {"anchor_leads": float(state.anchor_leads)} if self.keeps_anchor else {}

    @override
    def evaluate(self, state: CouncilState, fed: Federation) -> Measured:
        weighed = state.weighed == fed.round and (state.adapted or fed.round < fed.rounds)
        return super().evaluate(state if weighed else self._weighed(state, fed), fed)

    @property
    @override
    def evaluates_more_at_end(self) -> bool:
        return bool(self.adapted)

    @override
    def global_params(self, state: CouncilState) -> Tree | None:
        if self.private:
            return None
        return state.anchor if state.anchor and state.anchor_leads else state.params

    @override
    def evaluation_message(self, state: CouncilState, fed: Federation, clients: Sequence[int]) -> BothModels:
        return BothModels(state.params, state.anchor)

    def _weighed(self, state: CouncilState, fed: Federation) -> CouncilState:
        """Have all clients with validation rows weigh their models, after the last round with copies of the newest."""
        if self.needs_own_validation and fed.clients.validated:
            send = BothModels(state.params, state.anchor)
            fed.ask(self.weigh, list(fed.clients.validated), send, quorum=False, held_out="validation")
        return state.with_(weighed=fed.round, adapted=fed.round == fed.rounds)

    def _anchor_leads(self, state: CouncilState, fed: Federation) -> bool:
        """Return whether the server's validation rows prefer the model of FedAvg; without any, it leads."""
        if not state.anchor or VALIDATION not in fed.evaluation_clients:
            return bool(state.anchor)
        result: list[float] = []
        for tree in (state.anchor, state.params):
            replies = fed.ask(self.score, [VALIDATION], ModelToEvaluate(tree, {}, {}), quorum=False)
            known = self.measured(replies[VALIDATION], fed)[0] if VALIDATION in replies else {}
            result.append(known.get(fed.context.objective.BEST, -math.inf))
        return result[0] > result[1]

    # the clients

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        copies = (ADAPTED, ADAPTED_ANCHOR) if self.keeps_anchor else (ADAPTED,)
        prefixes = (*(copies if self.adapted else ()), *((OWN,) if self.own else ()))
        result = {n: v for prefix in prefixes for n, v in nested(prefix, context.initial).items()}
        if self.needs_own_validation:
            anchor = nested(ANCHOR, context.initial) if self.keeps_anchor else {}
            result[WEIGHTS] = self.council.first(context.model, context.initial | anchor | result)
        return result

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: BothModels, local: Tree) -> Any:
        """Return the loss of the composed model, and for the modulation each modality's score."""
        if len(context.modalities) > 1 and self.dropout and self.placebo == "dropout":
            batch = self._without_rows(batch)
        if len(context.modalities) < 2 or not (self.modality_loss or self.modulation):
            return super().loss(context, w, batch, got, local)
        model, features = context.model, context.model.features(w, batch)
        error = context.loss(w, batch, features)
        with torch.set_grad_enabled(self.modality_loss > 0):
            alone = {m: model.fuse(w, {m: z}, batch) for m, z in features.items()}
        if self.modality_loss:
            terms = [context.objective.loss(out, replace(batch, ok=there(batch, m))) for m, out in alone.items()]
            if self.placebo == "modality_loss":
                terms = [context.objective.loss(model.fuse(w, features, batch), batch) for _ in alone]
            error = error + self.modality_loss * torch.stack(terms).mean()
        if not self.modulation:
            return error
        return error, {m: modality_score(out.detach(), batch, m) for m, out in alone.items()}

    def _without_rows(self, batch: Batch) -> Batch:
        """Return the batch with rows left out as often as `dropout` takes a modality from a row."""
        assert batch.key is not None, "only batches of a training lose rows"
        draws = keys.uniform(keys.fold_in(batch.key, _LEFT_OUT), batch.y.shape[0], batch.y.device)
        kept = draws >= self.dropout
        return replace(batch, ok=kept if batch.ok is None else batch.ok & kept)

    @property
    @override
    def passes(self) -> Passes:
        return Passes(singly=TRAINING_PASSES if self.modality_loss else bool(self.modulation))

    @override
    def direction(
        self, context: ClientContext, data: ClientData, got: BothModels, local: Tree
    ) -> tuple[Direction, Tree] | None:
        if len(context.modalities) < 2 or not self.modulation:
            return None
        head = set(context.model.head())
        trained = context.model.trainable(got.params)
        encoders = [n for n, v in trained.items() if n not in head and v.dim() >= 2]

        def modulate(grads: Tree, w: Tree, scores: Mapping[str, Tensor], carry: Tree) -> tuple[Tree, Tree]:
            scale = {m: coefficient(m, scores, self.modulation) for m in scores}
            if self.placebo == "modulation":
                scale = dict.fromkeys(scale, torch.stack([*scale.values()]).mean())
            return {**grads, **{n: grads[n] * scale[block_of(n)] for n in encoders if n in grads}}, carry

        return modulate, {}

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: BothModels, local: Tree
    ) -> tuple[BothTrained, Tree]:
        """Train the anchor and the own model as FedAvg and Local do, on the same batches, and keep what is private.

        A composed or own model that diverges stays as it was, so that the others go on.
        """

        def trained(start: Tree, ingredient: str, stream: int = 0) -> TrainingResult:
            return data.minimise(self._loss_of(ingredient, context), start, train=self.train, stream=stream)

        params, loss, anchor, after = fit.params, fit.loss, Tree(), dict(local)
        if self.keeps_anchor:
            plain = trained(got.anchor, "anchor", TWIN_STREAM if self.twins else 0)
            params, anchor = unless_diverged(params, got.params), plain.params
            loss = torch.where(loss.isfinite(), loss, plain.loss)
        if self.own:
            before = under(OWN, local)
            after |= nested(OWN, unless_diverged(trained(before, "own").params, before))
        if self.adapted:
            after |= nested(ADAPTED, params) | nested(ADAPTED_ANCHOR, anchor)
        return BothTrained(params, anchor, loss, data.num_rows), after

    @override
    def own_params(self, got: BothModels, local: Tree) -> Tree:
        composed = personal(got.params, local)
        if not self.needs_own_validation:
            return composed
        kept = {n: v for n, v in local.items() if block_of(n) in (ADAPTED, ADAPTED_ANCHOR, OWN, WEIGHTS)}
        return composed | nested(ANCHOR, got.anchor) | kept

    @task()
    def weigh(self, context: ClientContext, data: ClientData, local: Tree, got: BothModels) -> tuple[Weighed, Tree]:
        """Weigh the experts by the client's validation rows. Nothing of it leaves."""
        if self.adapted and data.round == data.rounds:
            composed = personal(got.params, local)
            copies = [(ADAPTED, composed), (ADAPTED_ANCHOR, got.anchor)]
            local = local | {n: v for prefix, start in copies for n, v in self._copy(context, data, prefix, start)}
        w = self.own_params(got, local)
        if self.placebo == "random":
            table = self.council.drawn(context, w, data.test, data.draw("council-placebo"))
        else:
            table = self.council.weighed(context, w, data.test)
        return Weighed(), local | {WEIGHTS: table}

    def _copy(self, context: ClientContext, data: ClientData, prefix: str, start: Tree) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of a copy of a global model after fine-tuning; nothing if there is no model."""
        if start:
            train, loss = epochs_of(self.train, self.adapted), self._loss_of("adapted", context)
            tuned = data.minimise(loss, start, train=train, stream=TUNE_STREAM).params
            yield from nested(prefix, unless_diverged(tuned, start)).items()

    def _loss_of(self, ingredient: str, context: ClientContext) -> Callable[[Tree, Batch], Tensor]:
        """Return the loss of a model that is not composed; in its placebo, it learns the frequencies of the classes."""
        if self.placebo == ingredient:
            return lambda w, batch: class_frequencies(context, w, batch)
        return lambda w, batch: context.loss(w, batch)
