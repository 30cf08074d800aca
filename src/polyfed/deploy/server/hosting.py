"""Start polyfed's own server, `polyfed server`. Its process serves devices and holds no PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import SERVER, care_for_certificate, check_server
from polyfed.deploy.metrics import require_prometheus
from polyfed.deploy.processes import HOST, ServerPorts, listens
from polyfed.deploy.server.run_log import remove_old
from polyfed.transport.hub import run_hub
from polyfed.transport.queue import SERVER as SERVER_BELL
from polyfed.transport.queue import ring

RUNS = "runs"
"""The folder in the credentials with the statuses of the runs; see `polyfed.deploy.server.run_log`."""

SHOWN = 10
"""Most runs in the status of a server."""


def server(credentials: Path, ports: ServerPorts) -> None:
    """Serve devices until a signal ends this process.

    Args:
        credentials: folder with `ca.pem`, `server.pem`, `server.key` and a public key `*.pub` for every device.
        ports: the addresses and ports on which to listen. There is no port for commands.

    Raises:
        RecipeError: a certificate is missing or invalid, or another process uses a port or the folder.
    """
    care_for_certificate(credentials)
    check_server(credentials, [name for name in SERVER if (credentials / name).exists()])
    for number in filter(None, (ports.port, ports.metrics_port, ports.status_port)):
        if listens(number):
            raise RecipeError(f"port {number} of this machine is taken; choose another (--port, --metrics-port, ...)")
    statuses = credentials / RUNS
    remove_old(statuses)
    services = _services(credentials, ports, statuses) if ports.metrics_port or ports.status_port else []
    run_hub(credentials, ports.host, ports.port, services, lambda: care_for_certificate(credentials))


def _services(credentials: Path, ports: ServerPorts, statuses: Path) -> list[Any]:
    """Return the web applications for health, metrics and status that `ports` asks for; see `run_hub`."""
    from polyfed.deploy.server.monitor import TOKEN, ServerMonitor, token_at  # only here, as it imports PyTorch

    require_prometheus()

    def monitor(token: str) -> Callable[..., ServerMonitor]:
        def facts(hub: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            found = sorted(statuses.glob("*/"), key=lambda one: one.stat().st_mtime, reverse=True)[:SHOWN]
            return {**hub(), "runs": [{"id": one.name, "status": "running"} for one in found]}

        return lambda hub: ServerMonitor(lambda: facts(hub), statuses, token)

    wanted: list[Any] = [(monitor(""), HOST, ports.metrics_port, False)] if ports.metrics_port else []
    if ports.status_port:
        wanted.append((monitor(token_at(credentials / TOKEN)), ports.host, ports.status_port, True))
    return wanted


def serves(credentials: Path) -> bool:
    """Return whether a `polyfed server` uses these credentials now."""
    return ring(credentials / "queue" / f"{SERVER_BELL}.bell")
