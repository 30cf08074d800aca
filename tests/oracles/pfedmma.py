"""pFedMMA as a bare PyTorch loop: encoders, adapters, the map to the logits, and the mean of what is not private.

Written from docs/algorithms/pfedmma.md with PyTorch and the clients of `oracles.mfedmc`. Names are those of the model.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy

from oracles.blockwise import Federation, Weights, copied
from oracles.mfedmc import Client, step


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def predicted(w: Weights, client: Client, rows: Tensor) -> Tensor:
    out = w["shared.bias"].expand(len(rows), -1)
    for m, x in client.x.items():
        z = affine(w, f"{m}.encoder.2", affine(w, f"{m}.encoder.0", x[rows]).relu())
        middle = affine(w, "shared.between", affine(w, f"{m}.fusion.down", z).relu()).relu()
        z = z + affine(w, f"{m}.fusion.up", middle)
        term = z @ w[f"{m}.fusion.top.weight"].T
        out = out + (term * client.has[m][rows].unsqueeze(1) if m in client.has else term)
    return out


def projection(name: str) -> bool:
    return ".fusion.down." in name or ".fusion.up." in name


def pfedmma(fed: Federation, w: Weights, frozen: bool) -> tuple[Weights, list[Weights]]:
    """What the server has, and what each client keeps."""

    def trains(name: str) -> bool:
        return not frozen or projection(name) or ".between." in name

    def kept(name: str) -> bool:
        return ".between." not in name if frozen else projection(name)

    common = {n: v.clone() for n, v in w.items() if not kept(n)}
    own = [{n: v.clone() for n, v in w.items() if kept(n) and n.split(".")[0] in (*c.x, "shared")} for c in fed.clients]
    for t, cohort in enumerate(fed.cohorts):
        sent = {}
        for k in cohort:
            client = fed.clients[k]
            y = {n: v for n, v in common.items() if n.split(".")[0] in (*client.x, "shared")} | own[k]
            names = [n for n in y if trains(n)]
            for rows in client.steps[0][t]:
                leaves = {**y, **{n: y[n].detach().clone().requires_grad_() for n in names}}
                loss = cross_entropy(predicted(leaves, client, rows), client.y[rows])  # type: ignore[arg-type]
                y = step(y, names, loss, leaves, fed.lr)
            y = copied(y)
            own[k] = {n: y[n] for n in own[k]}
            sent[k] = {n: v for n, v in y.items() if not kept(n)}
        common |= fed.mean(cohort, sent)
    return common, own
