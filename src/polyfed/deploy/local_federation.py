"""A federation on this machine's loopback, for trials and tests: a server, and a process for each device.

This module starts every process with the same commands that docs/deploy.md gives for real machines.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.core.errors import RecipeError
from polyfed.core.system.stop_signals import handling, interrupt
from polyfed.deploy.app_folder import device_tables, here, placed, write_app, write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.processes import HOST, free_ports, groups_of, listens, lives, signal_group
from polyfed.deploy.server.queued_run import run_here
from polyfed.deploy.server.server import finished
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.lock import alone_in

START_SECONDS, STOP_SECONDS = 120.0, 5.0
"""Most seconds until the server listens (a long time, for busy machines), and until a process has ended."""


class LocalFederation:
    """The server, the edges and the devices of a recipe as processes of this machine, each with its own folder.

    Args:
        folder: folder for the app, the devices' folders (see `write_nodes`), credentials and logs.

    Attributes:
        processes: the processes by name: `server`, `edge-0`, `device-0`, ... Each process leads a process group.
        port: port for devices, or for edges.
        tables: the table [[device]] of each device, which `start_device` writes to the device's file.
        edges: silo -> the file of its edge, which `start_edge` writes; empty without `[deployment] relay = "edge"`.
    """

    def __init__(self, recipe_path: str | Path, folder: str | Path) -> None:
        self.folder, recipe = Path(folder).absolute(), load_recipe(recipe_path)
        placed(recipe)
        population = population_of(recipe)
        self.app = write_app(recipe_path, self.folder / "app", overrides=here(recipe, population))
        self.nodes = write_nodes(recipe, self.folder, population)
        self.tables = device_tables(recipe, self.nodes, population)
        silos = sorted({table["silo"] for table in self.tables}) if recipe.deployment.relay == "edge" else []
        self.credentials = write_credentials(self.folder / "credentials", len(silos) or len(self.nodes))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port, *ports = free_ports(1 + len(silos))
        self.edges = {
            silo: self._edge(place, silo, port)
            for place, silo, port in zip(range(len(silos)), silos, ports, strict=True)
        }
        self.tables = [self._keyed(number, table) for number, table in enumerate(self.tables)]

    def _edge(self, place: int, silo: int, port: int) -> dict[str, Any]:
        """Make the folder of an edge, with its credentials, and return its file."""
        folder = self.folder / "edges" / str(silo)
        credentials = write_credentials(folder / "credentials", len(self.nodes))
        server = {"server": f"{HOST}:{self.port}", "ca": f"{self.credentials}/ca.pem"}
        own = {"silo": silo, "devices": sum(table["silo"] == silo for table in self.tables)}
        files = {"key": f"{self.credentials}/node-{place}.key", "credentials": str(credentials)}
        policy = folder / "policy.toml"
        if not policy.exists():  # what may leave the devices for the server may also leave the silo
            policy.write_text((self.nodes[0] / "policy.toml").read_text(encoding="utf-8"), encoding="utf-8")
        return {**server, **own, **files, "policy": str(policy), "host": HOST, "port": port}

    def _keyed(self, number: int, table: dict[str, Any]) -> dict[str, Any]:
        edge = self.edges.get(table.get("silo", -1))
        return {"key": f"{edge['credentials'] if edge else self.credentials}/node-{number}.key"} | table

    @property
    def out(self) -> Path:
        """The folder to which the server writes the run."""
        return self.app / "run"

    def start(self) -> None:
        """Start the server, the edges and the devices."""
        self.start_server()
        for silo in self.edges:
            self.start_edge(silo)
        for number in range(len(self.nodes)):
            self.start_device(number)

    def start_server(self, *more: str) -> None:
        """Start the server, with additional options, and wait until it listens.

        Raises:
            RecipeError: it ended, or does not listen within `START_SECONDS`.
        """
        self.begin("server", ["server", str(self.credentials), "--host", HOST, "--port", str(self.port), *more])
        self._await("server", self.port)

    def start_edge(self, silo: int) -> None:
        """Start the edge of a silo, and wait until it listens; see `start_server`."""
        file = self.folder / "edges" / str(silo) / "edge.toml"
        file.write_text(tomli_w.dumps(self.edges[silo]), encoding="utf-8")
        self.begin(f"edge-{silo}", ["edge", str(file)])
        self._await(f"edge-{silo}", self.edges[silo]["port"])

    def _await(self, name: str, port: int) -> None:
        end = time.monotonic() + START_SECONDS
        while not listens(port):
            if self.processes[name].poll() is not None or time.monotonic() > end:
                raise RecipeError(f"{name} did not start; see {self.folder}/{name}.log")
            time.sleep(0.1)

    def start_device(self, number: int, *more: str, **changes: str) -> None:
        """Start a device, with additional options. `changes` replace keys of its file outside of [[device]]."""
        edge = self.edges.get(self.tables[number].get("silo", -1))
        port, credentials = (edge["port"], edge["credentials"]) if edge else (self.port, self.credentials)
        general = {"server": f"{HOST}:{port}", "ca": f"{credentials}/ca.pem"} | changes
        file = self.nodes[number] / "device.toml"
        file.write_text(tomli_w.dumps(general | {"device": [self.tables[number]]}), encoding="utf-8")
        self.begin(f"device-{number}", ["device", str(file), *more])

    def begin(self, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
        """Start a command of polyfed, whose output is added to the log of this name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            # -P makes Python ignore local modules
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "polyfed", *words],
                env=_environment(),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def stop(self) -> None:
        """End all processes, and those that they have started. Ctrl-C has no effect meanwhile."""
        with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            groups = {group for process in self.processes.values() for group in groups_of(process.pid)}
            for how in (signal.SIGTERM, signal.SIGKILL):
                for group in groups:
                    signal_group(group, how)
                end = time.monotonic() + STOP_SECONDS
                while time.monotonic() < end and not self._ended(groups):
                    time.sleep(0.1)
            self.processes.clear()

    def _ended(self, groups: set[int]) -> bool:
        for process in self.processes.values():
            process.poll()  # otherwise the process remains as a zombie
        return not any(lives(group) for group in groups)

    def log(self, name: str) -> str:
        """Return the log of a process so far, or "" if the process has not been started."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> "LocalFederation":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run_locally(recipe_path: str | Path, folder: str | Path) -> Path:
    """Run a recipe as a federation on loopback. Its log is on standard error.

    Ctrl-C ends all processes. A second call with the same arguments resumes the run. If the run has finished, the call
    starts no process.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run ended with this error, or another call uses the folder.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    fix = "End it by Ctrl-C there, or choose another folder"
    with alone_in(folder, "another call runs a federation here", fix), handling(interrupt, signal.SIGTERM):
        out = folder / "app" / "run"
        if finished(load_recipe(recipe_path), out):
            _say(f"the run in {out} is at its end: nothing to do. Another folder begins another run")
            return out
        with LocalFederation(recipe_path, folder) as federation:
            edges = f", {len(federation.edges)} edges" if federation.edges else ""
            _say(f"starting a server{edges} and {len(federation.nodes)} devices; their logs: {federation.folder}/*.log")
            federation.start()
            return run_here(federation.app, federation.credentials, {})


def _say(text: str) -> None:
    print(f"polyfed: {text}", file=sys.stderr, flush=True)  # noqa: T201  as the log that follows


def _environment() -> Mapping[str, str]:
    own = {"PYTHONUNBUFFERED": "1"}
    if modules := os.environ.get("PYTHONPATH"):  # the processes start in another folder
        own["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in modules.split(os.pathsep))
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | own
