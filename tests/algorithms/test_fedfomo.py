"""FedFomo: weights, mixing and candidates, computed by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles import personal as oracle
from polyfed.algorithms.personal.fedfomo import PREVIOUS, Candidates, candidate_weights, every_nth, split
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree, block_of, nested
from polyfed.data import ClientsSpec
from polyfed.experiment.running.assembly import Assembly
from polyfed.federation.links.network import Network
from polyfed.start import run
from refusals import refuses
from world import algorithm, played, recipe, same

ENGINES = ["sequential", "vectorised"]
BOTH = ClientsSpec(partition="dirichlet", num=4, alpha=1.0)


def held(parts: Assembly, client: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The client's rows at places 4, 9, 14, ..."""
    rows = parts.population.train[client][4::5]
    columns = parts.population.columns
    owned = parts.fed.clients[client].modalities
    return {m: columns.modalities[m].values[rows].double().numpy() for m in owned}, columns.label[rows].numpy()


def numbers(tree: Tree) -> dict[str, np.ndarray]:
    return {n: v.double().numpy() for n, v in tree.items()}


@given(n=st.integers(0, 400), every=st.integers(2, 9))
def test_every_nth_row_is_held_out_whatever_the_batches(n: int, every: int) -> None:
    whole, rows = every * (256 // every), torch.arange(n)
    parts = [rows[start : start + whole] for start in range(0, n, whole)]
    held = [every_nth(Batch(x={}, y=part, rows=part), every).rows for part in parts]
    assert [r for part in held for r in part.tolist()] == list(range(every - 1, n, every))


@given(losses=st.lists(st.floats(0, 5), min_size=1, max_size=6), base=st.floats(0, 5))
def test_weights_are_a_distribution_or_all_zero(losses: list[float], base: float) -> None:
    found = candidate_weights(torch.tensor(base), torch.tensor(losses), torch.ones(len(losses)))
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5) or not bool(found.any())
    if min(losses) >= base:
        assert not bool(found.any())


def test_a_copy_of_the_previous_model_weighs_nothing() -> None:
    found = candidate_weights(torch.tensor(1.0), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 2.0]))
    assert found.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_mixing_equals_a_loop_over_blocks_and_candidates(engine: str) -> None:
    parts, _, _ = played(recipe(algorithm("fedfomo", uploads=2), engine, clients=BOTH, rounds=1))
    parts.fed.begin(2)
    draw = torch.Generator().manual_seed(0)
    offer = {n: v + 0.3 * torch.randn(3, *v.shape, generator=draw) for n, v in parts.initial.items()}
    before = {k: split(parts.engine.local(None, k)) for k in range(4)}  # type: ignore[arg-type]
    parts.engine.locals = {
        k: {**own, **nested(PREVIOUS, {n: parts.initial[n] for n in own})} for k, (own, _) in before.items()
    }
    parts.fed.ask(parts.algorithm.mix, [0, 1, 2, 3], Candidates(offer))
    changed = 0
    for k in range(4):
        blocks = {
            block: [{n: numbers(offer)[n][i] for n in offer if block_of(n) == block} for i in range(3)]
            for block in ("a", "b", "shared")
        }
        expected = oracle.fomo(numbers(before[k][0]), numbers(parts.initial), blocks, *held(parts, k))
        found, previous = split(parts.engine.locals[k])
        assert same(found, previous)
        changed += not same(found, before[k][0])
        for n, v in expected.items():
            np.testing.assert_allclose(found[n].numpy(), v, atol=2e-5)
    assert changed, "no candidate ever helped: the test shows nothing"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_one_better_candidate_is_taken_exactly(engine: str) -> None:
    parts, _, _ = played(recipe(algorithm("fedfomo"), engine, clients=BOTH, rounds=1))
    parts.fed.begin(2)
    _, y = held(parts, 0)
    bias = torch.zeros(4)
    bias[np.bincount(y, minlength=4).argmax()] = 0.3  # towards the most frequent class: better
    start = {n: v if n == "shared.bias" else torch.zeros_like(v) for n, v in parts.initial.items()}
    start["shared.bias"] = torch.zeros(4)
    parts.engine.locals = {k: {**start, **nested(PREVIOUS, start)} for k in range(4)}
    offer = {"shared.bias": torch.stack([torch.zeros(4), bias, -bias])}
    replies = parts.fed.ask(parts.algorithm.mix, [0], Candidates(offer))
    assert replies[0].weights["shared"].tolist() == [0.0, 1.0, 0.0]
    assert torch.equal(parts.engine.locals[0]["shared.bias"], bias)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_keep_their_models_when_no_candidate_is_better(engine: str) -> None:
    parts, _, _ = played(recipe(algorithm("fedfomo"), engine, clients=BOTH, rounds=1))
    parts.fed.begin(2)
    before = {k: split(tree)[0] for k, tree in parts.engine.locals.items()}
    parts.engine.locals = {k: {**own, **nested(PREVIOUS, own)} for k, own in before.items()}
    offer = {n: v.unsqueeze(0) + 100.0 for n, v in parts.initial.items()}
    parts.fed.ask(parts.algorithm.mix, [0, 1, 2, 3], Candidates(offer))
    assert all(same(split(tree)[0], before[k]) for k, tree in parts.engine.locals.items())


def test_held_out_rows_do_not_train() -> None:
    made = recipe(algorithm("fedfomo", uploads=0), clients=BOTH, rounds=1)
    parts, _, _ = played(made)
    rows = torch.cat([parts.population.train[k][4::5] for k in range(4)])
    spoiled = made.data.load()
    for column in spoiled.modalities.values():
        column.values[rows] = 7.0
    again, _, _ = played(replace(made, data=type("Spoiled", (), {"load": lambda self: spoiled})()))
    assert all(same(tree, again.engine.locals[k]) for k, tree in parts.engine.locals.items())


def test_everybody_receives_every_other_upload_of_what_it_owns_and_never_its_own() -> None:
    parts, _, ledger = played(recipe(algorithm("fedfomo", uploads=2), rounds=1))
    sizes = {b: sum(v.numel() * 4 for n, v in parts.initial.items() if block_of(n) == b) for b in ("a", "b", "shared")}
    sent = {(r["client"], r["block"]) for r in ledger if r["message"] == "Blocks"}
    assert len(sent) == 6
    got = {(r["client"], r["block"]): r["bytes"] for r in ledger if r["message"] == "Candidates"}
    for client in parts.fed.clients:
        for block in (*parts.fed.clients[client].modalities, "shared"):
            others = 2 - ((client, block) in sent)
            assert got.get((client, block), 0) == others * sizes[block]


def test_a_limit_sends_what_was_preferred_so_far() -> None:
    method = algorithm("fedfomo", uploads=1.0, candidates=2, explore=0.0)
    parts, state, _ = played(recipe(method, clients=replace(BOTH, num=6), rounds=1))
    parts.fed.begin(2)
    liked = torch.zeros(6, 6).double()
    liked[:, 4], liked[:, 1] = 2.0, 1.0
    state = replace(state, preferences=dict.fromkeys(state.preferences, liked))
    before = len(parts.ledger.entries)
    after = method.round(state, parts.fed)
    changed = after.preferences["a"] - liked
    senders = {k: {1, 4} if k not in (1, 4) else ({4, 0} if k == 1 else {1, 0}) for k in range(6)}
    for k in range(6):
        assert set(changed[k].nonzero().flatten().tolist()) <= senders[k]
    entries = [e for e in parts.ledger.entries[before:] if e.message == "Candidates"]
    assert all(c.bytes == 2 * 4 * parts.initial["shared.bias"].numel() for e in entries for c in e.crossings[-1:])


def test_exploring_is_random_and_fades() -> None:
    picks = set()
    method = algorithm("fedfomo", candidates=1, explore=1.0, explore_decay=0.5)
    parts, _, _ = played(recipe(method, clients=BOTH, rounds=1))
    members, others, gained = torch.arange(20), torch.arange(1, 20), torch.arange(20).double()
    for client in range(30):
        parts.fed.begin(1)
        picks.add(int(method._preferred(gained, members, others, (client, "a"), parts.fed)))
        parts.fed.begin(3)
        assert int(method._preferred(gained, members, others, (client, "a"), parts.fed)) == 19
    assert len(picks) > 8


def test_nothing_runs_client_by_client_in_the_vectorised_engine() -> None:
    events: list[str] = []
    clients = replace(BOTH, personal_test=0.2)
    for name in ("fedfomo", "fedamp", "pfmml"):
        made = recipe(algorithm(name, uploads=2), "vectorised", clients=clients, network=Network())
        run(made, listeners=[lambda event, **facts: events.append(event)])
    assert "looped" not in events
    assert "client-failed" not in events


@pytest.mark.parametrize("wrong", [{"every": 1}, {"explore": 1.5}, {"candidates": -1}, {"uploads": -3}])
def test_meaningless_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with refuses(RecipeError, f"algorithm.{next(iter(wrong))}: must be"):
        algorithm("fedfomo", **wrong)
