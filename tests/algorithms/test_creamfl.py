"""CreamFL: the ensemble computed by hand, its equality with Local without the contrastive terms, and what crosses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from laws.rows import ROWS
from oracles import creamfl as oracle
from polyfed.algorithms.knowledge.creamfl import CreamFL, draw_public, ensemble, weights
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.tree import under
from polyfed.data import ClientsSpec
from polyfed.experiment.checks.check import check
from refusals import refuses
from world import algorithm, furthest, played, recipe

ENGINES = ["sequential", "vectorised"]


def cream(engine: str = "sequential", **options: Any) -> Any:
    row = ROWS["creamfl"]
    return recipe(algorithm("creamfl", **options), engine, egress=row.egress, clients=ClientsSpec(**row.clients))


def test_the_ensemble_equals_the_formula() -> None:
    draw = np.random.default_rng(0)
    sent, other = list(draw.normal(size=(3, 5, 4))), draw.normal(size=(5, 4))
    expected_weights, expected = oracle.ensemble(sent, other)
    tensors = [torch.tensor(z) for z in sent]
    np.testing.assert_allclose(weights(tensors, torch.tensor(other)).numpy(), expected_weights, rtol=1e-10)
    np.testing.assert_allclose(ensemble(tensors, torch.tensor(other)).numpy(), expected, rtol=1e-10)


def test_equal_clients_have_equal_weights_and_weights_sum_to_one_per_sample() -> None:
    draw = torch.Generator().manual_seed(0)
    z, other = torch.randn(2, 6, 4, generator=draw)
    same = weights([z, z, z], other)
    torch.testing.assert_close(same, torch.full((3, 6), 1 / 3))
    mixed = weights([z, torch.randn(6, 4, generator=draw)], other)
    torch.testing.assert_close(mixed.sum(0), torch.ones(6))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_regularisers_clients_train_alone(engine: str) -> None:
    made = cream(engine, inter=0.0, intra=0.0)
    ours = played(made)[0].engine.locals
    theirs = played(replace(recipe(algorithm("local"), engine), clients=made.clients))[0].engine.locals
    drawn = [k for k in theirs if k >= 0]
    assert drawn
    for client in drawn:
        assert furthest(theirs[client], under("weight", ours[client])) < 1e-4


def test_representations_of_the_public_set_are_all_that_leaves() -> None:
    parts, state, rows = played(cream())
    sent = [row for row in rows if row["destination"] == "server" and row["kind"] != "statistic"]
    assert {(row["field"], row["kind"]) for row in sent} == {("representations", "embeddings")}
    assert {row["bytes"] for row in sent} == {4 * 6 * len(state.labels)}
    assert torch.equal(state.labels, parts.population.columns.label[parts.population.validation_rows])
    assert all(row.allowed for row in check(cream()).planned)


def test_the_regularisers_and_the_distillation_matter() -> None:
    base, plain, alone = (played(cream(**o))[1] for o in ({}, {"inter": 0.0, "intra": 0.0}, {"distil": 0.0}))
    assert furthest(base.params, plain.params) > 1e-6
    assert furthest(base.params, alone.params) > 1e-6


def test_a_public_set_is_needed() -> None:
    with refuses(RecipeError, "clients.validation: creamfl"):
        played(replace(cream(), clients=ClientsSpec(partition="iid", num=3)))


def test_options_without_meaning_are_refused() -> None:
    with pytest.raises(RecipeError):
        CreamFL(temperature=0.0)


@pytest.mark.parametrize(("size", "rows"), [(9, 4), (9, 9), (4, 9)])
def test_public_rows_are_drawn_without_replacement(size: int, rows: int) -> None:
    samples = {"a": torch.arange(float(size)).unsqueeze(1)}
    seen = set()
    for step in range(40):
        batch = Batch(x={}, y=torch.zeros(rows, dtype=torch.int64), rows=torch.arange(rows), key=keys.key(1, step))
        drawn = draw_public(samples, batch)
        real = drawn.rows if drawn.ok is None else drawn.rows[drawn.ok]
        assert len(set(real.tolist())) == len(real) == min(size, rows)
        assert torch.equal(drawn.x["a"][:, 0].long(), drawn.rows)
        seen.update(real.tolist())
    assert seen == set(range(size))
