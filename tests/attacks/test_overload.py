"""Messages and replies that are too large: each is refused before it is held in memory.

`test_own_transport.py` has the calls of strangers, and what the server reads of a reply.
"""

import hashlib
import json
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from attacks.test_lost_tasks import OFFER, Server
from engines.devices import RECIPE, Devices
from engines.direct import Hub, HubTransport
from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.agent import APPS, KEPT_APPS, LARGEST_APP, Device, Offer, Tasks
from polyfed.engines.protocol import Patience
from polyfed.federation.wire.wire_format import Packet
from polyfed.transport.hub import MANY
from refusals import refuses

LIMIT = 2**20

LARGE = RECIPE.replace("hidden = [8]", "hidden = [600, 600]").replace("rounds = 2", "rounds = 1")


def test_a_run_whose_replies_are_too_large_is_refused_before_its_first_round(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path, LARGE)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "message_megabytes = 2\n")
    with refuses(RecipeError, "task 'update' takes"):
        devices.serve(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (told["error"], told["exit_code"]) == ("RecipeError", 2)
    assert "Write message_megabytes = " in told["text"]
    assert "exit code 2" in capsys.readouterr().err
    assert not (tmp_path / "run" / "egress.jsonl").exists(), "nothing was asked"


def test_a_message_of_the_server_that_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: Any) -> None:
    devices = Devices(tmp_path, LARGE)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "message_megabytes = 2\n")
    monkeypatch.setattr("polyfed.experiment.checks.check.refuse_large", lambda assembly: None)
    with refuses(RecipeError, "to client 0"):
        devices.serve(tmp_path / "run")
    assert b'"verdict"' not in (tmp_path / "nodes" / "0" / "polyfed-state" / "audit.jsonl").read_bytes()


def test_a_client_whose_reply_is_too_large_is_left_out_at_once_and_not_asked_again() -> None:
    hub = Hub(lambda packet, config: Packet({"verdict": "reply"}, bytes(LIMIT + 1)), 1)
    transport = HubTransport(hub, limit=LIMIT)
    transport.node_of = {0: hub.names[0]}
    answers = transport.exchange({0: Packet({})}, Patience(20.0, 1))
    assert answers == {0: f"is too large: more than {LIMIT} bytes"}
    assert hub.queue.wanted() == set()


@pytest.mark.parametrize(("app", "body"), [(LARGEST_APP + 1, 3), (3, LIMIT + 1)])
def test_a_device_does_not_begin_to_fetch_what_is_too_large(app: int, body: int, tmp_path: Path) -> None:
    class Untouched(Server):
        def fetch(self, *_: Any) -> bool:
            raise AssertionError("it fetches")

    device = Device(Untouched(), {"client": 0, "state": str(tmp_path)}, Tasks(1), LIMIT, print)  # type: ignore[arg-type]
    digest = {"sha256": "0" * 64}
    offer = Offer.read(OFFER | {"app": digest | {"size": app}, "body": digest | {"size": body}})
    assert f"{max(app, body)} bytes, and this device fetches at most" in str(device._fetched(offer, tmp_path))


def test_a_server_cannot_fill_the_disk_of_a_device_with_recipes(tmp_path: Path) -> None:
    device = Device(Server(), {"client": 0, "state": str(tmp_path)}, Tasks(1), LIMIT, print)  # type: ignore[arg-type]
    (tmp_path / "place").mkdir()
    for number in range(3 * KEPT_APPS):
        for name in (str(number), "used again and again"):
            app = {"sha256": hashlib.sha256(name.encode()).hexdigest(), "size": 3}
            assert device._fetched(Offer.read(OFFER | {"app": app}), tmp_path / "place") == ""
    kept = {path.name for path in (tmp_path / APPS).iterdir()}
    assert len(kept) == KEPT_APPS
    assert hashlib.sha256(b"used again and again").hexdigest() in kept


SERVER = """
import sys
from pathlib import Path
from polyfed.transport import hub
hub.TRIM_SECONDS = 2.0
made = hub.HubServer(Path(sys.argv[1]), "127.0.0.1", 0)
print(made.socket.getsockname()[1], flush=True)
made.run()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(180)
def test_the_memory_of_many_handshakes_goes_back_when_they_end(tmp_path: Path) -> None:
    """Without trimming, glibc keeps all of it: it lies between what lives on."""
    folder = write_credentials(tmp_path / "credentials", 1)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    words = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server, ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        port, process = int(server.stdout.readline()), psutil.Process(server.pid)

        def open_() -> ssl.SSLSocket:
            plain = socket.create_connection(("127.0.0.1", port))
            return stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))

        open_()
        before, opened = process.memory_info().rss, [open_() for _ in range(MANY * 3)]
        grown = process.memory_info().rss - before
        assert grown > 15e6
        open_()  # lives on above the others
        for one in opened:
            one.close()
        end = time.monotonic() + 60
        while (left := process.memory_info().rss - before) > grown / 2:
            assert time.monotonic() < end, f"{left / 1e6:.0f} of {grown / 1e6:.0f} MB stay"
            time.sleep(0.2)
