"""The server state of HFM and VFL, and the facts of one exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polyfed.algorithms.averaging import State
from polyfed.algorithms.hfm.messages import Sample, Sent
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.core.tree import Tree, keep_on_host


@dataclass(frozen=True)
class SiloState(State):
    """The state of `Averaging`, and the state of the edges.

    Attributes:
        heads: the head of each silo's edge.
        ids: the sample ids of each device, int64 (n,). A device whose ids are not known yet takes part in no round.
        sent: the last embeddings of each device. If `resample` is false, later exchanges use them again. If `resample`
            is true, nothing is kept.
        drift: mean relative drift of the embeddings during Q local rounds, over all devices and exchanges of the last
            round.
        exchanges: number of exchanges so far.
        silo_bytes: bytes between devices and their edges in the last round, both directions.
        server_bytes: bytes between devices and the server in the last round, both directions.
    """

    heads: dict[int, Tree] = field(default_factory=dict)
    ids: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    drift: float = 0.0
    exchanges: int = 0
    silo_bytes: int = 0
    server_bytes: int = 0

    def __post_init__(self) -> None:
        """Keep the sample ids on the CPU, because the rows of a silo's devices are matched by these ids on the CPU."""
        keep_on_host(self, "ids")


@dataclass(frozen=True)
class Turn:
    """One exchange inside the silos.

    Attributes:
        number: number of the exchange in its round, from 0.
        silos: the devices of each silo that take part.
        samples: the samples of each silo.
        batches: for each silo, the positions of the drawn samples B_m among the silo's samples, int64 (|B_m|,).
    """

    number: int
    silos: Mapping[int, list[int]]
    samples: Mapping[int, SiloSamples]
    batches: Mapping[int, Tensor]

    def own_rows(self) -> dict[int, Sample]:
        """Return, for each device that holds some of B_m, the positions of these samples among its own rows."""
        own = {
            c: self.samples[silo].own_rows(self.batches[silo], c)
            for silo, members in self.silos.items()
            for c in members
        }
        return {client: Sample(rows) for client, rows in own.items() if len(rows)}
