"""How does a recipe run on other processes and machines?

Files:
    app_folder: writes the Flower app of a recipe, and folders of data for a demonstration.
    credentials: writes the server's certificate, and keys of devices for trials.
    launch: starts the SuperLink of a server and the SuperNode of a device.
    server: what the ServerApp does: wait for clients, then run the recipe.
    admission: which clients take part, and what the server believes of what they say.
    membership: which device has which client number.
    installed_client: the process of a device that answers messages, with installed code only.
    handlers: what a client makes of a packet, on a device and in a simulation.
    device: what the owner of a device configures: its data, its policy, what recipes may use there.
    device_check: what a device would do with a recipe, found out before anything is started.
    client_runtime: does a task, lets the reply through the egress gate, keeps local state and ledger.
    request_limits: how often a server may ask a device.
    state_store: a client's local state on its own disk.
    faults: what a device says of its faults, in its own log and to the server.
    run_log: lines of a server's log, and the status of its run in a file.
    server_monitor: health, metrics and status of a server; status_client asks for them from another machine.
    device_monitor: health and metrics of a device.
    metrics: the text format of Prometheus.
    local_federation: a server and its devices as processes of this machine.
    processes: process groups, signals and ports of this machine.

The functions here need the extra `polyfed[flower]` and say so where it is not installed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polyfed.core.errors import RecipeError
from polyfed.deploy.app_folder import write_app, write_nodes
from polyfed.deploy.processes import ServerPorts

__all__ = [
    "ServerPorts",
    "run_locally",
    "run_superlink",
    "run_supernode",
    "write_app",
    "write_credentials",
    "write_nodes",
]


@contextmanager
def _needing_flower(what: str) -> Iterator[None]:
    """Turn a failed import of Flower into a sentence that says what to install."""
    try:
        yield
    except ImportError as error:
        raise RecipeError(f"{what} needs the extra: pip install 'polyfed[flower]' ({error})") from None


def write_credentials(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Path:
    """Write a server's certificate for `hosts`, and `nodes` keys; see `polyfed.deploy.credentials.write_credentials`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_flower("making certificates"):
        from polyfed.deploy import credentials
    return credentials.write_credentials(folder, nodes, hosts)


def run_locally(recipe_path: Path, folder: Path) -> Path:
    """Run a recipe as a federation on loopback; see `polyfed.deploy.local_federation.run_locally`.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: what ended the run, or Flower is not installed.
    """
    with _needing_flower("a local federation"):
        from polyfed.deploy import local_federation as local
    return local.run_locally(recipe_path, folder)


def run_superlink(credentials: Path, ports: ServerPorts, database: Path | None) -> None:
    """Run a server's SuperLink; see `polyfed.deploy.launch.superlink`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_flower("a SuperLink"):
        from polyfed.deploy import launch
    launch.superlink(credentials, ports, database)


def run_supernode(
    superlink: str, root_certificates: Path, key: Path, node_config: str, port: int, metrics_port: int
) -> None:
    """Become a device's SuperNode; see `polyfed.deploy.launch.supernode`.

    Raises:
        RecipeError: an argument is wrong, or Flower is not installed.
    """
    with _needing_flower("a SuperNode"):
        from polyfed.deploy import launch
    launch.supernode(superlink, root_certificates, key, node_config, port, metrics_port)
