"""HFM: vertical training inside silos, horizontal averaging across them.

Peng, Wu, Bian, Xu, IEEE Internet of Things Journal 11(21), 2024, as told by a reproduction report, whose timeline is
algorithms.md 3.2; its vertical half is `silos/vertical.py`. A round is one horizontal round: the server broadcasts
encoders and head, every silo goes through R exchanges of Q local rounds, and the server averages encoders and heads
over the silos, weighted by their rows (Eq. 3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.hfm import Exchange, SiloState, Vertical, bytes_down, bytes_up, devices_of_silos
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.training import ClientData

ANCHOR = "anchor."
"""Where a device keeps the values of the last broadcast, among its local state."""


@message
class Adopt(Message):
    """The server's broadcast to a device: its encoders; with the proximal term also the head, its other anchor."""

    params: Tree = carries("parameters")
    head: Tree = carries("parameters", whole=True)


@message
class Adopted(Message):
    """How many rows the device has."""

    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Hfm(Vertical):
    """See the module; all switches are `Vertical`'s."""

    def local(self, context: ClientContext, key: int) -> Tree:
        """Encoders; with the proximal term also what was last broadcast."""
        encoders = super().local(context, key)
        if not self.mu:
            return encoders
        shapes = {name: value for name, value in context.model.template.items() if name in context.model.head()}
        head = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return encoders | {ANCHOR + name: value for name, value in (encoders | head).items()}

    def anchors(self, local: Tree, got: Exchange) -> Tree:
        """The values of the last broadcast, encoders and head."""
        return {name.removeprefix(ANCHOR): value for name, value in local.items() if name.startswith(ANCHOR)}

    def round(self, state: SiloState, fed: Federation) -> SiloState:
        """Broadcast, R exchanges, average over the silos.

        A device that missed the broadcast sits the round out: it would train what others have left behind, and be
        held to an anchor that is not theirs. Its silo is for this round one that lacks its modalities.
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
        """Take over the broadcast."""
        encoders = {name: value for name, value in got.params.items() if name in local}
        anchors = {ANCHOR + name: value for name, value in (encoders | got.head).items()} if self.mu else {}
        return Adopted(data.num_rows), local | encoders | anchors
