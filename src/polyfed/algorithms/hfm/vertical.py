"""Training inside silos: devices that hold different modalities of the same samples, and an edge between them.

This is the template of HFM (`hfm.py`) and its control VFL (`vfl.py`). In an exchange, the edge draws a mini-batch of
its silo's rows, and the devices send the embeddings of these rows. The edge sends all embeddings and its head to every
device. Every device trains its encoder and a copy of the head for Q local rounds, with the other devices' embeddings
held constant. Then the edge computes the mean of the copies.

Letters: M silos, K devices in a silo, N_m rows of silo m, B_m its mini-batch, Q local rounds between two exchanges
(`local_rounds`), R exchanges in a round (`exchanges`). See docs/algorithms/hfm.md.

The server half of this file runs the edges. Requests whose replies only an edge may see have `scope="silo"`. A message
from an edge to the server goes through the first device of its silo. That device's policy therefore applies, and its
ledger counts the message. The vectorised engine stacks all devices of one modality, across silos.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms.averaging import State
from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.exchange import (
    Copy,
    Embedded,
    Exchange,
    Forward,
    Ids,
    Question,
    Sample,
    Sent,
    Upload,
    bytes_down,
    bytes_up,
    mean_tree,
    shuffled_peers,
    stale_embeddings,
    whole_batch,
)
from polyfed.algorithms.hfm.options import VerticalOptions
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.request import names_as_sent
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model.fusion import masked
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.kept_training import KeptTraining
from polyfed.training.optimisers import Train


@dataclass(frozen=True)
class SiloState(State):
    """The state of `Averaging`, and the state of the edges.

    Attributes:
        heads: the head of each silo's edge.
        sent: the last embeddings of each device; kept only with `resample = false`, which can use them again.
        drift: mean relative drift of the embeddings within Q local rounds, in the last round.
        exchanges: number of exchanges so far.
        silo_bytes: bytes between devices and their edges in the last round, both directions.
        server_bytes: bytes between devices and the server in the last round, both directions.
    """

    heads: dict[int, Tree] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    drift: float = 0.0
    exchanges: int = 0
    silo_bytes: int = 0
    server_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Vertical(VerticalOptions):
    """The template of training inside silos. `VerticalOptions` lists the options."""

    needs_embeddings: ClassVar[bool] = True

    aligns_rows: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "devices of a silo exchange embeddings to compute one common output"

    @abstractmethod
    def anchors(self, local: Tree, got: Exchange) -> Tree:
        """The values towards which the proximal term pulls, by name."""

    def local(self, context: ClientContext, key: int) -> Tree:
        """Return the device's encoders with their common initial values, and with `keep_optimiser` also the moments."""
        head = set(context.model.head())
        encoders = {name: value for name, value in context.initial.items() if name not in head}
        if not self.keep_optimiser:
            return encoders
        shapes = {name: value for name, value in context.model.template.items() if name in head}
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return encoders | KeptTraining.fresh(context.model, encoders | zeros, self.train).state()

    def init(self, fed: Federation, params: Tree) -> SiloState:
        """Give every edge the initial head, and compare the sample ids of the devices of each silo.

        Raises:
            RecipeError: the clients form no silos, or two devices of a silo hold the same modality.
            DataError: the devices of a silo do not hold the same samples in the same order.
        """
        silos = devices_of_silos(fed.clients)
        devices = [client for members in silos.values() for client in members]
        ids = {client: reply.ids for client, reply in fed.ask(self.identify, devices, Question()).items()}
        for silo, members in silos.items():
            check_aligned(silo, {client: ids[client] for client in members if client in ids})
        return SiloState(params, heads={silo: self._head(fed, members, params) for silo, members in silos.items()})

    def vertical(self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]]) -> SiloState:
        """Do R exchanges, each followed by Q local rounds, in several silos at once.

        Args:
            state: the state. In the returned state, `train_loss` and `drift` are means over devices.
            fed: the federation.
            silos: the devices of each silo that take part.
        """
        drifts: list[float] = []
        losses: list[float] = []
        for number in range(self.exchanges):
            state, copies = self._exchange(state, fed, silos, number)
            losses += copies.numbers("loss").values()
            drifts += copies.numbers("drift").values()
        mean = {"train_loss": losses, "drift": drifts}
        return state.with_(**{name: sum(values) / len(values) for name, values in mean.items() if values})

    def upload_of(self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]]) -> tuple[Replies, int]:
        """Return the devices' encoders, each silo's head from its first device, and the bytes sent to the devices."""
        heads = {members[0]: state.heads[silo] for silo, members in silos.items()}
        send = {client: Forward(heads.get(client, {})) for members in silos.values() for client in members}
        return fed.ask(self.upload, sorted(send), send), bytes_down(fed, send)

    def observe(self, state: SiloState) -> dict[str, float]:
        """Exchanges and local rounds so far, staleness of embeddings, and bytes inside and outside of silos."""
        return {
            "exchanges": state.exchanges,
            "local_rounds": state.exchanges * self.local_rounds,
            "staleness": state.drift,
            "silo_bytes": state.silo_bytes,
            "server_bytes": state.server_bytes,
        }

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Allow `fit_head` only with `head_update = "server"`."""
        return task != "fit_head" or self.head_update == "server"

    # the edge

    def _exchange(
        self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]], number: int
    ) -> tuple[SiloState, Replies]:
        samples = {silo: Sample(self._rows(fed, silo, members, number)) for silo, members in silos.items()}
        request = {client: samples[silo] for silo, members in silos.items() for client in members}
        answers = fed.ask(self.embed, sorted(request), request, turn=number, accept=whole_batch(request))
        fresh = {client: Sent(request[client].rows, reply.embeddings) for client, reply in answers.items()}
        known = state.sent | fresh
        phi: dict[int, Exchange] = {}
        for silo, members in silos.items():
            embeddings = stale_embeddings(samples[silo].rows, [known[c] for c in members if c in known])
            exchange = Exchange(state.heads[silo], embeddings, samples[silo].rows)
            phi |= {client: exchange for client in members if client in answers}
            if self.placebo == "shuffled":
                key = keys.key(fed.seed, "placebo", silo, fed.round, number)
                phi |= {c: shuffled_peers(exchange, fed.clients.owned(c), key) for c in members if c in answers}
        accept = None if self.head_update == "server" else names_as_sent("head", phi)
        copies = fed.ask(self.practise, sorted(phi), phi, turn=number, accept=accept)
        heads_from, moved = (
            copies,
            bytes_down(fed, request) + bytes_up(answers) + bytes_down(fed, phi) + bytes_up(copies),
        )
        if self.head_update == "server":
            hosts = {
                there[0]: phi[there[0]] for members in silos.values() if (there := [c for c in members if c in phi])
            }
            heads_from = fed.ask(
                self.fit_head, sorted(hosts), hosts, quorum=False, turn=number, accept=names_as_sent("head", hosts)
            )
            moved += bytes_down(fed, hosts) + bytes_up(heads_from)
        heads = {
            silo: mean_tree([heads_from[client].head for client in members if client in heads_from])
            or state.heads[silo]
            for silo, members in silos.items()
        }
        after = state.with_(
            heads=state.heads | heads,
            sent={} if self.resample else known,
            exchanges=state.exchanges + 1,
            silo_bytes=state.silo_bytes + moved,
        )
        return after, copies

    def _rows(self, fed: Federation, silo: int, members: Sequence[int], number: int) -> Tensor:
        """Return B_m, in random order, from the stream (seed, "silo batch", silo, round, exchange)."""
        total = int(fed.clients.num_rows[members[0]])
        when = (fed.round, number) if self.resample else ()
        order = keys.permutation(keys.key(fed.seed, "silo batch", silo, *when), total)
        return order[: max(1, round(self.batch_fraction * total))]

    def _head(self, fed: Federation, members: Sequence[int], params: Tree) -> Tree:
        """Return the head with only the columns of the silo's modalities; other columns would have no input."""
        held = {modality for client in members for modality in fed.clients.owned(client)}
        return {name: params[name] for name in fed.context.model.head(held)}

    # devices

    @task(scope="silo")
    def identify(self, context: ClientContext, data: ClientData, local: Tree, got: Question) -> tuple[Ids, Tree]:
        """Send the edge the ids of the device's samples."""
        return Ids(data.ids, data.num_rows), local

    @task(scope="silo")
    def embed(self, context: ClientContext, data: ClientData, local: Tree, got: Sample) -> tuple[Embedded, Tree]:
        """Compute the embeddings of B_m for the edge."""
        return Embedded(self._embeddings(context, data, local, got.rows)), local

    @task(scope="silo")
    def practise(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Run Q local rounds on B_m (Eq. 1, 2): train the encoders, and a copy of the head unless it is kept frozen."""
        encoders = self._encoders(context, local)
        trained = {*encoders, *self._reached(context, got)}
        if self.head_update == "server":
            trained = set(encoders)
        kept = KeptTraining.of(local).only(trained) if self.keep_optimiser else None
        fit = self._fit(context, data, encoders | got.head, trained, local, got, kept=kept)
        after = local | {name: fit.params[name] for name in encoders} | (kept.after(fit).state() if kept else {})
        moved = self._embeddings(context, data, after, got.rows)
        before = {modality: got.embeddings[modality] for modality in moved}
        zero = {modality: torch.zeros_like(value) for modality, value in before.items()}
        drift = squared_distance(moved, before) / squared_distance(before, zero).clamp(min=1e-12)
        copy = {name: fit.params[name] for name in got.head if self.head_update == "device_average"}
        return Copy(copy, kept.loss(fit) if kept else fit.loss, drift.sqrt()), after

    @task(scope="silo")
    def fit_head(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Run Q local rounds of the head alone on the stale embeddings of all devices, for the edge."""
        fit = self._fit(context, data, got.head, self._reached(context, got), local, got, fresh=False)
        return Copy(fit.params, fit.loss, torch.zeros_like(fit.loss)), local

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Forward) -> tuple[Upload, Tree]:
        """Send the encoders, and the head that the device forwards for its edge, to the server."""
        return Upload(self._encoders(context, local) | got.head), local

    def _fit(
        self,
        context: ClientContext,
        data: ClientData,
        params: Tree,
        trained: set[str],
        local: Tree,
        got: Exchange,
        *,
        fresh: bool = True,
        kept: KeptTraining | None = None,
    ) -> TrainingResult:
        # trainable parameters only: the term for BatchNorm statistics would only add a constant to the reported loss
        pulled = context.model.trainable(self.anchors(local, got))
        anchors = {name: value for name, value in pulled.items() if name in trained}

        def loss(w: Tree, batch: Batch) -> Tensor:
            own = context.model.features(w, batch) if fresh else {}
            peers = {m: h[batch.rows] for m, h in got.embeddings.items() if m not in own}
            value = context.loss(w, batch, peers | own)
            return value + self.mu / 2 * squared_distance(anchors, w) if self.mu and anchors else value

        train: Train = replace(self.train, steps=self.local_rounds, batch_size=0)
        if self.local_unit == "epoch":
            train = replace(self.train, epochs=self.local_rounds, batch_size=self.inner_batch)
        elif kept:  # an epoch of one batch is a step; `after` continues epochs only
            train = replace(self.train, epochs=self.local_rounds, batch_size=0)
        after = kept.earlier() if kept else None
        return data.at(got.rows).minimise(loss, params, train=train, only=trained, after=after)

    def _embeddings(self, context: ClientContext, data: ClientData, local: Tree, rows: Tensor) -> Tree:
        """Compute embeddings (B_m, E) of the device's own modalities, with zeros for rows that lack one."""
        encoders = self._encoders(context, local)
        view = data.at(rows)

        def step(parts: list[dict[str, Tensor]], batch: Batch) -> list[dict[str, Tensor]]:
            if not self.eval_embeddings:
                batch = replace(batch, key=data.draw("embeddings"))
            w = {name: value.clone() for name, value in encoders.items()}  # BatchNorm would change the originals
            return [*parts, masked(context.model.features(w, batch), batch.present)]

        # with batch statistics, B_m must be one batch, as it is in a training step
        parts = view.fold(step, [], batch_size=FOLD_BATCH if self.eval_embeddings else len(rows))
        return {modality: torch.cat([part[modality] for part in parts]) for modality in context.modalities}

    def _encoders(self, context: ClientContext, local: Tree) -> Tree:
        return {name: local[name] for name in context.initial if name in local}

    def _reached(self, context: ClientContext, got: Exchange) -> set[str]:
        """Return the names in the head that the loss reaches: not the columns of devices that sent no embeddings."""
        return set(context.model.head(got.embeddings)) & got.head.keys()
