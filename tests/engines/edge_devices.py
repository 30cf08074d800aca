"""A federation of silos with edges in this process: the real web servers, queues, edges and devices, in threads."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import tomli_w

from engines.own_devices import InThreads
from polyfed.deploy.app_folder import device_tables, write_app, write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.agent import Device
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.edge.edge_file import edge_file
from polyfed.deploy.server.queued_run import run_here
from polyfed.deploy.server.run_log import STATUS_FOLDER
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.transport.connection import Connection
from polyfed.transport.hub import HubServer
from polyfed.transport.logins import PrivateKey


class EdgeDevices:
    """A server, an edge for each silo, and a device for each modality of each silo.

    Args:
        folder: a folder for everything.
        recipe: its text.
        policies: silo -> text of its edge's policy file.
        count: silo -> number of devices for which its edge waits.
        more: further keys of each table [[device]].
    """

    def __init__(
        self,
        folder: Path,
        recipe: str,
        policies: dict[int, str] | None = None,
        count: Callable[[int], int] = lambda silo: 2,
        more: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.recipe = folder, folder / "recipe.toml"
        self.recipe.write_text(recipe)
        self.app, made = write_app(self.recipe, folder / "app"), load_recipe(self.recipe)
        self.places = write_nodes(made, folder)
        tables = device_tables(made, self.places)
        silos = sorted({table["silo"] for table in tables})
        self.credentials = write_credentials(folder / "credentials", len(silos))
        self.server = HubServer(self.credentials, "127.0.0.1", 0)
        self.hubs, self.edges, self.devices = [self.server], list[dict[str, Any]](), list[dict[str, Any]]()
        for silo in silos:
            own = [table for table in tables if table["silo"] == silo]
            place = folder / f"edge-{silo}"
            place.mkdir()
            credentials = write_credentials(place / "edge-credentials", len(own))
            self.hubs.append(HubServer(credentials, "127.0.0.1", 0))
            file: dict[str, Any] = {"server": self._address(self.server), "silo": silo, "devices": count(silo)}
            file |= {"ca": f"{self.credentials}/ca.pem", "key": f"{self.credentials}/node-{silo}.key"}
            if policies and silo in policies:
                (place / "policy.toml").write_text(policies[silo])
                file["policy"] = "policy.toml"
            (place / "edge.toml").write_text(tomli_w.dumps(file))
            self.edges.append(edge_file(place / "edge.toml"))
            keyed = [{"key": f"{credentials}/node-{n}.key"} | table | (more or {}) for n, table in enumerate(own)]
            head = {"server": self._address(self.hubs[-1]), "ca": f"{credentials}/ca.pem"}
            (place / "devices.toml").write_text(tomli_w.dumps(head | {"device": keyed}))
            self.devices.append(device_file(place / "devices.toml"))
        self.stop, self.threads = Event(), list[Thread]()

    def _address(self, hub: HubServer) -> str:
        return f"127.0.0.1:{hub.socket.getsockname()[1]}"

    def state(self, silo: int) -> Path:
        """The state folder of an edge."""
        return self.folder / f"edge-{silo}" / "polyfed-edge"

    def began(self) -> None:
        for hub in self.hubs:
            self.starts(hub.run)
        self.connect()

    def starts(self, work: Callable[[], object]) -> None:
        self.threads.append(Thread(target=work, daemon=True))
        self.threads[-1].start()

    def connect(self) -> None:
        """Start edges and devices, and wait until all are online."""
        for told in (*self.edges, *self.devices):
            shared = InThreads()  # an edge waits for its devices, whose tasks are in another one
            for one in told["devices"]:
                connection = Connection(
                    told["server"], Path(told["ca"]), PrivateKey(Path(one["key"])), self.stop, lambda text: None
                )
                device = Device(connection, one["config"], shared, told["limit"], lambda facts: None)  # type: ignore[arg-type]
                self.starts(device.run)
        end, wanted = time.monotonic() + 60, [len(self.edges), *(len(told["devices"]) for told in self.devices)]
        while [len(hub.hub.online) for hub in self.hubs] != wanted and time.monotonic() < end:
            time.sleep(0.01)

    def run(self) -> dict[str, Any]:
        """What `polyfed submit` does. Return the result."""
        with patch.dict(os.environ, {STATUS_FOLDER: ""}):
            out = run_here(self.app, self.credentials, {})
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    def ended(self) -> None:
        self.stop.set()
        for hub in self.hubs:
            hub.server.should_exit = True
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def edge_devices(folder: Path, recipe: str, **more: Any) -> Iterator[EdgeDevices]:
    made = EdgeDevices(folder, recipe, **more)
    made.began()
    try:
        yield made
    finally:
        made.ended()
