"""Imbalance ratios: they measure which modality is weak in a batch, for a client, and in the whole federation.

A ratio compares how much probability two modalities give to the correct classes. A larger ratio means a weaker
modality. Source: Fan, Xu, Wang, Wang, Guo, "PMR: Prototypical Modal Rebalance for Multimodal Learning", CVPR 2023, Eq.
8.

Shape letters: `N` clients, `M` modalities, `B` rows of a batch, `D` entries of a feature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from polyfed.algorithms.cmsfed.local_scope import TrainingScope
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.federation.client_registry import ClientRegistry
from polyfed.training import ClientData, prototypes
from polyfed.training.prototypes import Prototypes

EMPTY = torch.zeros(0)


@dataclass(frozen=True)
class ImbalanceRatios:
    """The imbalance ratios that each client reported most recently.

    A client has one ratio for each modality: the confidence of the first modality divided by the confidence of this
    modality. The ratio of the first modality is therefore always 1. With two modalities, the other ratio is the paper's
    rho.

    Attributes:
        modalities: all modalities, in the order of the data.
        values: (N, M) float64; NaN where a client has not reported yet.
        num_rows: number of rows of each client, float64 (N,), which is its weight in the mean.
        complete: clients that own every modality, bool (N,). Only these clients have ratios.
    """

    modalities: tuple[str, ...] = ()
    values: Tensor = EMPTY
    num_rows: Tensor = EMPTY
    complete: Tensor = EMPTY

    @classmethod
    def unknown(cls, clients: ClientRegistry) -> "ImbalanceRatios":
        """The ratios before any client has reported."""
        shape = (len(clients), len(clients.modalities))
        values = torch.full(shape, float("nan"), dtype=torch.float64)
        return cls(clients.modalities, values, clients.num_rows.to(torch.float64), clients.holds.all(1))

    def reported(self, fresh: Mapping[int, Mapping[str, Tensor]]) -> "ImbalanceRatios":
        """Return a copy with the new reports in `fresh`. A client without a new report keeps its last values."""
        values = self.values.clone()
        for client, ratio in fresh.items():
            if ratio:
                values[client] = torch.tensor([float(ratio[m]) if m in ratio else 1.0 for m in self.modalities])
        return replace(self, values=values)

    def mean(self) -> dict[str, float]:
        """Return the global ratio rho_glob by modality: the mean of the clients' last values, weighted by rows.

        The dictionary is empty before the first report.
        """
        known = ~self.values.isnan().any(1)
        if not bool(known.any()):
            return {}
        weight = self.num_rows[known] / self.num_rows[known].sum()
        return dict(zip(self.modalities, (weight @ self.values[known]).tolist(), strict=True))

    def weak(self, before: str = "") -> str:
        """Return the weak modality, which has the largest global ratio, or "" if all ratios are equal or unknown.

        Args:
            before: the weak modality of the last round. It stays the weak one if no other ratio is larger.
        """
        mean = self.mean()
        if not mean or max(mean.values()) == min(mean.values()):
            return ""
        weakest = max(mean, key=lambda m: mean[m])
        return before if before and mean[weakest] == mean[before] else weakest

    def dominance(self, weak: str, client: int) -> float:
        """Return a client's dominance ratio r: the confidence of the strongest other modality over that of `weak`."""
        mean = self.mean()
        strong = min((m for m in mean if m != weak), key=lambda m: mean[m])
        at = self.values[client].tolist()
        return float(at[self.modalities.index(weak)] / at[self.modalities.index(strong)])

    def quantile(self, weak: str, share: float) -> float:
        """Return a quantile of the clients' dominance ratios; `share` 0.5 is the median."""
        known = (~self.values.isnan().any(1)).nonzero().flatten().tolist()
        return float(torch.tensor([self.dominance(weak, k) for k in known], dtype=torch.float64).quantile(share))

    def weakest_of(self, owned: Sequence[str]) -> str:
        """Return the globally weakest of these modalities, or the first one if no ratio is known yet."""
        mean = self.mean()
        return max(owned, key=lambda m: mean[m]) if mean else owned[0]


def client_ratios(scope: TrainingScope, data: ClientData, w: Tree, own: Mapping[str, Prototypes]) -> Tree:
    """Compute rho^k: ratios of the first modality over every other modality, for all rows of a client.

    Args:
        scope: the part of the model that the client trained.
        w: the model to compute features with.
        own: the client's own prototypes under this model.

    Returns:
        A 0-dim tensor for every modality after the first. The tree is empty for a client that lacks a modality.
    """
    if scope.context.modalities != scope.context.model.modalities:
        return {}

    def step(total: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        confidence = prototypes.confidence(own, scope.features(w, batch), batch)
        return {m: total[m] + value for m, value in confidence.items()}

    total = data.fold(step, {m: torch.zeros(()) for m in scope.context.modalities})
    first, *others = scope.context.modalities
    return {m: prototypes.imbalance_ratio(total[first], total[m]) for m in others}


def pce_weights(
    scope: TrainingScope,
    near: Mapping[str, Prototypes],
    z: Mapping[str, Tensor],
    batch: Batch,
    strength: float,
    beta_mode: Literal["clip", "hard"],
    pce_target: Literal["global_weak", "batch_weak"],
) -> dict[str, float | Tensor]:
    """Compute beta, the weight of PCE in a batch, for each helped modality (PMR Eq. 10-11).

    If `scope.full_strength` is set, beta is alpha_p in every batch. Otherwise beta depends on r_batch: the largest
    `prototypes.confidence` of another modality, divided by the confidence of the helped modality. No gradient flows
    through beta.

    Args:
        scope: the part of the model that the client trains.
        near: prototypes by modality.
        z: features (B, D) by modality.
        strength: alpha_p.
        beta_mode: how the ratio becomes a weight; see `CmsFed`.
        pce_target: which modality is helped; see `CmsFed`.

    Returns:
        Beta by modality. The dictionary is empty if no modality is helped, or if fewer than two modalities can be
        compared.
    """
    helped = [m for m in scope.helped if m in near]
    if scope.full_strength or not helped:
        return dict.fromkeys(helped, strength)
    compared = {m: value.detach() for m, value in z.items() if m in near}
    if len(compared) < 2:
        return {}  # only one modality has prototypes, so there is no other modality to compare with
    confidence = prototypes.confidence(near, compared, batch)
    weights: dict[str, float | Tensor] = {}
    for m in helped:
        others = torch.stack([value for name, value in confidence.items() if name != m])
        ratio = prototypes.imbalance_ratio(others.amax(), confidence[m])
        beta = prototypes.modulation(ratio, strength, beta_mode)
        weights[m] = beta * (confidence[m] <= others.amin()) if pce_target == "batch_weak" else beta
    return weights
