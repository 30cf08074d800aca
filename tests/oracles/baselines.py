"""Parts of the baselines of CMSFed's tables, in NumPy and plain PyTorch; nothing of the package is used."""

import math

import numpy as np
import torch
from torch import Tensor


def ogm(sure: list[float], alpha: float) -> list[float]:
    """Coefficients of two modalities from their summed confidences."""
    ratios = [sure[0] / sure[1], sure[1] / sure[0]]
    return [1 - math.tanh(alpha * r) if r > 1 else 1.0 for r in ratios]


def split_mix(vectors: dict[str, np.ndarray], owners: dict[str, list[bool]], temperature: float) -> np.ndarray:
    """FedMSplit's mixing weights c / sum c of every block, (blocks, K, K), from cosine similarities."""
    names = list(vectors)
    modalities = [n for n in names if n != "shared"]
    num = len(owners[names[0]])
    attention = {}
    for name in names:
        a = np.zeros((num, num))
        for k in range(num):
            for j in range(num):
                if owners[name][k] and owners[name][j]:
                    x, y = vectors[name][k], vectors[name][j]
                    a[k, j] = math.exp(x @ y / np.linalg.norm(x) / np.linalg.norm(y) / temperature)
            a[k] /= max(a[k].sum(), 1e-30)
        attention[name] = a
    mix = np.zeros((len(names), num, num))
    for b, name in enumerate(names):
        for k in range(num):
            for j in range(num):
                both = [m for m in modalities if owners[m][k] and owners[m][j]]
                mix[b, k, j] = attention[name][k, j] * sum(attention[m][k, j] for m in both) / (1 + len(both))
            mix[b, k] /= max(mix[b, k].sum(), 1e-30)
    return mix


def mean_loss(model: torch.nn.Module, x: list[Tensor], y: Tensor) -> float:
    """Mean cross-entropy of a model on some rows."""
    with torch.no_grad():
        return float(-torch.log_softmax(model(*x), 1)[torch.arange(len(y)), y].mean())
