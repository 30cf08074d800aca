"""Start a server's SuperLink or a device's SuperNode, with the settings that docs/threat-model.md relies on."""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import tomli_w

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import SERVER, check_server
from polyfed.deploy.device import node_from
from polyfed.deploy.processes import HOST, listens
from polyfed.engines import flower
from polyfed.engines.flower import QUIET

WORKER = "polyfed.deploy.installed_client"

SUPERNODE = Path(flower.__file__).with_name("supernode_process.py")
"""The program that this process becomes; it does not import PyTorch."""

CONNECTION = "polyfed"
"""Name of the connection to this SuperLink in `FLWR_HOME/config.toml`."""


def superlink(credentials: Path, *, host: str, port: int, control_port: int, database: Path | None = None) -> None:
    """Run the SuperLink of a server until it is asked to end.

    `flwr` finds it on this machine with `FLWR_HOME=CREDENTIALS/flwr`, under the name `polyfed`.

    Args:
        credentials: folder with `ca.pem`, `server.pem`, `server.key` and a public key `*.pub` for every device.
        host: address on which devices are served.
        port: port on which devices are served.
        control_port: port on loopback for `flwr` and the processes of an app.
        database: where the SuperLink keeps its state; by default `link.db` in the folder of the credentials.

    Raises:
        RecipeError: a certificate or a key is missing or cannot be used, or a port is taken.
    """
    from polyfed.engines.flower.public_port import run_superlink  # which imports a web server: for the server only

    check_server(credentials, [name for name in SERVER if (credentials / name).exists()])
    keys = sorted(credentials.glob("*.pub"))
    if not keys:
        raise RecipeError(f"{credentials} holds no public key (*.pub) of a device: no device could take part")
    for number in (port, control_port):
        if listens(number):
            raise RecipeError(f"port {number} of this machine is taken; choose another (--port, --control-port)")
    _write_connection(credentials, control_port)
    os.environ.update(QUIET | {"FLWR_HOME": str((credentials / "flwr").absolute())} | dict(os.environ))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    run_superlink(
        credentials=credentials,
        keys=keys,
        database=str(database or credentials / "link.db"),
        control_port=control_port,
        host=host,
        port=port,
    )


def _write_connection(credentials: Path, control_port: int) -> None:
    home = credentials / "flwr"
    home.mkdir(exist_ok=True)
    address = {"address": f"{HOST}:{control_port}", "root-certificates": str((credentials / "ca.pem").absolute())}
    table = {"superlink": {"default": CONNECTION, CONNECTION: address}}
    (home / "config.toml").write_text(tomli_w.dumps(table))


def supernode(superlink: str, root_certificates: Path, key: Path, node_config: str, port: int) -> NoReturn:
    """Turn this process into a device's SuperNode, whose tasks are done by installed code only.

    Args:
        superlink: the server, `host:port`.
        root_certificates: `ca.pem`, by which the server's certificate is checked.
        key: this device's private key.
        node_config: what Flower calls `--node-config`: the device's data, number, modalities and policy.
        port: port on loopback between the SuperNode and the process that does its tasks.

    Raises:
        RecipeError: a file is missing, the configuration is wrong, or the port is taken.
    """
    node_from(node_config)
    for path in (root_certificates, key):
        if not path.is_file():
            raise RecipeError(f"{path} is not there; see docs/deploy.md for the files that a device needs")
    if listens(port):
        raise RecipeError(f"port {port} of this machine is taken; choose another (--port)")
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
    os.environ.update(QUIET | dict(os.environ))
    _start_worker(address, secret)
    os.execv(sys.executable, [sys.executable, "-P", str(SUPERNODE), *words])


def _start_worker(address: str, secret: bytes) -> None:
    """Start the process that does the tasks; it ends when the SuperNode, which this process becomes, has ended."""
    words: Sequence[str] = [sys.executable, "-P", "-m", WORKER, address]  # -P: nothing is imported from this folder
    worker = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    worker.stdin.write(secret)
    worker.stdin.close()


def _readable(secret: bytes) -> str:
    """A path under which the program that this process becomes reads the secret, once, without a file."""
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    os.set_inheritable(reading, True)
    return f"/dev/fd/{reading}"
