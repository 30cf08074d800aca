"""What tests over real processes share: recipes, what a run left, waiting, devices with an environment of their own."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typing_extensions import override

import polyfed
from polyfed.deploy.local_federation import LocalFederation
from polyfed.deploy.processes import signal_group

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "federation-demo.toml"
METHODS = {"fedavg": "", "fedprox": "mu = 0.1", "scaffold": "", "moon": "mu = 1.0\nprojection = 8"}
PATIENCE = 400.0
"""Seconds; each ask starts a Python process per client, which takes half a minute on a machine that is busy."""


def recipe_for(method: str, folder: Path, rounds: int = 2, reply_seconds: float = PATIENCE, more: str = "") -> Path:
    """The demonstration's recipe for another method, without what that method lacks; `more` is of [deployment]."""
    text = DEMO.read_text().replace('name = "fedavg"', f'name = "{method}"\n{METHODS[method]}')
    text = text.replace("rounds = 3", f"rounds = {rounds}").replace("momentum = 0.9\n", "")
    path = folder / f"{method}.toml"
    path.write_text(text + f"\n[deployment]\nreply_seconds = {reply_seconds}\naway_seconds = {reply_seconds}\n{more}\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "run"} for row in found]


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["round"], row["ask"], row["destination"] != "client", row["client"]


def reference(recipe: Path, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """What the sequential engine gives: digest of the state, ledger."""
    run = polyfed.run(recipe, folder, engine="sequential")
    return run.result["state_sha256"], rows(folder / "egress.jsonl")


def outcome(out: Path) -> tuple[str, list[dict[str, Any]]]:
    return json.loads((out / "result.json").read_text())["state_sha256"], rows(out / "egress.jsonl")


def until(done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds:g} seconds for {what}"
        time.sleep(0.2)


def said(federation: "Federation", text: str, times: int = 1) -> Callable[[], bool]:
    return lambda: federation.log("run").count(text) >= times


class Federation(LocalFederation):
    """A local federation whose processes can be killed, and can have variables of their own.

    Attributes:
        environments: variables of a process, by its name.
    """

    def __init__(self, recipe_path: Path, folder: Path) -> None:
        super().__init__(recipe_path, folder)
        self.environments: dict[str, Mapping[str, str]] = {}

    @override
    def begin(self, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
        with patch.dict(os.environ, self.environments.get(name, {})):
            return super().begin(name, words)

    def run(self, app: Path | None = None, changed: str = "") -> "subprocess.Popen[bytes]":
        """Start a run, `polyfed submit`.

        Args:
            changed: code that the process of the run begins with, which may change polyfed.
        """
        if changed:
            place = self.folder / "changed"
            place.mkdir(exist_ok=True)
            (place / "sitecustomize.py").write_text(changed)
            path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH", "")])])
            self.environments["run"] = {"PYTHONPATH": path}
        try:
            return self.begin("run", ["submit", str(app or self.app), "--credentials", str(self.credentials)])
        finally:
            self.environments.pop("run", None)

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and its process group with a signal. The default signal ends them immediately."""
        process = self.processes.pop(name)
        signal_group(process.pid, how)
        process.wait()

    def state(self, number: int) -> Path:
        """Folder of a device's state."""
        return Path(self.tables[number].get("state", self.nodes[number] / "polyfed-state"))
