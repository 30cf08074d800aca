"""CMSFed: a method that selects modalities of clients instead of whole clients.

Fan, Xu, Wang, Huo, Chen, Guo, "Overcome Modal Bias in Multi-modal Federated Learning via Balanced Modality Selection",
ECCV 2024 (first circulated as CMSFed). In every round, the clients of the set S_M train all their modalities. The
clients of the set S_w train only the modality that is weak in the whole federation. Facility location finds both sets:
it chooses a few clients whose gradients represent the gradients of all clients. S_M represents the gradients of the
cross-entropy. S_M and S_w together represent the gradients of the weak modality's encoder. If the weak modality lags
behind in a batch, the loss gets a second term, the prototypical cross-entropy (PCE). This term uses the distances to
the global class prototypes.

If there are more than two modalities, the method compares the weakest with the strongest. A client that lacks a
modality has no imbalance ratio and is never in S_M. If such a client is chosen, it trains only its weakest modality.
Page: docs/algorithms/cmsfed.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.cmsfed import aggregation, client_gradients, selection
from polyfed.algorithms.cmsfed.client_gradients import CE, PCE, GradientSums, whole_gradients
from polyfed.algorithms.cmsfed.local_scope import TrainingScope
from polyfed.algorithms.cmsfed.selection import Choice, SelectionProblem
from polyfed.algorithms.cmsfed.weak_modality import ImbalanceRatios, client_ratios, pce_weights
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, MODALITIES, Message, carries, message
from polyfed.core.option_checks import (
    BELOW_ONE,
    COST,
    FLAG,
    NOT_NEGATIVE,
    PLACEBO,
    POSITIVE,
    READING,
    NotSearched,
    SearchRange,
)
from polyfed.core.problems import Conflict
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, select
from polyfed.federation.aggregation import aggregate
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies, joined
from polyfed.objective import Classification, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Uniform
from polyfed.selection.submodular import AnySimilarity, Similarity, sample_size
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes
from polyfed.training.step_plan import steps_trained


@message
class Assignment(Message):
    """The message to a client: the model, global prototypes (C, D) by modality, and a flag.

    A class without a prototype has a row of zeros. The flag is stored under the modality whose PCE is added to the
    loss. A client that trains one modality alone receives only the blocks of this modality.
    """

    params: Tree = carries("parameters", optional=True)
    prototypes: Tree = carries("prototypes", shape=("classes", "features"), optional=True)
    target: Tree = carries("statistic", dtype="float32", within=FLAG, optional=True)


@message
class Report(Message):
    """A client's reply after training: mean loss terms, trained blocks, and the mean gradients g and h.

    The reply also describes the client's rows: prototypes (C, D) by modality, class counts (C,), and the imbalance
    ratio of the first modality over every other modality. Trees that the options do not use are empty.
    """

    cross_entropy: Tensor = carries("statistic", dtype="float32")
    prototype_loss: Tensor = carries("statistic", dtype="float32")
    params: Tree = carries("parameters")
    gradient: Tree = carries("gradients")
    encoder_gradient: Tree = carries("gradients", partial=True, blocks=(MODALITIES,))
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries(
        "statistic", dtype="float32", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM
    )
    ratio: Tree = carries("statistic", dtype="float32", within=POSITIVE, blocks=(MODALITIES,))
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class CmsFedState(State):
    """The state of `Averaging`, and what the server knows about the clients.

    Attributes:
        gradients: the clients' vectors g and their distances D_1; None before the first pass.
        encoders: the vectors h and their distances D_2, by modality.
        prototypes: the global prototypes by modality.
        ratios: the last reported imbalance ratios of every client.
        choice: which clients trained which modalities in this round.
    """

    gradients: AnySimilarity | None = None
    encoders: dict[str, Similarity] = field(default_factory=dict)
    prototypes: dict[str, Prototypes] = field(default_factory=dict)
    ratios: ImbalanceRatios = ImbalanceRatios()
    choice: Choice = Choice()


def _is_private(recipe: Any) -> bool:
    return recipe.privacy is not None and recipe.privacy.unit == "client"


@dataclass(frozen=True, kw_only=True)
class CmsFed(Averaging[CmsFedState]):
    """CMSFed and its ablations.

    `prototypes = "local"` gives the ablation CMSFed-local. If `modality_selection = false` is also set, the method is
    FedAvg+PCE. If `[selection] name = "divfl"` is set in addition, the method is DivFL+PCE.

    Attributes:
        ratio_rule: which clients train only the weak modality: those whose dominance ratio is above
            `dominance_threshold` (`threshold`, the paper), or above the `dominance_quantile` of all ratios
            (`quantile`), which exist unless all are equal.
        dominance_threshold: chi, for `ratio_rule = "threshold"`; 1.5 to 2.5 in the paper.
        dominance_quantile: for `ratio_rule = "quantile"`: the share of the clients whose ratio is too small for the
            rule to apply.
        prototype_weight: alpha_p, the strength of PCE.
        beta_mode: beta, the weight of PCE in a batch: `clip` is alpha_p * clip(ratio - 1, 0, 1), as in the paper;
            `hard` is alpha_p if the ratio is above 1, else 0, as in the released code.
        pce_target: the modality to which PCE is applied: the weak one of the federation (`global_weak`, Eq. 9) or of
            the batch (`batch_weak`, released code).
        gradient_split: `exact` keeps the gradients of both loss terms apart (Eq. 11); `delta` compares how far training
            moved the encoders (released code), so clients upload no gradients.
        client_weights: weights of the clients in the mean: `samples`, their rows, or `clusters` (the gamma of Eq. 6),
            the rows of all clients that a chosen one represents, because its gradient is the most similar: in the
            distance D_2 for the weak modality's block, in D_1 for the others.
        classifier_average: the clients over which the server averages each modality's columns of the classifier: those
            that `trained` the modality, or the whole `cohort`.
        normalize_delta: whether deltas are divided by learning rate and steps, so that clients of unequal size are
            comparable.
        resolution: which candidates join the cohort. In each pass, both facility-location problems propose a client:
            both join under `paper` (Eq. 13-14), one under `authors` (the released code).
        init_pass: how the first gradients are computed: by an `epoch` of training whose result is discarded, or one
            full-batch `step`.
        prototypes: `global`, or `local`: each client's own, computed again for every epoch.
        modality_selection: whether CMSFed chooses clients and modalities; if not, the selector draws the cohort, and
            each client trains all modalities.
        sketch: number of entries to which stored vectors are projected; 0 stores the exact vectors.
        feature_norm: length to which features are scaled before distances to prototypes are computed; 0 does not scale
            them, as in the paper, and then training can lower PCE by longer features until the classifier diverges.
        placebo: a control of the same cost with one random part: `random-picks` draws both candidates of a pass,
            `random-modality` the weak modality of a round, and `random-prototypes` vectors of the prototypes' lengths,
            the same in all rounds. `none` is the method.
    """

    ratio_rule: Annotated[Literal["threshold", "quantile"], READING] = "quantile"
    dominance_threshold: Annotated[float, SearchRange(0.8, 1.2, 1.5, 2.0, 2.5, beside=("ratio_rule", "threshold"))] = (
        2.0
    )
    dominance_quantile: Annotated[
        float, BELOW_ONE, SearchRange(0.0, 0.25, 0.5, 0.75, 0.9, beside=("ratio_rule", "quantile"))
    ] = 0.5
    prototype_weight: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.5, 1.0, 2.0, 4.0, fedavg=0.0)] = 1.0
    beta_mode: Annotated[Literal["clip", "hard"], READING] = "clip"
    pce_target: Annotated[Literal["global_weak", "batch_weak"], READING] = "global_weak"
    gradient_split: Annotated[Literal["exact", "delta"], READING] = "delta"
    client_weights: Annotated[Literal["samples", "clusters"], READING] = "samples"
    classifier_average: Annotated[Literal["cohort", "trained"], READING] = "trained"
    normalize_delta: Annotated[bool, READING] = True
    resolution: Annotated[Literal["paper", "authors"], READING] = "paper"
    init_pass: Annotated[Literal["epoch", "step"], READING] = "epoch"
    prototypes: Annotated[Literal["global", "local"], NotSearched("local is an ablation")] = "global"
    modality_selection: Annotated[bool, SearchRange(True, False, fedavg=False)] = True
    sketch: Annotated[int, NOT_NEGATIVE, COST] = 0
    feature_norm: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 3.0, 6.0, 12.0)] = 6.0
    placebo: Annotated[Literal["none", "random-picks", "random-modality", "random-prototypes"], PLACEBO] = "none"

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"ratio_rule": "threshold", "gradient_split": "exact", "feature_norm": 0.0}
    }
    reads_replies: ClassVar[tuple[str, ...]] = ("train_chosen", "learned", "_gradients")
    private_options: ClassVar[Mapping[str, Any]] = {"gradient_split": "exact"}
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("selection", "name"),
            when=lambda recipe: recipe.algorithm.modality_selection and type(recipe.algorithm.selector) is not Uniform,
            beside="[algorithm] modality_selection",
            because="cmsfed selects clients itself, so [selection] has no effect",
            instead="Remove it, or set modality_selection = false (FedAvg+PCE, DivFL+PCE)",
        ),
        Conflict(
            key=("server", "aggregate"),
            when=lambda recipe: (
                recipe.algorithm.client_weights == "clusters" and recipe.algorithm.server.aggregate != "mean"
            ),
            beside='[algorithm] client_weights = "clusters"',
            because="such weights belong to a mean",
            instead="Remove one of them",
        ),
        Conflict(
            key=("algorithm", "gradient_split"),
            when=lambda recipe: (
                _is_private(recipe)
                and recipe.algorithm.modality_selection
                and recipe.algorithm.gradient_split == "delta"
            ),
            beside='[privacy] unit = "client"',
            because="the server would compare the trained parameters of single clients",
            instead='Set gradient_split = "exact", so that it compares gradients, which are unprotected, or '
            "modality_selection = false",
        ),
        Conflict(
            key=("algorithm", "client_weights"),
            when=lambda recipe: _is_private(recipe) and recipe.algorithm.client_weights == "clusters",
            beside='[privacy] unit = "client"',
            because="it gives some clients more influence",
            instead='Set client_weights = "samples"',
        ),
        Conflict(
            key=("privacy", "amplification"),
            when=lambda recipe: _is_private(recipe) and recipe.privacy.amplification,
            because="amplification does not count that the data decides which clients train which modalities",
            instead="Remove amplification",
        ),
    )
    captions: ClassVar[Mapping[str, str]] = {
        "imbalance_ratio": "The confidence of the first modality over that of the second, or strongest over weakest.",
        "share": "The share of each modality among the selected pairs of client and modality.",
        "picked": "Clients that train all modalities, one alone, the weak one, or the weak one due to the ratio rule.",
    }

    mixing: ClassVar[str] = "cmsfed weights the loss of each modality by the scores of all others"
    needs_embeddings: ClassVar[bool] = True
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"client": ("train_all.params", "train_alone.params")}

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        rule = "dominance_threshold" if self.ratio_rule == "quantile" else "dominance_quantile"
        result = super().idle_options(fed) | {rule: f"ratio_rule = '{self.ratio_rule}'"}
        if self.gradient_split == "exact":
            result["normalize_delta"] = "gradient_split = 'exact'"
        if not self.prototype_weight:
            result |= dict.fromkeys(("beta_mode", "pce_target"), "prototype_weight = 0")
        if not self.modality_selection:
            result |= dict.fromkeys(
                ("ratio_rule", "dominance_threshold", "dominance_quantile", "gradient_split", "normalize_delta"),
                "modality_selection = false",
            )
            result |= dict.fromkeys(
                ("resolution", "init_pass", "sketch", "client_weights"), "modality_selection = false"
            )
            result |= {"placebo": "modality_selection = false"} if self.placebo == "random-picks" else {}
        return result

    # the round

    @override
    def init(self, fed: Federation, params: Tree) -> CmsFedState:
        return CmsFedState(**vars(super().init(fed, params)), ratios=ImbalanceRatios.unknown(fed.clients))

    @override
    def round(self, state: CmsFedState, fed: Federation) -> CmsFedState:
        """Run Algorithm 1: select modalities of clients, train them, average per block, and update the server state."""
        if self.modality_selection and state.gradients is None:
            everyone, accept = list(fed.clients.eligible), whole_gradients(state.params, fed)
            first = fed.ask(self.explore, everyone, Broadcast(state.params), accept=accept)
            state = self.learned(state, state.params, first, fed)
        choice, memory = self.choose(state, fed)
        state = state.with_(choice=choice, memory=memory)
        replies = self.train_chosen(state, fed)
        if not replies:
            return state
        if not self.modality_selection:
            memory = self.selector.learn(memory, state.params, replies, fed)
        after = self.merge(state.with_(memory=memory, train_loss=mean_loss(replies, fed)), replies, fed)
        return self.learned(after, state.params, replies, fed)

    def choose(self, state: CmsFedState, fed: Federation) -> tuple[Choice, Any]:
        """Choose the sets S_M and S_w of this round (Eq. 13-14), and return them with the selector's memory."""
        ratios, size, num = state.ratios, self.selector.size(fed.clients), len(fed.clients.eligible)
        weak = ratios.weak(state.choice.weak)
        if weak and self.placebo == "random-modality":
            own = keys.key(fed.seed, "placebo", fed.round)
            weak = ratios.modalities[keys.choice(own, len(ratios.modalities), 1)[0]]
        if not (self.modality_selection and bool(ratios.complete.any())):
            cohort, memory = self.selector.choose(state.memory, state.params, fed)
            return selection.without_gradients(weak, cohort, ratios, fed.clients), memory
        assert state.gradients is not None, "the first pass has not been run"
        if selection.all_alike(state.gradients):
            fed.emit("note", text=f"round {fed.round}: all gradients are alike, so the lowest numbers are chosen")
        problem = SelectionProblem(
            gradients=state.gradients,
            encoder=state.encoders.get(weak),
            ratios=ratios,
            weak=weak,
            dominance_threshold=self.threshold(ratios, weak),
            resolution=self.resolution,
            size=size,
            sample=sample_size(size, num),
            at_random=self.placebo == "random-picks",
        )
        return problem.solve(fed.clients, keys.key(fed.seed, "greedy", fed.round)), state.memory

    def threshold(self, ratios: ImbalanceRatios, weak: str) -> float:
        """Return the threshold: a client with a larger dominance ratio trains only the weak modality."""
        if self.ratio_rule == "quantile" and weak:
            return ratios.quantile(weak, self.dominance_quantile)
        return self.dominance_threshold

    def train_chosen(self, state: CmsFedState, fed: Federation) -> Replies:
        """Clients of the set S_M train all modalities; other clients train one modality. `min_replies` counts both."""
        weak, known = state.choice.weak, state.prototypes if self.prototypes == "global" else {}
        if self.placebo == "random-prototypes":
            known = {m: prototypes.random_like(p, keys.key(fed.seed, "placebo", m)) for m, p in known.items()}
        sent = {m: p.sent for m, p in known.items()}
        accept = whole_gradients(state.params, fed)
        assignment = Assignment(state.params, sent, {weak: torch.ones(())} if weak else {})
        together = fed.ask(self.train_all, state.choice.train_all, assignment, quorum=False, accept=accept)
        single = {
            client: Assignment(state.params, {m: v for m, v in sent.items() if m == own}, {own: torch.ones(())})
            for client, own in state.choice.train_alone.items()
        }
        alone = fed.ask(self.train_alone, list(single), single, quorum=False, accept=accept)
        replies = joined([together, alone])
        fed.require_quorum(replies, "train_all and train_alone")
        return replies

    @override
    def merge(self, state: CmsFedState, replies: Replies, fed: Federation) -> CmsFedState:
        weights = self.selector.weigh(state.memory, self.weights(replies, fed))
        private = fed.private_mean(state.moments)
        rule = None if private is None else private.over(state.choice.trained(fed.clients.modalities))
        weights_of: Mapping[str, Mapping[int, float]] = dict.fromkeys(fed.clients.modalities, weights)
        if self.client_weights == "clusters" and state.gradients is not None:
            all_ = fed.clients
            rows = dict.fromkeys(all_, 1.0) if self.aggregation == "uniform" else all_.rows_of(all_)
            weak = state.encoders.get(state.choice.weak)
            weights_of = aggregation.cluster_weights(replies, state.choice, state.gradients, weak, rows, all_)
            mean = aggregation.mean_by_clusters(replies, weights_of)
        else:
            mean = aggregate(replies, "params", weights, state.params, self.server, rule)
        if self.classifier_average == "cohort":
            asked = state.choice.shares(fed.clients.modalities)
            shares = aggregation.shares_that_trained(replies, weights_of, fed) if private is None else asked
            mean = aggregation.with_whole_classifier(mean, state.params, shares, fed)
        trainable = fed.context.model.trainable(state.params)
        moments = state.moments if private is None else private.adapted(replies, "params", state.params, state.moments)
        params, moments = self.server.apply(state.params, mean, moments, trainable)
        return state.with_(params=params, moments=moments)

    def learned(self, state: CmsFedState, sent: Tree, replies: Replies, fed: Federation) -> CmsFedState:
        """Replace the prototypes, ratios and vectors of the clients that replied. Other clients keep their values."""
        reports: dict[int, Report] = dict(replies.items())
        state = state.with_(
            prototypes=prototypes.gathered(
                state.prototypes,
                [(r.prototypes, r.rows_per_class) for r in reports.values()],
                [*fed.clients.rows_of(reports).values()],
                robust=self.server.aggregate != "mean",
            ),
            ratios=state.ratios.reported({client: report.ratio for client, report in reports.items()}),
        )
        if not self.modality_selection:
            return state
        first, exact = state.gradients is None, self.gradient_split == "exact"
        gradients = {client: self._gradients(client, one, sent, first, fed) for client, one in reports.items()}
        d1, d2 = client_gradients.refreshed(
            state.gradients, state.encoders, gradients, sent, fed, exact=exact, sketch=self.sketch
        )
        return state.with_(gradients=d1, encoders=d2)

    def _gradients(self, client: int, report: Report, sent: Tree, first: bool, fed: Federation) -> tuple[Tree, Tree]:
        """Return the vectors g and h of a client (Eq. 11). A vector that the client does not have is empty."""
        if self.gradient_split == "exact":
            return report.gradient, report.encoder_gradient
        divisor = -1.0
        if self.normalize_delta:
            train, rows = self.first_pass() if first else self.train, int(fed.clients.num_rows[client])
            steps = steps_trained(rows, train, skip_single=fed.context.model.has_batchnorm)
            divisor = -self.train.lr_at(fed.round, fed.rounds) * steps
        owned = fed.clients.owned(client)
        return client_gradients.deltas(sent, report.params, owned, fed, divisor, first=first)

    # local training

    def local_loss(self, scope: TrainingScope, near: Mapping[str, Prototypes]) -> Callable[[Tree, Batch], Any]:
        """Return `loss(w, batch)` for L = CE + sum of beta * PCE over the helped modalities (Eq. 9).

        `loss` returns L and the values of its terms. If clients send the gradients g and h, `loss` returns the separate
        terms instead of their sum L, because g and h need the gradient of each term.
        """

        def loss(w: Tree, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
            batch = replace(batch, x={m: batch.x[m] for m in scope.modalities})
            features = scope.context.model.features(w, batch)
            terms = {CE: scope.context.loss(w, batch, features)}
            z = scope.as_vectors(features)
            if beta := pce_weights(scope, near, z, batch, self.prototype_weight, self.beta_mode, self.pce_target):
                pce = [b * prototypes.cross_entropy(near[m], z[m], batch, m) for m, b in beta.items()]
                terms[PCE] = torch.stack(pce).sum()
            values = {name: value.detach() for name, value in terms.items()}
            return terms if self.sends_gradients else torch.stack(list(terms.values())).sum(), values

        return loss

    def fit(
        self, scope: TrainingScope, data: ClientData, params: Tree, near: Mapping[str, Prototypes] | None, train: Train
    ) -> TrainingResult:
        """Train with the prototypes `near`. If it is None, compute the client's own prototypes before every epoch."""
        sums = GradientSums(scope, exact=self.sends_gradients)
        return sums.minimise(lambda use: self.local_loss(scope, use), data, params, near, train)

    def first_pass(self) -> Train:
        """Return the options of the local training in `explore`."""
        step = self.init_pass == "step"
        return replace(self.train, steps=1, batch_size=0) if step else replace(self.train, epochs=1, steps=None)

    # the clients' tasks

    @task()
    def explore(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Report, Tree]:
        """Report gradients, prototypes and ratios of the initial model before round 1. Discard the trained model."""
        scope = TrainingScope(context, context.modalities, context.modalities, True, self.feature_norm)
        own, _ = scope.own_prototypes(data, got.params)
        fit = self.fit(scope, data, got.params, own, self.first_pass())
        return self._report(scope, data, fit, got.params, {} if self.gradient_split == "exact" else fit.params), local

    @task()
    def train_all(self, context: ClientContext, data: ClientData, local: Tree, got: Assignment) -> tuple[Report, Tree]:
        """Run the task of S_M: train all modalities with L = CE + beta * PCE of the weak modality (Eq. 9)."""
        helped = context.modalities if self.pce_target == "batch_weak" else tuple(got.target)
        scope = TrainingScope(context, context.modalities, helped, False, self.feature_norm)
        fit = self.fit(scope, data, got.params, self._near(got), self.train)
        return self._report(scope, data, fit, fit.params, fit.params), local

    @task()
    def train_alone(
        self, context: ClientContext, data: ClientData, local: Tree, got: Assignment
    ) -> tuple[Report, Tree]:
        """Run the task of S_w: train one modality with L = CE + alpha_p * PCE, and send back only this encoder."""
        scope = TrainingScope(context, tuple(got.target), tuple(got.target), True, self.feature_norm)
        fit = self.fit(scope, data, got.params, self._near(got), self.train)
        return self._report(scope, data, fit, fit.params, select(fit.params, (*scope.modalities, SHARED))), local

    def _near(self, got: Assignment) -> dict[str, Prototypes] | None:
        """Return the prototypes to train with, or None if the client uses its own prototypes."""
        received = {m: Prototypes.received(mean) for m, mean in got.prototypes.items()}
        return received if self.prototypes == "global" else None

    def _report(self, scope: TrainingScope, data: ClientData, fit: TrainingResult, at: Tree, kept: Tree) -> Report:
        """Return the report: the parameters `kept`, and prototypes and ratios that are computed with the model `at`."""
        g, h = client_gradients.mean_gradients(fit)
        own, rows = scope.own_prototypes(data, at)
        pooled = self.prototypes == "global"
        ce, pce = client_gradients.mean_terms(fit)
        return Report(
            cross_entropy=ce,
            prototype_loss=pce,
            params=kept,
            gradient=g,
            encoder_gradient=h,
            prototypes={m: p.sent for m, p in own.items()} if pooled else {},
            rows_per_class=rows if pooled else {},
            ratio=client_ratios(scope, data, at, own),
            loss=fit.loss,
            num_rows=data.num_rows,
        )

    # what `polyfed check` lists and what the log contains

    @property
    def sends_gradients(self) -> bool:
        """Whether clients send g and h. They send neither if the server computes deltas or selects no modality."""
        return self.modality_selection and self.gradient_split == "exact"

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Return whether a task sends a field.

        The task `update` sends no field. Without modality selection, `explore` also sends none. For the other tasks of
        CMSFed, the options determine which fields are sent.
        """
        if task == "update" or (task == "explore" and not self.modality_selection):
            return False
        if task not in ("explore", "train_all", "train_alone"):
            return True  # a task of the selector or of an evaluation
        if field in ("gradient", "encoder_gradient") and not self.sends_gradients:
            return False
        if field in ("prototypes", "rows_per_class") and self.prototypes == "local":
            return False
        return task != "explore" or field != "params" or self.gradient_split != "exact"

    @override
    def observe(self, state: CmsFedState) -> dict[str, float]:
        return selection.logged(state.choice, state.ratios)

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        if not self.modality_selection or any(row["picked.by_ratio"] for row in logged):
            return []
        quantile = self.ratio_rule == "quantile"
        return [
            f"no client that owns all modalities was picked to train the weak modality alone in {len(logged)} rounds, "
            "so that cmsfed has only chosen clients and added the prototype term. To have some picked, "
            + ("lower dominance_quantile" if quantile else "set ratio_rule = 'quantile' or lower dominance_threshold")
        ]
