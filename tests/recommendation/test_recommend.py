"""`polyfed recommend` from a file to a recipe that runs, within its time, and again after it was killed."""

import csv
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from study_world import HerePool
from test_candidates import TABLE, Planner

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.cli import main
from polyfed.core.errors import Diverged, EgressError, RecipeError, TooFewReplies
from polyfed.core.option_checks import search_ranges
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.loop import execute
from polyfed.experiment.study import worker
from polyfed.experiment.study.board import Board, Entry
from polyfed.experiment.study.default_ranges import default_space
from polyfed.recommendation import pilot as pilot_module
from polyfed.recommendation.linear import linear_scores
from polyfed.recommendation.pilot import Arm, Journal, Pilot
from polyfed.recommendation.recommend import Recommendation
from polyfed.report.scores import Metric
from refusals import refuses

FEW = ["fedavg", "feddyn"]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)
    monkeypatch.setattr(pilot_module, "LADDER", ((7, 1),))
    monkeypatch.setattr(pilot_module, "STEPS", (2, 3, 4))


def tiny(folder: Path) -> Path:
    """A table of three classes at six sites; `b` says little beside `a`."""
    draws, path = random.Random(0), folder / "tiny.csv"
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "label", *(f"a_{i}" for i in range(4)), *(f"b_{i}" for i in range(4))])
        for n in range(300):
            signal, word = n % 3 - 1, "xyz"[n % 3]
            a = [round(draws.gauss(1.2 * signal * (i % 2), 1), 3) for i in range(4)]
            writer.writerow([n % 6, word, *a, *(round(draws.gauss(0, 1), 3) for _ in range(4))])
    return path


def asked(folder: Path, **changes: Any) -> Recommendation:
    return polyfed.recommend(TABLE, folder, **{"minutes": 30, "methods": FEW, "jobs": 1} | changes)


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("recipe", "page")}


def test_a_csv_ends_as_a_recipe_that_runs_a_table_and_a_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [str(tiny(tmp_path)), "--client", "site", "--methods", "fedprox,partialfl", "--minutes", "10"]
    with pytest.raises(SystemExit) as end:
        main(["recommend", *words, "--set", "rounds=4", "--jobs", "1", "--out", str(out), "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "recommendation.json").read_text())
    assert found["choice"] in ("fedavg", "fedprox")
    assert found["paragraph"].startswith(f"Take {found['choice']} with train.lr = ")
    assert "partialfl was not compared, because partialfl shares nothing" in found["paragraph"]
    assert "b adds nothing to a that 4 seeds show" in found["paragraph"]
    rows = {row["method"]: row for row in found["methods"]}
    assert rows.pop("linear")["role"] == "reference"
    assert rows.keys() == {"fedavg", "fedprox", "local", "centralized"}
    assert {name: row["seeds"] for name, row in rows.items()} == {name: [1, 2, 3, 4] for name in rows}
    made = polyfed.run(out / "recommended.toml")
    (first,) = [row["scores"][0] for row in found["methods"] if row["method"] == found["choice"]]
    assert made.result["metrics"]["global"]["accuracy"] == first, "seed 1 of the pilot, bit for bit"
    page = (out / "index.html").read_text()
    assert found["sentences"][0].split(":")[0] in page
    head = (out / "recommended.toml").read_text()
    assert f"# {found['sentences'][0]}" in head


def test_what_a_first_recipe_reports_refuses_no_method(tmp_path: Path) -> None:
    """For rows that lack a modality it has prediction sets, which FedCouncil lacks. The recommended recipe has them."""
    frame = pd.read_csv(tiny(tmp_path))
    frame.loc[frame.index % 4 == 1, [name for name in frame if name.startswith("b_")]] = math.nan
    frame.to_csv(path := tmp_path / "holes.csv", index=False)
    assert 'conformal = "split"' in starter(path, {"client": "site"}).text
    advice = polyfed.recommend(path, tmp_path / "out", minutes=0, methods=["fedcouncil"], reading={"client": "site"})
    assert {entry.method for entry in advice.candidates if entry.planned} >= {"fedavg", "fedcouncil"}
    planner = Planner(TABLE, None, (), {"subsets": "all", "conformal": "split"})
    for name, kept in {"fedavg": {"subsets", "conformal"}, "fedcouncil": {"subsets"}}.items():
        made = planner.with_reports(planner.recipe_table({"algorithm": {"name": name}}))
        assert made["evaluate"].keys() == kept
    asked = planner.with_reports(
        {**planner.recipe_table({"algorithm": {"name": "fedavg"}}), "evaluate": {"subsets": "none"}}
    )
    assert asked["evaluate"] == {"subsets": "none", "conformal": "split"}


class Killed(Exception):
    """Stands for the end of the process."""


def test_what_was_killed_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = asked(tmp_path / "whole").facts()
    for stop in (2, 14):
        folder, seen = tmp_path / f"killed-{stop}", set[str]()

        def kill(event: str, board: Board, stop: int = stop, seen: set[str] = seen) -> None:
            seen |= {entry.name for entry in board.entries.values() if entry.ended}
            if len(seen) > stop:
                raise Killed

        with pytest.raises(Killed):
            asked(folder, listeners=[kill])
        assert not (folder / "recommendation.json").exists()
        assert without_times(asked(folder).facts()) == without_times(whole)


def test_the_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    found = asked(tmp_path / "out")
    results = [json.loads(path.read_text()) for path in (tmp_path / "out" / "study" / "runs").glob("*/result.json")]
    assert found.conclusion is not None
    firsts = [result for result in results if result["seed"] == 1 and "global" in result["metrics"]]
    assert found.conclusion.choice.interval in [result["intervals"]["global"]["accuracy"] for result in firsts]
    measured = {result["metrics"]["global"]["accuracy"] for result in results if "global" in result["metrics"]}
    for row in found.table():
        assert row["role"] in ("floor", "reference") or set(row["scores"]) <= measured
    placebo = next(row for row in found.table() if row["role"] == "feddyn")
    assert placebo["settings"] == next(row for row in found.table() if row["method"] == "feddyn")["settings"]


def test_the_time_is_kept_and_what_is_finished_counts(tmp_path: Path) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            Clock.now += 1.0
            return Clock.now

    path = tmp_path / "plan.json"
    journal = Journal(path, minutes=1.0, clock=Clock(), started=0.0)
    for _ in range(100):
        try:
            journal.tick()
        except pilot_module.TimeUp:
            break
    assert 60 <= journal.spent <= 65
    journal.write()
    assert Journal(path, minutes=1.0, clock=lambda: 0.0, started=0.0).left <= 0, "an earlier call counts"
    assert Journal(path, minutes=3.0, clock=lambda: 0.0, started=0.0).left > 100, "more minutes go on"
    with refuses(TooFewReplies, "0.001 minutes"):
        asked(tmp_path / "short", minutes=0.001)


@pytest.mark.parametrize(
    ("before", "each", "probed"),
    [(0.0, 1.0, 9), (0.0, 300.0, 4), (900.0, 60.0, 5), (900.0, 300.0, 2)],
)
def test_probes_on_a_slow_machine_leave_methods_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float, each: float, probed: int
) -> None:
    """The half hour begins before them: reading the data and asking the policies takes some of it."""
    now = [before]

    def study(self: Pilot, name: str, methods: dict[str, Any], *args: Any, **more: Any) -> None:
        cells = [SimpleNamespace(method=method) for method in methods]
        self.board = board = Board(tmp_path, cells, {})  # type: ignore[arg-type]
        for number, method in enumerate(methods):
            now[0] += each
            facts = {"bytes_up": 2, "bytes_down": 2, "seconds_total": each, "seconds_per_round": 1.0}
            entry = Entry(method, {}, cells[number], 1, {}, False, state="finished", result=facts)  # type: ignore[arg-type]
            board.entries[method] = entry
            board.reported[number] = [entry]
            if self.late(board):
                raise pilot_module.ProbesUp

    monkeypatch.setattr(Pilot, "_study", study)
    journal = Journal(tmp_path / "plan.json", minutes=30, clock=lambda: now[0], started=0.0)
    pilot = Pilot(tmp_path, {"rounds": 9}, ("global.accuracy",), journal, jobs=1)
    pilot.arms = {name: Arm(name, "candidate", {}) for name in ("fedavg", *"abcdefgh")}
    pilot._probe()
    assert len(pilot.going) == probed
    assert {arm.dropped for arm in pilot.arms.values()} <= {"", pilot_module.LATE}
    assert ("probe" in journal.facts) == (probed == 9), "else the same command probes the others"


def test_too_little_time_for_all_methods_drops_the_slowest(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "plan.json", minutes=1.0, clock=lambda: 0.0, started=0.0)
    pilot = Pilot(tmp_path, {"rounds": 9}, ("global.accuracy",), journal, jobs=1)
    pilot.arms = {
        name: Arm(name, "candidate", {}, seconds=s) for name, s in (("fedavg", 4.0), ("slow", 9.0), ("fast", 1.0))
    }
    pilot.arms["ceiling"] = Arm("ceiling", "ceiling", {}, seconds=10.0)
    plan = pilot._planned_search()
    assert list(plan["dropped"]) == ["ceiling", "slow"]
    pilot.arms["slow"].named = True
    assert list(pilot._planned_search()["dropped"]) == ["ceiling", "fast", "slow"]
    del pilot.arms["ceiling"]
    pilot.arms["slow"].named = False
    assert "1 minutes are too few for all methods" in plan["dropped"]["slow"]
    # 7 trials of a round, 3 of 2 more, 1 of 6 more: 19 of the 9 rounds of a run; then two runs
    assert pilot._price(pilot.arms["fast"], 7, 1) == pytest.approx(19 / 9 + 2)


def test_minutes_that_compare_nothing_are_not_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Pilot, "_study", lambda self, name, *args, **more: ran.append(name))
    told: list[str] = []

    def searched(arms: list[Arm], minutes: float) -> None:
        journal = Journal(tmp_path / f"{len(told)}.json", minutes, clock=lambda: 0.0, started=0.0)
        pilot = Pilot(tmp_path, {"rounds": 9}, ("global.accuracy",), journal, jobs=1, say=told.append)
        pilot.arms = {arm.name: arm for arm in arms}
        pilot._search()

    late = Arm("late", "candidate", {}, dropped=pilot_module.LATE)
    with pytest.raises(pilot_module.TimeUp):
        searched([Arm("fedavg", "candidate", {}, seconds=9.0), late], minutes=1.0)
    # two methods of 19 rounds in the search and two runs on reported seeds, of a second each
    needed = 2 * (19 + 2 * 9) / (pilot_module.SAFETY * pilot_module.SEARCH_SHARE)
    assert f"About {math.ceil(needed / 60)} minutes may be enough" in told[-1]
    assert not ran
    searched([Arm("fedavg", "candidate", {}, seconds=9.0)], minutes=1.0)
    assert ran, "nobody asked for a second method"
    assert [row["round_bytes"] for row in Recommendation((), None, (late,), tmp_path).table()] == [None]


def test_when_the_time_ends_in_the_search_it_recommends_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(pilot: Pilot) -> None:
        raise pilot_module.TimeUp

    monkeypatch.setattr(Pilot, "_search", late)
    told: list[str] = []
    monkeypatch.setattr(sys.modules[Recommendation.__module__], "SILENCE", 0.0)
    found = asked(tmp_path / "out", say=told.append)
    assert found.paragraph.startswith("Take fedavg for now: the time was too short for runs")
    assert (tmp_path / "out" / "recommended.toml").is_file()
    assert told[0].startswith("policies: 0 of ")
    assert any(line.startswith("2 rounds of 4 methods: ") for line in told)
    words = ["recommend", str(tiny(tmp_path)), "--client", "site", "--methods", "fedprox", "--jobs", "1"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "typed")])
    assert end.value.code == 4, "no score supports the choice"
    assert "<h1>Take fedavg, unmeasured</h1>" in (tmp_path / "typed" / "index.html").read_text()


def test_a_learning_rate_of_the_recipe_that_diverges_drops_no_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes train with the smallest rate of the search: on UCI-HAR, FedAvg and others were not tried."""

    def late(pilot: Pilot) -> None:
        raise pilot_module.TimeUp

    monkeypatch.setattr(Pilot, "_search", late)
    asked(tmp_path / "out")
    probes = [parse_toml(path.read_text()) for path in (tmp_path / "out" / "study").rglob("recipe.toml")]
    assert len(probes) == 4
    assert {probe["train"]["lr"] for probe in probes} == {min(default_space("fedavg", {})["train.lr"])}


def test_a_method_whose_best_setting_diverges_on_a_reported_seed_goes_on_with_a_smaller_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On six views, FedAvg and three others were left out, since the search had chosen the largest rate."""
    first = {row["method"]: row for row in asked(tmp_path / "first").table()}
    bad = {name: first[name]["settings"]["train.lr"] for name in FEW}
    assert min(bad.values()) > min(default_space("fedavg", {})["train.lr"]), "there are smaller ones"

    def diverging(recipe: Any, *others: Any) -> Any:
        table = recipe.table()
        if table["train"]["lr"] == bad.get(table["algorithm"]["name"]) and recipe.seed == 2:
            raise Diverged("training diverged")
        return execute(recipe, *others)

    monkeypatch.setattr(worker, "execute", diverging)
    told: list[str] = []
    found = asked(tmp_path / "out", say=told.append)
    rows = {row["method"]: row for row in found.table()}
    for name, rate in bad.items():
        assert rows[name]["settings"]["train.lr"] < rate
        assert len(rows[name]["scores"]) == 4, "all seeds, with one setting"
        tried = [line for line in told if line.startswith(f"{name} goes on with train.lr = ")]
        assert len(tried) == 1
        assert f"train.lr = {rate:g}" in tried[0]
    assert "was better on validation rows and diverged with seed 2." in found.paragraph
    assert asked(tmp_path / "out").paragraph == found.paragraph, "what is decided stays"


def test_what_modalities_add_is_measured_on_the_rows_that_have_all(tmp_path: Path) -> None:
    """Rows that lack a modality are others: their scores from the rest say nothing about what it adds."""
    frame = pd.read_csv(tiny(tmp_path))
    lost = [name for name in frame if name.startswith("b_")]
    frame.loc[frame.index % 3 == 1, lost] = math.nan  # one class
    frame.to_csv(path := tmp_path / "holes.csv", index=False)
    found = polyfed.recommend(
        path,
        tmp_path / "out",
        minutes=30,
        methods=["feddyn"],
        jobs=1,
        reading={"client": "site"},
        overrides=["rounds=3"],
    )
    assert found.conclusion is not None
    results = [json.loads(one.read_text()) for one in (tmp_path / "out" / "study").rglob("result.json")]
    told = [one["metrics"]["global"] for one in results if "gain.a" in one["metrics"]["global"]]
    assert len(told) == 4
    wanted = np.mean([one["gain.a"] for one in told])
    assert wanted != pytest.approx(np.mean([one["subset.a+b"] - one["subset.a"] for one in told]))
    (gain,) = [gain for gain in found.conclusion.gains if gain.modality == "b"]
    assert gain.test.mean == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("method", "chosen", "same"),
    [
        ("fedavgm", {"server.lr": 1.0, "server.momentum": 0.0, "train.lr": 0.1}, True),
        ("fedavgm", {"server.lr": 1.0, "server.momentum": 0.9}, False),
        ("fedadam", {"server.lr": 1.0}, False),
        ("fedprox", {"algorithm.mu": 0.0}, True),
        ("fedprox", {"algorithm.mu": 0.1}, False),
        ("scaffold", {}, False),
    ],
)
def test_a_method_at_the_values_at_which_it_is_fedavg_counts_as_fedavg(
    method: str, chosen: dict[str, Any], same: bool
) -> None:
    changes = next(c.changes for c in Planner(TABLE).all() if c.name == method)
    found, near = pilot_module._as_fedavg(Arm(method, "candidate", {}, chosen=chosen), dict(changes))
    assert bool(found) == same
    assert ("server.lr = 1, server.momentum = 0" in found) == (same and method == "fedavgm")
    partly = chosen.get("server.momentum") == 0.9
    assert near == (
        "With server.lr = 1, fedavgm differs from FedAvg only in server.momentum = 0.9 (FedAvg: 0)." * partly
    )


DECLARED = {
    name: [o for o, entry in search_ranges(cls).items() if entry.fedavg is not None and not entry.beside]
    for name, cls in ALGORITHMS.items()
}
"""Method -> its options with a value at which the method is FedAvg."""


@pytest.mark.parametrize("method", [name for name, options in DECLARED.items() if len(options) > 1])
def test_a_chosen_value_of_fedavg_is_named_for_every_method(method: str) -> None:
    entries = search_ranges(ALGORITHMS[method])
    first, *others = DECLARED[method]
    chosen = {f"algorithm.{first}": entries[first].fedavg}
    chosen |= {f"algorithm.{o}": next(v for v in entries[o].values if v != entries[o].fedavg) for o in others}
    near = pilot_module._as_fedavg(Arm(method, "candidate", {}, chosen=chosen), {"algorithm": {"name": method}})[1]
    named, _, rest = near.partition(" differs from FedAvg only in ")
    assert f"algorithm.{first} = " in named
    assert all(f"algorithm.{option} = " in rest for option in others)


def test_the_question_and_the_guesses_are_said(tmp_path: Path) -> None:
    told: list[str] = []
    reading = {"client": "site"}
    polyfed.recommend(tiny(tmp_path), tmp_path / "a", minutes=0, methods=FEW, reading=reading, say=told.append)
    text = "\n".join(told)
    assert "guessed: 'a' holds" in text
    assert "the test rows belong to clients that train" in text
    told.clear()
    unseen = ["clients.test_clients=0.34"]
    polyfed.recommend(
        tiny(tmp_path), tmp_path / "b", minutes=0, methods=FEW, reading=reading, overrides=unseen, say=told.append
    )
    assert "take no part in training, and settings are chosen on rows of others that do not train either" in told[-1]


@pytest.mark.parametrize(
    ("tested", "given", "held_out"),
    [
        ("others", {}, {"validation_clients": 0.2}),
        ("others", {"validation": 0.1}, {"validation": 0.1}),
        ("others", {"validation": 0}, {"validation": 0, "validation_clients": 0.2}),
        ("some", {}, {"validation": 0.1}),
        ("few", {}, {"validation": 0.1}),
    ],
)
def test_settings_are_chosen_on_people_who_do_not_train_if_the_test_rows_belong_to_such(
    tmp_path: Path, tested: str, given: dict[str, Any], held_out: dict[str, Any]
) -> None:
    people = np.repeat(np.arange(6 if tested == "few" else 12), 10)
    split = np.where(people < (4 if tested == "few" else 8), "train", "test")
    split[0] = "test" if tested == "some" else "train"
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, len(people), 3)).astype("float32")
    np.savez(tmp_path / "people.npz", label=draw.integers(2, size=len(people)), client=people, split=split, a=a, b=b)
    data = {"name": "npz", "path": str(tmp_path / "people.npz"), "modalities": ["a", "b"]}
    planner = Planner({**TABLE, "data": data, "clients": {"partition": "by-client", **given}})
    assert {key: value for key, value in planner.table["clients"].items() if key.startswith("val")} == held_out
    told: list[str] = []
    planner.tell(told.append)
    assert ("rows of those that do" in told[0]) == (tested != "some" and "validation_clients" not in held_out)


def test_a_recipe_whose_test_rows_divide_persons_is_told_so(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, 120, 3)).astype("float32")
    words = np.array([f"P{number:03d}" for number in draw.integers(0, 60, 120)])
    np.savez(tmp_path / "rows.npz", label=np.arange(120) % 2, client=np.arange(120) % 6, patient=words, a=a, b=b)
    data = {"name": "npz", "path": str(tmp_path / "rows.npz"), "modalities": ["a", "b"]}
    for changes, count in (({}, 1), ({"person": "patient"}, 0)):
        told: list[str] = []
        table = {**TABLE, "data": data | changes, "clients": {"partition": "by-client"}}
        polyfed.recommend(table, tmp_path / f"out{count}", methods=FEW, minutes=0, say=told.append)
        assert len([line for line in told if line.startswith("patient: ")]) == count


def test_policies_that_leave_nothing_end_with_3_and_wrong_calls_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = {block: {"server": [], "silo": []} for block in ("a", "b", "shared")}
    with refuses(EgressError, "method can run"):
        polyfed.recommend({**TABLE, "egress": closed}, tmp_path / "closed", methods=FEW)
    with refuses(RecipeError, "--methods"):
        polyfed.recommend(TABLE, tmp_path / "wrong", methods=["fedpox"])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("mine")
    with refuses(RecipeError, "holds no recommendation"):
        asked(tmp_path / "used")
    with refuses(TooFewReplies, "minutes"):
        asked(tmp_path / "one", minutes=1e-6)
    with refuses(RecipeError, "holds a recommendation"):
        polyfed.recommend({**TABLE, "seed": 2}, tmp_path / "one", minutes=1, methods=FEW)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({**TABLE, "egress": closed}))
    for words, code in (
        ([str(recipe), "--methods", "fedprox"], 3),
        ([str(recipe), "--methods", "fedpox"], 2),
        ([str(tmp_path / "none.toml")], 2),
        ([str(tmp_path / "none.csv")], 5),
        ([str(recipe), "--label", "y"], 2),
    ):
        with pytest.raises(SystemExit) as end:
            main(["recommend", *words, "--minutes", "0", "--out", str(tmp_path / "typed")])
        assert end.value.code == code, words
        assert "Traceback" not in capsys.readouterr().err


def test_without_minutes_it_lists_what_no_policy_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(TABLE))
    with pytest.raises(SystemExit) as end:
        main(["recommend", str(recipe), "--minutes", "0", "--methods", "cmsfed", "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert end.value.code == 0
    line = next(line for line in out.splitlines() if line.strip().startswith("cmsfed"))
    assert "prototypes of a to the server" in line
    assert out.count("cmsfed") == 1, "one line for each method"
    assert not (tmp_path / "out").exists(), "nothing was trained, and nothing takes the folder"


def test_what_can_do_nothing_writes_nothing(tmp_path: Path) -> None:
    closed = {block: {"server": [], "silo": []} for block in ("a", "b", "shared")}
    with refuses(EgressError, "method can run"):
        polyfed.recommend({**TABLE, "egress": closed}, tmp_path / "closed", methods=FEW)
    assert not (tmp_path / "closed").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("mine")
    assert asked(tmp_path / "used", minutes=0).facts()["page"] is None
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["letter.txt"]


def test_verdicts_are_made_once_for_each_state_of_data_policy_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    judge = Planner._verdict
    monkeypatch.setattr(Planner, "_verdict", lambda self, table: made.append("") or judge(self, table))

    def late(pilot: Pilot) -> None:
        raise pilot_module.TimeUp

    monkeypatch.setattr(Pilot, "_search", late)
    policy, out = tmp_path / "policy.toml", tmp_path / "out"
    policy.write_text('[egress."*"]\nserver = ["parameters", "statistic"]\n')

    def counted(**changes: Any) -> tuple[int, list[str]]:
        made.clear()
        found = asked(out, policy=policy, **changes)
        return len(made), [c.verdict for c in found.candidates]

    every, verdicts = counted()
    assert counted() == (0, verdicts)
    assert counted(minutes=0) == (0, verdicts)
    first = len(verdicts)
    assert 5 < first < every, "the pilot asks too: about placebos and choices"
    kept = (out / "verdicts.json").read_text()
    (out / "verdicts.json").write_text('{"state": 1')
    assert counted(minutes=0) == (first, verdicts), "a damaged file has none"
    (out / "verdicts.json").write_text(kept)
    policy.write_text(policy.read_text() + "[limits]\nmin_batch_size = 64\n")
    with refuses(EgressError, "method can run"):
        counted(minutes=0)
    policy.write_text(policy.read_text().partition("[limits]")[0])
    assert counted(minutes=0) == (0, verdicts)
    monkeypatch.setattr("polyfed.recommendation.candidates.code_digest", lambda: "another version")
    assert counted(minutes=0) == (first, verdicts)
    policy.write_text(policy.read_text() + "[[device]]\n")
    planner = Planner(TABLE)
    planner.policy = policy
    planner.remember(out)
    assert not planner.verdicts.state, "a device has data and a budget, which change"
    states = []
    for rows in (200, 201):
        planner = Planner({**TABLE, "data": {**TABLE["data"], "rows": rows}})
        planner.remember(out)
        states.append(planner.verdicts.state)
    assert len({*states, ""}) == 3, "other data begin anew"


def test_a_method_goes_on_with_the_option_that_the_policy_allows() -> None:
    planner = Planner(TABLE)
    judged = [planner.judge(c) for c in planner.all() if c.method in ("cmsfed", "fedprox")]
    arms = sys.modules[Recommendation.__module__]._arms(planner, judged)
    assert arms["cmsfed"].title == "cmsfed with prototypes = local"
    assert arms["fedprox"].title == "fedprox"


@pytest.mark.parametrize(("rounds", "last"), [(2, 1), (4, 1), (6, 2), (10, 3), (27, 3), (100, 3)])
def test_a_trial_is_scored_by_its_last_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, last: int
) -> None:
    """At most a third of a run, so that the first rounds of a short one do not count in its score."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(Pilot, "_study", lambda self, name, *args, **more: given.append(more["search"]))
    journal = Journal(tmp_path / "plan.json", 30, clock=lambda: 0.0, started=0.0)
    pilot = Pilot(tmp_path, {"rounds": rounds}, ("global.accuracy",), journal, jobs=1)
    pilot.arms = {"fedavg": Arm("fedavg", "candidate", {}, seconds=1.0)}
    pilot._search()
    assert [search["score_over"] for search in given] == [last]
    evaluations = -(-rounds // given[0]["least_rounds"])
    assert last <= max(1, evaluations / 3)


def test_the_mean_of_evaluations_costs_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for averaged in (1, 3):
        monkeypatch.setattr(pilot_module, "AVERAGED", averaged)
        monkeypatch.setattr(pilot_module, "STEPS", (1,))
        polyfed.recommend({**TABLE, "rounds": 9}, tmp_path / str(averaged), methods=["fedavg"], jobs=1)
        runs = (tmp_path / str(averaged) / "study" / "runs").iterdir()
        rows = {path.name: (path / "rounds.jsonl").read_text().splitlines() for path in runs}
        counts.append(sum("metrics" in json.loads(line) for lines in rows.values() for line in lines))
    assert counts[0] == counts[1] > 9


def test_budgets_of_bytes_and_privacy_leave_methods_out(tmp_path: Path) -> None:
    found = asked(tmp_path / "bytes", methods=["fedprox", "scaffold"], max_bytes=30_000)
    reasons = {row["method"]: row["dropped"] for row in found.table()}
    assert "and the budget is 30,000" in reasons["scaffold"]
    assert not reasons["fedavg"]
    listed = polyfed.recommend(TABLE, tmp_path / "noise", minutes=0, epsilon=8.0, methods=["fedprox", "fedproto"])
    verdicts = {c.name: c for c in listed.candidates}
    assert verdicts["fedprox"].planned
    assert not verdicts["fedproto"].planned


def test_the_linear_reference_is_that_of_scikit_learn(tmp_path: Path) -> None:
    planner = Planner(parse_toml(starter(tiny(tmp_path), {"client": "site"}).text))
    found = linear_scores(planner, Metric("global.accuracy", lowest=False, share=True), [1, 2])
    population = population_of(parse_recipe(planner.recipe_table({"algorithm": {"name": "fedavg"}})), planner.columns)
    rows = pd.read_csv(tmp_path / "tiny.csv")
    x, y = rows[[name for name in rows if name[:2] in ("a_", "b_")]].to_numpy(), rows["label"].to_numpy()
    train, test = torch.unique(population.train.rows).numpy(), population.test_rows.numpy()
    whole = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)).fit(x[train], y[train])
    assert found[1] == pytest.approx(whole.score(x[test], y[test]))
    assert linear_scores(planner, Metric("personal.mean", lowest=False, share=True), [1]) == {}


def test_the_linear_reference_of_numbers_is_a_ridge_regression(tmp_path: Path) -> None:
    first = starter(tiny(tmp_path), {"client": "site", "label": "a_0", "modalities": {"b": "b_*"}})
    planner = Planner(parse_toml(first.text))
    error = linear_scores(planner, Metric("global.mae", lowest=True, share=False), [1])[1]
    population = population_of(parse_recipe(planner.recipe_table({"algorithm": {"name": "fedavg"}})), planner.columns)
    rows = pd.read_csv(tmp_path / "tiny.csv")
    x, y = rows.filter(like="b_").to_numpy(), rows["a_0"].to_numpy()
    train, test = torch.unique(population.train.rows).numpy(), population.test_rows.numpy()
    line = make_pipeline(StandardScaler(), Ridge()).fit(x[train], y[train])
    assert error == pytest.approx(np.abs(line.predict(x[test]) - y[test]).mean(), rel=1e-3)


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")  # a class of the held-out site is new
def test_settings_are_chosen_on_clients_that_nobody_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot_module, "LADDER", ((3, 1),))
    monkeypatch.setattr(pilot_module, "STEPS", (1,))
    found = polyfed.recommend(
        tiny(tmp_path),
        tmp_path / "out",
        methods=["fedavg"],
        reading={"client": "site"},
        overrides=["rounds=1", "clients.test_clients=0.34"],
        jobs=1,
    )
    assert found.conclusion is not None
    assert found.conclusion.choice.validation is not None
    recipe = polyfed.load_recipe(tmp_path / "out" / "recommended.toml")
    population = population_of(recipe)
    client = population.columns.client
    assert client is not None
    parts = (population.train.rows, population.validation_rows, population.test_rows)
    train, held, test = (set(client[rows].tolist()) for rows in parts)
    assert not train & held
    assert not test & (train | held)
