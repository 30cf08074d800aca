"""Three devices in folders, and the server that serves them, without processes."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.deploy import write_app, write_nodes
from polyfed.deploy.app_folder import node_config
from polyfed.deploy.handlers import Deployed
from polyfed.deploy.local_federation import _held
from polyfed.deploy.server.server import serve
from polyfed.engines.flower import DirectGrid, GridTransport, client_app
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.federation.wire_format import Packet

RECIPE = """
seed = 3
rounds = 2
[data]
name = "toy"
rows = 240
classes = 4
[clients]
partition = "dirichlet"
num = 3
alpha = 2.0
holdings = [["a", "b"], ["a"], ["b"]]
personal_test = 0.2
[model]
embedding = 6
[model.encoders]
a = { kind = "mlp", hidden = [8] }
b = { kind = "mlp", hidden = [8] }
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "scaffold"
[deployment]
enrol_seconds = 2.0
"""


class Devices:
    """Three devices in folders, as SuperNodes see them."""

    def __init__(self, folder: Path, recipe: str = RECIPE) -> None:
        (folder / "recipe.toml").write_text(recipe)
        self.recipe = folder / "recipe.toml"
        self.app = write_app(self.recipe, folder / "app")
        self.places = write_nodes(load_recipe(self.recipe), folder)
        held = _held(self.places, load_recipe(self.recipe))
        words = [shlex.split(node_config(p, k, held[k])) for k, p in enumerate(self.places)]
        self.configs: list[dict[str, Any]] = [dict(word.split("=", 1) for word in line) for line in words]
        for config in self.configs:
            config["client"] = int(config["client"])
        self.handler = Deployed(self.app / "recipe.toml")

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        return self.handler(packet, self.configs[config["partition-id"]])

    def transport(self) -> GridTransport:
        return GridTransport(DirectGrid(client_app(self), 3))

    def serve(self, out: Path, transport: GridTransport | None = None) -> dict[str, Any]:
        serve(self.app / "recipe.toml", transport or self.transport(), {"out": str(out)}, execute)
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result
