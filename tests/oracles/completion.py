"""FedMAC and PEPSY as bare PyTorch loops over rows and modalities, and PEPSY's matching by trying every assignment.

Written from the equations of the pages, row by row, with PyTorch alone. Weights have the names of the model's Tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

Weights = dict[str, Tensor]
CONTROLS = "shared.controls"


@dataclass
class Client:
    """Inputs by modality, which rows have it (where some do not), labels, and by round the rows of each step."""

    x: dict[str, Tensor]
    has: dict[str, Tensor]
    y: Tensor
    steps: list[list[Tensor]]

    def holds(self, m: str, row: int) -> bool:
        return m in self.x and (m not in self.has or bool(self.has[m][row]))


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def encoded(w: Weights, client: Client, m: str, row: int) -> Tensor:
    return linear(w, f"{m}.encoder.2", linear(w, f"{m}.encoder.0", client.x[m][row]).relu())


def looked_up(h: list[Tensor], at: int, seen: list[int]) -> Tensor:
    """What the modality at this place sees of the others."""
    others = [j for j in seen if j != at]
    if not others:
        return h[at]
    scores = torch.stack([h[at] @ h[j] / sqrt(len(h[at])) for j in others]).exp()
    return torch.stack([s / scores.sum() * h[j] for s, j in zip(scores, others, strict=True)]).sum(0)


def gated(w: Weights, own: Tensor, others: Tensor) -> Tensor:
    gate = 1 / (1 + (-linear(w, "shared.gate", torch.cat([own, others]))).exp())
    return gate * own + (1 - gate) * others


def nce(anchors: dict[int, Tensor], targets: dict[int, Tensor], t: float) -> Tensor:
    """Mean over the anchors' rows of -log of the share of the row's own target; targets are constants."""
    found = []
    for row, u in anchors.items():
        near = {r: (cosine_similarity(u, v.detach(), dim=0) / t).exp() for r, v in targets.items()}
        found.append(-(near[row] / sum(near.values())).log())
    return torch.stack(found).mean() if found else torch.zeros(())


def pairs(z: dict[str, dict[int, Tensor]], t: float) -> Tensor:
    """Between the modalities of a row, over both directions of every pair."""
    terms = []
    for m, n in permutations(z, 2):
        both = [row for row in z[m] if row in z[n]]
        terms.append(nce({r: z[m][r] for r in both}, {r: z[n][r] for r in both}, t))
    return sum(terms) / len(terms) if terms else torch.zeros(())  # type: ignore[return-value]


def fedmac_loss(w: Weights, client: Client, rows: list[int], names: list[str], lam: float, t: float) -> Tensor:
    z = {m: {r: encoded(w, client, m, r) for r in rows if client.holds(m, r)} for m in client.x}
    logits, said, own = [], {m: dict[int, Tensor]() for m in client.x}, {m: dict[int, Tensor]() for m in client.x}
    for r in rows:
        seen = [i for i, m in enumerate(names) if client.holds(m, r)]
        h = [z[m][r] if i in seen else w["shared.missing"][i] for i, m in enumerate(names)]
        about = [looked_up(h, i, seen) for i in range(len(names))]
        logits.append(linear(w, "shared.head.0", torch.cat([gated(w, *both) for both in zip(h, about, strict=True)])))
        for i in seen if len(seen) > 1 else []:
            said[names[i]][r], own[names[i]][r] = about[i], h[i]
    task = cross_entropy(torch.stack(logits), client.y[rows])
    trivial = sum(nce(said[m], own[m], t) for m in client.x) / len(client.x)
    return task + lam * (pairs(z, t) + trivial)


def pepsy_loss(
    w: Weights, client: Client, rows: list[int], names: list[str], lam: float, t: float, eta: float, chosen: int
) -> Tensor:
    z = {m: {r: encoded(w, client, m, r) for r in rows if client.holds(m, r)} for m in client.x}
    logits, relevance, full = [], [], [dict[int, Tensor]() for _ in names]
    for r in rows:
        known = [z[m][r] for m in names if client.holds(m, r)]
        for i, m in enumerate(names):
            identity = w["shared.identity"][i]
            content = z[m][r] if client.holds(m, r) else sum(known) / len(known)
            query = linear(w, "shared.query", torch.cat([identity, content]))
            near = [cosine_similarity(query, linear(w, "shared.key", c), dim=0) for c in w[CONTROLS]]
            best = sorted(range(len(near)), key=lambda p, near=near: -float(near[p].detach()))[:chosen]
            pattern = sum(w[CONTROLS][p] for p in best) / chosen
            full[i][r] = linear(w, "shared.reconfigure", torch.cat([identity, content, pattern]))
            relevance.append(sum(near[p] for p in best) / chosen)
        h = [own[r] for own in full]
        mixed = [gated(w, h[i], looked_up(h, i, [*range(len(h))])) for i in range(len(h))]
        logits.append(linear(w, "shared.head.0", torch.cat(mixed)))
    whole = {r: sum(own[r] for own in full) / len(names) for r in rows}
    task = cross_entropy(torch.stack(logits), client.y[rows])
    rebuilt = sum(nce(own, whole, t) for own in full) / len(names)
    return task + lam * (pairs(z, t) + rebuilt) - eta * sum(relevance) / len(relevance)


def trained(w: Weights, steps: list[Tensor], lr: float, loss: Callable[[Weights, list[int]], Tensor]) -> Weights:
    w = {n: v.detach().clone() for n, v in w.items()}
    for rows in steps:
        leaves = {n: v.clone().requires_grad_() for n, v in w.items()}
        grads = torch.autograd.grad(loss(leaves, rows.tolist()), [*leaves.values()], allow_unused=True)
        w = {n: v if g is None else v - lr * g for (n, v), g in zip(w.items(), grads, strict=True)}
    return w


def averaged(models: dict[int, Weights], sizes: dict[int, int]) -> Weights:
    found = {}
    for name in {n for model in models.values() for n in model}:
        senders = [k for k in models if name in models[k]]
        total = sum(sizes[k] for k in senders)
        found[name] = sum(sizes[k] / total * models[k][name] for k in senders)
    return found  # type: ignore[return-value]


def held(w: Weights, client: Client) -> Weights:
    return {n: v for n, v in w.items() if n.split(".")[0] in (*client.x, "shared")}


def fedmac(
    clients: list[Client], cohorts: list[list[int]], w: Weights, names: list[str], lr: float, lam: float, t: float
) -> Weights:
    for round, cohort in enumerate(cohorts):
        models = {
            k: trained(
                held(w, clients[k]),
                clients[k].steps[round],
                lr,
                lambda v, rows, k=k: fedmac_loss(v, clients[k], rows, names, lam, t),  # type: ignore[misc]
            )
            for k in cohort
        }
        w = w | averaged(models, {k: len(clients[k].y) for k in cohort})
    return w


def matched(own: Tensor, centres: list[Tensor], join: float) -> list[int | None]:
    """The cheapest assignment of controls to different clusters, by trying all of them; None opens a new cluster."""
    places: list[int | None] = [*range(len(centres)), *[None] * len(own)]
    best, least = None, float("inf")
    for order in set(permutations(places, len(own))):
        cost = sum(
            1 - join if g is None else 1 - float(cosine_similarity(c.double(), centres[g], dim=0))
            for c, g in zip(own, order, strict=True)
        )
        if cost < least:
            best, least = order, cost
    assert best is not None
    return [*best]


def pepsy(
    clients: list[Client],
    cohorts: list[list[int]],
    w: Weights,
    names: list[str],
    lr: float,
    lam: float,
    t: float,
    eta: float,
    join: float,
    chosen: int,
) -> tuple[Weights, Tensor, dict[int, Tensor], list[int]]:
    """The common parameters, the common profile, the clients' profiles, and the number of clusters of each round."""
    w, common, profiles, clusters = dict(w), w[CONTROLS], dict[int, Tensor](), list[int]()
    w.pop(CONTROLS)
    for round, cohort in enumerate(cohorts):
        models, sent = {}, {}
        for k in cohort:
            start = held(w, clients[k]) | {CONTROLS: profiles.get(k, common)}
            models[k] = trained(
                start,
                clients[k].steps[round],
                lr,
                lambda v, rows, k=k: pepsy_loss(v, clients[k], rows, names, lam, t, eta, chosen),  # type: ignore[misc]
            )
            sent[k] = models[k].pop(CONTROLS)
        sizes = {k: len(clients[k].y) for k in cohort}
        w = w | averaged(models, sizes)
        members: list[list[tuple[int, Tensor]]] = []
        at: dict[int, list[int]] = {}
        for k in cohort:
            centres = [sum(n * c.double() for n, c in one) / sum(n for n, _ in one) for one in members]
            at[k] = []
            for control, place in zip(sent[k], matched(sent[k], centres, join), strict=True):  # type: ignore[arg-type]
                if place is None:
                    members.append([])
                    place = len(members) - 1
                members[place].append((sizes[k], control))
                at[k].append(place)
        means = [sum(n * c for n, c in one) / sum(n for n, _ in one) for one in members]
        profiles |= {k: torch.stack([means[g] for g in at[k]]) for k in cohort}  # type: ignore[misc]
        heavy = sorted(range(len(means)), key=lambda g: (-sum(n for n, _ in members[g]), g))[: len(common)]
        common = torch.stack([means[g] for g in sorted(heavy)])  # type: ignore[misc]
        clusters.append(len(means))
    return w, common, profiles, clusters
