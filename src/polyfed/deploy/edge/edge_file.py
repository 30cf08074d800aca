"""The file of `polyfed edge`, and the start of its process."""

import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.deploy.credentials import SERVER, care_for_certificate, check_server
from polyfed.deploy.device.agent import IDLE_SECONDS
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.device_file import become
from polyfed.deploy.processes import listens
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.settings import DeploymentSpec
from polyfed.privacy.egress.limits import NO_LIMITS
from polyfed.privacy.egress.requirements import NO_REQUIREMENTS
from polyfed.transport.connection import host_and_port
from polyfed.transport.logins import PrivateKey
from polyfed.transport.proxy import Proxy


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """The file of an edge. Paths begin at its folder.

    Attributes:
        server: address of the federation's server, `host:port`.
        silo: number of the silo.
        devices: number of its devices, for which the edge waits.
        key: the edge's key. Its public part lies in the credentials of the federation's server.
        ca: path of `ca.pem`, which verifies the certificate of the federation's server.
        credentials: folder with the edge's own certificate, and a public key `*.pub` for each device of the silo.
        host: where devices reach the edge.
        port: port for devices.
        policy: the policy file: what of the silo may leave for the server. Without a file, the default policy applies.
        state: folder for what the edge keeps, its ledger and its audit log.
        message_megabytes: the largest message of the server that the edge fetches, in units of 2**20 bytes.

    Raises:
        RecipeError: a number is out of range, or the address is none.
    """

    server: str
    silo: int
    devices: int
    key: str = "edge.key"
    ca: str = "ca.pem"
    credentials: str = "edge-credentials"
    host: str = "0.0.0.0"
    port: int = 9093
    policy: str = ""
    state: str = "polyfed-edge"
    message_megabytes: int = DeploymentSpec.message_megabytes

    def __post_init__(self) -> None:
        """Check the address, the proxy on the way to it, and the numbers."""
        Proxy.to(*host_and_port(self.server))
        if self.silo < 0 or self.devices < 1 or self.message_megabytes < 1 or not 0 <= self.port < 2**16:
            raise RecipeError(
                f"silo = {self.silo}, devices = {self.devices}, port = {self.port}, message_megabytes = "
                f"{self.message_megabytes}: silos and ports are not negative, the others at least 1"
            )

    @cached_property
    def node(self) -> NodeConfig:
        """The edge as a device without data: its policy and its state."""
        return NodeConfig(data=self.state, client=self.silo, modalities="", policy=self.policy, state=self.state)


def edge_file(path: Path) -> dict[str, Any]:
    """Read the file of `polyfed edge`, and return what the process of its connection needs.

    Raises:
        RecipeError: the file is wrong, or a file that it names is missing; the text names all mistakes.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    folder, faults = path.absolute().parent, list[str]()
    try:
        config: EdgeConfig = build("the file of an edge", EdgeConfig, table)
    except PolyfedError as error:
        raise RecipeError(f"{path}: {error}") from None
    placed = {name: str(folder / Path(getattr(config, name)).expanduser()) for name in _PATHS if getattr(config, name)}
    whole = asdict(config) | placed
    try:
        PrivateKey(Path(whole["key"]))
    except PolyfedError as error:
        faults.append(str(error))
    if not Path(whole["ca"]).is_file():
        faults.append(f"ca: {whole['ca']} is not there; copy ca.pem from the server")
    credentials = Path(whole["credentials"])
    if missing := [name for name in SERVER if not (credentials / name).exists()]:
        faults.append(f"credentials: {credentials} lacks {', '.join(missing)}; `polyfed edge join` writes one")
    try:
        refuse_demands(replace(config, policy=whole["policy"]))
    except PolyfedError as error:
        faults.append(str(error))
    if faults:
        raise RecipeError(f"{path}: " + "; ".join(faults))
    shared = {"client": config.silo, "policy": whole["policy"], "state": whole["state"], "edge": whole}
    return {
        "server": config.server,
        "ca": whole["ca"],
        "limit": config.message_megabytes * 2**20,
        "parallel": 1,
        "idle_seconds": IDLE_SECONDS,
        "devices": [{"key": whole["key"], "config": shared}],
        "hub": {"credentials": whole["credentials"], "host": config.host, "port": config.port},
    }


def is_edge(path: Path) -> bool:
    """Return whether a file is that of an edge, and not of devices."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return "device" not in table and "credentials" in table


def refuse_demands(edge: EdgeConfig) -> None:
    """Refuse a policy file with sections that only a device, which has the rows, can obey.

    Raises:
        RecipeError: the file cannot be read, is no policy, or has such a section.
    """
    rules = edge.node.rules
    if rules.limits != NO_LIMITS or rules.required != NO_REQUIREMENTS or rules.purposes.named is not None:
        raise RecipeError(
            f"policy {rules.path}: an edge has no rows, so write [limits], [require] and [purposes] on its devices"
        )


_PATHS = ("key", "ca", "credentials", "policy", "state")


def edge(path: Path, metrics_port: int = 0) -> NoReturn:
    """Turn this process into that of an edge. It listens for the devices of its silo, and waits for the server.

    Args:
        path: its file.
        metrics_port: port on loopback for health and metrics, or 0 for no such port.

    Raises:
        RecipeError: the file is wrong, a file that it names is missing, or another process uses the port.
    """
    told = edge_file(path)
    credentials = Path(told["hub"]["credentials"])
    care_for_certificate(credentials)
    check_server(credentials, list(SERVER))
    if listens(told["hub"]["port"]):
        raise RecipeError(f"port {told['hub']['port']} of this machine is taken; choose another (port)")
    become(told, metrics_port)
