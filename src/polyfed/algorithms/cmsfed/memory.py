"""What CMSFed's server remembers of the clients: imbalance ratios, and the gradients it compares them by.

See `cmsfed.py` for the paper; section numbers are those of algorithms.md.

Shape letters: `N` clients, `M` modalities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.algorithms.cmsfed.local_training import encoder_names
from polyfed.core.request import Accept
from polyfed.core.tree import Tree, scaled, select, subtract
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.federation import Federation
from polyfed.training.client_data import steps_trained

if TYPE_CHECKING:
    from polyfed.algorithms.cmsfed.cmsfed import CmsFed, Report

NOBODY = torch.zeros(0)


@dataclass(frozen=True)
class Ratios:
    """Last reported imbalance ratios: how confident the first modality is over each other one.

    With two modalities this is the paper's rho = first over second. A larger value is a weaker modality, and the
    first one's value is 1 by definition.

    Attributes:
        modalities: all of them, in order.
        values: (N, M) float64, NaN where a client never reported.
        num_rows: (N,) float64, the weights of the mean.
        complete: clients that own every modality, bool (N,); the others have no ratio.
    """

    modalities: tuple[str, ...] = ()
    values: Tensor = NOBODY
    num_rows: Tensor = NOBODY
    complete: Tensor = NOBODY

    @classmethod
    def unknown(cls, clients: ClientRegistry) -> "Ratios":
        """Before anybody reported."""
        shape = (len(clients), len(clients.modalities))
        values = torch.full(shape, float("nan"), dtype=torch.float64)
        return cls(clients.modalities, values, clients.num_rows.to(torch.float64), clients.holds.all(1))

    def reported(self, fresh: Mapping[int, Mapping[str, Tensor]]) -> "Ratios":
        """With some clients' ratios replaced; who sent none keeps what it had."""
        values = self.values.clone()
        for client, ratio in fresh.items():
            if ratio:
                values[client] = torch.tensor([float(ratio[m]) if m in ratio else 1.0 for m in self.modalities])
        return replace(self, values=values)

    def mean(self) -> dict[str, float]:
        """The global ratio, rho_glob, by modality, weighted by rows, stale values included; empty before any report."""
        known = ~self.values.isnan().any(1)
        if not bool(known.any()):
            return {}
        weight = self.num_rows[known] / self.num_rows[known].sum()
        return dict(zip(self.modalities, (weight @ self.values[known]).tolist(), strict=True))

    def weak(self, before: str = "", hysteresis: float = 0.0) -> str:
        """The weak modality: the largest ratio; empty when all are equal or none is known.

        Args:
            before: the weak modality of the last round.
            hysteresis: another takes its place only when its ratio is above by this share.
        """
        mean = self.mean()
        if not mean or max(mean.values()) == min(mean.values()):
            return ""
        weakest = max(mean, key=lambda m: mean[m])
        return before if before and mean[weakest] <= mean[before] * (1 + hysteresis) else weakest

    def dominance(self, weak: str, client: int) -> float:
        """r: confidence of the strongest other modality (of the federation) over the weak one, at a client."""
        mean = self.mean()
        strong = min((m for m in mean if m != weak), key=lambda m: mean[m])  # under hysteresis `weak` may lead already
        at = self.values[client].tolist()
        return float(at[self.modalities.index(weak)] / at[self.modalities.index(strong)])

    def weakest_of(self, owned: Sequence[str]) -> str:
        """The weakest of some modalities; the first of them before anything is known."""
        mean = self.mean()
        return max(owned, key=lambda m: mean[m]) if mean else owned[0]


def whole_gradients(params: Tree, fed: Federation) -> Accept:
    """Accepts reports whose gradients, where they have any, are those of all parameters and of whole encoders."""
    all_names = fed.context.model.trainable(params).keys()
    encoders = {m: [*encoder_names(fed.context, params, m)] for m in fed.clients.modalities}

    def flaw(client: int, report: "Report") -> str:
        if report.gradient and report.gradient.keys() != all_names:
            return "sent a part of the gradient g"
        for m, names in encoders.items():
            if (own := select(report.encoder_gradient, [m])) and [*own] != names:
                return f"sent a part of the gradient h of {m}"
        return ""

    return flaw


def gradients_of(
    method: "CmsFed", sent: Tree, reports: Mapping[int, "Report"], fed: Federation, *, first: bool
) -> tuple[dict[int, Tree], dict[int, dict[str, Tree]]]:
    """g of those who trained everything, and h by client and modality."""
    g: dict[int, Tree] = {}
    h: dict[int, dict[str, Tree]] = {}
    for client, report in reports.items():
        if method.gradient_split == "exact":
            whole, parts = report.gradient, report.encoder_gradient
        else:
            whole, parts = _delta(method, sent, report.params, int(fed.clients.num_rows[client]), fed, first)
        if whole:
            g[client] = whole
        h[client] = {m: select(parts, [m]) for m in fed.clients.modalities if select(parts, [m])}
    return g, h


def _delta(
    method: "CmsFed", sent: Tree, trained: Tree, num_rows: int, fed: Federation, first: bool
) -> tuple[Tree, Tree]:
    """What training moved, as the released code compares it: encoders only; S_M gives g, the rest gives h.

    The first pass gives both: there is nothing else to tell the clients' encoders apart by.
    """
    names = [n for m in fed.clients.modalities for n in encoder_names(fed.context, sent, m)]
    moved = subtract({n: trained[n] for n in names if n in trained}, sent)
    rate = -1.0
    if method.normalize_delta:
        train = method.first_pass() if first else method.train
        num_steps = steps_trained(num_rows, train, skip_single=fed.context.model.has_batchnorm)
        rate = -method.train.lr_at(fed.round, fed.rounds) * num_steps
    moved = scaled(moved, 1.0 / rate if rate else 0.0)
    if len(moved) < len(names):
        return {}, moved
    return moved, moved if first else {}
