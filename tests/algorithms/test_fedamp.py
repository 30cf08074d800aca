"""FedAMP and HeurFedAMP: weights and cloud models computed by hand, and lost messages."""

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.test_pfmml import unreached
from oracles import personal as oracle
from polyfed.algorithms.personal.blocks import layouts
from polyfed.algorithms.personal.fedamp import CLOUD, FedAmp
from polyfed.core.errors import RecipeError
from polyfed.core.tree import block_of, under
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from scripted import PARAMS, scripted
from world import AWKWARD, algorithm, furthest, played, recipe, same


def weights(w: list[list[float]], round: int = 1, **options: Any) -> torch.Tensor:
    return algorithm("fedamp", **options).attention(torch.tensor(w), round)


def test_two_numbers_of_the_formula() -> None:
    w = torch.tensor([[0.0], [1.0]])
    cloud = algorithm("fedamp", sigma=1.0, alpha=0.1).attention(w, 1) @ w
    assert float(cloud[0]) == pytest.approx(0.0367879441, abs=1e-8)


@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_of_the_weights_sum_to_one(heuristic: bool, size: int) -> None:
    w = torch.randn(size, 7, generator=torch.Generator().manual_seed(size)).tolist()
    found = weights(w, heuristic=heuristic, sigma=3.0, alpha=50.0)
    torch.testing.assert_close(found.sum(1), torch.ones(size))
    assert bool((found >= 0).all())


@pytest.mark.parametrize("heuristic", [False, True])
def test_identical_clients_keep_their_model(heuristic: bool) -> None:
    w = torch.ones(4, 6) * 0.3
    found = algorithm("fedamp", heuristic=heuristic).attention(w, 1) @ w
    torch.testing.assert_close(found, w)


@pytest.mark.parametrize("alpha", [0.5, 400.0])
def test_clouds_equal_a_loop_over_pairs(alpha: float) -> None:
    w = np.random.default_rng(0).normal(size=(6, 9))
    method = algorithm("fedamp", alpha=alpha, sigma=20.0)
    found = method.attention(torch.tensor(w), 1) @ torch.tensor(w)
    np.testing.assert_allclose(found.numpy(), oracle.amp(w, alpha, 20.0), atol=1e-9)
    heuristic = algorithm("fedamp", heuristic=True, sigma=5.0, self_weight=0.2)
    found = heuristic.attention(torch.tensor(w), 1) @ torch.tensor(w)
    np.testing.assert_allclose(found.numpy(), oracle.heur(w, 5.0, 0.2), atol=1e-9)


def test_a_huge_sigma_of_the_heuristic_leaves_the_nearest_neighbour_only() -> None:
    found = weights([[1.0, 0.0], [0.9, 0.2], [-1.0, 0.4]], heuristic=True, sigma=1e4, self_weight=0.25)
    torch.testing.assert_close(found[0], torch.tensor([0.25, 0.75, 0.0]))
    torch.testing.assert_close(found[2], torch.tensor([0.0, 0.75, 0.25]))


def test_alpha_falls_every_thirty_rounds() -> None:
    method = algorithm("fedamp", alpha=8.0)
    assert [method.alpha_at(t) for t in (1, 30, 31, 61)] == pytest.approx([8.0, 8.0, 0.8, 0.08])


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_without_the_proximal_term_clients_train_alone(engine: str) -> None:
    train = Train(lr=0.1, batch_size=16)
    alone, _, _ = played(recipe(algorithm("local", train=train, selector=Uniform(participation=1.0)), engine, AWKWARD))
    parts, _, _ = played(recipe(algorithm("fedamp", train=train, lam=0.0), engine, AWKWARD))
    for client, tree in alone.engine.locals.items():
        assert furthest(tree, {n: parts.engine.locals[client][n] for n in tree}) < 1e-6


def test_a_cloud_model_is_built_with_the_alpha_of_the_round_that_trains_towards_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[int] = []
    attention = FedAmp.attention

    def seen(self: FedAmp, w_SP: torch.Tensor, round: int) -> torch.Tensor:
        used.append(round)
        return attention(self, w_SP, round)

    monkeypatch.setattr(FedAmp, "attention", seen)
    played(recipe(algorithm("fedamp"), rounds=3))
    assert {*used} == {2, 3, 4}


def test_only_uploaded_blocks_get_a_new_cloud() -> None:
    made = recipe(algorithm("fedamp", uploads=2, alpha=10.0, sigma=100.0), rounds=2)
    parts, _, ledger = played(made)
    before = [row for row in ledger if row["round"] == 1 and row["message"] == "Blocks"]
    sent = {(row["client"], row["block"]) for row in before}
    assert len(sent) == 6
    for client, tree in parts.engine.locals.items():
        for block in {*parts.fed.clients[client].modalities, "shared"}:
            names = [n for n in parts.initial if n.startswith(f"{block}.")]
            moved = not same({n: under(CLOUD, tree)[n] for n in names}, {n: parts.initial[n] for n in names})
            assert moved == ((client, block) in sent)


def test_a_large_weight_keeps_the_client_at_its_cloud() -> None:
    train = Train(lr=1e-3, batch_size=16, epochs=5)
    far = {}
    for lam in (0.0, 1.0):
        method = algorithm("fedamp", train=train, alpha=1e-2, lam=lam, uploads=0)  # no new cloud is ever made
        parts, _, _ = played(recipe(method, rounds=1))
        tree = parts.engine.locals[0]
        far[lam] = furthest({n: tree[n] for n in parts.initial if n in tree}, parts.engine.context(0).initial)
    assert far[1.0] < 0.7 * far[0.0]


def test_start_cloud_begins_at_the_cloud_model() -> None:
    still = Train(lr=0.0, batch_size=16)
    parts, _, _ = played(recipe(algorithm("fedamp", train=still, start="cloud", uploads=1.0)))
    for tree in parts.engine.locals.values():
        assert (
            furthest(
                {n: v for n, v in tree.items() if block_of(n) != CLOUD},
                under(CLOUD, tree),
            )
            < 1e-6
        )


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"alpha_every": 0}, {"self_weight": 1.0}, {"uploads": 2.0}])
def test_meaningless_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with refuses(RecipeError, f"algorithm.{next(iter(wrong))}: must be"):
        algorithm("fedamp", **wrong)


def test_a_cloud_that_got_lost_is_sent_again_until_it_arrives_or_a_newer_one_is_made() -> None:
    draw = np.random.default_rng(3)
    lost = {(t, k) for t in range(1, 15) for k in range(6) if draw.random() < 0.5}
    method = algorithm("fedamp", uploads=2, alpha=10.0, sigma=100.0)
    fed, script = scripted(method, [[1, 1], [1, 0], [0, 1], [1, 1], [1, 0], [1, 1]])
    unreached(script, lost)
    due: dict[tuple[str, int], torch.Tensor] = {}
    again = 0
    state = method.init(fed, PARAMS)
    for round in range(1, 15):
        fed.begin(round)
        script.got.clear()
        script.sent.clear()
        state = method.round(state, fed)
        arrived = {(name, k): value for (name, k), value in due.items() if (round, k) not in lost}
        got = {(name, k): value for k, tree in script.got.items() for name, value in tree.items()}
        assert got.keys() == arrived.keys()
        assert all(torch.equal(value, arrived[place]) for place, value in got.items())
        due = {place: value for place, value in due.items() if place not in arrived}
        again += sum(k not in script.sent[block_of(name)] for name, k in due)
        for block, clouds in state.clouds.items():
            assert clouds.members.tolist() == sorted(clouds.members.tolist())
            layout = layouts(fed, PARAMS)[block]
            old = {k for name, k in due if block_of(name) == block}
            assert set(clouds.members.tolist()) == old | set(script.sent[block])
            sent = torch.tensor(np.stack([script.sent[block][k] for k in sorted(script.sent[block])])).float()
            made = torch.tensor([k in script.sent[block] for k in clouds.members.tolist()])
            torch.testing.assert_close(clouds.rows[made], method.attention(sent, round) @ sent)
            for k, row in zip(clouds.members.tolist(), clouds.rows, strict=True):
                due |= {(name, k): v for name, v in layout.tree(row).items() if k in script.sent[block]}
    assert again, "every lost cloud was overtaken by a newer one"


def test_a_pull_without_effect_is_told() -> None:
    method = algorithm("fedamp")
    assert "trains nearly like local" in method.concerns([{}, {"pull": 1e-4}, {"pull": 2e-3}])[0]
    assert method.concerns([{"pull": 1e-4}, {"pull": 0.1}]) == []
    assert method.concerns([{}]) == [], "no cloud model has come back yet"
    assert algorithm("fedamp", start="cloud").concerns([{"pull": 1e-4}]) == []


def test_the_pull_is_the_proximal_term_of_the_uploads() -> None:
    made = recipe(algorithm("fedamp", alpha=10.0, sigma=100.0), rounds=2)
    parts, state, _ = played(made)
    terms = []
    for local in parts.engine.locals.values():
        own = {name: value for name, value in local.items() if block_of(name) != CLOUD}
        cloud = under(CLOUD, local)
        terms.append(sum(float((own[n] - cloud[n]).square().sum()) for n in parts.model.trainable(own)) / 20.0)
    expected = sum(terms) / len(terms) / state.train_loss
    assert parts.algorithm.observe(state)["pull"] == pytest.approx(expected, rel=1e-4)
