"""`[evaluate] subsets`: which subsets are scored, that the scores are those of `predict`, and where they are shown."""

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

import polyfed
from laws.rows import ROWS
from laws.test_laws import NAMES, world
from polyfed.cli.printing.tables import result_table
from polyfed.core.errors import PolyfedError
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.evaluation.subsets import PER_SIZE, subsets_of, summary
from polyfed.experiment.checks.check import plan
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.experiment.running.dry_run import metrics_of
from polyfed.experiment.study.run_checks import metric_fault
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.objective.report import moments, of_moments
from polyfed.report.comparison.compare import compare
from polyfed.report.pages.page import write_report
from polyfed.report.scores import Metric, gain_words, interval_of, with_interval
from polyfed.selection import Uniform
from refusals import refuses
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
    evaluation = Evaluation(every=0, subsets="all", unimodal="zero" if method == "fedavg" else "auto")
    own = algorithm(method, evaluation=evaluation, selector=Uniform())
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

    def with_all(rows: torch.Tensor, subset: str) -> torch.Tensor:
        masks = [mask[rows] for m, mask in columns.present.items() if m in subset.split("+")]
        return rows[torch.stack(masks).all(0)] if masks else rows

    def accuracy(rows: torch.Tensor, subset: str, client: int | None) -> float:
        there = with_all(rows, subset)
        x = {m: columns.modalities[m].raw(there) for m in subset.split("+")}
        return float((run.predict(x, client).argmax(1) == label[there]).double().mean())

    known = run.result["intervals"]
    names = ["a", "b", "c", "a+b", "a+c", "b+c", "a+b+c"]
    if method == "fedavg":
        found = run.result["metrics"]["global"]
        expected = {name: accuracy(population.test_rows, name, None) for name in names}
        assert {name: found[f"subset.{name}"] for name in names} == pytest.approx(expected)
        assert found["worst_subset"] == pytest.approx(min(expected.values()))
        for name in names:
            told = known["global"][f"subset.{name}"]
            assert told["rows"] == len(with_all(population.test_rows, name))
            assert told["low"] <= expected[name] <= told["high"]
        complete = with_all(population.test_rows, "a+b+c")

        def right_from(subset: str) -> torch.Tensor:
            x = {m: columns.modalities[m].raw(complete) for m in subset.split("+")}
            return (run.predict(x).argmax(1) == label[complete]).double()

        for name in names[:-1]:
            apart, told = right_from("a+b+c") - right_from(name), known["global"][f"gain.{name}"]
            gain, half = float(apart.mean()), 1.959964 * float(apart.std(correction=0)) / len(complete) ** 0.5
            assert found[f"gain.{name}"] == pytest.approx(gain)
            assert (told["low"], told["high"]) == pytest.approx((gain - half, gain + half), abs=1e-6)
            assert told["rows"] == len(complete)
        assert "gain.a+b+c" not in found
        rows = population.test_rows
        x = {m: columns.modalities[m].raw(rows) for m in "abc"}
        right = run.predict(x, present={"a": columns.present["a"][rows]}).argmax(1) == label[rows]
        lacks = ~columns.present["a"][rows]
        assert found["lacks.a"] == pytest.approx(float(right[lacks].double().mean()))
        assert found["lacks.nothing"] == pytest.approx(float(right[~lacks].double().mean()))
        assert run.result["metrics"]["unimodal"] == pytest.approx({m: expected[m] for m in "abc"})
        assert {name for name in found if "lacks" in name} == {"lacks.a", "lacks.nothing"}
        assert known["global"]["lacks.a"]["rows"] == int(lacks.sum())
        assert known["global"]["accuracy"]["rows"] == len(rows)
    own = run.result["metrics"]["personal"]
    for name in names:
        holders = [k for k in range(5) if set(name.split("+")) <= set(population.modalities(k))]
        each = [accuracy(population.test[k], name, k) for k in holders]  # type: ignore[index]
        assert own[f"subset.{name}"] == pytest.approx(sum(each) / len(each)), name
        assert known["personal"][f"subset.{name}"]["clients"] == len(holders)
        total = sum(len(with_all(population.test[k], name)) for k in holders)  # type: ignore[index]
        assert known["personal"][f"subset.{name}"]["rows"] == total


@pytest.mark.parametrize("name", [name for name in NAMES if not ROWS[name].stack])
def test_every_method_scores_subsets_alike_on_both_engines(name: str) -> None:
    measured = []
    for engine in ("sequential", "vectorised"):
        made = world(name, engine, evaluation=Evaluation(every=0, subsets="each"))
        clients = made.clients if made.clients.partition == "silos" else replace(made.clients, personal_test=0.2)
        parts, state, _ = played(replace(made, clients=clients, rounds=1))
        assert {row.task for row in plan(parts)} >= {"score_subsets"} or not parts.fed.clients.tested
        parts.fed.begin(1)
        measured.append(parts.algorithm.evaluate(state, parts.fed))
    one, many = (both.metrics for both in measured)
    assert measured[0].intervals.keys() == measured[1].intervals.keys() >= {"global"} & one.keys()
    scored = {f"{group}.{key}": value for group, own in one.items() for key, value in own.items() if "subset" in key}
    assert scored, "no subset was scored"
    for key, value in scored.items():
        group, _, word = key.partition(".")
        assert many[group][word] == pytest.approx(value, abs=0.035), key  # a row at the border may fall on either side
    if "subset.a+b" in one.get("global", {}) and name != "local":  # the rows with everything, from everything
        complete = one["global"].get("lacks.nothing", one["global"]["accuracy"])
        assert one["global"]["subset.a+b"] == pytest.approx(complete, abs=1e-6)
    for group, known in measured[0].intervals.items():
        for key in (key for key in one[group] if key.startswith(("subset.", "lacks."))):
            assert known[key]["rows"] > 0, key


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
    gain = found["global"]["subset.a"] - found["global"]["mae"]
    assert found["global"]["gain.a"] == pytest.approx(gain), "a smaller error is a gain"
    assert not Metric.of("global.gain.a", {"name": "regression", "score": "mae"}).lowest


def test_studies_may_name_the_metrics() -> None:
    made = three()
    found = metrics_of(made, population_of(made))
    assert {"subset.a+c", "worst_subset"} <= found["global"] & found["personal"]
    assert found["global"] == polyfed.run(made).result["metrics"]["global"].keys(), "as the run has them"
    assert "gain.a+c" in found["global"]
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
        ({"task": {"name": "retrieval"}}, "evaluate.subsets: task compares"),
        ({"data": {"name": "toy", "shapes": {"a": [4]}}}, "evaluate.subsets: modality"),
        ({"clients": {"missing_rows_test": {"a": 1.0}}}, "evaluate.subsets: scored"),
        ({"evaluate": {"subsets": "every"}}, "evaluate.subsets: must be"),
    ],
)
def test_subsets_that_cannot_be_scored_are_refused(changes: dict[str, Any], said: str) -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "evaluate": {"subsets": "all"}, "rounds": 1}
    with refuses(PolyfedError, said):
        assemble(parse_recipe(table | changes))


def test_the_report_the_table_and_the_comparison_name_the_worst_subset(tmp_path: Path) -> None:
    run = polyfed.run(three(), out=tmp_path / "run")
    found = run.result["metrics"]["global"]
    names = [name.removeprefix("subset.") for name in found if name.startswith("subset.")]
    worst = min(names, key=lambda name: found[f"subset.{name}"]).replace("+", " + ")
    page = Path(write_report(tmp_path / "run")).read_text()
    assert f"Worst: <b>{worst}</b>" in page
    assert all(f'<th scope="row">{name.replace("+", " + ")}</th>' in page for name in names)
    comparison = compare([tmp_path / "run"])
    columns = {column.title: column for column in comparison.columns}
    assert {"from a + c", "worst subset", "worst subset, personal", "from a + c, personal"} <= columns.keys()
    gain = gain_words(found["gain.c"], "share", run.result["intervals"]["global"]["gain.c"])
    assert gain in page.replace("&#43;", "+")
    assert gain in printed_result(run.result)
    told = run.result["intervals"]["global"]["lacks.a"]
    printed = "".join(words for words in printed_result(run.result).split("\n") if "rows that lack a " in words)
    for text in (f"{100 * told['low']:.1f} % to {100 * told['high']:.1f} %", f"{told['rows']} rows"):
        assert text in page
        assert text in printed
    assert f"({100 * told['low']:.1f} to" in comparison.cell(comparison.groups[0], columns["rows that lack a"])
    assert "rows as they come" in page
    assert "rows as they come" in printed_result(run.result)
    assert "alone" not in printed_result(run.result), "two scores of one modality would look the same"


def printed_result(result: dict[str, Any]) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(result_table(result))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_few_rows_are_said() -> None:
    assert with_interval(0.5, "share", {"rows": 7, "low": 0.2, "high": 0.8}) == (
        "50.0 % (20.0 % to 80.0 %, 7 rows, too few to tell)"
    )
    words = interval_of({"rows": 400, "low": 0.2, "high": 0.8, "clients": 6}, "share")
    assert words == "20.0 % to 80.0 %, 400 rows of 6 clients"


def test_a_subset_that_no_row_has_is_said() -> None:
    draw = np.random.default_rng(0)
    label = np.arange(200) % 2
    x = {m: draw.normal(size=(200, 3)).astype("float32") + label[:, None] for m in "ab"}
    x["a"][::2], x["b"][1::2] = np.nan, np.nan
    run = polyfed.run(data=x, labels=label, rounds=1, clients=2, evaluate={"subsets": "all"})
    assert "subset.a+b" not in run.result["metrics"]["global"]
    assert "no test row has all of these" in printed_result(run.result)


@pytest.mark.parametrize("share", [True, False])
def test_the_interval_over_clients_is_that_of_their_bootstrap(share: bool) -> None:
    draw = np.random.default_rng(3)
    sizes, clients = draw.integers(20, 60, 40), 40
    level = draw.uniform(0.4, 0.95, clients)
    rows = [draw.random(n) < p if share else draw.gamma(2.0, p, n) for n, p in zip(sizes, level, strict=True)]
    values = torch.tensor([[len(one), one.sum(), len(one)] for one in rows], dtype=torch.float64)
    found = of_moments(moments(values).tolist(), share=share, clusters=True)
    picks = draw.integers(0, clients, (4000, clients))
    above, below = values[:, 1].numpy()[picks].sum(1), values[:, 2].numpy()[picks].sum(1)
    low, high = np.quantile(above / below, [0.025, 0.975])
    assert found is not None
    assert found.value == pytest.approx(np.concatenate(rows).mean())
    assert found.low == pytest.approx(low, abs=0.25 * (high - low))
    assert found.high == pytest.approx(high, abs=0.25 * (high - low))
    of_rows = [torch.tensor([[1.0, float(v), 1.0] for one in rows for v in one], dtype=torch.float64)]
    by_rows = of_moments(moments(of_rows[0]).tolist(), share=share, clusters=False)
    assert by_rows is not None
    assert by_rows.high - by_rows.low < 0.7 * (high - low), "rows of one client are alike"


def test_the_mean_of_personal_scores_has_rows_and_an_interval_over_clients(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"), clients=ClientsSpec(num=5, min_size=4, partition="dirichlet", personal_test=0.3))
    done = polyfed.run(made, tmp_path / "run")
    each = [*done.rounds[-1]["personal_accuracy"].values()]
    known = done.result["intervals"]["personal"]
    low, high = stats.t.interval(0.95, len(each) - 1, np.mean(each), stats.sem(each))
    assert (known["mean"]["low"], known["mean"]["high"]) == pytest.approx((max(low, 0.0), min(high, 1.0)))
    sizes = [len(shard) for shard in population_of(made).test]
    assert (known["mean"]["rows"], known["mean"]["clients"]) == (sum(sizes), len(each))
    assert known["worst"]["rows"] == sizes[int(np.argmin(each))]
    page = write_report(tmp_path / "run").read_text()
    assert f"{sum(sizes)} rows of {len(each)} clients" in page


def test_rows_of_natural_clients_have_an_interval_over_clients_too() -> None:
    draw = np.random.default_rng(0)
    person = np.repeat(np.arange(12), 100)
    label = draw.integers(0, 2, 1200)
    weak = (person % 2).astype(bool)
    x = {m: (draw.normal(size=(1200, 3)) + np.where(weak, 0, 4 * label)[:, None]).astype("float32") for m in "ab"}
    run = polyfed.run(data=x, labels=label, clients=person, rounds=4)
    told = run.result["intervals"]["global"]["accuracy"]
    assert told["clients"] == 12
    assert told["high"] - told["low"] > 1.5 * (told["high_by_rows"] - told["low_by_rows"])


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
    with refuses(PolyfedError, "no global model"):
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
