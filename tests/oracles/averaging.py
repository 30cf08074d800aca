"""FedAvg, FedProx and SCAFFOLD as plain `torch.optim` loops over `nn.Module`s.

The loops get the batches as row numbers; everything else is written from the papers with PyTorch alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Shard:
    """A client: inputs by modality, labels, and the rows of each step of each round."""

    x: dict[str, Tensor]
    y: Tensor
    steps: list[list[Tensor]]


class LateFusion(nn.Module):
    """One Linear-ReLU-Linear tower for each modality, concatenation, one linear layer."""

    def __init__(self, sizes: dict[str, tuple[int, int]], embedding: int, classes: int) -> None:
        super().__init__()
        self.names = list(sizes)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, embedding)) for i, h in sizes.values()
        )
        self.top = nn.Linear(embedding * len(sizes), classes)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        z = [tower(x[name]) for name, tower in zip(self.names, self.towers, strict=True)]
        out: Tensor = self.top(torch.cat(z, 1))
        return out


def train(
    model: nn.Module,
    shard: Shard,
    steps: Sequence[Tensor],
    lr: float,
    *,
    mu: float = 0.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    shift: list[Tensor] | None = None,
) -> nn.Module:
    """Local training from `model`; `shift` is added to every gradient (SCAFFOLD's c - c_k)."""
    start = [p.detach().clone() for p in model.parameters()]
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    for rows in steps:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(local({m: x[rows] for m, x in shard.x.items()}), shard.y[rows])
        loss.backward()
        for i, (p, p0) in enumerate(zip(local.parameters(), start, strict=True)):
            assert p.grad is not None
            p.grad += mu * (p.detach() - p0)
            if shift is not None:
                p.grad += shift[i]
        optimiser.step()
    return local


def fedavg(model: nn.Module, shards: list[Shard], lr: float, rounds: int, **options: float) -> nn.Module:
    """McMahan et al. 2017 with all clients; `mu` makes it FedProx."""
    for t in range(rounds):
        locals_ = [train(model, s, s.steps[t], lr, **options) for s in shards]  # type: ignore[arg-type]
        total = sum(len(s.y) for s in shards)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.zero_()
                for s, local in zip(shards, locals_, strict=True):
                    p += len(s.y) / total * list(local.parameters())[i]
    return model


def scaffold(model: nn.Module, shards: list[Shard], lr: float, rounds: int) -> nn.Module:
    """Karimireddy et al. 2020, Algorithm 1, option II, all clients, uniform mean."""
    c = [torch.zeros_like(p) for p in model.parameters()]
    own = [[torch.zeros_like(p) for p in model.parameters()] for _ in shards]
    for t in range(rounds):
        x = [p.detach().clone() for p in model.parameters()]
        results, changes = [], []
        for k, s in enumerate(shards):
            shift = [a - b for a, b in zip(c, own[k], strict=True)]
            y = [p.detach() for p in train(model, s, s.steps[t], lr, shift=shift).parameters()]
            new = [ck - cc + (xx - yy) / (len(s.steps[t]) * lr) for ck, cc, xx, yy in zip(own[k], c, x, y, strict=True)]
            changes.append([n - o for n, o in zip(new, own[k], strict=True)])
            own[k] = new
            results.append(y)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(sum(r[i] for r in results) / len(shards))  # type: ignore[arg-type]
        c = [cc + sum(d[i] for d in changes) / len(shards) for i, cc in enumerate(c)]  # type: ignore[misc]
    return model
