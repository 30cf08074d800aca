"""A regression whose targets are far from 0 is told how to scale them, and `init` scales them itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.core.errors import PolyfedWarning
from polyfed.experiment.recipes.first_recipe import starter

ROWS = 240


def arrays(mean: float, deviation: float) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(ROWS, 6)).astype(np.float32)
    answer = x @ draw.normal(size=6)
    return {"x": x, "y": (mean + deviation * answer / answer.std()).astype(np.float32)}


def error_of(run: Any) -> float:
    return float(run.rounds[-1]["metrics"]["global"]["mae"])


def test_far_targets_are_named_with_the_cure_and_the_cure_works() -> None:
    data = arrays(50.0, 2.3)
    options: dict[str, Any] = {"data": {"x": data["x"]}, "labels": data["y"], "rounds": 5, "train": {"lr": 0.003}}
    with pytest.warns(PolyfedWarning, match="'shift': 4[89]|'shift': 5[01]") as told:
        far = polyfed.run(**options)
    assert len(told) == 1
    near = polyfed.run(**options, task={"name": "regression", "shift": 50.0, "scale": 2.3})
    assert error_of(near) < 0.5 * error_of(far)


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


def test_several_targets_that_are_far_from_0_are_named() -> None:
    draw = np.random.default_rng(0)
    audio = draw.normal(size=(60, 4))
    targets = np.stack([audio[:, 0] + audio[:, 3], audio[:, 1] * 1e5 + 1e6, audio[:, 2:].sum(1) * 0.001], 1)
    with pytest.warns(
        PolyfedWarning, match=r"means and standard .* are: target 1 \(.*\), target 2 \(.*Standardise each"
    ):
        polyfed.make_recipe({"audio": audio}, labels=targets)
