"""CMSFed: select modalities of clients instead of clients.

Fan, Xu, Wang, Huo, Chen, Guo, "Overcome Modal Bias in Multi-modal Federated Learning via Balanced Modality
Selection", ECCV 2024 (first circulated as CMSFed; algorithms.md 2). Every round some clients, S_M, train all their
modalities, and some, S_w, only the modality that is weak in the whole federation. Both are chosen by facility
location: S_M so that its gradients stand for everybody's, S_M and S_w together so that their gradients of the weak
encoder do. Where the weak modality is behind in a batch, the distance to the global class prototypes is added to its
loss (PCE).

With more than two modalities the weakest is set against the strongest. A client that lacks a modality has no
imbalance ratio and no place among S_M; chosen, it trains the weakest modality it has, alone (algorithms.md 2.8).

This file is the clients' half and the round; who is chosen is in `cmsfed_choice.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.cmsfed.choice import Choice, choose
from polyfed.algorithms.cmsfed.local_training import LocalTraining, blamed, encoder_names
from polyfed.algorithms.cmsfed.memory import Ratios, gradients_of, whole_gradients
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import HISTOGRAM, MODALITIES, Message, carries, message
from polyfed.core.schema import BELOW_ONE, NOT_NEGATIVE, POSITIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, select, vector
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies, joined
from polyfed.privacy.policy import Policy
from polyfed.selection import Uniform
from polyfed.selection.submodular import Similarity
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes


@message
class Assignment(Message):
    """The model; global prototypes (C, D) by modality, a row of zeros for a class without; and a flag under the name of
    the modality that is to be helped.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    target: Tree = carries("statistic")


@message
class Report(Message):
    """What a client sends after training: mean loss terms, trained blocks, the mean gradients g and h, and about its
    rows: prototypes (C, D) by modality, class counts (C,), imbalance ratios of the first modality over each other.
    Trees of which the configuration makes no use are empty.
    """

    cross_entropy: Tensor = carries("statistic")
    prototype_loss: Tensor = carries("statistic")
    params: Tree = carries("parameters")
    gradient: Tree = carries("gradients")
    encoder_gradient: Tree = carries("gradients", partial=True, blocks=(MODALITIES,))
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries("statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM)
    ratio: Tree = carries("statistic", within=POSITIVE, blocks=(MODALITIES,))
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class CmsFedState(State):
    """Averaging's state, and what is known of the clients.

    Attributes:
        gradients: vectors g and the distances D1.
        encoders: by modality, vectors h and the distances D2.
        prototypes: the global ones, by modality.
        ratios: last reported imbalance ratio of every client.
        choice: who was picked with what this round.
    """

    gradients: Similarity | None = None
    encoders: dict[str, Similarity] = field(default_factory=dict)
    prototypes: dict[str, Prototypes] = field(default_factory=dict)
    ratios: Ratios = Ratios()
    choice: Choice = Choice()


@dataclass(frozen=True, kw_only=True)
class CmsFed(Averaging):
    """See the module. FedAvg+PCE is `modality_selection = false, prototypes = "local"`; DivFL+PCE the same with
    `[selection] name = "divfl"`; CMSFed-local is `prototypes = "local"` (algorithms.md 2.7).

    Attributes:
        chi: a client whose dominance ratio is above it trains the weak modality alone; paper 1.5 to 2.5. inf: nobody.
        alpha_p: strength of PCE; 1 is the released code's default, 2 its AVE script's (2.6).
        beta_mode: weight of PCE in a batch: `clip`, the paper's alpha_p * clip(ratio - 1, 0, 1); `hard`, the code's.
        pce_target: PCE for the `global_weak` modality (Eq. 9), or for the `batch_weak` one (released code).
        gradient_split: `exact` keeps the gradients of both terms apart (Eq. 11); `delta` compares what training
            moved (released code), which uploads no gradients.
        normalize_delta: divide deltas by learning rate and steps, so that clients of unequal size compare.
        resolution: what the two problems' picks become: both (`paper`, Eq. 13-14) or one of them (`authors`).
        greedy: `stochastic`, max(b, N / 10) candidates a pass, or `full`.
        init_pass: the first gradients come from an `epoch` of training that is thrown away, or one full-batch `step`.
        prototypes: `global`, or `local` (a client's own, renewed after every epoch).
        prototype_momentum: of the global prototypes; 0 in the paper.
        modality_selection: off, the cohort is the selector's and trains everything.
        sketch: project stored vectors to so many entries; 0 keeps them exact.
        hysteresis: another modality becomes the weak one only when its ratio is above by this share; 0 is the paper.
        feature_norm: length that features are given before distances to prototypes are taken; 0 leaves them raw, as in
            the paper. Raw distances let PCE fall by growing the features, until the classifier's steps on them no
            longer converge: see docs/algorithms/cmsfed.md for when that ends a run.
    """

    chi: float = 2.0
    alpha_p: Annotated[float, NOT_NEGATIVE] = 1.0
    beta_mode: Literal["clip", "hard"] = "clip"
    pce_target: Literal["global_weak", "batch_weak"] = "global_weak"
    gradient_split: Literal["exact", "delta"] = "exact"
    normalize_delta: bool = True
    resolution: Literal["paper", "authors"] = "paper"
    greedy: Literal["stochastic", "full"] = "stochastic"
    init_pass: Literal["epoch", "step"] = "epoch"
    prototypes: Literal["global", "local"] = "global"
    prototype_momentum: Annotated[float, BELOW_ONE] = 0.0
    modality_selection: bool = True
    sketch: Annotated[int, NOT_NEGATIVE] = 0
    hysteresis: Annotated[float, NOT_NEGATIVE] = 0.0
    feature_norm: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        super().__post_init__()
        if self.modality_selection and type(self.selector) is not Uniform:
            raise RecipeError(
                "cmsfed selects clients itself, so [selection] has no effect; remove it, or set "
                "[algorithm] modality_selection = false (FedAvg+PCE, DivFL+PCE)"
            )

    @property
    def sends_gradients(self) -> bool:
        """Whether clients send g and h: deltas the server sees in what it receives, and others choose without."""
        return self.modality_selection and self.gradient_split == "exact"

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """The template's own task is never asked, and the first look at everyone only where modalities are chosen."""
        if task == "update" or (task == "explore" and not self.modality_selection):
            return False
        if task not in ("explore", "train_all", "train_alone"):
            return True  # of the selector, or for an evaluation
        if field in ("gradient", "encoder_gradient") and not self.sends_gradients:
            return False
        if field in ("prototypes", "rows_per_class") and self.prototypes == "local":
            return False
        return task != "explore" or field != "params" or self.gradient_split != "exact"

    # the server's half

    def init(self, fed: Federation, params: Tree) -> CmsFedState:
        """Averaging's state; the clients are first asked in round 1."""
        return CmsFedState(**vars(super().init(fed, params)), ratios=Ratios.unknown(fed.clients))

    def round(self, state: CmsFedState, fed: Federation) -> CmsFedState:
        """Choose modalities of clients, have them train, average per block, and look at the clients anew."""
        if self.modality_selection and state.gradients is None:
            send, accept = Broadcast(state.params), whole_gradients(state.params, fed)
            first = fed.ask(self.explore, list(fed.clients.eligible), send, accept=accept)
            state = self.learned(state, state.params, first, fed)
        choice, memory = self.choice(state, fed)
        state = state.with_(choice=choice, memory=memory)
        replies = self.train_chosen(state, fed)
        if not replies:
            return state
        if not self.modality_selection:
            memory = self.selector.learn(memory, state.params, replies, fed)
        after = self.merge(state.with_(memory=memory, train_loss=mean_loss(replies, fed)), replies, fed)
        return self.learned(after, state.params, replies, fed)

    def choice(self, state: CmsFedState, fed: Federation) -> tuple[Choice, Any]:
        """S_M, S_w and those who lack a modality."""
        ratios = state.ratios
        weak = ratios.weak(state.choice.weak, self.hysteresis)
        if self.modality_selection and bool(ratios.complete.any()):
            return choose(self, state, weak, fed), state.memory
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        both = [client for client in cohort if bool(ratios.complete[client])]
        rest = [client for client in cohort if client not in both]
        return Choice(weak, both, {c: ratios.weakest_of(fed.clients.owned(c)) for c in rest}), memory

    def train_chosen(self, state: CmsFedState, fed: Federation) -> Replies:
        """One ask for S_M, one for those who train a single modality; too few answers are too few of both."""
        weak, known = state.choice.weak, state.prototypes if self.prototypes == "global" else {}
        sent = {m: p.sent for m, p in known.items()}
        target = {weak: torch.ones(())} if weak else {}
        every, accept = Assignment(state.params, sent, target), whole_gradients(state.params, fed)
        both = fed.ask(self.train_all, state.choice.both, every, quorum=False, accept=accept)
        ones = {
            client: Assignment(state.params, {m: v for m, v in sent.items() if m == own}, {own: torch.ones(())})
            for client, own in state.choice.alone.items()
        }
        alone = fed.ask(self.train_alone, list(ones), ones, quorum=False, accept=accept)
        replies = joined([both, alone])
        fed.require_quorum(replies, "train_all and train_alone")
        return replies

    def learned(self, state: CmsFedState, sent: Tree, replies: Replies, fed: Federation) -> CmsFedState:
        """Prototypes, ratios, and the vectors of those who answered; everything about the others stays (2.5)."""
        reports: dict[int, Report] = dict(replies.items())
        state = state.with_(
            prototypes=prototypes.gathered(
                state.prototypes, [(r.prototypes, r.rows_per_class) for r in reports.values()], self.prototype_momentum
            ),
            ratios=state.ratios.reported({client: report.ratio for client, report in reports.items()}),
        )
        if not self.modality_selection:
            return state
        g, h = gradients_of(self, sent, reports, fed, first=state.gradients is None)
        model, key = fed.context.model, keys.key(fed.seed, "sketch")
        names = {m: encoder_names(fed.context, sent, m) for m in fed.clients.modalities}
        widths = {m: sum(sent[n].numel() for n in own) for m, own in names.items()}
        size = sum(widths.values())  # deltas compare encoders only, exact gradients everything
        if self.gradient_split == "exact":
            size = sum(value.numel() for value in model.trainable(sent).values())
        num = len(fed.clients)
        old = state.gradients or Similarity.empty(num, size, self.sketch, key)
        encoders = {m: state.encoders.get(m) or Similarity.empty(num, w, self.sketch, key) for m, w in widths.items()}
        return state.with_(
            gradients=old.refreshed({c: vector(tree) for c, tree in g.items()}),
            encoders={
                m: similarity.refreshed({c: vector(trees[m]) for c, trees in h.items() if m in trees})
                for m, similarity in encoders.items()
            },
        )

    def observe(self, state: CmsFedState) -> dict[str, float]:
        """Fig. 6: the global ratio and each modality's share of the picks; and the sizes of both sets."""
        choice, ratios = state.choice, state.ratios
        mean = ratios.mean()
        shares = {f"share_{m}": choice.share(m, len(ratios.modalities)) for m in ratios.modalities}
        ratio = {"imbalance_ratio": mean[ratios.modalities[-1]]} if len(mean) == 2 else {}
        if len(mean) > 2:
            ratio = {"imbalance_ratio": max(mean.values()) / min(mean.values())}
        picked = {"picked_all": float(len(choice.both)), "picked_alone": float(len(choice.alone))}
        return ratio | shares | picked

    # the clients' half

    @task()
    def explore(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Report, Tree]:
        """Before the first round: gradients, prototypes, ratio at the initial model; its training is thrown away."""
        training = LocalTraining(self, context, context.modalities, context.modalities, alone=True)
        own, _ = training.own_prototypes(data, got.params)
        fit = training.fit(data, got.params, own, self.first_pass())
        kept = {} if self.gradient_split == "exact" else fit.params
        return self._report(data, fit, got.params, kept, training), local

    @task()
    def train_all(self, context: ClientContext, data: ClientData, local: Tree, got: Assignment) -> tuple[Report, Tree]:
        """S_M: L = CE + beta * PCE of the weak modality (Eq. 9)."""
        helped = context.modalities if self.pce_target == "batch_weak" else tuple(got.target)
        training = LocalTraining(self, context, context.modalities, helped, alone=False)
        fit = training.fit(data, got.params, self._near(got), self.train)
        return self._report(data, fit, fit.params, fit.params, training), local

    @task()
    def train_alone(
        self, context: ClientContext, data: ClientData, local: Tree, got: Assignment
    ) -> tuple[Report, Tree]:
        """S_w: L = CE of one modality's logits + alpha_p * PCE; the other encoders neither move nor travel back."""
        training = LocalTraining(self, context, tuple(got.target), tuple(got.target), alone=True)
        fit = training.fit(data, got.params, self._near(got), self.train)
        return self._report(data, fit, fit.params, select(fit.params, (*training.modalities, SHARED)), training), local

    def first_pass(self) -> Train:
        """The training of `explore`."""
        if self.init_pass == "step":
            return replace(self.train, steps=1, batch_size=0)
        return replace(self.train, epochs=1, steps=None)

    def _near(self, got: Assignment) -> dict[str, Prototypes] | None:
        """The prototypes to learn from; None: the client's own."""
        if self.prototypes == "local":
            return None
        return {m: Prototypes.received(mean) for m, mean in got.prototypes.items()}

    def _report(self, data: ClientData, fit: TrainingResult, at: Tree, kept: Tree, training: LocalTraining) -> Report:
        """Gradients of the fit; prototypes and ratio of the model `at`; the blocks `kept`."""
        steps = fit.num_steps.clamp(min=1)
        means = {part: {n[2:]: v / steps for n, v in fit.carry.items() if n.startswith(part)} for part in ("g.", "h.")}
        own, rows = training.own_prototypes(data, at)
        pooled = self.prototypes == "global"
        ce, pce = blamed(fit)
        return Report(
            cross_entropy=ce,
            prototype_loss=pce,
            params=kept,
            gradient=means["g."],
            encoder_gradient=means["h."],
            prototypes={m: p.sent for m, p in own.items()} if pooled else {},
            rows_per_class=rows if pooled else {},
            ratio=self._ratio(training, data, at, own),
            loss=fit.loss,
            num_rows=data.num_rows,
        )

    def _ratio(self, training: LocalTraining, data: ClientData, at: Tree, own: Mapping[str, Prototypes]) -> Tree:
        """Imbalance ratios over all rows with own prototypes; none from a client that lacks a modality."""
        if training.context.modalities != training.context.model.modalities:
            return {}

        def step(total: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            sure = prototypes.confidence(own, training.vectors(at, batch), batch)
            return {m: total[m] + value for m, value in sure.items()}

        total = data.fold(step, {m: torch.zeros(()) for m in training.context.modalities})
        first, *others = training.context.modalities
        return {m: prototypes.imbalance_ratio(total[first], total[m]) for m in others}
