"""Messages of a deployment say where, and what to do next; every line of a log is of one format."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")
import uvicorn

from engines.devices import Devices
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.system.log_lines import LOG_FORMAT, LogLines
from polyfed.deploy.device import process as device_process
from polyfed.deploy.device import runtime as client_runtime
from polyfed.deploy.faults import LONGEST_TEXT
from polyfed.engines.flower.device.supernode_process import speak_as_polyfed
from polyfed.engines.flower.server.link_facts import database_of_this_release
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
    said = capsys.readouterr()
    folder = devices.places[1] / "polyfed-state"
    assert f"No space left on device. This device keeps its local state and its logs in {folder}. Make room" in said.err
    assert str(folder) not in said.out, "the server learns no path"


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


def test_the_web_server_of_a_supernode_writes_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, "json")
    config = {**uvicorn.config.LOGGING_CONFIG}
    speak_as_polyfed(config, LogLines)
    record = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, "Started server process [%d]", (7,), None)
    for entry in config["formatters"].values():
        told = json.loads(entry["()"](entry["role"]).format(record))
        assert (told["source"], told["role"], told["text"]) == ("uvicorn", "device", "Started server process [7]")


def test_the_warning_of_flowers_database_is_no_line_of_the_log(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught, database_of_this_release(str(tmp_path / "link.db")):
        warnings.warn("No path_separator found in configuration; falling back", DeprecationWarning, stacklevel=1)
    assert not caught


def test_a_device_says_at_its_start_what_silence_of_the_server_means(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_process, "work", lambda *_: None)
    device_process.main("127.0.0.1:1", b"", 0, 1, 0)
    said = capsys.readouterr().err
    assert "this device is ready and waits for the server" in said
    assert "a run may have begun without this device" in said
    assert "`polyfed submit` again" in said
