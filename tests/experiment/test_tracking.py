"""What a tracker is handed, read back by TensorBoard's own reader."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.results.tracking import EVENTS, TensorBoard, Tracker, numbers
from refusals import refuses
from world import algorithm, recipe

SEEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class Notebook(Tracker):
    """A tracker of the user's own."""

    project: str = "none"

    def follow(self, recipe: Any, folder: Path | None) -> Any:
        SEEN.append((self.project, recipe["rounds"], folder))
        return lambda event, **facts: SEEN.append(event)


def tracked(rounds: int = 3, tracker: Tracker | None = None) -> Recipe:
    method = algorithm("fedavg", evaluation=Evaluation(every=1))
    return replace(recipe(method), rounds=rounds, tracking=tracker or TensorBoard())


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_curves_hold_what_the_files_hold(tmp_path: Path) -> None:
    done = polyfed.run(tracked(), tmp_path / "run")
    found = curves(tmp_path / "run" / EVENTS)
    for tag, values in (
        ("train_loss", [row["train_loss"] for row in done.rounds]),
        ("bytes_up", [row["bytes_up"] for row in done.rounds]),
        ("metrics/global/accuracy", [row["metrics"]["global"]["accuracy"] for row in done.rounds]),
        ("metrics/unimodal/a", [row["metrics"]["unimodal"]["a"] for row in done.rounds]),
        ("seconds/train", [row["seconds"]["train"] for row in done.rounds]),
    ):
        assert [step for step, _ in found[tag]] == [1, 2, 3]
        assert [value for _, value in found[tag]] == pytest.approx(values), tag
    assert found["last/metrics/global/loss"][0][1] == pytest.approx(done.result["metrics"]["global"]["loss"])


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    polyfed.run(tracked(2), tmp_path / "run")
    polyfed.run(tracked(4), tmp_path / "run", resume=True)
    assert [step for step, _ in curves(tmp_path / "run" / EVENTS)["train_loss"]] == [1, 2, 3, 4]


def test_rounds_played_again_hide_those_that_were_lost(tmp_path: Path) -> None:
    listener = TensorBoard(folder=str(tmp_path)).follow({"rounds": 4}, None)
    row = {"round": 1, "train_loss": 1.0, "bytes_up": 0, "bytes_down": 0}
    listener("run-started", first_round=1)
    for round in (1, 2, 3):
        listener("round-finished", row=row | {"round": round})
    again = TensorBoard(folder=str(tmp_path)).follow({"rounds": 4}, None)
    again("run-started", first_round=2)
    for round in (2, 3, 4):
        again("round-finished", row=row | {"round": round, "train_loss": 2.0})
    again("run-finished", result={"metrics": {}})
    assert curves(tmp_path)["train_loss"] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_nothing_of_a_single_client_is_a_curve() -> None:
    row = {
        "round": 1,
        "train_loss": 0.5,
        "cohort": [3],
        "missing": {"4": "late"},
        "personal_accuracy": {"3": 0.1},
        "tables": {"mix": [[1.0]]},
        "logged": {"ratio": 2.0},
        "metrics": {"personal": {"mean": 0.1}},
    }
    assert dict(numbers(row)) == {"train_loss": 0.5, "logged/ratio": 2.0, "metrics/personal/mean": 0.1}


def test_a_tracker_of_ones_own_by_its_path(tmp_path: Path) -> None:
    SEEN.clear()
    table = tracked(1).table() | {"tracking": {"name": "test_tracking:Notebook", "project": "ward 7"}}
    polyfed.run(parse_recipe(table), tmp_path / "run")
    # the module is imported a second time under the name by which the recipe knows it
    seen = sys.modules["test_tracking"].SEEN
    assert seen[0] == ("ward 7", 1, tmp_path / "run")
    assert [seen[1], seen[-1]] == ["run-started", "run-finished"]
    assert 'name = "test_tracking:Notebook"' in (tmp_path / "run" / "recipe.toml").read_text()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refuses(RecipeError, "tracking.name: pip install 'polyfed[tracking]'"):
        polyfed.run(tracked(), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_a_run_without_files_needs_a_folder_for_its_curves() -> None:
    with refuses(RecipeError, "tracking.folder: Name a folder"):
        polyfed.run(tracked())


def test_something_else_than_a_tracker_is_refused() -> None:
    with refuses(RecipeError, "tracking.name: unknown"):
        parse_recipe(tracked(1).table() | {"tracking": {"name": "tensorbord"}})
    with refuses(RecipeError, "tracking.name: extends"):
        parse_recipe(tracked(1).table() | {"tracking": {"name": "polyfed.training.optimisers:Train"}})
