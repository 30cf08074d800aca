"""HFM: vertical training inside silos, and horizontal averaging across silos.

Peng, Wu, Bian, Xu, IEEE Internet of Things Journal 11(21), 2024, as described by a reproduction report. This file is
the horizontal half of the method. The vertical half, training inside silos, is `vertical.py`. In a round, the server
broadcasts encoders and head, and every silo does R exchanges of Q local rounds. The server then averages encoders and
heads over the silos, weighted by their rows (Eq. 3). See docs/algorithms/hfm.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.hfm.alignment import devices_of_silos
from polyfed.algorithms.hfm.exchange import Exchange, bytes_down, bytes_up
from polyfed.algorithms.hfm.vertical import SiloState, Vertical
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, nested, under
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.training import ClientData

ANCHOR = "anchor"
"""Prefix in a device's local state under which the device keeps the values of the last broadcast."""


@message
class Adopt(Message):
    """The server's broadcast to a device: the device's encoders and, with the proximal term, the head as an anchor."""

    params: Tree = carries("parameters")
    head: Tree = carries("parameters", whole=True)


@message
class Adopted(Message):
    """The reply to the broadcast: how many rows the device has."""

    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Hfm(Vertical):
    """HFM: training inside silos, then averaging across silos. `VerticalOptions` lists the options."""

    def local(self, context: ClientContext, key: int) -> Tree:
        """Return the local state of `Vertical` and, with the proximal term, the values of the last broadcast."""
        own = super().local(context, key)
        if not self.mu:
            return own
        encoders = self._encoders(context, own)
        shapes = {name: value for name, value in context.model.template.items() if name in context.model.head()}
        head = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return own | nested(ANCHOR, encoders | head)

    def anchors(self, local: Tree, got: Exchange) -> Tree:
        """Return the values of the last broadcast, encoders and head."""
        return under(ANCHOR, local)

    def round(self, state: SiloState, fed: Federation) -> SiloState:
        """Broadcast, do R exchanges in every silo, and average over the silos.

        A device that missed the broadcast does not take part in the round, because its encoder and its anchor would be
        older than those of the other devices. In this round its silo lacks the device's modalities.
        """
        silos = devices_of_silos(fed.clients)
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
        there = {silo: members for silo, members in answered.items() if members}
        heads = {silo: self._head(fed, members, state.params) for silo, members in there.items()}
        state = self.vertical(state.with_(heads=heads, silo_bytes=0), fed, there)
        uploads, handed = self.upload_of(state, fed, there)
        rows = fed.clients.rows_of(uploads)
        return state.with_(
            params=state.params | uploads.mean("params", rows),
            silo_bytes=state.silo_bytes + handed,
            server_bytes=bytes_down(fed, send) + bytes_up(adopted) + bytes_up(uploads),
        )

    @task()
    def adopt(self, context: ClientContext, data: ClientData, local: Tree, got: Adopt) -> tuple[Adopted, Tree]:
        """Replace the device's encoders and anchors by the broadcast values."""
        encoders = {name: value for name, value in got.params.items() if name in local}
        anchors = nested(ANCHOR, encoders | got.head) if self.mu else {}
        return Adopted(data.num_rows), local | encoders | anchors
