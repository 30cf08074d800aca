"""HetLoRA's and FlexLoRA's aggregation of one adapted layer, as plain NumPy loops over the clients.

Written from Cho et al., EMNLP 2024, and Bai et al., NeurIPS 2024. A is (r, inputs) and B is (outputs, r).
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
