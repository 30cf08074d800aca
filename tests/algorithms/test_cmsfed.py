"""CMSFed: the invariants of docs/algorithms/cmsfed.md, every option, and an independent loop."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracles import cmsfed as oracle
from polyfed import run
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.cmsfed import CmsFed
from polyfed.algorithms.cmsfed.aggregation import represented
from polyfed.algorithms.cmsfed.cmsfed import Assignment, CmsFedState
from polyfed.algorithms.cmsfed.local_scope import TrainingScope
from polyfed.algorithms.cmsfed.selection import Choice, SelectionProblem
from polyfed.algorithms.cmsfed.weak_modality import ImbalanceRatios, pce_weights
from polyfed.core import keys
from polyfed.core.errors import Diverged, EgressError, TooFewReplies
from polyfed.core.tree import Tree, size_bytes, vector
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import refuse_forbidden
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.federation.client_registry import ClientRegistry
from polyfed.model import ModelSpec
from polyfed.selection import DivFl, Uniform
from polyfed.selection.submodular import BlockSimilarity, Similarity, sample_size, stochastic_greedy
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes
from refusals import refuses
from world import algorithm, furthest, losing, played, recipe, same

OPEN = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in ("a", "b", "c")}
KEY = keys.key(3, "greedy", 2)
COMPLETE = ClientsSpec(partition="dirichlet", num=7, alpha=1.0)


def paper(**options: Any) -> Any:
    """CMSFed with the paper's values where `options` names no others."""
    return algorithm("cmsfed", **(CmsFed.presets["paper"] | options))


def made(engine: str = "sequential", clients: ClientsSpec = COMPLETE, rounds: int = 3, **options: Any) -> Any:
    egress = {m: OPEN[m] for m in ("a", "b")}
    return recipe(paper(**options), engine, clients=clients, egress=egress, rounds=rounds)


def step_by_step(case: Any) -> list[CmsFedState]:
    """The state after every round, the first being the start."""
    parts = assemble(case)
    parts.fed.begin(0)
    states = [case.algorithm.init(parts.fed, parts.initial)]
    for round in range(1, case.rounds + 1):
        parts.fed.begin(round)
        states.append(case.algorithm.round(states[-1], parts.fed))
    return states


def problem(num: int, seed: int, **options: Any) -> tuple[SelectionProblem, ClientRegistry]:
    """A random selection problem over clients that own both modalities, and their registry."""
    rng = np.random.default_rng(seed)
    registry = ClientRegistry(("a", "b"), torch.full((num,), 10), torch.ones(num, 2, dtype=torch.bool))
    similar = []
    for _ in range(2):
        points = torch.from_numpy(rng.normal(size=(num, 4)).astype(np.float32))
        similar.append(Similarity.empty(num, 4).refreshed(dict(enumerate(points))))
    values = torch.tensor(np.stack([np.ones(num), rng.uniform(0.8, 3.0, num)], 1))
    ratios = replace(ImbalanceRatios.unknown(registry), values=values)
    defaults = {"weak": "b", "dominance_threshold": 1.5, "resolution": "paper", "size": 5, "sample": 6}
    return SelectionProblem(similar[0], similar[1], ratios, **(defaults | options)), registry  # type: ignore[arg-type]


@pytest.mark.parametrize("resolution", ["paper", "authors"])
@pytest.mark.parametrize("seed", range(6))
def test_choice_equals_brute_force_with_the_same_draws(resolution: str, seed: int) -> None:
    case, clients = problem(14, seed, resolution=resolution)
    choice = case.solve(clients, KEY)
    pool, draws = list(range(14)), []
    for step in range(5):  # replay: which candidates each pass saw depends on who had joined
        order = [pool[i] for i in keys.permutation(keys.key(KEY, step), len(pool))[:6].tolist()]
        draws.append(sorted(order) if len(pool) > 6 else sorted(pool))
        dominance = case.ratios.values[:, 1].tolist()
        d1, d2 = case.gradients.distance.numpy(), case.encoder.distance.numpy()  # type: ignore[union-attr]
        both, weak = oracle.select(d1, d2, dominance, 5, 1.5, draws, resolution == "authors")
        pool = [client for client in range(14) if client not in both + weak]
    assert choice.train_all == both
    assert list(choice.train_alone) == weak
    assert set(choice.train_alone.values()) <= {"b"}


@pytest.mark.parametrize("resolution", ["paper", "authors"])
def test_extreme_chi(resolution: str) -> None:
    case, clients = problem(20, 1, resolution=resolution, dominance_threshold=math.inf)
    assert case.solve(clients, KEY).train_alone == {}
    case, clients = problem(20, 1, resolution=resolution, dominance_threshold=-math.inf)
    everyone_alone = case.solve(clients, KEY)
    if resolution == "authors":
        assert everyone_alone.train_all == []
        assert len(everyone_alone.train_alone) == 5
    else:
        assert len(everyone_alone.train_alone) >= 1


def test_without_weak_picks_the_authors_choice_is_divfl_on_the_same_draws() -> None:
    case, clients = problem(20, 4, resolution="authors", dominance_threshold=math.inf)
    divfl = stochastic_greedy(case.gradients, 5, range(20), of=6, key=KEY)
    assert case.solve(clients, KEY).train_all == divfl


@pytest.mark.parametrize("size", [1, 3, 8, 20, 30])
@pytest.mark.parametrize("resolution", ["paper", "authors"])
def test_sets_are_disjoint_and_fill_the_budget(size: int, resolution: str) -> None:
    case, clients = problem(20, 2, resolution=resolution, size=size, sample=sample_size(size, 20))
    choice = case.solve(clients, KEY)
    assert not set(choice.train_all) & set(choice.train_alone)
    assert len(choice.train_all) + len(choice.train_alone) == min(size, 20)


def test_no_weak_modality_when_all_ratios_are_one() -> None:
    case, clients = problem(10, 0, weak="")
    level = replace(case.ratios, values=torch.ones(10, 2, dtype=torch.float64))
    assert level.weak() == ""
    assert replace(case, encoder=None, ratios=level).solve(clients, KEY).train_alone == {}


def test_global_ratio_weighs_by_rows_and_keeps_stale_values() -> None:
    registry = ClientRegistry(
        ("a", "b"), torch.tensor([10, 30, 5]), torch.tensor([[True, True], [True, True], [True, False]])
    )
    ratios = ImbalanceRatios.unknown(registry)
    assert ratios.mean() == {}
    assert ratios.weak() == ""
    ratios = ratios.reported({0: {"b": torch.tensor(2.0)}, 1: {"b": torch.tensor(0.5)}, 2: {}})
    assert ratios.mean()["b"] == pytest.approx((10 * 2 + 30 * 0.5) / 40)
    assert ratios.weak() == "a"
    assert ratios.dominance("a", 0) == pytest.approx(0.5)
    ratios = ratios.reported({1: {"b": torch.tensor(1.2)}})
    assert ratios.weak("a") == "b"
    # the former weak modality is the surer one by now; its dominance is still measured against the other one
    assert ratios.mean()["b"] > 1.0
    assert ratios.dominance("a", 0) == pytest.approx(0.5)
    assert ratios.dominance("a", 1) == pytest.approx(1 / 1.2)


def test_three_modalities_set_the_weakest_against_the_strongest() -> None:
    registry = ClientRegistry(("a", "b", "c"), torch.tensor([1, 1]), torch.ones(2, 3, dtype=torch.bool))
    ratios = ImbalanceRatios.unknown(registry).reported(
        {k: {"b": torch.tensor(3.0), "c": torch.tensor(0.5)} for k in (0, 1)}
    )
    assert ratios.weak() == "b"
    assert ratios.dominance("b", 0) == pytest.approx(6.0)
    assert ratios.weakest_of(["a", "c"]) == "a"


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("alone", [False, True])
def test_training_and_both_gradients_equal_an_independent_loop(engine: str, alone: bool) -> None:
    train = Train(lr=0.1, batch_size=16, epochs=1)
    case = made(engine, train=train, prototype_weight=2.0)
    parts = assemble(case)
    parts.fed.begin(1)
    rng = torch.Generator().manual_seed(0)
    near = {m: torch.randn(4, 6, generator=rng) for m in ("a", "b")}
    sent = {"b": near["b"]} if alone else near
    message = Assignment(parts.initial, sent, {"b": torch.ones(())})
    request = case.algorithm.train_alone if alone else case.algorithm.train_all
    report = parts.fed.ask(request, [0, 1], message)[1]
    w, rows = parts.initial, parts.population.train[1]
    client = oracle_client(w)
    key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", 1, 1), ORDER), 0)
    batches = list(keys.permutation(keys.fold_in(key, 0), len(rows)).split(16))
    columns = parts.population.columns
    x = {m: column.values[rows].float() for m, column in columns.modalities.items()}
    g, h = client.train(x, columns.label[rows], batches, near, "b", 0.1, 2.0, alone)
    encoder = [report.encoder_gradient[n] for n in w if n.startswith("b.encoder")]
    assert all(torch.allclose(mine, ours, atol=1e-5) for mine, ours in zip(encoder, h, strict=True))
    if alone:
        assert report.gradient == {}
        assert not any(n.startswith("a.") for n in report.params)
    else:
        for m in ("a", "b"):
            mine = [report.gradient[n] for n in w if n.startswith(f"{m}.")]
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, g[m], strict=True))
    head = client.heads["b"].weight
    assert torch.allclose(report.params["b.fusion.weight"], head, atol=1e-5)


def oracle_client(w: Tree) -> oracle.Client:
    towers: dict[str, torch.nn.Module] = {}
    heads: dict[str, torch.nn.Linear] = {}
    for m, (width, hidden) in {"a": (16, 12), "b": (24, 10)}.items():
        tower = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 6))
        names = [n for n in w if n.startswith(f"{m}.encoder")]
        with torch.no_grad():
            for parameter, name in zip(tower.parameters(), names, strict=True):
                parameter.copy_(w[name])
        heads[m] = torch.nn.Linear(6, 4, bias=False)
        with torch.no_grad():
            heads[m].weight.copy_(w[f"{m}.fusion.weight"])
        towers[m] = tower
    return oracle.Client(towers, heads, next(v for n, v in w.items() if n.startswith("shared.")))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_no_strength_and_no_weak_picks_is_fedavg_on_the_same_cohorts_bit_for_bit(engine: str) -> None:
    options = {"dominance_threshold": math.inf, "prototype_weight": 0.0, "modality_selection": False}
    _, ours, _ = played(made(engine, **options))
    plain = recipe(algorithm("fedavg"), engine, clients=COMPLETE)
    _, theirs, _ = played(plain)
    assert same(ours.params, theirs.params)


def test_only_rows_and_columns_of_the_chosen_change() -> None:
    states = step_by_step(made(dominance_threshold=1.0, rounds=4))
    for before, after in itertools.pairwise(states[1:]):
        idle = [c for c in range(7) if c not in after.choice.picked]
        for old, new in [(before.gradients, after.gradients), *[(before.encoders[m], after.encoders[m]) for m in "ab"]]:
            assert torch.equal(old.distance[idle][:, idle], new.distance[idle][:, idle])
            assert torch.equal(new.distance, new.distance.T)
            assert not new.distance.diagonal().any()
        alone = list(after.choice.train_alone)
        assert torch.equal(before.gradients.vectors[alone], after.gradients.vectors[alone])  # type: ignore[union-attr]
        other = "a" if after.choice.weak == "b" else "b"
        assert torch.equal(before.encoders[other].vectors, after.encoders[other].vectors)


def test_a_client_that_trains_one_modality_neither_moves_nor_sends_the_other() -> None:
    # a threshold of -inf and a budget of all clients: every pick of the second problem trains `weak` alone
    states = step_by_step(made(dominance_threshold=-math.inf, resolution="authors", rounds=2))
    first, after = states[1], states[2]
    assert after.choice.train_all == []
    other = "a" if after.choice.weak == "b" else "b"
    fixed = [n for n in first.params if n.startswith(f"{other}.")]
    assert fixed
    assert all(torch.equal(first.params[n], after.params[n]) for n in fixed)


def test_identical_clients_are_at_distance_zero_and_have_equal_ratios() -> None:
    case = made(rounds=1, train=Train(lr=0.1, batch_size=0, epochs=1), clients=ClientsSpec(partition="iid", num=4))
    parts = assemble(case)
    shard = parts.population.train[0]
    parts.engine.rows = lambda client: shard  # type: ignore[method-assign]
    parts.fed.begin(0)
    state = case.algorithm.init(parts.fed, parts.initial)
    parts.fed.begin(1)
    first = parts.fed.ask(case.algorithm.explore, range(4), Broadcast(parts.initial))
    state = case.algorithm.learned(state, parts.initial, first, parts.fed)
    # batch order differs between clients, so sums agree to rounding only
    assert float(state.gradients.distance.max()) < 1e-5
    assert len(set(state.ratios.values[:, 1].tolist())) == 1


def test_global_prototypes_are_centroids_of_all_rows_under_one_model() -> None:
    states = step_by_step(made(rounds=1))
    parts = assemble(made(rounds=1))
    parts.fed.begin(1)
    case = parts.algorithm
    first = parts.fed.ask(case.explore, range(7), Broadcast(parts.initial))  # type: ignore[attr-defined]
    state = case.learned(states[0], parts.initial, first, parts.fed)  # type: ignore[attr-defined]
    rows = torch.cat([parts.population.train[c] for c in range(7)])
    columns = parts.population.columns
    client = oracle_client(parts.initial)
    for m in ("a", "b"):
        z = client.towers[m](columns.modalities[m].values[rows].float()).detach()
        for label in range(4):
            wanted = z[columns.label[rows] == label].mean(0)
            assert torch.allclose(state.prototypes[m].mean[label], wanted, atol=1e-5)


def test_bytes_of_a_round() -> None:
    case = made(dominance_threshold=0.0, gradient_split="delta", rounds=2)
    parts, state, rows = played(case)
    model = parts.fed.context.model
    size = {
        m: size_bytes({n: v for n, v in state.params.items() if n.startswith(f"{m}.")}) for m in ("a", "b", "shared")
    }
    weak, classes, width = state.choice.weak, 4, 6
    extra = 4 * (2 * classes * width + classes + 1)  # prototypes, counts, ratio
    always = 4 * 3 + 8  # two loss terms, their sum; and an int64 row count
    sent: dict[int, int] = {}
    for row in (r for r in rows if r["round"] == 2 and r["destination"] == "server"):
        sent[row["client"]] = sent.get(row["client"], 0) + row["bytes"]
    assert set(sent) == state.choice.picked
    for client, total in sent.items():
        trained = sum(size.values()) if client in state.choice.train_all else size[weak] + size["shared"]
        assert total == trained + extra + always
    assert model.feature_size("a") == width


def test_prototypes_do_not_leave_unless_the_policy_allows_it() -> None:
    with refuses(EgressError, "prototypes of a"):
        played(replace(made(), egress={}))


def test_raw_rows_and_labels_never_cross() -> None:
    _, _, rows = played(made())
    assert {row["kind"] for row in rows} == {"parameters", "gradients", "prototypes", "statistic"}
    assert "labels" not in {row["block"] for row in rows}


SWITCHES: list[dict[str, Any]] = [
    {"beta_mode": "hard"},
    {"pce_target": "batch_weak"},
    {"gradient_split": "delta"},
    {"gradient_split": "delta", "normalize_delta": False},
    {"resolution": "authors"},
    {"init_pass": "step"},
    {"prototypes": "local"},
    {"modality_selection": False, "prototypes": "local"},
    {"modality_selection": False, "prototypes": "local", "selector": DivFl(participation=4)},
    {"sketch": 64},
    {"feature_norm": 3.0},
    {"prototype_weight": 0.0},
    {"ratio_rule": "quantile", "dominance_quantile": 0.9},
    {"client_weights": "clusters"},
    {"classifier_average": "cohort"},
    {"placebo": "random-picks"},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items())[:50])
def test_every_switch_changes_the_run_and_engines_agree(switch: dict[str, Any]) -> None:
    base = {"dominance_threshold": 1.0, "rounds": 2}
    _, plain, _ = played(made("vectorised", **base))
    _, one, ledger_one = played(made("sequential", **(base | switch)))
    _, many, ledger_many = played(made("vectorised", **(base | switch)))
    # a class of one row puts its own prototype on that row, where the distance's gradient turns on the last digit
    assert furthest(one.params, many.params) < (1e-3 if switch.get("prototypes") == "local" else 2e-5)
    assert ledger_one == ledger_many
    if switch not in ({"init_pass": "step"}, {"sketch": 64}):
        assert not same(plain.params, many.params)
    if "init_pass" in switch or "sketch" in switch:
        assert not torch.equal(plain.gradients.distance, many.gradients.distance)


def test_every_switch_is_reachable_from_a_recipe() -> None:
    table = {
        "data": {"name": "toy"},
        "clients": {"num": 4, "partition": "iid"},
        "model": {"encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
    }
    for switch in [*SWITCHES, {"dominance_threshold": math.inf}, {"dominance_threshold": -math.inf}]:
        options = {k: v for k, v in switch.items() if k != "selector"}
        extra = {"selection": {"name": "divfl"}} if "selector" in switch else {}
        built = parse_recipe(table | extra | {"algorithm": {"name": "cmsfed", **options}}).algorithm
        assert isinstance(built, CmsFed)
        assert all(getattr(built, name) == value for name, value in options.items())


def test_the_whole_classifier_is_averaged_with_the_weights_of_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}
    merge = CmsFed.merge

    def seen(self: CmsFed, state: Any, replies: Any, fed: Any) -> Any:
        kept.update(before=state, replies=replies, after=merge(self, state, replies, fed))
        return kept["after"]

    monkeypatch.setattr(CmsFed, "merge", seen)
    options = {"client_weights": "clusters", "classifier_average": "cohort", "gradient_split": "exact"}
    parts, _, _ = played(made("sequential", ratio_rule="threshold", dominance_threshold=-9e9, rounds=1, **options))
    before, replies, choice = kept["before"], kept["replies"], kept["before"].choice
    assert choice.train_all, "no client trains all modalities, so the test would show nothing"
    assert choice.train_alone
    rows = parts.fed.clients.rows_of(parts.fed.clients)
    gamma = represented(before.encoders[choice.weak], list(replies), rows)
    gamma |= represented(before.gradients, choice.train_all, rows)
    (strong,) = {"a", "b"} - {choice.weak}
    name = f"{strong}.fusion.weight"
    sent = before.params[name]
    trained = sum(gamma[c] * (replies[c].params[name] - sent) for c in choice.train_all)
    expected = sent + trained / sum(gamma.values())
    torch.testing.assert_close(kept["after"].params[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_that_lack_a_modality_train_alone_and_have_no_ratio(engine: str) -> None:
    clients = ClientsSpec(partition="iid", num=8, keep_both=0.5)
    states = step_by_step(
        made(engine, clients=clients, dominance_threshold=math.inf, rounds=4, selector=Uniform(participation=6))
    )
    holds = assemble(made(clients=clients)).population.holds
    for state in states[1:]:
        assert state.ratios.values[~holds.all(1)].isnan().all()
        assert state.gradients.known.all()
        assert all(bool(holds[c].all()) for c in state.choice.train_all)
        for client, own in state.choice.train_alone.items():
            assert holds[client].tolist() == [own == "a", own == "b"]
        assert len(state.choice.picked) == 6
    known = states[1].encoders
    assert all(torch.equal(known[m].known, holds[:, i]) for i, m in enumerate("ab"))


def test_a_client_that_lacks_a_modality_is_a_candidate_like_any_other() -> None:
    clients = ClientsSpec(partition="iid", num=24, keep_both=0.5)
    for split in ("exact", "delta"):
        states = step_by_step(
            made(
                "vectorised",
                clients=clients,
                dominance_threshold=math.inf,
                gradient_split=split,
                rounds=10,
                selector=Uniform(participation=6),
            )
        )
        holds = assemble(made(clients=clients)).population.holds
        picks = {kind: 0 for kind in ((True, True), (True, False), (False, True))}
        for state in states[1:]:
            for client in state.choice.picked:
                picks[tuple(holds[client].tolist())] += 1  # type: ignore[index]
        weak = states[-1].choice.weak
        strong_only = (weak != "a", weak != "b")
        # 6 of 24 clients own only the strong modality; the second problem of each pass passes them over
        assert picks[strong_only] >= 60 * 6 / 24 / 3, (split, picks)


def test_clients_that_lack_a_block_are_as_far_there_as_the_shared_blocks_predict() -> None:
    rng = torch.Generator().manual_seed(3)
    vectors = {c: {b: torch.randn(4, generator=rng) for b in ("a", "b", "shared")} for c in range(5)}
    del vectors[3]["b"], vectors[4]["a"]
    empty = BlockSimilarity.empty(6, {"a": 4, "b": 4, "shared": 4})
    similarity = empty.refreshed({c: vectors[c] for c in (0, 1, 2)}).refreshed({c: vectors[c] for c in (3, 4)})
    found = similarity.distance

    def apart(block: str, k: int, i: int) -> float:
        return float((vectors[k][block] - vectors[i][block]).square().sum())

    blocks, mean = ("a", "b", "shared"), {}
    for block in blocks:
        own = [c for c in vectors if block in vectors[c]]
        pairs = list(itertools.permutations(own, 2))
        mean[block] = sum(apart(block, k, i) for k, i in pairs) / len(pairs)
    for k, i in itertools.permutations(range(5), 2):
        common = [b for b in blocks if b in vectors[k] and b in vectors[i]]
        total = sum(apart(b, k, i) for b in common)
        relative, share = total / sum(mean[b] for b in common), sum(mean[b] for b in common) / sum(mean.values())
        total += sum(mean[b] for b in blocks if b not in common) * (share * relative + 1 - share)
        assert float(found[k, i]) == pytest.approx(total**0.5, rel=1e-5)
    assert torch.equal(found, found.T)
    assert not found.diagonal().any()
    assert found[5, :5].isinf().all()
    assert similarity.known.tolist() == [True] * 5 + [False]


def test_block_similarity_of_complete_clients_is_the_plain_one() -> None:
    vectors = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    plain = Similarity.empty(4, 6).refreshed(dict(enumerate(vectors)))
    blocks = BlockSimilarity.empty(4, {"a": 4, "b": 2})
    blocks = blocks.refreshed({c: {"a": v[:4], "b": v[4:]} for c, v in enumerate(vectors)})
    torch.testing.assert_close(blocks.distance, plain.distance)
    assert sum(s.vectors.shape[1] for s in BlockSimilarity.empty(4, {"a": 40, "b": 20}, 12).blocks.values()) == 12


def test_a_quantile_of_the_ratios_always_lets_some_train_alone() -> None:
    registry = ClientRegistry(("a", "b"), torch.full((8,), 10), torch.ones(8, 2, dtype=torch.bool))
    values = torch.tensor([[1.0, 1.0 + c / 100] for c in range(8)])
    ratios = replace(ImbalanceRatios.unknown(registry), values=values.double())
    chi = ratios.quantile("b", 0.5)
    assert sum(ratios.dominance("b", c) > chi for c in range(8)) == 4
    assert all(ratios.dominance("b", c) < 1.5 for c in range(8))  # the paper's smallest chi lets nobody
    for rule, some in (("quantile", True), ("threshold", False)):
        states = step_by_step(made("vectorised", ratio_rule=rule, dominance_threshold=math.inf, rounds=4))
        assert any(state.choice.train_weak for state in states) == some


def test_gamma_is_the_rows_of_the_clients_that_a_chosen_one_represents() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0], [6.0], [9.0]])
    similarity = Similarity.empty(6, 1).refreshed(dict(enumerate(points)))
    rows = {0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0, 4: 16.0, 5: 32.0}
    assert represented(similarity, [0, 3, 5], rows) == {0: 3.0, 3: 28.0}


def test_the_whole_classifier_counts_who_did_not_train_a_modality_with_what_was_sent() -> None:
    states = {}
    for average in ("trained", "cohort"):
        case = made(
            "vectorised", dominance_threshold=-math.inf, classifier_average=average, rounds=1,
            selector=Uniform(participation=4),
        )  # fmt: skip
        parts = assemble(case)
        parts.fed.begin(0)
        first = case.algorithm.init(parts.fed, parts.initial)
        parts.fed.begin(1)
        states[average] = case.algorithm.round(first, parts.fed)
    choice = states["cohort"].choice
    assert choice.train_all
    assert choice.train_weak
    rows = parts.fed.clients.rows_of(choice.picked)
    share = sum(rows[c] for c in choice.train_all) / sum(rows.values())
    strong = "a" if choice.weak == "b" else "b"
    name, sent = f"{strong}.fusion.weight", parts.initial
    wanted = sent[name] + share * (states["trained"].params[name] - sent[name])
    torch.testing.assert_close(states["cohort"].params[name], wanted)
    others = [n for n in sent if n != name]
    assert all(torch.equal(states["cohort"].params[n], states["trained"].params[n]) for n in others)


def test_deltas_cost_what_fedavg_costs_and_gradients_more() -> None:
    def sent(method: Any) -> int:
        case = recipe(method, "vectorised", clients=COMPLETE, egress={m: OPEN[m] for m in "ab"}, rounds=4)
        rows = [r for r in played(case)[2] if r["destination"] == "server" and r["round"] > 1]
        return sum(r["bytes"] for r in rows)

    fedavg = sent(algorithm("fedavg"))
    assert sent(paper()) > 1.5 * fedavg
    # this model is so small that prototypes and counts weigh as much as a tenth of it
    assert sent(algorithm("cmsfed")) < 1.25 * fedavg


def test_it_is_told_when_nobody_trains_the_weak_modality_alone() -> None:
    method = paper(dominance_threshold=math.inf)
    none = {"picked.by_ratio": 0.0}
    assert "ratio_rule = 'quantile'" in method.concerns([none] * 3)[0]
    assert "lower dominance_quantile" in algorithm("cmsfed").concerns([none])[0]
    assert method.concerns([none, {"picked.by_ratio": 1.0}]) == []
    assert paper(modality_selection=False).concerns([none]) == []
    events: list[str] = []
    case = made("vectorised", dominance_threshold=math.inf, rounds=3)
    finished = run(case, listeners=[lambda event, **facts: events.append(facts.get("text", ""))])
    assert any(text.startswith("WARNING: no client that owns all modalities was picked") for text in events)
    assert "weak modality alone in 1 rounds" in finished.rounds[0]["concerns"][0]
    assert "weak modality alone in 3 rounds" in finished.result["concerns"][0]
    assert finished.result["logged"]["picked.weak"] == 0.0


def test_the_result_names_no_part_that_had_an_effect_in_a_later_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CmsFed, "concerns", lambda own, logged: ["no effect"] if len(logged) < 3 else [])
    finished = run(made("vectorised", rounds=3))
    assert finished.rounds[0]["concerns"] == ["no effect"]
    assert finished.result["concerns"] == []


def test_clients_that_own_only_the_weak_modality_do_not_hide_that_the_ratio_rule_never_acts() -> None:
    clients = ClientsSpec(partition="iid", num=6, only={"a": [0], "b": [1]})
    for threshold, warnings in ((math.inf, 1), (-math.inf, 0)):
        result = run(made("vectorised", dominance_threshold=threshold, clients=clients)).result
        assert result["logged"]["picked.weak"] > 0.0
        assert (result["logged"]["picked.by_ratio"] == 0.0) == (threshold == math.inf)
        assert len(result["concerns"]) == warnings


def test_without_a_complete_client_the_cohort_is_random_and_trains_alone() -> None:
    clients = ClientsSpec(partition="iid", num=4, only={"a": [0, 1], "b": [2, 3]})
    _, state, _ = played(made("vectorised", clients=clients, rounds=2))
    assert state.choice.train_all == []
    assert len(state.choice.train_alone) == 4


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_three_modalities_run_and_agree(engine: str) -> None:
    toy = Toy(rows=300, classes=3, shapes={"a": (8,), "b": (8,), "c": (8,)}, snr={"a": 4.0, "b": 2.0, "c": 1.0})
    model = ModelSpec(embedding=6, encoders={m: {"kind": "mlp", "hidden": [8]} for m in "abc"})
    holdings = ClientsSpec(partition="iid", num=6, holdings=[["a", "b", "c"], ["a", "b", "c"], ["a", "b"]])
    case = recipe(paper(dominance_threshold=1.0), engine, data=toy, model=model, clients=holdings, egress=OPEN)
    _, state, _ = played(case)
    assert state.choice.weak in ("a", "b", "c")
    logged = case.algorithm.observe(state)
    assert logged["imbalance_ratio"] >= 1.0
    assert sum(logged[f"share.{m}"] for m in "abc") == pytest.approx(1.0)


def test_who_trains_alone_may_be_lost_and_the_round_goes_on() -> None:
    parts = assemble(made(dominance_threshold=float("-inf"), selector=Uniform(participation=4)))
    parts.fed.begin(1)
    method = parts.recipe.algorithm
    state = method.init(parts.fed, parts.initial)
    lost = losing(parts, "train_alone", *range(7))
    after = method.round(state, parts.fed)
    assert sorted(lost) == sorted(after.choice.train_alone)
    assert not same(after.params, state.params)

    parts.fed.begin(2)
    losing(parts, "train_all", *range(7))
    with refuses(TooFewReplies, "train_all and train_alone"):
        method.round(after, parts.fed)


def test_prototypes_of_one_modality_have_nothing_to_be_behind_of() -> None:
    method = paper(pce_target="batch_weak", modality_selection=False)
    parts = assemble(recipe(method, egress={m: OPEN[m] for m in "ab"}, clients=COMPLETE))
    context = parts.engine.context(0)
    scope = TrainingScope(context, ("a", "b"), ("a", "b"), full_strength=False, feature_norm=0.0)
    batch = context.model.zero_batch(4, "ab")
    z = scope.features(parts.initial, batch)
    size = z["a"].shape[1]
    known = Prototypes.received(torch.randn(4, size))
    assert pce_weights(scope, {"a": known}, z, batch, 1.0, "clip", "batch_weak") == {}
    assert set(pce_weights(scope, {"a": known, "b": known}, z, batch, 1.0, "clip", "batch_weak")) == {"a", "b"}


def test_equal_gradients_are_told() -> None:
    events: list[str] = []
    parts = assemble(made(), emit=Emitter([lambda event, **facts: events.append(facts.get("text", ""))]))
    parts.fed.begin(1)
    method = parts.recipe.algorithm
    state = method.round(method.init(parts.fed, parts.initial), parts.fed)
    assert not any("all gradients are alike" in text for text in events)
    flat = replace(state.gradients, distance=torch.zeros_like(state.gradients.distance))
    method.choose(state.with_(gradients=flat), parts.fed)
    assert any("all gradients are alike" in text for text in events)


def test_logged_numbers_of_a_choice() -> None:
    choice = Choice("b", [1, 2], {3: "b", 4: "b", 5: "a"})
    assert choice.share("b", 2) == pytest.approx((2 + 2) / (2 * 2 + 3))
    assert choice.share("a", 2) == pytest.approx((2 + 1) / (2 * 2 + 3))


def test_swapping_the_modalities_inverts_the_ratio() -> None:
    def ratio(names: tuple[str, str]) -> float:
        shapes = {names[0]: (8,), names[1]: (8,)}
        toy = Toy(rows=300, classes=3, shapes=shapes, snr={"a": 5.0, "b": 0.5}, seed=2)
        model = ModelSpec(embedding=6, encoders={m: {"kind": "mlp", "hidden": [8]} for m in names})
        clients = ClientsSpec(partition="iid", num=4)
        case = recipe(paper(), data=toy, model=model, clients=clients, egress={m: OPEN[m] for m in "ab"})
        logged = case.algorithm.observe(played(case)[1])
        return float(logged["imbalance_ratio"])

    forward, backward = ratio(("a", "b")), ratio(("b", "a"))
    assert forward > 1.0 > backward
    assert forward * backward == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(("alpha", "term"), [(0.0, "cross_entropy"), (1e30, "prototype_loss")])
def test_a_diverging_run_stops_with_client_and_term_named(engine: str, alpha: float, term: str) -> None:
    wild = made(engine, prototype_weight=alpha, train=Train(lr=1e12 if not alpha else 1e3, batch_size=16), rounds=6)
    with refuses(Diverged, f"{term} is not"):
        played(wild)


def test_class_and_gradient_edge_cases_survive() -> None:
    # one class a client: ratio 1 everywhere, no own-prototype loss; identical rows: no gradient differences
    clients = ClientsSpec(partition="classes-per-client", num=4, classes_per_client=1)
    for options in ({}, {"prototypes": "local"}):
        _, state, _ = played(made("vectorised", clients=clients, **options))
        assert all(bool(torch.isfinite(v).all()) for v in state.params.values())
    assert vector(state.params).isfinite().all()


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"parameters", "gradients", "prototypes", "statistic"}),
        ({"gradient_split": "delta"}, {"parameters", "prototypes", "statistic"}),
        ({"prototypes": "local"}, {"parameters", "gradients", "statistic"}),
        ({"prototypes": "local", "modality_selection": False}, {"parameters", "statistic"}),
    ],
    ids=["cmsfed", "delta", "cmsfed-local", "fedavg+pce"],
)
def test_only_what_a_configuration_uses_leaves_and_needs_permission(options: dict[str, Any], kinds: set[str]) -> None:
    policy = {block: {"server": sorted(kinds)} for block in ("a", "b", "shared")}
    made = recipe(paper(**options), "vectorised", egress=policy)
    refuse_forbidden(assemble(made))
    _, _, rows = played(made)
    assert {row["kind"] for row in rows if row["destination"] == "server"} == kinds
