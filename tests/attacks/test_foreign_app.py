"""Code that arrives is never run on a device, and a stranger at the public port can neither submit nor list runs.

The first tests call the parts in this process. The slow ones start a SuperLink and three SuperNodes with TLS and keys.
"""

import asyncio
import io
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from engines.federations import PATIENCE, Surrounded, recipe_for, until
from polyfed.core.errors import BadReply, PolyfedError, RecipeError
from polyfed.deploy.app_folder import CLIENT, RECIPE
from polyfed.deploy.device.process import KEPT_RECIPES, handler_for
from polyfed.deploy.local_federation import LocalFederation
from polyfed.engines.flower.device.worker import LONGEST_TEXT
from polyfed.engines.flower.server.public_port import PUBLIC, FleetOnly
from polyfed.experiment.recipes.recipe import load_recipe
from refusals import refuses

THIEF = """
import os
from pathlib import Path
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
Path(os.environ.get("SENTINEL", os.devnull)).touch()
app = ClientApp()

@app.train()
def steal(message, context):
    rows = Path(str(context.node_config["data"])).read_bytes()
    return Message(RecordDict({"rows": ConfigRecord({"rows": rows})}), reply_to=message)
"""
"""A client half that writes a file and sends the rows of the device."""

ASKING = """
import json, time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in nodes], timeout=120)
    told = [
        {"error": reply.error.reason if reply.has_error() else None,
         "records": {k: str(v) for k, v in reply.content.items()} if reply.has_content() else {}}
        for reply in replies
    ]
    with open(context.run_config["told"], "w") as file:
        json.dump(told, file)
"""
"""A server half that asks every device once and writes down what came."""

SHADOWS = ("polyfed/__init__.py", "polyfed/deploy/__init__.py", "polyfed/deploy/device/process.py", "torch.py")
"""Modules of an app that would come before the installed ones, if the app were on the path."""


def project(client: str, told: Path | None = None) -> dict[str, Any]:
    app = {
        "publisher": "stranger",
        "components": {"serverapp": "asking:app", "clientapp": client},
        "config": {"told": str(told)},
    }
    about = {"name": "foreign", "version": "1.0.0", "description": "x", "license": "Apache-2.0", "dependencies": []}
    return {"project": about, "tool": {"flwr": {"app": app}}}


def foreign_app(folder: Path, client: str, told: Path, recipe: str = "") -> Path:
    """An app whose client half steals, under its own name or under the names of installed modules."""
    folder.mkdir()
    names = ("thief.py", "sitecustomize.py", *SHADOWS)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(THIEF)
    (folder / "asking.py").write_text(ASKING)
    if recipe:
        (folder / RECIPE).write_text(recipe)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project(client, told)))
    return folder


def fab_of(texts: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"pyproject.toml": tomli_w.dumps(project("thief:app")), RECIPE: ""}, "ClientApp"),
        ({"pyproject.toml": tomli_w.dumps(project(CLIENT))}, "named 'recipe.toml'"),
        ({RECIPE: ""}, "named 'pyproject.toml'"),
        ({"pyproject.toml": "x ="}, "not an app"),
        ({"pyproject.toml": tomli_w.dumps(project(CLIENT)), RECIPE: " " * (LONGEST_TEXT + 1)}, "is longer than"),
    ],
)
def test_an_app_that_is_not_polyfeds_is_refused(texts: dict[str, str], words: str, tmp_path: Path) -> None:
    with refuses(BadReply, words):
        handler_for(fab_of(texts), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_an_app_only_the_recipe_is_written_and_only_as_a_text(tmp_path: Path) -> None:
    texts = {"pyproject.toml": tomli_w.dumps(project(CLIENT)), RECIPE: "seed = 1\n", "../out.py": THIEF}
    handler = handler_for(fab_of(texts | dict.fromkeys(SHADOWS, THIEF)), tmp_path / ".")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [handler.recipe_path]
    assert handler.recipe_path.read_text() == "seed = 1\n"
    with refuses(BadReply, "not an app"):
        handler_for(b"no zip file", tmp_path)


def test_a_server_cannot_fill_the_temporary_folder_of_a_device_with_recipes(tmp_path: Path) -> None:
    handlers = []
    for number in range(3 * KEPT_RECIPES):
        texts = {"pyproject.toml": tomli_w.dumps(project(CLIENT)), RECIPE: f"seed = {number}\n"}
        handlers.append(handler_for(fab_of(texts), tmp_path))
        handler_for(fab_of(texts | {RECIPE: "seed = 0\n"}), tmp_path)
    assert len([*tmp_path.iterdir()]) == KEPT_RECIPES
    assert handlers[0].recipe_path.read_text() == "seed = 0\n", "a recipe that is used again stays"
    assert handlers[-1].recipe_path.exists()
    assert not handlers[1].recipe_path.exists()


@pytest.mark.parametrize("name", [RECIPE, "pyproject.toml"])
@pytest.mark.parametrize("part", ["a.", "a . ", '"\\"".', "'\"'.", "é."])
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(name: str, part: str, tmp_path: Path) -> None:
    """Python's parser needs memory in proportion to the square of the number of parts: gigabytes for these 100 kB."""
    long = part * (100_000 // len(part)) + "a = 1\n"
    started = time.monotonic()
    texts = {"pyproject.toml": tomli_w.dumps(project(CLIENT)), RECIPE: "seed = 1\n"} | {name: long}

    def read() -> None:
        load_recipe(handler_for(fab_of(texts), tmp_path).recipe_path)

    error = RecipeError if name == RECIPE else BadReply
    with refuses(error, "levels deep"):
        read()
    assert time.monotonic() - started < 5


def status(path: str, method: str = "POST") -> int:
    """What the public port answers to a signed call; 200 stands for what it passes on."""
    answers: list[int] = []

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        answers.append(200)

    async def send(message: dict[str, Any]) -> None:
        if "status" in message:
            answers.append(message["status"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(FleetOnly(whole, lambda headers: True)(scope, receive, send))
    assert len(answers) == 1
    return answers[0]


def test_the_public_port_passes_on_what_supernodes_call_and_nothing_else() -> None:
    assert "/v1/fleet/pull-messages" in PUBLIC
    assert all(status(path) == 200 for path in PUBLIC)
    assert all(status(path, "GET") == 403 for path in PUBLIC)
    others = ["/v1/control/start-run", "/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/acquire-task"]
    others += ["/v1/fleet/register-node", "/v1/fleet/unregister-node", "/docs", "/openapi.json", "/", "/health"]
    others += ["/v1/fleet/../control/start-run", "//v1/control/start-run", "/v1/fleet/pull-messages/"]
    assert all(status(path) == 403 for path in others)


def test_the_thief_steals_where_its_code_is_run(tmp_path: Path) -> None:
    """Otherwise the tests below would show nothing."""
    (tmp_path / "thief.py").write_text(THIEF)
    environment = dict(os.environ) | {"SENTINEL": str(tmp_path / "sentinel")}
    subprocess.run([sys.executable, "-c", "import thief"], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "sentinel").exists()


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("sentinel")
    return folder / "sentinel"


@pytest.fixture(scope="module")
def federation(sentinel: Path, tmp_path_factory: Any) -> Iterator[LocalFederation]:
    """Only the processes of devices know the sentinel's path, so that nothing on the server can write it."""
    folder = tmp_path_factory.mktemp("federation")
    told = {client: {"SENTINEL": str(sentinel)} for client in range(3)}
    with Surrounded(recipe_for("fedavg", folder), folder / "fed", told, {}) as started:
        started.start()
        until(lambda: all("SuperNode ID" in started.log(f"node-{client}") for client in range(3)), "SuperNodes", 120)
        yield started


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", ["thief:app", CLIENT])
def test_a_hostile_server_gets_no_code_onto_a_device(
    client: str, federation: LocalFederation, sentinel: Path, tmp_path: Path
) -> None:
    """Submitted on the server's own machine, the worst case. With polyfed's own name the app also shadows polyfed."""
    recipe = "" if client != CLIENT else (federation.app / RECIPE).read_text()
    app = foreign_app(tmp_path / "app", client, tmp_path / "told.json", recipe)
    before = [len(federation.log(f"node-{number}")) for number in range(3)]
    federation.run(app).wait(PATIENCE)
    until((tmp_path / "told.json").exists, "the foreign server's answers", 60)
    told = json.loads((tmp_path / "told.json").read_text())
    assert len(told) == 3
    assert not sentinel.exists(), "code of the app was run on a device"
    for number, answer in enumerate(told):
        log = federation.log(f"node-{number}")[before[number] :]
        assert set(answer["records"]) <= {"polyfed"}, "no rows"
        if client == CLIENT:
            assert "the message cannot be read" in str(answer["records"])
        else:
            assert "this device refused the app" in answer["error"]
            assert "REFUSED: this device refused the app of run" in log
            assert "Nothing of it was run" in log
    assert not list(federation.folder.glob("nodes/*/**/thief.py"))


def call(port: int, path: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    kind = {"Content-Type": "application/protobuf"}
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=b"", headers=kind, method="POST")
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stranger_with_the_public_certificate_can_neither_submit_nor_list_nor_register(
    federation: LocalFederation, sentinel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = federation.credentials / "ca.pem"
    stranger = tmp_path / "home"
    stranger.mkdir()
    address = {"address": f"127.0.0.1:{federation.public}", "root-certificates": str(ca)}
    (stranger / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "there", "there": address}}))
    app = foreign_app(tmp_path / "app", "thief:app", tmp_path / "told.json")
    runs = federation.flwr("list", "polyfed", "--format", "json")
    monkeypatch.setattr(federation, "_environment", lambda: dict(os.environ) | {"FLWR_HOME": str(stranger)})
    pub = federation.credentials / "node-0.pub"
    for words in (("run", str(app), "there"), ("list", "there"), ("supernode", "register", str(pub), "there")):
        with refuses(PolyfedError, "failed"):
            federation.flwr(*words)
    monkeypatch.undo()
    assert federation.flwr("list", "polyfed", "--format", "json") == runs, "no run was added"
    assert call(federation.public, "/v1/control/list-runs", ca) == 403
    assert call(federation.public, "/v1/runtime/acquire-task", ca) == 403
    assert call(federation.public, "/v1/fleet/pull-messages", ca) == 401, "a SuperNode must sign"
    assert not sentinel.exists()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc to see who listens where")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_are_taken_on_loopback_only(federation: LocalFederation) -> None:
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    where = {port: host for host, port in (entry.split(":") for entry in listening)}
    for port in federation.ports:
        assert where[f"{port:04X}"] == "0100007F"
