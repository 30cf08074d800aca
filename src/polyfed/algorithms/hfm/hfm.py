"""HFM: vertical training inside silos, and horizontal averaging across silos.

Peng, Wu, Bian, Xu, IEEE Internet of Things Journal 11(21), 2024, as described by a reproduction report. This file is
the horizontal half of the method. The vertical half, training inside silos, is `silo_exchange.py`. In a round, the
server broadcasts encoders and head, and every silo does R exchanges of Q local rounds. The server then averages
encoders and heads over the silos, weighted by rows (Eq. 3). See docs/algorithms/hfm.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.base import SCORING
from polyfed.algorithms.hfm.messages import Forward, ToEdge, Upload, bytes_down, bytes_up
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.algorithms.hfm.state import Edge, SiloState
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, nested, select, under
from polyfed.evaluation.scores import Measured
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.federation.silos.parts import Ask, Part
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData

ANCHOR = "anchor"
"""Prefix in a device's local state under which the device keeps the values of the last broadcast."""


@message
class Adopt(Message):
    """The server's broadcast to a device: new values for the device's encoders and, if `mu` is above 0, the head.

    With `mu` above 0, the device keeps these values as its anchor: the proximal term (Eq. 4) pulls training to them.
    """

    params: Tree = carries("parameters", part="encoders")
    head: Tree = carries("parameters", whole=True, part="head", optional=True)


@message
class Adopted(Message):
    """The reply to the broadcast: how many rows the device has."""

    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Hfm(Vertical):
    """HFM: training inside silos, then averaging across silos. `Vertical` lists the options."""

    silo_parts: ClassVar[tuple[str, ...]] = ("begin", "trained", "silo_scored", "silo_validated", "silo_counted")
    mixing: ClassVar[str] = "hfm trains each device on the embeddings of others"

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        own = super().local(context, key)
        if not self.mu:
            return own
        encoders = self._encoders(context, own)
        shapes = {name: value for name, value in context.model.template.items() if name in context.model.head()}
        head = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return own | nested(ANCHOR, encoders | head)

    @override
    def anchors(self, local: Tree, head: Tree) -> Tree:
        return under(ANCHOR, local)

    @override
    def round(self, state: SiloState, fed: Federation) -> SiloState:
        """Broadcast, do R exchanges in every silo, and average over the silos.

        A device that missed the broadcast does not take part in the round, because its encoder and its anchor would be
        older than those of the other devices. The silo then trains without the device's modalities in this round.
        """
        silos = self.devices(fed)
        result = fed.in_silos(self.trained, silos, state.edges, ToEdge(state.params))
        adopted, uploads = result.of(self.adopt), result.of(self.upload)
        fed.require_quorum(uploads, "upload")
        asked = {*adopted, *adopted.missing}
        send: dict[int, Message] = {}
        for members in silos.values():
            there = [client for client in members if client in asked]
            send |= self._broadcast(fed, there, state.params)
        first = {silo: next((c for c in members if c in uploads), None) for silo, members in silos.items()}
        told = [uploads[client].training.cpu() for client in first.values() if client is not None]
        return state.after(told, self.exchanges).with_(
            params=state.params | self._mean(uploads, silos, fed),
            edges=state.edges | result.kept,
            server_bytes=bytes_down(fed, send) + bytes_up(adopted) + bytes_up(uploads),
        )

    def trained(self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation) -> Part[Edge]:
        """Hand the global model to the devices of a silo, do R exchanges, and let the devices send their models."""
        own = yield from self.identified(members, kept or Edge(), fed)
        samples = self.samples(silo, members, own, fed)
        if samples is None:
            return own
        adopted = yield Ask(self.adopt, self._broadcast(fed, list(samples.places), got.params))
        there = [client for client in samples.places if client in adopted]
        if not any(self.holds_labels(fed.clients.owned(client)) for client in there):
            return own
        own = replace(own, head=self._head(fed, there, got.params))
        own = yield from self.exchanged(silo, there, own, samples, fed)
        counts = {client: (torch.tensor(samples.rows(client)), torch.tensor(samples.count)) for client in there}
        heads = {there[0]: own.head}
        forward = {c: Forward(heads.get(c, {}), rows, count, own.training) for c, (rows, count) in counts.items()}
        moved = torch.tensor([0, 0, 0, 0, bytes_down(fed, forward)], dtype=torch.float64)
        own = replace(own, training=own.training + moved)
        yield Ask(self.upload, {c: replace(msg, training=own.training) for c, msg in forward.items()})
        return own

    def _broadcast(self, fed: Federation, members: Sequence[int], params: Tree) -> dict[int, Message]:
        """Return the server's message to each of some devices of a silo."""
        whole = set(fed.context.model.head())
        encoders = {name: value for name, value in params.items() if name not in whole}
        head = self._head(fed, members, params) if self.mu else {}
        return dict.fromkeys(members, Adopt(encoders, head))

    def _mean(self, uploads: Replies, silos: Mapping[int, Sequence[int]], fed: Federation) -> Tree:
        """Return the averages of Eq. 3: encoders weighted by the device's samples, heads by the silo's samples.

        An edge says how many samples take part. No device has more than its rows, and no silo more than its devices.
        """
        rows = fed.clients.rows_of(uploads)
        of_silo = {c: sum(fed.clients.rows_of(members).values()) for members in silos.values() for c in members}
        encoders = {client: min(int(reply.num_rows), rows[client]) for client, reply in uploads.items()}
        whole = {client: min(int(reply.samples), of_silo[client]) for client, reply in uploads.items()}
        mean = uploads.mean("params", encoders)
        if encoders != whole:
            mean |= {n: v for n, v in uploads.mean("params", whole).items() if n in fed.context.model.head()}
        return mean

    @override
    def evaluate(self, state: SiloState, fed: Federation) -> Measured:
        result = self.evaluate_globally(state.params, fed) if fed.evaluation_clients else Measured({})
        return self.with_own_rows(result, fed, state.edges, state.params)

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        asked = self.scoring(policy) | dict.fromkeys(SCORING, False)
        return asked.get(task, super().will_send(task, field, block, policy))

    @override
    def client_model(self, client: int, state: SiloState, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        return select(state.params, (*self.client_modalities(client, fed), SHARED))

    @task()
    def adopt(self, context: ClientContext, data: ClientData, local: Tree, got: Adopt) -> tuple[Adopted, Tree]:
        """Replace the device's encoders and anchors by the broadcast values."""
        encoders = {name: value for name, value in got.params.items() if name in local}
        anchors = nested(ANCHOR, encoders | got.head) if self.mu else {}
        return Adopted(data.num_rows), local | encoders | anchors

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Forward) -> tuple[Upload, Tree]:
        """Send the device's encoders to the server. The first device of a silo also forwards the head of its edge."""
        return Upload(self._encoders(context, local) | got.head, got.num_rows, got.samples, got.training), local
