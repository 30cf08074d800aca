"""Statistics over clients, models and seeds. The metrics of one model's predictions are in `polyfed.objective`.

docs/evaluation.md defines the metrics.
"""

from collections.abc import Mapping, Sequence

import torch

TENTH = 0.1
"""The share of clients that have a worse score than `p10`."""


def personal(scores: Mapping[int, float], rows: Mapping[int, float], *, rising: bool = True) -> dict[str, float]:
    """Return the `personal` group of result.json: statistics over clients of the scores on their own test rows.

    Args:
        scores: client -> score, such as the accuracy. Clients without a score are left out.
        rows: client -> number of test rows.
        rising: whether a larger score is better.

    Returns:
        `mean`, `weighted` (by test rows), `worst`, `std` and `p10` over clients. A tenth of the clients have a worse
        score than `p10`, which is interpolated linearly. The result is empty if no client has a score.
    """
    tested = sorted(scores)
    if not tested:
        return {}
    values = torch.tensor([scores[client] for client in tested], dtype=torch.float64)
    weights = torch.tensor([rows[client] for client in tested], dtype=torch.float64)
    return {
        "mean": float(values.mean()),
        "weighted": float((values * weights).sum() / weights.sum()),
        "worst": float(values.min() if rising else values.max()),
        "std": float(values.std(correction=0)),
        "p10": float(values.quantile(TENTH if rising else 1 - TENTH)),
    }


def mean_groups(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of every metric over the models that have this metric, or an empty result without models."""
    result: dict[str, dict[str, list[float]]] = {}
    for one in measured:
        for group, numbers in one.items():
            for name, value in numbers.items():
                result.setdefault(group, {}).setdefault(name, []).append(value)
    return {
        group: {name: sum(values) / len(values) for name, values in numbers.items()}
        for group, numbers in result.items()
    }


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation, for example over seeds. The deviation of one value is 0."""
    sample = torch.tensor(values, dtype=torch.float64)
    return float(sample.mean()), float(sample.std()) if len(values) > 1 else 0.0
