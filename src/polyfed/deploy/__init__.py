"""Deployment: run a recipe on a server and on devices, as processes of one machine or on several machines.

Files:
    app_folder: writes the Flower app of a recipe, and folders of data for a demonstration.
    credentials: writes the server's certificate. Also writes device keys, but only for trials on one machine.
    launch: starts the SuperLink of a server and the SuperNode of a device.
    server: the main function of the ServerApp, which waits for clients and runs the recipe.
    enrolment: decides which clients take part, and checks the facts that they report.
    claimed_shapes: bounds the encoders that a server builds for shapes that devices claim.
    membership: stores which device has which client number.
    device_process: on a device, answers the server's messages in a process that runs only installed code.
    handlers: answers the packets that the server sends, on a device and in a simulation.
    device: what a device's owner configures: the data, the policy, and the code that recipes may use.
    device_arrays: which arrays of its file a recipe may use as labels, ids and split.
    device_data: reads the data of a device, and checks that it fits the federation.
    device_check: checks a recipe on a device before a run.
    client_runtime: runs a task, passes the reply through the egress gate, and stores local state and ledger.
    request_limits: on a device, limits how many requests of the server the device answers.
    privacy_budget: on a device, counts the epsilon of all replies with noise.
    repeated_requests: on a device, lets secrets serve once, and keeps replies with noise.
    store: what a device must not forget, in one SQLite file, and the files that its rows name.
    local_states: which local states a client keeps.
    faults: reports errors of a device to its own log and, in short, to the server.
    run_log: writes a server's log, and the status of each run.
    server_monitor: health, metrics and status of a server.
    status_client: gets the status of a server from another machine.
    device_monitor: health and metrics of a device.
    metrics: the text format of Prometheus.
    submission: submits an app and waits for its end.
    local_federation: a server and its devices as processes of this machine.
    processes: process groups, signals and ports of this machine.

The functions here need one of the extras `server`, `device` and `flower`. Without it, they raise an error that says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError, command
from polyfed.deploy.metrics import INSTALL
from polyfed.deploy.processes import ServerPorts

if TYPE_CHECKING:
    from polyfed.deploy.app_folder import write_app, write_nodes

__all__ = [
    "ServerPorts",
    "run_device",
    "run_locally",
    "run_server",
    "run_superlink",
    "run_supernode",
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
def _needing_extra(what: str) -> Iterator[None]:
    """Turn a failed import of an optional package into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise RecipeError(f"{what} needs an extra: {INSTALL} ({error})") from None


def write_credentials(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Path:
    """Write a server's certificate for `hosts`, and `nodes` device keys; see `credentials.write_credentials`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_extra("making certificates"):
        from polyfed.deploy import credentials
    return credentials.write_credentials(folder, nodes, hosts)


def run_locally(recipe_path: Path, folder: Path) -> Path:
    """Run a recipe as a federation on loopback; see `polyfed.deploy.local_federation.run_locally`.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run ended with an error, or Flower is not installed.
    """
    with _needing_extra("a local federation"):
        from polyfed.deploy import local_federation as local
    return local.run_locally(recipe_path, folder)


def submit(app: Path, credentials: Path, changes: Mapping[str, str], show: Callable[[str], None]) -> Path:
    """Run an app to its end, through the server of these credentials: a `polyfed server`, or else a SuperLink.

    See `polyfed.deploy.server.queued_run` and `polyfed.deploy.submission.Submission`.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run ended with an error, or no server uses the credentials.
    """
    from polyfed.deploy.server import hosting

    if hosting.serves(credentials):
        from polyfed.deploy.server import queued_run

        return queued_run.run_here(app, credentials, changes)
    if not (credentials / "flwr" / "config.toml").exists():
        start = command("server", credentials)
        raise RecipeError(f"no server uses {credentials}; start it: {start}")
    with _needing_extra("submitting an app to a SuperLink"):
        from polyfed.deploy.submission import Submission
    return Submission(app, credentials, changes, show).run()


def run_server(credentials: Path, ports: ServerPorts) -> None:
    """Serve devices; see `polyfed.deploy.server.hosting`.

    Raises:
        RecipeError: an argument is wrong, or an extra is not installed.
    """
    with _needing_extra("a server"):
        from polyfed.deploy.server import hosting
    hosting.server(credentials, ports)


def run_device(path: Path, metrics_port: int) -> None:
    """Turn this process into that of one or more devices; see `polyfed.deploy.device.device_file`.

    Raises:
        RecipeError: an argument is wrong, or an extra is not installed.
    """
    with _needing_extra("a device"):
        from polyfed.deploy.device import device_file
    device_file.device(path, metrics_port)


def run_superlink(credentials: Path, ports: ServerPorts, database: Path | None) -> None:
    """Run a server's SuperLink; see `polyfed.deploy.launch.superlink`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_extra("a SuperLink"):
        from polyfed.deploy import launch
    launch.superlink(credentials, ports, database)


def run_supernode(
    superlink: str,
    root_certificates: Path,
    key: Path,
    node_config: str,
    port: int,
    metrics_port: int,
    message_megabytes: int,
) -> None:
    """Turn this process into a device's SuperNode; see `polyfed.deploy.launch.supernode`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_extra("a SuperNode"):
        from polyfed.deploy import launch
    launch.supernode(superlink, root_certificates, key, node_config, port, metrics_port, message_megabytes)
