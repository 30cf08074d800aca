"""Clients behind the wire give what clients in the same process give, for every algorithm."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import world
from engines.direct import hub_of, joined, played
from laws.rows import ROWS
from laws.test_laws import world as law_world
from polyfed.algorithms import ALGORITHMS
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import DeploymentSpec, EngineSpec
from polyfed.experiment.running import checkpoint
from world import furthest

NAMES = sorted(set(ROWS) & set(ALGORITHMS))

WHOLE: dict[str, dict[str, Any]] = {"fedbuff": {"buffer": 1.0}}
"""A buffer of all who train, because nobody is slow here and the first replies are not those of a simulation."""


def small(name: str, **options: Any) -> Recipe:
    made = law_world(name, **options)
    return replace(made, engine=EngineSpec(name="flower"), deployment=DeploymentSpec(relay="server-sees"))


def in_one_process(made: Recipe) -> Recipe:
    return replace(made, engine=replace(made.engine, name="sequential"))


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["round"], row["ask"], row["destination"] != "client", row["client"]


def own_ledgers(folder: Path) -> list[dict[str, Any]]:
    """What the clients wrote down themselves, in the order of a ledger."""
    rows = [json.loads(line) for path in folder.rglob("egress.jsonl") for line in path.read_text().splitlines()]
    return sorted(rows, key=order)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_ledgers_equal_the_sequential_engines(name: str, tmp_path: Path) -> None:
    made = small(name, **WHOLE.get(name, {}))
    one, state_one, ledger_one = world.played(in_one_process(made))
    parts = joined(made, hub_of(made, tmp_path))
    state, ledger = played(made, parts)
    assert furthest(getattr(state_one, "params", {}), getattr(state, "params", {})) <= 1e-6
    assert checkpoint.digest(state_one) == checkpoint.digest(state), "one after another in the same order: bit for bit"
    assert ledger == ledger_one, "the server's ledger"
    assert own_ledgers(tmp_path) == sorted(ledger_one, key=order), "the clients' own ledgers"
    for client, tree in one.engine.locals.items():
        states = world.kept_states(tmp_path, "run", client) if client >= 0 else {}
        if tree and states:
            assert world.same(tree, states[max(states)]), f"local state of client {client}"


@pytest.mark.parametrize("name", ["fedavg", "splitfed", "pfmml"])
def test_holes_and_dropped_modalities_are_the_same_behind_the_wire(name: str, tmp_path: Path) -> None:
    made = small(name)
    clients = replace(made.clients, missing_rows={"a": 0.4, "b": 0.3}, missing_rows_pattern="client")
    method = replace(made.algorithm, train=replace(made.algorithm.train, modality_dropout=0.3))
    made = replace(made, clients=clients, algorithm=method)
    one, state_one, ledger_one = world.played(in_one_process(made))
    assert not one.population.columns.present["a"].all()
    state, ledger = played(made, joined(made, hub_of(made, tmp_path)))
    assert checkpoint.digest(state_one) == checkpoint.digest(state)
    assert ledger == ledger_one
