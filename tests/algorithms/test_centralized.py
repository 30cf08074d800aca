"""Centralized: the policy that it needs, its equality with plain training, and the wider model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oracles import centralized as oracle
from polyfed.algorithms.centralized import Centralized
from polyfed.core import keys
from polyfed.core.errors import EgressError, RecipeError
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.running.assembly import assemble
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.start import run
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses
from world import PLAIN, algorithm, furthest, played, recipe

OPEN = {"a": {"server": ["raw"]}, "b": {"server": ["raw"]}, "labels": {"server": ["labels"]}}
OPEN["shared"] = {"server": ["statistic"]}
MIXED = ClientsSpec(partition="dirichlet", num=5, alpha=1.0, holdings=[["a", "b"], ["a"], ["b"]])


def central(engine: str = "sequential", clients: ClientsSpec = MIXED, **options: Any) -> Any:
    return recipe(algorithm("centralized", **options), engine, clients=clients, egress=OPEN)


@pytest.mark.parametrize("missing", ["a", "b", "labels"])
def test_every_row_of_the_policy_must_allow_it_by_name(missing: str) -> None:
    made = replace(central(), egress={row: kinds for row, kinds in OPEN.items() if row != missing})
    with refuses(EgressError, f"[egress.{missing}] server ="):
        run(made)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_pool_holds_every_row_once_and_knows_what_is_missing(engine: str) -> None:
    parts, state, _ = played(replace(central(engine), rounds=0))
    columns, shards = parts.population.columns, parts.population.train
    rows = torch.cat([shards[k] for k in range(5)])
    assert torch.equal(state.labels, columns.label[rows])
    for m in ("a", "b"):
        has = torch.cat([torch.full((len(shards[k]),), m in parts.population.modalities(k)) for k in range(5)])
        assert torch.equal(state.present[m], has)
        expected = torch.where(has.unsqueeze(1), columns.modalities[m].take(rows), torch.zeros(()))
        assert torch.equal(state.samples[m], expected)


def test_three_rounds_equal_one_run_of_adam_over_the_pooled_rows() -> None:
    train = Train(lr=0.01, batch_size=16, epochs=2, optimiser="adam")
    made = recipe(
        Centralized(train=train),
        "vectorised",
        {"a": PLAIN["a"]},
        egress={k: OPEN[k] for k in ("a", "labels", "shared")},
    )
    clients = ClientsSpec(partition="dirichlet", num=5, alpha=1.0)
    made = replace(made, clients=clients, data=Toy(rows=330, classes=4, shapes={"a": (16,)}, snr={"a": 2.0}))
    parts, state, _ = played(made)
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6), nn.Linear(6, 4))
    names = ("a.encoder.0.weight", "a.encoder.0.bias", "a.encoder.2.weight", "a.encoder.2.bias", "a.fusion.weight")
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), (*names, "shared.bias"), strict=True):
            parameter.copy_(parts.initial[name])
    n, steps = len(state.labels), []
    for round in (1, 2, 3):
        key = keys.fold_in(keys.fold_in(keys.key(made.seed, "server", 0, round), ORDER), 0)
        orders = [keys.permutation(keys.fold_in(key, epoch), n) for epoch in range(2)]
        steps += [part for order in orders for part in order.split(16)]
    oracle.train(model, state.samples["a"], state.labels, steps, train.lr)
    for parameter, name in zip(model.parameters(), (*names, "shared.bias"), strict=True):
        torch.testing.assert_close(state.params[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_fedavg_with_one_client_is_centralised_training() -> None:
    one = ClientsSpec(partition="iid", num=1)
    whole = Train(lr=0.1, batch_size=0, epochs=2)  # all rows in a batch, so the order of rows does not matter
    pooled = played(central(clients=one, train=whole))[1]
    federated = played(recipe(algorithm("fedavg", train=whole, selector=Uniform()), clients=one))[1]
    assert furthest(pooled.params, federated.params) < 1e-4


def test_nothing_crosses_after_the_rows_and_its_bytes_are_the_data() -> None:
    parts, state, rows = played(central())
    assert {row["round"] for row in rows} == {0}
    up = sum(row["bytes"] for row in rows if row["kind"] in ("raw", "labels"))
    data = sum(4 * v[state.present[m]].numel() for m, v in state.samples.items()) + 8 * len(state.labels)
    assert up == data
    assert parts.fed.clients.num_rows.sum() == len(state.labels)


def test_width_scales_every_hidden_size() -> None:
    spec = ModelSpec(embedding=6, head=(5,), encoders={"a": {"kind": "mlp", "hidden": [12]}})
    wide = spec.widened(2.0)
    assert (wide.embedding, wide.head, wide.encoders["a"].hidden) == (12, (10,), (24,))
    narrow = assemble(central()).model.num_parameters()
    assert assemble(central(width=3.0)).model.num_parameters() > 2 * narrow


def test_options_without_meaning_are_refused() -> None:
    with refuses(RecipeError, "algorithm.width: above 0"):
        Centralized(width=0.0)
