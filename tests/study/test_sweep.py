"""A sweep carries a study out, goes on after any kill, and says what ran, failed and is left."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from study_world import HerePool, table

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.experiment.running import machine
from polyfed.experiment.study import plan, scheduler
from polyfed.experiment.study.board import DIVERGED
from polyfed.experiment.study.pool import Message, Pool, Worker
from refusals import refuses

SCORE = "metrics.global.accuracy"


def numbers(frame):
    """The frame without what another sweep may change: times and folders."""
    kept = [c for c in frame.columns if "seconds" not in c and c not in ("folder", "why")]
    return [{key: value for key, value in row.items() if value == value} for row in frame[kept].to_dict("records")]


@pytest.fixture
def here(monkeypatch):
    """Sweeps carry out their runs in this process."""
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A study with a search, swept once, and its folder."""
    folder = tmp_path_factory.mktemp("searched")
    study = table(
        folder,
        methods={"fedavg": {}, "fedprox": {"search": {"algorithm.mu": [0.1, 1.0, 10.0]}}},
        search={"trials": 2, "seeds": [11], "keys": {"train.lr": {"low": 0.01, "high": 0.5, "scale": "log"}}},
        title="A <small> study",
    )
    return study, folder / "out", polyfed.sweep(study, folder / "out", jobs=1)


def test_a_sweep_returns_a_row_for_each_reported_run(searched):
    _, out, frame = searched
    assert list(zip(frame["method"], frame["seed"], strict=True)) == [
        ("fedavg", 1),
        ("fedavg", 2),
        ("fedprox", 1),
        ("fedprox", 2),
    ]
    assert set(frame["state"]) == {"finished"}
    result = json.loads((Path(frame["folder"][0]) / "result.json").read_text())
    assert frame[SCORE][0] == result["metrics"]["global"]["accuracy"]
    assert frame.groupby("method")["train.lr"].nunique().eq(1).all()
    assert (out / "results.csv").read_text().count("\n") == 5


def test_settings_are_chosen_on_validation_rows_and_other_seeds(searched):
    _, out, frame = searched
    runs = json.loads((out / "study.json").read_text())["runs"]
    tuning = [run for run in runs if run["tuning"]]
    assert {run["seed"] for run in tuning} == {11}
    assert len(tuning) == 4, "two trials for each method"
    scores = {}
    for run in tuning:
        recipe = polyfed.load_recipe(out / run["folder"] / "recipe.toml")
        assert recipe.clients.measure_on == "validation"
        result = json.loads((out / run["folder"] / "result.json").read_text())
        scores.setdefault(run["method"], {})[run["chosen"]["train.lr"]] = result["metrics"]["global"]["accuracy"]
    for method, found in scores.items():
        (chosen,) = frame[frame["method"] == method]["train.lr"].unique()
        assert found[chosen] == max(found.values())
    for folder in frame["folder"]:
        assert polyfed.load_recipe(Path(folder) / "recipe.toml").clients.measure_on is None


def test_finished_runs_are_not_run_again_and_new_ones_are_added(searched, here, tmp_path):
    study, swept, frame = searched
    out = shutil.copytree(swept, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    seen = []
    again = polyfed.sweep(
        study | {"seeds": [1, 2, 3]}, out, jobs=1, listeners=[lambda event, board: seen.append(board)]
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sum(not entry.kept for entry in seen[-1].entries.values()) == 2
    assert numbers(again[again["seed"] < 3]) == numbers(frame)


def test_the_page_says_what_ran_and_what_was_tried(searched):
    _, out, _ = searched
    page = (out / "index.html").read_text()
    assert "A &lt;small&gt; study" in page
    assert "Chosen settings" in page
    assert "Nothing failed, and nothing is left." in page
    assert page.count("report.html") >= 8


def test_compare_reads_the_runs_of_a_study_with_their_names(searched):
    _, out, frame = searched
    comparison = polyfed.compare([out])
    assert [group.method for group in comparison.groups] == ["fedavg", "fedprox"]
    assert comparison.frame()["metrics.global.accuracy"][0] == pytest.approx(
        frame[frame["method"] == "fedavg"][SCORE].mean()
    )


def test_a_run_that_fails_says_why_and_stops_no_other(tmp_path, here):
    study = table(
        tmp_path, seeds=[1], methods={"fedavg": {}, "wild": {"set": {"algorithm.name": "fedavg", "train.lr": 1e30}}}
    )
    frame = polyfed.sweep(study, tmp_path / "out", jobs=1)
    assert list(frame["state"]) == ["finished", "failed"]
    assert "training left the finite numbers" in frame["why"][1]
    assert "training left the finite numbers" in (tmp_path / "out" / "index.html").read_text()


class Unstable(HerePool):
    """Training diverges on seed 12 with one learning rate."""

    diverges = 0.0

    def start(self, job, recipe, folder, until=0):
        if recipe["seed"] == 12 and recipe["train"]["lr"] == self.diverges:
            self.messages.append(Message(job, "done", {"code": DIVERGED, "why": "diverged"}))
        else:
            super().start(job, recipe, folder, until)


def test_a_setting_that_diverges_on_another_seed_is_not_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", Unstable)
    keys = {"train.lr": [0.02, 0.05, 0.1, 0.2]}
    search = {"trials": 4, "batch": 4, "seeds": [11, 12], "sampler": "grid", "keys": keys, "confirm": 2}
    study = table(tmp_path, seeds=[1], methods={"fedavg": {}}, search=search)
    seen = []
    first = polyfed.sweep(study, tmp_path / "first", jobs=1, listeners=[lambda event, board: seen.append(board)])
    assert sorted(e.seed for e in seen[-1].entries.values() if e.tuning) == [11] * 4 + [12] * 2
    monkeypatch.setattr(Unstable, "diverges", first["train.lr"][0])
    again = polyfed.sweep(study, tmp_path / "again", jobs=1)
    assert again["state"][0] == "finished"
    assert again["train.lr"][0] != first["train.lr"][0]
    page = (tmp_path / "again" / "index.html").read_text()
    assert page.count(" with all seeds") == 2
    assert "diverged with all seeds" in page


@pytest.mark.parametrize("metric", [["global.accuracy", "global.mae"], "personal.mean"])
def test_a_search_takes_the_smallest_error_and_the_page_writes_it_as_a_number(tmp_path, here, metric):
    """The first metric of the list is a share, but the runs have only the error; and their personal score is one."""
    changes = {"data": {"name": "objective.made:Made"}, "clients.partition": "by-client", "clients.personal_test": 0.3}
    search = {"trials": 2, "seeds": [11], "sampler": "grid", "keys": {"train.lr": [1e-6, 0.05]}}
    study = table(tmp_path, seeds=[1], methods={"fedavg": {}}, metric=metric, search=search)
    frame = polyfed.sweep(study | {"set": changes, "unset": ["clients.num"]}, tmp_path / "out", jobs=1)
    assert frame["train.lr"][0] == 0.05, "with the other rate, the model has not trained"
    mae = frame["metrics.global.mae" if isinstance(metric, list) else "metrics.personal.mean"][0]
    assert f"{mae:.3f}" in (tmp_path / "out" / "index.html").read_text()


def test_a_metric_that_no_run_has_is_named_with_those_that_there_are(tmp_path, here, monkeypatch):
    monkeypatch.setattr(plan, "measured_by", lambda *_: None)  # as if the metrics were not known before the run
    study = table(tmp_path, seeds=[1], methods={"fedavg": {}}, metric="global.pearson")
    boards = []
    polyfed.sweep(study, tmp_path / "out", jobs=1, listeners=[lambda event, board: boards.append(board)])
    assert "no global.pearson, only global.accuracy, " in (tmp_path / "out" / "index.html").read_text()
    ((why, (run,)),) = boards[-1].problems()
    assert why.startswith("finished without global.pearson, only global.accuracy, ")
    assert run.startswith("fedavg-toy-s1-")


def test_a_setting_that_diverges_is_noted_and_not_tried_again(tmp_path, here):
    lr = {"search": {"train.lr": [1e30, 0.05]}}
    search = {"trials": 2, "seeds": [11], "sampler": "grid"}
    study = table(tmp_path, seeds=[1], methods={"fedavg": lr}, search=search)
    frame = polyfed.sweep(study, tmp_path / "out", jobs=1)
    assert list(frame["train.lr"]) == [0.05]
    (note,) = (tmp_path / "out" / "failures").iterdir()
    assert json.loads(note.read_text())["code"] == 4
    seen = []
    polyfed.sweep(study, tmp_path / "out", jobs=1, listeners=[lambda event, board: seen.append(event)])
    assert seen == ["sweep-started", "sweep-finished"], "nothing was left to run"


def test_a_half_written_result_does_not_count(tmp_path, here):
    study = table(tmp_path, seeds=[1], methods={"fedavg": {}})
    frame = polyfed.sweep(study, tmp_path / "out", jobs=1)
    result = Path(frame["folder"][0]) / "result.json"
    result.write_text(result.read_text()[:100])
    assert numbers(polyfed.sweep(study, tmp_path / "out", jobs=1)) == numbers(frame)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with refuses(RecipeError, "holds no study"):
        polyfed.sweep(table(tmp_path), tmp_path / "out")
    with refuses(RecipeError, "--jobs"):
        polyfed.sweep(table(tmp_path), tmp_path / "other", jobs=0)


def test_a_further_run_starts_only_if_cores_and_memory_allow_it(tmp_path, monkeypatch):
    pool = Pool(tmp_path, 2, need=2_000_000_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 1_000_000_000)
    assert pool.refusal() == "", "a first run starts however little memory is free"
    pool.workers = [Worker(None, tmp_path / "worker-1.log", "some run")]
    assert pool.refusal() == "a run needs about 2.0 GB of memory, and 1.0 GB are free"
    monkeypatch.setattr(machine, "free_memory", lambda: 3_000_000_000)
    assert pool.refusal() == ""
    pool.workers *= 2
    assert pool.refusal() == "2 runs at once are carried out"


def test_a_sweep_that_ends_early_leaves_no_runs_to_the_next_one_of_its_pool(tmp_path):
    """As in a recommendation, whose stages share a pool and stop what takes too long."""

    class Enough(Exception): ...

    def stop(event, board):
        if board.count("running"):
            raise Enough

    pool = HerePool(tmp_path, 1)
    with pytest.raises(Enough):
        scheduler.carried_out(table(tmp_path, seeds=[1]), tmp_path / "first", pool, [stop])
    board = scheduler.carried_out(table(tmp_path, seeds=[2]), tmp_path / "second", pool, [])
    assert [entry.seed for entry in board.entries.values() if entry.state == "finished"] == [2, 2]


def test_a_pool_drops_the_processes_of_its_runs_and_hears_nothing_more_of_them(tmp_path):
    with Pool(tmp_path, 1) as pool:
        pool.start("one", {}, tmp_path / "one")
        process = pool.workers[0].process
        pool.drop()
        assert process.poll() == -signal.SIGKILL
        assert not pool.workers
        assert [pool.message(0.1), pool.message(0.1)] == [None, None]


@pytest.mark.slow
def test_while_memory_is_short_only_one_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    most, waits = [0], set()

    def watch(event, board):
        most.append(board.count("running"))
        waits.update(entry.why for entry in board.entries.values() if entry.state == "left")

    polyfed.sweep(table(tmp_path, seeds=[1]), tmp_path / "out", jobs=2, listeners=[watch])
    assert max(most) == 1
    assert any("of memory, and" in why for why in waits)


def start(study: dict, folder: Path) -> subprocess.Popen:
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    words = ["sweep", str(folder / "study.toml"), "--out", str(folder / "out"), "--jobs", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "polyfed.cli", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["parent", "children"])
def test_a_sweep_that_was_killed_five_times_ends_with_the_same_table(tmp_path, victim):
    """Three methods, three seeds, two values; SIGKILL at random moments."""
    study = table(
        tmp_path,
        seeds=[1, 2, 3],
        set={"rounds": 25},
        methods={"fedavg": {}, "fedprox": {}, "moon": {}},
        grid={"train.lr": [0.05, 0.1]},
    )
    whole = polyfed.sweep(study, tmp_path / "whole", jobs=2)
    draw, kills, process = random.Random(victim), 0, start(study, tmp_path)
    while kills < 5:
        time.sleep(draw.uniform(1.0, 8.0))
        if process.poll() is not None:
            break  # it was faster than the kills
        children = psutil.Process(process.pid).children()
        if victim == "parent":
            process.kill()
            process.wait()
            kills += 1
            process = start(study, tmp_path)
        elif children:
            os.kill(draw.choice(children).pid, signal.SIGKILL)
            kills += 1
    process.wait()
    assert kills >= 3, "the sweep ended before the third kill"
    assert process.returncode == 0
    frame = polyfed.sweep(study, tmp_path / "out", jobs=1)
    assert len(frame) == 18
    assert numbers(frame) == numbers(whole)


def halved(folder: Path, **changes: Any) -> dict[str, Any]:
    search = {"trials": 4, "batch": 4, "seeds": [11], "prune": "halving", "reduction": 2, "sampler": "random"}
    keys = {"train.lr": {"low": 0.001, "high": 0.5, "scale": "log"}}
    return table(folder, set={"rounds": 4}, search=search | {"keys": keys} | changes)


def rounds_in(out: Path) -> dict[str, list[int]]:
    """The rounds of each run of the search, from its files."""
    runs = [run for run in json.loads((out / "study.json").read_text())["runs"] if run["tuning"]]
    lines = {run["folder"]: (out / run["folder"] / "rounds.jsonl").read_text().splitlines() for run in runs}
    return {folder: [json.loads(line)["round"] for line in found] for folder, found in lines.items()}


def test_trials_stop_early_and_go_on_from_their_checkpoints(tmp_path, here):
    frame = polyfed.sweep(halved(tmp_path), tmp_path / "out")
    assert set(frame["state"]) == {"finished"}
    found = rounds_in(tmp_path / "out")
    assert len(found) == 8, "four trials of each method"
    assert sorted(map(len, found.values())) == [1, 1, 1, 1, 2, 2, 4, 4]
    assert all(rounds == [*range(1, len(rounds) + 1)] for rounds in found.values()), "no round is computed twice"
    whole = next(folder for folder, rounds in found.items() if len(rounds) == 4)
    again = polyfed.run(tmp_path / "out" / whole / "recipe.toml")
    result = json.loads((tmp_path / "out" / whole / "result.json").read_text())
    assert again.result["state_sha256"] == result["state_sha256"], "a paused run equals one that was never paused"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Every method of a scenario had the same budget in rounds." in page
    assert page.count("<td>4</td><td>8</td>") == 2, "four trials, 1 + 1 + 2 + 4 rounds"
    assert page.count("stopped after round 1") == 8, "twice two trials, each also among the runs"
    best = {method: rows["train.lr"].unique() for method, rows in frame.groupby("method")}
    assert all(len(values) == 1 for values in best.values())


@pytest.mark.parametrize(("prune", "stops"), [("halving", (2, 6)), ("median", (4,))])
def test_a_stopped_search_with_rungs_continues_with_the_same_table(tmp_path, here, monkeypatch, prune, stops):
    study = halved(tmp_path, prune=prune)
    whole = polyfed.sweep(study, tmp_path / "whole")
    for stop in stops:
        left = iter(range(stop))

        def start(self: HerePool, *args: Any, left: Any = left, **kwargs: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            HerePool.start(self, *args, **kwargs)

        stopping = type("Stopping", (HerePool,), {"start": start})
        with monkeypatch.context() as patch:
            patch.setattr("polyfed.experiment.study.scheduler.Pool", stopping)
            with pytest.raises(KeyboardInterrupt):
                polyfed.sweep(study, tmp_path / "out")
    assert numbers(polyfed.sweep(study, tmp_path / "out")) == numbers(whole)
    assert rounds_in(tmp_path / "out") == rounds_in(tmp_path / "whole")


def test_a_search_that_chooses_the_rounds_is_not_pruned(tmp_path):
    study = halved(tmp_path, keys={"rounds": [2, 4]})
    with refuses(RecipeError, "search cannot choose"):
        polyfed.sweep(study, tmp_path / "out")


def test_stop_ends_trials_and_reported_runs_too(tmp_path, here):
    study = halved(tmp_path)
    study["set"] |= {"rounds": 8, "stop.patience": 1, "stop.min_delta": 0.5, "evaluate.every": 1}
    frame = polyfed.sweep(study, tmp_path / "out")
    assert set(frame["state"]) == {"finished"}
    assert set(frame["stopped.round"]) == {2}
    assert sorted(map(len, rounds_in(tmp_path / "out").values())) == [1, 1, 1, 1, 2, 2, 2, 2], (
        "halved, then out of patience"
    )
    results = [json.loads(path.read_text()) for path in (tmp_path / "out" / "runs").glob("*/result.json")]
    assert {result["stopped"]["by"] for result in results} == {"patience"}
