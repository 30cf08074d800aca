"""FedFomo: every client evaluates other clients' models on held-out rows and moves towards those with a lower loss.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
Eqs. 3 and 4. Every client holds out some of its training rows. The weight of a candidate model is
max(0, L(previous) - L(candidate)) / ||candidate - previous||, normalised over the candidates. `previous` is the
client's model at the start of the round, and L is the loss on the held-out rows.

polyfed's choice: FedFomo works per block, so that clients with different modalities can use each other's blocks. To
measure a candidate block, the client puts it into `previous` and changes no other block. Its own trained block is a
candidate too. The client keeps its trained block if no candidate has a lower loss than `previous`. In every round,
some owners of a block send the block (option `uploads`). All owners of the block receive these uploads as candidates.

Clients send blocks of personal models to other clients through the server, and the candidates' weights to the server.
Page: docs/algorithms/fedfomo.md.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import mean_loss
from polyfed.algorithms.base import NO_GLOBAL, Algorithm, Broadcast
from polyfed.algorithms.local import Done, Start
from polyfed.algorithms.personal import blocks as exchange
from polyfed.algorithms.personal.blocks import Blocks, Layout, Wanted, layouts, owners
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import AT_LEAST_TWO, COST, NOT_NEGATIVE, PROBABILITY, NotSearched, SearchRange
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, block_of, blocks, keep_on_host, nested, under
from polyfed.federation.clock import Timetable
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.objective import Objective
from polyfed.training import ClientData
from polyfed.training.client_data import FOLD_BATCH

PREVIOUS = "previous"
"""Prefix of the model at the start of the round in a client's local state."""

TABLE_CLIENTS = 64
"""The largest number of clients for which preferences are logged. A larger heat map would not be readable."""


@message
class Candidates(Message):
    """Blocks of other clients. Every tensor has a leading axis of length N, which may differ from block to block."""

    params: Tree = carries("parameters", stacked=True, optional=True)


@message
class Weights(Message):
    """The weights (N,) of the received candidates, by block. The client's own block has the remaining weight."""

    weights: Tree = carries("statistic", dtype="float32", shape=(None,), within=PROBABILITY)


@dataclass(frozen=True)
class FedFomoState:
    """Server state.

    Attributes:
        params: the common initial model. FedFomo has no global model.
        preferences: by block, float64 (K, K). Entry [i, j] sums the weights that client i has given to client j.
        waited_for: the clients from which the server requested an upload in the last round.
        train_loss: mean training loss of the last round, weighted by rows.
    """

    params: Tree
    preferences: dict[str, Tensor] = field(default_factory=dict)
    waited_for: list[int] = field(default_factory=list)
    train_loss: float = float("nan")

    def __post_init__(self) -> None:
        """Keep the preferences on the CPU, because they are read one by one."""
        keep_on_host(self, "preferences")


@dataclass(frozen=True, kw_only=True)
class FedFomo(Algorithm[FedFomoState]):
    """Personal models as mixtures of other clients' models.

    Attributes:
        uploads: clients that send a block in a round: a share of all clients, or a count.
        every: a client holds out every n-th of its training rows: with 5, 20 %, as in the paper.
        candidates: most blocks of other clients that a client receives, those that it has preferred so far; 0 for all.
        explore: epsilon, the probability that a candidate is drawn at random, in round 1.
        explore_decay: by how much epsilon decreases in every round.
    """

    mixing: ClassVar[str] = "fedfomo mixes each block with weights from the loss of the whole model"
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)

    uploads: Annotated[float | int, COST] = 1.0
    every: Annotated[int, AT_LEAST_TWO, NotSearched("decides how many rows the clients hold out")] = 5
    candidates: Annotated[int, NOT_NEGATIVE, COST] = 0
    explore: Annotated[float, PROBABILITY, SearchRange(0.0, 0.1, 0.3, 0.5)] = 0.3
    explore_decay: Annotated[float, NOT_NEGATIVE, NotSearched("goes with explore")] = 0.05

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        super().__post_init__()
        exchange.check_uploads(self.uploads)

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = {"evaluate.unimodal": NO_GLOBAL}
        if not self.candidates or self.candidates >= exchange.num_uploads(self.uploads, len(fed.clients.eligible)):
            result |= dict.fromkeys(
                ("explore", "explore_decay"), f"candidates = {self.candidates}, which is every block"
            )
        elif not self.explore:
            result["explore_decay"] = "explore = 0"
        return result

    @override
    def init(self, fed: Federation, params: Tree) -> FedFomoState:
        size = len(fed.clients)
        return FedFomoState(params, {b: torch.zeros(size, size).double() for b in layouts(fed, params)})

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return {**context.initial, **nested(PREVIOUS, context.initial)}

    @override
    def round(self, state: FedFomoState, fed: Federation) -> FedFomoState:
        """Let all clients train, collect the uploads, send every client its candidates, and let it mix them."""
        trained = fed.ask(self.train_own, list(fed.clients.eligible), Start())
        layout = layouts(fed, state.params)
        count = exchange.num_uploads(self.uploads, len(fed.clients.eligible))
        asked = exchange.wanted(exchange.draw_uploads(fed, count, layout))
        uploads = fed.ask(self.upload, list(asked), asked, quorum=False, accept=exchange.as_wanted(asked, layout))
        offers = self._offers(state, fed, uploads, layout)
        sends = {client: offer.message(layout) for client, offer in offers.items()}

        def flaw(client: int, reply: Weights) -> str:
            counted = {block: len(share) for block, share in reply.weights.items()}
            offered = {block: len(senders) for block, senders in offers[client].senders.items()}
            return "" if counted == offered else f"has weights for {counted} candidates, received {offered}"

        mixed = fed.ask(self.mix, list(offers), sends, quorum=False, accept=flaw)
        preferences = {block: table.clone() for block, table in state.preferences.items()}
        for client in mixed:
            for block, weights in mixed[client].weights.items():
                preferences[block][client, offers[client].senders[block]] += weights.double().cpu()
        return FedFomoState(state.params, preferences, sorted(asked), mean_loss(trained, fed))

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return split(local)[0]

    @override
    def simulated_seconds(self, state: FedFomoState, times: Timetable) -> float:
        return times.chains(state.waited_for)

    @override
    def observe_tables(self, state: FedFomoState) -> dict[str, list[list[float]]]:
        tables = {f"preferences.{block}": table.tolist() for block, table in state.preferences.items()}
        return tables if all(len(table) <= TABLE_CLIENTS for table in tables.values()) else {}

    @task()
    def train_own(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Done, Tree]:
        """Train the client's own model on the rows that are not held out."""
        own, _ = split(local)

        def loss(w: Tree, batch: Batch) -> Tensor:
            trained = batch.rows % self.every != self.every - 1
            rest = replace(batch, ok=trained if batch.ok is None else batch.ok & trained)
            return context.loss(w, rest)

        fit = data.minimise(loss, own, train=self.train)
        return Done(fit.loss, data.num_rows), {**fit.params, **nested(PREVIOUS, own)}

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Wanted) -> tuple[Blocks, Tree]:
        """Send the blocks that the server asked for."""
        return exchange.pick(split(local)[0], got), local

    @task()
    def mix(self, context: ClientContext, data: ClientData, local: Tree, got: Candidates) -> tuple[Weights, Tree]:
        """Compute the candidates' weights from their losses on the held-out rows, and mix every block (Eqs. 3, 4)."""
        own, previous = split(local)
        pools = {
            block: {n: torch.cat([v, own[n].unsqueeze(0)]) for n, v in got.params.items() if block_of(n) == block}
            for block in blocks(got.params)
        }
        base, losses = self._losses(context, data, previous, pools)
        after, weights = dict(own), {}
        for block, pool in pools.items():
            distance = distances(context.model.trainable(pool), previous)
            share = candidate_weights(base, losses[block], distance)
            improved = share.sum() > 0
            for name, values in pool.items():
                after[name] = torch.where(improved, torch.tensordot(share, values, 1), own[name])
            weights[block] = share[:-1]
        return Weights(weights), {**after, **nested(PREVIOUS, after)}

    def _losses(
        self, context: ClientContext, data: ClientData, previous: Tree, pools: dict[str, Tree]
    ) -> tuple[Tensor, Tree]:
        """Compute the mean held-out loss of `previous`, and the losses after a candidate replaces one of its blocks.

        Args:
            previous: the client's model at the start of the round.
            pools: by block, the candidates as tensors with a leading axis of length N.

        Returns:
            The loss of `previous`; and for each block the losses (N,), one for each candidate that replaces the block.
        """
        sizes = {block: len(next(iter(pool.values()))) for block, pool in pools.items()}
        zero = torch.zeros((), device=data.num_rows.device)
        start = (zero, zero, {block: torch.zeros(size, device=zero.device) for block, size in sizes.items()})

        def step(carry: tuple[Tensor, Tensor, Tree], batch: Batch) -> tuple[Tensor, Tensor, Tree]:
            rows, base, sums = carry
            held = every_nth(batch, self.every)

            def total(w: Tree) -> Tensor:
                return held.sum(context.row_losses(w, held)[0])

            for block, pool in pools.items():
                tried = [total({**previous, **{n: v[i] for n, v in pool.items()}}) for i in range(sizes[block])]
                sums = {**sums, block: sums[block] + torch.stack(tried)}
            values, weights = context.row_losses(previous, held)
            return rows + held.sum(weights), base + held.sum(values), sums

        size = self.every * max(FOLD_BATCH // self.every, 1)  # a multiple of `every`, because `every_nth` needs one
        rows, base, sums = data.fold(step, start, batch_size=size)
        rows = torch.where(rows > 0, rows, torch.ones_like(rows))
        return base / rows, {block: value / rows for block, value in sums.items()}

    def _offers(
        self, state: FedFomoState, fed: Federation, uploads: Replies, layout: dict[str, Layout]
    ) -> "dict[int, Offer]":
        """Return the candidates that each client receives, without the client's own block."""
        offers: dict[int, Offer] = {}
        for block, form in layout.items():
            members, rows = form.gather(uploads)
            for client in owners(fed, block).nonzero().flatten().tolist():
                others = (members != client).nonzero().flatten()
                if self.candidates and len(others) > self.candidates:
                    others = self._preferred(state.preferences[block][client], members, others, (client, block), fed)
                if len(others):
                    offer = offers.setdefault(client, Offer())
                    offer.senders[block], offer.rows[block] = members[others], rows[others]
        return offers

    def _preferred(
        self, preferences: Tensor, members: Tensor, others: Tensor, who: tuple[int, str], fed: Federation
    ) -> Tensor:
        """Choose `candidates` clients one by one: at random with probability epsilon, else the most preferred one left.

        Args:
            preferences: the client's preferences (K,) in the block.
            members: clients that sent the block (S,).
            others: all positions in `members` except the position of the client itself.
            who: the client and the block. Each pair (client, block) has its own random key, made from the run's seed.
        """
        key = keys.key(fed.seed, "explore", *who, fed.round)
        chance = max(self.explore - self.explore_decay * (fed.round - 1), 0.0)
        explores = keys.uniform(keys.fold_in(key, 0), self.candidates) < chance
        shuffled = others[keys.permutation(keys.fold_in(key, 1), len(others))].tolist()
        best = others[preferences[members[others]].argsort(descending=True, stable=True)].tolist()
        chosen: list[int] = []
        for random in explores.tolist():
            chosen.append(next(i for i in (shuffled if random else best) if i not in chosen))
        return torch.tensor(sorted(chosen))


@dataclass
class Offer:
    """The candidates for one client. For each block, the clients in `senders` (N,) sent the flattened `rows` (N, P)."""

    senders: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def message(self, layout: dict[str, Layout]) -> Candidates:
        """Return the candidates as a message."""
        params: Tree = {}
        for block, rows in self.rows.items():
            params.update(layout[block].trees(rows))
        return Candidates(params)


def split(local: Tree) -> tuple[Tree, Tree]:
    """Split a local state into the client's own model and its model at the start of the round."""
    own = {name: value for name, value in local.items() if block_of(name) != PREVIOUS}
    return own, under(PREVIOUS, local)


def every_nth(batch: Batch, n: int) -> Batch:
    """Return the held-out rows n - 1, 2 n - 1, ... of a batch. The size of earlier batches must be a multiple of n."""
    part = slice(n - 1, None, n)
    return replace(
        batch,
        x={m: value[part] for m, value in batch.x.items()},
        y=batch.y[part],
        rows=batch.rows[part],
        ok=None if batch.ok is None else batch.ok[part],
        present={m: value[part] for m, value in batch.present.items()},
    )


def distances(pool: Tree, previous: Tree) -> Tensor:
    """Return the Euclidean distance (N,) of each candidate of a block to this block of the previous model."""
    squares = [(v - previous[name]).flatten(1).square().sum(1) for name, v in pool.items()]
    return torch.stack(squares).sum(0).sqrt()


def candidate_weights(base: Tensor, losses: Tensor, distance: Tensor) -> Tensor:
    """Return the normalised weights (N,) of the candidates (Eq. 4), or zeros if no loss is lower than `base`.

    Args:
        base: loss of the previous model.
        losses: losses (N,) of the candidates.
        distance: distances (N,) of the candidates to the previous model.
    """
    raw = (base - losses).clamp(min=0.0) / distance.clamp(min=1e-12)
    total = raw.sum()
    return raw / torch.where(total > 0, total, 1.0)
