"""Edges join a server and devices an edge, each with one command, and start with another; then they train."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.edge_devices import EdgeDevices
from engines.test_edges import EDGES, same_run
from engines.test_jobs import until
from polyfed import run as simulate
from polyfed.cli import main
from polyfed.core.errors import RecipeError, TransportError
from polyfed.deploy.app_folder import write_app, write_nodes
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.edge import joining
from polyfed.deploy.edge.edge_file import edge_file, is_edge
from polyfed.deploy.edge.joining import EDGE, Silo, join
from polyfed.deploy.processes import free_ports, listens
from polyfed.deploy.server import registration
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.transport.hub import HubServer
from polyfed.transport.joining import Door
from polyfed.transport.logins import PrivateKey
from refusals import refuses

HOST = "127.0.0.1"


class Joined(EdgeDevices):
    """A server with tokens for two edges. Nothing of edges and devices exists but the data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recipe = folder, folder / "recipe.toml"
        self.recipe.write_text(EDGES)
        self.app = write_app(self.recipe, folder / "app")
        self.places = write_nodes(load_recipe(self.recipe), folder)
        self.credentials, self.port = folder / "credentials", free_ports(1)[0]
        made = registration.begin(self.credentials, [HOST], self.port, ["", ""], 1.0, self.recipe)
        self.tokens = [one.token for one in made]
        self.hubs, self.edges, self.devices = list[HubServer](), list[dict[str, Any]](), list[dict[str, Any]]()
        self.stop, self.threads = Event(), list[Thread]()
        self.serves(self.credentials, self.port)

    def serves(self, credentials: Path, port: int) -> None:
        self.hubs.append(HubServer(credentials, HOST, port))
        self.starts(self.hubs[-1].run)

    def joins(self, silo: int, **more: Any) -> joining.JoinedEdge:
        return join(self.tokens[silo], Silo(self.folder / f"edge-{silo}", [HOST], 2, **more))


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Joined]:
    made = Joined(tmp_path)
    yield made
    made.ended()


def polyfed(*words: object) -> None:
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    assert not end.value.code, words


def test_two_commands_an_edge_and_two_a_device_make_silos_that_train(federation: Joined, capsys: Any) -> None:
    for silo, port in enumerate(free_ports(2)):
        folder = federation.folder / f"edge-{silo}"
        polyfed("edge", "join", federation.tokens[silo], folder, "--host", HOST, "--port", port, "--devices", 2)
        said = capsys.readouterr().out
        assert f"polyfed edge {folder / EDGE}" in said
        federation.edges.append(edge_file(folder / EDGE))
        federation.serves(folder / "edge-credentials", port)
        for number, words in enumerate(re.findall(r"^polyfed (device join .*)$", said, re.MULTILINE)):
            place = federation.places[2 * silo + number]
            filled = words.replace("FILE", str(place / "data.npz")).split()
            own = ["--policy", place / "policy.toml"] if silo else []
            polyfed(*filled, "--folder", place / "joined", "--yes", *own)
            if not silo:  # the owner allows what the written policy proposes
                rules = (policy := place / "joined" / "policy.toml").read_text()
                policy.write_text(re.sub(r"^# (?=silo = |\[egress\.shared\])", "", rules, flags=re.MULTILINE))
            assert "--relay edge: this server reads" in " ".join(capsys.readouterr().out.split())
            federation.devices.append(device_file(place / "joined" / "device.toml"))
    told = [one["config"] for file in federation.devices for one in file["devices"]]
    assert [(one["client"], one["silo"], one["relay"]) for one in told] == [
        (number, number // 2, "edge") for number in range(4)
    ]
    federation.devices = [
        file | {"devices": file["devices"] + other["devices"]}
        for file, other in zip(federation.devices[::2], federation.devices[1::2], strict=True)
    ]
    federation.connect()
    federation.run()
    simulate(federation.recipe, federation.folder / "one", engine="sequential")
    same_run(federation.app / "run", federation.folder / "one")


def test_a_token_of_an_edge_names_its_silo_and_numbers_follow_those_of_the_silos_before(federation: Joined) -> None:
    made = federation.joins(1)
    assert (made.silo, made.address, is_edge(made.file)) == (1, f"{HOST}:{federation.port}", True)
    assert [one.entry.number for one in made.tokens] == [2, 3]
    assert all(one.command.endswith(" --data FILE --silo 1 --relay edge") for one in made.tokens)
    with refuses(RecipeError, "--number 9"):  # a number of silo 4
        registration.issue(made.credentials, "", 9)
    shown = (made.credentials / registration.OFFERED).read_text()
    assert shown == EDGES, "the owners of devices see the recipe that the server shows"
    assert not (federation.folder / "edge-1" / "agent.lock").exists()


@pytest.mark.parametrize("lost", ["before", "after"])
def test_an_edge_whose_join_breaks_off_goes_on_with_the_same_key(
    lost: str, federation: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, keys = Door.register, list[str]()

    def broken(door: Door, key: PrivateKey) -> None:
        keys.append(key.fingerprint)
        if lost == "after":
            register(door, key)
        raise TransportError("the line broke")

    with monkeypatch.context() as patch:
        patch.setattr(Door, "register", broken)
        with refuses(TransportError, "line"):
            federation.joins(0)
    assert not (federation.folder / "edge-0").exists()
    made = federation.joins(0)
    assert [PrivateKey(made.file.parent / "edge.key").fingerprint] == keys
    assert [one["key"] for one in registration.devices(federation.credentials)] == [*keys, ""]
    assert not list(federation.folder.glob(".edge-0*"))


def test_an_edge_that_cannot_join_leaves_nothing_and_the_token_unused(federation: Joined) -> None:
    taken, rules = federation.folder / "edge-0", federation.folder / "limits.toml"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    with refuses(RecipeError, "not empty"):
        federation.joins(0)
    (taken / "mine").unlink()
    rules.write_text("[limits]\nmin_batch_size = 8\n")
    with refuses(RecipeError, "limits"):
        federation.joins(0, policy=rules)
    with refuses(RecipeError, "--hours"):
        federation.joins(0, hours=0.0)
    assert [path.name for path in federation.folder.glob("*edge-0*")] == ["edge-0"]
    assert not any(taken.iterdir())
    assert federation.joins(0).silo == 0


def test_relay_is_the_word_of_the_owner_and_needs_a_silo(federation: Joined, capsys: Any) -> None:
    for words, said in ((["--relay", "edge"], "--silo"), (["--silo", "0", "--relay", "anyone"], "server-sees")):
        with pytest.raises(SystemExit) as end:
            main(["device", "join", federation.tokens[0], "--data", "mine.npz", *words])
        assert (end.value.code, said in capsys.readouterr().err) == (2, True)
    assert [one["state"] for one in registration.devices(federation.credentials)] == ["open", "open"]


@pytest.mark.slow
def test_the_process_of_an_edge_tells_that_it_is_healthy(federation: Joined) -> None:
    port, metrics_port = free_ports(2)
    made = federation.joins(0, port=port)
    words = [sys.executable, "-P", "-m", "polyfed", "edge", str(made.file), "--metrics-port", str(metrics_port)]

    def health() -> int:
        with suppress(OSError), closing(HTTPConnection(HOST, metrics_port, timeout=10)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status
        return 0

    with subprocess.Popen(words) as process:
        try:
            until(lambda: health() == 200)
            assert listens(port), "for the devices of its silo"
        finally:
            process.terminate()
