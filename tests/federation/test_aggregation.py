"""Robust aggregation against plain NumPy, and against clients that lie."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.test_mapping import most_while
from polyfed.algorithms import ALGORITHMS, Averaging
from polyfed.algorithms.averaging import Update
from polyfed.core.errors import Diverged, RecipeError, TooFewReplies
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.federation import aggregation
from polyfed.federation.aggregation import BY_ENTRY, CHUNK, RULES, ServerOptimiser, aggregate
from polyfed.federation.attack import Attack, cure
from polyfed.federation.replies import Replies, listed, stacked
from polyfed.selection import Uniform
from refusals import refuses
from world import algorithm, played, recipe

NAMES = {"a.encoder.weight": (3, 2), "a.encoder.bias": (3,), "shared.bias": (4,), "b.encoder.weight": (2, 2)}


def cohort(num: int, seed: int = 1) -> dict[int, Update]:
    """Replies of clients, every third of which lacks modality b."""
    draw = torch.Generator().manual_seed(seed)
    replies = {}
    for k in range(num):
        names = {n: s for n, s in NAMES.items() if k % 3 or not n.startswith("b.")}
        params = {name: torch.randn(shape, generator=draw) for name, shape in names.items()}
        replies[k] = Update(params, torch.tensor(0.0), torch.tensor(10))
    return replies


def combined(replies: dict[int, Update], rule: str, weights: Any = None, centre: Any = None, **options: Any) -> Tree:
    given = Replies([*stacked(dict(replies))])
    centre = centre or {name: torch.zeros(shape) for name, shape in NAMES.items()}
    weights = weights or dict.fromkeys(replies, 1.0)
    return aggregate(given, "params", weights, centre, ServerOptimiser(aggregate=rule, **options))  # type: ignore[arg-type]


def rows(replies: dict[int, Update], block: str) -> np.ndarray:
    """The entries of a block, (K, P), of the clients that have it."""
    names = [name for name in NAMES if name.startswith(f"{block}.")]
    having = [reply.params for reply in replies.values() if names[0] in reply.params]
    return np.stack([np.concatenate([tree[name].numpy().reshape(-1) for name in names]) for tree in having])


def flat(tree: Tree, block: str) -> np.ndarray:
    return np.concatenate([tree[name].numpy().reshape(-1) for name in NAMES if name.startswith(f"{block}.")])


def krum_scores(values: np.ndarray, liars: int) -> np.ndarray:
    scores = []
    for i, one in enumerate(values):
        far = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(values) if j != i)
        scores.append(sum(far[: len(values) - liars - 2]))
    return np.array(scores)


@pytest.mark.parametrize("num", [11, 12])
@pytest.mark.parametrize("block", ["a", "b", "shared"])
def test_rules_equal_plain_numpy_block_by_block(num: int, block: str) -> None:
    replies = cohort(num)
    values = rows(replies, block)
    liars = int(np.ceil(0.2 * len(values) - 1e-9))
    ordered = np.sort(values, 0)
    wanted = {
        "median": np.median(values, 0),
        "trimmed-mean": ordered[liars : len(values) - liars].mean(0),
        "krum": values[krum_scores(values, liars).argmin()],
        "multi-krum": values[np.argsort(krum_scores(values, liars))[: len(values) - liars]].mean(0),
    }
    for rule, expected in wanted.items():
        np.testing.assert_allclose(flat(combined(replies, rule), block), expected, atol=1e-6, err_msg=rule)


def test_the_geometric_median_has_the_smallest_sum_of_distances() -> None:
    values = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
    replies = {
        k: Update({"shared.bias": torch.tensor(v)}, torch.tensor(0.0), torch.tensor(1)) for k, v in enumerate(values)
    }
    weights = {k: float(k + 1) for k in replies}
    share = np.array([weights[k] for k in replies]) / sum(weights.values())
    point = combined(replies, "geometric-median", weights)["shared.bias"].numpy()

    def cost(at: np.ndarray) -> float:
        return float(share @ np.linalg.norm(values - at, axis=1))

    steps = np.random.default_rng(4).normal(size=(200, 4)) * 0.05
    assert all(cost(point) <= cost(point + step) + 1e-6 for step in steps)


def test_clipping_limits_the_distance_from_the_model_that_was_sent() -> None:
    centre = {name: torch.ones(shape) for name, shape in NAMES.items()}
    replies = cohort(7)
    weights = {k: float(k + 1) for k in replies}
    values = rows(replies, "shared") - 1.0
    for given, limit in ((0.5, 0.5), (0.0, float(np.sort(np.linalg.norm(values, axis=1))[3]))):
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        share = np.array([weights[k] for k in replies]) / sum(weights.values())
        expected = 1.0 + share @ (values * np.minimum(1.0, limit / norms))
        found = combined(replies, "norm-clip", weights, centre, max_norm=given)
        np.testing.assert_allclose(flat(found, "shared"), expected, atol=1e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_fifth_of_liars_cannot_move_the_result_far(rule: str) -> None:
    draw = torch.Generator().manual_seed(5)
    honest = {
        k: Update({"shared.bias": 1.0 + 0.1 * torch.randn(6, generator=draw)}, torch.tensor(0.0), torch.tensor(1))
        for k in range(16)
    }
    lies = {
        k: Update({"shared.bias": torch.full((6,), -1e6)}, torch.tensor(0.0), torch.tensor(1)) for k in range(16, 20)
    }
    centre = {"shared.bias": torch.ones(6)}
    everyone = honest | lies
    plain = aggregate(
        Replies([*stacked(dict(everyone))]), "params", dict.fromkeys(everyone, 1.0), centre, ServerOptimiser()
    )
    assert float((plain["shared.bias"] - 1.0).abs().max()) > 1e5, "the mean itself is moved"
    assert float((combined(everyone, rule, centre=centre)["shared.bias"] - 1.0).abs().max()) < 0.5


@pytest.mark.parametrize("rule", ["krum", "multi-krum"])
def test_distances_stay_exact_where_all_replies_lie_far_from_zero(rule: str) -> None:
    """From squared norms and products, as of a Gram matrix, they would be lost in the rounding of float32."""
    draw = torch.Generator().manual_seed(6)
    steps = {k: torch.randint(-8, 9, (64,), generator=draw) / 16 * (8 if k >= 16 else 1) for k in range(20)}

    def found(offset: float) -> Tensor:
        replies = {
            k: Update({"shared.bias": offset + step}, torch.tensor(0.0), torch.tensor(1)) for k, step in steps.items()
        }
        return combined(replies, rule, centre={"shared.bias": torch.full((64,), offset)})["shared.bias"] - offset

    torch.testing.assert_close(found(4096.0), found(0.0), atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_clients_of_weight_zero_integers_and_half_precision(rule: str) -> None:
    replies: dict[int, Update] = {}
    for k in range(6):
        params: dict[str, Tensor] = {
            "a.steps": torch.tensor(k),
            "a.weight": torch.full((2,), float(k), dtype=torch.bfloat16),
        }
        replies[k] = Update(params, torch.tensor(0.0), torch.tensor(1))
    weights = dict.fromkeys(replies, 1.0) | {5: 0.0}
    centre = {"a.steps": torch.tensor(0), "a.weight": torch.zeros(2, dtype=torch.bfloat16)}
    found = combined(replies, rule, weights, centre)
    assert found["a.steps"].dtype == torch.int64
    assert int(found["a.steps"]) == 2
    assert found["a.weight"].dtype == torch.bfloat16
    assert bool((found["a.weight"] <= 4).all())


def test_too_few_replies_and_wrong_options_are_refused() -> None:
    with refuses(TooFewReplies, "withstand"):
        combined(cohort(4), "krum")
    with refuses(RecipeError, "server.lying: from 0 up"):
        ServerOptimiser(aggregate="krum", lying=0.5)


WITH_SERVER = sorted(name for name, cls in ALGORITHMS.items() if "server" in cls.__dataclass_fields__)


OPTIONS = {
    "fedproto": {"mode": "mm_fedavg"},
    "fedmsplit": {"mode": "block_mean"},
    "fedogm": {"scale_params": "all_weights"},
    "pmcmfl": {"contrast": 0.1},
    "mfedmc": {"uploads": 2, "client_share": 1.0},
    "fedcouncil": {"anchor": False, "own": False, "adapted": 0, "unimodal": False},  # needs no validation rows
}
PROTOTYPES = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in ("a", "b", "shared")}


@pytest.mark.parametrize("name", [name for name in WITH_SERVER if name not in ("hfl", "partialfl", "fedbn")])
def test_no_method_ignores_the_rule(name: str) -> None:
    """HFL needs silos, PartialFL a private modality and FedBN norms; all three use the merge of `Averaging`."""
    rows = []
    for rule in ("mean", "median"):
        method = algorithm(name, server=ServerOptimiser(aggregate=rule), **OPTIONS.get(name, {}))  # type: ignore[arg-type]
        rows.append(played(recipe(method, rounds=1, egress=PROTOTYPES))[1].params)
    mean, median = rows
    assert any(not torch.equal(value, median[key]) for key, value in mean.items())


@pytest.mark.parametrize(("name", "mode"), [("fedproto", "original"), ("fedmsplit", "personal")])
def test_a_rule_is_refused_where_nothing_is_averaged(name: str, mode: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(algorithm(name, mode=mode, server=ServerOptimiser(aggregate="median")))
    assert caught.value.key == ("server",)


def test_what_the_other_methods_merge_is_what_averaging_merges() -> None:
    assert ALGORITHMS["hfl"].merge is ALGORITHMS["partialfl"].merge is ALGORITHMS["fedbn"].merge is Averaging.merge  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon"])
def test_every_rule_trains_and_both_engines_agree(name: str, rule: str) -> None:
    server = ServerOptimiser(aggregate=rule, lying=0.0)  # type: ignore[arg-type]
    made = [recipe(algorithm(name, server=server), engine, rounds=2) for engine in ("sequential", "vectorised")]
    try:
        one, two = (played(each)[1].params for each in made)
    except TooFewReplies:
        assert rule in ("krum", "multi-krum"), "these need three replies of each block"
        return
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], atol=1e-4, rtol=1e-4)


def krum(lying: float, **changes: Any) -> Any:
    server = ServerOptimiser(aggregate="multi-krum", lying=lying)
    method = algorithm("fedavg", server=server, selector=Uniform(participation=10))
    clients = ClientsSpec(partition="iid", num=10)
    return recipe(method, clients=clients, rounds=1, **changes)


def test_check_does_not_take_the_few_clients_of_a_dry_run_for_the_cohort() -> None:
    checked = check(krum(0.2))
    assert not checked.remarks
    played(krum(0.2))


@pytest.mark.parametrize("act", [assemble, check])
def test_a_rule_that_no_round_can_satisfy_is_refused_before_the_run(act: Any) -> None:
    with refuses(RecipeError, "server.lying: withstand"):
        act(krum(0.4))
    holdings = ClientsSpec(partition="iid", num=10, holdings=[["a", "b"], ["a"], ["a"], ["a"], ["a"]])
    with refuses(RecipeError, "server.lying: most 2"):
        act(replace(krum(0.2), clients=holdings))


def test_the_error_of_a_run_under_attack_names_the_attack() -> None:
    made = replace(
        krum(0.2), attack=Attack(name="sign-flip", share=0.2, scale=1e30), rounds=6, engine=EngineSpec(outlier_factor=0)
    )
    made = replace(made, algorithm=replace(made.algorithm, server=ServerOptimiser()))
    with pytest.raises(Diverged) as error:
        played(made)
    assert "sign-flip" in str(error.value) or "server's own model" in str(error.value)
    assert "client -" not in str(error.value)


def test_the_cure_depends_on_the_attack() -> None:
    assert "robust rule" in cure(Attack(name="scaling", share=0.2))
    assert "lr" in cure(None)
    assert listed({-1: "not finite"}) == "the server's test: not finite"


def large_replies(num: int, shapes: dict[str, tuple[int, ...]]) -> tuple[Replies, dict[int, float], Tree]:
    draw = torch.Generator().manual_seed(1)
    trees = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(num)]
    made = {client: Update(tree, torch.tensor(0.5), torch.tensor(3)) for client, tree in enumerate(trees)}
    return Replies(list(stacked(dict(made)))), dict.fromkeys(made, 1.0), trees[0]


@pytest.mark.parametrize("num", [4, 7])
@pytest.mark.parametrize("rule", BY_ENTRY)
def test_large_replies_are_combined_in_parts_with_the_same_bits(rule: str, num: int, monkeypatch: Any) -> None:
    replies, weights, centre = large_replies(num, {"a.w": (1, CHUNK + 5), "a.b": (7,)})
    server = ServerOptimiser(aggregate=rule)  # type: ignore[arg-type]
    found = aggregate(replies, "params", weights, centre, server)
    monkeypatch.setattr(aggregation, "BY_ENTRY", ())
    whole = aggregate(replies, "params", weights, centre, server)
    assert {*found} == {*whole}
    assert all(torch.equal(value, whole[name]) and value.shape == whole[name].shape for name, value in found.items())


def test_the_median_of_large_replies_does_not_hold_them_side_by_side() -> None:
    replies, weights, centre = large_replies(6, {"a.w": (2, 4 * CHUNK)})
    server = ServerOptimiser(aggregate="median")
    took = most_while(lambda: aggregate(replies, "params", weights, centre, server))
    assert took < 2 * len(weights) * centre["a.w"].nbytes, "sorting all of them takes five times their size"
