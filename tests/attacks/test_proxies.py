"""Devices behind a proxy that wants a password, cuts calls that wait, or is not there."""

import os
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from attacks.test_own_transport import Federation, Proxy
from polyfed.core.errors import RecipeError, TransportError
from polyfed.deploy.device.agent import MESSAGES
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.processes import free_ports
from polyfed.transport import connection, hub
from polyfed.transport.joining import Door
from polyfed.transport.queue import ANSWERED
from polyfed.transport.tokens import JoinToken
from refusals import refuses

PATIENCE = 90.0


class Rough(Proxy):
    """A proxy with moods.

    Attributes:
        status: with which it refuses; empty if it connects.
        login: `name:password` that it wants; empty if it wants none.
        cuts: after so many seconds it ends a connection; 0 if it never does.
    """

    def __init__(self, port: int = 0, status: str = "", login: str = "", cuts: float = 0.0) -> None:
        self.status, self.login, self.cuts, self.count = status, login, cuts, 0
        super().__init__(port=port)

    def relay(self, line: socket.socket) -> None:
        self.count += 1
        if self.cuts:
            Timer(self.cuts, self.cut, (line,)).start()
        super().relay(line)

    def cut(self, line: socket.socket) -> None:
        with suppress(OSError):  # it has ended
            line.shutdown(socket.SHUT_RDWR)

    def refusal(self, head: bytes) -> bytes:
        wanted = b"Proxy-Authorization: Basic " + b64encode(self.login.encode())
        if self.status or (self.login and wanted.lower() not in head.lower()):
            return f"HTTP/1.1 {self.status or '407 Proxy Authentication Required'}\r\n\r\n".encode()
        return b""


class Command:
    """The process of `polyfed device` with one device, and a server that has asked it for something."""

    def __init__(self, folder: Path, federation: Federation, proxy: str) -> None:
        self.federation, self.folder, self.name = federation, federation.folder, federation.asked()
        (self.folder / "data.npz").touch()
        text = f'server = "127.0.0.1:{federation.port}"\n[[device]]\nkey = "node-0.key"\ndata = "data.npz"\n'
        (self.folder / "device.toml").write_text(text + 'client = 0\nmodalities = ["a"]\nstate = "state"\n')
        own = {"PYTHONPATH": str(Path(hub.__file__).parents[2]), "https_proxy": proxy, "no_proxy": ""}
        self.path = folder / "device.log"
        with self.path.open("wb") as log:
            words = [sys.executable, "-P", "-m", "polyfed", "device", str(self.folder / "device.toml")]
            self.process = subprocess.Popen(words, env=os.environ | own, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.path.read_text()

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def serves(self) -> bool:
        """Whether the device has fetched the request, or answered it."""
        body = self.folder / "state" / MESSAGES / self.name / "body"
        return body.exists() or self.federation.state(self.name) == ANSWERED

    def ended(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


@pytest.fixture
def begin(tmp_path: Path, federation: Federation) -> Iterator[Callable[[str], Command]]:
    made = list[Command]()

    def begun(proxy: str) -> Command:
        made.append(Command(tmp_path, federation, proxy))
        return made[-1]

    yield begun
    for one in made:
        one.ended()
        assert "Traceback" not in one.log


MOODS = {
    "wants a password": (Rough, {"login": "me:s3cret"}, "", ("(407)", "HTTPS_PROXY=http://NAME:PASSWORD@")),
    "wants another password": (Rough, {"login": "me:s3cret"}, "me:wr0ng@", ("(407)", "Correct")),
    "refuses": (Rough, {"status": "403 \x1b[31mno"}, "", ("status 403", "Allow CONNECT to 127.0.0.1:")),
    "is not there": (None, {}, "", ("Refused", "Start it", "NO_PROXY=127.0.0.1")),
}


@pytest.mark.parametrize("mood", MOODS)
def test_a_device_says_what_its_proxy_needs_and_goes_on_when_it_is_well(
    mood: str, begin: Callable[[str], Command]
) -> None:
    kind, options, words, told = MOODS[mood]
    (port,) = free_ports(1)
    proxy = kind(port, **options) if kind is not None else None
    device = begin(f"http://{words}127.0.0.1:{port}")
    device.until(lambda: "no contact with 127.0.0.1" in device.log)
    (line,) = [line for line in device.log.splitlines() if "no contact" in line]
    for word in (f"127.0.0.1:{port} of HTTPS_PROXY", *told):
        assert word in line
    assert not any(word in device.log for word in ("\x1b", "wr0ng", b64encode(b"me:wr0ng").decode()))
    assert not device.serves()
    if proxy is None:
        proxy = Rough(port)
    proxy.login = proxy.status = ""
    device.until(device.serves)
    assert "contact with 127.0.0.1" in device.log.replace("no contact", "")
    assert proxy.seen.count(b"CONNECT") > 1
    proxy.listening.close()


def test_a_proxy_gets_name_and_password_and_the_device_serves(begin: Callable[[str], Command]) -> None:
    proxy = Rough(login="me:s3cret/@")
    device = begin(f"http://me:s3cret%2F%40@127.0.0.1:{proxy.port}")
    device.until(device.serves)
    assert "no contact" not in device.log
    proxy.listening.close()


def test_calls_that_a_proxy_cuts_are_repeated_at_once_and_told_once(
    federation: Federation, monkeypatch: Any, tmp_path: Path
) -> None:
    """In this process, because it takes more cuts than somebody wants to wait for."""
    proxy, notes = Rough(cuts=2.0), list[str]()  # long enough for a login on a busy machine
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setattr(connection, "CUT_SECONDS", 0.1)
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.05)
    device, pauses = federation.device(0), list[float]()
    device.note = notes.append

    def waited(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            federation.asked()

    monkeypatch.setattr(device.stop, "wait", waited)
    told = device.next()
    assert told is not None
    assert len(pauses) >= 4
    assert max(pauses) <= connection.FIRST_PAUSE, "the pauses do not grow"
    assert [note for note in notes if "are cut after" not in note] == []
    assert len(notes) == 1
    proxy.listening.close()


def test_a_device_behind_a_proxy_that_cuts_long_calls_says_so_and_serves(begin: Callable[[str], Command]) -> None:
    proxy = Rough(cuts=1.5)
    device = begin(f"http://127.0.0.1:{proxy.port}")
    device.until(device.serves)
    device.until(lambda: device.federation.state(device.name) == ANSWERED)
    device.until(lambda: "are cut after" in device.log)
    assert "keep silent connections for 30 seconds" in device.log
    proxy.cuts = 0.0
    device.name = device.federation.asked()
    device.until(device.serves)
    proxy.listening.close()


@pytest.mark.parametrize("value", ["socks5://p:1080", "https://p:3128", "http://me:s3cret@p:many", "http://", "x" * 99])
def test_a_variable_that_is_no_proxy_is_refused_without_its_password(
    value: str, federation: Federation, monkeypatch: Any
) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("https_proxy", value)
    with refuses(RecipeError, "HTTPS_PROXY") as refused:
        federation.device(0).next()
    assert "s3cret" not in str(refused.value)
    (federation.folder / "device.toml").write_text('server = "s.example.org:1"\n')
    with refuses(RecipeError, "HTTPS_PROXY"):
        device_file(federation.folder / "device.toml")
    monkeypatch.setenv("no_proxy", "s.example.org")
    with suppress(RecipeError):
        device_file(federation.folder / "device.toml")
        raise AssertionError("the file has no device")


def test_a_device_joins_and_renews_its_key_through_its_proxy_or_says_what_it_needs(
    federation: Federation, monkeypatch: Any
) -> None:
    proxy, authority = Rough(login="me:s3cret"), (federation.folder / "ca.pem").read_bytes()
    door = Door(JoinToken(f"127.0.0.1:{federation.port}", sha256(authority).digest(), bytes(16)))
    device = federation.device(0)
    monkeypatch.setenv("no_proxy", "")
    for words, works in (("", False), ("me:s3cret@", True)):
        monkeypatch.setenv("https_proxy", f"http://{words}127.0.0.1:{proxy.port}")
        for call in (door.recognise, device.renew):
            if works:
                call()
            else:
                with refuses(TransportError, "HTTPS_PROXY=http://NAME:PASSWORD"):
                    call()
    assert door.authority == authority
    assert proxy.count == 4
    proxy.listening.close()
