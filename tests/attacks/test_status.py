"""A stranger learns nothing from the status port, and the metrics tell nothing that is secret.

The quick tests serve the pages beside a server that is made up, over real TLS. The slow one asks a real federation.
"""

import hmac
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
import uvicorn

from engines.federations import PATIENCE, Federation, recipe_for, until
from polyfed.cli import main
from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.monitor import SILENCE_SECONDS, DeviceMonitor
from polyfed.deploy.processes import HOST, free_ports, listens
from polyfed.deploy.server import monitor as server_monitor
from polyfed.deploy.server.monitor import TOKEN, ServerMonitor, read_token, token_at
from polyfed.deploy.server.run_log import KEPT_RUNS, KILLED, RUNS, STATUS_FOLDER, RunStatus, listeners_of, remove_old
from polyfed.deploy.server.status_client import ask
from refusals import refuses

SECRET = "a reason with a secret"
LINK = {"nodes": {"registered": 3, "online": 2}, "certificate_ends": 2e9, "runs": ["7"]}
PAGES = ("/status", "/metrics", "/health", "/", "/nothing")


class Server:
    """The status port of a server."""

    def __init__(self, folder: Path) -> None:
        self.credentials = write_credentials(folder / "credentials", 0)
        self.token = token_at(self.credentials / TOKEN)
        self.port = free_ports(1)[0]
        status = RunStatus(folder / "7", folder / "run")
        status("run-started", rounds=5, first_round=1)
        status("client-missing", round=1, task="fit", client=1, reason=SECRET)
        monitor = ServerMonitor(lambda: LINK, folder, self.token)
        tls = {name: str(self.credentials / file) for name, file in (("ssl_keyfile", "server.key"),)}
        tls["ssl_certfile"] = str(self.credentials / "server.pem")
        config = uvicorn.Config(monitor, host=HOST, port=self.port, lifespan="off", ws="none", log_config=None, **tls)  # type: ignore[arg-type]
        self.server = uvicorn.Server(config)
        self.thread = Thread(target=self.server.run, daemon=True)
        self.thread.start()
        end = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < end
            time.sleep(0.02)

    def said(self, request: bytes) -> bytes:
        """The whole answer to the bytes of a request."""
        context = ssl.create_default_context(cafile=str(self.credentials / "ca.pem"))
        with (
            socket.create_connection((HOST, self.port), timeout=30) as bare,
            context.wrap_socket(bare, server_hostname=HOST) as line,
        ):
            line.sendall(request)
            answer = b""
            while part := line.recv(65536):
                answer += part
        return answer

    def get(self, path: str, *headers: str, method: str = "GET") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close", *headers]
        return self.said("\r\n".join([*lines, "", ""]).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("status"))
    yield started
    started.server.should_exit = True
    started.thread.join(30)


def without_date(answer: bytes) -> bytes:
    return re.sub(rb"date: [^\r]*\r\n", b"", answer)


@pytest.mark.parametrize("path", PAGES)
def test_a_stranger_with_the_public_certificate_gets_nothing(path: str, server: Server) -> None:
    """The answer is the same for every path, so that it does not tell what is there."""
    answer = server.get(path)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert without_date(answer) == without_date(server.get("/status"))
    assert answer.endswith(b"\r\n\r\npolyfed: a token is needed\n")


def wrong(token: str) -> dict[str, tuple[str, ...]]:
    return {
        "another": (f"Authorization: Bearer {'0' * 64}",),
        "empty": ("Authorization: Bearer ",),
        "a part": (f"Authorization: Bearer {token[:-1]}",),
        "more": (f"Authorization: Bearer {token}0",),
        "upper case": (f"Authorization: Bearer {token.upper()}",),
        "another scheme": (f"Authorization: Basic {token}",),
        "no scheme": (f"Authorization: {token}",),
        "twice": ("Authorization: Bearer x", f"Authorization: Bearer {token}"),
        "as a cookie": (f"Cookie: {token}",),
        "not text": ("Authorization: Bearer \x80\xff",),
    }


@pytest.mark.parametrize("how", wrong("ab"))
def test_a_wrong_token_gets_nothing(how: str, server: Server) -> None:
    for path in PAGES:
        assert server.get(path, *wrong(server.token)[how]).startswith(b"HTTP/1.1 401 ")
    assert server.get(f"/status?token={server.token}").startswith(b"HTTP/1.1 401 ")


def test_the_token_opens_the_pages_and_nothing_can_be_written(server: Server) -> None:
    words = f"Authorization: Bearer {server.token}"
    assert SECRET.encode() in server.get("/status", words)
    assert server.get("/health", words).endswith(b'{"status": "ok"}')
    assert b"polyfed_nodes_online 2.0" in server.get("/metrics", words)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert server.get("/status", words, method=method).startswith(b"HTTP/1.1 404 ")


def test_tokens_are_compared_in_a_time_that_does_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As digests of equal length, by the function that is made for it."""
    seen: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(server_monitor, "hmac", type("", (), {"compare_digest": staticmethod(compare)}))
    monitor = ServerMonitor(lambda: LINK, Path("nothing"), "t" * 64)
    for given in (b"", b"t", b"t" * 10_000):
        assert monitor.page("GET", "/status", [(b"authorization", b"Bearer " + given)])[0] == 401
    assert monitor.page("GET", "/status", [])[0] == 401
    assert [len(one) == len(other) == 32 for one, other in seen] == [True] * 4


def test_no_http_without_tls(server: Server) -> None:
    with socket.create_connection((HOST, server.port), timeout=30) as line:
        line.sendall(f"GET /status HTTP/1.1\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode())
        with pytest.raises((ConnectionError, TimeoutError, AssertionError)):
            assert b"HTTP/1.1 200" in line.recv(65536)


def test_the_metrics_hold_no_reason_no_path_and_no_token(server: Server) -> None:
    told = server.get("/metrics", f"Authorization: Bearer {server.token}").decode()
    for secret in (SECRET, str(server.credentials.parent), server.token):
        assert secret not in told
    names = {line.split("{")[0].split(" ")[0] for line in told.partition("\r\n\r\n")[2].splitlines() if "#" not in line}
    assert all(name.startswith("polyfed_") for name in names)
    assert not [name for name in names if re.search("label|class|accuracy|loss", name)]


def test_on_loopback_there_is_no_status_without_a_token(tmp_path: Path) -> None:
    monitor = ServerMonitor(lambda: LINK, tmp_path / "none")
    assert monitor.page("GET", "/status", [])[0] == 404
    assert monitor.page("GET", "/metrics", [])[0] == 200


def test_a_failing_server_is_not_healthy_and_its_error_is_not_told() -> None:
    def broken() -> Any:
        raise OSError("/srv/secret/queue.sqlite3")

    status, _, body = ServerMonitor(broken, Path("none")).page("GET", "/health", [])
    assert (status, json.loads(body)) == (503, {"status": "failing", "error": "OSError"})


def test_the_token_is_drawn_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / TOKEN
    token = token_at(path)
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_at(path) == token
    path.chmod(0o644)
    with refuses(RecipeError, "everybody"):
        token_at(path)
    path.chmod(0o600)
    for text in ("", "short", "a b" * 20, "\n"):
        path.write_text(text)
        with refuses(RecipeError, "holds no token"):
            token_at(path)
    with refuses(RecipeError, "copy status.token"):
        read_token(tmp_path / "none")


def status(server: Server, capsys: Any, *more: str) -> str:
    files = ("--root-certificates", str(server.credentials / "ca.pem"), "--token", str(server.credentials / TOKEN))
    with pytest.raises(SystemExit) as stop:
        main(["status", f"{HOST}:{server.port}", *files, *more])
    assert stop.value.code == 0
    return str(capsys.readouterr().out)


def test_the_command_prints_the_status(server: Server, capsys: Any) -> None:
    told = status(server, capsys)
    assert "2 of 3 devices online" in told
    assert "0 of 5" in told
    assert SECRET in told
    assert json.loads(status(server, capsys, "--json"))["nodes"] == LINK["nodes"]


def test_the_token_goes_to_no_server_that_ca_pem_does_not_vouch_for(server: Server, tmp_path: Path) -> None:
    other = write_credentials(tmp_path / "other", 0)
    with refuses(PolyfedError, "CERTIFICATE_VERIFY_FAILED"):
        ask(f"{HOST}:{server.port}", other / "ca.pem", server.credentials / TOKEN)
    wrong_token = tmp_path / TOKEN
    wrong_token.write_text("0" * 64)
    with refuses(PolyfedError, "answered 401"):
        ask(f"{HOST}:{server.port}", server.credentials / "ca.pem", wrong_token)
    with refuses(PolyfedError, "gave no status"):
        ask(f"{HOST}:{free_ports(1)[0]}", server.credentials / "ca.pem", wrong_token)
    with refuses(RecipeError, "not an address"):
        ask("server", server.credentials / "ca.pem", wrong_token)
    with refuses(RecipeError, "cannot be used"):
        ask(f"{HOST}:{server.port}", tmp_path / "none.pem", wrong_token)


def test_a_status_with_control_characters_steers_no_terminal(server: Server, capsys: Any, monkeypatch: Any) -> None:
    told = ask(f"{HOST}:{server.port}", server.credentials / "ca.pem", server.credentials / TOKEN)
    told["runs"][0]["progress"]["reasons"]["1"]["reason"] = "no\x1b[2J\nforged"
    told["runs"][0]["id"] = "\x1b]0;x\x07"
    monkeypatch.setattr("polyfed.deploy.server.status_client.ask", lambda *_: told)
    shown = status(server, capsys)
    assert "\x1b" not in shown
    assert "no\\x1b[2J\\nforged" in shown


def contact(seconds_ago: float = 0.0) -> int:
    """The file in which a device marks that the server answered it."""
    file, path = tempfile.mkstemp()
    os.unlink(path)
    os.utime(file, ns=(0, time.monotonic_ns() - int(seconds_ago * 1e9)))
    return file


def test_a_device_without_contact_to_the_server_is_not_healthy() -> None:
    monitor = DeviceMonitor(free_ports(1)[0], contact(SILENCE_SECONDS + 1))
    with monitor.socket:
        assert b"503 Service Unavailable" in (told := ask_device(monitor, b"GET /health HTTP/1.1\r\n\r\n"))
        assert b"no contact with the server" in told
        os.utime(monitor.contact, (0, 0))
        assert monitor.last_contact() == 0.0
        assert b"no contact with the server" in ask_device(monitor, b"GET /health HTTP/1.1\r\n\r\n")


SERVING = """
import sys, time
from pathlib import Path
from polyfed.deploy.server.run_log import KEPT_RUNS, KILLED, RunStatus, remove_old
status = RunStatus(Path(sys.argv[1]), Path(sys.argv[1]) / "run")
status("run-started", rounds=5, first_round=1)
print("serves", flush=True)
time.sleep(600)
"""


def serving(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that writes the status of a run and goes on."""
    process = subprocess.Popen([sys.executable, "-c", SERVING, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"serves\n"
    return process


def test_a_killed_run_has_failed_at_once_though_another_goes_on_and_the_list_knows_nothing(tmp_path: Path) -> None:
    both = LINK | {"runs": ["8", "7"]}
    first, second = serving(tmp_path / "7"), serving(tmp_path / "8")
    try:
        told = server_monitor.status_of(both, tmp_path)
        assert [run["state"] for run in told["runs"]] == ["running", "running"]
        first.kill(), first.wait()
        told = server_monitor.status_of(both, tmp_path)
        assert [run["state"] for run in told["runs"]] == ["running", "failed"]
        assert told["runs"][1]["progress"]["error"] == KILLED
        metrics = server_monitor.metrics_of(told).decode()
        for line in ('failed{run="7"} 1.0', 'failed{run="8"} 0.0', 'running{run="8"} 1.0', 'rounds{run="7"} 5.0'):
            assert f"polyfed_run_{line}" in metrics
    finally:
        for process in (first, second):
            process.kill(), process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_run_that_has_failed_says_why_and_one_without_a_status_is_left_out(tmp_path: Path) -> None:
    status = RunStatus(tmp_path / "7", tmp_path)
    status("run-started", rounds=5, first_round=1)
    assert server_monitor.status_of(LINK | {"runs": ["7", "9"]}, tmp_path)["runs"][0]["state"] == "running"
    status.failed("no reply", 4)
    (told,) = server_monitor.status_of(LINK | {"runs": ["7", "9"]}, tmp_path)["runs"]
    assert (told["state"], told["progress"]["error"]) == ("failed", "no reply")


def test_the_latest_statuses_are_kept_and_those_of_runs_that_go_on(tmp_path: Path) -> None:
    going = RunStatus(tmp_path / "0", tmp_path)
    for number in range(1, KEPT_RUNS + 5):
        (tmp_path / str(number)).mkdir()
        os.utime(tmp_path / str(number), (number, number))
    os.utime(going.path.parent, (0, 0))
    remove_old(tmp_path)
    left = {int(path.name) for path in tmp_path.iterdir()}
    assert left == {0, *range(5, KEPT_RUNS + 5)}


def test_each_start_of_a_run_removes_what_old_ones_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may run for months, in which a job that nobody answers starts every half minute."""
    monkeypatch.setenv(STATUS_FOLDER, str(tmp_path))
    for number in range(KEPT_RUNS + 5):
        (tmp_path / str(number)).mkdir()
        os.utime(tmp_path / str(number), (number, number))
    listeners_of(tmp_path / "run", "new")
    assert len([*tmp_path.iterdir()]) == KEPT_RUNS + 1


def ask_device(monitor: DeviceMonitor, *parts: bytes) -> bytes:
    """Send a request in parts, and let the device answer after each."""
    with socket.create_connection(monitor.socket.getsockname(), timeout=10) as line:
        for part in parts:
            line.sendall(part)
            monitor.wait(0.05)
        line.settimeout(0.2)
        try:
            return line.recv(65536)
        except (TimeoutError, ConnectionError):
            return b""


def test_a_device_tells_counts_on_loopback_and_survives_nonsense() -> None:
    monitor = DeviceMonitor(free_ports(1)[0], contact())
    with monitor.socket:
        assert monitor.socket.getsockname()[0] == "127.0.0.1"
        monitor.done({"verdict": "reply", "bytes_up": 7})
        monitor.done({})
        told = ask_device(monitor, b"GET /metrics HTTP/1.1\r\n\r\n").decode()
        assert 'polyfed_device_tasks_total{verdict="reply"} 1.0' in told
        assert 'polyfed_device_tasks_total{verdict="crashed"} 1.0' in told
        assert "polyfed_device_bytes_up_total 7.0" in told
        assert b'"status": "ok"' in ask_device(monitor, b"GET /health HTTP/1.1\r\n\r\n")
        assert b"404" in ask_device(monitor, b"POST /health HTTP/1.1\r\n\r\n")
        for nonsense in (b"\xff\xfe\x00", b"GET", b"GET \xff HTTP/1.1\r\n\r\n", b"\r\n" * 9000):
            ask_device(monitor, nonsense)
        assert b'"status": "ok"' in ask_device(monitor, b"GET /health HTTP/1.1\r\n\r\n")


def test_a_request_that_dawdles_does_not_keep_a_device_from_its_tasks() -> None:
    monitor = DeviceMonitor(free_ports(1)[0], contact())
    with monitor.socket, socket.create_connection(monitor.socket.getsockname(), timeout=10):
        started = time.monotonic()
        monitor.wait(0.05)
        assert time.monotonic() - started < 3.0, "half a second, and what a busy machine adds"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_federation_tells_its_status_to_those_who_may_know(tmp_path: Path) -> None:
    metrics, remote, device = free_ports(3)
    with Federation(recipe_for("fedavg", tmp_path), tmp_path / "fed") as federation:
        federation.start_server("--metrics-port", str(metrics), "--status-port", str(remote), "--log-format", "json")
        for client in range(3):
            federation.start_device(client, *(["--metrics-port", str(device)] if client == 0 else []))
        federation.run().wait(PATIENCE)
        until(lambda: (federation.out / "result.json").exists(), "the result", 60)
        files = (federation.credentials / "ca.pem", federation.credentials / TOKEN)
        until(lambda: ask(f"{HOST}:{remote}", *files)["runs"][0]["state"] == "finished", "the status", 60)
        told = ask(f"{HOST}:{remote}", *files)
        assert told["nodes"] == {"registered": 3, "online": 3}
        assert (told["runs"][0]["progress"]["round"], told["runs"][0]["progress"]["enrolled"]) == (2, 3)
        assert f'polyfed_run_round{{run="{told["runs"][0]["id"]}"}} 2.0' in fetched(metrics)
        assert 'polyfed_device_tasks_total{verdict="reply"} ' in fetched(device)
        texts = federation.log("server") + federation.log("run")
        lines = [json.loads(line) for line in federation.log("server").splitlines()]
        assert {"polyfed"} == {line["source"] for line in lines}
        assert read_token(files[1]) not in texts


def fetched(port: int, page: str = "metrics") -> str:
    words = [
        sys.executable,
        "-c",
        f"import urllib.request as u; print(u.urlopen('http://{HOST}:{port}/{page}').read())",
    ]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_a_server_that_has_answered_each_of_its_pages_holds_no_pytorch(tmp_path: Path) -> None:
    """It weighs 300 MB."""
    credentials, (port, metrics, remote) = write_credentials(tmp_path / "credentials", 1), free_ports(3)
    RunStatus(credentials / RUNS / "7", tmp_path / "run")("run-started", rounds=5, first_round=1)
    ports = ["--port", str(port), "--metrics-port", str(metrics), "--status-port", str(remote)]
    words = [sys.executable, "-P", "-m", "polyfed", "server", str(credentials), "--host", HOST, *ports]
    source = {"PYTHONPATH": str(Path(server_monitor.__file__).parents[3])}
    process = subprocess.Popen(words, env=os.environ | source, stderr=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or (listens(metrics) and listens(remote)), "the ports", 60)
        assert 'polyfed_run_rounds{run="7"} 5.0' in fetched(metrics)
        assert "0 of 1 devices online" in fetched(metrics, f"?token={read_token(credentials / TOKEN)}")
        assert ask(f"{HOST}:{remote}", credentials / "ca.pem", credentials / TOKEN)["runs"][0]["id"] == "7"
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.terminate()
        process.wait(20)
