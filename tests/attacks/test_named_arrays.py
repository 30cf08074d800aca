"""A recipe names an array of a device as labels, ids, split or class names, although its owner did not mean it so."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.cli import main
from polyfed.core.errors import RecipeError
from polyfed.core.registry import Allowance
from polyfed.engines.protocol import hello
from refusals import refuses

OF_FILE = RECIPE[RECIPE.index("[model]") :]
POLICY = (
    '[egress.a]\nserver = ["parameters", "statistic"]\n[egress.b]\nserver = []\n[egress.labels]\nserver = ["labels"]\n'
)


def hostile(devices: Devices, named: str) -> None:
    """The server sends a recipe whose [data] names arrays of the device's file."""
    data = f'seed = 3\nrounds = 2\n[data]\nname = "npz"\npath = ""\nmodalities = ["a"]\n{named}\n[clients]\nnum = 3\n'
    (devices.app / "recipe.toml").write_text(data + OF_FILE)


def enrols(devices: Devices, named: str, allow: str = "", modalities: str = "a") -> str:
    """The reason why device 1 refuses to enrol, or its verdict."""
    with np.load(devices.places[0] / "data.npz") as kept:  # device 0 has both modalities
        arrays = dict(kept)
    arrays |= {"genome": arrays["b"][:, :3].copy(), "visits": np.arange(len(arrays["label"])) * 100}
    arrays["a_present"] = np.ones(len(arrays["label"]), bool)
    np.savez(devices.places[1] / "data.npz", **arrays)
    (devices.places[1] / "policy.toml").write_text(POLICY + allow)
    devices.configs[1]["modalities"] = modalities
    hostile(devices, named)
    header = devices.handler(hello(), devices.configs[1]).header
    return str(header.get("reason") or header.get("verdict"))


@pytest.mark.parametrize("role", ["label", "ids", "split", "class_names"])
def test_an_array_that_is_not_a_standard_one_has_no_role_unless_the_owner_gives_it(role: str, tmp_path: Path) -> None:
    reason = enrols(Devices(tmp_path), f'{role} = "visits"')
    assert (
        f"client 1 refused the recipe: [data] {role} = 'visits' names an array that this device has not been" in reason
    )
    assert f'the device\'s policy file said: [allow] {role} = ["visits"]' in reason


def test_the_owner_gives_an_array_one_role_and_no_other(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    assert enrols(devices, 'ids = "visits"', '[allow]\nids = ["visits"]\n') == "enrolled"
    assert "[allow] label" in enrols(devices, 'label = "visits"', '[allow]\nids = ["visits"]\n')
    assert "[allow] label" in enrols(devices, 'label = "split"'), "a standard name has its own role only"


@pytest.mark.parametrize("name", ["b", "b_present", "a_present"])
def test_a_modality_is_never_the_labels_even_if_the_owner_lists_it(name: str, tmp_path: Path) -> None:
    reason = enrols(Devices(tmp_path), f'label = "{name}"', f'[allow]\nlabel = ["{name}"]\n')
    assert f"[data] label = '{name}' names a modality, or an array with a policy row of its own" in reason


def test_a_modality_of_another_run_is_not_the_labels_of_this_one(tmp_path: Path) -> None:
    """The array `genome` is a modality of the device, and the recipe does not read it as one."""
    allow = '[egress.genome]\nserver = []\n[allow]\nlabel = ["genome"]\n'
    devices = Devices(tmp_path)
    said = enrols(devices, 'label = "genome"', allow)
    assert "enrolled" not in said
    (devices.places[1] / "policy.toml").write_text(POLICY)
    assert "[allow] label" in devices.handler(hello(), devices.configs[1]).header["reason"]


@pytest.mark.parametrize("named", ['client = "b"', 'split_personal = "visits"'])
def test_a_device_reads_no_array_that_it_does_not_need(named: str, tmp_path: Path) -> None:
    assert enrols(Devices(tmp_path), named) == "enrolled"


def test_a_recipe_cannot_take_the_split_of_the_owner_away(tmp_path: Path) -> None:
    """Otherwise rows that the owner has left out, and the device's own test rows, would train."""
    devices = Devices(tmp_path)
    place = devices.places[1] / "data.npz"
    with np.load(place) as kept:
        arrays = dict(kept)
    arrays["split"] = np.array([3] * 20 + [1] * 5 + [0] * (len(arrays["label"]) - 25))
    np.savez(place, **arrays)
    hostile(devices, 'split = ""')
    told = devices.handler(hello(), devices.configs[1]).header
    assert (told["rows"], told["tested"]) == (len(arrays["label"]) - 25, True)


FOLD = '[allow]\nsplit = ["fold", "visits"]\n'


def with_fold(devices: Devices, *, also: str = "") -> int:
    """The owner of device 1 marks the training rows in the array `fold`. Returns their number."""
    place = devices.places[1] / "data.npz"
    with np.load(place) as kept:
        arrays = {name: kept[name] for name in kept.files if name != "split"}
    size = len(arrays["label"])
    arrays["fold"] = np.array([3] * 20 + [1] * 5 + [0] * (size - 25))
    if also:
        arrays[also] = np.zeros(size, int)
    np.savez(place, **arrays)
    (devices.places[1] / "policy.toml").write_text(POLICY.replace("[egress.b]\nserver = []\n", "") + FOLD)
    return size - 25


@pytest.mark.parametrize("named", ["", 'split = ""', 'split = "split"'])
def test_a_recipe_cannot_leave_out_the_array_in_which_the_owner_marks_training_rows(named: str, tmp_path: Path) -> None:
    """The data has no array `split`, so all rows would train, also those that the owner has left out."""
    devices = Devices(tmp_path)
    with_fold(devices)
    hostile(devices, named)
    told = devices.handler(hello(), devices.configs[1]).header
    assert told["verdict"] == "refused"
    assert "the data of this device has no array 'split', but the array 'fold'" in told["reason"]
    assert "Set [data] split = 'fold' in the recipe" in told["reason"]


def test_the_array_that_the_owner_allows_as_the_split_decides_which_rows_train(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    rows = with_fold(devices)
    hostile(devices, 'split = "fold"')
    assert devices.handler(hello(), devices.configs[1]).header["rows"] == rows
    hostile(devices, "")
    with_fold(devices, also="split")
    assert devices.handler(hello(), devices.configs[1]).header["rows"] == rows + 25, "`split` is there, and decides"


def test_the_data_of_a_device_may_lack_every_array_that_its_owner_allows_as_the_split(tmp_path: Path) -> None:
    """Several sites share a policy file, and the data of one of them has no split."""
    assert enrols(Devices(tmp_path), "", '[allow]\nsplit = ["fold"]\n') == "enrolled"


def test_check_tells_the_owner_beforehand_also_without_data(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    enrols(devices, 'label = "visits"')
    with pytest.raises(SystemExit) as stop:
        main(("check", str(devices.app / "recipe.toml"), "--node", str(devices.places[1] / "policy.toml")))
    assert stop.value.code
    assert '[allow] label = ["visits"]' in " ".join(capsys.readouterr().err.split())


def test_the_demonstration_writes_the_names_of_its_recipe_into_files_and_policies(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    emotion = rng.integers(0, 3, 90)
    np.savez(
        tmp_path / "mine.npz",
        a=rng.normal(size=(90, 5)).astype("float32"),
        b=rng.normal(size=(90, 4)).astype("float32"),
        emotion=emotion,
        words=np.array(["calm", "glad", "sad"]),
        number=np.arange(90) + 7,
        speaker=rng.integers(0, 3, 90),
        fold=(np.arange(90) % 5 == 0).astype("int64"),
    )
    named = 'label = "emotion"\nclass_names = "words"\nids = "number"\nclient = "speaker"\nsplit = "fold"\n'
    data = f'seed = 3\nrounds = 2\n[data]\nname = "npz"\npath = "{tmp_path}/mine.npz"\nmodalities = ["a", "b"]\n{named}'
    devices = Devices(tmp_path, data + '[clients]\npartition = "iid"\nnum = 3\n' + OF_FILE)
    policy = tomllib.loads((devices.places[0] / "policy.toml").read_text())
    assert policy["allow"] == {"label": ["emotion"], "ids": ["number"], "split": ["fold"], "class_names": ["words"]}
    assert devices.serve(tmp_path / "run")["rounds"] == 2


def test_a_wrong_list_of_arrays_is_refused() -> None:
    with refuses(RecipeError, "list of words"):
        Allowance.parse({"label": "emotion"}, "[allow]")
