"""A regression whose targets are far from 0 is told how to scale them, and `init` scales them itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.core.errors import DataError
from polyfed.experiment.recipes.first_recipe import starter
from refusals import refuses, warned

ROWS = 240


def arrays(mean: float, deviation: float) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(ROWS, 6)).astype(np.float32)
    answer = x @ draw.normal(size=6)
    return {"x": x, "y": (mean + deviation * answer / answer.std()).astype(np.float32)}


def error_of(run: Any) -> float:
    return float(run.rounds[-1]["metrics"]["global"]["mae"])


def test_far_targets_are_standardised_and_that_is_said() -> None:
    data = arrays(50.0, 2.3)
    options: dict[str, Any] = {"data": {"x": data["x"]}, "labels": data["y"], "rounds": 5, "train": {"lr": 0.003}}
    with warned("target -") as told:
        near = polyfed.run(**options)
    assert len(told) == 1
    far = polyfed.run(**options, standardise=False)
    assert error_of(near) < 0.5 * error_of(far)
    named = polyfed.run(**options, task={"name": "regression", "shift": 0.0, "scale": 1.0})
    assert named.result["state_sha256"] == far.result["state_sha256"]


def test_training_rows_alone_decide_the_units_of_targets() -> None:
    data = arrays(50.0, 2.3)
    found = []
    for other in (50.0, 9e4):
        y = np.where(np.arange(ROWS) % 4 == 0, other, data["y"]).astype(np.float32)
        split = np.where(np.arange(ROWS) % 4 == 0, "test", "train")
        with warned("new model"):
            run = polyfed.run(data={"x": data["x"]}, labels=y, split=split, rounds=1)
        found.append(run.result["state_sha256"])
    assert found[0] == found[1]


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (2.0, 5.0)])
def test_targets_near_zero_need_nothing(mean: float, deviation: float) -> None:
    data = arrays(mean, deviation)
    polyfed.make_recipe(data={"x": data["x"]}, labels=data["y"])  # a warning would be an error


def test_init_writes_mean_and_deviation_of_the_training_targets(tmp_path: Path) -> None:
    data = arrays(50.0, 2.3)
    np.savez(tmp_path / "far.npz", x=data["x"], label=data["y"])
    made = starter(tmp_path / "far.npz", {})
    assert 'name = "regression"' in made.text
    (shift,) = [line.split("=")[1].split("#")[0] for line in made.text.splitlines() if line.startswith("shift")]
    assert abs(float(shift) - float(data["y"].mean())) < 0.5
    data = arrays(0.0, 1.0)
    np.savez(tmp_path / "near.npz", x=data["x"], label=data["y"])
    assert "[task]" not in starter(tmp_path / "near.npz", {}).text


def test_each_of_several_targets_that_are_far_from_0_is_standardised() -> None:
    draw = np.random.default_rng(0)
    audio = draw.normal(size=(60, 4))
    targets = np.stack([audio[:, 0] + audio[:, 3], audio[:, 1] * 1e5 + 1e6, audio[:, 2:].sum(1) * 0.001], 1)
    options: dict[str, Any] = {"data": {"audio": audio}, "labels": targets, "rounds": 12, "clients": 2}
    options["train"] = {"optimiser": "adam", "lr": 0.02, "epochs": 5}
    with warned("-0.0001157"):
        run = polyfed.run(**options)
    found = np.asarray(run.predict({"audio": audio}))
    for n in range(3):  # each target is learnt, whatever its unit
        assert np.corrcoef(found[:, n], targets[:, n])[0, 1] > 0.9


def test_a_target_that_float32_cannot_tell_apart_is_refused() -> None:
    seconds = 1.7e9 + np.arange(60.0)
    with refuses(DataError, "values apart"):
        polyfed.make_recipe({"audio": np.eye(60)}, labels=seconds)
