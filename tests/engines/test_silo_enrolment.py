"""A deployed run with silos begins when all devices of all silos are there, and names devices that it does not take."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.deploy.server.membership import expected
from polyfed.engines.flower import DirectGrid, GridTransport, client_app
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from polyfed.experiment.running.assembly import population_of
from refusals import refuses

HFM = """
seed = 3
rounds = 1
[data]
name = "toy"
rows = 120
classes = 4
[clients]
partition = "silos"
silos = 2
[model]
embedding = 6
[model.encoders]
a = { kind = "mlp", hidden = [8] }
b = { kind = "mlp", hidden = [8] }
[train]
lr = 0.1
[algorithm]
name = "hfm"
[egress.a]
silo = ["parameters", "embeddings"]
[egress.b]
silo = ["parameters", "embeddings"]
[egress.shared]
server = ["parameters", "statistic"]
silo = ["parameters", "statistic", "ids"]
[deployment]
enrol_seconds = 1.0
relay = "server-sees"
"""


class Growing(DirectGrid):
    """More nodes are online after the first look."""

    def __init__(self, devices: Devices, first: int, later: int) -> None:
        super().__init__(client_app(devices), first)
        self.later = later

    def get_node_ids(self) -> Any:
        found = range(1, self.clients + 1)
        self.clients = self.later
        return found


def silos_of(folder: Path, recipe: str = HFM) -> Devices:
    devices = Devices(folder, recipe)
    silo = population_of(load_recipe(devices.recipe)).silo
    assert silo is not None
    for config, number in zip(devices.configs, silo.tolist(), strict=True):
        config |= {"silo": number, "relay": "server-sees"}
    return devices


def test_hfm_with_two_silos_of_two_modalities_begins_with_four_devices_only(tmp_path: Path) -> None:
    devices = silos_of(tmp_path)
    assert len(devices.configs) == 4
    for count in (1, 3):
        with refuses(TooFewReplies, f"{count} of 4"):
            devices.serve(tmp_path / "run", GridTransport(DirectGrid(client_app(devices), count)))
        assert not (tmp_path / "run" / "rounds.jsonl").exists()
    assert devices.serve(tmp_path / "run", GridTransport(DirectGrid(client_app(devices), 4)))["rounds"] == 1


def test_a_device_that_is_online_and_not_taken_is_named(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run", GridTransport(Growing(devices, 3, 4)))
    assert "device node 4 is online and not taken; num = 3" in capsys.readouterr().out
    devices.serve(tmp_path / "again", GridTransport(DirectGrid(client_app(devices), 3)))
    assert "not taken" not in capsys.readouterr().out


def recipe(clients: str = "", engine: str = "") -> Any:
    text = HFM.replace("silos = 2\n", clients).replace("enrol_seconds = 1.0\n", f"enrol_seconds = 1.0\n{engine}\n")
    return parse_recipe(tomllib.loads(text))


@pytest.mark.parametrize(
    ("clients", "engine", "count"),
    [
        ("", "", 8),
        ("silos = 3\n", "", 6),
        ("silo_sizes = [3, 1, 1]\n", "", 6),
        ('silos = 5\nsilo_partition = "dirichlet"\nalpha = 1.0\n', "", 10),
        ('silo_partition = "dirichlet"\nalpha = 1.0\n', "", 8),
        ('silo_partition = "by-client"\n', "nodes = 6", 6),
        ('silos = 2\nholdings = [["a"], ["b"], ["a", "b"]]\n', "", 6),
        ("silos = 2\n", "nodes = 4\nmin_nodes = 3", 4),
    ],
)
def test_every_partition_of_silos_counts_its_devices(clients: str, engine: str, count: int) -> None:
    assert expected(recipe(clients, engine)) == count


@pytest.mark.parametrize(
    ("clients", "engine", "what"),
    [
        ("silos = 2\n", "nodes = 3", "deployment.nodes: 2 devices"),
        ("silos = 2\n", "min_nodes = 5", "deployment.min_nodes: devices"),
        ('silos = 3\nsilo_partition = "dirichlet"\nalpha = 1.0\n', "nodes = 4", "deployment.nodes: 2 devices"),
        ('silo_partition = "by-client"\n', "", "deployment.nodes: data decides"),
        ('silo_partition = "by-client"\n', "nodes = 5", "deployment.nodes: silo_partition"),
    ],
)
def test_a_number_of_devices_that_no_silos_have_is_refused(clients: str, engine: str, what: str) -> None:
    with refuses(RecipeError, what):
        expected(recipe(clients, engine))


def test_without_silos_min_nodes_is_at_most_the_number_of_clients() -> None:
    plain = parse_recipe(tomllib.loads(RECIPE))
    with refuses(RecipeError, "deployment.min_nodes: devices"):
        expected(replace(plain, deployment=replace(plain.deployment, min_nodes=4)))
