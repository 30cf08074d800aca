"""What docs/operations.md says about copies of a server's run and of a device's state, without processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.core.errors import PolyfedError
from refusals import refuses


def recipe_with(text: str) -> str:
    return text + "[checkpoint]\nevery = 1\n"


def test_the_newest_copy_of_a_run_folder_goes_on_to_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = Devices(tmp_path / "a", recipe_with(RECIPE)).serve(tmp_path / "whole")
    devices = Devices(tmp_path / "b", recipe_with(RECIPE))
    stop(devices, tmp_path / "run", after=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert devices.serve(tmp_path / "copy")["state_sha256"] == whole["state_sha256"]


def stop(devices: Devices, out: Path, after: int) -> None:
    """End the server after a round, as a failing machine does."""

    class Stopped(Exception):
        pass

    answer = devices.handler

    def until(packet: Any, config: Any) -> Any:
        if packet.header.get("request_id", {}).get("round", 0) > after:
            raise Stopped
        return answer(packet, config)

    object.__setattr__(devices, "handler", until)
    with pytest.raises(Stopped):
        devices.serve(out)
    object.__setattr__(devices, "handler", answer)


def test_a_device_that_is_restored_from_an_older_copy_takes_part_again(tmp_path: Path) -> None:
    devices = Devices(tmp_path, recipe_with(RECIPE).replace("rounds = 2", "rounds = 3"))
    stop(devices, tmp_path / "run", after=1)
    state = devices.places[1] / "polyfed-state"
    shutil.copytree(state, tmp_path / "copy")
    stop(devices, tmp_path / "run", after=2)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    assert devices.serve(tmp_path / "run")["rounds"] == 3
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert not any(row.get("missing") for row in rounds)


def test_an_old_copy_of_a_run_with_local_state_is_refused_by_the_devices_in_words(tmp_path: Path) -> None:
    text = recipe_with(RECIPE).replace("rounds = 2", "rounds = 6") + "\n"
    devices = Devices(tmp_path, text)
    stop(devices, tmp_path / "run", after=1)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    devices.serve(tmp_path / "run")
    with refuses(PolyfedError, "are forgotten"):
        devices.serve(tmp_path / "old")
