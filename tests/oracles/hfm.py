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


# silos whose devices hold samples of their own, matched by id


@dataclass
class Party:
    """A device: its modality, the ids of its rows, x (n, D) and y (n,)."""

    modality: str
    ids: list[int]
    x: Tensor
    y: Tensor


def used_ids(parties: Sequence[Party], overlap: str, labels_at: str) -> list[int]:
    """The ids that take part, by sets."""
    by: dict[str, set[int]] = {}
    for party in parties:
        by.setdefault(party.modality, set()).update(party.ids)
    labelled = by[labels_at] if labels_at else set().union(*by.values())
    found = set().union(*by.values()) & labelled
    if overlap == "common":
        found = found & set.intersection(*by.values())
    return sorted(found)


Means = dict[str, dict[int, list[Tensor]]]
"""By modality and id, what several devices sent for a sample."""


def gathered(ids: Sequence[int], values: Tensor, into: dict[int, list[Tensor]]) -> None:
    for i, value in zip(ids, values, strict=True):
        into.setdefault(i, []).append(value)


def pooled(stale: Means, m: str, ids: Sequence[int]) -> Tensor:
    """The mean of what devices sent for these ids, zero where none sent anything."""
    width = torch.zeros_like(next(iter(stale[m].values()))[0])
    return torch.stack([torch.stack(stale[m][i]).mean(0) if i in stale[m] else width for i in ids])


def gradients_of(stale: Means, w: Weights, ids: Sequence[int], y: Tensor, into: Means) -> None:
    """The gradient of each row's loss in every modality's embedding, as a device with labels computes them."""
    z = {m: pooled(stale, m, ids).requires_grad_() for m in stale}
    loss = F.cross_entropy(top(w, z), y, reduction="sum")
    for m, grad in zip(z, torch.autograd.grad(loss, list(z.values())), strict=True):
        gathered(ids, grad, into[m])


def exchange_by_id(
    parties: Sequence[Party], own: list[Weights], edge: Weights, ids: list[int], how: Settings, labels_at: str
) -> tuple[list[Weights], Weights]:
    """One exchange: what each device makes of its encoder, and the edge's new head."""
    parties = [taken(party, ids) for party in parties]
    stale: Means = {party.modality: {} for party in parties}
    slopes: Means = {party.modality: {} for party in parties}
    for party, w in zip(parties, own, strict=True):
        gathered(party.ids, encode(w, party.modality, party.x).detach(), stale[party.modality])
    for party in parties:
        if party.modality == labels_at:
            gradients_of(stale, edge, party.ids, party.y, slopes)
    copies, after = [], []
    for party, w in zip(parties, own, strict=True):
        m, now = party.modality, {**w, **edge}
        for _ in range(how.q):
            now = leaves(now)
            z = encode(now, m, party.x)
            if labels_at in ("", m):
                peers = {k: pooled(stale, k, party.ids) for k in stale}
                loss = F.cross_entropy(top(now, {**peers, m: z}), party.y)
                step(now, (*encoder(m), *head(sorted(stale))), loss, how.lr)
            else:
                slope = torch.stack([torch.stack(slopes[m][i]).mean(0) / len(stale[m][i]) for i in party.ids])
                step(now, encoder(m), (slope * z).sum(1).mean(), how.lr)
        after.append({k: now[k].detach() for k in encoder(m)})
        copies += [now] if labels_at in ("", m) else []
    return after, {k: torch.stack([c[k].detach() for c in copies]).mean(0) for k in head(sorted(stale))}


def taken(party: Party, ids: Sequence[int]) -> Party:
    """The device with its usable samples only, in the order of the ids."""
    places = [party.ids.index(i) for i in ids if i in party.ids]
    return Party(party.modality, [party.ids[p] for p in places], party.x[places], party.y[places])


def hfm_by_id(
    silos: Sequence[Sequence[Party]],
    w: Weights,
    rounds: int,
    how: Settings,
    overlap: str = "common",
    labels_at: str = "",
) -> Weights:
    """HFM where devices hold samples of their own: encoders weigh by their usable samples, heads by those of a silo."""
    for _ in range(rounds):
        sent: dict[str, list[tuple[float, Tensor]]] = {}
        for parties in silos:
            ids = used_ids(parties, overlap, labels_at)
            own = [{k: w[k] for k in encoder(p.modality)} for p in parties]
            edge = {k: w[k] for k in head(sorted({p.modality for p in parties}))}
            for _ in range(how.r):
                own, edge = exchange_by_id(parties, own, edge, ids, how, labels_at)
            for party, tree in zip(parties, own, strict=True):
                for k, v in tree.items():
                    sent.setdefault(k, []).append((len(set(party.ids) & set(ids)), v))
            for k, v in edge.items():
                sent.setdefault(k, []).append((len(ids), v))
        w = w | {k: sum((n * v for n, v in t), torch.zeros(())) / sum(n for n, _ in t) for k, t in sent.items()}
    return w
