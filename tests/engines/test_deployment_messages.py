"""Messages of a deployment say where, and what to do next; every line of a log is of one format."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import Devices
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.deploy.device import runtime as client_runtime
from polyfed.deploy.faults import LONGEST_TEXT
from polyfed.engines.protocol import hello
from refusals import refuses


def test_a_device_with_a_full_disk_names_the_folder_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    devices = Devices(tmp_path)
    monkeypatch.setattr(client_runtime, "book", full)
    with pytest.raises(TooFewReplies):
        devices.serve(tmp_path / "run")
    said = capsys.readouterr().err
    folder = devices.places[1] / "polyfed-state"
    assert f"No space left on device. This device keeps its local state and its logs in {folder}. Make room" in said
    of_the_server = [line for line in said.splitlines() if "client-missing" in line or "Not enrolled" in line]
    assert of_the_server
    assert not [line for line in of_the_server if str(folder) in line], "the server learns no path"


def test_a_recipe_with_very_many_mistakes_does_not_fill_the_log_of_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = Devices(tmp_path)
    recipe = devices.app / "recipe.toml"
    mistakes = "".join(f"k{number} = 1\n" for number in range(2000))
    recipe.write_text(recipe.read_text().replace("lr = 0.1\n", f"lr = 0.1\n{mistakes}"))
    assert devices(hello(), {"partition-id": 1}).header["verdict"] == "failed"
    said = capsys.readouterr().err
    assert "[train] has no option 'k0'" in said
    assert "more characters)" in said
    assert len(said) < 2 * LONGEST_TEXT


def test_a_run_that_cannot_go_on_here_says_how_to_choose_another_folder(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run")
    app = devices.app / "recipe.toml"
    app.write_text(app.read_text().replace("lr = 0.1", "lr = 0.2"))
    with refuses(RecipeError, "recipe says 0.2"):
        devices.serve(tmp_path / "run")
    assert "--out DIR" in json.loads((tmp_path / "run" / "error.json").read_text())["text"]
