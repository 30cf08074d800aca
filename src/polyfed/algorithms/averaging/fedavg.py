"""FedAvg: clients train locally from the global model, and the server averages the results per block.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1. With several modalities, the server averages each block over the clients that own this
block. The FedOpt family (FedAvgM, FedAdam, FedAdagrad, FedYogi) is FedAvg with a `[server]` optimiser.

The server sends the model. The clients send trained parameters, training loss and number of rows. Page:
docs/algorithms/fedavg.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import UPDATES


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """Federated averaging: `Averaging` without any change."""

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES
