"""MFedMC: every client trains all its encoders, and few clients send few of them.

Yuan, Han, Wang, Upadhyay, Brinton, "Communication-Efficient Multimodal Federated Learning: Joint Modality and Client
Selection", arXiv:2401.16685 (v2). The encoders are common, and the fusion of their embeddings stays with its client. In
each round, a client

1. trains its fusion on the encoders that it received, then each encoder by the loss of its modality alone;
2. gives each encoder a priority: how much the modality contributes to the fusion's predictions (a Shapley value), how
   few parameters the encoder has, and how long ago the client sent it. It offers the `uploads` encoders of the highest
   priority;
3. sends an offered encoder if the server takes it: for each modality, the server takes those of the clients with the
   smallest losses.

The Shapley value of a modality is exact, over all 2^M masks of the client's M modalities. Both selections happen before
an encoder leaves, so the bytes of the others are saved.

polyfed's choices: the fusion is whatever [model] puts behind the encoders. The authors' code uses a random forest on
predicted labels, and therefore gives each encoder a classifier of its own; here an encoder alone is judged through the
fusion, with zeros for the other modalities. The fusion is trained once a round, and not again on the new encoders. The
recency of an encoder counts from when it was sent, not from when it was offered. Page: docs/algorithms/mfedmc.md.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.averaging.private_blocks import epochs_of
from polyfed.algorithms.base import NO_GLOBAL, Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import MODALITIES, Message, carries, message
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    COST,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    PLACEBO,
    ZERO_OR_ONE,
    SearchRange,
)
from polyfed.core.request import Send
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, block_of, nested, under
from polyfed.evaluation.shapley import coalitions
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.training import ClientData
from polyfed.training.prototypes import there

FUSION, TRAINED, SENT = "@fusion", "@trained", "@sent"
"""Prefixes in a client's local state: its fusion, its encoders after training, and the rounds in which it last sent
each of them (0: never)."""

FUSION_STREAM = 1004
"""Random stream of the batches on which the fusion trains."""

MOST = 8
"""Most modalities of a client: its Shapley values need 2^M passes of the fusion over its rows."""


@message
class Offer(Message):
    """A client's reply after training: for each modality, whether it offers the encoder, and the loss of it alone."""

    offered: Tree = carries(
        "statistic",
        dtype="float32",
        within=ZERO_OR_ONE,
        blocks=(MODALITIES,),
        tells="which modalities contribute most to the client's predictions",
    )
    losses: Tree = carries("statistic", dtype="float32", within=NOT_NEGATIVE, blocks=(MODALITIES,))
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class Taken(Message):
    """The server's answer to an offer: a flag for each encoder that the client shall send."""

    wanted: Tree = carries("statistic", dtype="float32", within=FLAG, blocks=(MODALITIES,), optional=True)


@message
class Upload(Message):
    """The encoders that the server took."""

    params: Tree = carries("parameters", part="encoders")


@dataclass(frozen=True)
class UploadState(State):
    """The state of `Averaging`, and the number of encoders of each modality that came in this round."""

    uploads: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MFedMC(Averaging[UploadState]):
    """Selection of encoders by clients, and of clients by the server.

    Attributes:
        uploads: gamma, how many encoders a client offers in a round. As many as there are modalities offers all.
        client_share: delta, the share of the cohort from which the server takes the encoder of a modality, rounded up.
        impact: alpha_s, weight of a modality's Shapley value in the priority.
        smallness: alpha_c, weight of the encoder's small size.
        recency: alpha_r, weight of the time since the client sent the encoder.
        fusion_epochs: epochs in which a client trains its fusion alone, at the start of each round; 0 means as many as
            [train].
        placebo: `random-blocks` is a control: clients offer encoders at random, and the server takes them at random,
            both as many as MFedMC. `none`, the default, is the method of the paper.
    """

    uncompressed: ClassVar[str] = "clients send encoders in answer to another message than the model that they trained"
    uploads: Annotated[int, AT_LEAST_ONE, COST] = 1
    client_share: Annotated[float, FRACTION, COST] = 0.2
    impact: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 1 / 3, 1.0)] = 1 / 3
    smallness: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 1 / 3, 1.0)] = 1 / 3
    recency: Annotated[float, NOT_NEGATIVE, SearchRange(1 / 3, 1.0)] = 1 / 3
    fusion_epochs: Annotated[int, NOT_NEGATIVE, COST] = 0
    placebo: Annotated[Literal["none", "random-blocks"], PLACEBO] = "none"

    mixing: ClassVar[str] = "mfedmc chooses the encoders that leave by the Shapley values of all modalities"
    needs_embeddings: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "its Shapley values share out the probabilities of the classes"
    sends_class_means: ClassVar[bool] = False
    trains_one_model: ClassVar[bool] = False
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    spare: ClassVar[tuple[str, ...]] = ()
    captions: ClassVar[Mapping[str, str]] = {"uploads": "How many clients sent the encoder of each modality."}

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range, or all weights of the priority are 0.
        """
        super().__post_init__()
        if not self.impact + self.smallness + self.recency:
            raise RecipeError(
                "[algorithm] impact, smallness and recency are all 0, so no encoder has a priority",
                ("algorithm", "impact"),
            )

    @override
    def check_model(self, model: Model) -> None:
        """Refuse a model with more modalities than exact Shapley values allow.

        Raises:
            RecipeError: it has more than `MOST`, or its encoders are one block of parameters with the fusion.
        """
        super().check_model(model)
        if len(model.modalities) > MOST:
            raise RecipeError(
                f"[model]: mfedmc needs 2^M passes of the fusion for M modalities, at most 2^{MOST}, and the data has "
                f"{len(model.modalities)}. Stack some with [data] stack, or leave some out with [data] modalities",
                ("model",),
            )

    @override
    def private_names(self, model: Model) -> frozenset[str]:
        return frozenset(model.head())

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed) | {"evaluate.unimodal": NO_GLOBAL}
        most = max(len(fed.clients.owned(client)) for client in fed.clients)
        if self.placebo != "none" or self.uploads >= most:
            because = f"placebo = '{self.placebo}'" if self.placebo != "none" else f"uploads = {self.uploads}"
            result |= dict.fromkeys(("impact", "smallness", "recency"), because)
        return result

    # the server

    @override
    def init(self, fed: Federation, params: Tree) -> UploadState:
        head = self.private_names(fed.context.model)
        return UploadState(**vars(super().init(fed, {n: v for n, v in params.items() if n not in head})))

    @override
    def round(self, state: UploadState, fed: Federation) -> UploadState:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)

        def incomplete(client: int, offer: Any) -> str:
            own = {*fed.clients.owned(client)}
            return (
                "" if {*offer.offered} == {*offer.losses} == own else f"does not offer or judge each of {sorted(own)}"
            )

        enough = self.selector.enough(fed.clients)
        offers = fed.ask(self.train_all, cohort, Broadcast(state.params), enough=enough, accept=incomplete)
        state = state.with_(memory=memory, train_loss=mean_loss(offers, fed) if offers else state.train_loss)
        wanted = self.taken(offers, fed)
        asked = {client: Taken({m: torch.ones(()) for m in one}) for client, one in wanted.items()}

        def lacking(client: int, reply: Any) -> str:
            sent = {block_of(name) for name in reply.params}
            return "" if sent == {*wanted[client]} else f"sent encoders of {sorted(sent)}, asked for {wanted[client]}"

        replies = fed.ask(self.send, list(asked), asked, quorum=False, accept=lacking)
        after = self.merge(state, replies, fed) if replies else state
        sent = [{block_of(name) for name in reply.params} for reply in replies.values()]
        return after.with_(uploads={m: sum(m in one for one in sent) for m in fed.clients.modalities})

    def taken(self, offers: Replies, fed: Federation) -> dict[int, list[str]]:
        """Return the modalities whose encoders the server takes, for each client with at least one.

        Args:
            offers: `Offer` of each client.
            fed: the federation.
        """
        result: dict[int, list[str]] = {}
        most = math.ceil(self.client_share * len(offers))
        for m in fed.clients.modalities:
            losses = {c: float(o.losses[m]) for c, o in offers.items() if float(o.offered.get(m, 0.0)) == 1}
            best = sorted(losses, key=lambda client: (losses[client], client))
            if self.placebo == "random-blocks" and best:
                drawn = keys.choice(keys.key(fed.seed, "placebo", m, fed.round), len(best), min(most, len(best)))
                best = [sorted(best)[place] for place in drawn]
            for client in best[:most]:
                result.setdefault(client, []).append(m)
        return dict(sorted(result.items()))

    @override
    def observe(self, state: UploadState) -> dict[str, float]:
        return super().observe(state) | {f"uploads.{m}": float(num) for m, num in state.uploads.items()}

    # the clients

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        head = self.private_names(context.model)
        encoders = {name: value for name, value in context.initial.items() if name not in head}
        fusion = {name: value for name, value in context.initial.items() if name in head}
        never = {m: torch.zeros((), dtype=torch.int64) for m in context.modalities}
        return nested(FUSION, fusion) | nested(TRAINED, encoders) | nested(SENT, never)

    @task()
    def train_all(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Offer, Tree]:
        """Train the fusion, then the encoders, and offer those of the highest priority."""
        model, fusion = context.model, under(FUSION, local)
        start = got.params | fusion
        only = [name for name in model.trainable(start) if name in fusion]
        if only:
            epochs = epochs_of(self.train, self.fusion_epochs) if self.fusion_epochs else self.train
            start = data.minimise(context.loss, start, train=epochs, only=only, stream=FUSION_STREAM).params

        def alone(w: Tree, batch: Batch) -> Tensor:
            return torch.stack([*self._losses(context, w, batch, model.features(w, batch)).values()]).sum()

        encoders = [name for name in model.trainable(start) if name not in fusion]
        fit = data.minimise(alone, start, train=self.train, only=encoders)
        shares, losses = self._judge(context, data, fit.params)
        after = {f"{FUSION}.{n}": start[n] for n in fusion} | {f"{TRAINED}.{n}": fit.params[n] for n in got.params}
        offered = self._offered(context, data, shares, under(SENT, local))
        return Offer(offered, losses, fit.loss, data.num_rows), local | after

    @task()
    def send(self, context: ClientContext, data: ClientData, local: Tree, got: Taken) -> tuple[Upload, Tree]:
        """Send the trained encoders that the server took, and remember the round."""
        encoders = {n: v for n, v in under(TRAINED, local).items() if block_of(n) in got.wanted}
        now = {f"{SENT}.{m}": torch.full_like(local[f"{SENT}.{m}"], data.round) for m in got.wanted}
        return Upload(encoders), local | now

    def _losses(
        self, context: ClientContext, w: Tree, batch: Batch, features: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the loss of each modality alone, over the rows that have it."""
        result = {}
        for m in context.modalities:
            rows = replace(batch, ok=there(batch, m)) if m in batch.present else batch
            result[m] = context.objective.loss(context.model.unimodal_logits(w, features, m, batch, "zero"), rows)
        return result

    def _judge(self, context: ClientContext, data: ClientData, w: Tree) -> tuple[Tree, Tree]:
        """Return by modality the Shapley value in the fusion's predictions, and the loss alone, over all rows.

        A modality's value is the mean over rows of its Shapley values' sizes, summed over the classes.
        """
        own = context.modalities

        def step(carry: Tree, batch: Batch) -> Tree:
            z = context.model.features(w, batch)
            values = shapley(own, lambda mask: probabilities(context, w, batch, z, mask))
            after = {f"impact.{m}": batch.sum(values[m].abs().sum(-1)) for m in own}
            for m, loss in self._losses(context, w, batch, z).items():
                rows = batch.sum(there(batch, m).to(loss.dtype))
                after |= {f"loss.{m}": loss * rows, f"rows.{m}": rows}
            return {name: carry[name] + value for name, value in after.items()}

        zero = torch.zeros((), device=data.num_rows.device)
        sums = data.fold(step, {f"{what}.{m}": zero for what in ("impact", "loss", "rows") for m in own})
        impact = {m: sums[f"impact.{m}"] / data.num_rows.clamp(min=1) for m in own}
        return impact, {m: sums[f"loss.{m}"] / sums[f"rows.{m}"].clamp(min=1) for m in own}

    def _offered(self, context: ClientContext, data: ClientData, shares: Tree, sent: Tree) -> Tree:
        """Return a 1 for each of the `uploads` encoders of the highest priority, and 0 for the others."""
        own, model = context.modalities, context.model
        head = self.private_names(model)
        sizes = [
            float(sum(v.numel() for n, v in model.template.items() if block_of(n) == m and n not in head)) for m in own
        ]
        priority = (
            self.impact * scaled(torch.stack([shares[m] for m in own]))
            + self.smallness * (1 - scaled(torch.tensor(sizes, device=data.num_rows.device)))
            + self.recency * torch.stack([(data.round - sent[m]) / data.round for m in own])
        )
        if self.placebo == "random-blocks":
            priority = keys.uniform(data.draw("placebo"), len(own), data.num_rows.device)
        rank = [
            torch.stack([priority[j] >= priority[i] if j < i else priority[j] > priority[i] for j in range(len(own))])
            for i in range(len(own))
        ]
        return {m: (rank[i].sum() < self.uploads).to(torch.float32) for i, m in enumerate(own)}

    # evaluation: the newest encoders under the client's fusion

    @property
    @override
    def own_models(self) -> Literal["clients"]:
        return "clients"

    @override
    def evaluation_message(self, state: UploadState, fed: Federation, clients: Sequence[int]) -> Send:
        return Broadcast(state.params)

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return got.params | under(FUSION, local)


def shapley(players: Sequence[str], worth: Callable[[frozenset[str]], Tensor]) -> dict[str, Tensor]:
    """Return the exact Shapley value of each player, a tensor as `worth` returns it.

    Args:
        players: the players, here modalities.
        worth: the value of a coalition; it is called once for each of the 2^M.
    """
    value = functools.cache(worth)
    result = {}
    for player in players:
        gains = [w * (value(mask | {player}) - value(mask)) for mask, w in coalitions(players, player)]
        result[player] = torch.stack(gains).sum(0)
    return result


def probabilities(
    context: ClientContext, w: Tree, batch: Batch, features: Mapping[str, Tensor], mask: frozenset[str]
) -> Tensor:
    """Return the fusion's probabilities (B, C) if only the modalities of the mask are there."""
    kept = {m: z if m in mask else torch.zeros_like(z) for m, z in features.items()}
    return torch.softmax(context.model.fuse(w, kept, batch), -1)


def scaled(values_M: Tensor) -> Tensor:
    """Return values scaled to 0 for the smallest and 1 for the largest; zeros if all are equal."""
    low, high = values_M.amin(), values_M.amax()
    return (values_M - low) / torch.where(high > low, high - low, torch.ones_like(high))
