"""A device sends nothing to a server whose certificate has expired: a real device, and a listener of the test."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

from engines.federations import Federation, recipe_for, until
from polyfed.deploy.credentials import _authority, _secret, _server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Listener:
    """Takes connections with TLS, and notes how each handshake ended and what was sent after it."""

    def __init__(self, folder: Path) -> None:
        self.ended: list[str] = []
        self.came = b""
        self.opened = socket.create_server(("127.0.0.1", 0))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.stop = Event()

    def listen(self) -> None:
        self.opened.settimeout(0.2)
        while not self.stop.is_set():
            try:
                caller, _ = self.opened.accept()
            except TimeoutError:
                continue
            caller.settimeout(5.0)
            try:
                with self.context.wrap_socket(caller, server_side=True) as inner:
                    self.came += inner.recv(2**16)
                    self.ended.append("taken")
            except OSError as error:
                self.ended.append(str(error))


@contextmanager
def listening(folder: Path) -> Iterator[Listener]:
    made = Listener(folder)
    thread = Thread(target=made.listen, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop.set()
        thread.join(10)
        made.opened.close()


@pytest.mark.parametrize(("days", "talks"), [(-2, False), (30, True)])
def test_a_device_sends_nothing_to_a_server_whose_certificate_has_expired(
    days: int, talks: bool, tmp_path: Path
) -> None:
    """With a valid certificate the same device talks, so that the test shows something."""
    federation = Federation(recipe_for("fedavg", tmp_path), tmp_path / "fed")
    authority, ca = _authority()
    key, certificate = _server(authority, ca, ["127.0.0.1"], days=days)
    folder = federation.credentials
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", key, PrivateFormat.PKCS8)
    with listening(folder) as server, federation:
        federation.start_device(0, server=f"127.0.0.1:{server.opened.getsockname()[1]}")
        until(lambda: bool(server.ended), "the device's call", 180)
        if talks:
            assert b"/v1/" in server.came
        else:
            assert "certificate" in server.ended[0].lower()
            assert server.came == b""
