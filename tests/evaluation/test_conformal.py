"""Conformal prediction: sets as in independent implementations, which hold the truth as often as promised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from laws.rows import ROWS
from laws.test_laws import NAMES, world
from polyfed.core.batch import Batch
from polyfed.core.errors import CheckpointError, DataError, EgressError, PolyfedError, RecipeError
from polyfed.data import ClientsSpec, Population
from polyfed.data.sources import Toy
from polyfed.evaluation.conformal import (
    BINS,
    NOISY_BINS,
    PER_OCTAVE,
    SIZE_BINS,
    Conformal,
    ScoreCounts,
    class_bins,
    counts_of,
    error_bins,
    possible_counts,
    prediction_sets,
    upper_edge,
)
from polyfed.evaluation.scores import Evaluation
from polyfed.evaluation.shrinkage import LEVELS, expected_sizes, level_of, sizes_of
from polyfed.experiment.checks.check import plan
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.objective import CLASSES
from polyfed.objective.regression import Regression
from polyfed.objective.report import raised
from polyfed.privacy.egress.requirements import Requirements
from polyfed.report.scores import sets_words
from polyfed.selection import Uniform
from refusals import refuses
from world import algorithm, played, recipe

SHARED = Path(__file__).parents[3] / "shared" / "data"


def drawn(seed: int, rows: int = 300, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (rows,), generator=draw)
    logits = torch.randn(rows, classes, generator=draw) + 2.0 * torch.nn.functional.one_hot(y, classes)
    return logits, y


def batch_of(y: torch.Tensor) -> Batch:
    return Batch(x={}, y=y, rows=torch.arange(len(y)))


def sets_of(kind: Any, calibration: Any, test: torch.Tensor, coverage: float) -> torch.Tensor:
    """The sets of test rows; the calibration rows are counted as two clients."""
    logits, y = calibration
    shape = (logits.shape[1] if kind == "class" else 1, BINS + 1)
    halves = [slice(0, 77), slice(77, None)]
    counts = sum(counts_of(kind, CLASSES, shape, logits[h], batch_of(y[h])) for h in halves)
    conformal = Conformal(kind, "all", {"*": {"a": counts}})  # type: ignore[dict-item]
    used = {"a": torch.ones(len(test), dtype=torch.bool)}
    found = prediction_sets(conformal, test, used, "*", coverage, of_classes=True).sets
    assert found is not None
    return found


def by_hand(kind: str, scores: np.ndarray, y: np.ndarray, own: np.ndarray, coverage: float) -> np.ndarray:
    """Which classes are in the sets, by sorting: `scores` (n,) of calibration rows, `own` (m, C) of test rows."""
    found = np.zeros(own.shape, bool)
    for c in range(own.shape[1]):
        mine = np.sort(scores[y == c] if kind == "class" else scores)
        rank = int(np.ceil((len(mine) + 1) * coverage - 1e-9))
        found[:, c] = own[:, c] <= mine[rank - 1]
    return found


@pytest.mark.parametrize("kind", ["split", "class"])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_sets_are_those_of_sorted_scores(kind: str, coverage: float) -> None:
    logits, y = drawn(1)
    test, _ = drawn(2)
    found = sets_of(kind, (logits, y), test, coverage).numpy()
    bins, own = class_bins(logits).gather(1, y[:, None])[:, 0].numpy(), class_bins(test).numpy()
    assert (found == by_hand(kind, bins, y.numpy(), own, coverage)).all()
    raw = (1 - logits.double().softmax(1)).gather(1, y[:, None])[:, 0].numpy()
    exact = by_hand(kind, raw, y.numpy(), (1 - test.double().softmax(1)).numpy(), coverage)
    assert (found >= exact).all(), "bins only add classes"
    assert (found != exact).mean() < 0.01


@pytest.mark.parametrize("kind", ["split", "class"])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_sets_are_those_of_crepes(kind: str, coverage: float) -> None:
    logits, y = drawn(1)
    test, _ = drawn(2)
    found = sets_of(kind, (logits, y), test, coverage).numpy()
    bins, own = class_bins(logits).gather(1, y[:, None])[:, 0].numpy(), class_bins(test).numpy()
    crepes = pytest.importorskip("crepes", reason="the extra polyfed[dev] is not installed")
    for c in range(4):
        classifier = crepes.ConformalClassifier()
        classifier.fit((bins[y.numpy() == c] if kind == "class" else bins).astype(float))
        # not their `predict_set`, which also keeps a class whose p-value is exactly 1 - coverage
        p = np.asarray(classifier.predict_p(own[:, [c]].astype(float), smoothing=False))[:, 0]
        assert (found[:, c] == (p > 1 - coverage + 1e-12)).all()


def test_intervals_are_those_of_sorted_errors_up_to_the_width_of_a_bin() -> None:
    draw = torch.Generator().manual_seed(3)
    objective, y = Regression(), torch.randn(200, 2, generator=draw)
    y[:50, 1] = torch.nan
    outputs = torch.randn(200, 2, generator=draw) * 3
    shape = (2, 2 * 20 * PER_OCTAVE + 2)
    counts = counts_of("split", objective, shape, outputs, batch_of(y))
    assert counts.sum(1).tolist() == [200, 150]
    conformal = Conformal("split", "all", {"*": {"a": counts}})
    used = {"a": torch.ones(5, dtype=torch.bool)}
    test = torch.randn(5, 2, generator=draw)
    found = prediction_sets(conformal, test, used, "*", 0.9, of_classes=False)
    assert found.low is not None
    assert found.high is not None
    for target in range(2):
        errors = (outputs[:, target] - y[:, target]).abs()
        errors = errors[~errors.isnan()].sort().values.double()
        exact = float(errors[int(np.ceil((len(errors) + 1) * 0.9)) - 1])
        half = ((found.high - found.low) / 2)[:, target]
        assert bool((half >= exact).all())
        assert bool((half <= exact * 2 ** (1 / PER_OCTAVE) * (1 + 1e-9)).all())
        assert torch.allclose((found.high + found.low)[:, target] / 2, test[:, target].double())


def test_the_exact_width_of_an_interval_is_that_of_crepes() -> None:
    crepes = pytest.importorskip("crepes", reason="the extra polyfed[dev] is not installed")
    errors = torch.rand(187, generator=torch.Generator().manual_seed(5)).double() * 3
    counts = torch.bincount(error_bins(errors), minlength=2 * 20 * PER_OCTAVE + 2)[None]
    limit, _ = Conformal("split", "all", {"*": {"a": counts}}).limits("*", "a", 0.9)
    regressor = crepes.ConformalRegressor()
    regressor.fit(errors.numpy())
    theirs = regressor.predict_int(np.zeros(1), confidence=0.9)
    assert int(error_bins(torch.tensor(theirs[0, 1]))) == int(limit)


def test_bins_cover_every_score() -> None:
    odd = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [1e30, -1e30], [0.0, 0.0]])
    assert class_bins(odd).tolist() == [[BINS, BINS], [BINS, BINS], [0, BINS], [BINS // 2, BINS // 2]]
    errors = torch.tensor([0.0, 1e-30, 1.0, 1.0001, 1e30, torch.inf, torch.nan])
    bins = error_bins(errors)
    assert bins.tolist()[:2] == [0, 0]
    assert bins.tolist()[-3:] == [2 * 20 * PER_OCTAVE + 1] * 3
    known = errors[:4].double()
    assert bool((upper_edge(bins[:4]) >= known).all())
    assert upper_edge(bins[-1:]).item() == float("inf")


REAL: dict[str, dict[str, Any]] = {
    "cg-digits": {"data": {"name": "cg-digits"}, "clients": {"num": 6}},
    "mfeat": {
        "data": {"name": "npz", "path": str(SHARED / "mfeat/mfeat.npz"), "standardise": True},
        "clients": {"num": 6, "partition": "dirichlet", "alpha": 1.0},
    },
    "mosi": {
        "data": {"name": "npz", "path": str(SHARED / "mosi/mosi.npz"), "standardise": True},
        "clients": {"num": 5},
    },
}


def real(name: str) -> Recipe:
    made = json.loads(json.dumps(REAL[name]))
    if "path" in made["data"]:
        if not Path(made["data"]["path"]).exists():
            pytest.skip(f"real data not here: {made['data']['path']}")
        with np.load(made["data"]["path"]) as arrays:
            known = [n for n in arrays.files if arrays[n].ndim > 1 and arrays[n].dtype.kind == "f"]
        made["data"].setdefault("modalities", known[:3])
    made["clients"] |= {"personal_test": 0.3, "validation": 0.2, "holdings": [[0, 1, 2], [0, 1]]}
    names = made["data"].get("modalities", ["gray", "color"])
    made["clients"]["holdings"] = [names, names[:2]]
    train = {"lr": 0.05, "batch_size": 32, "epochs": 2}
    evaluate = {"every": 0, "conformal": "split", "conformal_groups": "modalities"}
    made |= {"algorithm": {"name": "fedavg"}, "train": train, "evaluate": evaluate, "rounds": 6}
    return parse_recipe(made)


@pytest.mark.parametrize("name", sorted(REAL))
def test_sets_hold_the_truth_as_often_as_promised_on_every_subset_and_group(name: str) -> None:
    made = real(name)
    run, population = polyfed.run(made), population_of(made)
    assert population.test is not None
    assert population.own_validation is not None
    conformal, label = run.models.conformal, population.columns.label
    assert conformal is not None
    draw = np.random.default_rng(0)
    for group in [g for g in conformal.counts if g != "*"]:
        members = [k for k in range(population.num_clients) if "+".join(run.models.clients[k]) == group]
        rows = torch.cat([s[k] for k in members for s in (population.test, population.own_validation)])
        for subset, table in conformal.counts[group].items():
            if not int(table.sum()):
                continue
            x = {m: population.columns.modalities[m].raw(rows) for m in subset.split("+")}
            bins = class_bins(run.predict(x, members[0]))
            scores = bins.gather(1, label[rows][:, None])[:, 0].numpy()
            covered = []
            for _ in range(200):
                order = draw.permutation(len(rows))
                own, rest = scores[order[: len(rows) // 2]], scores[order[len(rows) // 2 :]]
                counts = torch.bincount(torch.from_numpy(own), minlength=BINS + 1)[None]
                limit = Conformal("split", "all", {"*": {subset: counts}}).limits("*", subset, 0.9)[0]
                covered.append((rest <= int(limit)).mean())
            error = np.std(covered) / np.sqrt(len(covered))
            assert np.mean(covered) >= 0.9 - 2 * error, (group, subset)


@pytest.mark.parametrize("method", ["fedavg", "local", "fedproto"])
def test_the_counts_of_the_clients_are_those_of_all_their_rows(method: str) -> None:
    made = small(method, groups="client")
    run, population = polyfed.run(made), population_of(made)
    conformal, columns = run.models.conformal, population.columns
    assert conformal is not None
    assert population.own_validation is not None
    total = dict.fromkeys(["a", "b", "a+b"], 0)
    for client in range(population.num_clients):
        rows = population.own_validation[client]
        for subset in total:
            names = subset.split("+")
            there = torch.ones(len(rows), dtype=torch.bool)
            for m in names:
                there &= columns.present[m][rows] if m in columns.present else True
            counted = conformal.counts[str(client)][subset]
            if set(names) <= set(population.modalities(client)):
                x = {m: columns.modalities[m].raw(rows[there]) for m in names}
                own = class_bins(run.predict(x, client)).gather(1, columns.label[rows[there]][:, None])[:, 0]
                assert torch.equal(counted[0], torch.bincount(own, minlength=BINS + 1)), (client, subset)
            else:
                assert not counted.any()
            total[subset] = total[subset] + counted
    assert all(torch.equal(conformal.counts["*"][subset], total[subset]) for subset in total)


@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_a_silo_counts_the_rows_that_its_devices_have_in_common(name: str, tmp_path: Path) -> None:
    spec = Evaluation(every=0, conformal="split", conformal_groups="client", shrinkage=True)
    made = world(name, evaluation=spec)
    made = replace(made, clients=replace(made.clients, personal_validation=0.4, missing_rows={"a": 0.2}), rounds=1)
    run, population = polyfed.run(made, out=tmp_path / "run"), population_of(made)
    conformal, columns, silo = run.models.conformal, population.columns, population.silo
    assert conformal is not None
    assert population.own_validation is not None
    assert silo is not None
    total = dict.fromkeys(["a", "b", "a+b"], 0)
    for number in range(3):
        members = [k for k in range(len(silo)) if int(silo[k]) == number]
        rows = population.own_validation[members[0]]
        assert all(torch.equal(population.own_validation[k], rows) for k in members)
        for subset in total:
            names = subset.split("+")
            there = torch.stack([columns.present[m][rows] for m in names if m in columns.present] or [rows > -1]).all(0)
            x = {m: columns.modalities[m].raw(rows[there]) for m in names}
            own = class_bins(run.predict(x, members[0])).gather(1, columns.label[rows[there]][:, None])[:, 0]
            counted = conformal.counts[str(members[0])][subset]
            assert torch.equal(counted[0], torch.bincount(own, minlength=BINS + 1)), (number, subset)
            assert all(torch.equal(conformal.counts[str(k)][subset], counted) for k in members)
            total[subset] = total[subset] + counted
    assert all(torch.equal(conformal.counts["*"][subset], total[subset]) for subset in total)
    again = polyfed.load_run(tmp_path / "run").predict_set(samples(population, population.test_rows[:9]), 0.7, client=1)
    assert again.rows.tolist() == [int(conformal.counts["0"]["a+b"].sum())] * 9
    assert again.helps_most == [None] * 9
    sent = [json.loads(line) for line in (tmp_path / "run" / "egress.jsonl").read_text().splitlines()]
    counted = [row for row in sent if row["message"] in ("ScoreCounts", "SizeCounts")]
    assert {row["destination"] for row in counted} == {"server"}
    assert len({(row["message"], row["client"]) for row in counted}) == 6, "one device of each silo sends both"


def test_silos_stop_by_their_own_validation_rows() -> None:
    made = world("vfl", evaluation=Evaluation())
    made = replace(made, clients=replace(made.clients, personal_validation=0.4), rounds=2)
    made = replace(made, stop=replace(made.stop, metric="personal_validation.weighted"))
    run = polyfed.run(made)
    scores = [row["metrics"]["personal_validation"]["weighted"] for row in run.rounds if row["round"]]
    assert run.result["best"]["round"] == 1 + scores.index(max(scores))


@pytest.mark.parametrize(("holds", "said"), [(0.92, ""), (0.883, "chance explains"), (0.80, "do not trust")])
def test_a_run_says_whether_chance_explains_that_fewer_sets_hold(holds: float, said: str) -> None:
    told = {"coverage": 0.9, "size": 1.1, "holds": holds, "rows": 599, "validation_rows": 296}
    words = sets_words({"sets": told, "metrics": {"global": {"accuracy": 0.8}}}, None)
    assert said in words
    assert ("chance" in words) == bool(said)


def small(
    method: str = "fedavg", kind: Any = "split", groups: Any = "all", alone: bool = True, **options: Any
) -> Recipe:
    evaluation = Evaluation(every=0, conformal=kind, conformal_groups=groups)
    own = algorithm(method, evaluation=evaluation, selector=Uniform(), **options)
    clients = ClientsSpec(
        num=4, validation=0.25, missing_rows={"a": 0.2}, holdings=[["a", "b"], ["b"]] if alone else None
    )
    policy = {m: {"server": ["parameters", "prototypes", "statistic"]} for m in "ab"} if method == "fedproto" else {}
    return recipe(own, clients=clients, rounds=1, egress=policy)


def samples(population: Population, rows: Any) -> dict[str, torch.Tensor]:
    return {m: column.raw(torch.as_tensor(rows)) for m, column in population.columns.modalities.items()}


def counts(name: str) -> bool:
    """Whether the clients of a method may count scores: in CreamFL and FedCouncil, they need the rows otherwise."""
    return not (ROWS[name].stack or name in ("creamfl", "fedcouncil"))


@pytest.mark.parametrize("name", list(filter(counts, NAMES)))
def test_every_method_counts_alike_on_both_engines(name: str) -> None:
    found, sizes = [], list[dict[str, int]]()
    for engine in ("sequential", "vectorised"):
        spec = Evaluation(every=0, conformal="split", conformal_groups="modalities", shrinkage=True)
        made = world(name, engine, evaluation=spec)
        made = replace(made, clients=replace(made.clients, validation=0.2), rounds=1)
        parts, state, ledger = played(made)
        assert {"count_scores", "count_silo"} & {row.task for row in plan(parts)}
        counts = parts.algorithm.calibrate(state, parts.fed)
        assert counts is not None
        assert not any(row["message"] == "ScoreCounts" for row in ledger), "only after the last round"
        found.append(counts.counts)
        sizes.append({group: int(own.sum()) for group, own in counts.sizes.items()})
    assert found[0].keys() == found[1].keys()
    assert sizes[0] == sizes[1]
    assert sizes[0].keys() == found[0].keys()
    for group, subsets in found[0].items():
        for subset, own in subsets.items():
            apart = (own.cumsum(-1) - found[1][group][subset].cumsum(-1)).abs()
            assert int(own.sum()) == int(found[1][group][subset].sum())
            assert int(apart.max()) <= 2, "engines round differently, so a score may fall into the next bin"


def test_a_saved_run_and_an_exported_model_promise_the_same(tmp_path: Path) -> None:
    made = small(kind="class", groups="modalities")
    run, population = polyfed.run(made, out=tmp_path / "run"), population_of(made)
    x = samples(population, population.test_rows[:20])
    x["a"][:5] = torch.nan
    expected = run.predict_set(x, 0.7)
    assert expected.subsets[:6] == ("b",) * 5 + ("a+b",)
    assert [len(c) for c in expected.classes] == expected.sizes.tolist()
    run.export(tmp_path / "model")
    for found in (polyfed.load_run(tmp_path / "run"), polyfed.load_model(tmp_path / "model")):
        again = found.predict_set(x, 0.7)
        assert torch.equal(again.sets, expected.sets)  # type: ignore[arg-type]
        assert again.rows.tolist() == expected.rows.tolist()
    for folder, file, error in (("run", "result.json", CheckpointError), ("model", "model.json", DataError)):
        path = tmp_path / folder / file
        said = json.loads(path.read_text())
        said["conformal"]["counts"]["*"]["b"]["rows"] = [[0, 5000, 3]]
        path.write_text(json.dumps(said))
        with refuses(error, file):
            polyfed.load_run(path.parent) if folder == "run" else polyfed.load_model(path.parent)


def test_secure_aggregation_gives_the_same_counts_of_everybody() -> None:
    plain, secure = (
        polyfed.run(small(alone=False, **more)).models.conformal
        for more in ({}, {"secure_aggregation": SecureAggregation()})
    )
    assert plain is not None
    assert secure is not None
    assert list(secure.counts) == ["*"]
    for subset, own in plain.counts["*"].items():
        assert int(own.sum()) == int(secure.counts["*"][subset].sum())
        assert int((own.cumsum(-1) - secure.counts["*"][subset].cumsum(-1)).abs().max()) <= 2


def test_coverage_that_the_rows_cannot_promise_is_refused_with_the_number_needed() -> None:
    made = small(groups="client")
    run, population = polyfed.run(made), population_of(made)
    x = samples(population, population.test_rows[:3])
    conformal = run.models.conformal
    assert conformal is not None
    n = int(conformal.counts["1"]["b"].sum())
    least = n / (n + 1)
    run.predict_set({"b": x["b"]}, least - 1e-6, client=1)
    with refuses(RecipeError, f"there are {n}"):
        run.predict_set({"b": x["b"]}, least + 0.01, client=1)
    with refuses(RecipeError, "999 validation"):
        run.predict_set(x, 0.999)
    for coverage in (0.0, 1.0, -1, "0.9", True):
        with refuses(RecipeError, "coverage ="):
            run.predict_set(x, coverage)  # type: ignore[arg-type]
    with refuses(RecipeError, "row 1"):
        run.predict_set(x, 0.5, present={"a": [True, False, True], "b": [True, False, True]})
    with refuses(RecipeError, "predicts validation"):
        polyfed.run(recipe(algorithm("fedavg"), rounds=1)).predict_set(x)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": {"num": 4}}, "evaluate.conformal: promise"),
        ({"task": {"name": "retrieval"}}, "evaluate.conformal: intervals"),
        ({"evaluate": {"conformal": "mondrian"}}, "evaluate.conformal: must be"),
        (
            {"evaluate": {"conformal": "split", "shrinkage": True}, "data": {"name": "toy", "shapes": {"a": [4]}}},
            "evaluate.shrinkage: lacks",
        ),
        (
            {"secure_aggregation": {}, "evaluate": {"conformal": "split", "conformal_groups": "client"}},
            "evaluate.conformal_groups: sums over all",
        ),
    ],
)
def test_recipes_that_can_promise_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "rounds": 1}
    table |= {"clients": {"num": 4, "validation": 0.2}, "evaluate": {"conformal": "split"}}
    with refuses(PolyfedError, said):
        assemble(parse_recipe(table | changes))


def test_the_policy_rules_the_counts() -> None:
    made = small()
    shared = {"shared": {"server": ["parameters"]}}
    with refuses(EgressError, "ScoreCounts.in_bins"):
        polyfed.run(replace(made, egress=shared))
    assert not any(row.task == "count_scores" for row in plan(assemble(recipe(algorithm("fedavg")))))


def test_regression_has_intervals() -> None:
    class Targets:
        def load(self) -> Any:
            columns = Toy(rows=400).load()
            x = columns.modalities["a"].take(torch.arange(400))
            return replace(columns, label=x[:, 0] * 2 + 5, num_classes=1)

    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "task": {"name": "regression"}, "rounds": 3}
    clients = {"num": 4, "validation": 0.3}
    made = parse_recipe(table | {"clients": clients, "evaluate": {"conformal": "split"}})
    made = replace(made, data=Targets())
    run, population = polyfed.run(made), population_of(made)
    x, y = samples(population, population.test_rows), population.columns.label[population.test_rows]
    found = run.predict_set(x, 0.8)
    assert found.low is not None
    assert found.high is not None
    inside = (found.low <= y) & (y <= found.high)
    assert 0.65 < float(inside.double().mean()) <= 1.0
    assert bool((found.sizes > 0).all())
    assert "intervals" in repr(found)


def shrinking(made: Recipe) -> Recipe:
    spec = replace(made.algorithm.evaluation, shrinkage=True)
    return replace(made, algorithm=replace(made.algorithm, evaluation=spec))


@pytest.mark.parametrize("method", ["fedavg", "local", "fedproto"])
def test_the_counts_for_the_shrinkage_are_those_of_all_rows(method: str, tmp_path: Path) -> None:
    made = shrinking(small(method, groups="client"))
    run, population = polyfed.run(made, out=tmp_path / "run"), population_of(made)
    conformal, columns = run.models.conformal, population.columns
    assert conformal is not None
    assert population.own_validation is not None
    subsets, classes = ["a", "b", "a+b"], columns.num_classes
    for client in range(population.num_clients):
        rows = population.own_validation[client]
        there = columns.present["a"][rows]
        expected = torch.zeros(len(subsets), 2, LEVELS, SIZE_BINS, dtype=torch.int64)
        if set(population.modalities(client)) == {"a", "b"}:
            x = {m: columns.modalities[m].raw(rows[there]) for m in "ab"}
            bins = -(-class_bins(run.predict(x, client)) // 20)
            for subset, further in (("a", 1), ("b", 0)):
                shares = run.predict({subset: x[subset]}, client).double().softmax(1).amax(1)
                levels = ((shares - 1 / classes) / (1 - 1 / classes) * 8).clamp(0, 7).long()
                for level, row in zip(levels.tolist(), bins, strict=True):
                    expected["ab".index(subset), further, level] += torch.bincount(row, minlength=SIZE_BINS)
        assert torch.equal(conformal.sizes[str(client)], expected), client
    assert torch.equal(conformal.sizes["*"], sum(conformal.sizes[str(k)] for k in range(population.num_clients)))
    again = polyfed.load_run(tmp_path / "run").models.conformal
    assert again is not None
    assert all(torch.equal(again.sizes[group], conformal.sizes[group]) for group in conformal.sizes)


def test_the_expected_size_is_the_mean_size_of_the_sets_of_such_rows() -> None:
    before, y = drawn(1, rows=4000)
    after = before + 2.0 * torch.nn.functional.one_hot(y, 4)
    ok = torch.arange(4000) < 3900
    counts = sizes_of(before, class_bins(after), ok, SIZE_BINS)
    assert int(counts.sum()) == 3900 * 4
    levels = level_of(before)
    for limit in (40, 500, 813, 1000):
        found = expected_sizes(counts, torch.full((4,), limit))
        for level in levels.unique().tolist():
            rows = ok & (levels == level)
            if int(rows.sum()) >= 10:
                sizes = (class_bins(after[rows]) <= limit).sum(1).double()
                assert float(found[level]) == pytest.approx(float(sizes.mean()), abs=0.05), (limit, level)
    few = sizes_of(before[:5], class_bins(after[:5]), ok[:5], SIZE_BINS)
    assert len(expected_sizes(few, torch.full((4,), 500)).unique()) == 1, "few rows: the mean over all levels"
    assert bool(expected_sizes(torch.zeros_like(few), torch.full((4,), 500)).isnan().all())


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_modality_that_is_named_shrinks_the_sets_as_much_as_expected(name: str) -> None:
    run, population = polyfed.run(shrinking(real(name))), population_of(real(name))
    columns = population.columns
    assert population.test is not None
    rows = torch.unique(population.test.rows)  # like the validation rows; colours mislead in the server's test rows
    names = list(columns.modalities)
    for subset in [[m] for m in names]:
        x = {m: columns.modalities[m].raw(rows) for m in names}
        small = run.predict_set({m: x[m] for m in subset}, 0.8)
        assert set(small.shrinkage) == set(names)
        assert bool(small.shrinkage[subset[0]].isnan().all())
        for further in set(names) - set(subset):
            larger = run.predict_set({m: x[m] for m in names if m in (*subset, further)}, 0.8)
            truly, expected = (small.sizes - larger.sizes).double(), small.shrinkage[further]
            assert float(expected.mean()) == pytest.approx(float(truly.mean()), abs=0.3), (subset, further)
            gains = {m: float(small.shrinkage[m].mean()) for m in names if m not in subset}
        most = [best for best in small.helps_most if best is not None]
        if len(most) > len(rows) / 2:
            favourite = max(set(most), key=most.count)
            assert gains[favourite] >= max(gains.values()) - 0.2


def test_regression_has_the_shrinkage_without_further_counts() -> None:
    counts = {name: torch.bincount(error_bins(torch.full((99,), size)), minlength=2 * 20 * PER_OCTAVE + 2)[None]
              for name, size in (("a", 2.0), ("b", 1.0), ("a+b", 0.5))}  # fmt: skip
    conformal = Conformal("split", "all", {"*": counts})
    used = {"a": torch.tensor([True, False, True]), "b": torch.tensor([False, True, True])}
    found = prediction_sets(conformal, torch.zeros(3, 1), used, "*", 0.9, of_classes=False)
    assert found.shrinkage["b"][:1].tolist() == pytest.approx([3.0])
    assert found.shrinkage["a"][1:2].tolist() == pytest.approx([1.0])
    assert found.helps_most == ["b", "a", None]


def test_the_shrinkage_is_opt_in_and_secure_aggregation_sums_it() -> None:
    plain = small(alone=False)
    assert "count_sizes" not in {row.task for row in plan(assemble(plain))}
    assert polyfed.run(plain).models.conformal.sizes == {}  # type: ignore[union-attr]
    open_, secure = (
        polyfed.run(shrinking(small(alone=False, **more))).models.conformal
        for more in ({}, {"secure_aggregation": SecureAggregation()})
    )
    assert open_ is not None
    assert secure is not None
    assert int(open_.sizes["*"].sum()) == int(secure.sizes["*"].sum()) > 0
    x = {"b": torch.randn(4, *population_of(plain).columns.modalities["b"].shape)}
    assert polyfed.run(plain).predict_set(x, 0.5).shrinkage == {}
    assert polyfed.run(plain).predict_set(x, 0.5).helps_most == [None] * 4


NOISE = 3.0


def noised(bins: torch.Tensor, clients: int) -> Conformal:
    """The counts of these bins of scores, which belong to some clients whose devices add noise."""
    parts = [
        ScoreCounts(torch.bincount(part, minlength=BINS + 1)[None, None], torch.tensor(0))
        for part in bins.chunk(clients)
    ]
    sent = [Requirements(score_noise=NOISE).with_noise(part, CLASSES, 0) for part in parts]
    total = sum(one.in_bins for one in sent)[0]
    return Conformal("split", "all", {"*": {"a": total}}, noise={"*": int(sum(one.noise for one in sent))})


def test_noise_is_added_to_joined_bins_and_its_size_is_told() -> None:
    bins = torch.full((400,), 333)
    counts = ScoreCounts(torch.bincount(bins, minlength=BINS + 1)[None, None], torch.tensor(0))
    drawn = [Requirements(score_noise=NOISE).with_noise(counts, CLASSES, 0) for _ in range(300)]
    values = torch.stack([one.in_bins[0, 0] for one in drawn]).double()
    assert bool((values[:, torch.arange(BINS + 1) % 50 != 0] == 0).all()), "other bins tell nothing"
    joined = values[:, ::50]
    assert joined.shape[1] == NOISY_BINS
    truth = torch.zeros(NOISY_BINS).double()
    truth[350 // 50] = 400
    assert float((joined.mean(0) - truth).abs().max()) < 5 * NOISE / 300**0.5
    assert float(joined.std()) > 0
    variances = joined.var(0)
    assert float(variances.mean()) == pytest.approx(NOISE**2, rel=0.1)  # five standard errors
    assert all(int(one.noise) >= NOISE**2 for one in drawn)
    with refuses(EgressError, "classes together"):
        Requirements(score_noise=NOISE).with_noise(
            ScoreCounts(torch.zeros(1, 4, BINS + 1), torch.tensor(0)), CLASSES, 0
        )


@pytest.mark.parametrize("coverage", [0.7, 0.8, 0.9])
def test_sets_from_counts_with_noise_hold_the_truth_as_often_as_promised(coverage: float) -> None:
    draw = torch.Generator().manual_seed(int(coverage * 100))
    promised, naive = [], []
    for _ in range(200):
        bins = (torch.rand(3000, generator=draw) ** 2 * BINS).ceil().long()
        conformal = noised(bins, 3)
        limit, rows = conformal.limits("*", "a", coverage)
        assert abs(int(rows) - 3000) < 8 * NOISE * (3 * NOISY_BINS) ** 0.5
        fresh = (torch.rand(2000, generator=draw) ** 2 * BINS).ceil().long()
        promised.append(float((fresh <= int(limit)).double().mean()))
        blind = replace(conformal, noise={})
        naive.append(float((fresh <= int(blind.limits("*", "a", coverage)[0])).double().mean()))
    error = float(np.std(promised)) / 200**0.5
    assert np.mean(promised) >= coverage - 2 * error
    assert np.mean(promised) > np.mean(naive), "the margin for the noise makes sets larger"


def test_the_margin_covers_the_noise_even_where_every_rank_matters() -> None:
    """Without new rows: how often is the bin smaller than the one of the exact counts at the promised coverage?"""
    draw, short = torch.Generator().manual_seed(7), 0
    for _ in range(400):
        bins = (torch.rand(1500, generator=draw) * BINS).ceil().long()
        exact = Conformal("split", "all", {"*": {"a": torch.bincount(bins, minlength=BINS + 1)[None]}})
        short += int(noised(bins, 3).limits("*", "a", 0.7)[0]) < int(exact.limits("*", "a", 0.7)[0])
    assert short / 400 <= 0.03 + 2 * (0.03 * 0.97 / 400) ** 0.5


def test_too_few_rows_for_the_noise_are_refused_with_the_number_needed() -> None:
    bins = (torch.rand(200, generator=torch.Generator().manual_seed(1)) * BINS).ceil().long()
    conformal = noised(bins, 3)
    with refuses(RecipeError, "2,032 validation"):
        conformal.limits("*", "a", 0.9)
    again = Conformal.read(json.loads(json.dumps(conformal.facts())), (1, BINS + 1), (1, 1, 8, SIZE_BINS))
    assert again.noise == conformal.noise
    assert torch.equal(again.counts["*"]["a"], conformal.counts["*"]["a"]), "counts with noise may be negative"
    forged = ScoreCounts(torch.full((1, 1, BINS + 1), -1), torch.tensor(0))
    assert possible_counts((1, 1, BINS + 1))(0, forged) == "counts fewer than 0 rows"


@pytest.mark.parametrize("seed", range(10))
def test_joined_bins_hold_enough_rows_or_none_and_no_score_becomes_smaller(seed: int) -> None:
    draw, least = np.random.default_rng(seed), 7
    scores = np.sort(draw.integers(0, BINS + 1, size=int(draw.integers(0, 60))))
    bins = torch.from_numpy(np.bincount(scores, minlength=BINS + 1))
    found = raised(bins, least)
    assert not ((found > 0) & (found < least)).any()
    assert int(found.sum()) == (len(scores) if len(scores) >= least else 0)
    if len(scores) >= least:
        raised_scores = np.repeat(np.arange(BINS + 1), found.numpy())
        assert (raised_scores >= scores).all()
        assert raised(raised(bins, least), least).equal(found)


def test_joined_bins_keep_the_promise_and_many_rows_keep_small_sets() -> None:
    """Coverage under joined bins is at least that without, and the limit is close with many rows."""
    draw = np.random.default_rng(1)
    hits = []
    for _ in range(300):
        scores = draw.integers(0, BINS + 1, size=41)
        counts = raised(torch.from_numpy(np.bincount(scores[:40], minlength=BINS + 1)).view(1, 1, -1), 8)
        limit, _ = Conformal("split", "all", {"*": {"a": counts[0]}}).limits("*", "a", 0.8)
        hits.append(scores[40] <= int(limit))
    assert np.mean(hits) >= 0.8
    many = torch.from_numpy(np.bincount(draw.integers(0, BINS + 1, size=50_000), minlength=BINS + 1)).view(1, 1, -1)
    exact, joined = (
        int(Conformal("split", "all", {"*": {"a": one[0]}}).limits("*", "a", 0.9)[0])
        for one in (many, raised(many, 10))
    )
    assert exact <= joined <= exact + 2
