"""A deployed run with silos begins when all devices of all silos are there, and names devices that it does not take."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from engines.direct import Hub, HubTransport, over
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.deploy.local_federation import run_locally
from polyfed.deploy.server.membership import expected
from polyfed.experiment.recipes.recipe import parse_recipe
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


class Growing(Hub):
    """One more device is online after the first look."""

    def online(self) -> list[str]:
        found, self.absent = super().online(), set()
        return found


def silos_of(folder: Path, recipe: str = HFM) -> Devices:
    devices = Devices(folder, recipe)
    assert [config["silo"] for config in devices.configs] == [0, 0, 1, 1]
    assert {config["relay"] for config in devices.configs} == {"server-sees"}
    return devices


def test_hfm_with_two_silos_of_two_modalities_begins_with_four_devices_only(tmp_path: Path) -> None:
    devices = silos_of(tmp_path)
    assert len(devices.configs) == 4
    for count in (1, 3):
        with refuses(TooFewReplies, f"{count} of 4"):
            devices.serve(tmp_path / "run", over(devices, count))
        assert not (tmp_path / "run" / "rounds.jsonl").exists()
    assert devices.serve(tmp_path / "run", over(devices, 4))["rounds"] == 1


@pytest.mark.parametrize("wrong", ['relay = "refused"', 'relay = "server-sees"\nnodes = 3'])
def test_a_local_federation_of_silos_that_cannot_run_is_refused_before_anything_starts(
    wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(HFM.replace('relay = "server-sees"', wrong))
    with pytest.raises(RecipeError) as refused:
        run_locally(tmp_path / "recipe.toml", tmp_path / "fed")
    assert "4 devices" in str(refused.value) or "relay" in str(refused.value)
    assert not (tmp_path / "fed" / "credentials").exists()


def test_a_device_that_is_online_and_not_taken_is_named(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    hub = Growing(devices, 4)
    hub.absent = {hub.names[3]}
    devices.serve(tmp_path / "run", HubTransport(hub))
    assert "device device 3 is online and not taken; num = 3" in capsys.readouterr().err
    devices.serve(tmp_path / "again", over(devices, 3))
    assert "not taken" not in capsys.readouterr().err


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
