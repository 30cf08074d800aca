"""run.json says which classes the label-skewed partitions of algorithms.md 6.12 gave to whom."""

from collections import Counter
from dataclasses import replace
from math import comb
from typing import Any

import pytest
import torch

from polyfed.data import ClientsSpec, Shards
from polyfed.experiment.assembly import assemble, facts_of
from world import algorithm, recipe


def facts(limit: int = 1000, **clients: Any) -> tuple[Any, list[dict[str, Any]]]:
    parts = assemble(recipe(algorithm("fedavg"), clients=ClientsSpec(num=6, **clients)))
    return parts, facts_of(parts, limit)["clients"]


@pytest.mark.parametrize("personal_test", [None, 0.9, "matched"])
def test_the_classes_of_each_client(personal_test: Any) -> None:
    parts, told = facts(partition="classes-per-client", classes_per_client=2, personal_test=personal_test)
    label, sets = parts.population.columns.label.tolist(), [tuple(one["classes"]) for one in told]
    assert all(len(own) == 2 for own in sets)
    assert len(set(sets)) == comb(4, 2), "six clients, six pairs of four classes: all different"
    for one in told:
        assert {label[row] for row in parts.population.train[one["id"]].tolist()} <= set(one["classes"])


def test_the_main_class_of_each_client() -> None:
    parts, told = facts(partition="main-class", main_share=0.8)
    label = parts.population.columns.label.tolist()
    for one in told:
        counts = Counter(label[row] for row in parts.population.train[one["id"]].tolist())
        assert one["main_class"] == counts.most_common(1)[0][0]


def test_other_partitions_and_clients_beyond_the_limit_say_nothing() -> None:
    _, told = facts(partition="iid")
    assert all(set(one) == {"id", "rows", "modalities"} for one in told)
    assert len(facts(3, partition="classes-per-client", classes_per_client=2)[1]) == 3


def test_labels_of_devices_elsewhere_are_not_made_up() -> None:
    parts, _ = facts(partition="classes-per-client", classes_per_client=2)
    train = parts.population.train
    elsewhere = Shards(train.offsets, torch.full_like(train.rows, -1))
    parts.population = replace(parts.population, train=elsewhere)
    assert all("classes" not in one for one in facts_of(parts)["clients"])
