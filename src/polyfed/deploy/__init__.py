"""Deployment: run a recipe on a server and on devices, as processes of one machine or on several machines.

Files:
    app_folder: writes the app of a recipe, and folders of data for a demonstration.
    credentials: writes and renews the server's certificate. Also writes device keys, but only for trials.
    handlers: answers the packets that the server sends, on a device and in a simulation.
    faults: reports errors of a device to its own log and, in short, to the server.
    metrics: the text format of Prometheus.
    newcomer: a device or an edge that joins a server, and its key.
    processes: process groups, signals and ports of this machine.
    local_federation: a server and its devices as processes of this machine.
    server/: what runs on the server. `hosting` starts the server, `queued_run` a run, whose main function is in
        `server`, and `jobs` has the queue of runs and their supervisor. `enrolment`, `membership` and `claimed_shapes`
        decide who takes part, and `registration` who may.
    device/: what runs on a device. `agent` waits for the server, `tasks` runs the tasks, `device_file` and
        `configuration` are what its owner writes, and `joining` writes it for the owner.
    edge/: the edge of a silo, which serves the silo's devices and is a participant of the server. `edge_file` is what
        its owner writes, and `joining` writes it for the owner; `runtime` answers the server's packets, and
        `prediction` predicts for the silo.

The functions here need one of the extras `server` and `device`. Without it, they raise an error that says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError, TransportError, command
from polyfed.core.system.files import HAS_LOCKS
from polyfed.deploy.metrics import INSTALL
from polyfed.deploy.processes import ServerPorts

if TYPE_CHECKING:
    from polyfed.deploy.app_folder import write_app, write_nodes
    from polyfed.deploy.server.jobs import Job

__all__ = [
    "ServerPorts",
    "enqueue",
    "needing_extra",
    "predict_at_edge",
    "run_device",
    "run_edge",
    "run_locally",
    "run_server",
    "submit",
    "write_app",
    "write_credentials",
    "write_nodes",
]


def __getattr__(name: str) -> Any:
    """Import the functions that need PyTorch when they are used: the process of a device that waits does without."""
    if name not in ("write_app", "write_nodes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyfed.deploy import app_folder

    return getattr(app_folder, name)


@contextmanager
def needing_extra(what: str, *, linux: bool = True) -> Iterator[None]:
    """Turn a failed import of an optional package into an error that names the extra to install.

    Args:
        what: what needs it.
        linux: whether it also needs a system that has servers and devices.

    Raises:
        RecipeError: an import in the block fails, or the system has no servers and devices.
    """
    if linux and not HAS_LOCKS:
        raise RecipeError(
            f"{what} needs Linux, and this system has no fcntl. Simulations, their checks and `polyfed audit-log "
            "verify` run here"
        )
    try:
        yield
    except ImportError as error:
        raise RecipeError(f"{what} needs an extra: {INSTALL} ({error})") from None


def write_credentials(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Path:
    """Write a server's certificate for `hosts`, and `nodes` device keys; see `credentials.write_credentials`.

    Raises:
        RecipeError: an argument is wrong, or the extra is not installed.
    """
    with needing_extra("making certificates"):
        from polyfed.deploy import credentials
    return credentials.write_credentials(folder, nodes, hosts)


def run_locally(recipe_path: Path, folder: Path) -> Path:
    """Run a recipe as a federation on loopback; see `polyfed.deploy.local_federation.run_locally`.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run ended with an error, or the extra is not installed.
    """
    with needing_extra("a local federation"):
        from polyfed.deploy import local_federation as local
    return local.run_locally(recipe_path, folder)


def submit(app: Path, credentials: Path, changes: Mapping[str, str]) -> Path:
    """Run an app to its end in this process, with the devices of this machine's server; see `queued_run.run_here`.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run ended with an error, or no server uses the credentials.
    """
    with needing_extra("a run with devices"):
        from polyfed.deploy.server import hosting, queued_run
    if not hosting.serves(credentials):
        raise TransportError(f"no server uses {credentials}; start it: {command('server', credentials)}")
    return queued_run.run_here(app, credentials, changes)


def enqueue(app: Path, credentials: Path, changes: Mapping[str, str], at: float, wait: float) -> "Job":
    """Put a run of an app into the queue of this machine's server; see `queued_run.enqueue`.

    Raises:
        PolyfedError: the app is wrong, or the folder holds no credentials of a server.
    """
    with needing_extra("a run with devices"):
        from polyfed.deploy.server import queued_run
    return queued_run.enqueue(app, credentials, changes, at, wait)


def run_server(credentials: Path, ports: ServerPorts, jobs: int = 1) -> None:
    """Serve devices and run jobs; see `polyfed.deploy.server.hosting`.

    Raises:
        RecipeError: an argument is wrong, or an extra is not installed.
    """
    with needing_extra("a server"):
        from polyfed.deploy.server import hosting
    hosting.server(credentials, ports, jobs)


def run_device(path: Path, metrics_port: int) -> None:
    """Turn this process into that of one or more devices; see `polyfed.deploy.device.device_file`.

    Raises:
        RecipeError: an argument is wrong, or an extra is not installed.
    """
    with needing_extra("a device"):
        from polyfed.deploy.device import device_file
    device_file.device(path, metrics_port)


def run_edge(path: Path, metrics_port: int = 0) -> None:
    """Turn this process into that of an edge; see `polyfed.deploy.edge.edge_file`.

    Raises:
        RecipeError: an argument is wrong, or an extra is not installed.
    """
    with needing_extra("an edge"):
        from polyfed.deploy.edge import edge_file
    edge_file.edge(path, metrics_port)


def predict_at_edge(file: Path, model: Path, only_ids: Path | None = None) -> dict[str, list[Any]]:
    """Predict for the samples of a silo; see `polyfed.deploy.edge.prediction`.

    Raises:
        PolyfedError: the prediction failed, or an extra is not installed.
    """
    with needing_extra("an edge"):
        from polyfed.deploy.edge import prediction
    return prediction.predict_at_edge(file, model, only_ids)
