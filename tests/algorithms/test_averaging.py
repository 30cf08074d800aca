"""FedAvg, FedProx, SCAFFOLD, MOON and Local: compared with independent loops, hand-computed numbers and each other."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from oracles import averaging as oracle
from polyfed.algorithms.averaging.moon import contrast
from polyfed.core import keys
from polyfed.data import ClientsSpec
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.selection import Uniform
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from world import AWKWARD, algorithm, furthest, played, recipe, same

ALL = Uniform(participation=1.0)
ENGINES = ["sequential", "vectorised"]


def everyone(method: Any, engine: str, **changes: Any) -> Any:
    """All five clients of unequal size take part and own both modalities."""
    clients = ClientsSpec(partition="dirichlet", num=5, alpha=1.0)
    return recipe(method, engine, clients=clients, **changes)


def shards_of(parts: Assembly, train: Train, rounds: int) -> list[oracle.Shard]:
    """The clients in the form that the oracle reads, with the batches that `keys` determines."""
    columns, shards = parts.population.columns, []
    for client in range(len(parts.population.train)):
        rows = parts.population.train[client]
        steps = []
        for round in range(1, rounds + 1):
            key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), 0)
            orders = [keys.permutation(keys.fold_in(key, epoch), len(rows)) for epoch in range(train.epochs)]
            steps.append([part for order in orders for part in order.split(train.batch_size)])
        x = {m: column.values[rows].float() for m, column in columns.modalities.items()}
        shards.append(oracle.Shard(x, columns.label[rows], steps))
    return shards


def oracle_model(parts: Assembly) -> oracle.LateFusion:
    """The recipe's model built from plain layers, with the same numbers."""
    w = parts.initial
    model = oracle.LateFusion({"a": (16, 12), "b": (24, 10)}, 6, 4)
    with torch.no_grad():
        for name, tower in zip(("a", "b"), model.towers, strict=True):
            for i, layer in ((0, tower[0]), (2, tower[2])):
                found = sorted(n for n in w if n.startswith(f"{name}.encoder."))
                weight, bias = (
                    [n for n in found if f".{i}." in n and "weight" in n],
                    [n for n in found if f".{i}." in n and "bias" in n],
                )
                layer.weight.copy_(w[weight[0]])
                layer.bias.copy_(w[bias[0]])
        model.top.weight.copy_(torch.cat([w["a.fusion.weight"], w["b.fusion.weight"]], 1))
        model.top.bias.copy_(next(v for n, v in w.items() if n.startswith("shared.") and n.endswith("bias")))
    return model


def fused(state: Any) -> torch.Tensor:
    return torch.cat([state.params["a.fusion.weight"], state.params["b.fusion.weight"]], 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 1e-2}], ids=["sgd", "momentum"])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_fedavg_and_fedprox_equal_a_torch_optim_loop(engine: str, options: dict[str, float], mu: float) -> None:
    train = Train(lr=0.1, batch_size=16, epochs=2, **options)  # type: ignore[arg-type]
    method = algorithm("fedprox", mu=mu, train=train, selector=ALL)
    parts, state, _ = played(everyone(method, engine))
    model = oracle.fedavg(oracle_model(parts), shards_of(parts, train, 3), 0.1, 3, mu=mu, **options)
    assert torch.allclose(fused(state), model.top.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_scaffold_equals_a_torch_optim_loop(engine: str) -> None:
    train = Train(lr=0.1, batch_size=16, epochs=1)
    parts, state, _ = played(everyone(algorithm("scaffold", train=train, selector=ALL), engine))
    model = oracle.scaffold(oracle_model(parts), shards_of(parts, train, 3), 0.1, 3)
    assert torch.allclose(fused(state), model.top.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "options"), [("fedprox", {"mu": 0.0}), ("moon", {"mu": 0.0, "projection": 0})])
def test_without_their_term_they_are_fedavg_bit_for_bit(engine: str, name: str, options: dict[str, Any]) -> None:
    plain = played(recipe(algorithm("fedavg"), engine, AWKWARD))[1]
    other = played(recipe(algorithm(name, **options), engine, AWKWARD))[1]
    assert same(plain.params, other.params)


def test_the_projection_head_of_moon_disturbs_no_other_stream() -> None:
    plain = played(recipe(algorithm("fedavg"), "sequential"))[1]
    other = played(recipe(algorithm("moon", mu=0.0, projection=8), "sequential"))[1]
    assert same(plain.params, {n: other.params[n] for n in plain.params})


@pytest.mark.parametrize("engine", ENGINES)
def test_one_client_is_centralised_sgd(engine: str) -> None:
    train = Train(lr=0.1, batch_size=16, epochs=2)
    one = recipe(algorithm("fedavg", train=train, selector=ALL), engine, clients=ClientsSpec(num=1))
    parts, state, _ = played(one)
    shard = shards_of(parts, train, 3)[0]
    model = oracle_model(parts)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (rows for steps in shard.steps for rows in steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model({m: x[rows] for m, x in shard.x.items()}), shard.y[rows]).backward()
        optimiser.step()
    assert torch.allclose(fused(state), model.top.weight, rtol=1e-5, atol=1e-6)


def test_one_full_batch_step_everywhere_is_one_centralised_step() -> None:
    train = Train(lr=0.5, batch_size=0, epochs=1)
    parts, state, _ = played(everyone(algorithm("fedavg", train=train, selector=ALL), "vectorised", rounds=1))
    shards = shards_of(parts, replace(train, batch_size=1 << 20), 1)
    model = oracle_model(parts)
    x = {m: torch.cat([s.x[m] for s in shards]) for m in ("a", "b")}
    torch.nn.functional.cross_entropy(model(x), torch.cat([s.y for s in shards])).backward()
    assert model.top.weight.grad is not None
    assert torch.allclose(fused(state), model.top.weight - 0.5 * model.top.weight.grad, atol=1e-6)


def test_scaffold_under_full_participation_keeps_c_the_mean_of_the_clients() -> None:
    parts, state, _ = played(everyone(algorithm("scaffold", selector=ALL), "vectorised"))
    for name, c in state.control.items():
        mean = torch.stack([parts.engine.locals[k][name] for k in range(5)]).mean(0)
        assert torch.allclose(c, mean, atol=1e-6), name


def test_scaffold_first_round_is_uniform_fedavg() -> None:
    first = played(everyone(algorithm("scaffold", selector=ALL), "sequential", rounds=1))[1]
    plain = played(everyone(algorithm("fedavg", aggregation="uniform", selector=ALL), "sequential", rounds=1))[1]
    assert same(first.params, plain.params)


def test_scaffold_counts_owners_of_a_block_only() -> None:
    clients = ClientsSpec(num=4, holdings=[["a", "b"], ["a"]])  # two of four own b
    parts, state, _ = played(recipe(algorithm("scaffold", selector=ALL), "sequential", clients=clients, rounds=1))
    owners = [parts.engine.locals[k]["b.fusion.weight"] for k in (0, 2)]
    assert torch.allclose(state.control["b.fusion.weight"], torch.stack(owners).mean(0), atol=1e-6)
    assert "b.fusion.weight" not in parts.engine.locals[1]


def test_moon_term_of_the_paper() -> None:
    z = torch.tensor([[1.0, 0.0]])
    term = contrast(z, z, torch.tensor([[0.0, 1.0]]), 0.5)
    assert float(term) == pytest.approx(0.1269280110, abs=1e-7)  # cosines 1 and 0, temperature 0.5
    assert float(contrast(z, z, z, 0.5)) == pytest.approx(math.log(2), abs=1e-7)


def test_local_is_fedavg_without_the_averaging() -> None:
    parts, _, ledger = played(everyone(algorithm("local", selector=ALL), "sequential", rounds=1))
    assert {row["kind"] for row in ledger} == {"statistic"}
    averaged = played(everyone(algorithm("fedavg", selector=ALL), "sequential", rounds=1))[1].params
    rows = parts.fed.clients.num_rows.double()
    for name, value in averaged.items():
        stack = torch.stack([parts.engine.locals[k][name].double() for k in range(5)])
        assert torch.allclose(torch.tensordot(rows / rows.sum(), stack, 1).float(), value, atol=1e-6)


@pytest.mark.filterwarnings("ignore:no client has training rows")
def test_a_block_nobody_trained_keeps_its_value_and_its_server_moments() -> None:
    clients = ClientsSpec(num=4, only={"a": [0, 1, 2, 3]})
    method = algorithm("fedavg", selector=ALL, server=ServerOptimiser(optimiser="adam", lr=0.1))
    parts, state, _ = played(recipe(method, "vectorised", clients=clients))
    unowned = [n for n in state.params if n.startswith("b.")]
    assert unowned
    assert all(torch.equal(state.params[n], parts.initial[n]) for n in unowned)
    assert all(float(state.moments["first"][n].abs().sum()) == 0 for n in unowned)


def test_bytes_of_a_round_are_the_blocks_each_client_owns() -> None:
    parts, _, ledger = played(recipe(algorithm("fedavg"), "vectorised", rounds=1))
    for row in (row for row in ledger if row["kind"] == "parameters"):
        owned = parts.fed.clients[row["client"]].blocks
        assert row["block"] in owned
        expected = sum(v.numel() * 4 for n, v in parts.initial.items() if n.startswith(f"{row['block']}."))
        assert row["bytes"] == expected


def test_order_of_clients_does_not_matter() -> None:
    parts = assemble(everyone(algorithm("fedavg", selector=ALL), "sequential"))
    send = parts.algorithm.outgoing(parts.algorithm.init(parts.fed, parts.initial), [], parts.fed)
    update = parts.algorithm.update
    parts.fed.begin(1)
    forward = parts.fed.ask(update, [0, 1, 2, 3, 4], send)
    backward = parts.fed.ask(update, [4, 2, 0, 1, 3], send)
    weights = forward.numbers("num_rows")
    assert furthest(forward.mean("params", weights), backward.mean("params", weights)) < 1e-6
