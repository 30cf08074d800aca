"""Start a server's SuperLink or a device's SuperNode, with the settings that docs/threat-model.md relies on."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import SERVER, care_for_certificate, check_server
from polyfed.deploy.device.configuration import node_from
from polyfed.deploy.metrics import require_prometheus
from polyfed.deploy.processes import HOST, ServerPorts, listens, loopback_without_proxy
from polyfed.deploy.server.monitor import TOKEN, ServerMonitor, token_at
from polyfed.deploy.server.run_log import STATUS_FOLDER, remove_old
from polyfed.engines.flower import QUIET
from polyfed.engines.flower.device import supernode_process
from polyfed.engines.flower.device.fetch_limit import DEVICE_LIMIT
from polyfed.engines.flower.device.supernode_process import CONTACT
from polyfed.engines.flower.device.supernode_process import WORKER as WORKER_ID
from polyfed.experiment.recipes.settings import DeploymentSpec

WORKER = "polyfed.deploy.device.process"

SUPERNODE = Path(supernode_process.__file__)
"""The program that replaces this process as the SuperNode. It does not import PyTorch."""

CONNECTION = "polyfed"
"""Name of the connection to this SuperLink in `FLWR_HOME/config.toml`."""


def superlink(credentials: Path, ports: ServerPorts, database: Path | None = None) -> None:
    """Run the SuperLink of a server until a signal ends it.

    On this machine, `flwr` reaches the SuperLink with `FLWR_HOME=CREDENTIALS/flwr`, under the name `polyfed`.

    Args:
        credentials: folder with `ca.pem`, `server.pem`, `server.key` and a public key `*.pub` for every device.
        ports: the addresses and ports on which the SuperLink listens.
        database: file in which the SuperLink stores its state. The default is `link.db` in the folder `credentials`.

    Raises:
        RecipeError: a certificate or a key is missing or invalid, or another process uses a port.
    """
    from polyfed.engines.flower.server.public_port import (
        run_superlink,  # imported here, as only a server needs a web server
    )

    care_for_certificate(credentials)
    check_server(credentials, [name for name in SERVER if (credentials / name).exists()])
    keys = sorted(credentials.glob("*.pub"))
    if not keys:
        raise RecipeError(f"{credentials} holds no public key (*.pub) of a device: no device could take part")
    numbers = [number for name, number in asdict(ports).items() if name != "host" and number]
    for number in numbers:
        if listens(number) or numbers.count(number) > 1:
            raise RecipeError(f"port {number} of this machine is taken; choose another (--port, --control-port, ...)")
    database = database or credentials / "link.db"
    statuses = statuses_of(credentials)
    remove_old(statuses)
    os.environ[STATUS_FOLDER] = str(statuses.absolute())
    services = _services(credentials, ports, statuses)
    _write_connection(credentials, ports.control_port)
    os.environ.update(QUIET | {"FLWR_HOME": str((credentials / "flwr").absolute())} | dict(os.environ))
    os.environ.update(loopback_without_proxy(os.environ))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    run_superlink(
        credentials=credentials,
        keys=keys,
        database=str(database),
        control_port=ports.control_port,
        host=ports.host,
        port=ports.port,
        services=services,
        daily=lambda: care_for_certificate(credentials),
    )


def statuses_of(credentials: Path) -> Path:
    """Return the folder with the statuses of the runs of a SuperLink; see `polyfed.deploy.server.run_log`."""
    return credentials / "flwr" / "runs"


def _services(credentials: Path, ports: ServerPorts, statuses: Path) -> list[Any]:
    """Return the web applications for health, metrics and status that `ports` asks for."""
    from polyfed.engines.flower.server.public_port import Service

    wanted = []
    if ports.metrics_port or ports.status_port:
        require_prometheus()
    if ports.metrics_port:
        wanted.append(Service(lambda link: ServerMonitor(link, statuses), HOST, ports.metrics_port, tls=False))
    if ports.status_port:
        token = token_at(credentials / TOKEN)
        wanted.append(
            Service(lambda link: ServerMonitor(link, statuses, token), ports.host, ports.status_port, tls=True)
        )
    return wanted


def _write_connection(credentials: Path, control_port: int) -> None:
    home = credentials / "flwr"
    home.mkdir(exist_ok=True)
    address = {"address": f"{HOST}:{control_port}", "root-certificates": str((credentials / "ca.pem").absolute())}
    table = {"superlink": {"default": CONNECTION, CONNECTION: address}}
    (home / "config.toml").write_text(tomli_w.dumps(table))


def supernode(
    superlink: str,
    root_certificates: Path,
    key: Path,
    node_config: str,
    port: int,
    metrics_port: int = 0,
    message_megabytes: int = DeploymentSpec.message_megabytes,
) -> NoReturn:
    """Turn this process into a device's SuperNode. Only installed code runs the SuperNode's tasks.

    Args:
        superlink: address of the server, `host:port`.
        root_certificates: path of `ca.pem`, with which the SuperNode checks the server's certificate.
        key: path of this device's private key.
        node_config: the value of Flower's option `--node-config`, with the device's data, number, modalities and
            policy.
        port: port on loopback between the SuperNode and the process that runs its tasks.
        metrics_port: port on loopback for health and metrics, or 0 for no such port.
        message_megabytes: the largest message that the SuperNode fetches from the server, in units of 2**20 bytes.

    Raises:
        RecipeError: a file is missing, the configuration is wrong, or another process uses the port.
    """
    node_from(node_config)
    for path in (root_certificates, key):
        if not path.is_file():
            raise RecipeError(f"{path} is not there; `polyfed docs deploy-reference` has the files that a device needs")
    if metrics_port:
        require_prometheus()
    for number in (port, metrics_port):
        if number and listens(number):
            raise RecipeError(f"port {number} of this machine is taken; choose another (--port, --metrics-port)")
    secret, address = secrets.token_bytes(32), f"{HOST}:{port}"
    options = {
        "superlink": superlink,
        "root-certificates": str(root_certificates),
        "auth-supernode-private-key": str(key),
        "node-config": node_config,
        "isolation": "process",  # Flower starts no process of its own that would import the code of an app
        "superexec-auth-secret-file": _readable(secret),
        "host": HOST,
        "port": str(port),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    os.environ.update(QUIET | dict(os.environ) | {DEVICE_LIMIT: str(message_megabytes)})
    os.environ.update(loopback_without_proxy(os.environ))
    contact = _never_touched()
    os.environ |= {CONTACT: str(contact), WORKER_ID: str(_start_worker(address, secret, metrics_port, contact))}
    os.execv(sys.executable, [sys.executable, "-P", str(SUPERNODE), *words])


def _start_worker(address: str, secret: bytes, metrics_port: int, contact: int) -> int:
    """Start the worker, which is the process that runs the tasks, and return its process id.

    The current process then becomes the SuperNode (`os.execv`). Each of the two processes ends when the other one has
    ended.
    """
    # -P: Python imports nothing from the current folder
    numbers = map(str, (metrics_port, os.getpid(), contact))
    words: Sequence[str] = [sys.executable, "-P", "-m", WORKER, address, *numbers]
    worker = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[contact])
    assert worker.stdin is not None
    worker.stdin.write(secret)
    worker.stdin.close()
    return worker.pid


def _never_touched() -> int:
    """Return an open file without a name. Its time of change tells when the server last answered the SuperNode.

    The SuperNode marks this time (`supernode_process.touch`), and the worker reads it.
    """
    file, path = tempfile.mkstemp(prefix="polyfed-contact-")
    os.unlink(path)
    os.utime(file, (0, 0))
    os.set_inheritable(file, True)
    return file


def _readable(secret: bytes) -> str:
    """Return a path under which the program of the SuperNode can read the secret once, without a file on the disk."""
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    os.set_inheritable(reading, True)
    return f"/dev/fd/{reading}"
