"""Norms of updates, calibration, label counts and what a method keeps, against plain computations."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import polyfed
from polyfed.core.tree import block_of
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.results.calibration import BINS, bins_of, expected_error
from polyfed.experiment.results.round_facts import seconds_of
from polyfed.experiment.results.updates import block_norms
from polyfed.selection import Uniform
from world import algorithm, recipe

RECIPE = "recipes/fedavg-cg-digits.toml"


def test_norms_are_those_of_the_difference_by_block():
    old = {"a.w": torch.zeros(3), "a.b": torch.ones(2), "shared.w": torch.ones(4), "shared.count": torch.tensor(1)}
    new = {
        "a.w": torch.ones(3) * 3,
        "a.b": torch.ones(2) * 5,
        "shared.w": torch.ones(4),
        "shared.count": torch.tensor(9),
    }
    assert block_norms(new, old) == pytest.approx({"a": np.sqrt(27 + 32), "shared": 0.0})
    assert block_norms(new, None) == block_norms(None, old) == {}


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_a_run_has_the_norms_of_its_own_models(engine):
    states = []

    def follow(event, **facts):
        if event == "round-finished":
            states.append(facts["row"]["norms"])

    spec = replace(recipe(algorithm("fedavg", evaluation=Evaluation(every=1))), rounds=1)
    before = polyfed.run(replace(spec, rounds=0)).params
    done = polyfed.run(spec, engine=engine, listeners=[follow])
    for block in {block_of(name) for name in before}:
        moved = [(done.params[n] - v).flatten() for n, v in before.items() if block_of(n) == block]
        assert states[0]["model"][block] == pytest.approx(float(torch.cat(moved).norm()), rel=1e-4)
    assert states[0]["clients"].keys() == states[0]["model"].keys()
    assert all(norm > 0 for norm in states[0]["clients"].values())


def test_clients_that_move_alike_have_the_norm_of_the_model():
    spec = recipe(algorithm("fedavg", selector=Uniform(participation=1)))
    row = polyfed.run(replace(spec, rounds=1, clients=replace(spec.clients, num=1, holdings=None))).rounds[0]
    assert row["norms"]["clients"] == pytest.approx(row["norms"]["model"], rel=1e-4)


def test_calibration_equals_a_plain_loop():
    draw = torch.Generator().manual_seed(1)
    logits, y = 2 * torch.randn(500, 4, generator=draw), torch.randint(0, 4, (500,), generator=draw)
    sure = logits.double().softmax(-1).max(-1)
    total, edges = 0.0, np.linspace(0, 1, BINS + 1)
    for low, high in pairwise(edges):
        own = (sure.values > low) & (sure.values <= high)
        if own.any():
            right = (sure.indices[own] == y[own]).double().mean()
            total += float(own.double().mean() * (right - sure.values[own].mean()).abs())
    bins = bins_of(logits, y)
    assert expected_error(bins) == pytest.approx(total)
    assert bins[:, 0].sum() == 500
    halves = bins_of(logits[:200], y[:200]) + bins_of(logits[200:], y[200:])
    assert torch.allclose(halves, bins), "bins can be added"


def test_calibration_of_a_run_is_that_of_its_predictions(tmp_path):
    done = polyfed.run(polyfed.load_recipe(RECIPE, ["rounds=2"]), tmp_path / "run")
    columns = polyfed.load_recipe(RECIPE).data.load()
    rows = (columns.split == 1).nonzero().flatten()
    logits = done.predict({m: column.raw(rows) for m, column in columns.modalities.items()})
    found = done.result["calibration"]
    assert found["ece"] == pytest.approx(expected_error(bins_of(logits, columns.label[rows])), abs=1e-9)
    assert sum(found["rows"]) == len(rows)
    accuracy = done.result["metrics"]["global"]["accuracy"]
    assert sum(found["right"]) / len(rows) == pytest.approx(accuracy)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["data"]["class_names"] == [str(number) for number in range(10)]
    assert all(sum(client["labels"]) == client["rows"] for client in facts["clients"])


def test_a_method_without_a_global_model_has_neither_calibration_nor_norms():
    spec = recipe(algorithm("fedfomo"))
    done = polyfed.run(replace(spec, rounds=1, clients=replace(spec.clients, personal_test=0.25)))
    assert "calibration" not in done.result
    assert done.rounds[0]["norms"]["model"] == {}


def test_what_a_method_keeps_is_counted():
    plain, control = (polyfed.run(replace(recipe(algorithm(n)), rounds=1)).result for n in ("fedavg", "scaffold"))
    assert plain["num_kept"] == {"server": plain["num_parameters"], "client": 0}
    assert control["num_kept"]["server"] > control["num_parameters"]
    assert control["num_kept"]["client"] > 0


def test_the_first_round_is_apart_from_the_median():
    assert seconds_of([9.0, 1.0, 2.0, 3.0]) == {"seconds_per_round": 2.0, "seconds_first_round": 9.0}
    assert seconds_of([9.0]) == {"seconds_per_round": 9.0, "seconds_first_round": 9.0}
    assert seconds_of([]) == {"seconds_per_round": 0.0}
