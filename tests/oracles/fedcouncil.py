"""FedCouncil as a bare PyTorch loop: the models that clients train, the weights of the experts, and the mixture.

Written from docs/algorithms/fedcouncil.md with PyTorch and the clients of `oracles.mfedmc`. Experts are a plain list of
functions; the posterior after each held-out row is computed anew from the probabilities of all rows before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, combinations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oracles.blockwise import Federation, Weights, copied, logits, part_of
from oracles.mfedmc import Client, together

Rows = tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]
"""Inputs by modality, labels, and which rows have a modality that some lack."""


@dataclass
class Options:
    momentum: float
    momentum_lr: float
    modality_loss: float
    modulation: float
    tune_stream: int


def is_encoder_matrix(name: str) -> bool:
    return name.endswith((".in.w", ".out.w"))


def alone_logits(w: Weights, client: Client, rows: Tensor, m: str) -> Tensor:
    return together(w, client, rows, (m,))


def present(client: Client, rows: Tensor, m: str) -> Tensor:
    return client.has[m][rows] if m in client.has else torch.ones(len(rows), dtype=torch.bool)


def trained(w: Weights, client: Client, steps: list[Tensor], lr: float, options: Options | None = None) -> Weights:
    """Local training; with options, that of the composed model."""
    w, names = copied(w), tuple(client.x)
    composed = options is not None and len(names) > 1
    for rows in steps:
        leaves = {n: v.clone().requires_grad_() for n, v in w.items()}
        loss = cross_entropy(together(leaves, client, rows, names), client.y[rows])
        scale = dict.fromkeys(names, 1.0)
        if composed:
            assert options is not None
            for m in names:
                has = rows[present(client, rows, m)]
                if len(has):
                    own = cross_entropy(alone_logits(leaves, client, has, m), client.y[has])
                    loss = loss + options.modality_loss / len(names) * own
            if options.modulation:
                scale = factors(leaves, client, rows, options.modulation)
        grads = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], allow_unused=True), strict=True))
        for n, g in grads.items():
            if g is not None:
                w[n] = w[n] - lr * (scale[n.split(".")[0]] * g if is_encoder_matrix(n) else g)
    return copied(w)


def factors(w: Weights, client: Client, rows: Tensor, alpha: float) -> dict[str, float]:
    """Peng et al. 2022: 1 - tanh(alpha * ratio) for a modality whose score is above the mean of the others."""
    scores = {}
    for m in client.x:
        p = alone_logits(w, client, rows, m).detach().softmax(1)[torch.arange(len(rows)), client.y[rows]]
        scores[m] = float(p[present(client, rows, m)].sum())
    found = {}
    for m, s in scores.items():
        others = [v for n, v in scores.items() if n != m]
        ratio = s / max(sum(others) / len(others), 1e-12)
        found[m] = float(1 - torch.tanh(torch.tensor(alpha * ratio))) if ratio > 1 else 1.0
    return found


def fedcouncil(fed: Federation, w: Weights, options: Options) -> tuple[Weights, Weights, dict[int, dict[str, Weights]]]:
    """Return the composed model, that of FedAvg, and by client its own models."""
    anchor, velocity = copied(w), {n: torch.zeros_like(v) for n, v in w.items()}
    own = {k: part_of(w, c) for k, c in enumerate(fed.clients)}
    for t, cohort in enumerate(fed.cohorts):
        main, plain = {}, {}
        for k in cohort:
            client, steps = fed.clients[k], fed.clients[k].steps[0][t]
            main[k] = trained(part_of(w, client), client, steps, fed.lr, options)  # type: ignore[arg-type]
            plain[k] = trained(part_of(anchor, client), client, steps, fed.lr)  # type: ignore[arg-type]
            own[k] = trained(own[k], client, steps, fed.lr)  # type: ignore[arg-type]
        for n, mean in fed.mean(cohort, main).items():
            velocity[n] = options.momentum * velocity[n] + (mean - w[n])
            w[n] = w[n] + options.momentum_lr * velocity[n]
        anchor.update(fed.mean(cohort, plain))
    models = {}
    for k, client in enumerate(fed.clients):
        tune = client.steps[options.tune_stream][-1]
        globally = {"anchor": part_of(anchor, client), "composed": part_of(w, client)}
        copies = {f"adapted {n}": trained(v, client, tune, fed.lr) for n, v in globally.items()}  # type: ignore[arg-type]
        models[k] = globally | copies | {"own": own[k]}
    return w, anchor, models


Expert = tuple[Callable[[Rows, tuple[str, ...]], Tensor], bool]
"""Probabilities (n, C) of rows from a subset of the modalities; and whether it is a global model alone."""


def probabilities(w: Weights, rows: Rows, subset: tuple[str, ...], heat: float) -> Tensor:
    x, _, has = rows
    total = w["bias"].double()
    for m in subset:
        own = logits(w, {m: x[m]}) - w["bias"]
        total = total + (own * has[m].unsqueeze(1) if m in has else own).double()
    return (total / heat).softmax(-1)


def mean_of(several: list[Weights], heat: float) -> Callable[[Rows, tuple[str, ...]], Tensor]:
    return lambda rows, subset: torch.stack([probabilities(w, rows, subset, heat) for w in several]).mean(0)


def single(w: Weights, m: str, heat: float) -> Callable[[Rows, tuple[str, ...]], Tensor]:
    return lambda rows, subset: probabilities(w, rows, (m,), heat)


def experts(models: dict[str, Weights], subset: tuple[str, ...], temperatures: tuple[float, ...]) -> list[Expert]:
    names, found = [*models], list[Expert]()
    for several in chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)):
        for heat in temperatures:
            head = several in (("anchor",), ("composed",)) and heat == 1.0
            found.append((mean_of([models[n] for n in several], heat), head))
    for m in subset if len(subset) > 1 else ():
        found += [(single(w, m, heat), False) for w in models.values() for heat in temperatures]
    return found


def weighed(
    models: dict[str, Weights], held: Rows, subset: tuple[str, ...], temperatures: tuple[float, ...], towards: str
) -> tuple[list[Expert], Tensor] | None:
    """The experts of a subset and their weights, or None without held-out rows that have the subset."""
    x, y, has = held
    rows = torch.ones(len(y), dtype=torch.bool)
    for m in subset:
        rows &= has.get(m, rows)
    if not bool(rows.any()):
        return None
    panel = experts(models, subset, temperatures)
    heads = sum(head for _, head in panel)
    prior = [0.5 / heads if head else 0.5 / (len(panel) - heads) for _, head in panel]
    if towards == "flat":
        prior = [1 / len(panel)] * len(panel)
    held = ({m: v[rows] for m, v in x.items()}, y[rows], {m: v[rows] for m, v in has.items()})
    p = torch.stack([e(held, subset)[torch.arange(len(held[1])), held[1]] for e, _ in panel])
    total = torch.zeros(len(panel), dtype=torch.float64)
    for t in range(len(held[1]) + 1):
        joint = torch.tensor(prior, dtype=torch.float64) * p[:, :t].prod(1)
        total += joint / joint.sum()
    return panel, total / (len(held[1]) + 1)


def mixture(
    models: dict[str, Weights],
    held: Rows,
    new: Rows,
    subset: tuple[str, ...],
    temperatures: tuple[float, ...],
    towards: str,
) -> Tensor:
    """The probabilities of new rows that have exactly this subset."""
    found = weighed(models, held, subset, temperatures, towards)
    if found is None:
        return probabilities(models["anchor"], new, subset, 1.0)
    return sum(wt * e(new, subset) for (e, _), wt in zip(*found, strict=True))  # type: ignore[return-value]
