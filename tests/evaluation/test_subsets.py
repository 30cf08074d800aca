"""`[evaluate] subsets`: which subsets are scored, that the scores are those of `predict`, and where they are shown."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from laws.rows import ROWS
from laws.test_laws import NAMES, world
from polyfed.core.errors import PolyfedError
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.evaluation.subsets import PER_SIZE, subsets_of, summary
from polyfed.experiment.checks.check import plan
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.experiment.running.dry_run import metrics_of
from polyfed.experiment.study.metric_checks import metric_fault
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.report.comparison.compare import compare
from polyfed.report.pages.page import write_report
from polyfed.report.scores import Metric
from polyfed.selection import Uniform
from world import algorithm, played, recipe

SIX = tuple("abcdef")


@pytest.mark.parametrize("num", [2, 3, 5])
def test_all_names_every_subset_once(num: int) -> None:
    found = subsets_of("all", SIX[:num])
    assert len(found) == len(set(found)) == 2**num - 1
    assert [len(one) for one in found] == sorted(len(one) for one in found)


def test_each_leaves_one_in_or_one_out_and_many_modalities_are_scored_by_size() -> None:
    assert {len(one) for one in subsets_of("each", SIX)} == {1, 5, 6}
    assert len(subsets_of("each", SIX)) == 13
    assert subsets_of("all", SIX) == subsets_of("sizes", SIX)
    counts = [sum(len(one) == size for one in subsets_of("sizes", SIX)) for size in range(1, 7)]
    assert counts == [min(math.comb(6, size), PER_SIZE) for size in range(1, 7)]
    assert set(subsets_of("sizes", SIX)) <= {s for n in range(7) for s in itertools.combinations(SIX, n)}
    assert subsets_of("none", SIX) == ()


def test_the_worst_subset_is_the_largest_error() -> None:
    scores = {("a",): 0.5, ("b",): 0.2, ("a", "b"): 0.7}
    names = {"subset.a": 0.5, "subset.b": 0.2, "subset.a+b": 0.7}
    assert summary("all", "ab", scores, rising=True) == names | {"worst_subset": 0.2}
    assert summary("each", "ab", scores, rising=False) == names | {"worst_subset": 0.7}
    by_size = {"subset.size1": 0.35, "subset.size2": 0.7, "worst_subset": 0.2}
    assert summary("sizes", "ab", scores, rising=True) == pytest.approx(by_size)
    assert Metric.of("global.worst_subset", {"name": "regression", "score": "mae"}).lowest
    assert Metric.of("personal.subset.a+b", {"name": "classification", "score": "accuracy"}).share
    assert Metric.of("personal.pooled_mae", {"name": "regression", "score": "mae"}).lowest


def three(method: str = "fedavg", **changes: Any) -> Recipe:
    clients = ClientsSpec(num=5, personal_test=0.2, missing_rows={"a": 0.3}, holdings=[["a", "b", "c"], ["a", "b"]])
    own = algorithm(method, evaluation=Evaluation(every=0, subsets="all"), selector=Uniform())
    made = recipe(own, clients=clients, rounds=1)
    data = Toy(rows=500, classes=3, shapes={"a": (4,), "b": (3,), "c": (5,)}, snr={"a": 5.0, "b": 4.0})
    encoders = {m: {"kind": "mlp", "hidden": [8]} for m in "abc"}
    return replace(made, data=data, model=replace(made.model, encoders=encoders), **changes)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_every_score_is_the_accuracy_of_predict_on_that_subset(method: str) -> None:
    made = three(method)
    run = polyfed.run(made)
    population = played(replace(made, rounds=0))[0].population
    columns, label = population.columns, population.columns.label

    def accuracy(rows: torch.Tensor, subset: str, client: int | None) -> float:
        x = {m: columns.modalities[m].raw(rows) for m in subset.split("+")}
        there = {m: mask[rows] for m, mask in columns.present.items() if m in x}
        return float((run.predict(x, client, present=there).argmax(1) == label[rows]).double().mean())

    names = ["a", "b", "c", "a+b", "a+c", "b+c", "a+b+c"]
    if method == "fedavg":
        found = run.result["metrics"]["global"]
        expected = {name: accuracy(population.test_rows, name, None) for name in names}
        assert {name: found[f"subset.{name}"] for name in names} == pytest.approx(expected)
        assert found["worst_subset"] == pytest.approx(min(expected.values()))
        assert found["subset.a+b+c"] == pytest.approx(found["accuracy"])
    own = run.result["metrics"]["personal"]
    for name in names:
        holders = [k for k in range(5) if set(name.split("+")) & set(population.modalities(k))]
        each = [accuracy(population.test[k], name, k) for k in holders]  # type: ignore[index]
        assert own[f"subset.{name}"] == pytest.approx(sum(each) / len(each)), name
    assert own["subset.a+b+c"] == pytest.approx(own["mean"])


@pytest.mark.parametrize("name", [name for name in NAMES if not ROWS[name].stack])
def test_every_method_scores_subsets_alike_on_both_engines(name: str) -> None:
    found = []
    for engine in ("sequential", "vectorised"):
        made = world(name, engine, evaluation=Evaluation(every=0, subsets="each"))
        clients = made.clients if made.clients.partition == "silos" else replace(made.clients, personal_test=0.2)
        parts, state, _ = played(replace(made, clients=clients, rounds=1))
        assert {row.task for row in plan(parts)} >= {"score_subsets"} or not parts.fed.clients.tested
        parts.fed.begin(1)
        found.append(parts.algorithm.evaluate(state, parts.fed).metrics)
    one, many = found
    scored = {f"{group}.{key}": value for group, own in one.items() for key, value in own.items() if "subset" in key}
    assert scored, "no subset was scored"
    for key, value in scored.items():
        group, _, word = key.partition(".")
        assert many[group][word] == pytest.approx(value, abs=0.035), key  # a row at the border may fall on either side
    for group, whole in (("global", "accuracy"), ("personal", "mean")):
        if "subset.a+b" in one.get(group, {}) and name != "local":
            assert one[group]["subset.a+b"] == pytest.approx(one[group][whole], abs=1e-6)


def test_regression_scores_errors() -> None:
    table = {"data": {"name": "toy", "rows": 300}, "algorithm": {"name": "fedavg"}, "task": {"name": "regression"}}
    made = parse_recipe(table | {"evaluate": {"subsets": "all"}, "rounds": 1, "clients": {"personal_test": 0.2}})

    class Targets:
        def load(self) -> Any:
            columns = Toy(rows=300).load()
            return replace(columns, label=torch.randn(300, generator=torch.Generator().manual_seed(0)), num_classes=1)

    found = polyfed.run(replace(made, data=Targets())).result["metrics"]
    for group in ("global", "personal"):
        scores = [value for name, value in found[group].items() if name.startswith("subset.")]
        assert len(scores) == 3
        assert found[group]["worst_subset"] == max(scores)
    assert found["global"]["subset.a+b"] == pytest.approx(found["global"]["mae"])


def test_studies_may_name_the_metrics() -> None:
    made = three()
    found = metrics_of(made, population_of(made))
    assert {"subset.a+c", "worst_subset"} <= found["global"] & found["personal"]
    assert metric_fault(["global.subset.a+c"], found, "") == ""
    assert "subset.a+c" in metric_fault(["global.subset.a+k"], found, "")


def test_nothing_changes_without_the_option() -> None:
    parts, _, ledger = played(recipe(algorithm("fedavg"), clients=ClientsSpec(num=5, personal_test=0.2)))
    assert not any("subset" in row.task for row in plan(parts))
    assert not any("ubset" in row["message"] for row in ledger)


def test_under_secure_aggregation_only_sums_are_read() -> None:
    clients = ClientsSpec(num=6, personal_test=0.2)
    evaluation = Evaluation(every=0, subsets="each")
    runs = [
        polyfed.run(
            recipe(
                algorithm("fedavg", evaluation=evaluation, selector=Uniform(), **more),
                clients=clients,
                rounds=1,
            )
        ).result["metrics"]["personal"]
        for more in ({}, {"secure_aggregation": SecureAggregation()})
    ]
    assert set(runs[1]) >= {"weighted", "subset.a", "subset.b", "subset.a+b", "worst_subset"}
    assert runs[1]["subset.a+b"] == pytest.approx(runs[1]["weighted"], abs=1e-3)
    assert runs[1]["subset.a"] == pytest.approx(runs[0]["subset.a"], abs=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {"name": "retrieval"}}, "the task compares the embeddings of two modalities"),
        ({"data": {"name": "toy", "shapes": {"a": [4]}}}, "subsets = 'all': the data has one modality, 'a'"),
        ({"clients": {"missing_rows_test": {"a": 1.0}}}, "no test row has 'a', so no subset with it can be scored"),
        ({"evaluate": {"subsets": "every"}}, "subsets = 'every'"),
    ],
)
def test_subsets_that_cannot_be_scored_are_refused(changes: dict[str, Any], said: str) -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "evaluate": {"subsets": "all"}, "rounds": 1}
    with pytest.raises(PolyfedError, match=said):
        assemble(parse_recipe(table | changes))


def test_the_report_the_table_and_the_comparison_name_the_worst_subset(tmp_path: Path) -> None:
    run = polyfed.run(three(), out=tmp_path / "run")
    found = run.result["metrics"]["global"]
    names = [name.removeprefix("subset.") for name in found if name.startswith("subset.")]
    worst = min(names, key=lambda name: found[f"subset.{name}"]).replace("+", " + ")
    page = Path(write_report(tmp_path / "run")).read_text()
    assert f"Worst: <b>{worst}</b>" in page
    assert all(f'<th scope="row">{name.replace("+", " + ")}</th>' in page for name in names)
    titles = [column.title for column in compare([tmp_path / "run"]).columns]
    assert {"from a + c", "worst subset", "worst subset, personal", "from a + c, personal"} <= set(titles)


def test_used_tells_which_modalities_a_prediction_reads() -> None:
    run = polyfed.run(three("local"))
    x = {"a": torch.zeros(3, 4), "c": torch.zeros(3, 5)}
    x["a"][1] = torch.nan
    everyone, lacking_c = run.used(x, 0), run.used(x, 1, present={"c": [True, True, False]})
    assert {m: rows.tolist() for m, rows in everyone.items()} == {
        "a": [True, False, True],
        "b": [False] * 3,
        "c": [True] * 3,
    }
    assert list(lacking_c) == ["a", "b"], "the model of client 1 reads no c"
    with pytest.raises(PolyfedError, match="no global model"):
        run.used(x)


@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_silos_are_scored_from_the_embeddings_of_each_subset(name: str) -> None:
    found = []
    for engine in ("sequential", "vectorised"):
        made = world(name, engine, evaluation=Evaluation(every=0, subsets="all"))
        made = replace(made, clients=replace(made.clients, personal_test=0.3), rounds=1)
        parts, state, _ = played(made)
        parts.fed.begin(1)
        found.append(parts.algorithm.evaluate(state, parts.fed).metrics["personal"])
    one, many = found
    assert {key for key in one if "subset" in key} == {"subset.a", "subset.b", "subset.a+b", "worst_subset"}
    assert one["subset.a+b"] == pytest.approx(one["mean"], abs=1e-6)
    assert one["worst_subset"] == min(one[f"subset.{subset}"] for subset in ("a", "b", "a+b"))
    assert one["subset.a"] != one["subset.a+b"]
    assert many == pytest.approx(one, abs=0.035)
    columns, label = parts.population.columns, parts.population.columns.label
    assert parts.population.test is not None
    rows = {k: parts.population.test[k] for k in range(parts.population.num_clients)}
    run = polyfed.run(made)
    own = run.result["metrics"]["personal"]
    silo = parts.population.silo
    assert silo is not None
    firsts = [min(k for k in rows if int(silo[k]) == s) for s in sorted({int(s) for s in silo})]
    for subset in ("a", "b"):
        each = []
        for k in firsts:
            x = {subset: columns.modalities[subset].raw(rows[k])}
            each.append(float((run.predict(x, k).argmax(1) == label[rows[k]]).double().mean()))
        assert own[f"subset.{subset}"] == pytest.approx(sum(each) / len(each), abs=1e-6)
