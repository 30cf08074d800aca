"""Laws about rows that lack a modality, for every method: all engines agree, and rate 0 changes no bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from laws.rows import ROWS
from laws.test_laws import NAMES, models, params, world
from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import RecipeError
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running import checkpoint
from world import AWKWARD, furthest, played

COMPLETE = [name for name in NAMES if not ALGORITHMS[name].handles_missing_rows]
HOLED = [name for name in NAMES if name not in COMPLETE]


def holed(name: str, engine: str, pattern: str = "random", rate: float = 0.35, **options: Any) -> Recipe:
    """The world of a method, with holes. Devices with one modality lose it too, or they would lose nothing."""
    made = world(name, engine, AWKWARD, **options)
    alone = made.clients.partition == "silos" or bool(made.stack)
    rates = dict.fromkeys(made.stack or "ab", rate)
    clients = replace(made.clients, missing_rows=rates, missing_rows_pattern=pattern, missing_rows_empty=alone)
    return replace(made, clients=clients, rounds=2)


@pytest.mark.parametrize("name", HOLED)
def test_engines_agree_on_rows_with_holes(name: str) -> None:
    pattern = ("random", "client", "label", "spans")[HOLED.index(name) % 4]
    one, state_one, ledger_one = played(holed(name, "sequential", pattern))
    many, state_many, ledger_many = played(holed(name, "vectorised", pattern))
    there = one.population.columns.present
    assert there
    assert all(torch.equal(there[m], many.population.columns.present[m]) for m in there)
    # ten times wider: a batch may have BatchNorm statistics over two or three rows, whose variance can be tiny
    assert furthest(params(state_one), params(state_many)) < 10 * ROWS[name].tolerance
    for client, tree in one.engine.locals.items():
        assert furthest(tree, many.engine.locals[client]) < 10 * ROWS[name].tolerance, f"local state of client {client}"
    assert ledger_one == ledger_many
    for held in models(name, one, state_one):
        assert all(bool(torch.isfinite(value).all()) for value in held.values() if value.is_floating_point())


@pytest.mark.parametrize("name", HOLED)
def test_holes_change_what_is_learnt_and_rate_0_changes_no_bit(name: str) -> None:
    plain = replace(world(name, "sequential", AWKWARD), rounds=1)
    without, none, some = (
        played(made)[:2]
        for made in (
            plain,
            replace(holed(name, "sequential", rate=0.0), rounds=1),
            replace(holed(name, "sequential"), rounds=1),
        )
    )
    assert checkpoint.digest(without[1]) == checkpoint.digest(none[1])
    digests = [
        (checkpoint.digest(state), {k: checkpoint.digest(v) for k, v in parts.engine.locals.items()})
        for parts, state in (none, some)
    ]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", COMPLETE)
def test_methods_that_take_rows_for_complete_refuse_holes_in_training(name: str) -> None:
    with pytest.raises(RecipeError, match="takes every row of a client for complete"):
        played(holed(name, "sequential"))
    made = holed(name, "sequential")
    played(replace(made, clients=replace(made.clients, missing_rows={}, missing_rows_test=0.3), rounds=1))


ALONE = [name for name in HOLED if ROWS[name].stack or ROWS[name].clients.get("partition") == "silos"]
"""Methods whose clients have one modality each in the laws."""


def dropping(name: str, engine: str, rate: Any = 0.4) -> Recipe:
    made = replace(world(name, engine, AWKWARD), rounds=2)
    train = replace(made.algorithm.train, modality_dropout=rate)
    return replace(made, algorithm=replace(made.algorithm, train=train))


@pytest.mark.parametrize("name", [name for name in HOLED if name not in ALONE])
def test_engines_agree_under_modality_dropout_and_rate_0_changes_no_bit(name: str) -> None:
    one, state_one, ledger_one = played(dropping(name, "sequential"))
    many, state_many, ledger_many = played(dropping(name, "vectorised", {"a": 0.4, "b": 0.4}))
    assert furthest(params(state_one), params(state_many)) < 10 * ROWS[name].tolerance
    for client, tree in one.engine.locals.items():
        assert furthest(tree, many.engine.locals[client]) < 10 * ROWS[name].tolerance, f"local state of client {client}"
    assert ledger_one == ledger_many
    without, none = (
        played(made)[:2]
        for made in (replace(world(name, "sequential", AWKWARD), rounds=2), dropping(name, "sequential", {"a": 0.0}))
    )
    digests = [
        (checkpoint.digest(state), {k: checkpoint.digest(v) for k, v in parts.engine.locals.items()})
        for parts, state in (without, none, (one, state_one))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", [*COMPLETE, *ALONE])
def test_methods_in_which_rows_cannot_lose_a_modality_refuse_dropout(name: str) -> None:
    with pytest.raises(RecipeError, match=r"modality_dropout.* (takes every row|no client has two modalities)"):
        played(dropping(name, "sequential"))
