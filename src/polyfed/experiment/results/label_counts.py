"""The number of training rows of each class that a client holds, for run.json."""

from typing import Any

import torch

from polyfed.data import Population

MOST_COUNTS = 100_000
"""The largest number of counts of classes in run.json. So many counts take about 300 kB."""


def label_counts(population: Population, client: int) -> dict[str, Any]:
    """Return the number of training rows of each class that a client of a simulation has.

    Only the first clients of a simulation are counted; for all others, the result is empty (see `MOST_COUNTS`). A
    client of a deployment keeps its labels, so the server cannot count them, and the result is empty too.
    """
    label = population.columns.label.cpu()
    classes = population.columns.num_classes
    if (client + 1) * classes > MOST_COUNTS or label.dim() != 1 or label.is_floating_point():
        return {}
    rows = population.train[client].cpu()
    if bool((rows < 0).any()):
        return {}
    return {"labels": torch.bincount(label[rows], minlength=classes).tolist()}


def dealt_classes(population: Population, partition: Any, client: int) -> dict[str, Any]:
    """Return the classes, or the main class, that the partition assigned to a client. Other partitions assign none."""
    if partition not in ("classes-per-client", "main-class"):
        return {}
    rows = torch.cat([shards[client] for shards in (population.train, population.test) if shards is not None])
    if bool((rows < 0).any()):  # rows of real devices, whose labels the server does not know
        return {}
    if partition == "main-class":
        return {"main_class": client % population.columns.num_classes}
    return {"classes": sorted(set(population.columns.label.cpu()[rows].tolist()))}
