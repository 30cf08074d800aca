"""The file of `polyfed device`, and the start of the process of its devices."""

import json
import os
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.deploy.device.agent import IDLE_SECONDS
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.metrics import require_prometheus
from polyfed.deploy.processes import listens
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.settings import DeploymentSpec
from polyfed.transport.connection import host_and_port
from polyfed.transport.logins import PrivateKey
from polyfed.transport.proxy import Proxy

AGENT = "polyfed.deploy.device.agent"


@dataclass(frozen=True, kw_only=True)
class General:
    """The keys of a device's file outside of [[device]].

    Attributes:
        server: address of the server, `host:port`.
        ca: path of `ca.pem`, which verifies the server's certificate.
        message_megabytes: the largest message that a device fetches, in units of 2**20 bytes.
        parallel: number of tasks that may run at the same time; 0 for one per processor.
        idle_seconds: the process that runs tasks, which holds PyTorch, ends when no task has come for so long.

    Raises:
        RecipeError: the address is none, or a number is negative.
    """

    server: str
    ca: str = "ca.pem"
    message_megabytes: int = DeploymentSpec.message_megabytes
    parallel: int = 0
    idle_seconds: float = IDLE_SECONDS

    def __post_init__(self) -> None:
        """Check the address, the proxy on the way to it, and the numbers."""
        Proxy.to(*host_and_port(self.server))
        if self.message_megabytes < 1 or self.parallel < 0 or not self.idle_seconds >= 0:
            raise RecipeError("message_megabytes is at least 1, parallel and idle_seconds are not negative")


def device(path: Path, metrics_port: int = 0) -> NoReturn:
    """Turn this process into the process of the devices of a file.

    Args:
        path: a TOML file with the server's address, and a table [[device]] for each device. Paths in it begin at its
            folder.
        metrics_port: port on loopback for health and metrics, or 0 for no such port.

    Raises:
        RecipeError: the file is wrong, a file that it names is missing, or another process uses the port.
    """
    become(device_file(path), metrics_port)


def become(told: Mapping[str, Any], metrics_port: int) -> NoReturn:
    """Turn this process into the one that waits for the server; see `polyfed.deploy.device.agent`.

    Raises:
        RecipeError: another process uses the port for health and metrics.
    """
    if metrics_port:
        require_prometheus()
        if listens(metrics_port):
            raise RecipeError(f"port {metrics_port} of this machine is taken; choose another (--metrics-port)")
    file = tempfile.TemporaryFile()  # noqa: SIM115  the process that follows reads it
    file.write(json.dumps({**told, "metrics_port": metrics_port}).encode())
    file.seek(0)
    os.set_inheritable(file.fileno(), True)
    # -P: Python imports nothing from the current folder
    os.execv(sys.executable, [sys.executable, "-P", "-m", AGENT, str(file.fileno())])


def device_file(path: Path) -> dict[str, Any]:
    """Read the file of `polyfed device`.

    Raises:
        RecipeError: the file is wrong; the text names all its mistakes.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    faults, own, folder = list[str](), table.pop("device", []), path.absolute().parent
    if not isinstance(own, list) or not own or not all(isinstance(one, dict) for one in own):
        faults.append("it needs a table [[device]] for each device: key, data, client, modalities, policy")
        own = []
    general, devices = None, list[dict[str, Any]]()
    try:
        general = build("outside of [[device]]", General, table)
    except PolyfedError as error:
        faults.append(str(error))
    for number, one in enumerate(own, start=1):
        try:
            devices.append(_one_device(one, folder, f"[[device]] {number}"))
        except PolyfedError as error:
            faults.append(str(error))
    paths = {"key": [one["key"] for one in devices], "state": [one["config"]["state"] for one in devices]}
    for name, used in paths.items():
        if twice := [path for path, count in Counter(used).items() if count > 1]:
            faults.append(f"several devices have the {name} {', '.join(twice)}; each needs its own {name}")
    ca = folder / (general.ca if general is not None else General.ca)
    if not ca.is_file():
        faults.append(f"ca: {ca} is not there; copy ca.pem from the server")
    if faults or general is None:
        raise RecipeError(f"{path}: " + "; ".join(faults))
    return {
        "server": general.server,
        "ca": str(ca),
        "limit": general.message_megabytes * 2**20,
        "parallel": general.parallel or os.cpu_count() or 1,
        "idle_seconds": general.idle_seconds,
        "devices": devices,
    }


def _one_device(table: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Check the table of one device, and return its key and its configuration with absolute paths."""
    given = dict(table)
    key = given.pop("key", None)
    if not isinstance(key, str):
        raise RecipeError(f"{where} has no key; make one: ssh-keygen -q -t ecdsa -b 384 -N '' -f node.key")
    PrivateKey(folder / key)
    if isinstance(given.get("modalities"), list):
        given["modalities"] = ",".join(map(str, given["modalities"]))
    for name in ("data", "policy", "state", "id_key"):
        if isinstance(given.get(name), str) and given[name]:
            given[name] = str(folder / Path(given[name]).expanduser())
    node: NodeConfig = build(where, NodeConfig, given)
    config = {one.name: getattr(node, one.name) for one in fields(node)} | {"state": str(node.folder)}
    return {"key": str(folder / key), "config": config}
