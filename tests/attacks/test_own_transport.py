"""Polyfed's own transport, by strangers, by registered devices, and by a server that wants to harm a device."""

import asyncio
import gzip
import hashlib
import http.client
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.own_devices import own_devices
from engines.test_own_modes import method as recipe_of
from polyfed.core.errors import BadReply, RecipeError, TransportError
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.agent import Offer
from polyfed.deploy.device.device_file import AGENT, device_file
from polyfed.deploy.processes import ServerPorts, free_ports
from polyfed.deploy.server import hosting
from polyfed.deploy.server.monitor import TOKEN
from polyfed.deploy.server.run_log import RunStatus
from polyfed.deploy.server.status_client import ask
from polyfed.federation.wire.wire_format import unframed
from polyfed.transport import connection, hub, logins, web
from polyfed.transport.connection import Connection
from polyfed.transport.hub import HubServer
from polyfed.transport.logins import MOST_LOGINS, Keys, Logins, PrivateKey, message
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
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN
    assert federation.queue.reply(name).read_bytes() == BODY
    assert federation.state(name) == ANSWERED
    assert federation.bell.wait(5), "the run is woken"
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN, "if the answer to the last piece was lost"


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
    entered, key, seen = Logins(keys), PrivateKey(tmp_path / "node-0.key"), b"certificate"
    challenge = Logins(keys).challenge() if how == "forged" else entered.challenge()
    other = PrivateKey(tmp_path / "node-1.key")
    signature = (other if how == "by another device" else key).sign(message(challenge, seen))
    if how == "old":
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    if how == "used":
        assert entered.device_of(entered.enter(key.fingerprint, challenge, signature, [seen])) == key.fingerprint
    certificate = b"another" if how == "for another server" else seen
    challenge, signature = ("", "") if how == "empty" else (challenge, signature)
    assert entered.enter(key.fingerprint, challenge, signature, [certificate]) == ""
    assert entered.device_of("") == ""


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


def silent(federation: Federation, count: int) -> list[socket.socket]:
    """Connections on which a stranger says nothing, not even the first word of TLS."""
    return [socket.create_connection(("127.0.0.1", federation.port), timeout=20) for _ in range(count)]


def test_connections_of_strangers_keep_no_device_out_and_do_not_pile_up(
    federation: Federation, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(web, "MOST_STRANGERS", 8)
    device, name = federation.device(0), federation.asked()
    assert device.next() is not None
    way, held = device._way, silent(federation, 60)
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN
    assert device._way is way, "the connection of a device that has logged in is none of a stranger"
    federation.asked(1)
    assert federation.device(1).next() is not None, "and one that has not gets in"
    assert len(federation.server.socket._open) <= 8 + 2
    for one in held[:50]:
        assert not one.recv(1), "the oldest end"
    for one in held:
        one.close()


def test_a_device_holds_few_connections_and_its_newest_works(federation: Federation) -> None:
    first, name, ways = federation.device(0), federation.asked(), list[Any]()
    for _ in range(web.MOST_OF_ONE + 3):
        assert first.is_open(name)
        ways.append(first._way)
        first._way = None
    assert len(federation.server.socket._of[federation.names[0]]) == web.MOST_OF_ONE
    for way in ways:
        way.close()


def test_a_connection_that_breaks_without_a_word_is_noticed(federation: Federation) -> None:
    """By the kernel, which asks the other side and limits how long it may acknowledge nothing."""
    federation.asked()
    federation.device(0).next()
    (made,) = federation.server.socket._open.values()
    assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == web.SILENT_SECONDS * 1000
    asked = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * made.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPCNT
    )
    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + asked <= web.SILENT_SECONDS


def test_no_older_version_of_tls_is_spoken(federation: Federation, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.pem"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", federation.port), timeout=20) as line, pytest.raises(ssl.SSLError):
        context.wrap_socket(line, server_hostname="127.0.0.1")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.load_cert_chain(federation.folder / "server.pem", federation.folder / "server.key")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers() -> None:
            line, _ = listening.accept()
            with line, suppress(OSError):
                old.wrap_socket(line, server_side=True)

        Thread(target=answers, daemon=True).start()
        key = PrivateKey(federation.folder / "node-0.key")
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ssl.SSLError):
            Connection(address, federation.folder / "ca.pem", key, Event(), print)._once("GET", "/v1/challenge")


ODD = {
    "two lengths": b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
    "a signed length": b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: +4\r\n\r\nabcd",
    "a space before the colon": b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length : 4\r\n\r\nabcd",
    "an unknown coding": b"POST /v1/login HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": b"POST /v1/login HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "no host": b"GET /v1/challenge HTTP/1.1\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP": b"\x00\xff\x16\x03\r\n\r\n",
}


@pytest.mark.parametrize("how", ODD)
def test_a_call_that_two_servers_could_read_differently_is_refused_and_ends(
    how: str, federation: Federation, capfd: Any
) -> None:
    with plain(federation) as stranger:
        stranger.sendall(ODD[how])
        assert stranger.recv(2**12).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
        stranger.settimeout(5)
        while stranger.recv(2**12):
            pass
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "registered" not in line and "waiting for" not in line] == [], "nor fills a log"


def test_a_length_beside_chunks_smuggles_no_second_call(federation: Federation) -> None:
    """The chunks count, as RFC 9112 demands; what follows is a call of its own, which needs its own token."""
    smuggled = b"GET /v1/next HTTP/1.1\r\nhost: x\r\n\r\n"
    with plain(federation) as stranger:
        head = b"POST /v1/login HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 44\r\n\r\n"
        stranger.sendall(head + b"0\r\n\r\n" + smuggled)
        stranger.settimeout(5)
        heard = b""
        while piece := stranger.recv(2**12):
            heard += piece
    assert heard.startswith(b"HTTP/1.1 400 ")
    assert heard.count(b"HTTP/1.1") == 1, "the connection ends with the first call"


def test_a_body_that_nobody_awaits_does_not_hold_a_connection(federation: Federation, monkeypatch: Any) -> None:
    monkeypatch.setattr(web, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(hub, "LOGIN_SECONDS", 0.3)
    for call in ("GET /v1/challenge", "POST /v1/login"):
        with plain(federation) as stranger:
            stranger.sendall(f"{call} HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n".encode())
            stranger.settimeout(10)
            heard = b""
            with suppress(ConnectionError, ssl.SSLError):
                while piece := stranger.recv(2**12):
                    heard += piece
                    stranger.sendall(b"x")
            assert heard.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ")), "an answer, and then the end"


def test_a_header_does_not_say_who_calls(federation: Federation) -> None:
    """Else a stranger could pass for the connection of a device, whose connections are not ended."""
    seen = list[Any]()
    federation.server.hub.admit = lambda peer, device: seen.append(peer)
    device = federation.device(0)
    device._login()
    way = device._connected(20)
    here, headers = way.sock.getsockname(), {"authorization": f"Bearer {device._token}", "x-forwarded-for": "192.0.2.1"}
    way.request("GET", "/v1/requests/none", headers=headers)
    assert way.getresponse().status == 410
    assert seen == [here]


def test_it_takes_as_long_to_refuse_a_key_that_is_not_known(tmp_path: Path, monkeypatch: Any) -> None:
    """Both signatures are checked, so that the time does not tell which keys are registered."""
    write_credentials(tmp_path, 1)
    keys, checked = Keys(tmp_path), list[int]()
    keys.look()

    class Seen:
        def verify(self, *_: Any) -> None:
            checked.append(1)

    monkeypatch.setattr(logins, "_NOBODY", Seen())
    assert not keys.signed("SHA256:unknown", b"text", "AAAA")
    assert checked == [1]


def test_a_device_that_logs_in_again_and_again_must_wait(federation: Federation) -> None:
    device = federation.device(0)
    for _ in range(MOST_LOGINS):
        device._login()
    token = device._token
    device._login()
    assert device._token == ""
    device._token = token
    assert device._once("GET", "/v1/requests/none")[0] == 410, "the token that it has is good"
    assert len(federation.server.hub.logins._used) == MOST_LOGINS


def test_a_device_that_calls_without_end_waits_its_turn(federation: Federation, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub, "CALLS", 5.0)
    monkeypatch.setattr(hub, "CALLS_PER_SECOND", 10.0)
    made, turn = federation.server.hub, federation.server.hub._turn

    def seconds(device: str, calls: int) -> float:
        begun = time.monotonic()

        async def several() -> None:
            for _ in range(calls):
                await turn(device)

        asyncio.run(several())
        return time.monotonic() - begun

    assert seconds("one", 10) > 0.4
    assert seconds("another", 5) < 0.4
    assert set(made._quota) == {"one", "another"}
    monkeypatch.setattr(made, "_turn", lambda device: asyncio.sleep(0, made._quota.pop(device, None)))
    made._quota[federation.names[0]] = 0.0, 0.0
    federation.device(0)._call("GET", "/v1/requests/none")
    assert federation.names[0] not in made._quota, "every call of a device takes its turn"


def test_a_call_asks_for_one_range(federation: Federation) -> None:
    """Thousands of ranges cost much work."""
    device, name = federation.device(0), federation.asked()
    device.next()
    way = device._connected(20)
    headers = {"authorization": f"Bearer {device._token}", "range": "bytes=" + ",".join(["0-0"] * 5000)}
    way.request("GET", f"/v1/requests/{name}/body", headers=headers)
    assert way.getresponse().status == 400


def test_a_revoked_device_gets_no_request_and_its_reply_does_not_count(
    federation: Federation, tmp_path: Path, monkeypatch: Any
) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    keys, digest_of = federation.server.hub.logins.keys, hub._digest_of

    def revoked(path: Path) -> str:
        keys.known.pop(federation.names[0])
        return digest_of(path)

    monkeypatch.setattr(hub, "_digest_of", revoked)
    with refuses(TransportError, "key of this"):
        device.send(name, reply_in(tmp_path, BODY))
    assert federation.state(name) == OPEN
    other, found, looked = federation.device(1), list[Any](), list[str]()
    queue = federation.server.hub.queue
    next_for = queue.next_for

    def looking(device: str) -> Any:
        request = next_for(device)
        looked.append(device)
        return request

    monkeypatch.setattr(queue, "next_for", looking)

    def waits() -> None:
        with suppress(TransportError):
            found.append(other.next())

    thread = Thread(target=waits)
    thread.start()
    while federation.names[1] not in looked:  # it waits
        time.sleep(0.01)
    keys.known.pop(federation.names[1])
    federation.asked(1)
    thread.join(20)
    assert found == [], "not even one that came while it waited"


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
    assert device.send(name, reply_in(tmp_path, bytes(1001))) == connection.TOO_LARGE
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
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN, (
        "after the second attempt, from the beginning"
    )
    assert federation.queue.reply(name).read_bytes() == BODY
    name = federation.asked()
    words = f"/v1/replies/{name}?offset=0&size=4&sha256={'0' * 64}"
    assert device._call("PUT", words, body=b"evil")[0] == 422
    assert federation.state(name) == OPEN


def test_a_device_cannot_rewrite_its_answer(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN
    assert device.send(name, reply_in(tmp_path, b"another")) == connection.TAKEN, "as if it had come"
    assert federation.queue.reply(name).read_bytes() == BODY
    federation.queue.forget([name])
    assert device.send(name, reply_in(tmp_path, b"another")) == connection.CLOSED
    assert not list(federation.queue.folder.glob(f"{name}.*"))


def test_replies_that_are_never_finished_do_not_fill_the_disk(federation: Federation, monkeypatch: Any) -> None:
    device, monkey = federation.device(0), hub.Hub._take
    for _ in range(3):
        name = federation.asked()
        device.next()
        device._once("PUT", f"/v1/replies/{name}?offset=0&size={MOST}", body=BODY)
        assert federation.queue.reply(name, "part").exists()
        federation.queue.shut(RUN, [name])
    assert not [path for path in federation.queue.folder.iterdir() if path.suffix in (".part", ".whole", ".reply")]

    async def closed_meanwhile(*given: Any) -> int:
        federation.queue.shut(RUN, [name])
        return await monkey(*given)

    monkeypatch.setattr(hub.Hub, "_take", closed_meanwhile)
    for size in (len(BODY), MOST):  # whole, and begun
        name = federation.asked()
        device.next()
        words = f"/v1/replies/{name}?offset=0&size={size}&sha256={hashlib.sha256(BODY).hexdigest()}"
        device._once("PUT", words, body=BODY)
    assert not [path for path in federation.queue.folder.iterdir() if path.suffix in (".part", ".whole", ".reply")]


def held() -> list[str]:
    """The deleted replies that this process, which is the server's too, has open."""
    found = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.endswith(".part (deleted)")]


def test_a_reply_that_drips_on_after_its_request_was_closed_holds_no_disk(federation: Federation) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    line, part = plain(federation), federation.queue.reply(name, "part")
    head = f"PUT /v1/replies/{name}?offset=0&size={MOST} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {device._token}"
    line.sendall(f"{head}\r\ncontent-length: {MOST}\r\n\r\n".encode() + BODY)
    end = time.monotonic() + 10
    while not (part.exists() and part.stat().st_size) and time.monotonic() < end:
        time.sleep(0.02)
    federation.queue.shut(RUN, [name])
    assert held(), "the call goes on"
    line.sendall(b"x")
    while held() and time.monotonic() < end:
        time.sleep(0.02)
    assert not held()
    line.close()
    assert federation.state(name) == LATE


def test_a_reply_whose_run_ends_while_it_is_taken_is_late(federation: Federation, monkeypatch: Any) -> None:
    """It is no fault of the server, after which the device would send it again."""
    device, name, taken = federation.device(0), federation.asked(), hub.Hub._take
    device.next()

    async def the_run_ends(*given: Any) -> int:
        received = await taken(*given)
        federation.bell.close()
        federation.queue.tidy()
        return received

    monkeypatch.setattr(hub.Hub, "_take", the_run_ends)
    words = f"/v1/replies/{name}?offset=0&size={len(BODY)}&sha256={hashlib.sha256(BODY).hexdigest()}"
    assert device._once("PUT", words, body=BODY)[0] == 410
    assert not list(federation.queue.folder.glob(f"{name}.*"))
    assert not federation.queue.carried([name])


def test_a_server_that_is_away_is_no_call_that_is_cut_however_long_the_way_to_it(
    federation: Federation, monkeypatch: Any
) -> None:
    """If packets get lost, a second passes until a connection is refused."""
    device, notes = federation.device(0), list[str]()
    device.note = notes.append
    monkeypatch.setattr(connection, "CUT_SECONDS", -1.0)
    monkeypatch.setattr(federation.stop, "wait", lambda seconds: federation.stop.set() if notes else None)
    federation.ended()
    with suppress(InterruptedError):
        device.next()
    assert "no contact" in notes[0]
    federation.started()


def test_a_line_that_broke_does_not_keep_the_device_from_sending_its_reply(
    federation: Federation, tmp_path: Path
) -> None:
    """The server still waits for the rest of a piece whose sender has lost power, and the device begins anew."""
    device, name = federation.device(0), federation.asked()
    device.next()
    way, words = device._connected(20), f"/v1/replies/{name}?offset=0&size={len(BODY)}&sha256=x"
    way.putrequest("PUT", words)
    for header, value in {"authorization": f"Bearer {device._token}", "content-length": str(len(BODY))}.items():
        way.putheader(header, value)
    way.endheaders(BODY[:100])
    while not federation.queue.reply(name, "part").exists():
        time.sleep(0.01)
    device._way = None
    begun = time.monotonic()
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN
    assert time.monotonic() - begun < 5
    way.send(b"more")  # too late
    assert federation.queue.reply(name).read_bytes() == BODY
    way.close()


def test_a_compressed_body_is_not_unpacked(federation: Federation) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    bomb = gzip.compress(bytes(2**20))
    words = f"/v1/replies/{name}?offset=0&size={len(bomb)}&sha256={hashlib.sha256(bomb).hexdigest()}"
    headers = {"authorization": f"Bearer {device._token}", "content-encoding": "gzip"}
    way = device._connected(20)
    way.request("PUT", words, body=bomb, headers=headers)
    assert way.getresponse().status == 200
    assert federation.queue.reply(name).read_bytes() == bomb


def test_a_late_reply_is_dropped_and_counted(federation: Federation, tmp_path: Path) -> None:
    device, name = federation.device(0), federation.asked()
    device.next()
    federation.queue.shut(RUN, [name])
    assert federation.state(name) == CLOSED
    assert not device.is_open(name)
    assert not device.fetch(name, "body", hashlib.sha256(BODY).hexdigest(), len(BODY), tmp_path / "body")
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.CLOSED
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
    assert device.send(name, half) == connection.TAKEN
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


def test_a_server_closes_no_log_of_the_process_that_it_runs_in(tmp_path: Path) -> None:
    """`logging.config.dictConfig`, which uvicorn calls unless it is told otherwise, closes every handler there is."""

    class Mine(logging.Handler):
        closed = False

        def close(self) -> None:
            self.closed = True

    mine = Mine()
    server = HubServer(write_credentials(tmp_path, 0), "127.0.0.1", 0)
    assert not mine.closed
    server.server.should_exit = True
    server.run()
    logger = logging.getLogger("uvicorn.error")
    assert not logger.isEnabledFor(logging.WARNING), "strangers could fill the disk"
    assert logger.isEnabledFor(logging.ERROR)


def test_only_this_user_reads_the_queue(federation: Federation) -> None:
    federation.asked()
    assert federation.queue.folder.stat().st_mode & 0o077 == 0
    federation.queue.folder.chmod(0o755)  # as after a copy
    Queue(federation.queue.folder).close()
    assert federation.queue.folder.stat().st_mode & 0o077 == 0


def test_a_port_that_cannot_be_used_is_told_in_words(federation: Federation, tmp_path: Path) -> None:
    other = write_credentials(tmp_path / "other", 0)
    for host, port in (("127.0.0.1", federation.port), ("192.0.2.1", 0), ("127.0.0.1", 2**17), ("no.host.invalid", 1)):
        with refuses(RecipeError, f"port {port}"):
            HubServer(other, host, port)


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
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
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


ANSWERS_OF_NOBODY = [
    b"",
    b"\xff",
    b"[]",
    b"[" * 100_000,
    b'{"challenge":7,"token":7,"received":7}',
    b'{"challenge":"\\ud800","open":true}',
    b'{"challenge":"x\\ny","open":true}',
    b'{"token":"a\\r\\nhost: evil","challenge":"c","open":true}',
    b'{"token":"\xc3\xa9","open":true}',
    b'{"received":"7","open":true}',
    b'{"received":-7,"open":true}',
    b'{"received":1e999,"open":true}',
    b'{"received":true,"open":true}',
    b'{"received":' + b"9" * 5000 + b"}",
    json.dumps({"challenge": "x" * 1000}).encode(),
]
"""What no server of polyfed says."""


@pytest.mark.parametrize("body", ANSWERS_OF_NOBODY, ids=range(len(ANSWERS_OF_NOBODY)))
def test_an_answer_of_any_form_is_no_fault_of_the_device(
    body: bytes, hostile: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A device calls again after a while, and stops when it is told to."""
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(connection, "MOST_STALLS", 2)

    def answer(handler: Any) -> None:
        said(handler, 200, body)
        server.stop.set()  # so that no call is repeated

    server = hostile(answer)
    calls = {
        "login": lambda: server.device._login(),
        "next": lambda: server.device.next(),
        "open": lambda: server.device.is_open("x"),
        "send": lambda: server.device.send("x", reply_in(tmp_path, BODY)),
    }
    for call in calls.values():
        with suppress(InterruptedError, BadReply):
            call()
        server.stop.clear()
    heard = {path.partition("?")[0] for path in server.heard}
    assert heard >= {"/v1/challenge", "/v1/next", "/v1/requests/x", "/v1/replies/x"}


@pytest.mark.parametrize("status", [401, 302, 503])
def test_a_device_does_not_spin_when_its_login_does_not_help(status: int, hostile: Any) -> None:
    def answer(handler: Any) -> None:
        body = b'{"challenge":"c"}' if "challenge" in handler.path else b'{"token":"t"}'
        said(handler, 200 if "challenge" in handler.path or "login" in handler.path else status, body)

    server = hostile(answer)
    Timer(1.2, server.stop.set).start()
    with pytest.raises(InterruptedError):
        server.device.next()
    assert 1 <= server.heard.count("/v1/next") <= 5


def test_a_server_that_takes_nothing_gets_a_reply_a_few_times_only(hostile: Any, tmp_path: Path) -> None:
    def answer(handler: Any) -> None:
        handler.rfile.read(int(handler.headers["content-length"]))
        said(handler, 200, b'{"received":0}')

    server = hostile(answer)
    with refuses(BadReply, "the same bytes"):
        server.device.send("x", reply_in(tmp_path, BODY))
    assert len(server.heard) <= connection.MOST_STALLS + 1


@pytest.mark.parametrize("status", [200, 206])
def test_a_server_that_sends_nothing_of_a_body_is_not_asked_for_ever(status: int, hostile: Any, tmp_path: Path) -> None:
    server = hostile(lambda handler: said(handler, status, b""))
    with refuses(BadReply, "nothing of it"):
        server.device.fetch("x", "body", "0" * 64, 4, tmp_path / "body")
    assert len(server.heard) == 1


def test_somebody_in_between_with_another_certificate_does_not_end_a_device_that_knows_its_server(
    federation: Federation, tmp_path: Path, monkeypatch: Any
) -> None:
    """A device whose first call fails so has a wrong ca.pem, and ends; later, it waits until its server is back."""
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.01)
    federation.asked()
    device, notes = federation.device(0), list[str]()
    assert device.next() is not None
    right, device.note = device._context, notes.append
    device._context = ssl.create_default_context()
    device.close()
    found = list[Any]()
    thread = Thread(target=lambda: found.append(device.next()))
    thread.start()
    while not notes:
        time.sleep(0.01)
    assert "does not fit" in notes[0]
    device._context = right
    thread.join(10)
    assert found[0]["id"]


class Proxy:
    """A proxy that keeps what passes through it, or answers in place of the server."""

    def __init__(self, answers: bytes = b"", port: int = 0) -> None:
        self.seen, self.answers = bytearray(), answers
        self.listening = socket.create_server(("127.0.0.1", port))
        self.port = self.listening.getsockname()[1]
        Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self.listening.accept()
                Thread(target=self.relay, args=(line,), daemon=True).start()

    def relay(self, line: socket.socket) -> None:
        with line, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += line.recv(2**12)
            self.seen += head
            if refusal := self.refusal(head):
                line.sendall(refusal)
                return
            line.sendall(b"HTTP/1.1 200 ok\r\n\r\n" + self.answers)
            if self.answers:
                self.seen += line.recv(2**16)
                return
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as further:
                back = Thread(target=self.pass_on, args=(further, line), daemon=True)
                back.start()
                self.pass_on(line, further)

    def refusal(self, head: bytes) -> bytes:
        """What it answers in place of a connection."""
        return b""

    def pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while piece := one.recv(2**16):
                self.seen += piece
                other.sendall(piece)
            other.shutdown(socket.SHUT_RDWR)


def test_a_proxy_reads_no_message_and_cannot_answer_for_the_server(
    federation: Federation, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("no_proxy", "")
    proxy, name = Proxy(), federation.asked()
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    device = federation.device(0)
    assert device.next() is not None
    assert device.send(name, reply_in(tmp_path, BODY)) == connection.TAKEN
    seen = bytes(proxy.seen)
    assert seen.startswith(f"CONNECT 127.0.0.1:{federation.port} ".encode())
    for secret in (device._token.encode(), federation.names[0].encode(), b"want", BODY[:64], b"/v1/"):
        assert secret not in seen
    device.close()
    proxy.listening.close()
    for answers in (b"HTTP/1.1 200 ok\r\ncontent-length: 2\r\n\r\n{}", b"\x16\x03\x03\x00\x02\x00\x00"):
        hostile = Proxy(answers)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{hostile.port}")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            device._once("GET", "/v1/next")
        assert device._token.encode() not in bytes(hostile.seen)
        device.close()
        hostile.listening.close()


def test_a_link_in_place_of_a_file_of_a_message_is_not_written_through(hostile: Any, tmp_path: Path) -> None:
    server = hostile(lambda handler: said(handler, 200, b"evil"))
    (tmp_path / "body").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").touch()
    server.stop.set()
    with refuses(OSError, "symbolic"):
        server.device._once("GET", "/v1/requests/x/body", to=tmp_path / "body", most=4)
    assert (tmp_path / "precious").read_bytes() == b""


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
    "a header that is no text on a disk": {"header": "\ud800"},
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


PAGES = ("/status", "/metrics", "/health", "/", "/v1/challenge", "/v1/next")


class Monitored:
    """The ports for health, metrics and status of a server, as `polyfed server` opens them."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.metrics, self.status = free_ports(2)
        self.federation, self.folder = federation, folder
        ports = ServerPorts("0.0.0.0", federation.port, metrics_port=self.metrics, status_port=self.status)
        hosting._add_monitors(federation.server, ports, folder)
        self.files = federation.folder / "ca.pem", federation.folder / TOKEN
        while not all(other.started for other in federation.server.others):
            time.sleep(0.01)

    def plain(self, path: str, words: str = "", tls: bool = False, method: str = "GET") -> bytes:
        """The answer of the port for metrics, or of the one for status, to a call."""
        line: socket.socket = socket.create_connection(("127.0.0.1", self.status if tls else self.metrics), timeout=20)
        if tls:
            context = ssl.create_default_context(cafile=str(self.files[0]))
            line = context.wrap_socket(line, server_hostname="127.0.0.1")
        with line:
            line.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{words}\r\n".encode())
            heard = b""
            while piece := line.recv(2**16):
                heard += piece
        return heard


@pytest.fixture
def monitored(federation: Federation, tmp_path: Path) -> Monitored:
    pytest.importorskip("prometheus_client")
    return Monitored(federation, tmp_path / "runs")


def test_the_ports_of_a_server_tell_devices_and_runs(monitored: Monitored, tmp_path: Path) -> None:
    federation = monitored.federation
    federation.asked()
    federation.device(0).next()
    status = RunStatus(monitored.folder / "7", tmp_path / "run")
    status("run-started", rounds=5, first_round=1)
    told = ask(f"127.0.0.1:{monitored.status}", *monitored.files)
    assert told["nodes"] == {"registered": 2, "online": 1}
    assert told["away"] == [{"client": None, "key": federation.names[1]}]
    assert [(run["id"], run["state"], run["progress"]["rounds"]) for run in told["runs"]] == [("7", "running", 5)]
    for text in (monitored.plain("/metrics"), monitored.plain("/metrics", bearer(monitored), tls=True)):
        for line in ("nodes_registered 2.0", "nodes_online 1.0", 'run_rounds{run="7"} 5.0', 'run_running{run="7"} 1.0'):
            assert f"polyfed_{line}".encode() in text
        assert federation.names[0].encode() not in text
    assert monitored.plain("/health").endswith(b'{"status": "ok"}')


def bearer(monitored: Monitored) -> str:
    return f"authorization: Bearer {monitored.files[1].read_text().strip()}\r\n"


def test_the_ports_tell_a_stranger_nothing_and_take_nothing(monitored: Monitored, monkeypatch: Any) -> None:
    for path in PAGES:
        for words in ("", "authorization: Bearer x\r\n"):
            assert monitored.plain(path, words, tls=True).startswith(b"HTTP/1.1 401 ")
        for method in ("POST", "PUT", "DELETE"):
            assert monitored.plain(path, bearer(monitored), tls=True, method=method).startswith(b"HTTP/1.1 404 ")
    for path in ("/status", "/v1/challenge"):
        assert monitored.plain(path).startswith(b"HTTP/1.1 404 "), "nor does the port of metrics"
    for path in ("/", "/?token=x"):
        assert monitored.plain(path).startswith(b"HTTP/1.1 401 "), "its page needs the token"
    assert monitored.plain("/v1/next", bearer(monitored)).startswith(b"HTTP/1.1 404 ")
    monkeypatch.setattr(hub.Hub, "facts", lambda self: 1 / 0)
    told = monitored.plain("/health")
    assert (told[:12], told.partition(b"\r\n\r\n")[2]) == (
        b"HTTP/1.1 503",
        b'{"status": "failing", "error": "ZeroDivisionError"}',
    )


def test_metrics_are_on_loopback_only_and_the_ports_are_bounded(monitored: Monitored, monkeypatch: Any) -> None:
    inner, outer = (other.servers[0].sockets[0] for other in monitored.federation.server.others)
    assert (inner.getsockname()[0], outer.getsockname()[0]) == ("127.0.0.1", "0.0.0.0")
    monkeypatch.setattr(web, "MOST_STRANGERS", 8)
    monkeypatch.setattr(web, "HEAD_SECONDS", 0.3)
    for port in (monitored.metrics, monitored.status):
        held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(30)]
        assert monitored.plain("/health", bearer(monitored), tls=port == monitored.status).startswith(b"HTTP/1.1 200 ")
        for one in held[:20]:
            assert not one.recv(1), "the oldest end"
        for one in held:
            one.close()
    with socket.create_connection(("127.0.0.1", monitored.metrics), timeout=20) as line:
        line.sendall(b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        with suppress(ConnectionError):
            while line.recv(2**12):
                line.sendall(b"x")


def test_a_port_that_cannot_be_opened_ends_the_server_with_a_sentence(federation: Federation, tmp_path: Path) -> None:
    ports = ServerPorts("127.0.0.1", federation.port, metrics_port=federation.port)
    with refuses(RecipeError, f"port {federation.port}"):
        hosting._add_monitors(federation.server, ports, tmp_path)


@pytest.mark.parametrize("kind", ["silent", "cut"])
def test_a_device_whose_login_meets_a_dead_line_logs_in_later(
    federation: Federation, monkeypatch: Any, kind: str
) -> None:
    """As when a thousand devices log in at once: a line was opened and answered, and the next one is not."""
    name, device, opened = federation.asked(), federation.device(0), connection.https_to
    lines = iter([opened, *([unanswered if kind == "silent" else cut(opened)] * 2)])
    monkeypatch.setattr(connection, "https_to", lambda *given: next(lines, opened)(*given))
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.01)
    told = device.next()
    assert told is not None
    assert Offer.read(told).id == name
    assert next(lines, None) is None, "both dead lines were met"


def test_a_device_that_is_cut_before_its_login_pauses_ever_longer(federation: Federation, monkeypatch: Any) -> None:
    """So that a thousand devices, of which a busy server cuts most, come one after another."""
    federation.asked()
    device, opened, pauses, notes = federation.device(0), connection.https_to, list[float](), list[str]()
    lines = iter([cut(opened)] * 4)
    monkeypatch.setattr(connection, "https_to", lambda *given: next(lines, opened)(*given))
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(connection, "CUT_SECONDS", -1.0)
    monkeypatch.setattr(device.stop, "wait", pauses.append)
    monkeypatch.setattr(device, "note", notes.append)
    assert device.next() is not None
    assert len(pauses) == 4
    assert pauses[3] >= 0.04, "0.08, of which a part is drawn"
    assert not any("are cut" in note for note in notes), "no proxy has cut a wait"


def unanswered(*given: Any) -> http.client.HTTPSConnection:
    """A line on which nobody answers."""
    made = http.client.HTTPSConnection("x")

    def connect() -> None:
        raise TimeoutError("timed out")

    made.connect = connect  # type: ignore[method-assign]
    return made


def cut(opened: Callable[..., http.client.HTTPSConnection]) -> Callable[..., http.client.HTTPSConnection]:
    """A line that the server ends instead of an answer, as of the oldest of too many strangers."""

    def line(*given: Any) -> http.client.HTTPSConnection:
        made = opened(*given)

        def answered() -> Any:
            made.close()  # as http.client does
            raise http.client.RemoteDisconnected("no answer")

        made.getresponse = answered  # type: ignore[method-assign]
        return made

    return line


def test_the_health_of_a_device_is_its_contact_with_the_server(federation: Federation, tmp_path: Path) -> None:
    """In the process of `polyfed device`, which starts before its server."""
    pytest.importorskip("prometheus_client")
    federation.ended()
    (federation.folder / "data.npz").touch()
    text = f'server = "127.0.0.1:{federation.port}"\n[[device]]\nkey = "node-0.key"\ndata = "data.npz"\n'
    (federation.folder / "device.toml").write_text(text + 'client = 0\nmodalities = ["a"]\n')
    (port,) = free_ports(1)
    told = device_file(federation.folder / "device.toml") | {"metrics_port": port}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(told).encode())
        file.seek(0)
        words = [sys.executable, "-P", "-m", AGENT, str(file.fileno())]
        source = {"PYTHONPATH": str(Path(hub.__file__).parents[2])}
        process = subprocess.Popen(words, pass_fds=[file.fileno()], env=os.environ | source, stderr=subprocess.DEVNULL)
    try:
        assert "no contact with the server" in page(port, "health", 503)
        federation.started(federation.port)
        assert '"status": "ok"' in page(port, "health", 200)
        assert "polyfed_device_last_contact_timestamp_seconds 1" in page(port, "metrics", 200)
        assert "here are /health and /metrics" in page(port, "status", 404)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def page(port: int, name: str, status: int) -> str:
    """A page of a device, once it has this status."""
    end, text = time.monotonic() + 60, ""
    while time.monotonic() < end:
        with (
            suppress(OSError, http.client.HTTPException),
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as line,
        ):
            line.request("GET", f"/{name}")
            answer = line.getresponse()
            text = f"{answer.status} {answer.read().decode()}"
            if answer.status == status:
                return text
        time.sleep(0.1)
    raise AssertionError(text)


def framed_as(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(4, "little") + header + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00\x00",
        b"\xff\xff\xff\x7f{}",
        framed_as(b"\xff\xfe"),
        framed_as(b"[" * 100_000),
        framed_as(b"[]"),
        framed_as(b'{"a":' + b"9" * 5000 + b"}"),
    ],
    ids=range(7),
)
def test_bytes_that_are_no_packet_are_no_packet(content: bytes) -> None:
    assert isinstance(unframed(content), str)


GARBAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "nothing": lambda honest, other: b"",
    "an empty header": lambda honest, other: framed_as(b"{}", honest),
    "half of the reply": lambda honest, other: honest[: len(honest) // 2],
    "the reply of another device": lambda honest, other: other,
}


def test_whatever_bytes_a_device_replies_the_run_goes_on_with_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    """One kind of garbage in each round, and an honest reply in the last one."""
    rounds, sent, send = len(GARBAGE) + 1, dict[int, list[bytes]](), Connection.send
    text = recipe_of("fedavg").replace("rounds = 2", f"rounds = {rounds}").replace("personal_test = 0.3\n", "")
    with own_devices(tmp_path, text) as federation:
        numbers = {id(device.connection): number for number, device in enumerate(federation.devices)}

        def lying(self: Connection, request: str, path: Path) -> str:
            mine = sent.setdefault(numbers[id(self)], [])
            mine.append(path.read_bytes())
            if numbers[id(self)] == 0 and 1 < len(mine) <= rounds:  # the first is the enrolment
                while len(sent.get(1, ())) < len(mine):
                    time.sleep(0.001)
                make = [*GARBAGE.values()][len(mine) - 2]
                path.write_bytes(make(mine[-1], sent[1][-1]))
            return send(self, request, path)

        monkeypatch.setattr(Connection, "send", lying)
        assert federation.run()["rounds"] == rounds
    lines = [json.loads(line) for line in (federation.app / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [list(line.get("missing", {})) for line in lines] == [["0"]] * len(GARBAGE) + [[]]
