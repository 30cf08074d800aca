"""FedOGM, FedPMR, FedProto and FedMSplit: numbers computed by hand, equality with FedAvg, independent code."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.test_partialfl import lacking
from oracles import baselines as oracle
from polyfed.algorithms.knowledge.fedproto import Shared, prototype_distance, prototype_scores
from polyfed.algorithms.modalities.fedmsplit import FedMSplit
from polyfed.algorithms.modalities.fedogm import FedOgm, coefficient, modality_score
from polyfed.algorithms.modalities.fedpmr import modality_weights
from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.tree import select
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes
from refusals import refuses
from world import algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
OPEN = {m: {"server": ["parameters", "prototypes", "statistic"]} for m in ("a", "b")}
COMPLETE = ClientsSpec(partition="dirichlet", num=6, alpha=1.0)
IMAGES = Toy(rows=240, classes=3, shapes={"a": (1, 8, 8), "b": (3, 8, 8)}, snr={"a": 4.0, "b": 1.0}, seed=5)
CONV = ModelSpec(embedding=6, encoders={"a": {"kind": "cnn4"}, "b": {"kind": "cnn4"}})


def made(name: str, engine: str = "vectorised", clients: Any = None, **options: Any) -> Any:
    changes: dict[str, Any] = {"clients": clients} if clients else {}
    rounds = options.pop("rounds", 3)
    return recipe(algorithm(name, **options), engine, egress=OPEN, rounds=rounds, **changes)


def batch(y: list[int], **x: torch.Tensor) -> Batch:
    return Batch(x, torch.tensor(y), torch.arange(len(y)))


# FedOGM


@pytest.mark.parametrize(("alpha", "k"), [(0.8, 0.0783314456), (0.1, 0.8026246798)])
def test_ogm_coefficients_of_the_paper(alpha: float, k: float) -> None:
    sure = {"a": torch.tensor(2.0, dtype=torch.float64), "v": torch.tensor(1.0, dtype=torch.float64)}
    assert float(coefficient("a", sure, alpha)) == pytest.approx(k, abs=1e-9)
    assert float(coefficient("v", sure, alpha)) == 1.0
    swapped = {"a": sure["v"], "v": sure["a"]}
    assert float(coefficient("v", swapped, alpha)) == pytest.approx(k, abs=1e-9)
    assert [float(coefficient(m, sure, alpha)) for m in "av"] == pytest.approx(oracle.ogm([2.0, 1.0], alpha))


def test_ogm_confidence_is_the_summed_probability_of_the_right_class() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.5, -0.5]])
    wanted = math.e**2 / (math.e + math.e**2) + math.e**0.5 / (math.e**0.5 + math.e**-0.5)
    assert float(modality_score(logits, batch([1, 0]), "a")) == pytest.approx(wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_ogm_without_strength_and_noise_is_fedavg_bit_for_bit(engine: str) -> None:
    _, ours, _ = played(made("fedogm", engine, alpha=0.0, ge=False, scale_params="all_weights"))
    _, theirs, _ = played(made("fedavg", engine))
    assert same(ours.params, theirs.params)


def stacked(engine: str) -> EngineSpec:
    """An engine that stacks convolutions on a CPU too, which it leaves alone by default."""
    return EngineSpec(name=engine, stack=6)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_ogm_touches_convolutions_only(engine: str) -> None:
    def after(name: str, **options: Any) -> Any:
        train = Train(lr=0.1, batch_size=0, steps=1)
        method = algorithm(name, train=train, selector=Uniform(participation=1.0), **options)
        changes = {"data": IMAGES, "model": CONV, "clients": COMPLETE, "rounds": 1, "engine": stacked(engine)}
        return played(recipe(method, **changes))[1].params

    ours, theirs = after("fedogm"), after("fedavg")
    moved = {n for n in ours if furthest({n: ours[n]}, {n: theirs[n]}) > 1e-6}
    assert moved == {n for n in ours if ours[n].dim() == 4}


@pytest.mark.parametrize("ge", [False, True])
def test_ogm_engines_agree_on_convolutions(ge: bool) -> None:
    def run(engine: str) -> Any:
        method = algorithm("fedogm", ge=ge, train=Train(lr=0.05, batch_size=16))
        return played(recipe(method, data=IMAGES, model=CONV, rounds=2, engine=stacked(engine)))[1].params

    assert furthest(run("sequential"), run("vectorised")) < 5e-5


def test_ogm_noise_has_the_deviation_of_the_gradient_and_its_own_key() -> None:
    method = FedOgm()
    data = type("ClientData", (), {"draw": lambda self, purpose: hash_of(purpose)})()
    grad = torch.randn(16, 8, 5, 5, generator=torch.Generator().manual_seed(0)) * 0.3
    step = torch.zeros((), dtype=torch.int32)
    noise = method._noise(data, "a.conv", grad, step)
    assert float(noise.std()) == pytest.approx(float(grad.std()), rel=0.05)
    assert abs(float(noise.mean())) < 0.02
    assert not torch.equal(noise, method._noise(data, "a.conv", grad, step + 1))
    assert not torch.equal(noise, method._noise(data, "b.conv", grad, step))


def hash_of(purpose: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(purpose)) % (1 << 31)


def test_ogm_stops_after_its_active_rounds_and_needs_something_to_scale() -> None:
    options = {"scale_params": "all_weights"}
    _, never, _ = played(made("fedogm", active_rounds=0, **options))
    _, plain, _ = played(made("fedavg"))
    assert same(never.params, plain.params)
    with refuses(RecipeError, "scale_params = 'all_weights'"):
        played(made("fedogm"))


# FedPMR


def test_pmr_weights_of_the_paper() -> None:
    # rho = 1.5: modality 1 is weaker, gamma = 0.5, beta = 0; rho = 0.5: beta = 1
    ahead = modality_weights({"0": torch.tensor(1.5), "1": torch.tensor(1.0)}, 1.0, "clip")
    assert [float(ahead["0"]), float(ahead["1"])] == pytest.approx([0.0, 0.5])
    behind = modality_weights({"0": torch.tensor(0.5), "1": torch.tensor(1.0)}, 1.0, "clip")
    assert [float(behind["0"]), float(behind["1"])] == pytest.approx([1.0, 0.0])
    hard = modality_weights({"0": torch.tensor(0.9), "1": torch.tensor(1.0)}, 2.0, "hard")
    assert [float(hard["0"]), float(hard["1"])] == [2.0, 0.0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimiser", [{"momentum": 0.9}, {"optimiser": "adam", "lr": 0.01}])
def test_pmr_without_strength_is_fedavg_bit_for_bit_epoch_by_epoch(engine: str, optimiser: dict[str, Any]) -> None:
    train = Train(**({"lr": 0.05, "batch_size": 16, "epochs": 3} | optimiser))
    _, ours, _ = played(made("fedpmr", engine, alpha=0.0, train=train))
    _, theirs, _ = played(made("fedavg", engine, train=train))
    assert same(ours.params, theirs.params)


def test_pmr_leaves_single_modality_clients_alone() -> None:
    clients = ClientsSpec(partition="iid", num=4, only={"a": [0, 1], "b": [2, 3]})
    _, ours, _ = played(made("fedpmr", clients=clients))
    _, theirs, _ = played(made("fedavg", clients=clients))
    assert same(ours.params, theirs.params)


@pytest.mark.parametrize("options", [{"coef": "hard"}, {"per": True, "mu": 0.5}, {"active_rounds": 1}], ids=str)
def test_every_pmr_switch_changes_the_run_and_engines_agree(options: dict[str, Any]) -> None:
    _, plain, _ = played(made("fedpmr"))
    _, one, _ = played(made("fedpmr", "sequential", **options))
    _, many, _ = played(made("fedpmr", **options))
    assert furthest(one.params, many.params) < 2e-5
    assert not same(plain.params, many.params)


def test_pmr_entropy_term_ends_with_its_epochs() -> None:
    _, ended, _ = played(made("fedpmr", per=True, per_epochs=0))
    _, plain, _ = played(made("fedpmr"))
    assert same(ended.params, plain.params)


# FedProto


def test_proto_term_is_the_mean_squared_gap_and_unknown_classes_count_zero() -> None:
    near = Prototypes(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([True, False]))
    z = torch.tensor([[2.0, 3.0], [5.0, 5.0]])
    assert float(prototype_distance(near, z, batch([0, 1]), "a")) == pytest.approx((1 + 4) / 2 / 2)


def test_nearest_prototype_adds_distances_of_modalities() -> None:
    near = {
        "a": Prototypes(torch.tensor([[0.0], [3.0]]), torch.ones(2, dtype=torch.bool)),
        "b": Prototypes(torch.tensor([[0.0], [9.0]]), torch.ones(2, dtype=torch.bool)),
    }
    z = {"a": torch.tensor([[1.0], [1.0]]), "b": torch.tensor([[1.0], [8.0]])}
    scores = prototype_scores(near, z, batch([0, 0]))
    assert scores.tolist() == [[-2.0, -10.0], [-9.0, -3.0]]
    near["b"] = Prototypes(near["b"].mean, torch.tensor([True, False]))
    scores = prototype_scores(near, z, batch([0, 0]))
    assert scores.argmax(1).tolist() == [0, 0], "a class without a prototype is never the nearest"
    assert bool(scores.isfinite().all())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_that_lacks_all_modalities_with_prototypes_is_predicted_by_the_model(engine: str) -> None:
    parts = lacking(
        made("fedproto", engine, ClientsSpec(partition="iid", num=4, personal_test=0.4), mode="original"), 2
    )
    near = {"b": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))}  # there are none of modality a yet
    parts.fed.begin(1)
    told = parts.fed.ask(parts.algorithm.score_own, range(4), Shared({}, near))
    columns, test = parts.population.columns, parts.population.test
    by_model = 0
    for client, reply in told.items():
        rows = test[client]
        x, there = {m: columns.modalities[m].take(rows) for m in "ab"}, columns.present["b"][rows]
        part = Batch(x, columns.label[rows], torch.arange(len(rows)), present={"b": there})
        z = parts.model.vectors(parts.initial, part)
        scores = prototype_scores({"b": Prototypes.received(near["b"])}, z, part)
        logits = parts.model.logits(parts.initial, part)
        right = torch.where(there, scores.argmax(1), logits.argmax(1)) == part.y
        assert float(reply.sums.sum()) == float(right.sum())
        by_model += int((logits.argmax(1) != 0)[~there].sum())
    assert by_model > 0, "the model predicts some of these rows as another class than the first"


@pytest.mark.parametrize("engine", ENGINES)
def test_proto_without_strength_is_fedavg_bit_for_bit_and_the_first_round_always(engine: str) -> None:
    _, theirs, _ = played(made("fedavg", engine))
    for options in ({"alpha_p": 0.0}, {"active_rounds": 0}):
        _, ours, _ = played(made("fedproto", engine, **options))
        assert same(ours.params, theirs.params)
    _, first, _ = played(made("fedproto", engine, rounds=1))
    assert same(first.params, played(made("fedavg", engine, rounds=1))[1].params)
    assert not same(played(made("fedproto", engine))[1].params, theirs.params)


@pytest.mark.parametrize("options", [{}, {"predict_by": "logits"}, {"proto_weight": "uniform"}, {"lam": 5.0}], ids=str)
def test_original_proto_sends_no_parameters_and_engines_agree(options: dict[str, Any]) -> None:
    clients = ClientsSpec(partition="iid", num=6, personal_test=0.3)
    runs = [played(made("fedproto", e, clients, mode="original", **options)) for e in ENGINES]
    for parts, state, rows in runs:
        assert {row["kind"] for row in rows} <= {"prototypes", "statistic"}
        measured = parts.algorithm.evaluate(state, parts.fed)
        assert "global" not in measured.metrics
        assert 0.0 < measured.metrics["personal"]["mean"] < 1.0
    one, many = (run[1].prototypes for run in runs)
    assert all(torch.allclose(one[m].mean, many[m].mean, atol=1e-4) for m in "ab")
    assert furthest(runs[0][0].engine.locals[0], runs[1][0].engine.locals[0]) < 1e-4


def test_original_proto_without_its_term_is_local_training() -> None:
    clients = ClientsSpec(partition="iid", num=6, personal_test=0.3)
    ours, _, _ = played(made("fedproto", "sequential", clients, mode="original", lam=0.0, predict_by="logits"))
    theirs, _, _ = played(recipe(algorithm("local"), clients=clients))
    assert all(same(tree, theirs.engine.locals[client]) for client, tree in ours.engine.locals.items())


@pytest.mark.parametrize("mode", ["mm_fedavg", "original"])
def test_proto_at_one_length_bounds_what_prototypes_can_be(mode: str) -> None:
    _, one, _ = played(made("fedproto", "sequential", mode=mode, feature_norm=0.5))
    _, many, _ = played(made("fedproto", mode=mode, feature_norm=0.5))
    _, raw, _ = played(made("fedproto", mode=mode))
    for m in "ab":
        assert torch.allclose(one.prototypes[m].mean, many.prototypes[m].mean, atol=1e-5)
        assert float(one.prototypes[m].mean.norm(dim=-1).max()) <= 0.5 + 1e-6  # a mean of vectors of this length
        assert float(raw.prototypes[m].mean.norm(dim=-1).max()) > 0.5


def test_prototypes_need_permission() -> None:
    with refuses(EgressError, "Learned.prototypes"):
        played(recipe(algorithm("fedproto")))


# FedMSplit


def split_case(**options: Any) -> tuple[FedMSplit, Any, dict[int, Any]]:
    method = algorithm("fedmsplit", **options)
    parts = assemble(recipe(method))
    generator = torch.Generator().manual_seed(0)
    trained = {
        client: {
            n: v + 0.3 * torch.randn(v.shape, generator=generator)
            for n, v in select(parts.initial, parts.fed.clients[client].blocks).items()
        }
        for client in range(6)
    }
    assert isinstance(method, FedMSplit)
    return method, parts, trained


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_split_mixing_equals_numpy(temperature: float) -> None:
    method, parts, trained = split_case(temperature=temperature)
    mixed = method.mixed(trained, parts.fed)
    holds = parts.population.holds.numpy()
    owners = {"a": holds[:, 0].tolist(), "b": holds[:, 1].tolist(), "shared": [True] * 6}
    width = {"a": 0, "b": 0, "shared": 0}
    flat: dict[str, list[np.ndarray]] = {name: [] for name in owners}
    for name in owners:
        for client in range(6):
            own = [trained[client][n].flatten().numpy() for n in sorted(trained[client]) if n.startswith(f"{name}.")]
            flat[name].append(np.concatenate(own) if own else np.zeros(width[name] or 1))
    weights = oracle.split_mix({n: v for n, v in flat.items()}, owners, temperature)  # type: ignore[misc]
    for b, name in enumerate(owners):
        assert np.allclose(weights[b][owners[name]].sum(1), 1.0)
        for client in np.flatnonzero(owners[name]):
            keys_ = [n for n in sorted(trained[client]) if n.startswith(f"{name}.")]
            found = np.concatenate([mixed[int(client)][n].flatten().numpy() for n in keys_])
            wanted = sum(weights[b][client, j] * flat[name][j] for j in np.flatnonzero(owners[name]))
            assert np.allclose(found, wanted, atol=1e-5)


def test_split_of_identical_clients_changes_nothing_and_hot_softmax_is_the_plain_mean() -> None:
    method, parts, trained = split_case()
    same_models = {c: select(parts.initial, parts.fed.clients[c].blocks) for c in range(6)}
    mixed = method.mixed(same_models, parts.fed)
    assert all(furthest(mixed[c], same_models[c]) < 1e-6 for c in range(6))
    hot, parts, trained = split_case(temperature=1e9)
    pair = {c: trained[c] for c in (0, 2)}  # both own both modalities
    found = hot.mixed(pair, parts.fed)
    mean = {n: (pair[0][n] + pair[2][n]) / 2 for n in pair[0]}
    assert furthest(found[0], mean) < 1e-6


def test_split_block_of_a_single_owner_stays() -> None:
    method, parts, trained = split_case()
    alone = method.mixed({1: trained[1], 3: trained[3]}, parts.fed)  # one has a, the other b
    assert furthest(select(alone[1], ["a"]), select(trained[1], ["a"])) < 1e-6
    assert furthest(select(alone[3], ["b"]), select(trained[3], ["b"])) < 1e-6


def test_split_keeps_the_models_of_clients_outside_the_cohort_and_can_be_fedavg() -> None:
    parts, state, _ = played(made("fedmsplit", selector=Uniform(participation=2), rounds=1))
    assert len(state.models) == 2
    parts.fed.begin(2)
    after = parts.algorithm.round(state, parts.fed)
    cohort = set(after.models) - set(state.models)
    rested = [c for c in state.models if same(state.models[c], after.models[c])]
    assert len(cohort) + len(rested) >= 2
    _, lower, _ = played(made("fedmsplit", mode="block_mean"))
    assert same(lower.params, played(made("fedavg"))[1].params)


@pytest.mark.parametrize("options", [{"similarity": "dot"}, {"lam": 0.1}, {"temperature": 1.0}], ids=str)
def test_every_split_switch_changes_the_run_and_engines_agree(options: dict[str, Any]) -> None:
    _, plain, _ = played(made("fedmsplit"))
    _, one, _ = played(made("fedmsplit", "sequential", **options))
    _, many, _ = played(made("fedmsplit", **options))
    assert furthest(one.params, many.params) < 2e-5
    assert not same(plain.params, many.params)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedogm", {"alpha": 0.1, "ge": False, "active_rounds": 3, "scale_params": "all_weights"}),
        ("fedpmr", {"alpha": 2.0, "coef": "hard", "active_rounds": 9, "per": True, "mu": 0.001, "per_epochs": 4}),
        ("fedproto", {"mode": "original", "proto_weight": "uniform", "lam": 0.5, "predict_by": "logits"}),
        ("fedproto", {"alpha_p": 2.0, "active_rounds": 5, "feature_norm": 6.0}),
        ("fedmsplit", {"mode": "block_mean", "lam": 0.1, "similarity": "dot", "temperature": 0.5}),
    ],
)
def test_every_switch_is_reachable_from_a_recipe(name: str, options: dict[str, Any]) -> None:
    table = {"data": {"name": "toy"}, "clients": {"num": 4}, "model": {"encoders": {m: {"kind": "mlp"} for m in "ab"}}}
    built = parse_recipe(table | {"algorithm": {"name": name, **options}}).algorithm
    assert all(getattr(built, key) == value for key, value in options.items())


def test_msplit_keeps_its_own_when_all_attention_is_on_a_client_without_shared_modalities() -> None:
    parts = assemble(made("fedmsplit", similarity="dot", selector=Uniform(participation=1.0)))
    method, clients = parts.recipe.algorithm, parts.fed.clients
    one = next(k for k in clients if clients[k].modalities == ("a",))
    other = next(k for k in clients if clients[k].modalities == ("b",))
    trained = {
        k: {n: v * 1e4 for n, v in select(parts.initial, [*clients[k].modalities, "shared"]).items()}
        for k in (one, other)
    }
    trained[other] = {n: v * 1e3 for n, v in trained[other].items()}
    mixed = method.mixed(trained, parts.fed)
    assert all(bool(torch.isfinite(v).all()) for tree in mixed.values() for v in tree.values())
    assert same(mixed[one], trained[one])


def test_ogm_refuses_an_encoder_without_gradients_to_scale() -> None:
    spec = ModelSpec(embedding=6, encoders={"a": {"kind": "cnn4"}, "b": {"kind": "mlp"}})
    case = recipe(algorithm("fedogm"), data=IMAGES, model=spec, clients=COMPLETE)
    with refuses(RecipeError, "none to train"):
        assemble(case)
    assemble(replace(case, algorithm=algorithm("fedogm", scale_params="all_weights")))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_pmr_at_one_length_does_not_reward_longer_features(engine: str) -> None:
    grown = {}
    for norm in (0.0, 1.0):
        method = algorithm("fedpmr", alpha=20.0, coef="hard", feature_norm=norm)
        parts, state, _ = played(recipe(method, engine, rounds=6))
        rows, columns = parts.population.train[0], parts.population.columns
        x = {m: column.take(rows) for m, column in columns.modalities.items()}
        batch = Batch(x=x, y=columns.label[rows], rows=torch.arange(len(rows)))
        grown[norm] = float(parts.fed.context.model.vectors(state.params, batch)["b"].norm(dim=1).mean())
    assert grown[1.0] < grown[0.0]
