"""Where a device sends its requests, and what it reads of the answers: a hostile server, and a proxy that listens."""

import gzip
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.protobuf import client as protobuf_client
from flwr.supernode.fleet_http_client import FleetHttpClient
from httpx._decoders import GZipDecoder

from polyfed.deploy.processes import loopback_without_proxy
from polyfed.engines.flower.device import supernode_process, worker
from polyfed.engines.flower.device.careful_http import LARGEST_ANSWER, careful_calls
from refusals import refuses


class Listener:
    """An HTTP server on loopback that notes each request.

    Attributes:
        port: its port.
        heard: the path and the body of each request.
    """

    def __init__(self, answer: Callable[["Listener", BaseHTTPRequestHandler], None]) -> None:
        self.heard: list[tuple[str, bytes]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                listener.heard.append((self.path, self.rfile.read(length)))
                answer(listener, self)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Stay silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]


@contextmanager
def listening(answer: Callable[[Listener, BaseHTTPRequestHandler], None]) -> Iterator[Listener]:
    listener = Listener(answer)
    Thread(target=listener.server.serve_forever, daemon=True).start()
    try:
        yield listener
    finally:
        listener.server.shutdown()
        listener.server.server_close()


def nothing(listener: Listener, request: BaseHTTPRequestHandler) -> None:
    """An empty answer, which is a valid message of Flower."""
    request.send_response(200)
    request.send_header("content-length", "0")
    request.end_headers()


def called(port: int) -> Any:
    """What a SuperNode gets if it sends a heartbeat to a server."""
    with careful_calls(), FleetHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, []) as client:
        return client.SendNodeHeartbeat(SendNodeHeartbeatRequest(heartbeat_interval=7.0))


def test_the_calls_of_a_supernode_still_arrive() -> None:
    with listening(nothing) as server:
        called(server.port)
    ((path, body),) = server.heard
    assert path == "/v1/fleet/send-node-heartbeat"
    assert SendNodeHeartbeatRequest.FromString(body).heartbeat_interval == 7.0
    assert protobuf_client.httpx is httpx, "only the client that was made inside is another one"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_server_cannot_send_a_device_to_another_machine(status: int) -> None:
    """With 307, Flower's client would send the body of the request to the other machine, too, and without TLS."""
    with listening(nothing) as inside:

        def elsewhere(listener: Listener, request: BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            request.send_header("location", f"http://127.0.0.1:{inside.port}/of-the-hospital")
            request.send_header("content-length", "0")
            request.end_headers()

        with listening(elsewhere) as server, refuses(httpx.HTTPStatusError, str(status)):
            called(server.port)
        assert len(server.heard) == 1
        assert inside.heard == []


REFUSED = (ValueError, httpx.TransportError)
"""What a device raises when it stops reading, or when the connection ends before: a reset, the end, a time-out."""


@pytest.mark.usefixtures("loopback")
def test_a_device_reads_an_answer_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    ended = Event()
    pieces = httpx.Response.iter_raw

    def counted(answer: httpx.Response) -> Iterator[bytes]:
        for piece in pieces(answer):
            came.append(len(piece))
            yield piece

    def endless(listener: Listener, request: BaseHTTPRequestHandler) -> None:
        """An answer that ends only when the other side has closed the connection."""
        request.connection.settimeout(10)
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(bytes(2**16))
        except OSError:
            ended.set()

    monkeypatch.setattr(httpx.Response, "iter_raw", counted)
    with listening(endless) as server, pytest.raises(REFUSED) as refused:
        called(server.port)
    assert ended.wait(20), "the device has closed the connection"
    assert sum(came) <= LARGEST_ANSWER + 2**16, "the last piece that httpx reads"
    if isinstance(refused.value, ValueError):
        assert f"an answer of more than {LARGEST_ANSWER} bytes" in str(refused.value)


@pytest.mark.usefixtures("loopback")
def test_a_device_does_not_unpack_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kB of gzip would become 64 MiB."""
    packed = gzip.compress(bytes(2**26))
    unpacked: list[int] = []
    decode = GZipDecoder.decode
    monkeypatch.setattr(GZipDecoder, "decode", lambda self, data: (unpacked.append(len(data)), decode(self, data))[1])

    def bomb(listener: Listener, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-encoding", "gzip")
        request.send_header("content-length", str(len(packed)))
        request.end_headers()
        request.wfile.write(packed)

    with listening(bomb) as server, pytest.raises(REFUSED) as refused:
        called(server.port)
    assert unpacked == []
    if isinstance(refused.value, ValueError):
        assert "Invalid protobuf response" in str(refused.value)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_the_tasks_of_a_device_do_not_pass_through_a_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection between a SuperNode and the process of its tasks has no TLS.

    If this process used the proxy of the environment, the proxy would get the secret and the replies. It could also
    give the process a task with a recipe of its own.
    """
    for other in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    with listening(nothing) as proxy, listening(nothing) as supernode:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        interceptor = worker.RuntimeTokenHttpInterceptor("token")
        client = worker._client(f"127.0.0.1:{supernode.port}", interceptor, None)
        client.AcquireTask(AcquireTaskRequest())
    assert proxy.heard == []
    assert len(supernode.heard) == 1


def test_the_processes_of_a_server_reach_each_other_although_there_is_a_proxy() -> None:
    assert loopback_without_proxy({})["no_proxy"] == "127.0.0.1,localhost"
    kept = loopback_without_proxy({"NO_PROXY": "example.org, 127.0.0.1"})
    assert kept == dict.fromkeys(("no_proxy", "NO_PROXY"), "example.org,127.0.0.1,localhost")
    both = loopback_without_proxy({"NO_PROXY": "a", "no_proxy": "b"})
    assert both["NO_PROXY"] == "b,127.0.0.1,localhost", "as Python reads them"


WITHOUT_WORKER = textwrap.dedent(
    """
    import runpy, sys, time
    import flwr.supernode.cli as cli
    cli.flower_supernode = lambda: time.sleep(60)
    runpy.run_path(sys.argv[1], run_name="__main__")
    """
)


def test_a_supernode_ends_when_the_process_of_its_tasks_has_ended() -> None:
    """Otherwise the SuperNode would stay online, and each run would wait for a device that never answers."""
    script = "import os, sys; child = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '2'); "
    script += f"os.environ['{supernode_process.WORKER}'] = str(child); "
    script += "os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    words = [sys.executable, "-c", script, WITHOUT_WORKER, supernode_process.__file__]
    environment = os.environ | {"POLYFED_MESSAGE_MEGABYTES": "1"}
    started = time.monotonic()
    done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
    assert time.monotonic() - started < 50, "it does not wait for the end of the SuperNode"
    assert done.returncode in (1, -signal.SIGTERM), "not 0, so that a service manager starts it again"
    assert b"the process that runs the tasks of this device has ended" in done.stderr + done.stdout


def test_a_supernode_whose_connection_has_ended_with_an_error_ends_although_its_web_server_runs() -> None:
    """Flower's function returns then, and its thread for tasks would keep the process alive for ever."""
    script = textwrap.dedent(
        """
        import runpy, sys, threading, time
        import flwr.supernode.cli as cli
        from flwr.supercore.exit.exit_handler import add_exit_handler
        stop = threading.Event()

        def ended():
            threading.Thread(target=stop.wait).start()
            add_exit_handler(stop.set)

        cli.flower_supernode = ended
        runpy.run_path(sys.argv[1], run_name="__main__")
        """
    )
    environment = os.environ | {"POLYFED_MESSAGE_MEGABYTES": "1"}
    words = [sys.executable, "-c", script, supernode_process.__file__]
    done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == supernode_process.CONNECTION_FAILED
    assert b"the connection to the server has ended" in done.stderr + done.stdout
