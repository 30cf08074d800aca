"""Weights and ensemble of CreamFL, as float64 loops over their formulas; nothing of the package is used."""

import numpy as np


def ensemble(sent: list[np.ndarray], other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights (K, P) and the weighted sum (P, E)."""

    def unit(z: np.ndarray) -> np.ndarray:
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    size, weights = len(other), np.zeros((len(sent), len(other)))
    for i in range(size):
        scores = []
        for z in sent:
            products = np.array([unit(z)[i] @ unit(other)[j] for j in range(size)])
            scores.append(products[i] - np.log(np.exp(products).sum()))
        share = np.exp(np.array(scores) - max(scores))
        weights[:, i] = share / share.sum()
    return weights, sum(w[:, None] * z for w, z in zip(weights, sent, strict=True))
