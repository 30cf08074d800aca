"""Labels that are words have the same number on every device, or the device does not take part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.core.errors import BadReply, DataError, TooFewReplies
from polyfed.deploy.device.configuration import node_from
from polyfed.deploy.device.data import population_on
from polyfed.deploy.device.recipe_check import inspect
from polyfed.engines.protocol import Enrolment, digest_of_names
from polyfed.experiment.recipes.recipe import load_recipe
from refusals import refuses

WORDS = np.array(["cat", "dog", "eel", "fox"])


def reworded(path: Path, labels: Any, **more: Any) -> None:
    """Give the rows of a data file other labels."""
    with np.load(path) as found:
        np.savez(path, **{**{name: found[name] for name in found.files}, "label": labels, **more})


def labels_of(path: Path) -> Any:
    with np.load(path) as found:
        return found["label"]


def test_a_device_whose_labels_are_words_without_a_list_of_the_classes_does_not_enrol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = Devices(tmp_path, RECIPE.replace("enrol_seconds = 2.0", "enrol_seconds = 2.0\nmin_nodes = 2"))
    mine = devices.places[1] / "data.npz"
    reworded(mine, WORDS[1:][labels_of(mine) % 3])  # without "cat", "dog" would be class 0
    devices.serve(tmp_path / "run")
    said = capsys.readouterr().err
    assert "starting with 2 of 3 clients" in said
    assert "client 1: its data cannot be used; its own log says why" in said
    assert "Save an array 'label_name'" in said
    with refuses(DataError, "different devices"):
        inspect(load_recipe(devices.recipe), f'data="{mine}" client=1 modalities="a"')


def test_words_with_a_list_of_the_classes_have_the_numbers_of_the_list(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    mine = devices.places[1] / "data.npz"
    before = labels_of(mine)
    reworded(mine, WORDS[before], label_name=WORDS)
    config = f'data="{mine}" client=1 modalities="a"'
    population = population_on(node_from(config), load_recipe(devices.recipe), None)
    assert population.columns.label.tolist() == before.tolist()
    assert inspect(load_recipe(devices.recipe), config).num_classes == 4
    devices.serve(tmp_path / "run")


def test_a_device_whose_list_of_the_classes_is_another_takes_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = Devices(tmp_path, RECIPE.replace("enrol_seconds = 2.0", "enrol_seconds = 2.0\nmin_nodes = 2"))
    for place, names in zip(devices.places, (WORDS, WORDS, WORDS[[1, 0, 2, 3]]), strict=True):
        reworded(place / "data.npz", WORDS[labels_of(place / "data.npz")], label_name=names)
    devices.serve(tmp_path / "run")
    said = capsys.readouterr().err
    assert "starting with 2 of 3 clients" in said
    assert "client 2: its class names ('label_name') are not those of most clients" in said


def test_lists_of_the_classes_without_a_majority_end_the_run(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    for shift, place in enumerate(devices.places):
        reworded(place / "data.npz", labels_of(place / "data.npz"), label_name=np.roll(WORDS, shift))
    with refuses(TooFewReplies, "clients enrolled"):
        devices.serve(tmp_path / "run")


def test_a_forged_digest_of_class_names_is_no_enrolment() -> None:
    header = Enrolment(0, 9, ("a",), None, False, {"a": (3,)}, 2, classes=digest_of_names(["x", "y"])).header()
    assert Enrolment.read(header).classes == digest_of_names(("x", "y"))
    for forged in ("x", "0" * 65, 5, None, ["0" * 64]):
        with pytest.raises(BadReply):
            Enrolment.read(header | {"classes": forged})


def test_a_server_whose_own_labels_are_words_without_a_list_ends_the_run(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    np.savez(tmp_path / "own.npz", a=rows, b=rows, label=WORDS[np.arange(40) % 4])
    head, tail = RECIPE.split("[data]")[0], RECIPE.split("classes = 4\n")[1]
    data = f'[data]\nname = "npz"\npath = "{tmp_path}/own.npz"\nmodalities = ["a", "b"]\n'
    (tmp_path / "mine").mkdir()
    devices = Devices(tmp_path / "mine")
    (devices.app / "recipe.toml").write_text(head + data + tail)
    with refuses((DataError, TooFewReplies), "labels are words"):
        devices.serve(tmp_path / "run")
