"""A federation on this machine's loopback, for trials and tests: a SuperLink with TLS, and SuperNodes with keys.

This module starts every process with the same commands that docs/deploy.md gives for real machines.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from polyfed.core import errors
from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.system.files import RESULT
from polyfed.core.system.stop_signals import handling, interrupt
from polyfed.deploy.app_folder import node_config, write_app, write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.allowed_arrays import array_names
from polyfed.deploy.launch import CONNECTION
from polyfed.deploy.processes import (
    HOST,
    free_ports,
    groups_of,
    listens,
    lives,
    loopback_without_proxy,
    signal_group,
)
from polyfed.deploy.server.server import ERROR, finished
from polyfed.engines.flower import QUIET
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.experiment.running.lock import alone_in

START_SECONDS, STOP_SECONDS = 120.0, 5.0
"""Most seconds until a process listens (a long time, for busy machines), and until a process has ended."""


class LocalFederation:
    """The server and the clients of a recipe as processes of this machine, each client with its own folder.

    Args:
        folder: folder for the app, the clients' folders (see `write_nodes`), credentials and logs.

    Attributes:
        processes: the processes by name: `link`, `node-0`, ... Each process leads a process group.
        public: port for SuperNodes.
        ports: port for commands, then one port for each SuperNode.
    """

    def __init__(self, recipe_path: str | Path, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.app = write_app(recipe_path, self.folder / "app")
        recipe = load_recipe(recipe_path)
        self.nodes = write_nodes(recipe, self.folder)
        self.held = _held(self.nodes, recipe)
        self.credentials = self.folder / "credentials"
        write_credentials(self.credentials, len(self.nodes))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.public, *self.ports = free_ports(2 + len(self.nodes))

    @property
    def out(self) -> Path:
        """The folder to which the server writes the run."""
        return self.app / "run"

    def start(self) -> None:
        """Start the SuperLink and the SuperNodes.

        This method deletes the SuperLink's database of an earlier call, because that database still lists ended
        SuperNodes as alive. A run can still resume, because it resumes from the folders of the server and of the nodes,
        and not from the database.
        """
        for old in self.folder.glob("link.db*"):
            old.unlink()
        self.start_link()
        for client in range(len(self.nodes)):
            self.start_node(client)

    def start_link(self, *more: str) -> None:
        """Start the SuperLink, with additional options, and wait until it listens on both ports."""
        options = f"--port {self.public} --control-port {self.ports[0]} --host {HOST} --database {self.folder}/link.db"
        self._start("link", *_polyfed("superlink", str(self.credentials), *options.split(), *more))
        end = time.monotonic() + START_SECONDS
        while not (listens(self.ports[0]) and listens(self.public)):
            if self.processes["link"].poll() is not None or time.monotonic() > end:
                raise RecipeError(f"the SuperLink did not start; see {self.folder}/link.log")
            time.sleep(0.2)

    def start_node(self, client: int, **changes: str) -> None:
        """Start a SuperNode. `changes` replace options of its command, as in `root_certificates="other.pem"`."""
        place = self.nodes[client]
        options = {
            "superlink": f"{HOST}:{self.public}",
            "root-certificates": f"{self.credentials}/ca.pem",
            "auth-supernode-private-key": f"{self.credentials}/node-{client}.key",
            "port": str(self.ports[1 + client]),
            "node-config": node_config(place, client, self.held[client]),
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._start(f"node-{client}", *_polyfed("supernode", *words))

    def return_node(self, client: int) -> None:
        """After a hard kill, start a SuperNode again, and repeat the start until the SuperLink accepts the SuperNode.

        The SuperLink treats the old SuperNode as alive until its last heartbeat is a minute old, and rejects the new
        SuperNode until then. A service manager with `Restart=always` also starts the SuperNode repeatedly.
        """
        end = time.monotonic() + 3 * START_SECONDS
        while time.monotonic() < end:
            before = len(self.log(f"node-{client}"))
            self.start_node(client)
            while time.monotonic() < end:
                time.sleep(1.0)
                said = self.log(f"node-{client}")[before:]
                if "SuperNode ID" in said:
                    return
                if "Exit Code" in said:
                    break
            self.kill(f"node-{client}")
            time.sleep(5.0)
        raise RecipeError(f"SuperNode {client} did not get in again; see {self.folder}/node-{client}.log")

    def run(self, app: Path | None = None) -> "subprocess.Popen[bytes]":
        """Submit an app, and return the process that streams the server's log until the run has ended."""
        return self._start("run", _command("flwr"), "run", str(app or self.app), CONNECTION, "--stream")

    def flwr(self, *words: str) -> str:
        """Run a Flower command to its end and return its output."""
        done = subprocess.run([_command("flwr"), *words], env=self._environment(), capture_output=True, check=False)
        text = (done.stdout + done.stderr).decode()
        if done.returncode:
            raise RecipeError(f"flwr {shlex.join(words)} failed: {text}")
        return text

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and its process group with a signal. The default signal ends them immediately."""
        process = self.processes.pop(name)
        signal_group(process.pid, how)
        process.wait()

    def stop(self) -> None:
        """End all processes, including those that Flower started in other sessions. Ctrl-C has no effect meanwhile."""
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

    def _start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                env=self._environment(),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def _environment(self) -> Mapping[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        own = {"FLWR_HOME": f"{self.credentials}/flwr", "PATH": path, "PYTHONUNBUFFERED": "1"}
        if modules := os.environ.get("PYTHONPATH"):  # the processes start in another folder
            own["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in modules.split(os.pathsep))
        return QUIET | {"OMP_NUM_THREADS": "1"} | dict(os.environ) | own | loopback_without_proxy(os.environ)


def run_locally(recipe_path: str | Path, folder: str | Path) -> Path:
    """Run a recipe as a federation on loopback, and print the server's log.

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
            _say(f"starting a SuperLink and {len(federation.nodes)} SuperNodes; their logs: {federation.folder}/*.log")
            federation.start()
            _show(federation)
    if (out / ERROR).exists():
        told = json.loads((out / ERROR).read_text())
        classes = (found for found in vars(errors).values() if isinstance(found, type))
        ours = {found.__name__: found for found in classes if issubclass(found, PolyfedError)}
        raise ours.get(told["error"], PolyfedError)(told["text"])
    if not (out / RESULT).exists():
        raise PolyfedError(f"the run ended without a result; see the logs in {folder}")
    return out


def _show(federation: LocalFederation) -> None:
    """Print the server's log until the run has ended."""
    path = federation.folder / "run.log"
    before = path.stat().st_size if path.exists() else 0
    process = federation.run()
    with path.open("rb") as log:
        log.seek(before)
        while process.poll() is None:
            print(log.read().decode(errors="replace"), end="", flush=True)  # noqa: T201  its output is this log
            time.sleep(0.2)
        print(log.read().decode(errors="replace"), end="", flush=True)  # noqa: T201


def _say(text: str) -> None:
    print(f"polyfed: {text}", flush=True)  # noqa: T201  as the log that follows


def _held(nodes: list[Path], recipe: Recipe) -> list[tuple[str, ...]]:
    """Return the modalities of the data in each folder."""
    import numpy as np

    special = {*array_names(recipe).values()}
    held = []
    for place in nodes:
        with np.load(place / "data.npz", allow_pickle=False) as arrays:
            held.append(tuple(n for n in arrays.files if n not in special and not n.endswith("_present")))
    return held


def _polyfed(*words: str) -> tuple[str, ...]:
    """Return a `polyfed` command that does not need the installed script. -P makes Python ignore local modules."""
    return (sys.executable, "-P", "-m", "polyfed", *words)


def _command(name: str) -> str:
    """Return the path of a command that is installed in the same folder as this Python interpreter."""
    return str(Path(sys.executable).with_name(name))
