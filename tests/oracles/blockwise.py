"""FedDyn, FedNova, Ditto, APFL, pFedMe and methods with private parts as bare PyTorch loops over dicts of tensors.

Clients hold different modalities, so every client has its own subset of the tensors, and each tensor is averaged over
the clients that have it. The loops get the batches as row numbers and the cohort of each round; everything else is
written from the papers with PyTorch alone.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy

Weights = dict[str, Tensor]
STATISTICS = ("mean", "var")


@dataclass
class Client:
    """Inputs by modality, labels, and by random stream and round the rows of each step."""

    x: dict[str, Tensor]
    y: Tensor
    steps: dict[int, list[list[Tensor]]]


@dataclass
class Federation:
    """The clients, the cohort of each round, and the learning rate."""

    clients: list[Client]
    cohorts: list[list[int]]
    lr: float
    weighted: bool = True

    def mean(self, cohort: list[int], models: dict[int, Weights]) -> Weights:
        """Each tensor averaged over the clients that sent it."""
        total: Weights = {}
        for name in {name for model in models.values() for name in model}:
            senders = [k for k in cohort if name in models[k]]
            sizes = [len(self.clients[k].y) if self.weighted else 1 for k in senders]
            total[name] = sum(n / sum(sizes) * models[k][name] for n, k in zip(sizes, senders, strict=True))  # type: ignore[assignment]
        return total


def is_statistic(name: str) -> bool:
    return name.split(".")[-1] in STATISTICS


def logits(w: Weights, x: dict[str, Tensor], training: bool = True) -> Tensor:
    """Per modality Linear, perhaps BatchNorm, ReLU, Linear and its columns of the last layer; then the sum."""
    out = w["bias"]
    for m, rows in x.items():
        h = rows @ w[f"{m}.in.w"].T + w[f"{m}.in.b"]
        if f"{m}.norm.w" in w:
            h = batch_norm(
                h, w[f"{m}.norm.mean"], w[f"{m}.norm.var"], w[f"{m}.norm.w"], w[f"{m}.norm.b"], training, 0.1, 1e-5
            )
        out = out + (h.relu() @ w[f"{m}.out.w"].T + w[f"{m}.out.b"]) @ w[f"{m}.top"].T
    return out


def copied(w: Weights) -> Weights:
    return {n: v.detach().clone() for n, v in w.items()}


def part_of(w: Weights, client: Client) -> Weights:
    """What a client with these modalities holds."""
    return {n: v.clone() for n, v in w.items() if n == "bias" or n.split(".")[0] in client.x}


def gradient(w: Weights, client: Client, rows: Tensor, names: Collection[str] | None = None) -> Weights:
    """Gradient of the cross-entropy. Running statistics in `w` change in place."""
    names = [n for n in w if not is_statistic(n) and (names is None or n in names)]
    leaves = {n: w[n].detach().clone().requires_grad_() for n in names}
    loss = cross_entropy(logits({**w, **leaves}, {m: x[rows] for m, x in client.x.items()}), client.y[rows])
    return dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def sgd(
    w: Weights,
    client: Client,
    steps: list[Tensor],
    lr: float,
    extra: Callable[[str, Tensor], Tensor] | None = None,
    names: Collection[str] | None = None,
    momentum: float = 0.0,
) -> Weights:
    """Local training; `extra(name, value)` is added to each gradient."""
    w, velocity = copied(w), dict[str, Tensor]()
    for rows in steps:
        for n, g in gradient(w, client, rows, names).items():
            g = g + extra(n, w[n]) if extra else g
            velocity[n] = momentum * velocity[n] + g if n in velocity else g
            w[n] = w[n] - lr * velocity[n]
    return w


def feddyn(fed: Federation, w: Weights, alpha: float) -> Weights:
    """Acar et al. 2021, Algorithm 1; m counts the clients that have a tensor."""
    h = {n: torch.zeros_like(v) for n, v in w.items() if not is_statistic(n)}
    g = [{n: torch.zeros_like(v) for n, v in part_of(w, c).items() if not is_statistic(n)} for c in fed.clients]
    for t, cohort in enumerate(fed.cohorts):
        sent, trained = copied(w), {}
        for k in cohort:
            own = fed.clients[k]
            pull = lambda n, v, k=k, sent=sent: -g[k][n] + alpha * (v - sent[n])  # noqa: E731
            trained[k] = sgd(part_of(sent, own), own, own.steps[0][t], fed.lr, pull)
            g[k] = {n: g[k][n] - alpha * (trained[k][n] - sent[n]) for n in g[k]}
        for n, mean in fed.mean(cohort, trained).items():
            w[n] = mean
            if n in h:
                owners = sum(n in own for own in g)
                change = sum(trained[k][n] - sent[n] for k in cohort if n in trained[k])
                h[n] = h[n] - alpha / owners * change
                w[n] = mean - h[n] / alpha
    return w


def fednova(fed: Federation, w: Weights, momentum: float = 0.0, mu: float = 0.0) -> Weights:
    """Wang et al. 2020, Eq. 7, with the factors a of each optimiser written out as vectors."""
    for t, cohort in enumerate(fed.cohorts):
        sent, trained, lengths = copied(w), {}, {}
        for k in cohort:
            own = fed.clients[k]
            pull = lambda n, v, sent=sent: mu * (v - sent[n])  # noqa: E731
            trained[k] = sgd(part_of(sent, own), own, own.steps[0][t], fed.lr, pull, momentum=momentum)
            tau = len(own.steps[0][t])
            a = [1.0] * tau
            if momentum:
                a = [(1 - momentum ** (tau - i)) / (1 - momentum) for i in range(tau)]
            if mu:
                a = [(1 - fed.lr * mu) ** (tau - 1 - i) for i in range(tau)]
            lengths[k] = sum(a)
        for n in fed.mean(cohort, trained):
            senders = [k for k in cohort if n in trained[k]]
            p = {k: len(fed.clients[k].y) / sum(len(fed.clients[j].y) for j in senders) for k in senders}
            if is_statistic(n):
                w[n] = sum(p[k] * trained[k][n] for k in senders)  # type: ignore[assignment]
                continue
            effective = sum(p[k] * lengths[k] for k in senders)
            d = sum(p[k] * (sent[n] - trained[k][n]) / lengths[k] for k in senders)
            w[n] = sent[n] - effective * d
    return w


def ditto(fed: Federation, w: Weights, lam: float, stream: int) -> tuple[Weights, list[Weights]]:
    """Li et al. 2021, Algorithm 1: FedAvg and, beside it, personal models pulled to what was received."""
    v = [part_of(w, own) for own in fed.clients]
    for t, cohort in enumerate(fed.cohorts):
        sent, trained = copied(w), {}
        for k in cohort:
            own = fed.clients[k]
            trained[k] = sgd(part_of(sent, own), own, own.steps[0][t], fed.lr)
            pull = lambda n, x, sent=sent: lam * (x - sent[n])  # noqa: E731
            v[k] = sgd(v[k], own, own.steps[stream][t], fed.lr, pull)
        w.update(fed.mean(cohort, trained))
    return w, v


def apfl(fed: Federation, w: Weights, alpha: float) -> tuple[Weights, list[Weights], list[float]]:
    """Deng et al. 2020, Algorithm 1: own models, global model and mixing weights together; returns the mixtures."""
    v, weights = [part_of(w, own) for own in fed.clients], [alpha] * len(fed.clients)

    def mixed(v: Weights, w: Weights, a: float) -> Weights:
        return {n: x if is_statistic(n) else a * x + (1 - a) * w[n] for n, x in v.items()}

    for t, cohort in enumerate(fed.cohorts):
        trained = {}
        for k in cohort:
            own, a, y = fed.clients[k], weights[k], part_of(w, fed.clients[k])
            for i, rows in enumerate(own.steps[0][t]):
                g = gradient(y, own, rows)
                u = mixed(v[k], y, a)
                g_u = gradient(u, own, rows)
                v[k].update({n: x for n, x in u.items() if is_statistic(n)})
                if i == 0:
                    slope = sum(float(((v[k][n] - y[n]) * g_u[n]).sum()) for n in g_u)
                    weights[k] = min(max(a - fed.lr * slope, 0.0), 1.0)
                for n in g:
                    y[n] = y[n] - fed.lr * g[n]
                    v[k][n] = v[k][n] - fed.lr * a * g_u[n]
            trained[k] = y
        w.update(fed.mean(cohort, trained))
    return w, [mixed(x, w, a) for x, a in zip(v, weights, strict=True)], weights


def pfedme(
    fed: Federation, w: Weights, lam: float, inner_steps: int, inner_lr: float, beta: float
) -> tuple[Weights, list[Weights]]:
    """Dinh et al. 2020, Algorithm 1, with the inner problem solved by gradient steps that start at w."""
    theta = [part_of(w, own) for own in fed.clients]
    for t, cohort in enumerate(fed.cohorts):
        trained = {}
        for k in cohort:
            own = fed.clients[k]
            y = part_of(w, own)
            for rows in own.steps[0][t]:
                x = copied(y)
                for _ in range(inner_steps):
                    for n, g in gradient(copied(x), own, rows).items():
                        x[n] = x[n] - inner_lr * (g + lam * (x[n] - y[n]))
                gradient(x, own, rows)  # one pass for the running statistics
                y = {n: x[n] if is_statistic(n) else v - fed.lr * lam * (v - x[n]) for n, v in y.items()}
                theta[k] = x
            trained[k] = y
        for n, mean in fed.mean(cohort, trained).items():
            w[n] = mean if is_statistic(n) else (1 - beta) * w[n] + beta * mean
    return w, theta


def private(
    fed: Federation, w: Weights, keeps: Callable[[str], bool], first: int = 0, tune: int = 0
) -> tuple[Weights, list[Weights]]:
    """Li et al. 2021 (FedBN), Collins et al. 2021 (FedRep), Liang et al. 2020: parts that stay with the clients.

    Args:
        fed: the federation.
        w: the initial model.
        keeps: whether a tensor stays.
        first: random stream of the epochs in which the kept tensors train alone before the others; 0 for none.
        tune: random stream of the epochs of a copy after the last round; 0 for none.
    """
    own = [{n: v for n, v in part_of(w, c).items() if keeps(n)} for c in fed.clients]
    for t, cohort in enumerate(fed.cohorts):
        trained = {}
        for k in cohort:
            client = fed.clients[k]
            y = part_of(w, client) | own[k]
            names = None
            if first:
                y = sgd(y, client, client.steps[first][t], fed.lr, names=own[k])
                names = y.keys() - own[k].keys()
            y = sgd(y, client, client.steps[0][t], fed.lr, names=names)
            own[k] = {n: y[n] for n in own[k]}
            trained[k] = {n: v for n, v in y.items() if n not in own[k]}
        w.update(fed.mean(cohort, trained))
    models = [part_of(w, c) | mine for c, mine in zip(fed.clients, own, strict=True)]
    if tune:
        models = [sgd(y, c, c.steps[tune][-1], fed.lr) for y, c in zip(models, fed.clients, strict=True)]
    return {n: v for n, v in w.items() if not keeps(n)}, models
