"""FedMChain as a bare PyTorch loop: phases, and SSCA entry by entry in Python.

Written from docs/algorithms/fedmchain.md with PyTorch and the clients of `oracles.mfedmc`. Clusters are found by
walking from client to client, and signs are compared one entry at a time.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oracles.blockwise import Federation, Weights, copied, logits, part_of
from oracles.mfedmc import Client, alone, step, together


@dataclass
class Options:
    chain: bool
    order: tuple[str, ...]
    compensation: float
    density: float
    agreement: float
    streams: tuple[int, ...]


def phase_loss(w: Weights, client: Client, rows: Tensor, m: str, compensation: float) -> Tensor:
    """The modality alone, and the whole prediction with the others as numbers, over the rows with the modality."""
    loss = alone(w, client, rows)[m]
    rows = rows[client.has[m][rows]] if m in client.has else rows
    if len(client.x) == 1 or not len(rows):
        return loss
    out = logits(w, {m: client.x[m][rows]})
    for n in client.x:
        if n != m:
            given = logits(w, {n: client.x[n][rows]}) - w["bias"]
            out = out + (given * client.has[n][rows].unsqueeze(1) if n in client.has else given).detach()
    return loss + compensation * cross_entropy(out, client.y[rows])


def trained(w: Weights, client: Client, t: int, lr: float, options: Options) -> Weights:
    if not options.chain:
        for rows in client.steps[0][t]:
            leaves = {n: v.detach().clone().requires_grad_() for n, v in w.items()}
            w = step(
                w, list(w), cross_entropy(together(leaves, client, rows, tuple(client.x)), client.y[rows]), leaves, lr
            )
        return copied(w)
    chain = sorted(client.x, key=lambda m: options.order.index(m) if m in options.order else len(options.order))
    for m, stream in zip(chain, options.streams, strict=False):
        names = [n for n in w if n == "bias" or n.split(".")[0] == m]
        for rows in client.steps[stream][t]:
            leaves = {**w, **{n: w[n].detach().clone().requires_grad_() for n in names}}
            w = step(w, names, phase_loss(leaves, client, rows, m, options.compensation), leaves, lr)
    return copied(w)


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def clusters(updates: dict[int, list[float]], least: float) -> list[list[int]]:
    def agree(j: int, k: int) -> bool:
        both = [sign(x) * sign(y) for x, y in zip(updates[j], updates[k], strict=True) if x and y]
        return j == k or (sum(both) / len(both) if both else 0.0) >= least

    left, found = sorted(updates), list[list[int]]()
    while left:
        reached, new = [left.pop(0)], True
        while new:
            new = [k for k in left if any(agree(j, k) for j in reached)]  # type: ignore[assignment]
            reached += new  # type: ignore[arg-type]
            left = [k for k in left if k not in reached]
        found.append(reached)
    return found


def agreed(updates: dict[int, list[float]], sizes: dict[int, int], options: Options) -> list[float]:
    """The common step of a block, from the clients' updates as lists of numbers."""
    num = len(next(iter(updates.values())))
    kept = {}
    for k, update in updates.items():
        least = sorted(map(abs, update), reverse=True)[max(1, ceil(options.density * num)) - 1]
        kept[k] = [x if abs(x) >= least else 0.0 for x in update]
    found = clusters(kept, options.agreement)
    mass = [sum(sizes[k] for k in one) for one in found]
    means = [
        [sum(sizes[k] * kept[k][i] for k in one) / n for i in range(num)] for one, n in zip(found, mass, strict=True)
    ]
    out = []
    for i in range(num):
        elected = sign(sum(n * mean[i] for n, mean in zip(mass, means, strict=True)))
        voters = [(n, mean[i]) for n, mean in zip(mass, means, strict=True) if elected and sign(mean[i]) == elected]
        out.append(sum(n * x for n, x in voters) / sum(n for n, _ in voters) if voters else 0.0)
    return out


def fedmchain(fed: Federation, w: Weights, options: Options) -> Weights:
    """The global model after all rounds."""
    w = copied(w)
    for t, cohort in enumerate(fed.cohorts):
        models = {k: trained(part_of(w, fed.clients[k]), fed.clients[k], t, fed.lr, options) for k in cohort}  # type: ignore[arg-type]
        new = copied(w) | fed.mean(cohort, models)
        for m in {n.split(".")[0] for n in w if n != "bias"}:
            senders = [k for k in cohort if m in fed.clients[k].x]
            names = [n for n in w if n.split(".")[0] == m]
            if not senders:
                continue
            updates = {k: torch.cat([(models[k][n] - w[n]).flatten() for n in names]).tolist() for k in senders}
            step = torch.tensor(agreed(updates, {k: len(fed.clients[k].y) for k in senders}, options))
            for n, part in zip(names, step.split([w[n].numel() for n in names]), strict=True):
                new[n] = w[n] + part.view_as(w[n])
        w = new
    return w
