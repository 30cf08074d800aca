"""What tests over real processes share: recipes, what a run left, waiting, nodes with an environment of their own."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polyfed
from polyfed.deploy.app_folder import node_config
from polyfed.deploy.local_federation import LocalFederation

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


def said(federation: LocalFederation, text: str, times: int = 1) -> Callable[[], bool]:
    return lambda: federation.log("run").count(text) >= times


class Surrounded(LocalFederation):
    """A local federation in which processes of some nodes have an environment and a place for their state of their own.

    Args:
        recipe_path, folder: see `LocalFederation`.
        environments: variables of a node's processes, by client.
        states: folder for a client's state.
    """

    def __init__(
        self,
        recipe_path: Path,
        folder: Path,
        environments: Mapping[int, Mapping[str, str]],
        states: Mapping[int, Path],
    ) -> None:
        super().__init__(recipe_path, folder)
        self.environments, self.states = environments, states

    def start_node(self, client: int, **changes: str) -> None:
        """See `LocalFederation`."""
        if client in self.states:
            config = node_config(self.nodes[client], client, self.held[client])
            changes = {"node_config": f'{config} state="{self.states[client]}"'} | changes
        with patch.dict(os.environ, self.environments.get(client, {})):
            super().start_node(client, **changes)

    def state(self, client: int) -> Path:
        """Folder of a client's state."""
        return self.states.get(client, self.nodes[client] / "polyfed-state")
