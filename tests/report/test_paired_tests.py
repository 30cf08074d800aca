"""The tests of a comparison agree with SciPy, with published tables, and with plain sums."""

import json
import math

import numpy as np
import pytest
from sample import write_run
from scipy import stats

from polyfed.core.errors import RecipeError
from polyfed.report import compare, evidence, write_figures
from polyfed.report.comparison import tables as comparison_tables
from polyfed.report.comparison.paired_differences import Difference, Evidence
from polyfed.report.comparison.paired_tests import critical_difference, holm, mean_ranks, paired
from polyfed.report.comparison.score_against_cost import price_charts
from polyfed.report.scores import Metric
from refusals import refuses


@pytest.mark.parametrize("n", [2, 5, 12])
def test_paired_differences_agree_with_scipy(n):
    draw = np.random.default_rng(n)
    a, b = draw.normal(0.6, 0.1, n), draw.normal(0.5, 0.1, n)
    found = paired(list(a - b))
    known = stats.ttest_rel(a, b)
    interval = known.confidence_interval(0.95)
    assert found.mean == pytest.approx((a - b).mean())
    assert found.p == pytest.approx(known.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert paired(list(a - b), "wilcoxon").p == pytest.approx(stats.wilcoxon(a, b).pvalue)


def test_five_pairs_of_one_sign_have_the_known_p_value_of_wilcoxon():
    assert paired([0.1, 0.2, 0.3, 0.4, 0.5], "wilcoxon").p == pytest.approx(2 / 2**5)


def test_samples_that_prove_nothing_have_no_p_value():
    assert paired([0.1]).p is None
    assert paired([0.1, 0.1]).p is None
    assert paired([0.0, 0.0]).p is None
    assert paired([0.3 - 0.1, 0.2]).low is None, "equal except for rounding"


def test_holm_agrees_with_the_definition():
    p_values = [0.01, 0.04, 0.03, 0.005, 0.5]
    order = np.argsort(p_values)
    steps = [(len(p_values) - rank) * p_values[place] for rank, place in enumerate(order)]
    known = dict(zip(order.tolist(), np.minimum(np.maximum.accumulate(steps), 1.0).tolist(), strict=True))
    assert holm(p_values) == pytest.approx([known[place] for place in range(5)])
    assert holm([None, 0.4, 0.9]) == [None, 0.8, 0.9]
    assert holm([]) == []


@pytest.mark.parametrize(("methods", "quantile"), [(3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_differences_are_those_of_demsars_table(methods, quantile):
    """Demsar 2006, Table 5(a), alpha = 0.05."""
    assert critical_difference(methods, 14) == pytest.approx(
        quantile * math.sqrt(methods * (methods + 1) / 84), rel=5e-4
    )


def test_mean_ranks_and_friedmans_test_agree_with_scipy():
    scores = np.random.default_rng(1).normal(0.5, 0.1, (8, 4))
    scores[:, 2] += 0.3
    found = mean_ranks(scores.tolist())
    assert found.ranks == pytest.approx(stats.rankdata(-scores, axis=1).mean(axis=0))
    assert found.p == pytest.approx(stats.friedmanchisquare(*scores.T).pvalue)
    assert found.ranks.index(min(found.ranks)) == 2
    assert mean_ranks((-scores).tolist()).ranks == pytest.approx([5 - rank for rank in found.ranks])


def test_cliques_are_the_largest_sets_without_a_difference():
    found = mean_ranks([[0.9, 0.5, 0.5, 0.1]] * 40)
    assert found.ranks == (1.0, 2.5, 2.5, 4.0)
    assert found.cliques == ((1, 2),)
    everybody = mean_ranks([[0.9, 0.5, 0.1], [0.1, 0.5, 0.9]])
    assert sorted(everybody.cliques[0]) == [0, 1, 2]


@pytest.fixture
def runs(tmp_path):
    """Three methods on four seeds."""
    return [
        write_run(tmp_path / f"{name}-{seed}", seed=seed, algorithm=name, mu=mu, rounds=12)
        for name, mu in (("fedavg", 0.1), ("fedprox", 0.2), ("moon", 0.3))
        for seed in (1, 2, 3, 4)
    ]


def test_differences_are_paired_by_seed(runs):
    comparison = compare([*runs[:4], *runs[4:7]])  # the second method lacks seed 4
    (row,) = evidence(comparison).differences
    scores = {(f.recipe["algorithm"]["name"], f.recipe["seed"]): f for g in comparison.groups for f in g.folders}
    known = [
        scores["fedprox", seed].result["metrics"]["global"]["accuracy"]
        - scores["fedavg", seed].result["metrics"]["global"]["accuracy"]
        for seed in (1, 2, 3)
    ]
    assert (row.n, row.mean) == (3, pytest.approx(np.mean(known)))


def test_the_baseline_the_metric_and_the_test_are_chosen(runs):
    comparison = compare(runs)
    names = [group.method for group in comparison.groups]
    proof = evidence(comparison, "global.uar", names[2], "wilcoxon")
    assert {row.baseline for row in proof.differences} == {names[2]}
    assert [row.method for row in proof.differences] == names[:2]
    assert proof.metric == "global.uar"
    assert proof.ranks.blocks == 4
    with refuses(RecipeError, "validation.accuracy"):
        evidence(comparison, "global.urar")
    with refuses(RecipeError, "these runs"):
        evidence(comparison, baseline=names[0][:-1])


def test_one_seed_says_that_nothing_can_be_tested(runs):
    sheet = comparison_tables.differences_sheet(evidence(compare(runs[::4])))
    assert "a test needs at least two, so run the methods on more seeds" in sheet.title
    assert "Holm" not in sheet.title


def test_a_method_is_compared_with_its_own_placebo(tmp_path):
    """The names of the methods do not matter, and the search may choose another value for the placebo."""
    runs = []
    for method, mu, placebo in (("plain", 0.1, ""), ("idea", 0.2, "none"), ("control", 0.3, "shuffled")):
        for seed in (1, 2, 3):
            folder = write_run(tmp_path / f"{method}-{seed}", seed=seed + 10 * (mu > 0.2), mu=mu, rounds=3)
            recipe = (folder / "recipe.toml").read_text().replace(f"seed = {seed + 10}", f"seed = {seed}")
            line = f'mu = {mu}\nplacebo = "{placebo}"' if placebo else f"mu = {mu}"
            (folder / "recipe.toml").write_text(recipe.replace(f"mu = {mu}", line))
            result = json.loads((folder / "result.json").read_text()) | {"seed": seed}
            (folder / "result.json").write_text(json.dumps(result))
            run = {"folder": folder.name, "method": method, "scenario": "s", "tuning": False, "state": "finished"}
            runs.append(run | {"chosen": {"algorithm.mu": mu}})
    (tmp_path / "study.json").write_text(json.dumps({"runs": runs}))
    proof = evidence(compare([tmp_path]))
    scores = {key: np.array(list(values.values())) for key, values in proof.scores.items()}
    (row,) = proof.placebos
    assert (row.method, row.baseline, row.n) == ("idea", "control", 3)
    assert row.mean == pytest.approx((scores["s", "idea"] - scores["s", "control"]).mean())
    assert row.p_holm == row.p, "one test"
    sheet = comparison_tables.placebos_sheet(proof)
    assert sheet.headings[:3] == ["method", "placebo", "n"]
    for run in runs:
        del run["chosen"]
    (tmp_path / "study.json").write_text(json.dumps({"runs": runs}))
    assert evidence(compare([tmp_path])).placebos == (), "another difference of the recipes is no placebo"


def test_a_small_loss_is_a_good_rank(runs):
    by_loss = evidence(compare(runs), "global.loss").ranks.ranks
    by_hand = np.mean(
        [
            stats.rankdata(
                [[r.result["metrics"]["global"]["loss"] for r in g.folders][s] for g in compare(runs).groups]
            )
            for s in range(4)
        ],
        axis=0,
    )
    assert by_loss == pytest.approx(by_hand)


def test_scenarios_are_ranked_over_and_tested_apart(tmp_path):
    folders = []
    for seed in (1, 2):
        for algorithm in ("fedavg", "fedprox", "moon"):
            for clients in (10, 20):
                folder = tmp_path / f"{algorithm}-{clients}-{seed}"
                folders.append(write_run(folder, seed=seed, algorithm=algorithm, clients=clients, rounds=5))
    proof = evidence(compare(folders))
    assert proof.blocks == "scenarios"
    assert proof.ranks.blocks == 2
    assert proof.methods == ("fedavg", "fedprox", "moon")
    assert [(row.scenario, row.method) for row in proof.differences] == [
        ("made-up num=10", "fedprox"),
        ("made-up num=10", "moon"),
        ("made-up num=20", "fedprox"),
        ("made-up num=20", "moon"),
    ]


SCORES = {"classes": ("accuracy", {"fedavg": 0.9, "fedprox": 0.8, "moon": 0.7}),
          "numbers": ("mae", {"fedavg": 1.0, "fedprox": 2.0, "moon": 3.0})}  # fmt: skip
"""Scenario -> its metric and the score of each method. The first method is the best in both scenarios."""


@pytest.fixture
def study(tmp_path):
    """The folder of a study on two seeds, whose scenarios have different metrics."""
    runs = []
    for scenario, (metric, scores) in SCORES.items():
        for method, score in scores.items():
            for seed in (1, 2):
                folder = write_run(tmp_path / f"{scenario}-{method}-{seed}", seed=seed, algorithm=method, rounds=4)
                result = json.loads((folder / "result.json").read_text())
                result["metrics"] = {"global": {metric: score + seed / 100}, "personal": {"mean": score + seed / 100}}
                if metric == "mae":
                    result["task"] = {"name": "regression", "score": "mae", "best": "mae", "rising": False}
                (folder / "result.json").write_text(json.dumps(result))
                lines = (folder / "rounds.jsonl").read_text().splitlines()
                rows = [json.loads(line) | {"metrics": result["metrics"]} for line in lines]
                (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                run = {"folder": folder.name, "method": method, "scenario": scenario}
                runs.append(run | {"tuning": False, "state": "finished"})
    metrics = {scenario: [f"global.{metric}"] for scenario, (metric, _) in SCORES.items()}
    (tmp_path / "study.json").write_text(json.dumps({"metrics": metrics, "runs": runs}))
    return tmp_path


@pytest.mark.parametrize("listed", [False, True], ids=["a-metric-of-each-scenario", "one-list-for-all-scenarios"])
def test_each_scenario_is_ranked_and_written_by_its_own_metric(study, listed):
    if listed:
        facts = json.loads((study / "study.json").read_text())
        facts["metrics"] = {scenario: ["global.accuracy", "global.mae"] for scenario in SCORES}
        (study / "study.json").write_text(json.dumps(facts))
    comparison = compare([study])
    proof = evidence(comparison)
    assert proof.methods == ("fedavg", "fedprox", "moon")
    assert proof.ranks.ranks == (1.0, 2.0, 3.0)
    assert [proof.lowest(scenario) for scenario in SCORES] == [False, True]
    assert [proof.share(scenario) for scenario in SCORES] == [True, False]
    assert proof.table()["metrics"] == {"classes": "global.accuracy", "numbers": "global.mae"}
    sheet = comparison_tables.scenarios_sheet(comparison, proof)
    assert sheet.best == {(0, 1), (0, 2)}
    assert sheet.rows[0][1:3] == ["91.5 ± 0.7", "1.015 ± 0.007071"]
    assert sheet.headings == ["method", "classes, global.accuracy", "numbers, global.mae", "mean rank"]
    assert sheet.title.startswith("global.accuracy (%) or global.mae by scenario")
    differences = {(row[0], row[1]): row[3] for row in comparison_tables.differences_sheet(proof).rows}
    assert (differences["moon", "classes"], differences["moon", "numbers"]) == ("-20.0", "+2")


def test_the_figures_and_charts_of_a_scenario_have_its_metric(study, tmp_path):
    comparison = compare([study])
    write_figures(comparison, evidence(comparison), tmp_path / "figures")
    numbers, classes = (
        (tmp_path / "figures" / f"differences-{name}.svg").read_text() for name in ("numbers", "classes")
    )
    assert "global.mae minus that of fedavg; filled" in numbers
    assert "global.accuracy minus that of fedavg (points); filled" in classes
    units = {chart.title: chart.unit for chart in price_charts(comparison)}
    assert units == {"Score against bytes, classes": "share", "Score against bytes, numbers": "number"}


def test_a_personal_score_has_the_direction_of_the_runs_main_metric(study):
    comparison = compare([study])
    proof = evidence(comparison, "personal.mean")
    assert proof.ranks.ranks == (1.0, 2.0, 3.0)
    assert [proof.share(scenario) for scenario in SCORES] == [True, False]


def test_equal_differences_have_no_interval_and_no_test():
    rows = [Difference("s", "idea", "control", **vars(paired([0.1, 0.1, 0.1])), p_holm=None)]
    proof = Evidence({"s": Metric.of("global.accuracy")}, "t", (), tuple(rows), (), None, "seeds", {})
    sheet = comparison_tables.placebos_sheet(proof)
    assert list(sheet.rows[0]) == ["idea", "control", "3", "+10.0", "equal in all pairs", "no test", "no test"]


@pytest.mark.parametrize(
    ("runs", "units", "folded"),
    [
        ([(1, ""), (2, "")], "seed", False),
        ([(1, "fold 1"), (1, "fold 2")], "fold", True),
        ([(1, "fold 1"), (2, "fold 2")], "seed and fold", True),
    ],
)
def test_folds_are_called_folds_and_have_a_caveat(runs: list[tuple[int, str]], units: str, folded: bool) -> None:
    scores = {
        ("base", m): {run: 0.5 + n / 10 + place / 7 * n for place, run in enumerate(runs)} for n, m in enumerate("ab")
    }
    proof = Evidence({"base": Metric("global.accuracy", False, True)}, "t", (), (), (), None, "seeds", scores)
    assert (proof.units, proof.folded) == (units, folded)
    title = comparison_tables._pairing(proof, [Difference("base", "b", "a", 2, 0.1, 0.0, 0.2, 0.04, 0.04)])
    assert title.startswith(f"paired by {units}: ")
    assert ("folds share training rows" in title) == folded
