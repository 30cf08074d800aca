"""HFM: vertical training inside silos, and horizontal averaging across silos.

Peng, Wu, Bian, Xu, IEEE Internet of Things Journal 11(21), 2024, as described by a reproduction report. This file is
the horizontal half of the method. The vertical half, training inside silos, is `silo_exchange.py`. In a round, the
server broadcasts encoders and head, and every silo does R exchanges of Q local rounds. The server then averages
encoders and heads over the silos, weighted by rows (Eq. 3). See docs/algorithms/hfm.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.base import SCORING
from polyfed.algorithms.hfm.messages import bytes_down, bytes_up
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.algorithms.hfm.silo_exchange import Vertical, may_report
from polyfed.algorithms.hfm.state import SiloState
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, nested, select, under
from polyfed.evaluation.scores import Measured, joined
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
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
        state = self.identified(state, fed)
        samples = self.samples(state, fed)
        silos = {silo: list(own.places) for silo, own in samples.items()}
        heads = {silo: self._head(fed, members, state.params) for silo, members in silos.items()}
        head = set(fed.context.model.head())
        encoders = {name: value for name, value in state.params.items() if name not in head}
        send = {
            client: Adopt(encoders, heads[silo] if self.mu else {})
            for silo, members in silos.items()
            for client in members
        }
        adopted = fed.ask(self.adopt, sorted(send), send)
        answered = {silo: [client for client in members if client in adopted] for silo, members in silos.items()}
        there = {silo: members for silo, members in answered.items() if self._can_train(fed, members)}
        heads = {silo: self._head(fed, members, state.params) for silo, members in there.items()}
        state = self.vertical(state.with_(heads=heads, silo_bytes=0), fed, there, samples)
        uploads, handed = self.sent_models(state, fed, there)
        return state.with_(
            params=state.params | self._mean(uploads, samples, fed),
            silo_bytes=state.silo_bytes + handed,
            server_bytes=bytes_down(fed, send) + bytes_up(adopted) + bytes_up(uploads),
        )

    def _can_train(self, fed: Federation, members: Sequence[int]) -> bool:
        """Return whether one of these devices of a silo holds labels."""
        return any(self.holds_labels(fed.clients.owned(client)) for client in members)

    def _mean(self, uploads: Replies, samples: Mapping[int, SiloSamples], fed: Federation) -> Tree:
        """Return the averages of Eq. 3: encoders weighted by the device's samples, heads by the silo's samples."""
        silo_of = {client: silo for silo, own in samples.items() for client in own.places}
        encoders = {client: samples[silo_of[client]].rows(client) for client in uploads}
        whole = {client: samples[silo_of[client]].count for client in uploads}
        mean = uploads.mean("params", encoders)
        if encoders != whole:
            mean |= {n: v for n, v in uploads.mean("params", whole).items() if n in fed.context.model.head()}
        return mean

    @override
    def evaluate(self, state: SiloState, fed: Federation) -> Measured:
        found = self.evaluate_globally(state.params, fed) if fed.evaluation_clients else Measured({})
        if not (self.evaluation.personal and fed.clients.tested and may_report(fed.context.policy)):
            return found
        head = set(fed.context.model.head())
        encoders = {name: value for name, value in state.params.items() if name not in head}
        heads = {silo: self._head(fed, members, state.params) for silo, members in self.devices(fed).items()}
        return joined(found, self.evaluated_in_silos(fed, heads, encoders))

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        own = self.evaluation.personal and may_report(policy)
        asked = {"embed_own": own, "score_silo": own, **dict.fromkeys(SCORING, False)}
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
