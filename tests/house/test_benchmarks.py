"""The benchmarks: FedMultimodal's draws against NumPy's own global generator, and the page of speed."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns
from polyfed.report.comparison.paired_differences import Difference
from polyfed.report.comparison.tables import Sheet
from refusals import refuses

SUBJECTS = {0: 71, 1: 90, 9: 64}  # windows each; as text, 10 comes before 2


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "fedmultimodal.py"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    client = np.concatenate([*(np.full(n, who) for who, n in SUBJECTS.items()), np.full(20, 5)])
    split = np.where(client == 5, 1, 0)
    label = draw.integers(0, 6, len(client))
    acc, gyro = (draw.standard_normal((len(client), 128, 3)).astype(np.float16) for _ in range(2))
    np.savez(tmp_path / "har.npz", acc=acc, gyro=gyro, label=label, client=client, split=split)
    return tmp_path / "har.npz"


def loaded(script: dict[str, Any], path: Path, alpha: float) -> Columns:
    table: Columns = script["Shards"](path=str(path), modalities=("acc", "gyro"), alpha=alpha).load()
    return table


@pytest.mark.parametrize("alpha", [0.1, 5.0])
def test_every_window_is_held_out_or_in_one_shard_of_its_subject(script, path, alpha):
    table = loaded(script, path, alpha)
    client, split = table.client.numpy(), table.split.numpy()
    with np.load(path) as file:
        subject = file["client"]
    assert set(split[subject == 5]) == {TEST}
    for place, who in enumerate((0, 9, 1)):  # "1-0" ... "1-4", "10-0" ... "10-4", "2-0" ... "2-4"
        own = subject == who
        assert (split[own] == VALIDATION).sum() == SUBJECTS[who] // 5
        sizes = np.bincount(client[own & (split != VALIDATION)], minlength=16)
        assert sizes.nonzero()[0].tolist() == list(range(5 * place, 5 * place + 5))
        assert sizes.sum() == SUBJECTS[who] - SUBJECTS[who] // 5
        assert sizes[sizes > 0].min() >= 5


def test_a_small_alpha_leaves_shards_with_few_classes(script, path):
    classes = {}
    for alpha in (0.1, 100.0):
        table = loaded(script, path, alpha)
        shards = [table.label[(table.client == k) & (table.split == TRAIN)] for k in range(15)]
        classes[alpha] = np.mean([len(labels.unique()) for labels in shards])
    assert classes[0.1] < classes[100.0] - 1


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("round_", [1, 2, 77])
def test_cohorts_are_those_of_the_global_generator_whatever_the_seed(script, round_, seed):
    clients = type("Clients", (), {"eligible": range(105), "__len__": lambda self: 105})()
    fed = SimpleNamespace(clients=clients, round=round_, seed=seed)
    chosen, _ = script["Cohorts"](participation=10).choose({}, {}, fed)
    np.random.seed(round_ - 1)  # noqa: NPY002  (theirs)
    assert chosen == sorted(np.random.choice(range(105), 10, replace=False).tolist())  # noqa: NPY002


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("bench")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("simulated_cores")


@pytest.mark.parametrize(
    ("jobs", "workers", "handling", "seconds"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1, 0.0, 4.0),
        ([1.0, 1.0, 1.0, 1.0], 2, 0.0, 2.0),
        ([1.0, 1.0, 1.0, 1.0], 3, 0.0, 2.0),
        ([1.0, 1.0], 2, 0.5, 2.0),  # the server takes the second reply when it has finished the first one
        ([3.0, 1.0, 1.0, 1.0], 2, 0.0, 3.0),
        ([1.0, 1.0, 3.0], 2, 0.25, 4.5),  # the third job begins after the first reply, at 1.25
    ],
)
def test_simulated_workers_share_the_jobs_and_wait_for_the_server(cores, jobs, workers, handling, seconds):
    assert cores.seconds_of(jobs, workers, handling) == pytest.approx(seconds)


@pytest.mark.parametrize("workers", [1, 2, 5, 16, 64])
def test_a_simulated_round_takes_at_least_its_longest_unit_and_its_share_of_the_work(cores, workers):
    units = [0.3, 0.1, 0.2, 0.1, 0.1, 0.2]
    found = cores.Round(
        units=units, work=[10 * u for u in units], clients=[1, 4, 3, 1, 1, 2], handling=0.01, serial=1.0
    )
    seconds = cores.simulated(found, workers)
    assert seconds >= 1.0 + max(0.3 + 0.01, 1.0 / workers) - 1e-9
    assert seconds <= 1.0 + 1.0 + 6 * 0.01 + 1e-9
    if workers == 1:
        assert seconds == pytest.approx(2.06)
    if workers >= 6:
        assert seconds == pytest.approx(1.31)  # every other unit has been received while the longest one still runs


def measurement(ratio: float) -> dict[str, Any]:
    programs = {"bare loop": {"ms": 90.0}, "polyfed vectorised": {"ms": 20.0}, "pfl 0.6": {"failure": "no network"}}
    curves = {
        axis: {"polyfed vectorised": {"1": 2.0, "16": ratio}}
        for axis in ("worker processes", "clients in a round", "parameters")
    }
    return {
        "when": "2026-11-22 17:00 UTC",
        "machine": {"processor": "a", "cores": 2, "memory GiB": 24, "load before": 0.1},
        "versions": {"torch": "2.13.0", "peers": ["pfl 0.6"]},
        "runs": 3,
        "rounds": 15,
        "tables": {
            "small": {"programs": programs, "ratios": {"polyfed vectorised / bare loop": ratio}},
        },
        "curves": curves,
    }


def test_only_what_fell_by_more_than_the_tolerance_is_slower(bench: Any) -> None:
    before = bench.ratios_of(measurement(4.0))
    assert before["small: polyfed vectorised / bare loop"] == 4.0
    assert before["polyfed vectorised, 16 parameters / bare loop"] == 4.0
    assert len(before) == 7
    assert bench.slower(before, bench.ratios_of(measurement(3.1)), 0.25) == []
    found = bench.slower(before, bench.ratios_of(measurement(2.9)), 0.25)
    assert len(found) == 4
    assert found[0] == "small: polyfed vectorised / bare loop: was 4.00, is 2.90 (-28 %)"
    (lost, *_) = bench.slower(before, {}, 0.25)
    assert lost.endswith("was 4.00, and could not be measured now")


def test_a_report_has_each_ratio_beside_the_recorded_one(bench: Any) -> None:
    first, *lines = bench.report(measurement(4.0), measurement(2.0) | {"curves": {}}).splitlines()
    assert first.startswith("a, 2 cores, load 0.1; recorded: ")
    assert lines == ["small: polyfed vectorised / bare loop: 2.00, recorded 4.00", "pfl 0.6: no figure: no network"]


def test_the_page_keeps_what_people_wrote(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "speed.md"
    monkeypatch.setattr(bench, "PAGE", page)
    page.write_text(f"# Speed\n{bench.BEGIN}\nold\n{bench.END}\n## Earlier\n")
    bench.write(measurement(4.0))
    first = page.read_text()
    assert first.startswith(f"# Speed\n{bench.BEGIN}\n`make bench` wrote this part on 2026-11-22")
    assert first.endswith(f"{bench.END}\n## Earlier\n")
    assert "| small | polyfed vectorised | 20.0 | 4.00 |" in first
    assert "no figure: no network" in first
    assert "old" not in first
    plot = (tmp_path / "speed.svg").read_text()
    assert "clients in a round" in plot
    bench.write(measurement(4.0))
    assert page.read_text() == first
    assert (tmp_path / "speed.svg").read_text() == plot
    assert json.loads((tmp_path / "speed.json").read_text()) == measurement(4.0)
    page.write_text("# Speed\n")
    with refuses(SystemExit, "bench"):
        bench.write(measurement(4.0))


def test_a_check_ends_with_1_if_something_got_slower(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "PAGE", tmp_path / "speed.md")
    (tmp_path / "speed.json").write_text(json.dumps(measurement(4.0)))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--check"])
    monkeypatch.setattr(bench, "measured", lambda options: measurement(4.0))
    bench.main()
    assert "Nothing is more than 25 % slower" in capsys.readouterr().out
    monkeypatch.setattr(bench, "measured", lambda options: measurement(1.0))
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 1
    assert "is 1.00" in capsys.readouterr().out


@pytest.fixture
def leaderboard() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "leaderboard.py"))


def test_the_leaderboard_marks_the_scores_that_differ_from_fedavgs(leaderboard, monkeypatch):
    rows = [["fedavg", "43.7", "97.3", "1.5"], ["moon", "57.8", "98.3", "1.5"]]
    sheet = Sheet("scenarios", "", ["method", "first", "second", "mean rank"], rows, frozenset({(0, 1), (1, 2)}))
    monkeypatch.setitem(leaderboard["scores_of"].__globals__, "scenarios_sheet", lambda *_: sheet)
    differences = [
        Difference("first", "moon", "fedavg", 5, 0.14, 0.121, 0.159, 0.0001, 0.004),
        Difference("second", "moon", "fedavg", 5, 0.01, -0.01, 0.03, 0.2, 0.4),
    ]
    groups = [SimpleNamespace(scenario=scenario) for scenario in ("first", "second")]
    sheet = leaderboard["scores_of"](SimpleNamespace(groups=groups), SimpleNamespace(differences=differences))
    assert sheet.best == {(1, 1)}


def ended(folder: Path, score: float, validation: float, bytes_up: int) -> dict[str, Any]:
    """Write the folder of a run whose score after round 2 is half of the last one, in round 4."""
    folder.mkdir()
    (folder / "recipe.toml").write_text('rounds = 4\n[algorithm]\nname = "fedavg"\n')
    result = {"metrics": {"global": {"accuracy": score}, "validation": {"accuracy": validation}}}
    (folder / "result.json").write_text(json.dumps(result))
    rows = [
        {"round": n, "bytes_up": bytes_up, "bytes_down": 0, "metrics": {"global": {"accuracy": score * n / 4}}}
        for n in (2, 4)
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"folder": folder.name, "tuning": False, "state": "finished"}


def test_the_page_ranks_what_validation_can_judge_and_says_what_is_left(leaderboard, tmp_path):
    """Three scenarios have ended: one is judged, one misleads, one is a curve. A fourth one goes on."""
    runs = []
    for place, (method, score) in enumerate((("fedavg", 0.5), ("moon", 0.8), ("fedogm", 0.4), ("fedogm-placebo", 0.4))):
        for scenario, validation in (("views-iid", score), ("six-views", score), ("spoken-digits", 0.99)):
            for seed in (1, 2, 3):
                name = f"{method}-{scenario}-{seed}"
                own = ended(tmp_path / name, score + seed / 1000 * (place + 1), validation, 100 * (1 + place))
                runs.append(own | {"method": method, "scenario": scenario, "seed": seed, "ranked": place < 3})
        for rate in (0.01, 0.1):
            own = ended(tmp_path / f"{method}-{rate}", score + rate, 0.99, 100)
            runs.append(own | {"method": f"{method} lr={rate}", "scenario": "digits-iid", "seed": 1, "ranked": False})
    runs.append({"folder": "none", "tuning": True, "state": "left", "method": "moon", "scenario": "faces", "seed": 9})
    scenarios = ("views-iid", "six-views", "spoken-digits", "digits-iid", "faces")
    facts = {"metrics": {name: ["global.accuracy"] for name in scenarios}, "runs": runs, "not_compared": []}
    (tmp_path / "study.json").write_text(json.dumps(facts))
    board, left = leaderboard["results"](tmp_path)
    assert "faces" in left
    assert not set(scenarios[:4]) & set(left)
    assert board.scenarios("global") == ["views-iid", "six-views"]
    text = leaderboard["page"](board, left)
    assert "Of 3 methods with a global model, moon has the best mean rank, 1.00 over 2 scenarios." in text
    assert "| spoken-digits | 99.0 | 50.2 | **no** |" in text
    assert "| moon | 81.0 | **90.0** |" in text, "the curve, with its best learning rate"
    bytes_of = leaderboard["ratios_of"](board, ["views-iid"], lambda cost: cost.bytes)
    assert bytes_of["moon", "views-iid"] == "2", "moon reaches 0.48 in round 4 only, with twice the bytes"
    assert bytes_of["fedogm", "views-iid"] == "–"
    assert ("fedogm-placebo", "views-iid") not in bytes_of


ROOT = Path(__file__).parents[2]


def pretended(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = ["sh", str(ROOT / "benchmarks" / "gpu.sh"), "--pretend", "--out", str(folder), *options]
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)


def test_the_gpu_script_goes_on_after_items_that_fail_hang_or_die(tmp_path: Path) -> None:
    only = "^(machine|fedavg|fedavg, vectorised|small, float32, 5 clients, (polyfed .*|bare loop))$"
    with pretended(tmp_path, "--misbehave", "--only", only) as running:
        assert running.wait(240) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["pretend"], found["ended"], found["left_out"]) == (True, "complete", [])
    items = {entry["name"]: entry for entry in found["items"]}
    assert items["fail"]["failure"] == "ValueError: it failed on purpose"
    assert items["hang"]["failure"] == "stopped after 2 s"
    assert items["die"]["failure"] == "its process ended with exit status -9"
    assert all(items[how]["facts"] == {"so far": 1} for how in ("fail", "hang", "die"))
    good = [entry for name, entry in items.items() if name not in ("fail", "hang", "die")]
    assert len(good) == 6
    assert [entry["failure"] for entry in good if "failure" in entry] == []
    assert items["fedavg"]["facts"]["vectorised, plain"] == {"model": 0.0, "local_states": 0.0, "ledgers_equal": True}
    assert items["fedavg, vectorised"]["facts"] == {"equal": True}
    times = {name: entry["facts"] for name, entry in items.items() if name.startswith("small")}
    assert {facts["parameters"] for facts in times.values()} == {13319}
    assert all(facts["seconds"] > 0 for facts in times.values())
    page = (tmp_path / "gpu.md").read_text()
    assert "**these are no figures of a GPU**" in page
    assert "| vectorised, plain | 0.0e+00 (fedavg) | 0.0e+00 (fedavg) |" in page
    assert "- `hang`: 1 so far **stopped after 2 s**" in page
    with pretended(tmp_path, "--resume", "--only", only) as running:
        assert running.wait(60) == 0
    again = json.loads((tmp_path / "gpu.json").read_text())
    assert {entry["name"] for entry in again["items"]} == {entry["name"] for entry in good}
    assert [entry for entry in again["items"] if entry["part"] == "speed"] == [
        entry for entry in good if entry["part"] == "speed"
    ]


def test_the_gpu_script_runs_tests_that_exist_and_no_program_that_is_not_installed(monkeypatch) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))
    assert (ROOT / script["TESTS"]).exists()
    todo = list(script["items"](pretend=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    left, told = script["runnable"](todo)
    assert [item for item in todo if item not in left] == [item for item in todo if item.name.endswith(" pfl")] != []
    assert told == ["pfl is not installed here, so its column is empty."]
    assert script["runnable"](left) == (left, [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert script["runnable"](todo) == (todo, [])


def test_a_gpu_script_that_is_stopped_keeps_what_it_has(tmp_path: Path) -> None:
    with pretended(tmp_path, "--misbehave", "--only", "^small, bf16, 20 clients, bare loop$") as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "hang" in line:
                running.terminate()
        assert running.wait(60) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ended"] == "stopped from outside"
    assert [entry["name"] for entry in found["items"]] == ["fail"]
    assert found["left_out"] == ["hang", "die", "small, bf16, 20 clients, bare loop"]


def test_a_gpu_script_ends_at_its_time_limit_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    with pretended(tmp_path / "short", "--seconds", "2", "--misbehave", "--only", "^$") as running:
        assert running.wait(60) == 0
    found = json.loads((tmp_path / "short" / "gpu.json").read_text())
    assert found["ended"] == "the time limit of 2 s"
    assert found["seconds"] < 10
    if not torch.cuda.is_available():
        command = ["sh", str(ROOT / "benchmarks" / "gpu.sh"), "--out", str(tmp_path / "none"), "--only", "machine"]
        assert subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}).returncode == 1
        assert json.loads((tmp_path / "none" / "gpu.json").read_text())["ended"].startswith("no GPU: ")
