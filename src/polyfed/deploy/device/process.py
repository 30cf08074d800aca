"""On a device, the process that answers messages with the installed polyfed, never with code from a message.

`polyfed supernode` starts this process as `python -m polyfed.deploy.device.process HOST:PORT METRICS_PORT PID CONTACT`,
with a secret on its standard input. See docs/decisions/0013-deployed-code.md.
"""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply
from polyfed.deploy.app_folder import CLIENT, RECIPE
from polyfed.deploy.device.monitor import DeviceMonitor
from polyfed.deploy.faults import log, log_problem
from polyfed.deploy.handlers import Deployed
from polyfed.engines.flower import client_app
from polyfed.engines.flower.device.worker import Duties, read_app, work
from polyfed.engines.protocol import FAILED, reason
from polyfed.experiment.running.warm_start import APP_COPY
from polyfed.federation.wire_format import Packet

WAITS = (
    "this device is ready and waits for the server. A run asks only devices that are connected when it begins. If no "
    "task arrives, a run may have begun without this device: it takes part when the server's operator ends the run "
    "and calls `polyfed submit` again, which continues the run"
)
"""A device that connects after a run has begun gets no message of it, so it says in advance what silence means."""


KEPT_RECIPES = 8
"""Number of recipes that stay in the temporary folder. At most two tasks run at the same time, the newest one and one
that the SuperNode has given up, so older recipes are not in use."""


def handler_for(fab: bytes, folder: Path) -> Deployed:
    """Return a handler that runs an app's recipe with the installed polyfed.

    Args:
        fab: the bytes of the app in Flower's format.
        folder: folder in which to store the texts of the recipe and of its warm start, under their digest.

    Raises:
        BadReply: polyfed did not write this app, or the ClientApp that the app names is not installed on this device.
    """
    app = read_app(fab, RECIPE, APP_COPY)
    if app.client != CLIENT:
        raise BadReply(f"names the ClientApp '{app.client}'; only '{CLIENT}', which is installed here, is run")
    place = folder / hashlib.sha256(f"{len(app.recipe)}|{app.recipe}{app.model}".encode()).hexdigest()
    kept = sorted((old for old in folder.iterdir() if old != place), key=lambda old: old.stat().st_mtime)
    for old in kept[: 1 - KEPT_RECIPES]:
        shutil.rmtree(old, ignore_errors=True)
    place.mkdir(exist_ok=True)
    place.touch()
    (place / RECIPE).write_text(app.recipe, encoding="utf-8")
    if app.model:
        (place / APP_COPY).write_text(app.model, encoding="utf-8")
    return Deployed(place / RECIPE)


def main(address: str, secret: bytes, metrics_port: int, supernode: int, contact: int) -> None:
    """Run the tasks of a SuperNode until the SuperNode ends.

    Args:
        address: address at which the SuperNode assigns tasks, `host:port` on this machine.
        secret: the secret with which this process authenticates to the SuperNode.
        metrics_port: port on loopback for health and metrics, or 0 for no such port.
        supernode: process id of the SuperNode, which started this process.
        contact: an open file that the SuperNode marks at each contact with the server; see `DeviceMonitor`.
    """
    folder = Path(tempfile.mkdtemp(prefix="polyfed-"))
    log(WAITS)
    duties = Duties(lambda fab: handler_for(fab, folder), log_problem)
    if metrics_port:
        monitor = DeviceMonitor(metrics_port, contact)
        duties = replace(duties, wait=monitor.wait, done=monitor.done)
    try:
        work(address, secret, duties, supernode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _misplaced(packet: Packet, config: Mapping[str, Any]) -> Packet:
    return reason(FAILED, None, "a device was started by flower-supernode; start it by: polyfed supernode")


app = client_app(_misplaced)
"""The ClientApp that Flower's own `flwr-clientapp` would run. Its answer explains how to start the device."""

if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.buffer.read(), *map(int, sys.argv[2:]))
