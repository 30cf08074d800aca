"""`polyfed submit` ends with the run's own exit code; a stand-in plays the command `flwr`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from engines.devices import Devices
from engines.federations import PATIENCE, outcome, recipe_for, reference, until
from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.deploy import submission, write_app
from polyfed.deploy.launch import statuses_of
from polyfed.deploy.local_federation import LocalFederation
from polyfed.deploy.server.run_log import KILLED, RunStatus
from polyfed.deploy.submission import Submission
from polyfed.experiment.running.lock import LOCK, is_locked
from refusals import refuses

FLWR = """#!{python}
import json, os, sys, time
from pathlib import Path
plan = json.loads(Path({plan!r}).read_text())
Path({plan!r}).with_name("words.json").write_text(json.dumps(sys.argv[1:]))
if sys.argv[1] == "stop":
    raise SystemExit(0)
if plan["id"]:
    print("Successfully started run", plan["id"], flush=True)
if plan["status"] is not None:
    folder = Path({statuses!r}) / str(plan["id"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(plan["status"]))
print("the log", flush=True)
time.sleep(plan["seconds"])
"""


class Stand:
    """An app, credentials, and a `flwr` that does as planned."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = Devices(folder)
        self.app, self.credentials, self.plan = self.devices.app, folder / "credentials", folder / "plan.json"
        (self.credentials / "flwr").mkdir(parents=True)
        (self.credentials / "flwr" / "config.toml").touch()
        (folder / "bin").mkdir()
        flwr = folder / "bin" / "flwr"
        statuses = str(statuses_of(self.credentials))
        flwr.write_text(FLWR.format(python=sys.executable, plan=str(self.plan), statuses=statuses))
        flwr.chmod(0o755)
        monkeypatch.setattr(submission.sys, "executable", str(folder / "bin" / "python"))
        self.shown: list[str] = []

    def submit(self, identity: int, status: dict[str, Any] | None, seconds: float = 0.0, **changes: str) -> Path:
        self.plan.write_text(json.dumps({"id": identity, "status": status, "seconds": seconds}))
        return Submission(self.app, self.credentials, changes, self.shown.append).run()

    def words(self) -> list[str]:
        told: list[str] = json.loads(self.plan.with_name("words.json").read_text())
        return told


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6])
def test_the_exit_code_is_that_of_the_run(code: int, stand: Stand) -> None:
    with refuses(PolyfedError, "a reason") as caught:
        stand.submit(7, {"state": "failed", "error": "a reason", "exit_code": code, "run": "x"})
    assert caught.value.exit_code == code
    assert stand.shown == ["Successfully started run 7\n", "the log\n"]


def test_a_run_that_finished_gives_its_folder(stand: Stand) -> None:
    assert stand.submit(7, {"state": "finished", "run": "x"}) == stand.app / "run"
    assert stand.words() == ["run", str(stand.app), "polyfed", "--stream"]
    out = str(stand.app / "a b")
    assert stand.submit(7, {"state": "finished", "run": "x"}, out=out) == Path(out)
    assert stand.words()[-2:] == ["--run-config", f'out="{out}"']


@pytest.mark.parametrize("status", [{"state": "running", "run": "x"}, {"state": "enrolling", "run": "x"}])
def test_a_killed_run_ends_with_1(status: dict[str, Any], stand: Stand) -> None:
    with pytest.raises(PolyfedError) as caught:
        stand.submit(7, status)
    assert (caught.value.exit_code, str(caught.value)) == (1, KILLED)


@pytest.mark.parametrize(("identity", "what"), [(0, "submitted nothing"), (7, "server wrote")])
def test_no_run_and_a_run_that_never_began_end_with_1(identity: int, what: str, stand: Stand) -> None:
    with refuses(PolyfedError, what) as caught:
        stand.submit(identity, None)
    assert caught.value.exit_code == 1


def test_a_folder_without_an_app_or_a_superlink_is_named(stand: Stand, tmp_path: Path) -> None:
    with refuses(RecipeError, "holds no app"):
        Submission(tmp_path / "none", stand.credentials, {}, print).run()
    with refuses(RecipeError, "no SuperLink uses"):
        Submission(stand.app, tmp_path / "none", {}, print).run()


def test_a_finished_run_is_not_submitted_again(stand: Stand) -> None:
    stand.devices.serve(stand.app / "run")
    assert Submission(stand.app, stand.credentials, {}, stand.shown.append).run() == stand.app / "run"
    assert "nothing to do" in stand.shown[0]


def test_a_run_that_goes_on_is_followed_and_not_submitted_twice(stand: Stand) -> None:
    status = RunStatus(statuses_of(stand.credentials) / "5", stand.app / "run")
    elsewhere = RunStatus(statuses_of(stand.credentials) / "4", stand.app / "another")
    ended = {"state": "finished", "run": str(stand.app / "run")}
    assert stand.submit(5, ended) == stand.app / "run"
    assert stand.words() == ["log", "5", "polyfed", "--stream"]
    assert elsewhere.facts["state"] == status.facts["state"] == "enrolling"


def test_an_interrupt_stops_the_run(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(text: str) -> None:
        if text == "the log\n":
            os.kill(os.getpid(), signal.SIGTERM)

    stand.plan.write_text(json.dumps({"id": 7, "status": None, "seconds": 60}))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Submission(stand.app, stand.credentials, {}, show).run()
    assert stand.words() == ["stop", "7", "polyfed"]
    assert time.monotonic() - started < 40


def command(app: Path, credentials: Path, log: Path) -> "subprocess.Popen[bytes]":
    """`polyfed submit`, which appends what it prints to a file."""
    words = [sys.executable, "-P", "-m", "polyfed", "submit", str(app), "--credentials", str(credentials)]
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, cwd=app)


def servers(app: Path) -> list[psutil.Process]:
    """The processes that run the server's half of an app: those that hold the lock of its run."""
    lock = app / "run" / LOCK
    return [psutil.Process(int(lock.read_text()))] if is_locked(app / "run") else []


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(recipe_for("fedavg", folder), folder / "fed") as started:
        started.start()
        yield started


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_killed_while_devices_receive_ends_with_1_and_the_same_command_goes_on(
    federation: LocalFederation, tmp_path: Path
) -> None:
    recipe = recipe_for("fedavg", tmp_path)
    text = recipe.read_text()
    assert "hidden = [" in text
    recipe.write_text(re.sub(r"hidden = \[[^]]*\]", "hidden = [2000, 2000]", text))
    app, log = write_app(recipe, tmp_path / "app"), tmp_path / "log"
    asked = federation.log("node-0").count("Receiving: train")
    first = command(app, federation.credentials, log)
    until(lambda: "run starts at round 1" in log.read_text(), "round 1")
    until(lambda: federation.log("node-0").count("Receiving: train") > asked, "a device that receives the model")
    (server,) = servers(app)
    server.kill()
    killed = time.monotonic()
    assert first.wait(PATIENCE) == 1
    assert KILLED in log.read_text()
    assert time.monotonic() - killed < 120
    second = command(app, federation.credentials, log)
    assert second.wait(PATIENCE) == 0
    assert "late" not in log.read_text(), "every device answers the request that it was sent"
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")
    third = command(app, federation.credentials, log)
    assert third.wait(PATIENCE) == 0
    assert "nothing to do" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_device_that_dies_before_it_has_enrolled_is_asked_when_it_is_back(
    federation: LocalFederation, tmp_path: Path
) -> None:
    recipe = recipe_for("fedavg", tmp_path)
    app, log = write_app(recipe, tmp_path / "app"), tmp_path / "log"
    federation.kill("node-1")
    run = command(app, federation.credentials, log)
    until(lambda: "2 of 3 enrolled" in log.read_text(), "the other devices")
    federation.return_node(1)
    assert run.wait(PATIENCE) == 0
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")
