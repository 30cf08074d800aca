"""MFedMC as a bare PyTorch loop: local training, Shapley values by orders of arrival, both selections, and the mean.

Written from the paper with PyTorch and `oracles.blockwise`'s clients, which are a table, labels and the rows of every
step. Shapley values are means over all orders in which the modalities can arrive, not weighted sums over coalitions.
"""

from dataclasses import dataclass, field
from itertools import permutations
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oracles import blockwise
from oracles.blockwise import Federation, Weights, copied, logits


@dataclass
class Client(blockwise.Client):
    """Also by modality which rows have it, where some do not."""

    has: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Options:
    uploads: int
    share: float
    impact: float
    smallness: float
    recency: float
    fusion_stream: int


def is_fusion(name: str) -> bool:
    return name == "bias" or name.endswith(".top")


def alone(w: Weights, client: Client, rows: Tensor) -> dict[str, Tensor]:
    """Loss of every modality, with nothing from the others; rows without it do not count."""
    found = {}
    for m, x in client.x.items():
        has = rows[client.has[m][rows]] if m in client.has else rows
        found[m] = cross_entropy(logits(w, {m: x[has]}), client.y[has]) if len(has) else torch.zeros(())
    return found


def together(w: Weights, client: Client, rows: Tensor, among: tuple[str, ...]) -> Tensor:
    """Logits in which a modality counts only for the rows that have it."""
    out = w["bias"].expand(len(rows), -1)
    for m in among:
        own = logits(w, {m: client.x[m][rows]}) - w["bias"]
        out = out + (own * client.has[m][rows].unsqueeze(1) if m in client.has else own)
    return out


def step(w: Weights, names: list[str], loss: Tensor, leaves: Weights, lr: float) -> Weights:
    grads = torch.autograd.grad(loss, [leaves[n] for n in names], allow_unused=True)
    return {**w, **{n: w[n] - lr * g for n, g in zip(names, grads, strict=True) if g is not None}}


def trained(w: Weights, client: Client, fed: Federation, t: int, stream: int) -> tuple[Weights, Weights]:
    """The fusion on the received encoders, then the encoders under that fusion: both models."""
    fusion, encoders = [n for n in w if is_fusion(n)], [n for n in w if not is_fusion(n)]
    for rows in client.steps[stream][t]:
        leaves = {**w, **{n: w[n].detach().clone().requires_grad_() for n in fusion}}
        w = step(
            w, fusion, cross_entropy(together(leaves, client, rows, tuple(client.x)), client.y[rows]), leaves, fed.lr
        )
    before = copied(w)
    for rows in client.steps[0][t]:
        leaves = {**w, **{n: w[n].detach().clone().requires_grad_() for n in encoders}}
        w = step(w, encoders, torch.stack([*alone(leaves, client, rows).values()]).sum(), leaves, fed.lr)
    return before, copied(w)


def impacts(w: Weights, client: Client) -> dict[str, float]:
    """Mean absolute Shapley value of each modality in the class probabilities, summed over classes."""
    every, names = torch.arange(len(client.y)), tuple(client.x)
    orders = [*permutations(names)]
    total = {m: torch.zeros(len(client.y), len(w["bias"])) for m in names}
    for order in orders:
        for place, m in enumerate(order):
            after = together(w, client, every, order[: place + 1]).softmax(1)
            total[m] += (after - together(w, client, every, order[:place]).softmax(1)) / len(orders)
    return {m: float(value.abs().sum(1).mean()) for m, value in total.items()}


def scaled(values: dict[str, float]) -> dict[str, float]:
    low, high = min(values.values()), max(values.values())
    return {m: (v - low) / (high - low) if high > low else 0.0 for m, v in values.items()}


def mfedmc(fed: Federation, w: Weights, options: Options) -> tuple[Weights, list[Weights], list[dict[str, list[int]]]]:
    """The common encoders, the clients' fusions, and by round who sent the encoder of each modality."""
    common = {n: v.clone() for n, v in w.items() if not is_fusion(n)}
    fusion = [
        {n: v.clone() for n, v in w.items() if n == "bias" or (is_fusion(n) and n.split(".")[0] in c.x)}
        for c in fed.clients
    ]
    last = [dict.fromkeys(c.x, 0) for c in fed.clients]
    log: list[dict[str, list[int]]] = []
    for t, cohort in enumerate(fed.cohorts):
        models: dict[int, Weights] = {}
        offers: dict[str, list[tuple[float, int]]] = {}
        for k in cohort:
            own = fed.clients[k]
            start = {n: v for n, v in common.items() if n.split(".")[0] in own.x} | fusion[k]
            start, models[k] = trained(start, own, fed, t, options.fusion_stream)
            fusion[k] = {n: start[n] for n in fusion[k]}
            impact = scaled(impacts(models[k], own))
            sizes = {
                m: sum(v.numel() for n, v in start.items() if n.split(".")[0] == m and not is_fusion(n)) for m in own.x
            }
            small = scaled({m: float(size) for m, size in sizes.items()})
            rank = sorted(
                own.x,
                key=lambda m, k=k, i=impact, s=small: (
                    -(
                        options.impact * i[m]
                        + options.smallness * (1 - s[m])
                        + options.recency * (t + 1 - last[k][m]) / (t + 1)
                    )
                ),
            )
            losses = alone(models[k], own, torch.arange(len(own.y)))
            for m in rank[: options.uploads]:
                offers.setdefault(m, []).append((float(losses[m]), k))
        log.append(
            {m: sorted(k for _, k in sorted(offers[m])[: ceil(options.share * len(cohort))]) for m in sorted(offers)}
        )
        for m, senders in log[-1].items():
            sizes = {k: len(fed.clients[k].y) for k in senders}
            for n in [n for n in common if n.split(".")[0] == m]:
                common[n] = sum(sizes[k] / sum(sizes.values()) * models[k][n] for k in senders)  # type: ignore[assignment]
            for k in senders:
                last[k][m] = t + 1
    return common, fusion, log
