"""A server's certificate is renewed under the same authority while the server runs, and devices notice nothing."""

import os
import shutil
import socket
import ssl
import stat
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import (
    AUTHORITY_KEY,
    DAYS,
    _authority,
    _secret,
    _server,
    care_for_certificate,
    check_server,
    days_left,
    renewed,
    write_credentials,
)
from polyfed.transport.web import Chain
from refusals import refuses


def credentials(folder: Path, days: int) -> Path:
    """Credentials whose server certificate is valid for this number of days."""
    folder.mkdir(exist_ok=True)
    authority, ca = _authority()
    key, certificate = _server(authority, ca, ["server.example.org", "127.0.0.1"], days=days)
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", key, PrivateFormat.PKCS8)
    _secret(folder / AUTHORITY_KEY, authority, PrivateFormat.PKCS8)
    return folder


def names(folder: Path) -> x509.SubjectAlternativeName:
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.mark.parametrize("days", [-2, 3])
def test_a_certificate_that_ends_soon_or_has_ended_is_renewed_and_nothing_else_changes(
    days: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = credentials(tmp_path, days)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "server.pem"}
    hosts = names(folder)
    care_for_certificate(folder)
    assert "the server's certificate is renewed and valid until" in capsys.readouterr().err
    assert days_left(folder) == pytest.approx(DAYS, abs=0.1)
    assert names(folder) == hosts
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "server.pem"} == before
    check_server(folder, ["ca.pem", "server.pem", "server.key"], ["server.example.org"])
    assert renewed(folder) is None, "once"


def test_only_the_operator_reads_the_authoritys_key_and_without_it_the_log_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_credentials(tmp_path / "fresh", 0, ["server.example.org"])
    assert stat.S_IMODE((made / AUTHORITY_KEY).stat().st_mode) == 0o600
    assert renewed(made) is None, "it is valid for a month"
    folder = credentials(tmp_path / "old", 5)
    (folder / AUTHORITY_KEY).unlink()
    before = (folder / "server.pem").read_bytes()
    care_for_certificate(folder)
    assert "the server's certificate ends in 5.0 days" in capsys.readouterr().err
    assert (folder / "server.pem").read_bytes() == before


def test_the_key_of_another_authority_signs_nothing(tmp_path: Path) -> None:
    """Devices would refuse the new certificate, and the old one still works for some days."""
    folder, other = credentials(tmp_path / "one", 5), credentials(tmp_path / "other", 5)
    shutil.copy(other / AUTHORITY_KEY, folder / AUTHORITY_KEY)
    before = (folder / "server.pem").read_bytes()
    with refuses(RecipeError, "ca.key"):
        renewed(folder)
    (folder / AUTHORITY_KEY).write_text("no key")
    with refuses(RecipeError, "cannot be renewed"):
        renewed(folder)
    assert (folder / "server.pem").read_bytes() == before


async def nothing(scope: object, receive: object, send: object) -> None:
    """A web application that is never called."""


def number_of(folder: Path, port: int) -> str:
    """The serial number of the certificate that a device, which trusts the folder's authority, gets from a server."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        found = secured.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_a_running_server_takes_over_the_new_certificate_and_not_a_broken_one(tmp_path: Path) -> None:
    folder = credentials(tmp_path, 3)
    tls: dict[str, Any] = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": str(folder / "server.key")}
    quiet: dict[str, Any] = {"lifespan": "off", "log_config": None, "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(nothing, host="127.0.0.1", port=0, **tls, **quiet))
    bound = server.config.bind_socket()
    thread = Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started and time.monotonic() < end:
            time.sleep(0.05)
        port, chain = bound.getsockname()[1], Chain(folder, [server])
        first = number_of(folder, port)
        assert renewed(folder) is not None
        chain.reload()
        second = number_of(folder, port)
        assert second != first
        (folder / "server.pem").write_bytes((folder / "ca.pem").read_bytes())  # does not belong to server.key
        os.utime(folder / "server.pem", ns=(1, 1))
        with refuses(OSError, "_ssl.c:3926"):
            chain.reload()
        assert number_of(folder, port) == second
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()
