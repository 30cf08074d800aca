"""Personalised federated multimodal learning over wireless networks, with learned aggregation coefficients.

Every device trains its own model. A modality's block is its encoder and its columns of the first classifier layer. The
rest of the model is one shared block. For each block, the server mixes the uploads of a few devices into a personalised
copy for each of these devices. The coefficients of the mixtures are learned in closed form. The devices that upload are
those with the largest benefit per second.

The steps are those of Algorithm 1 in the paper. Xi are the logits of the coefficients, and xi the coefficients. W is a
copy at the server, w an upload, and A the age of a block. K-hat is the number of uploads per block and round. At the
start of a round, the devices install the copies that the server mixed in the previous round. The devices then train
(steps 7 and 1). After that, the server schedules, collects, mixes and learns (steps 2 to 6). A round begins with the
downloads, as in the paper's formula for the latency of a round. See docs/algorithms/pfmml.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import mean_loss
from polyfed.algorithms.base import NO_GLOBAL, Algorithm, Broadcast
from polyfed.algorithms.local import Done, Start
from polyfed.algorithms.personal import blocks as exchange
from polyfed.algorithms.personal.blocks import Blocks, Installed, Layout, Wanted, layouts, owners
from polyfed.algorithms.pfmml.coefficients import (
    BlockState,
    Step,
    aggregate,
    learned,
    own_coefficients,
    shuffled,
)
from polyfed.algorithms.pfmml.copies_to_send import Deliveries
from polyfed.algorithms.pfmml.scheduling import benefit_per_second, scheduled
from polyfed.core import keys
from polyfed.core.option_checks import COST, NOT_NEGATIVE, PLACEBO, READING, SearchRange
from polyfed.core.request import Send
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, keep_on_host
from polyfed.evaluation.scores import Measured
from polyfed.federation.clock import Timetable
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.objective import Objective
from polyfed.training import ClientData
from polyfed.training.client_data import TRAINING_PASSES
from polyfed.training.step_plan import rows_trained, steps_trained

MOVED = 0.005
"""A run learns if the mean coefficient of devices' own uploads changes by this amount over a third of the run."""

TABLE_CLIENTS = 64
"""The largest number of devices for which matrices are logged. Larger heat maps would not be readable."""


@dataclass(frozen=True)
class PfmmlState:
    """The server state.

    Attributes:
        params: the common initial model. PFMML has no global model.
        blocks: the server's knowledge about each block, in the order in which uploads are queued.
        undelivered: by block, bool (K,). True for a device whose newest copy was built before the last round and
            has not arrived yet.
        waited_for: the devices from which the server requested an upload in the last round.
        train_loss: mean training loss of the last round, weighted by rows.
    """

    params: Tree
    blocks: dict[str, BlockState]
    undelivered: dict[str, Tensor] = field(default_factory=dict)
    waited_for: list[int] = field(default_factory=list)
    train_loss: float = float("nan")

    def __post_init__(self) -> None:
        """Move the facts about the devices to the CPU."""
        keep_on_host(self, "undelivered")

    @property
    def deliveries(self) -> Deliveries:
        """The copies that the server still has to send."""
        return Deliveries(self.blocks, self.undelivered)


@dataclass(frozen=True, kw_only=True)
class Pfmml(Algorithm[PfmmlState]):
    """Personalised aggregation.

    Without a [network] section, messages take no time, and the score of a device is 1 - xi.

    Attributes:
        uploads: K-hat, the devices that upload a block in a round: a share of all, or a count.
        coefficient_lr: eta-hat, the learning rate of the coefficients (0.01 in the paper, under `raw`); 0 keeps the
            mixtures uniform. Under `scale = "normalised"` an update changes a logit by at most twice this rate.
        max_age: A_th, the rounds within which a device must upload each of its blocks, 10 in the paper; 0 for no such
            rule.
        rule: the score of a device: `ratio` is the benefit per second, `linear` the benefit minus `price_per_second` *
            seconds (Table III).
        price_per_second: alpha, the price of a second under `linear`. The paper tries 1e-4, 1e-3 and 1e-2.
        grad_sign: a device's gradient is estimated as this sign times the change of its block in training: -1 is right,
            1 is the paper's text.
        scale: how the update of a coefficient, an inner product of two vectors, is scaled: `normalised` divides it by
            both lengths, so one rate works for all blocks and data sets; `raw` is the paper's; `per-size` multiplies it
            by (size of the largest block) / (size of this block); `per-step` divides it by learning rate times number
            of steps.
        record: the copies from which the coefficients learn: the newest of each device, however old (`last`), or only
            those of the last round (`previous-round`).
        learn: whether the coefficients are updated `after` mixing, as in the paper, or `before`.
        softmax_over: the devices over which the softmax for the score is taken: `all`, or the `owners` of the block.
        waits_for: the devices that the server waits for: `scheduled`, or `all`.
        placebo: a control of the same cost: `uniform` learns coefficients but does not use them, `shuffled` puts a
            device's coefficients for the others into random order before mixing. `none` is the method.
    """

    captions: ClassVar[Mapping[str, str]] = {
        "own_coefficient": "A device's mean coefficient for its own upload, by block; 1 takes nothing from others.",
        "uploads": "How many devices sent a copy of each block in the round.",
        "oldest": "The age, in rounds, of the oldest copy of each block at the server.",
    }
    mixing: ClassVar[str] = ""
    reads_rates: ClassVar[bool] = True
    uncompressed: ClassVar[str] = "it schedules uploads by the bytes of whole blocks"
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)

    uploads: Annotated[float | int, COST] = 1 / 3
    coefficient_lr: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.5, 1.0, 2.0, 4.0, 8.0)] = 2.0
    max_age: Annotated[int, NOT_NEGATIVE, COST] = 10
    rule: Annotated[Literal["ratio", "linear"], READING] = "ratio"
    price_per_second: Annotated[float, NOT_NEGATIVE, SearchRange(0.0001, 0.001, 0.01, beside=("rule", "linear"))] = 1e-4
    grad_sign: Annotated[Literal[-1, 1], READING] = -1
    scale: Annotated[Literal["normalised", "raw", "per-step", "per-size"], READING] = "normalised"
    record: Annotated[Literal["last", "previous-round"], READING] = "last"
    learn: Annotated[Literal["after", "before"], READING] = "after"
    softmax_over: Annotated[Literal["all", "owners"], READING] = "all"
    waits_for: Annotated[Literal["scheduled", "all"], COST] = "scheduled"
    placebo: Annotated[Literal["none", "uniform", "shuffled"], PLACEBO] = "none"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"scale": "raw", "coefficient_lr": 0.01}}

    def __post_init__(self) -> None:
        """Refuse options that are out of range, and a value of `uploads` that is neither a share nor a count."""
        super().__post_init__()
        exchange.check_uploads(self.uploads)

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = {"evaluate.unimodal": NO_GLOBAL}
        if self.rule == "ratio":
            result["price_per_second"] = "rule = 'ratio'"
        return result

    @override
    def init(self, fed: Federation, params: Tree) -> PfmmlState:
        return PfmmlState(params, {block: BlockState.start(owners(fed, block)) for block in layouts(fed, params)})

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return dict(context.initial)

    @override
    def round(self, state: PfmmlState, fed: Federation) -> PfmmlState:
        laid = layouts(fed, state.params)
        downloads = state.deliveries.messages(laid)  # step 7 of the previous round
        installed = fed.ask(self.install, list(downloads), downloads, quorum=False)
        lost = state.deliveries.lost(downloads, installed)
        trained = fed.ask(self.practise, list(fed.clients.eligible), Start())
        asked = exchange.wanted(self._schedule(state, fed))
        uploads = fed.ask(self.upload, list(asked), asked, quorum=False, accept=exchange.as_wanted(asked, laid))
        step = self._step(fed)
        largest = max(layout.num_trainable for layout in laid.values())
        blocks, undelivered = {}, {}
        for block, layout in laid.items():
            own = step
            if self.scale == "per-size":
                own = replace(step, rate=step.rate * largest / max(layout.num_trainable, 1))
            now, key = layout.gather(uploads), keys.key(fed.seed, "placebo", fed.round, block)
            blocks[block] = self._after(state.blocks[block], now, lost[block], layout, own, fed.round, key)
            undelivered[block] = lost[block] & ~blocks[block].sent  # a device that uploads gets a newer copy
        return replace(
            state, blocks=blocks, undelivered=undelivered, waited_for=sorted(asked), train_loss=mean_loss(trained, fed)
        )

    @override
    def evaluate(self, state: PfmmlState, fed: Federation) -> Measured:
        own = super().evaluate(state, fed)
        if "personal" not in own.metrics:
            return own
        trained = self.evaluate_personally(fed, Broadcast({})).group
        return replace(own, metrics=own.metrics | {"trained": trained})

    @override
    def evaluation_message(self, state: PfmmlState, fed: Federation, clients: Sequence[int]) -> Send:
        arriving = state.deliveries.messages(layouts(fed, state.params), {*clients})
        return {client: Broadcast(arriving[client].params if client in arriving else {}) for client in clients}

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return {**local, **got.params}

    @override
    def simulated_seconds(self, state: PfmmlState, times: Timetable) -> float:
        return times.chains(times.by_client() if self.waits_for == "all" else state.waited_for)

    @override
    def observe(self, state: PfmmlState) -> dict[str, float]:
        seen: dict[str, float] = {}
        for block, entry in state.blocks.items():
            own = own_coefficients(entry.logits, torch.ones_like(entry.owners))[entry.owners]
            seen[f"own_coefficient.{block}"] = float(own.mean()) if len(own) else 0.0
            seen[f"uploads.{block}"] = float(entry.sent.sum())
            seen[f"oldest.{block}"] = float(entry.ages.max())
        return seen

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        names = [name for name in logged[0] if name.startswith("own_coefficient.")]
        still = [
            name.removeprefix("own_coefficient.") for name in names if abs(logged[-1][name] - logged[0][name]) < MOVED
        ]
        if not still or not self.coefficient_lr or self.placebo == "uniform":
            return []
        return [
            f"the coefficients of {', '.join(still)} have not moved in {len(logged)} rounds, so every device gets "
            "nearly the plain mean there; raise coefficient_lr, or take scale = 'normalised'"
        ]

    @override
    def observe_tables(self, state: PfmmlState) -> dict[str, list[list[float]]]:
        """Return each block's coefficients (row softmax of Xi, Eq. 4). The table `uploads` tells who sent a block."""
        if len(next(iter(state.blocks.values())).ages) > TABLE_CLIENTS:
            return {}
        tables = {f"coefficients.{block}": entry.logits.softmax(1).tolist() for block, entry in state.blocks.items()}
        return tables | {"uploads": [entry.sent.double().tolist() for entry in state.blocks.values()]}

    @task()
    def install(self, context: ClientContext, data: ClientData, local: Tree, got: Blocks) -> tuple[Installed, Tree]:
        """Replace blocks of the device's model by personalised copies (step 7)."""
        return Installed(), {**local, **got.params}

    @task()
    def practise(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Done, Tree]:
        """Train the device's own model (step 1)."""
        fit = data.minimise(context.loss, local, train=self.train)
        return Done(fit.loss, data.num_rows), fit.params

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Wanted) -> tuple[Blocks, Tree]:
        """Send the wanted blocks (step 3)."""
        return exchange.pick(local, got), local

    def _schedule(self, state: PfmmlState, fed: Federation) -> dict[str, Tensor]:
        """Run step 2, block by block. Later blocks wait in the queue behind earlier ones."""
        cost_s, queued_bits = self._seconds_before_upload(state, fed), torch.zeros(len(fed.clients)).double()
        count, rates = exchange.num_uploads(self.uploads, len(fed.clients.eligible)), fed.rates
        chosen: dict[str, Tensor] = {}
        for block, layout in layouts(fed, state.params).items():
            entry, bits = state.blocks[block], layout.num_bits
            among = entry.owners if self.softmax_over == "owners" else torch.ones_like(entry.owners)
            seconds = cost_s if rates is None else cost_s + (queued_bits + bits) / rates.up_bps
            benefit = 1 - own_coefficients(entry.logits, among)
            price = self.price_per_second if self.rule == "linear" else None
            scores = benefit_per_second(benefit, seconds, price)
            chosen[block] = scheduled(scores, entry.owners, entry.ages, count, self.max_age)
            queued_bits = queued_bits + bits * chosen[block]
        return chosen

    def _seconds_before_upload(self, state: PfmmlState, fed: Federation) -> Tensor:
        """Return T_D + T_C of every device in this round, (K,): the times to download its copies and to train."""
        clients, model, rates = fed.clients, fed.context.model, fed.rates
        if rates is None:
            return torch.zeros(len(clients)).double()
        down_bits = torch.zeros(len(clients)).double()
        for block, layout in layouts(fed, state.params).items():
            down_bits += layout.num_bits * state.deliveries.due(block)
        if fed.links is not None:
            measured: Tensor = down_bits / rates.down_bps + fed.links.work_s("practise")
            return measured
        assert fed.clock is not None
        flops = {block: model.flops(block) for block in (*clients.modalities, SHARED)}
        own_flops = clients.holds.double() @ torch.tensor([flops[m] for m in clients.modalities]).double()
        rows = [rows_trained(n, self.train, skip_single=model.has_batchnorm) for n in clients.num_rows.tolist()]
        work = TRAINING_PASSES * torch.tensor(rows).double() * (own_flops + flops[SHARED])
        seconds: Tensor = down_bits / rates.down_bps + work / fed.clock.links.compute_flops_per_s
        return seconds

    def _after(
        self,
        entry: BlockState,
        now: tuple[Tensor, Tensor],
        lost: Tensor,
        layout: Layout,
        step: Step,
        round: int,
        key: int,
    ) -> BlockState:
        """Run steps 4 to 6 for one block. `lost`, bool (K,), marks the devices that did not receive their copy."""
        members, uploads = now

        def update(logits: Tensor) -> Tensor:
            drifted = (~lost[members]).to(members.device)
            known = now if bool(drifted.all()) else (members[drifted], uploads[drifted.to(uploads.device)])
            return learned(logits, entry.built, entry.records, known, layout.num_trainable, step)

        sent = torch.zeros_like(entry.sent)
        sent[members] = True
        ages = torch.where(sent | ~entry.owners, 0, entry.ages + 1)
        if not len(members):
            return replace(entry, ages=ages, sent=sent)
        before = update(entry.logits) if self.learn == "before" else entry.logits
        if self.placebo == "uniform":
            before = entry.logits
        record = aggregate(shuffled(before, key) if self.placebo == "shuffled" else before, members, uploads)
        logits = update(entry.logits) if self.learn == "after" else before
        if self.placebo == "uniform":
            logits = entry.logits
        built = torch.where(sent, round, entry.built)
        needed = set(torch.unique(built).tolist())
        records = {number: old for number, old in entry.records.items() if number in needed} | {round: record}
        return BlockState(entry.owners, logits, ages, built, sent, records)

    def _step(self, fed: Federation) -> Step:
        """Return the settings of this round's update of the coefficients."""
        divisors = None
        if self.scale == "per-step":
            skip, counts = fed.context.model.has_batchnorm, fed.clients.num_rows.tolist()
            steps = torch.tensor([steps_trained(n, self.train, skip_single=skip) for n in counts])
            divisors = (self.train.lr_at(fed.round, fed.rounds) * steps).clamp(min=1e-12).double()
        oldest = fed.round - 1 if self.record == "previous-round" else 1
        return Step(-self.grad_sign * self.coefficient_lr, oldest, divisors, self.scale == "normalised")
