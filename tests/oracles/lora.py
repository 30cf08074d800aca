"""HetLoRA's, FlexLoRA's and FediLoRA's aggregation of one adapted layer, as plain NumPy loops over the clients.

Written from Cho et al., EMNLP 2024, Bai et al., NeurIPS 2024, and Yang et al., arXiv:2509.06984. A is (r, inputs) and B
is (outputs, r).
"""

import numpy as np

Adapter = tuple[np.ndarray, np.ndarray]


def zero_padded(adapters: list[Adapter], shares: list[float], rank: int) -> Adapter:
    """The weighted sums of A and of B, each padded with zeros to the largest rank."""
    total_a = np.zeros((rank, adapters[0][0].shape[1]))
    total_b = np.zeros((adapters[0][1].shape[0], rank))
    for (a, b), share in zip(adapters, shares, strict=True):
        for row in range(len(a)):
            total_a[row] += share * a[row]
            total_b[:, row] += share * b[:, row]
    return total_a, total_b


def hetlora(adapters: list[Adapter], rank: int) -> Adapter:
    """Zero-padding with weights by the norm of the singular values of each client's product."""
    norms = [float(np.sqrt((np.linalg.svd(b @ a, compute_uv=False) ** 2).sum())) for a, b in adapters]
    return zero_padded(adapters, [norm / sum(norms) for norm in norms], rank)


def flexlora(adapters: list[Adapter], rows: list[int], rank: int) -> np.ndarray:
    """The best approximation, of this rank, of the mean of the products."""
    mean = np.zeros((adapters[0][1].shape[0], adapters[0][0].shape[1]))
    for (a, b), n in zip(adapters, rows, strict=True):
        mean += n / sum(rows) * (b @ a)
    u, s, vt = np.linalg.svd(mean)
    best = np.zeros_like(mean)
    for i in range(min(rank, len(s))):
        best += s[i] * np.outer(u[:, i], vt[i])
    return best


def fedilora(adapters: list[Adapter], rows: list[int], rank: int) -> Adapter:
    """Each row of A and column of B: the mean over the clients whose rank reaches it, weighted by their rows."""
    new_a, new_b = zero_padded(adapters, [0.0] * len(adapters), rank)
    for row in range(rank):
        having = [(a, b, n) for (a, b), n in zip(adapters, rows, strict=True) if len(a) > row]
        total = sum(n for _, _, n in having)
        for a, b, n in having:
            new_a[row] += n / total * a[row]
            new_b[:, row] += n / total * b[:, row]
    return new_a, new_b


def repaired(trained: dict[str, np.ndarray], received: dict[str, np.ndarray], enough: float) -> dict[str, np.ndarray]:
    """The trained matrices A, the one least like the received one pulled back towards it."""
    likeness = {}
    for name, now in trained.items():
        one, two = now.ravel(), received[name].ravel()
        norms = float(np.sqrt(one @ one)) * float(np.sqrt(two @ two))
        likeness[name] = float(one @ two) / norms if norms else 1.0
    least = min(likeness, key=lambda name: likeness[name])
    found = dict(trained)
    if likeness[least] < enough:
        found[least] = likeness[least] * trained[least] + (1 - likeness[least]) * received[least]
    return found
