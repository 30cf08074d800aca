"""The server state of HFM and VFL, what an edge keeps, and the facts of one exchange."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.algorithms.averaging import State
from polyfed.algorithms.hfm.messages import Sample, Sent
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.core.tree import Tree, keep_on_host


@dataclass(frozen=True)
class Edge:
    """What the edge of a silo keeps between rounds.

    Attributes:
        head: its head.
        ids: the sample ids of each device, int64 (n,). A device whose ids are not known yet takes part in no round.
        sent: the last embeddings of each device. If `resample` is false, later exchanges use them again. If `resample`
            is true, nothing is kept.
        training: of the last round, float64 (5,): the sum of the losses of all devices and exchanges, their number, the
            sum of the drifts of embeddings during Q local rounds, their number, and the bytes between devices and edge
            in both directions.
    """

    head: Tree = field(default_factory=dict)
    ids: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    training: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))

    def __post_init__(self) -> None:
        """Keep the sample ids on the CPU, because the rows of a silo's devices are matched by these ids on the CPU."""
        keep_on_host(self, "ids")


@dataclass(frozen=True)
class SiloState(State):
    """The state of `Averaging`, and that of the edges.

    Attributes:
        edges: what the edge of each silo keeps; empty in a deployment whose edges are processes of their own.
        drift: mean relative drift of the embeddings during Q local rounds, over all devices and exchanges of the last
            round.
        exchanges: number of exchanges so far.
        silo_bytes: bytes between devices and their edges in the last round, both directions.
        server_bytes: bytes between devices and the server in the last round, both directions.
    """

    edges: dict[int, Edge] = field(default_factory=dict)
    drift: float = 0.0
    exchanges: int = 0
    silo_bytes: int = 0
    server_bytes: int = 0

    @property
    def heads(self) -> dict[int, Tree]:
        """The head of each silo."""
        return {silo: edge.head for silo, edge in self.edges.items()}

    def after(self, training: Iterable[Tensor], exchanges: int) -> "SiloState":
        """Return the state after a round in which silos have trained; see `Edge.training`."""
        losses, copies, drifts, moves, moved = sum(training, torch.zeros(5, dtype=torch.float64)).tolist()
        mean = ({"train_loss": losses / copies} if copies else {}) | ({"drift": drifts / moves} if moves else {})
        result: SiloState = self.with_(**mean, exchanges=self.exchanges + exchanges, silo_bytes=int(moved))
        return result


@dataclass(frozen=True)
class Turn:
    """One exchange inside a silo.

    Attributes:
        number: number of the exchange in its round, from 0.
        silo: number of the silo.
        members: its devices that take part.
        samples: its samples.
        batch: the positions of the drawn samples B_m among the silo's samples, int64 (|B_m|,).
    """

    number: int
    silo: int
    members: Sequence[int]
    samples: SiloSamples
    batch: Tensor

    def own_rows(self) -> dict[int, Sample]:
        """Return, for each device that holds some of B_m, the positions of these samples among its own rows."""
        own = {client: self.samples.own_rows(self.batch, client) for client in self.members}
        return {client: Sample(rows) for client, rows in own.items() if len(rows)}
