"""FedMChain: against a bare loop with missing rows, SSCA by hand, its placebos, its refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.test_blockwise import plainly
from algorithms.test_mfedmc import federation, holed
from oracles import fedmchain as oracle
from polyfed.algorithms.modalities.fedmchain import PHASES, agreements, clustered, consensus, sparse
from polyfed.core.errors import RecipeError
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import Group, ServerOptimiser
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, played, recipe, same

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)


def made(engine: str = "sequential", **options: Any) -> Any:
    """Six clients, of whom some lack a modality, and rows that lack one."""
    return replace(holed(engine), algorithm=algorithm("fedmchain", train=TRAIN, **options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"agreement": 0.3, "density": 0.3, "compensation": 0.5},
        {"order": ("b",), "compensation": 0.0, "agreement": 1.0, "density": 1.0},
        {"phases": "joint", "density": 0.2},
    ],
    ids=str,
)
def test_three_rounds_equal_a_bare_loop_with_missing_rows(engine: str, options: dict[str, Any]) -> None:
    parts, state, ledger = played(made(engine, **options))
    assert parts.population.columns.present, "some rows lack a modality"
    told = parts.algorithm
    chosen = oracle.Options(
        told.phases == "chain", told.order, told.compensation, told.density, told.agreement, (0, PHASES)
    )
    clients = federation(parts, ledger, {0: 2, PHASES: 2}, "Update")
    assert len(clients.cohorts) == 3
    assert {len(own.x) for own in clients.clients} == {1, 2}
    w = oracle.fedmchain(clients, plainly(assemble(parts.recipe).initial), chosen)
    torch.testing.assert_close(plainly(state.params), w, rtol=1e-5, atol=1e-6)


def group(values: list[list[float]], weights: list[float]) -> Group:
    return Group("a", torch.tensor(values), torch.tensor(weights), torch.zeros(len(values[0])))


def test_a_consensus_by_hand() -> None:
    given = group([[3.0, 1.0, -2.0, 0.1], [1.0, 2.0, -4.0, 0.2], [-8.0, 1.5, 6.0, 0.3]], [0.25, 0.25, 0.5])
    kept = sparse(given.values, 0.5)
    assert kept.tolist() == [[3.0, 0.0, -2.0, 0.0], [0.0, 2.0, -4.0, 0.0], [-8.0, 0.0, 6.0, 0.0]]
    assert agreements(kept).tolist() == [[1.0, 1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]
    mean, num = consensus(given, 0.5, 0.0)
    assert num == 2
    # The first two are a cluster of weight 0.5 and mean (1.5, 1, -3, 0); the third outweighs it where they differ.
    torch.testing.assert_close(mean, torch.tensor([-8.0, 1.0, 6.0, 0.0]))
    mean, num = consensus(given, 1.0, -1.0)
    assert num == 1
    torch.testing.assert_close(mean, given.weights @ given.values)


def test_clusters_reach_through_others_and_updates_without_a_common_entry_do_not_agree() -> None:
    agree = torch.tensor([[1.0, 0.5, -1.0, 0.0], [0.5, 1.0, 0.5, 0.0], [-1.0, 0.5, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert clustered(agree.double(), 0.5).tolist() == [0, 0, 0, 1]
    assert clustered(agree.double(), 0.6).tolist() == [0, 1, 2, 3]
    assert agreements(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("seed", range(5))
def test_a_consensus_never_leaves_the_signs_and_sizes_of_the_updates(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values, weights = torch.randn(6, 40, generator=draw), torch.rand(6, generator=draw)
    given = Group("a", values + 5, weights / weights.sum(), torch.full((40,), 5.0))
    mean, num = consensus(given, 0.4, 0.1)
    step, order = mean - 5, torch.randperm(6, generator=draw)
    assert bool((step <= values.clamp(min=0).amax(0) + 1e-5).all())
    assert bool((step >= values.clamp(max=0).amin(0) - 1e-5).all())
    shuffled = Group("a", given.values[order], given.weights[order], given.centre)
    torch.testing.assert_close(consensus(shuffled, 0.4, 0.1)[0], mean)
    _, dealt = consensus(given, 0.4, 0.1, draw=seed)
    assert dealt == num, "as many clusters as the method"


def test_opposite_updates_of_equal_weight_leave_an_entry_where_it_is() -> None:
    mean, _ = consensus(group([[1.0, 2.0], [-1.0, 2.0]], [0.5, 0.5]), 1.0, 1.0)
    assert mean.tolist() == [0.0, 2.0]


def test_the_order_of_the_phases_and_the_placebo_of_a_step_matter() -> None:
    plain, turned, drawn = (
        played(made(**options))[1].params for options in ({}, {"order": ("b",)}, {"placebo": "random-phases"})
    )
    assert same(plain, played(made(order=("a", "b")))[1].params)
    assert not same(plain, turned)
    assert not same(plain, drawn)


def test_clusters_are_logged_and_one_in_every_round_is_told() -> None:
    parts, state, _ = played(made(agreement=1.0))
    seen = parts.algorithm.observe(state)
    assert max(seen[f"clusters.{m}"] for m in "ab") > 1
    assert not parts.algorithm.concerns([{"clusters.a": 1.0}, seen])
    assert not parts.algorithm.concerns([{}])
    assert "agreement" in parts.algorithm.concerns([{"clusters.a": 1.0, "clusters.b": 1.0}] * 2)[0]


def test_wrong_orders_and_masks_are_refused_and_idle_options_are_told() -> None:
    with refuses(RecipeError, "algorithm.order: no such modality"):
        assemble(made(order=("c",)))
    with refuses(RecipeError, "algorithm.order: twice"):
        assemble(made(order=("a", "a")))
    masks = SecureAggregation()
    assert "signs" in algorithm("fedmchain", secure_aggregation=masks).single_replies
    assert not algorithm("fedmchain", secure_aggregation=masks, density=1.0, agreement=-1.0).single_replies
    parts = assemble(made(phases="joint", server=ServerOptimiser(aggregate="median")))
    assert {*parts.algorithm.idle_options(parts.fed)} >= {"order", "compensation", "density", "agreement"}
    whole = assemble(recipe(algorithm("fedmchain")))
    assert not {*whole.algorithm.idle_options(whole.fed)} & {"order", "compensation", "density", "agreement"}
