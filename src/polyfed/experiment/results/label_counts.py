"""What run.json says about the rows of single clients: rows of each class, and rows that lack a modality."""

from typing import Any

import torch

from polyfed.data import Population
from polyfed.data.population.missing_rows import missing_shares

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


def rows_without(population: Population, clients: int) -> list[dict[str, Any]]:
    """Return, for each of the first clients of a simulation, the shares of its rows that lack its modalities.

    Each result has the entry `missing_rows`, and `missing_test_rows` if the client has test rows of its own. Both map a
    modality to a share. The results are empty if no row of the table lacks a modality, and in a deployment.
    """
    result: list[dict[str, Any]] = [{} for _ in range(clients)]
    for entry, shards in (("missing_rows", population.train), ("missing_test_rows", population.test)):
        if shards is None or bool((shards.rows < 0).any()):
            continue
        for name, shares in missing_shares(population.columns, shards, population.holds).items():
            for client, share in enumerate(shares[:clients].tolist()):
                if share == share:
                    result[client].setdefault(entry, {})[name] = share
    return result


def tests_without(population: Population) -> dict[str, Any]:
    """Return the shares of the server's test and validation rows that lack each modality, if some rows lack one."""
    result = {}
    for entry, rows in (
        ("missing_test_rows", population.test_rows),
        ("missing_validation_rows", population.validation_rows),
    ):
        masks = {name: there.cpu()[rows] for name, there in population.columns.present.items()}
        if len(rows) and masks:
            result[entry] = {name: 1.0 - float(there.double().mean()) for name, there in masks.items()}
    return result


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
