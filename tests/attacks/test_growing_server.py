"""A server that devices reach under a further name, and tokens for the devices that an edge still lacks."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from attacks.test_joining import Federation
from polyfed.cli import main
from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import AUTHORITY_KEY, SERVER
from polyfed.deploy.device.joining import Wanted, join
from polyfed.deploy.server import registration
from polyfed.transport.joining import Door
from polyfed.transport.tokens import JoinToken
from refusals import refuses


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.end()


def said(capsys: Any, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    told = capsys.readouterr()
    return int(end.value.code or 0), " ".join((told.out or told.err).split())


# a further name


def test_a_further_name_needs_no_new_token_and_no_new_authority(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = {name: (federation.folder / name).read_bytes() for name in (*SERVER, AUTHORITY_KEY)}
    first, resolve = federation.joined(), socket.getaddrinfo

    def here(host: Any, *more: Any, **other: Any) -> Any:
        return resolve("127.0.0.1" if host == "second.example.org" else host, *more, **other)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    address = f"second.example.org:{federation.port}"
    with refuses(RecipeError, "polyfed server host"):
        registration.issue(federation.folder, "", None, address=address)
    code, text = said(capsys, "server", "host", federation.folder, "second.example.org", "127.0.0.1")
    assert (code, "is now also for second.example.org" in text, f"--address {address}" in text) == (0, True, True)
    after = {name: (federation.folder / name).read_bytes() for name in (*SERVER, AUTHORITY_KEY)}
    assert [name for name in before if before[name] != after[name]] == ["server.pem"]
    made = registration.issue(federation.folder, "", None, address=address)
    federation.end()
    federation.start()
    old = Door(JoinToken.read(federation.tokens[1]))
    old.recognise()
    assert old.ask().number == 1, "a token of before, under the old name"
    line = federation.connection(first.file)
    assert line.is_open("0123456789abcdef.0123456789abcdef") is False, "a device of before"
    line.close()
    third = join(made.token, Wanted(federation.data, federation.place / "third"), lambda proposal: True)
    assert (third.number, third.address) == (2, address)
    assert "already" in said(capsys, "server", "host", federation.folder, "second.example.org")[1]


def test_a_server_that_runs_takes_the_new_name_by_itself(federation: Federation) -> None:
    seen = list(federation.server.seen)
    registration.add_hosts(federation.folder, ["second.example.org"])
    for _ in range(100):
        if federation.server.seen != seen:
            break
        federation.thread.join(0.1)
    assert federation.server.seen[:-1] == seen, "and for a while it knows the certificate of before"
    assert federation.door(1).ask().number == 1


def test_a_name_that_is_none_or_an_authority_elsewhere_is_refused(tmp_path: Path, capsys: Any) -> None:
    registration.begin(tmp_path / "s", ["a.example.org", "b.example.org"], 9092, [""], 1.0)
    code, text = said(capsys, "server", "host", tmp_path / "s", "no name")
    assert (code, "neither a name nor an address" in text) == (2, True)
    (tmp_path / "s" / AUTHORITY_KEY).rename(tmp_path / "elsewhere.key")
    before = (tmp_path / "s" / "server.pem").read_bytes()
    code, text = said(capsys, "server", "host", tmp_path / "s", "c.example.org")
    assert (code, "Put it back" in text) == (2, True)
    assert (tmp_path / "s" / "server.pem").read_bytes() == before
    assert registration.issue(tmp_path / "s", "", None, address="b.example.org:9092").entry.number == 1
    assert said(capsys, "server", "host", tmp_path / "nothing", "c.example.org")[0] == 2


NO_HOSTS = [
    "*.example.org",
    "fe80::1%eth0",
    "fe80::1%\x1b[31m",
    "127.1",
    "1.2.3.999",
    "a-.org",
    "bücher.org",
    "0.0.0.0",
]


@pytest.mark.parametrize("name", NO_HOSTS)
def test_a_name_that_no_device_can_reach_changes_nothing(name: str, tmp_path: Path, capsys: Any) -> None:
    registration.begin(tmp_path / "s", ["a.example.org"], 9092, [""], 1.0)
    before = (tmp_path / "s" / "server.pem").read_bytes()
    address = f"[{name}]:9092" if ":" in name else f"{name}:9092"
    for words in (
        ("init", tmp_path / "new", "--host", name),
        ("host", tmp_path / "s", name),
        ("token", tmp_path / "s", "--address", address),
    ):
        code, text = said(capsys, "server", *words)
        assert (code, "neither a name nor an address" in text, "\x1b" in text) == (2, True, False), words
    assert (tmp_path / "s" / "server.pem").read_bytes() == before
    assert not (tmp_path / "new").exists()
    assert len(registration.devices(tmp_path / "s")) == 1


def test_a_server_whose_name_is_longer_than_a_subject_may_be_is_reached(tmp_path: Path) -> None:
    name = f"{'a' * 63}.example.org"
    folder = tmp_path / "s"
    registration.begin(folder, [name], 9092, [""], 1.0)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=folder / "ca.pem")
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(here, there, server_hostname=name), server.wrap_bio(there, here, server_side=True)]
    for end in (*ends, *ends):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert ends[0].version() == "TLSv1.3", "the device has verified the name"


# an edge


def an_edge(folder: Path, silo: int) -> Path:
    registration.begin(folder, ["127.0.0.1"], 9093, ["", ""], 1.0, silo=silo)
    return folder


@pytest.mark.parametrize("silo", [0, 2])
def test_an_edge_gives_numbers_of_its_own_silo_only(silo: int, tmp_path: Path, capsys: Any) -> None:
    folder, first = an_edge(tmp_path / "edge", silo), 2 * silo
    code, text = said(capsys, "server", "token", folder)
    assert code == 2
    assert f"the devices of silo {silo} have the numbers {first} to {first + 1}" in text
    assert f"polyfed server revoke {folder} NAME, then polyfed server token {folder}" in text
    for number in (first - 1, first + 2):
        if number >= 0:
            with refuses(RecipeError, f"--number {number}"):
                registration.issue(folder, "", number)
    assert said(capsys, "server", "revoke", folder, f"device-{first + 1}")[0] == 0
    made = registration.issue(folder, "", None)
    assert made.entry.number == first + 1
    assert f"--silo {silo} --relay edge" in made.command


def test_an_edge_of_an_older_version_asks_for_the_number(tmp_path: Path) -> None:
    folder = an_edge(tmp_path / "edge", 1)
    with registration.registered(folder) as register, register.together():
        register._rows.execute("DELETE FROM settings WHERE name = 'devices'")
    with refuses(RecipeError, "--number N"):
        registration.issue(folder, "", None)
    assert registration.issue(folder, "new", 7).entry.number == 7
