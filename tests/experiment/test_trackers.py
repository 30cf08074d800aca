"""What MLflow and Weights & Biases are handed, read back from their own files; `make check-trackers` installs both."""

import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.results.tracking import DATABASE, MLflow, Tracker, WandB
from refusals import refuses
from world import algorithm, recipe

BLOCK = 2**15
"""Records of a .wandb file do not cross these boundaries; longer ones are split (the log format of LevelDB)."""


def tracked(tracker: Tracker, rounds: int = 3) -> Recipe:
    return replace(recipe(algorithm("fedavg", evaluation=Evaluation(every=1))), rounds=rounds, tracking=tracker)


def records_of(path: Path) -> Iterator[Any]:
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            record = pb.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history_of(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records_of(path):
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): float(item.value_json) for item in items if item.value_json}
            if "round" in row:
                found[int(row["round"])] = row
    return found


@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_mlflow_holds_the_rounds_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    polyfed.run(tracked(MLflow(experiment="ward"), 2), tmp_path / "run")
    done = polyfed.run(tracked(MLflow(experiment="ward"), 4), tmp_path / "run", resume=True)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / DATABASE}")
    (found,) = client.search_runs([client.get_experiment_by_name("ward").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["algorithm/name"] == "fedavg"
    for name, values in (
        ("train_loss", [row["train_loss"] for row in done.rounds]),
        ("metrics/global/accuracy", [row["metrics"]["global"]["accuracy"] for row in done.rounds]),
    ):
        curve = client.get_metric_history(found.info.run_id, name)
        assert [entry.step for entry in curve] == [1, 2, 3, 4]
        assert [entry.value for entry in curve] == pytest.approx(values)
    assert found.data.metrics["last/metrics/global/loss"] == pytest.approx(done.result["metrics"]["global"]["loss"])


@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_mlflow_logs_a_round_that_runs_again_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    tracker, row = MLflow(uri=f"sqlite:///{tmp_path / 'all.db'}"), {"bytes_up": 1, "train_loss": 0.5}
    for first in (1, 2):
        listener = tracker.follow({"rounds": 3}, None)
        listener("run-started", run="a-1", algorithm="fedavg", first_round=first)
        for round in range(first, 4):
            listener("round-finished", row=row | {"round": round})
    listener("run-stopped", round=4, reason="interrupted")
    client = mlflow.MlflowClient(tracking_uri=tracker.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("polyfed").experiment_id])
    assert [entry.step for entry in client.get_metric_history(found.info.run_id, "train_loss")] == [1, 2, 3]
    assert found.info.status == "KILLED"
    listener("run-stopped", round=4, reason="Diverged: at 4 of 5 clients")
    assert client.get_run(found.info.run_id).info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_wandb_writes_the_rounds_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    done = polyfed.run(tracked(WandB()), tmp_path / "run")
    found = history_of(tmp_path / "run")
    assert sorted(found) == [1, 2, 3]
    for row in done.rounds:
        seen = found[row["round"]]
        assert seen["train_loss"] == pytest.approx(row["train_loss"])
        assert seen["metrics/global/accuracy"] == pytest.approx(row["metrics"]["global"]["accuracy"])
        assert not any("personal_accuracy" in name or "cohort" in name for name in seen)


@pytest.mark.parametrize(("name", "extra"), [("mlflow", "mlflow"), ("wandb", "wandb")])
def test_without_the_package_the_error_says_what_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    table = tracked(MLflow()).table() | {"tracking": {"name": name}}
    with refuses(RecipeError, f"tracking.name: pip install 'polyfed[{extra}]'"):
        polyfed.run(parse_recipe(table), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with refuses(RecipeError, "tracking.mode: you mean"):
        WandB(mode="offlin")  # type: ignore[arg-type]
