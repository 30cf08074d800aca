"""What a table shows, in numbers that are computed here again, and in sentences that claim no more than the tests."""

import dataclasses
import json

import numpy as np
import pytest
from sample import write_run

from polyfed.report.comparison.compare import compare
from polyfed.report.comparison.paired_differences import evidence
from polyfed.report.comparison.paired_tests import holm, mean_ranks
from polyfed.report.comparison.standing import Judgement, conclusion, cost_to, costs_of, judgements, seeds_needed
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.study_folder import NOT_CHOSEN, whole_scenarios

SEEDS = (1, 2, 3, 4)


def written(folder, scores, *, unranked=(), validation=0.7, noise=0.002):
    """Write a study: (scenario, method) -> the score, to which each seed adds its own noise."""
    runs = []
    for (scenario, method), score in scores.items():
        for seed in SEEDS:
            luck = np.random.default_rng((seed, len(scenario), len(method))).normal(0, noise)
            path = write_run(folder / f"{scenario}-{method}-{seed}", seed=seed, algorithm=method, rounds=2)
            result = json.loads((path / "result.json").read_text())
            result["metrics"] = {"global": {"accuracy": score + luck}, "validation": {"accuracy": validation}}
            (path / "result.json").write_text(json.dumps(result))
            run = {"folder": path.name, "method": method, "scenario": scenario, "tuning": False, "state": "finished"}
            runs.append(run | {"seed": seed, "ranked": method not in unranked})
    metrics = {scenario: ["global.accuracy"] for scenario, _ in scores}
    (folder / "study.json").write_text(json.dumps({"metrics": metrics, "runs": runs, "not_compared": []}))
    return compare([folder])


ABOVE = {
    (scenario, method): score
    for scenario in ("one", "three", "seven", "eleven-one", "thirteen-of", "seventeen-scen")
    for method, score in {"fedavg": 0.6, "moon": 0.7, "fedprox": 0.6, "local": 0.5}.items()
}


def test_the_paragraph_says_what_the_tests_show(tmp_path):
    comparison = written(tmp_path, ABOVE, unranked=("local",))
    proof = evidence(comparison, baseline="fedavg")
    assert proof.methods == ("fedavg", "moon", "fedprox"), "a method without a rank takes none from the others"
    text = conclusion(proof, "methods")
    assert text.startswith("Of 3 methods, moon has the best mean rank, 1.00 over 6 scenarios.")
    assert "moon is better than " in text
    assert "above it moon (6); below it local (6)." in text
    assert "fedprox" not in text.partition("differ from fedavg")[2].partition(".")[0]
    needed = sorted(seeds_needed(proof, row.scenario, row.method, "fedavg") for row in proof.differences)
    assert f"half of the tests would need {needed[(len(needed) - 1) // 2]} or more." in text


def test_the_paragraph_claims_no_order_that_is_not_shown(tmp_path):
    equal = {place: 0.6 for place in ABOVE if place[1] != "local"}
    proof = evidence(written(tmp_path, equal, noise=0.0), baseline="fedavg")
    assert "does not tell the methods apart" in conclusion(proof, "methods")
    assert "is better than" not in conclusion(proof, "methods")
    assert conclusion(proof, "methods").startswith("Of 3 methods, fedavg and fedprox and moon share the best mean rank")
    assert "none is only above it; none below." in conclusion(proof, "methods")
    few = dataclasses.replace(proof, ranks=None)
    assert "too few scenarios or methods" in conclusion(few, "methods")


def test_a_method_that_lost_runs_has_no_rank(tmp_path):
    written(tmp_path, ABOVE, unranked=("local",))
    study = json.loads((tmp_path / "study.json").read_text())
    for run in study["runs"]:
        if run["method"] == "fedprox" and run["scenario"] == "one" and run["seed"] > 1:
            run["state"] = "failed"
        elif run["method"] == "fedprox" and run["scenario"] == "one":  # the one run that is left is lucky
            path = tmp_path / run["folder"] / "result.json"
            result = json.loads(path.read_text())
            result["metrics"]["global"]["accuracy"] = 0.99
            path.write_text(json.dumps(result))
    (tmp_path / "study.json").write_text(json.dumps(study))
    proof = evidence(compare([tmp_path]), baseline="fedavg")
    assert "fedprox" not in proof.methods
    assert {row.method for row in proof.differences} == {"moon", "fedprox", "local"}


def test_each_scenario_is_a_family_of_holm_of_its_own(tmp_path):
    proof = evidence(written(tmp_path, ABOVE), baseline="fedavg")
    for scenario in {row.scenario for row in proof.differences}:
        rows = [row for row in proof.differences if row.scenario == scenario]
        assert len(rows) == 3
        assert [row.p_holm for row in rows] == pytest.approx(holm([row.p for row in rows]))


def test_sums_in_another_order_are_a_tie():
    assert mean_ranks([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.1], [0.5, 0.5, 0.1]]).ranks == (1.5, 1.5, 3.0)


def test_validation_far_above_the_test_cannot_judge(tmp_path):
    comparison = written(tmp_path, ABOVE, validation=0.72)
    found = judgements(comparison, "fedavg")
    assert found["one"].validation == pytest.approx(0.72)
    assert found["one"].test == pytest.approx(0.6, abs=0.01)
    assert not found["one"].holds
    assert Judgement(0.699, 0.6).holds
    assert Judgement(0.3, 0.6).holds, "a test that is easier than validation misleads nobody"
    assert judgements(comparison, "none") == {}
    only = comparison.only(lambda scenario, method: scenario == "one" and method != "moon")
    assert {(group.scenario, group.method) for group in only.groups} == {
        ("one", "fedavg"), ("one", "fedprox"), ("one", "local")
    }  # fmt: skip


def test_the_cost_of_a_score_is_that_of_all_rounds_until_then(tmp_path):
    folder = write_run(tmp_path / "run", rounds=3)
    rows = [
        {"round": n, "bytes_up": 10, "bytes_down": 5 * n, "seconds": {"train": 0.5}}
        | ({"metrics": {"global": {"accuracy": score}}} if score else {})
        for n, score in ((1, 0.0), (2, 0.5), (3, 0.8))
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cost = cost_to(Folder(folder), ["global.accuracy"], 0.5)
    assert (cost.bytes, cost.seconds) == (20 + 15, 1.0)
    assert cost_to(Folder(folder), ["global.accuracy"], 0.7).bytes == 30 + 30
    assert cost_to(Folder(folder), ["global.accuracy"], 0.9) is None


def test_an_error_is_reached_from_above_and_a_run_that_never_gets_there_is_the_dearest(tmp_path):
    folders = []
    for seed, errors in enumerate(((3.0, 0.5), (0.5, 0.5), (3.0, 3.0)), 1):
        folder = write_run(tmp_path / str(seed), seed=seed, rounds=2)
        rows = [
            {"round": n, "bytes_up": 10 * seed, "bytes_down": 0, "metrics": {"global": {"mae": error}}}
            for n, error in enumerate(errors, 1)
        ]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    costs = [cost_to(Folder(folder), ["global.mae"], 1.0) for folder in folders]
    assert [None if cost is None else cost.bytes for cost in costs] == [20, 20, None]
    (group,) = compare(folders).groups
    group = dataclasses.replace(group, metrics=("global.mae",))
    assert costs_of(group, 1.0).bytes == 20
    dear = [*folders[1:], write_run(tmp_path / "4", seed=4, rounds=2)]
    rows = [{"round": n, "bytes_up": 5, "bytes_down": 0, "metrics": {"global": {"mae": 0.5}}} for n in (1, 2)]
    (dear[-1] / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = compare(dear).groups
    costs = costs_of(dataclasses.replace(group, metrics=("global.mae",)), 1.0)
    assert costs.bytes == 20, "the median of 5, 20 and one that never gets there"
    (group,) = compare([folders[0], folders[2]]).groups
    assert costs_of(dataclasses.replace(group, metrics=("global.mae",)), 1.0) is None


def test_validation_is_judged_by_the_metric_of_the_study(tmp_path):
    written(tmp_path, {("one", "fedavg"): 0.6})
    for path in tmp_path.glob("*/result.json"):
        result = json.loads(path.read_text())
        result["metrics"] = {"global": {"uar": 0.5}, "validation": {"accuracy": 0.9, "uar": 0.55}}
        path.write_text(json.dumps(result))
    study = json.loads((tmp_path / "study.json").read_text()) | {"metrics": {"one": ["global.uar"]}}
    (tmp_path / "study.json").write_text(json.dumps(study))
    (judged,) = judgements(compare([tmp_path]), "fedavg").values()
    assert (judged.validation, judged.test, judged.holds) == (pytest.approx(0.55), pytest.approx(0.5), True)


def test_a_scenario_is_whole_when_all_its_runs_have_ended(tmp_path):
    def states(**found):
        names = ("done", "goes-on", "searches", "failed", "not-begun")
        runs = [
            {"folder": name, "method": "m", "scenario": name, "tuning": False, "state": state}
            for name, state in found.items()
        ]
        waits = {"method": "x", "scenario": "searches", "missing": 0, "of": 0, "why": NOT_CHOSEN}
        facts = {"metrics": {name: ["global.accuracy"] for name in names}, "runs": runs, "not_compared": [waits]}
        (tmp_path / "study.json").write_text(json.dumps(facts))
        return whole_scenarios(tmp_path)

    assert states(done="finished", searches="finished", failed="failed") == ["done", "failed"]
    assert states(done="running") == []
