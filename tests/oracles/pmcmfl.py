"""PmcmFL and MFCPL as a bare PyTorch loop: stand-ins row by row, the contrast, the library of prototypes, the mean.

Written from docs/algorithms/pmcmfl.md with PyTorch and the clients of `oracles.mfedmc`. Each row is predicted on its
own, and a class has a prototype if it is a key of a dictionary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from oracles.blockwise import Federation, Weights, copied, part_of
from oracles.mfedmc import Client

Library = dict[str, dict[int, Tensor]]
"""Modality -> class -> prototype."""


@dataclass
class Options:
    variant: str
    stand_in: str
    contrast: float
    temperature: float


def embeddings(w: Weights, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        m: (v @ w[f"{m}.in.w"].T + w[f"{m}.in.b"]).relu() @ w[f"{m}.out.w"].T + w[f"{m}.out.b"] for m, v in x.items()
    }


def has(client: Client, m: str, row: int) -> bool:
    return bool(client.has[m][row]) if m in client.has else True


def by_similarity(library: Library, own: dict[str, Tensor], m: str) -> Tensor | None:
    """The stand-in for modality m of a row that has the embeddings `own`."""
    if not own:
        return None
    classes = [c for c in library.get(m, {}) if all(c in library.get(n, {}) for n in own)]
    if not classes:
        return None
    scores = torch.stack([-sum((z.detach() - library[n][c]).norm() for n, z in own.items()) for c in classes])  # type: ignore[arg-type]
    share = scores.exp() / scores.exp().sum()
    return sum(s * library[m][c] for s, c in zip(share, classes, strict=True))  # type: ignore[return-value]


def predicted(w: Weights, own: dict[str, Tensor], filled: dict[str, Tensor | None]) -> Tensor:
    out = w["bias"]
    for m, z in {**own, **filled}.items():
        if z is not None:
            out = out + w[f"{m}.top"] @ z
    return out


def step_loss(w: Weights, client: Client, rows: Tensor, library: Library, options: Options) -> Tensor:
    z = embeddings(w, {m: x[rows] for m, x in client.x.items()})
    outs, apart = [], {m: list[tuple[Tensor, int]]() for m in client.x}
    for place, row in enumerate(rows.tolist()):
        own = {m: z[m][place] for m in client.x if has(client, m, row)}
        y, filled = int(client.y[row]), dict[str, Tensor | None]()
        for m in client.x:
            if m in own:
                apart[m].append((own[m], y))
            elif options.variant == "pmcmfl":
                label = options.stand_in == "label"
                filled[m] = library.get(m, {}).get(y) if label else by_similarity(library, own, m)
        outs.append(predicted(w, own, filled))
    loss = cross_entropy(torch.stack(outs), client.y[rows])
    for m, seen in apart.items():
        for n in client.x if options.variant == "mfcpl" else [m]:
            if n not in library:
                continue
            known = [(e, y) for e, y in seen if y in library[n]]
            values = [-contrasted(e, y, library[n], options.temperature) for e, y in known]
            weight = len([k for k in client.x if k in library]) if options.variant == "mfcpl" else 1
            if values:
                loss = loss + options.contrast / weight * torch.stack(values).mean()
    return loss


def contrasted(z: Tensor, y: int, near: dict[int, Tensor], temperature: float) -> Tensor:
    heat = {c: (cosine_similarity(z, p, dim=0) / temperature).exp() for c, p in near.items()}
    return (heat[y] / sum(heat.values())).log()  # type: ignore[return-value]


def pmcmfl(fed: Federation, w: Weights, options: Options) -> tuple[Weights, Library]:
    library: Library = {}
    for t, cohort in enumerate(fed.cohorts):
        models: dict[int, Weights] = {}
        reports: dict[str, dict[int, list[tuple[int, Tensor]]]] = {}
        for k in cohort:
            client = fed.clients[k]
            assert isinstance(client, Client)
            model = part_of(w, client)
            seen = {m: library[m] for m in client.x if m in library}
            for rows in client.steps[0][t]:
                leaves = {n: v.clone().requires_grad_() for n, v in model.items()}
                grads = torch.autograd.grad(
                    step_loss(leaves, client, rows, seen, options), [*leaves.values()], allow_unused=True
                )
                model = {n: v if g is None else v - fed.lr * g for (n, v), g in zip(model.items(), grads, strict=True)}
            models[k] = copied(model)
            for m, z in embeddings(models[k], client.x).items():
                for c in set(client.y.tolist()):
                    rows = [i for i, y in enumerate(client.y.tolist()) if y == c and has(client, m, i)]
                    if rows:
                        reports.setdefault(m, {}).setdefault(c, []).append((len(rows), z[rows].mean(0)))
        w = {**w, **fed.mean(cohort, models)}
        for m, by_class in reports.items():
            for c, means in by_class.items():
                library.setdefault(m, {})[c] = sum(n * p for n, p in means) / sum(n for n, _ in means)  # type: ignore[assignment]
    return w, library


def answers(w: Weights, library: Library, x: dict[str, Tensor], present: dict[str, Tensor], variant: str) -> Tensor:
    """Logits of new rows, whose class is unknown."""
    z, found = embeddings(w, x), []
    for row in range(len(next(iter(x.values())))):
        own = {m: z[m][row] for m in x if m not in present or bool(present[m][row])}
        absent = [m for m in library if m not in own] if variant == "pmcmfl" else []
        found.append(predicted(w, own, {m: by_similarity(library, own, m) for m in absent}))
    return torch.stack(found)
