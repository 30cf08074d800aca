"""Three devices in folders, and the server that serves them, without processes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.direct import HubTransport, over
from polyfed.deploy import write_app, write_nodes
from polyfed.deploy.app_folder import device_tables
from polyfed.deploy.handlers import Deployed
from polyfed.deploy.server.server import serve
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.federation.wire.wire_format import Packet

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
    """Three devices in folders, as their owners have set them up."""

    def __init__(self, folder: Path, recipe: str = RECIPE) -> None:
        (folder / "recipe.toml").write_text(recipe)
        self.recipe = folder / "recipe.toml"
        self.app = write_app(self.recipe, folder / "app")
        self.places = write_nodes(load_recipe(self.recipe), folder)
        self.configs: list[dict[str, Any]] = device_tables(load_recipe(self.recipe), self.places)
        self.handler = Deployed(self.app / "recipe.toml")

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        return self.handler(packet, self.configs[config["partition-id"]])

    def transport(self, count: int = 0) -> HubTransport:
        return over(self, count or len(self.places))

    def serve(self, out: Path, transport: HubTransport | None = None) -> dict[str, Any]:
        serve(self.app / "recipe.toml", transport or self.transport(), {"out": str(out)}, execute)
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result
