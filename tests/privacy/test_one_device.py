"""A device that checks a recipe knows only its own rows, so it leaves out the checks that need all clients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.core.errors import RecipeError
from polyfed.deploy.device.recipe_check import Inspection, inspect
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from refusals import refuses

CENTRAL = {"unit": "client", "delta": 0.001, "noise_multiplier": 1.0}
EXAMPLE = {"unit": "example", "delta": 0.001, "noise_multiplier": 1.0}


def recipe_for_devices(privacy: dict[str, Any], clients: dict[str, Any], **sections: Any) -> Recipe:
    table = {
        "data": {"name": "npz", "path": "elsewhere.npz", "label": "label"},
        "model": {"encoders": {"a": {"kind": "mlp", "hidden": [8]}}},
        "algorithm": {"name": "fedavg", "aggregation": "uniform"},
        "clients": clients,
        "privacy": privacy,
    }
    return parse_recipe(table | sections)


def inspected(folder: Path, made: Recipe, *, extra: str = "") -> Inspection:
    """What client 3 says about the recipe. It has only its own rows."""
    values = np.random.default_rng(1).normal(size=(40, 6)).astype(np.float32)
    np.savez(folder / "own.npz", a=values, label=np.arange(40) % 4)
    (folder / "policy.toml").write_text('[egress.a]\nserver = ["parameters"]\n')
    told = {"data": f"{folder}/own.npz", "modalities": "a", "policy": f"{folder}/policy.toml"}
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in told.items())
    return inspect(made, f"{words} client=3 {extra}")


@pytest.mark.parametrize(
    ("privacy", "sections"),
    [
        (CENTRAL, {}),
        (CENTRAL | {"clip": "adaptive"}, {}),
        (CENTRAL, {"secure_aggregation": {"min_clients": 20}}),
        (CENTRAL | {"noise_at": "client"}, {}),
        (EXAMPLE | {"delta": 0.03}, {}),
    ],
)
def test_a_device_accepts_a_recipe_that_fits_a_hundred_clients(
    privacy: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    """The delta of 0.03 would not fit the 40 rows of this device alone."""
    found = inspected(tmp_path, recipe_for_devices(privacy, {"participation": 100}, **sections))
    assert {row.block for row in found.planned if row.field == "params" and row.allowed} == {"a", "shared"}
    assert not found.breaches


def test_a_device_still_refuses_what_the_recipe_cannot_honour(tmp_path: Path) -> None:
    everyone = {"participation": 100}
    with refuses(RecipeError, "algorithm.aggregation: influence"):
        inspected(tmp_path, recipe_for_devices(CENTRAL, everyone, algorithm={"name": "fedavg"}))
    with refuses(RecipeError, "privacy: several clients"):
        inspected(tmp_path, recipe_for_devices(EXAMPLE, everyone), extra=" silo=0")
    with refuses(RecipeError, "privacy.amplification: request holds"):
        inspected(tmp_path, recipe_for_devices(CENTRAL | {"amplification": True}, everyone))
