"""Polyfed's own transport, by strangers, by registered devices, and by a server that wants to harm a device."""

import hashlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from polyfed.core.errors import BadReply, RecipeError, TransportError
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.agent import Offer
from polyfed.transport import connection, hub, web
from polyfed.transport.connection import Connection
from polyfed.transport.hub import HubServer
from polyfed.transport.logins import Keys, Logins, PrivateKey, message
from polyfed.transport.queue import ANSWERED, CLOSED, LATE, OPEN, SERVER, Bell, Queue, ring
from refusals import refuses

RUN, BODY, MOST = "0123456789abcdef", bytes(range(256)) * 40, 2**16


class Federation:
    """A server in this process, and a run that asks devices for something.

    Attributes:
        folder: the credentials, with the keys of the devices 0 and 1, and of the stranger 2, who is not registered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = write_credentials(folder / "credentials", 3)
        (self.folder / "node-2.pub").rename(folder / "stranger.pub")
        self.started()
        self.queue = Queue(self.folder / "queue")
        self.bell = Bell(self.queue.bell(RUN))
        self.stop, self.devices = Event(), list[Connection]()
        self.names = [PrivateKey(self.folder / f"node-{number}.key").fingerprint for number in range(3)]

    def started(self, port: int = 0) -> None:
        self.server = HubServer(self.folder, "127.0.0.1", port)
        self.port = self.server.socket.getsockname()[1]
        self.thread = Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def ended(self) -> None:
        self.server.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def device(self, number: int) -> Connection:
        key = PrivateKey(self.folder / f"node-{number}.key")
        made = Connection(f"127.0.0.1:{self.port}", self.folder / "ca.pem", key, self.stop, lambda text: None)
        self.devices.append(made)
        return made

    def asked(self, number: int = 0, body: bytes = BODY, most: int = MOST) -> str:
        """Ask a device for something, and return the name of the request."""
        (name,) = self.queue.add(
            RUN, [(self.names[number], '{"want":"ask"}', body)], self.queue.keep(RUN, b"app"), most
        )
        return name

    def state(self, name: str) -> str | None:
        found = self.queue.find(name)
        return None if found is None else found.state

    def close(self) -> None:
        self.stop.set()
        for device in self.devices:
            device.close()
        self.ended()
        self.bell.close()
        self.queue.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


def reply_in(folder: Path, content: bytes) -> Path:
    path = folder / "reply"
    path.write_bytes(content)
    return path


def test_a_request_and_its_reply_travel_unchanged(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    told = device.next()
    assert told is not None
    offer = Offer.read(told)
    assert (offer.id, offer.header) == (name, '{"want":"ask"}')
    assert device.fetch(name, "body", *offer.body, tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == BODY
    assert device.fetch(name, "app", *offer.app, tmp_path / "app")
    assert (tmp_path / "app").read_bytes() == b"app"
    assert federation.queue.online() == [federation.names[0]]
    assert device.send(name, reply_in(tmp_path, BODY))
    assert federation.queue.reply(name).read_bytes() == BODY
    assert federation.state(name) == ANSWERED
    assert federation.bell.wait(5), "the run is woken"
    assert device.send(name, reply_in(tmp_path, BODY)), "if the answer to the last piece was lost"


def test_a_request_that_comes_during_the_wait_is_told_at_once(federation: Federation) -> None:
    device, found = federation.device(0), list[Any]()
    thread = Thread(target=lambda: found.append(device.next()))
    thread.start()
    while not federation.queue.online():
        time.sleep(0.02)
    time.sleep(0.1)
    begun = time.monotonic()
    name = federation.asked()
    thread.join(20)
    assert found[0]["id"] == name
    assert time.monotonic() - begun < hub.LOOK_SECONDS, "by the bell, and not by the look after lost bells"


def test_a_stranger_does_not_get_in(federation: Federation) -> None:
    with refuses(TransportError, "key of this"):
        federation.device(2).next()
    assert federation.queue.online() == []


def test_a_key_is_registered_and_revoked_without_a_restart(federation: Federation, tmp_path: Path) -> None:
    stranger = federation.device(2)
    (tmp_path / "stranger.pub").rename(federation.folder / "node-2.pub")
    federation.asked(2)
    while federation.names[2] not in federation.server.hub.logins.keys.known:
        time.sleep(0.05)
    assert stranger.next() is not None
    (federation.folder / "node-2.pub").unlink()
    while federation.names[2] in federation.server.hub.logins.keys.known:
        time.sleep(0.05)
    with refuses(TransportError, "key of this"):
        stranger.next()


@pytest.mark.parametrize("how", ["used", "forged", "old", "for another server", "by another device", "empty"])
def test_a_login_needs_a_fresh_signature_for_this_server(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    write_credentials(tmp_path, 2)
    keys = Keys(tmp_path)
    keys.look()
    logins, key, seen = Logins(keys), PrivateKey(tmp_path / "node-0.key"), b"certificate"
    challenge = Logins(keys).challenge() if how == "forged" else logins.challenge()
    other = PrivateKey(tmp_path / "node-1.key")
    signature = (other if how == "by another device" else key).sign(message(challenge, seen))
    if how == "old":
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    if how == "used":
        assert logins.device_of(logins.enter(key.fingerprint, challenge, signature, [seen])) == key.fingerprint
    certificate = b"another" if how == "for another server" else seen
    challenge, signature = ("", "") if how == "empty" else (challenge, signature)
    assert logins.enter(key.fingerprint, challenge, signature, [certificate]) == ""
    assert logins.device_of("") == ""


def test_two_processes_with_one_key_do_not_take_turns(federation: Federation) -> None:
    first, second = federation.device(0), federation.device(0)
    for device in (first, second):
        federation.asked()
        assert device.next() is not None
    with refuses(TransportError, "another process"):
        first.next()
    assert second.next() is not None


def plain(federation: Federation) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.pem"))
    made = socket.create_connection(("127.0.0.1", federation.port), timeout=20)
    return context.wrap_socket(made, server_hostname="127.0.0.1")


CALLS = [
    "GET /v1/next",
    f"PUT /v1/replies/{RUN}.{RUN}?offset=0&size=9",
    "GET /v1/requests/x/body",
    "GET /",
    "POST /v1/next",
]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_read_of_a_call_by_a_stranger(call: str, federation: Federation) -> None:
    with plain(federation) as stranger:
        stranger.sendall(f"{call} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n".encode())
        assert stranger.recv(2**12).startswith(b"HTTP/1.1 401 ")
        stranger.settimeout(5)
        while stranger.recv(2**12):
            pass  # the connection ends although no byte of the body came


def test_of_a_login_little_is_read(federation: Federation) -> None:
    with plain(federation) as stranger:
        stranger.sendall(b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert b" 413 " in stranger.recv(2**12)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"[" * 4000, b'{"device":1,"challenge":"","signature":""}', b"\xff"]
)
def test_a_login_that_is_none_is_refused(text: bytes, federation: Federation) -> None:
    with plain(federation) as stranger:
        head = f"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
        stranger.sendall(head.encode() + text)
        assert b" 400 " in stranger.recv(2**12)


def test_a_caller_whose_headers_never_end_is_cut_off(federation: Federation, monkeypatch: Any) -> None:
    monkeypatch.setattr(web, "HEAD_SECONDS", 0.3)
    with plain(federation) as stranger:
        stranger.sendall(b"GET /v1/next HTTP/1.1\r\nx: ")
        stranger.settimeout(10)
        with pytest.raises((ConnectionError, ssl.SSLError, AssertionError)):
            assert stranger.recv(1), "the end of the connection"


def test_headers_are_bounded(federation: Federation) -> None:
    with plain(federation) as stranger:
        stranger.sendall(b"GET /v1/next HTTP/1.1\r\nx: " + b"x" * (web.LARGEST_HEAD + 2**15))
        assert b"400" in stranger.recv(2**12)


OTHERS = {
    "of another device": lambda one: one.asked(1),
    "of no device": lambda one: f"{RUN}.{'0' * 16}",
    "outside of the folder": lambda one: "..%2f..%2fserver.key",
    "outside, spelled out": lambda one: "../../server.key",
    "of a file": lambda one: f"{RUN}.{hashlib.sha256(b'app').hexdigest()}",
}


@pytest.mark.parametrize("whose", OTHERS)
def test_a_device_reaches_only_its_own_requests(whose: str, federation: Federation, tmp_path: Path) -> None:
    device = federation.device(0)
    federation.asked(0)
    assert device.next() is not None
    name = OTHERS[whose](federation)  # type: ignore[no-untyped-call]
    before = sorted(path for path in federation.folder.rglob("*") if path.is_file() and "sqlite" not in path.name)
    calls = [("GET", f"/v1/requests/{name}{part}") for part in ("", "/body", "/app", "/run")]
    for method, path in (*calls, ("PUT", f"/v1/replies/{name}?offset=0&size=1")):
        assert device._once(method, path, body=b"x" if method == "PUT" else None)[0] in (404, 410)
    after = sorted(path for path in federation.folder.rglob("*") if path.is_file() and "sqlite" not in path.name)
    assert before == after, "no file was made or removed"


def test_a_reply_is_bounded_before_a_byte_of_it_is_kept(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked(most=1000)
    device.next()
    assert not device.send(name, reply_in(tmp_path, bytes(1001)))
    assert not federation.queue.reply(name, "part").exists()
    words = f"/v1/replies/{name}?offset=0&size=10&sha256=x"
    assert device._call("PUT", words, body=bytes(1001))[0] == 413, "more than it says"
    assert federation.queue.reply(name, "part").stat().st_size <= 10
    for offset, size in (("-1", "10"), ("x", "10"), ("0", "1" * 30), ("", "")):
        with refuses(OSError, "stopped"):
            refusing(device, f"/v1/replies/{name}?offset={offset}&size={size}")
    assert federation.state(name) == OPEN


def refusing(device: Connection, words: str) -> None:
    """A call that the server answers with 400, which a device would repeat for ever."""
    status, _ = device._once("PUT", words, body=b"x")
    device.close()
    assert status == 400
    raise OSError("stopped")


def test_a_reply_with_another_digest_is_not_taken(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    federation.queue.reply(name, "part").write_bytes(b"what another process of the device had sent")
    assert device.send(name, reply_in(tmp_path, BODY)), "after the second attempt, from the beginning"
    assert federation.queue.reply(name).read_bytes() == BODY
    name = federation.asked()
    words = f"/v1/replies/{name}?offset=0&size=4&sha256={'0' * 64}"
    assert device._call("PUT", words, body=b"evil")[0] == 422
    assert federation.state(name) == OPEN


def test_a_late_reply_is_dropped_and_counted(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    federation.queue.shut(RUN, [name])
    assert federation.state(name) == CLOSED
    assert not device.is_open(name)
    assert not device.fetch(name, "body", hashlib.sha256(BODY).hexdigest(), len(BODY), tmp_path / "body")
    assert not device.send(name, reply_in(tmp_path, BODY))
    assert federation.state(name) == LATE
    assert not list(federation.queue.folder.glob(f"{name}.*"))


def test_a_request_of_a_run_that_has_ended_is_withdrawn(federation: Federation) -> None:
    device, name = federation.device(0), federation.asked()
    assert device.next() is not None
    federation.bell.close()
    federation.queue.tidy()
    assert not device.is_open(name)
    assert [path.name for path in federation.queue.folder.iterdir() if path.name.startswith(RUN)] == []


def test_a_server_that_ends_forgets_nothing(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    told = device.next()
    half = reply_in(tmp_path, BODY)
    words = f"/v1/replies/{name}?offset=0&size={len(BODY)}&sha256={hashlib.sha256(BODY).hexdigest()}"
    assert device._call("PUT", words, body=BODY[:5000]) == (200, {"received": 5000})
    federation.ended()
    assert federation.queue.online() is None
    federation.started(federation.port)
    assert device.next() == told, "after it has logged in again"
    assert device.send(name, half)
    assert federation.queue.reply(name).read_bytes() == BODY


def test_a_fetch_goes_on_where_it_broke_off(federation: Federation, tmp_path: Path, monkeypatch: Any) -> None:
    device, name, ranges = federation.device(0), federation.asked(), list[Any]()
    device.next()
    (tmp_path / "body").write_bytes(BODY[:7000])
    send = connection.http.client.HTTPSConnection.request

    def seen(self: Any, *words: Any, headers: Any, **more: Any) -> Any:
        ranges.append(headers.get("range"))
        return send(self, *words, headers=headers, **more)

    monkeypatch.setattr(connection.http.client.HTTPSConnection, "request", seen)
    assert device.fetch(name, "body", hashlib.sha256(BODY).hexdigest(), len(BODY), tmp_path / "body")
    assert (ranges, (tmp_path / "body").read_bytes()) == (["bytes=7000-"], BODY)


def test_the_status_names_the_devices_that_are_away(federation: Federation) -> None:
    federation.asked()
    federation.device(0).next()
    assert federation.server.hub.facts() == {"nodes": {"registered": 2, "online": 1}, "away": [federation.names[1]]}


def test_a_device_that_is_gone_is_noticed(federation: Federation, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub, "AWAY_SECONDS", 0.1)
    federation.asked()
    federation.device(0).next()
    assert federation.queue.online() == [federation.names[0]]
    end = time.monotonic() + 20
    while federation.queue.online() and time.monotonic() < end:
        time.sleep(0.05)
    assert federation.queue.online() == []


def test_small_answers_do_not_wait_for_acknowledgements(federation: Federation, monkeypatch: Any) -> None:
    """asyncio sets the option only for sockets that name their protocol, and uvicorn's do not."""
    made, options = web.BoundedHead.connection_made, list[int]()

    def seen(self: Any, transport: Any) -> None:
        made(self, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(web.BoundedHead, "connection_made", seen)
    federation.device(0)._once("GET", "/v1/challenge")
    assert options == [1]


def test_one_folder_has_one_server(federation: Federation) -> None:
    with refuses(RecipeError, "another server uses"):
        HubServer(federation.folder, "127.0.0.1", 0)
    assert ring(federation.queue.bell(SERVER))


def test_only_this_user_reads_the_queue(federation: Federation) -> None:
    federation.asked()
    assert federation.queue.folder.stat().st_mode & 0o077 == 0


class Hostile:
    """A server whose certificate a device trusts, and which answers as it likes."""

    def __init__(self, folder: Path, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.folder, self.heard = write_credentials(folder / "hostile", 1), list[str]()
        hostile = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hostile.heard.append(self.path)
                answer(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *_: Any) -> None:
                """Stay silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.stop = Event()
        key = PrivateKey(self.folder / "node-0.key")
        address = f"127.0.0.1:{self.server.server_address[1]}"
        self.device = Connection(address, self.folder / "ca.pem", key, self.stop, lambda text: None)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Callable[[Callable[[Any], None]], Hostile]]:
    made: list[Hostile] = []

    def begin(answer: Callable[[Any], None]) -> Hostile:
        made.append(Hostile(tmp_path, answer))
        return made[-1]

    yield begin
    for one in made:
        one.stop.set()
        one.device.close()
        one.server.shutdown()
        one.server.server_close()


def said(handler: Any, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_device_follows_no_redirect(status: int, hostile: Any) -> None:
    server = hostile(lambda handler: said(handler, status, b"", location="https://127.0.0.1:1/of-the-hospital"))
    assert server.device._once("GET", "/v1/next")[0] == status
    assert server.heard == ["/v1/next"]


def test_a_device_does_not_spin_on_answers_that_it_does_not_know(hostile: Any) -> None:
    server = hostile(lambda handler: said(handler, 302, b""))

    def waits() -> None:
        with pytest.raises(InterruptedError):
            server.device.next()

    thread = Thread(target=waits)
    thread.start()
    time.sleep(1.2)
    server.stop.set()
    thread.join(10)
    assert 1 <= len(server.heard) <= 5


def test_a_device_reads_an_answer_only_up_to_a_limit(hostile: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "LARGEST_ANSWER", 2**16)
    server = hostile(lambda handler: said(handler, 200, bytes(2**20)))
    with refuses(OSError, "65536 bytes"):
        server.device._once("GET", "/v1/next", most=2**16)
    server.device.close()
    with refuses(OSError, "more bytes than"):
        server.device._once("GET", "/v1/requests/x/body", to=tmp_path / "body", most=1000)
    assert (tmp_path / "body").stat().st_size <= 1000


def test_a_body_with_another_digest_is_not_used(hostile: Any, tmp_path: Path) -> None:
    server = hostile(lambda handler: said(handler, 200, b"evil"))
    with refuses(BadReply, "another digest"):
        server.device.fetch("x", "body", hashlib.sha256(b"good").hexdigest(), 4, tmp_path / "body")
    assert not (tmp_path / "body").exists()


GOOD = {"id": f"{RUN}.{RUN}", "header": "{}", "body": {"sha256": "", "size": 0}, "app": {"sha256": "0" * 64, "size": 1}}
BAD: dict[str, Any] = {
    "a path": {"id": "../../../etc"},
    "no text": {"id": 7},
    "an app that is a path": {"app": {"sha256": "../policy.toml", "size": 1}},
    "a body that is a path": {"body": {"sha256": "../policy.toml", "size": 1}},
    "a size below zero": {"body": {"sha256": "0" * 64, "size": -1}},
    "a header that is a table": {"header": {}},
    "a long header": {"header": "x" * (2**22 + 1)},
}


def test_a_device_checks_what_a_server_says_before_it_names_a_file() -> None:
    assert Offer.read(GOOD).id == GOOD["id"]
    for change in BAD.values():
        with pytest.raises(BadReply):
            Offer.read(json.loads(json.dumps(GOOD | change)))
    with pytest.raises(BadReply):
        Offer.read({})


def test_a_device_sends_nothing_to_a_server_of_another_authority(federation: Federation, hostile: Any) -> None:
    server = hostile(lambda handler: said(handler, 200, b"{}"))
    key = PrivateKey(federation.folder / "node-0.key")
    address = f"127.0.0.1:{server.server.server_address[1]}"
    device = Connection(address, federation.folder / "ca.pem", key, Event(), lambda text: None)
    with refuses(TransportError, "does not fit"):
        device.next()
    assert server.heard == []
