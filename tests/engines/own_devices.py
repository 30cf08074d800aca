"""A federation over polyfed's own transport in this process: the real web server, devices and queue, in threads."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Any
from unittest.mock import patch

import numpy as np

from polyfed.deploy.app_folder import write_app, write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device import tasks
from polyfed.deploy.device.agent import Device, Running
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.server.queued_run import run_here
from polyfed.deploy.server.run_log import STATUS_FOLDER
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.transport.connection import Connection
from polyfed.transport.hub import HubServer
from polyfed.transport.logins import PrivateKey


class InThreads:
    """In place of the process of tasks: each task runs here, in a thread, one after another."""

    def __init__(self) -> None:
        self.slots, self._one, self._count = BoundedSemaphore(100), Lock(), 0

    def begin(self, **task: Any) -> Running:
        running = Running(0)

        def work() -> None:
            with self._one:
                running.facts = tasks.answer(task)
            running.ended.set()

        Thread(target=work, daemon=True).start()
        return running

    def cancel(self, running: Running) -> None:
        running.ended.wait()

    def prepare(self) -> None:
        """There is no process to start."""


class OwnDevices:
    """A server, and a device for each client of a recipe.

    Args:
        folder: a folder for everything.
        recipe: its text.
        more: client -> further lines of its [[device]] table.
        policy: text that is added to each policy file.
    """

    def __init__(
        self, folder: Path, recipe: str, more: Callable[[int], str] = lambda client: "", policy: str = ""
    ) -> None:
        self.folder, self.recipe = folder, folder / "recipe.toml"
        self.recipe.write_text(recipe)
        self.app, made = write_app(self.recipe, folder / "app"), load_recipe(self.recipe)
        self.places = write_nodes(made, folder)
        for place in self.places:
            path = place / "policy.toml"
            path.write_text(path.read_text() + policy)
        self.credentials = write_credentials(folder / "credentials", len(self.places))
        self.server = HubServer(self.credentials, "127.0.0.1", 0)
        port = self.server.socket.getsockname()[1]
        head = f'server = "127.0.0.1:{port}"\nca = "{self.credentials}/ca.pem"\n'
        text = head + "".join(self._table(number, made.model.modalities, more) for number in range(len(self.places)))
        (folder / "device.toml").write_text(text)
        self.told, self.stop, self.threads = device_file(folder / "device.toml"), Event(), list[Thread]()

    def _table(self, number: int, modalities: Any, more: Callable[[int], str]) -> str:
        with np.load(self.places[number] / "data.npz", allow_pickle=False) as arrays:
            held = [name for name in modalities if name in arrays.files]
        return (
            f'[[device]]\nkey = "credentials/node-{number}.key"\ndata = "nodes/{number}/data.npz"\nclient = {number}\n'
            f'modalities = {json.dumps(held)}\npolicy = "nodes/{number}/policy.toml"\n{more(number)}\n'
        )

    def state(self, client: int) -> Path:
        """Folder of a client's state."""
        return Path(self.told["devices"][client]["config"]["state"])

    def began(self) -> None:
        self.threads.append(Thread(target=self.server.run, daemon=True))
        shared, told = InThreads(), self.told
        self.devices = [
            Device(
                Connection(
                    told["server"], Path(told["ca"]), PrivateKey(Path(one["key"])), self.stop, lambda text: None
                ),
                one["config"],
                shared,  # type: ignore[arg-type]
                told["limit"],
                lambda facts: None,
            )
            for one in told["devices"]
        ]
        self.threads += [Thread(target=device.run, daemon=True) for device in self.devices]
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + 60
        while len(self.server.hub.online) < len(self.devices) and time.monotonic() < end:
            time.sleep(0.01)

    def run(self, app: Path | None = None) -> dict[str, Any]:
        """What `polyfed submit` does. Return the result."""
        with patch.dict(os.environ, {STATUS_FOLDER: ""}):
            out = run_here(app or self.app, self.credentials, {})
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    def ended(self) -> None:
        self.stop.set()
        self.server.server.should_exit = True
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def own_devices(folder: Path, recipe: str, **more: Any) -> Iterator[OwnDevices]:
    made = OwnDevices(folder, recipe, **more)
    made.began()
    try:
        yield made
    finally:
        made.ended()
