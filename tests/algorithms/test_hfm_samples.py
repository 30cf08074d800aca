"""HFM where devices hold samples of their own: overlap by ids, several devices of a modality, labels at one party."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import polyfed
from algorithms.silo_world import Silos
from algorithms.test_hfm import ENGINES, INSIDE, Unreached, method, spied
from oracles.hfm import Party, Settings, hfm, hfm_by_id
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.core.errors import DataError, RecipeError, TooFewReplies
from polyfed.data import ClientsSpec
from polyfed.data.partitions.shards import Shards
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.running.assembly import assemble
from refusals import refuses, warned
from world import furthest, played, recipe, same

TWO = [["a"], ["b"]]
HOW = Settings(q=3, r=2)

PARTLY = Silos([40, 30], [TWO, TWO], ids={0: list(range(32)), 1: list(range(8, 40)), 3: list(range(5, 30))[::-1]})
"""Devices 0 and 1 share 24 of 40 samples. Device 3 holds 25 of the samples of device 2, in the opposite order."""

SEVERAL = Silos(
    [40, 20],
    [[["a"], ["b"], ["b"]], TWO],
    ids={1: [*range(0, 40, 2), 1, 3], 2: [*range(1, 40, 2), 0]},
)
"""In silo 0, the samples of b are dealt to two devices, which hold three of them both."""


def parties(world: Silos) -> list[list[Party]]:
    """The same devices for the oracle."""
    found: list[list[Party]] = [[] for _ in world.sizes]
    for device, silo in enumerate(world.population.silo.tolist()):  # type: ignore[union-attr]
        rows, (name,) = world.population.train[device], world.population.modalities(device)
        x = world.columns.modalities[name].take(rows)
        found[silo].append(Party(name, world.columns.ids[rows].tolist(), x, world.columns.label[rows]))
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("labels_at", ["", "a"], ids=["labels-everywhere", "labels-at-a"])
@pytest.mark.parametrize("overlap", ["common", "all"])
@pytest.mark.parametrize("world", [PARTLY, SEVERAL], ids=["partial-overlap", "several-devices-of-b"])
def test_training_on_samples_matched_by_id_equals_an_independent_loop(
    world: Silos, overlap: str, labels_at: str, engine: str
) -> None:
    state, _, _ = world.play(method(overlap=overlap, labels_at=labels_at), engine=engine)
    assert furthest(state.params, hfm_by_id(parties(world), world.initial, 2, HOW, overlap, labels_at)) < 3e-5


def test_the_samples_of_equal_devices_are_the_same_under_every_overlap() -> None:
    world = Silos([30, 20], [TWO, TWO])
    exact, common, everything = (world.play(method(overlap=o))[0].params for o in ("exact", "common", "all"))
    assert furthest(exact, common) < 1e-6
    assert same(common, everything)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_labels_of_devices_that_hold_none_are_never_read(name: str, engine: str) -> None:
    """The same run with every label of device b set to class 0, which stands for a party without labels."""
    found = []
    for hide in (False, True):
        world = Silos([40, 30], [TWO, TWO])
        if hide:
            garbled(world, [1, 3])
        state, runs, _ = world.play(method(name, labels_at="a", mu=0.1), engine=engine)
        found.append((state.params if name == "hfm" else state.heads[0], runs.locals[1]))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert not same(found[0][1], {n: world.initial.get(n, v) for n, v in found[0][1].items()}), "device b has trained"


def garbled(world: Silos, devices: list[int]) -> None:
    """Append a copy of the table whose labels are all 0, and let these devices hold the rows of the copy."""
    table, size = world.columns, len(world.columns)
    twice = {m: replace(c, values=torch.cat([c.values, c.values])) for m, c in table.modalities.items()}
    columns = replace(
        table,
        modalities=twice,
        label=torch.cat([table.label, torch.zeros_like(table.label)]),
        split=torch.cat([table.split, torch.full_like(table.split, 3)]),
        ids=torch.cat([table.ids, table.ids]),
    )
    held = world.population.train
    shards = [held[k] + size * (k in devices) for k in range(len(held))]
    world.columns = columns
    world.population = replace(world.population, columns=columns, train=Shards.of([shard.numpy() for shard in shards]))


def test_with_labels_at_one_party_one_local_round_is_a_step_of_centralised_sgd() -> None:
    """Q = 1: the gradients that the party sends are those of the whole model."""
    world = Silos([30, 30], [TWO, TWO])
    one = {"local_rounds": 1, "exchanges": 1, "labels_at": "b"}
    state, _, _ = world.play(method(**one), rounds=3)
    everywhere, _, _ = world.play(method(local_rounds=1, exchanges=1), rounds=3)
    assert furthest(state.params, everywhere.params) < 1e-5


def test_messages_with_labels_at_one_party_follow_the_policy_and_are_counted() -> None:
    world = Silos([40], [TWO])
    state, runs, _ = world.play(method(labels_at="a"), rounds=1)
    rows = list(runs.ledger.rows())
    slopes = [row for row in rows if row["message"] == "Slopes"]
    assert {(row["client"], row["block"], row["kind"], row["destination"]) for row in slopes} == {
        (0, "b", "embeddings", "silo")
    }
    assert sum(row["bytes"] for row in slopes) == 2 * 40 * 3 * 4
    inside = ("Embedded", "Copy", "Exchange", "Sample", "Forward", "Slopes", "Guidance", "Followed")
    assert state.silo_bytes == sum(row["bytes"] for row in rows if row["message"] in inside)
    assert not [row for row in rows if row["message"] in ("Copy", "Exchange") and row["client"] == 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_c_vfl_head_and_a_proximal_term_work_with_partial_overlap(engine: str) -> None:
    found = [
        world.play(method(overlap="all", head_update="server", mu=0.2, labels_at=at), engine=engine)[0].params
        for world in (PARTLY, SEVERAL)
        for at in ("", "b")
    ]
    assert all(bool(torch.stack([v.isfinite().all() for v in one.values()]).all()) for one in found)
    other = PARTLY.play(method(overlap="all", head_update="server", mu=0.2), engine=ENGINES[0])[0].params
    assert furthest(found[0], other) < 1e-5


@pytest.mark.parametrize(
    ("world", "options", "error", "words"),
    [
        (PARTLY, {}, DataError, "not aligned"),
        (SEVERAL, {}, RecipeError, "clients.holdings: modality twice"),
        (Silos([40], [TWO], ids={0: list(range(20)), 1: list(range(20, 40))}), {"overlap": "common"}, DataError,
         "no usable sample"),
        (Silos([40], [TWO], ids={1: [0, 0, 1]}), {"overlap": "all"}, DataError, "ids twice"),
        (PARTLY, {"labels_at": "c"}, RecipeError, "algorithm.labels_at: no modality"),
        (Silos([40, 20], [TWO, [["b"]]]), {"labels_at": "a"}, RecipeError, "algorithm.labels_at: nobody has labels"),
    ],
)  # fmt: skip
def test_samples_and_labels_that_do_not_fit_are_refused(
    world: Silos, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with refuses(error, words):
        world.play(method(**options))


def test_contradicting_options_are_refused() -> None:
    with refuses(RecipeError, "algorithm.keep_optimiser: labels_at"):
        method(labels_at="a", keep_optimiser=True)
    with refuses(RecipeError, "clients.holdings: modality twice"):
        SEVERAL.play(method("vfl", overlap="all"))
    with refuses(RecipeError, "algorithm.overlap: 'some'"):
        method(overlap="some")


def test_positions_and_means_of_samples() -> None:
    ids = {0: torch.tensor([7, 3, 5]), 1: torch.tensor([5, 9]), 2: torch.tensor([9, 7])}
    owned = {0: ("a",), 1: ("b",), 2: ("b",)}
    common = SiloSamples.of(0, ids, owned, "common", [0, 1, 2])
    assert common.count == 2  # 5 and 7
    assert {c: p.tolist() for c, p in common.places.items()} == {0: [2, 0], 1: [0, -1], 2: [-1, 1]}
    everything = SiloSamples.of(0, ids, owned, "all", [0, 1, 2])
    assert everything.count == 4  # 3, 5, 7, 9
    batch = torch.tensor([3, 1])  # ids 9 and 5
    sent = {1: {"b": torch.tensor([[1.0], [4.0]])}, 2: {"b": torch.tensor([[3.0]])}}
    assert [everything.own_rows(batch, c).tolist() for c in (0, 1, 2)] == [[2], [1, 0], [0]]
    assert everything.pooled(batch, sent)["b"].tolist() == [[2.0], [4.0]]
    assert SiloSamples.of(0, ids, owned, "all", [1]).count == 2  # only device 1 has labels
    apart = SiloSamples.of(0, {0: ids[0], 1: ids[1][1:]}, owned, "common", [0, 1])
    assert (apart.count, apart.rows(0), apart.rows(1)) == (0, 0, 0)
    totals = everything.per_holder(torch.tensor([[6.0], [6.0]]), batch, [1, 2])
    assert totals.tolist() == [[3.0], [6.0]]  # devices 1 and 2 both hold 9; only device 1 holds 5


# silos and devices that drop out


@pytest.mark.parametrize("task", ["identify", "adopt"])
def test_a_silo_that_drops_out_sits_out_and_comes_back(task: str) -> None:
    """Silo 1 is not reached in round 1 (or before, for its ids), and takes part again from round 2 on."""
    world = Silos([40, 23, 17], [TWO] * 3)
    algorithm = method()
    fed, runs = world.federation(algorithm)
    fed.engine = Unreached(runs, task, {2, 3})  # type: ignore[assignment]
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    silos = world.data()
    first = hfm([silos[0], silos[2]], world.initial, 1, HOW)
    assert furthest(state.params, first) < 2e-5
    fed.begin(2)
    state = algorithm.round(state, fed)
    assert furthest(state.params, hfm(silos, first, 1, HOW)) < 2e-5


def test_a_device_whose_ids_were_never_compared_does_not_train() -> None:
    world = Silos([40], [TWO], ids={1: [*range(1, 40), 0]})
    algorithm = method()
    fed, _ = world.federation(algorithm, lost={("identify", 1)})
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    assert list(state.edges[0].ids) == [0]
    seen = spied(fed)
    fed.begin(1)
    state = algorithm.round(state, fed)
    assert set(seen["to practise"]) == {0}
    fed.engine.lost = set()  # type: ignore[attr-defined]
    fed.begin(2)
    with refuses(DataError, "another order"):
        algorithm.round(state, fed)


def test_a_run_without_any_ids_stops() -> None:
    world = Silos([40], [TWO])
    with pytest.raises(TooFewReplies):
        world.play(method(), lost={("identify", 0), ("identify", 1)})


# recipes


PERSONAL = {"evaluation": Evaluation(every=1)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"silo_overlap": 0.6},
        {"silo_overlap": 0.6, "holdings": [["a"], ["b"], ["b"]]},
        {"silo_partition": "dirichlet", "alpha": 0.5, "min_size": 5},
        {"silo_sizes": [3.0, 1.0]},
    ],
    ids=["equal", "overlap", "two-devices-of-b", "dirichlet", "sizes"],
)
def test_the_scores_of_silos_are_those_of_predict_across_their_devices(options: dict[str, Any]) -> None:
    silos = {} if "silo_sizes" in options else {"silos": 2}
    clients = ClientsSpec(partition="silos", personal_test=0.4, **silos, **options)
    overlap = "all" if options.get("silo_overlap") else "exact"
    made = recipe(method(**PERSONAL, overlap=overlap), clients=clients, egress=INSIDE)
    run, parts = polyfed.run(made), assemble(made)
    own, columns, silo = parts.population.test, parts.population.columns, parts.fed.clients.silo
    assert own is not None
    assert silo is not None
    scores = run.rounds[-1]["personal_accuracy"]
    assert [int(silo[int(client)]) for client in scores] == [0, 1], "one score for each silo"
    for first, score in scores.items():
        members = [k for k in range(len(silo)) if silo[k] == silo[int(first)]]
        rows = own[int(first)]
        there = {
            m: torch.stack([torch.isin(rows, own[k]) for k in members if m in parts.population.modalities(k)]).any(0)
            for m in "ab"
        }
        x = {m: column.take(rows) for m, column in columns.modalities.items()}
        logits = run.predict(x, client=int(first), present=there)
        assert run.models.clients[int(first)] == ("a", "b")
        assert float((logits.argmax(1) == columns.label[rows]).double().mean()) == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_a_silo_without_a_common_test_sample_has_no_score(name: str) -> None:
    """Each device has test rows, but the devices of the second silo have no test row in common."""
    clients = ClientsSpec(partition="silos", silos=2, silo_sizes=[7.0, 1.0], silo_overlap=0.1, personal_test=0.2)
    made = recipe(method(name, **PERSONAL, overlap="common"), clients=clients, egress=INSIDE, rounds=1)
    parts = assemble(made)
    test = parts.population.test
    assert test is not None
    common = [torch.isin(test[k], test[k + 1]).sum().item() for k in (0, 2)]
    assert common[0] > 0
    assert common[1] == 0
    assert all(len(test[k]) for k in range(4))
    run = polyfed.run(made)
    assert set(run.rounds[-1]["personal_accuracy"]) == {"0"}


def test_the_device_that_scores_a_silo_holds_a_usable_sample() -> None:
    """Device 0 has no sample in common with device 2, so device 1 computes the score."""
    world = Silos(
        [40], [[["a"], ["a"], ["b"]]], ids={0: list(range(10)), 1: list(range(10, 40)), 2: list(range(20, 40))}
    )
    world.population = replace(world.population, test=world.population.train)
    algorithm = method(**PERSONAL, overlap="common")
    fed, _ = world.federation(algorithm)
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    seen = spied(fed)
    measured = algorithm.evaluate(state, fed)
    assert set(seen["to score_silo"]) == {1}
    assert set(measured.personal) == {0}


def test_numbers_of_rows_do_not_pass_as_ids(tmp_path: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    x = {m: torch.randn(60, 4, generator=draw) for m in "ab"}
    label = torch.arange(60) % 3
    options: dict[str, Any] = {
        "labels": label,
        "clients": {"partition": "silos", "silos": 2},
        "algorithm": {"name": "hfm"},
        "egress": INSIDE,
        "rounds": 1,
    }
    with refuses(DataError, "no sample ids"):
        polyfed.run(data=x, **options)
    polyfed.run(data=x, ids="rows", **options)
    polyfed.run(data=x, ids=torch.arange(60) * 7, **options)
    for wrong, words in ((torch.zeros(60, dtype=torch.int64), "repeats some ids"), ("name", "an array")):
        with refuses((DataError, RecipeError), words):
            polyfed.run(data=x, ids=wrong, **options)
    polyfed.run(data=x, **(options | {"clients": {"num": 2}, "algorithm": {"name": "fedavg"}, "egress": {}}))


def test_a_row_numbered_file_of_a_recipe_is_refused_with_the_line_to_add(tmp_path: Any) -> None:
    import numpy as np

    from polyfed.data.sources import Npz

    arrays = {m: np.random.default_rng(1).normal(size=(60, 4)) for m in "ab"}
    np.savez(tmp_path / "own.npz", label=np.arange(60) % 3, **arrays)
    for ids, fine in (("id", False), ("rows", True)):
        source = Npz(path=str(tmp_path / "own.npz"), modalities=("a", "b"), ids=ids)
        made = recipe(method(), data=source, clients=ClientsSpec(partition="silos", silos=2), egress=INSIDE)
        if fine:
            played(made)
            continue
        with refuses(DataError, "ids = 'rows'"):
            played(made)


def test_vfl_warns_and_runs_with_personal_rows_and_labels_at_one_party() -> None:
    clients = ClientsSpec(partition="silos", silos=2, personal_test=0.3)
    rules = {**INSIDE, "shared": {**INSIDE["shared"], "server": ["statistic"], "accept": ["parameters"]}}
    made = recipe(method("vfl", labels_at="b", **PERSONAL), clients=clients, egress=rules)
    with warned("silos evaluate them"):
        run = polyfed.run(made)
    assert set(run.rounds[-1]["personal_accuracy"]) == {"0", "2"}


def test_the_placebo_draws_the_same_rows_under_every_overlap() -> None:
    world = Silos([30], [TWO])
    found = [world.play(method(overlap=o, placebo="shuffled", mu=0.1))[0].params for o in ("common", "all")]
    assert same(found[0], found[1])
