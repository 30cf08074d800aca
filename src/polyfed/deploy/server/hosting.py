"""Start polyfed's own server, `polyfed server`. Its process serves devices and holds no PyTorch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import SERVER, care_for_certificate, check_server, days_left
from polyfed.deploy.metrics import require_prometheus
from polyfed.deploy.processes import HOST, ServerPorts, listens
from polyfed.deploy.server.jobs import Jobs, Supervisor
from polyfed.deploy.server.late_receipts import LateReceipts
from polyfed.deploy.server.run_log import RUNS
from polyfed.transport.hub import HubServer
from polyfed.transport.queue import SERVER as SERVER_BELL
from polyfed.transport.queue import ring

SHOWN = 10
"""Most runs in the status of a server, and most jobs, unless more are running."""


def server(credentials: Path, ports: ServerPorts, jobs: int = 1) -> None:
    """Serve devices, and run the jobs in the queue, until a signal ends this process.

    Args:
        credentials: folder with `ca.pem`, `server.pem`, `server.key` and a public key `*.pub` for every device.
        ports: the addresses and ports on which to listen. There is no port for commands.
        jobs: how many jobs run side by side.

    Raises:
        RecipeError: a certificate is missing or invalid, or another process uses a port or the folder.
    """
    care_for_certificate(credentials)
    check_server(credentials, [name for name in SERVER if (credentials / name).exists()])
    numbers = [number for number in (ports.port, ports.metrics_port, ports.status_port) if number]
    for number in numbers:
        if listens(number) or numbers.count(number) > 1:
            raise RecipeError(f"port {number} of this machine is taken; choose another (--port, --metrics-port, ...)")
    statuses = credentials / RUNS
    hub = HubServer(credentials, ports.host, ports.port, lambda: care_for_certificate(credentials))
    if ports.metrics_port or ports.status_port:
        _add_monitors(hub, ports, statuses)
    with _in_thread(Supervisor(Jobs(credentials), jobs)), _in_thread(LateReceipts(credentials.absolute())):
        hub.run()


@contextmanager
def _in_thread(look: Supervisor | LateReceipts) -> Iterator[None]:
    """Look after the jobs, or after late receipts, in a thread during the `with` block."""
    thread = Thread(target=look.run)
    thread.start()
    try:
        yield
    finally:
        look.stop.set()
        thread.join()


def _add_monitors(hub: HubServer, ports: ServerPorts, statuses: Path) -> None:
    """Serve health, metrics and status on the ports that `ports` asks for."""
    # only here: a server without these ports needs no Jinja
    from polyfed.deploy.server.monitor import TOKEN, ServerMonitor, status_of, token_at
    from polyfed.deploy.server.web_page import WebPage

    require_prometheus()

    def facts() -> dict[str, Any]:
        result = sorted(statuses.glob("*/"), key=lambda one: one.stat().st_mtime, reverse=True)[:SHOWN]
        ends = {"certificate_ends": time.time() + days_left(hub.credentials) * 24 * 3600}
        return {**hub.hub.facts(), **ends, "runs": [one.name for one in result], **Jobs(hub.credentials).shown(SHOWN)}

    token = token_at(hub.credentials / TOKEN)
    if ports.metrics_port:
        page = WebPage(Jobs(hub.credentials), lambda: status_of(facts(), statuses), token)
        hub.add(ServerMonitor(facts, statuses, web=page.answer), HOST, ports.metrics_port, tls=False)
    if ports.status_port:
        hub.add(ServerMonitor(facts, statuses, token), ports.host, ports.status_port, tls=True)


def serves(credentials: Path) -> bool:
    """Return whether a `polyfed server` uses these credentials now."""
    return ring(credentials / "queue" / f"{SERVER_BELL}.bell")
