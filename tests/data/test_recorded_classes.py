"""run.json records which classes the label-skewed partitions gave to each client (docs/partitions.md)."""

from collections import Counter
from dataclasses import replace
from math import comb
from typing import Any

import pytest
import torch

from polyfed.data import ClientsSpec, Shards
from polyfed.experiment.running.assembly import assemble, facts_of
from world import algorithm, recipe


def facts(limit: int = 1000, **clients: Any) -> tuple[Any, list[dict[str, Any]]]:
    parts = assemble(recipe(algorithm("fedavg"), clients=ClientsSpec(num=6, **clients)))
    return parts, facts_of(parts, limit)["clients"]


@pytest.mark.parametrize("personal_test", [None, 0.9, "matched"])
def test_the_classes_of_each_client(personal_test: Any) -> None:
    parts, recorded = facts(partition="classes-per-client", classes_per_client=2, personal_test=personal_test)
    label, sets = parts.population.columns.label.tolist(), [tuple(client["classes"]) for client in recorded]
    assert all(len(classes) == 2 for classes in sets)
    assert len(set(sets)) == comb(4, 2), "six clients, six pairs of four classes: all different"
    for client in recorded:
        assert {label[row] for row in parts.population.train[client["id"]].tolist()} <= set(client["classes"])


def test_the_main_class_of_each_client() -> None:
    parts, recorded = facts(partition="main-class", main_share=0.8)
    label = parts.population.columns.label.tolist()
    for client in recorded:
        counts = Counter(label[row] for row in parts.population.train[client["id"]].tolist())
        assert client["main_class"] == counts.most_common(1)[0][0]


def test_other_partitions_and_clients_beyond_the_limit_record_no_classes() -> None:
    _, recorded = facts(partition="iid")
    assert all(set(client) == {"id", "rows", "modalities", "labels"} for client in recorded)
    assert len(facts(3, partition="classes-per-client", classes_per_client=2)[1]) == 3


def test_no_classes_are_recorded_for_devices_whose_rows_are_elsewhere() -> None:
    parts, _ = facts(partition="classes-per-client", classes_per_client=2)
    train = parts.population.train
    elsewhere = Shards(train.offsets, torch.full_like(train.rows, -1))
    parts.population = replace(parts.population, train=elsewhere)
    assert all("classes" not in client for client in facts_of(parts)["clients"])
