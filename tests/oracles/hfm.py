"""HFM's timeline as plain autograd on matrices, written from the timeline in docs/algorithms/hfm.md with PyTorch alone.

A silo is its inputs by modality and its labels. Encoders are Linear-ReLU-Linear, the head one linear layer over the
concatenation, kept by modality. The mini-batch of every exchange is the whole silo and a local round one step on it,
so no order of rows enters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass
class Silo:
    """Aligned samples: x by modality (N, D), y (N,)."""

    x: Weights
    y: Tensor


@dataclass
class Settings:
    """Q local rounds, R exchanges, step size, proximal strength, who trains the head."""

    q: int = 1
    r: int = 1
    lr: float = 0.1
    mu: float = 0.0
    head_at_edge: bool = False


def encoder(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.encoder.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias"))


def encode(w: Weights, name: str, x: Tensor) -> Tensor:
    first, bias, second, shift = (w[key] for key in encoder(name))
    return F.linear(torch.relu(F.linear(x, first, bias)), second, shift)


def top(w: Weights, z: Weights) -> Tensor:
    names = sorted(z)
    joint = torch.cat([w[f"{name}.fusion.weight"] for name in names], 1)
    return torch.cat([z[name] for name in names], 1) @ joint.T + w["shared.bias"]


def head(names: Sequence[str]) -> tuple[str, ...]:
    return (*(f"{name}.fusion.weight" for name in names), "shared.bias")


def step(w: Weights, names: Sequence[str], loss: Tensor, lr: float) -> None:
    for name, slope in zip(names, torch.autograd.grad(loss, [w[name] for name in names]), strict=True):
        w[name] = (w[name] - lr * slope).detach()


def leaves(w: Weights) -> Weights:
    return {name: value.detach().clone().requires_grad_() for name, value in w.items()}


def proximal(w: Weights, anchor: Weights, names: Sequence[str], mu: float) -> Tensor:
    """Over the names that have an anchor."""
    terms = [((w[name] - anchor[name]) ** 2).sum() for name in names if name in anchor]
    return mu / 2 * torch.stack(terms).sum() if terms else torch.zeros(())


def local_rounds(silo: Silo, w: Weights, anchor: Weights, name: str, stale: Weights, how: Settings) -> Weights:
    """What one device makes of its encoder and its copy of the head."""
    trained = encoder(name) if how.head_at_edge else (*encoder(name), *head(sorted(stale)))
    for _ in range(how.q):
        w = leaves(w)
        z = {**stale, name: encode(w, name, silo.x[name])}
        loss = F.cross_entropy(top(w, z), silo.y)
        step(w, trained, loss + proximal(w, anchor, trained, how.mu), how.lr)
    return w


def vertical(silo: Silo, w: Weights, anchor: Weights, how: Settings) -> Weights:
    """R exchanges in one silo."""
    names = sorted(silo.x)
    for _ in range(how.r):
        stale = {name: encode(w, name, silo.x[name]).detach() for name in names}
        after = {name: local_rounds(silo, w, anchor, name, stale, how) for name in names}
        edge = w
        for _ in range(how.q if how.head_at_edge else 0):
            edge = leaves(edge)
            loss = F.cross_entropy(top(edge, stale), silo.y)
            step(edge, head(names), loss + proximal(edge, anchor, head(names), how.mu), how.lr)
        copies = [edge] if how.head_at_edge else [after[name] for name in names]
        w = dict(w)
        for name in names:
            w |= {key: after[name][key] for key in encoder(name)}
        w |= {key: torch.stack([copy[key] for copy in copies]).mean(0) for key in head(names)}
    return {key: value.detach() for key, value in w.items()}


def hfm(silos: Sequence[Silo], w: Weights, rounds: int, how: Settings) -> Weights:
    """Horizontal rounds: Eq. 3 by hand, every block over the silos that have it."""
    for _ in range(rounds):
        ends = [vertical(silo, w, w, how) for silo in silos]
        mixed = {}
        for key in w:
            name = key.split(".")[0]
            who = [i for i, silo in enumerate(silos) if name == "shared" or name in silo.x]
            total = sum(len(silos[i].y) for i in who)
            mixed[key] = sum((ends[i][key] * (len(silos[i].y) / total) for i in who), torch.zeros(()))
        w = mixed
    return w


def vfl(silo: Silo, w: Weights, exchanges: int, how: Settings) -> Weights:
    """One silo by itself; only the head has an anchor, the one that its edge last sent."""
    for _ in range(exchanges):
        w = vertical(silo, w, {name: w[name] for name in head(sorted(silo.x))}, how)
    return w


def centralised(silo: Silo, w: Weights, steps: int, lr: float) -> Weights:
    """SGD of the whole late-fusion model on all rows at once."""
    names = sorted(silo.x)
    for _ in range(steps):
        w = leaves(w)
        loss = F.cross_entropy(top(w, {name: encode(w, name, silo.x[name]) for name in names}), silo.y)
        step(w, tuple(w), loss, lr)
    return w
