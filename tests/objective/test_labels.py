"""Labels in a file of one's own: classes, targets, unknown targets, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from polyfed.core.errors import DataError
from polyfed.data.sources import Npz
from polyfed.experiment.recipes.recipe import parse_recipe
from refusals import refuses


def source(folder: Path, label: Any, **arrays: Any) -> Npz:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((len(label), 4)).astype("f4")
    np.savez(folder / "mine.npz", a=x, label=label, **arrays)
    return Npz(path=str(folder / "mine.npz"), modalities=("a",))


def test_floats_are_targets_and_nan_is_unknown(tmp_path: Path) -> None:
    columns = source(tmp_path, np.array([[0.5, 1], [np.nan, 2], [3, 4]])).load()
    assert columns.label.dtype == torch.float32
    assert columns.num_classes == 2
    assert int(columns.label.isnan().sum()) == 1


def test_an_array_may_say_which_targets_are_known(tmp_path: Path) -> None:
    known = np.array([True, False, True])
    label = source(tmp_path, np.array([4, -7, 2]), label_known=known).load().label
    assert label.isnan().tolist() == [False, True, False]
    assert label[0] == 4.0
    with refuses(DataError, "labels are known"):
        source(tmp_path, np.array([4, -7, 2]), label_known=np.array([1, 0])).load()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (np.zeros((2, 2, 2)), "row of targets"),
        (np.array([-1, 2]), "labels outside"),
    ],
)
def test_other_labels_are_refused(label: Any, words: str, tmp_path: Path) -> None:
    with refuses(DataError, words):
        source(tmp_path, label).load()


def test_a_recipe_for_two_labels_a_row_runs_without_a_task(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    z = draw.standard_normal((120, 2))
    np.savez(tmp_path / "mine.npz", a=z.astype("f4"), label=(z > 0).astype("f4"), label_name=["left", "right"])
    table = {
        "rounds": 8,
        "data": {"name": "npz", "path": str(tmp_path / "mine.npz"), "modalities": ["a"]},
        "clients": {"partition": "iid", "num": 4},
        "model": {"encoders": {"a": {"kind": "mlp", "hidden": [16]}}},
        "train": {"lr": 0.3},
        "algorithm": {"name": "fedavg"},
    }
    done = polyfed.run(parse_recipe(table))
    assert done.result["task"]["name"] == "multi-label"
    assert done.result["metrics"]["global"]["auroc"] > 0.95
    assert done.models.class_names == ("left", "right")
    decided = done.models.task.decided(done.predict({"a": z[:5]}))
    assert decided.tolist() == (z[:5] > 0).astype(int).tolist()
