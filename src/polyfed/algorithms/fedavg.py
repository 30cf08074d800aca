"""FedAvg: local training from the global model, then the mean of the results, per block.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1. With several modalities a block is averaged over the clients that own it
(algorithms.md 0.5). The FedOpt family (FedAvgM, FedAdam, FedAdagrad, FedYogi) is this with a `[server]` optimiser.
"""

from dataclasses import dataclass

from polyfed.algorithms.averaging import Averaging


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """The template as it is."""
