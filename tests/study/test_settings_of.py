"""A method with `settings_of` takes the settings that the search chose for another method."""

import json
from pathlib import Path

import pytest
from study_world import HerePool, refused, table

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.experiment.study.plan import planned
from polyfed.experiment.study.ranges import at
from polyfed.report import evidence
from polyfed.report.comparison import tables as comparison_tables
from refusals import refuses

LR = {"low": 0.01, "high": 0.5, "scale": "log"}
SEARCH = {"trials": 2, "seeds": [11], "sampler": "random", "keys": {"train.lr": LR}}
PLACEBO = {"algorithm": {"name": "fedogm", "placebo": "constant", "scale_params": "all_weights"}}
FEDOGM = {"set": {"algorithm.scale_params": "all_weights"}, "search": {"algorithm.alpha": [0.1, 0.5, 1.0]}}
SEARCHED = ["train.lr", "algorithm.alpha"]


class TwoPool(HerePool):
    """Two runs at the same time, of which the later one ends first."""

    @property
    def running(self) -> int:
        return len({message.job for message in self.messages})

    def refusal(self) -> str:
        return "two at a time" if self.running == 2 else ""

    def message(self, seconds: float):
        last = self.messages[-1].job
        return self.messages.pop(next(n for n, message in enumerate(self.messages) if message.job == last))


class Stop:
    """A listener that stops the sweep when this number of runs have ended."""

    def __init__(self, runs: int) -> None:
        self.runs = runs

    def __call__(self, event, board):
        if event == "sweep-progress" and board.count("finished") >= self.runs:
            raise KeyboardInterrupt


@pytest.fixture
def here(monkeypatch):
    """Sweeps carry out their runs in this process."""
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)


def study_of(folder: Path, **changes):
    """FedOGM with a search, and before it a placebo with the settings of FedOGM."""
    folder.mkdir(exist_ok=True)
    methods = {"control": {"set": PLACEBO, "settings_of": "fedogm"}, "fedogm": FEDOGM}
    return table(folder, methods=methods, search=SEARCH, set={"rounds": 1}) | changes


def numbers(frame):
    kept = [c for c in frame.columns if "seconds" not in c and c not in ("folder", "why")]
    return [{key: value for key, value in row.items() if value == value} for row in frame[kept].to_dict("records")]


def refusal(folder: Path, **changes) -> str:
    return refused(study_of(folder, **changes))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings-of")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)
        return folder / "out", polyfed.sweep(study_of(folder), folder / "out", jobs=1)


def test_the_method_takes_the_settings_and_has_no_trials(swept):
    out, frame = swept
    runs = json.loads((out / "study.json").read_text())["runs"]
    assert {run["method"] for run in runs if run["tuning"]} == {"fedogm"}
    assert sum(run["tuning"] for run in runs) == SEARCH["trials"]
    (chosen,) = frame[frame["method"] == "fedogm"][SEARCHED].drop_duplicates().to_dict("records")
    (taken,) = frame[frame["method"] == "control"][SEARCHED].drop_duplicates().to_dict("records")
    assert taken == chosen
    for folder in frame[frame["method"] == "control"]["folder"]:
        recipe = polyfed.load_recipe(Path(folder) / "recipe.toml").table()
        assert {key: at(recipe, key) for key in SEARCHED} == chosen
        assert recipe["algorithm"]["placebo"] == "constant"
        assert at(recipe, "clients.measure_on") is None


def test_the_files_of_the_study_show_where_the_settings_come_from(swept):
    out, frame = swept
    assert list(zip(frame["method"], frame["settings_of"], strict=True)) == [
        *[("control", "fedogm")] * 2,
        *[("fedogm", "")] * 2,
    ]
    assert "settings_of" in (out / "results.csv").read_text().splitlines()[0].split(",")
    runs = json.loads((out / "study.json").read_text())["runs"]
    assert {(run["method"], run["settings_of"]) for run in runs} == {("control", "fedogm"), ("fedogm", "")}
    page = (out / "index.html").read_text()
    assert page.count("(settings of fedogm)") == 3, "once among the chosen settings, and for each of two runs"
    assert "A method with “settings of” has no trials" in page
    assert page.count("<summary>all trials</summary>") == 1


def test_compare_recognises_the_placebo_and_names_the_search(swept):
    out, _ = swept
    comparison = polyfed.compare([out])
    proof = evidence(comparison)
    (row,) = proof.placebos
    assert (row.method, row.baseline, row.n) == ("fedogm", "control", 2)
    assert "control: uses the settings that the search chose for fedogm" in comparison.warnings
    assert [group["label"] for group in comparison.rows() if group.get("settings_of") == "fedogm"] == ["control"]
    groups = comparison_tables.content(comparison, proof)["groups"]
    assert [group.get("settings_of") for group in groups] == ["fedogm", None]
    head, first, second = comparison_tables.csv(comparison, proof).splitlines()
    place = head.split(",").index("settings_of")
    assert (first.split(",")[place], second.split(",")[place]) == ("fedogm", "")


def test_a_study_without_the_key_has_no_such_column_or_note(tmp_path, here):
    frame = polyfed.sweep(table(tmp_path, seeds=[1]), tmp_path / "out", jobs=1)
    assert "settings_of" not in frame.columns
    assert polyfed.compare([tmp_path / "out"]).warnings == ()
    assert "settings of" not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize("runs", [1, 3, 5])
def test_a_sweep_that_was_stopped_continues_with_the_same_settings(swept, tmp_path, monkeypatch, runs):
    """The sweep stops in the search, in the runs of the method, or in the runs of the placebo."""
    _, whole = swept
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", TwoPool)
    with pytest.raises(KeyboardInterrupt):
        polyfed.sweep(study_of(tmp_path), tmp_path / "out", jobs=2, listeners=[Stop(runs)])
    boards = []
    frame = polyfed.sweep(
        study_of(tmp_path), tmp_path / "out", jobs=2, listeners=[lambda event, board: boards.append(board)]
    )
    assert sum(entry.kept for entry in boards[-1].entries.values()) >= runs
    assert len(boards[-1].entries) == 2 + 2 + 2
    assert numbers(frame) == numbers(whole)


@pytest.mark.slow
def test_processes_that_were_stopped_continue_with_the_same_settings(swept, tmp_path):
    _, whole = swept
    with pytest.raises(KeyboardInterrupt):
        polyfed.sweep(study_of(tmp_path), tmp_path / "out", jobs=2, listeners=[Stop(3)])
    assert numbers(polyfed.sweep(study_of(tmp_path), tmp_path / "out", jobs=2)) == numbers(whole)


def test_each_value_of_the_grid_has_its_own_settings(tmp_path):
    """The placebo has one more key in its grid, so two of its cells take the settings of one searched cell."""
    control = {"set": PLACEBO, "settings_of": "fedogm", "grid": {"train.momentum": [0.0, 0.5]}}
    methods = {"control": control, "fedogm": FEDOGM, "own": {"set": {"algorithm.name": "fedavg"}}}
    _, cells = planned(study_of(tmp_path, methods=methods, grid={"rounds": [1, 4]}))
    takers = {cell.label: [taker.label for taker in cells if cell.gives_settings_to(taker)] for cell in cells}
    assert {label: found for label, found in takers.items() if found} == {
        f"fedogm rounds={n}": [f"control rounds={n} momentum=0", f"control rounds={n} momentum=0.5"] for n in (1, 4)
    }


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        (
            {"fedavg": {"search": {"train.lr": [1e30, 1e31]}}, "again": {"settings_of": "fedavg"}},
            "training diverged with each of the 2 settings that were tried",
        ),
        (
            {"fedavg": {"set": {"clients.num": 100_000}}, "again": {"settings_of": "fedavg"}},  # too few rows
            "its search stopped, because the run fedavg-toy-s11-",
        ),
    ],
)
def test_a_search_that_fails_gives_the_same_reason_for_both_methods(tmp_path, here, methods, why):
    methods["again"]["set"] = {"algorithm.name": "fedavg"}
    search = {"trials": 2, "seeds": [11], "sampler": "grid", "keys": {"train.lr": [0.05, 0.1]}}
    study = table(tmp_path, seeds=[1], methods=methods | {"fedprox": {}}, search=search)
    boards = []
    frame = polyfed.sweep(study, tmp_path / "out", jobs=1, listeners=[lambda event, board: boards.append(board)])
    assert list(frame["method"]) == ["fedprox"], "the other method goes on"
    told = {place: text for text, places in boards[-1].problems() for place in places}
    (searched,) = (name for name in methods if name != "again")
    reason = told[f"{searched} in recipe"]
    assert reason.startswith(why)
    assert told["again in recipe"] == f"there are no settings of {searched}: {reason}"
    assert (tmp_path / "out" / "index.html").read_text().count(f"there are no settings of {searched}: {why}") == 3


def test_all_faults_are_told_at_once_before_any_run(tmp_path):
    ogm = {"set": PLACEBO}
    methods = {
        "fedogm": FEDOGM,
        "misspelt": ogm | {"settings_of": "fedogn"},
        "own": ogm | {"settings_of": "own"},
        "second": ogm | {"settings_of": "first"},
        "first": ogm | {"settings_of": "fedogm"},
        "both": ogm | {"settings_of": "fedogm", "search": {"algorithm.alpha": [0.1]}},
        "fixed": {"set": {"algorithm": PLACEBO["algorithm"] | {"alpha": 0.3}}, "settings_of": "fedogm"},
        "crossed": ogm | {"settings_of": "fedogm", "grid": {"train.lr": [0.1, 0.2]}},
        "fedprox": {"grid": {"algorithm.mu": [0.1, 1.0]}},
        "lacking": {"set": {"algorithm.name": "fedprox"}, "settings_of": "fedprox"},
        "other": {"set": {"algorithm.name": "fedavg"}, "settings_of": "fedogm"},
    }
    text = refusal(tmp_path, methods=methods)
    for part in (
        "[methods.misspelt] settings_of = 'fedogn': no method 'fedogn'; did you mean 'fedogm'?",
        "[methods.own] settings_of = 'own': a method cannot take its own settings. Name another method",
        "[methods.second] settings_of = 'first': 'first' has settings_of too, so it has no search",
        "[methods.both] settings_of = 'fedogm': this method has search too. Give search or settings_of, not both",
        "[methods.fixed] settings_of = 'fedogm': the search chooses algorithm.alpha, so remove this from set and grid",
        "[methods.crossed] settings_of = 'fedogm': the search chooses train.lr, so remove this from set and grid",
        "[methods.lacking] settings_of = 'fedprox': the search chooses settings for each value in the grid of 'fedprox'"
        ". Give this method the same values of algorithm.mu in its grid, or fewer of them",
        "method 'other' in scenario 'recipe': [algorithm] has no option 'alpha'",
    ):
        assert part in text
    assert text.startswith("8 problems")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("search", [None, {"trials": 2, "seeds": [11]}])
def test_settings_that_no_search_chooses_are_refused(tmp_path, search):
    methods = {"fedavg": {}, "again": {"set": {"algorithm.name": "fedavg"}, "settings_of": "fedavg"}}
    study = table(tmp_path, methods=methods) | ({} if search is None else {"search": search})
    with refuses(RecipeError, "chooses settings"):
        planned(study)


def test_an_empty_name_is_refused(tmp_path):
    methods = {"fedavg": {}, "again": {"set": {"algorithm.name": "fedavg"}, "settings_of": ""}}
    with refuses(RecipeError, "method ''"):
        planned(table(tmp_path, methods=methods))


def test_a_scenario_without_the_searched_method_is_refused(tmp_path):
    scenarios = {"few": {"set": {"clients.num": 3}}, "many": {"set": {"clients.num": 6}}}
    rule = {"match": {"method": "fedogm", "scenario": "many"}, "skip": "too slow"}
    text = refusal(tmp_path, scenarios=scenarios, when=[rule, {"match": {"scenario": "mny"}, "skip": "no"}])
    assert "2 problems" in text
    assert "[[when]] 2: no scenario 'mny'" in text
    assert (
        "method 'control' in scenario 'many': settings_of = 'fedogm': the study leaves 'fedogm' out here (too slow), "
        "so no search chooses the settings" in text
    )
    rule["match"]["method"] = ["fedogm", "control"]
    _, cells = planned(study_of(tmp_path, scenarios=scenarios, when=[rule]))
    assert [cell.scenario for cell in cells if not cell.skip] == ["few", "few"]


def test_only_the_searched_method_counts_for_the_size_of_a_grid_and_needs_validation_rows(tmp_path):
    search = SEARCH | {"sampler": "grid", "keys": {"train.lr": [0.1, 0.2]}}
    text = refusal(tmp_path, search=search, set={"clients.validation": 0.0})
    assert "the grid of 'fedogm' has 6 settings" in text
    assert "method 'fedogm' in scenario 'recipe': the search needs validation rows" in text
    assert "control" not in text
