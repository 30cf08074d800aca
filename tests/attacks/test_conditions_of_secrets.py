"""What decides whether a device still answers with its keys of secure aggregation: its data, and no other files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import Devices
from polyfed.deploy import handlers
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.memory.repeated_requests import conditions_of


@pytest.fixture
def digest_of(tmp_path: Path) -> Callable[[], str]:
    """A function that returns the conditions of a device whose data is the folder `data`."""
    (tmp_path / "recipe.toml").write_text("rounds = 1")
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.zeros(3))
    node = NodeConfig(data=str(tmp_path / "data"), client=0, modalities="a")
    return lambda: conditions_of(tmp_path / "recipe.toml", node)


def test_other_files_in_the_folder_of_the_data_do_not_count(tmp_path: Path, digest_of: Callable[[], str]) -> None:
    """A lock file of Emacs is a link to nowhere; a log or the state folder of the device changes with every request."""
    before = digest_of()
    (tmp_path / "data" / ".#a.npy.txt").symlink_to("user@host.1234")
    (tmp_path / "data" / "device.log").write_text("line")
    (tmp_path / "data" / "state").mkdir()
    (tmp_path / "data" / "state" / "device.sqlite3").write_text("{}")
    assert digest_of() == before


@pytest.mark.parametrize("changed", ["size", "time", "new"])
def test_every_change_of_an_array_counts(tmp_path: Path, digest_of: Callable[[], str], changed: str) -> None:
    before, path = digest_of(), tmp_path / "data" / "a.npy"
    if changed == "time":
        os.utime(path, ns=(1, 1))
    else:
        np.save(path if changed == "size" else path.with_name("b.npy"), np.zeros(4))
    assert digest_of() != before


def test_a_device_whose_data_lies_below_the_home_folder_answers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    devices = Devices(tmp_path)
    for config in devices.configs:
        config["data"] = config["data"].replace(str(tmp_path), "~")
    assert devices.serve(tmp_path / "run")["rounds"] == 2


def test_a_change_of_the_data_while_a_device_reads_it_counts(tmp_path: Path, monkeypatch: Any) -> None:
    """The digest never names newer data than the data from which the reply was made."""
    devices, order = Devices(tmp_path), list[str]()

    def noting(name: str) -> None:
        made = getattr(handlers, name)
        monkeypatch.setattr(handlers, name, lambda *given: (order.append(name), made(*given))[1])

    noting("conditions_of")
    noting("population_on")
    devices.serve(tmp_path / "run")
    assert "conditions_of" in order
    assert all(order[place + 1] == "population_on" for place, name in enumerate(order) if name == "conditions_of")
