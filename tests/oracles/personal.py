"""FedFomo and FedAMP as plain loops in NumPy; nothing of the package is used."""

import numpy as np

Numbers = dict[str, np.ndarray]


def logits(w: Numbers, x: dict[str, np.ndarray]) -> np.ndarray:
    """One hidden ReLU layer for each modality, then one linear layer over all: the plain model of tests/world.py."""
    total = w["shared.bias"].copy()
    for m, rows in x.items():
        names = sorted(n for n in w if n.startswith(f"{m}.encoder"))
        (b0, w0, b1, w1) = (w[n] for n in names)
        hidden = np.maximum(rows @ w0.T + b0, 0)
        total = total + (hidden @ w1.T + b1) @ w[f"{m}.fusion.weight"].T
    return total


def loss(w: Numbers, x: dict[str, np.ndarray], y: np.ndarray) -> float:
    z = logits(w, x)
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


def fomo(
    own: Numbers, previous: Numbers, candidates: dict[str, list[Numbers]], x: dict[str, np.ndarray], y: np.ndarray
) -> Numbers:
    """The client's next model; `candidates[block]` are other clients' blocks, `x` and `y` the held-out rows."""
    base = loss(previous, x, y)
    after = dict(own)
    for block, others in candidates.items():
        names = [n for n in own if n.split(".")[0] == block]
        pool = [*others, {n: own[n] for n in names}]
        weights = []
        for candidate in pool:
            far = np.sqrt(sum(((candidate[n] - previous[n]) ** 2).sum() for n in names))
            gain = base - loss({**previous, **{n: candidate[n] for n in names}}, x, y)
            weights.append(max(0.0, gain / max(far, 1e-12)))
        if sum(weights) > 0:
            for n in names:
                moved = [wt / sum(weights) * (c[n] - previous[n]) for wt, c in zip(weights, pool, strict=True)]
                after[n] = previous[n] + sum(moved)
    return after


def amp(w: np.ndarray, alpha: float, sigma: float) -> np.ndarray:
    """Cloud models of clients with models w (S, P)."""
    clouds = []
    for i in range(len(w)):
        weights = [
            alpha * np.exp(-((w[i] - w[j]) ** 2).sum() / sigma) / sigma if j != i else 0.0 for j in range(len(w))
        ]
        over = max(sum(weights), 1.0)
        weights = [a / over for a in weights]
        clouds.append((1 - sum(weights)) * w[i] + sum(a * w[j] for j, a in enumerate(weights)))
    return np.array(clouds)


def heur(w: np.ndarray, sigma: float, own: float) -> np.ndarray:
    clouds = []
    for i in range(len(w)):
        cosines = [w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in range(len(w))]
        top = max(c for j, c in enumerate(cosines) if j != i)
        e = [np.exp(sigma * (c - top)) if j != i else 0.0 for j, c in enumerate(cosines)]
        clouds.append(own * w[i] + (1 - own) * sum(v / sum(e) * w[j] for j, v in enumerate(e)))
    return np.array(clouds)
