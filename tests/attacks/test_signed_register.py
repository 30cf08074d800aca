"""The register of a server's devices is signed: a swapped row, a cut log and a stranger's try are told."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from attacks.test_joining import Federation, a_key
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, DataError, PolyfedError, RecipeError
from polyfed.core.system.files import AUDIT, PUBLIC_KEY, TIE
from polyfed.deploy.device.joining import renew
from polyfed.deploy.server import registration
from polyfed.privacy.egress.audit_log.keys import is_tied, key_text
from polyfed.privacy.egress.audit_log.log import HEAD
from polyfed.privacy.egress.audit_log.verification import public_key, verify
from polyfed.transport import refusals
from polyfed.transport.hub import HubServer
from polyfed.transport.logins import PrivateKey
from polyfed.transport.refusals import Refusals
from polyfed.transport.register_log import LOG, RegisterLog, ServerKey
from polyfed.transport.tokens import REGISTER, Register
from refusals import refuses


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder with two open tokens, as nothing serves it."""
    registration.begin(tmp_path / "server", ["127.0.0.1"], 9092, ["hospital-a", "hospital-b"], 1.0)
    return tmp_path / "server"


def said(capsys: Any, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    told = capsys.readouterr()
    return int(end.value.code or 0), " ".join((told.out or told.err).split())


def told(folder: Path, capsys: Any, *words: str) -> list[dict[str, Any]]:
    """The events of the register's log."""
    with pytest.raises(SystemExit) as end:
        main(["audit-log", "show", str(folder), "--json", *words])
    assert not end.value.code
    events: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["events"]
    return events


def change(folder: Path, sql: str) -> None:
    with sqlite3.connect(folder / REGISTER) as rows:
        assert rows.execute(sql).rowcount, sql


# every enrolment and refusal has a line


def test_every_step_of_a_device_is_a_line_of_the_signed_log(federation: Federation, capsys: Any) -> None:
    one, _ = federation.joined().file, federation.joined(1, "second")
    first = PrivateKey(one.parent / "node.key").fingerprint
    renew(one)
    second = PrivateKey(one.parent / "node.key").fingerprint
    registration.issue(federation.folder, "hospital-c", 7)
    for who in ("hospital-b", "hospital-c"):
        assert said(capsys, "server", "revoke", federation.folder, who)[0] == 0
    events = told(federation.folder, capsys)
    steps = [(row["event"], row.get("name"), row.get("client")) for row in events if row["event"] != "set"]
    assert steps == [
        ("invited", "hospital-a", 0),
        ("invited", "hospital-b", 1),
        ("joined", "hospital-a", 0),
        ("joined", "hospital-b", 1),
        ("renewing", "hospital-a", 0),
        ("renewed", "hospital-a", 0),
        ("invited", "hospital-c", 7),
        ("revoked", "hospital-b", 1),
        ("withdrawn", "hospital-c", 7),
    ]
    keys = {row["event"]: row["device"] for row in events if row.get("name") == "hospital-a"}
    assert (keys["joined"], keys["renewed"]) == (first, second)
    assert {row["client"] for row in told(federation.folder, capsys, "--client", "7")} == {7}
    page = federation.place / "page.html"
    code, text = said(capsys, "audit-log", "show", federation.folder, "--html", page)
    assert (code, "withdrawn 7 hospital-c" in text, first[:20] in text) == (0, True, True)
    assert "<td>renewed</td><td>0</td><td>hospital-a</td>" in page.read_text()
    assert "7 enrolments" not in text
    verify(federation.folder / LOG)


def test_the_log_is_signed_by_the_key_of_the_servers_certificate(folder: Path) -> None:
    tie = json.loads((folder / LOG / TIE).read_text())
    log_key = key_text(public_key(folder / LOG / PUBLIC_KEY))
    assert tie["key"] == ServerKey(folder / "server.key").public
    assert is_tied(tie, log_key)
    assert not [path for path in folder.glob("*.pub")], "the key of the log is no key of a device"


def test_refused_tokens_and_keys_are_lines(federation: Federation, capsys: Any) -> None:
    stranger = a_key(federation.place / "stranger")
    federation.joined()
    assert federation.call(federation.words(stranger))[0] == 403, "used by another key"
    other = json.loads(federation.words(stranger)) | {"secret": "00" * 16}
    assert federation.call(json.dumps(other).encode())[0] == 403
    key = federation.joined(1, "second").file.parent / "node.key"
    with registration.registered(federation.folder) as register:
        register.revoke("hospital-b")
    federation.server.hub.logins.keys.look()
    line = federation.connection(key.parent / "device.toml")
    with refuses(PolyfedError, "refused the key"):
        line.is_open("0123456789abcdef.0123456789abcdef")
    line.close()
    found = [
        (row["why"], row.get("client"), row["device"])
        for row in told(federation.folder, capsys)
        if "times" in row or row["event"] == "refused"
    ]
    revoked = PrivateKey(key).fingerprint
    assert found[:2] == [("token: used", 0, stranger.fingerprint), ("token: unknown", None, stranger.fingerprint)]
    assert found[2][0].startswith("login: ")
    assert found[2][2] == revoked
    verify(federation.folder / LOG)


def test_strangers_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[dict[str, Any]]()
    counted = Refusals(written.extend)
    for number in range(3000):
        counted.add("login", f"SHA256:{number:043}")
        counted.add("login", "SHA256:" + "x" * 43)
        counted.add("login", f"no fingerprint {number}")
    assert len(written) <= refusals.MOST
    assert len(counted._kinds) <= refusals.KINDS
    counted.end()
    assert sum(row.get("times", 1) for row in written) == 9000, "every one is counted"
    assert {row["device"] for row in written if "no finger" in row.get("device", "")} == set()
    written.clear()
    later = Refusals(written.extend)
    for _ in range(5):
        later.add("token: late", client=3, name="a")
    assert [row.get("times", 1) for row in written] == [1]
    monkeypatch.setattr(refusals, "SECONDS", 0.0)
    later.add("token: late", client=3, name="a")
    assert [row.get("times", 1) for row in written] == [1, 5]


def test_a_key_file_that_comes_goes_or_changes_by_hand_is_a_line(federation: Federation, capsys: Any) -> None:
    federation.joined()
    path, stranger = federation.folder / "hospital-a.pub", a_key(federation.place / "stranger")
    before = path.read_bytes()

    def settled() -> list[tuple[str, str, str]]:
        with registration.registered(federation.folder) as register:
            register.settle()
        return [
            (row["event"], row["name"], row["why"])
            for row in told(federation.folder, capsys)
            if "key file" in row.get("why", "")
        ]

    (federation.folder / "loose.pub").write_text(stranger.public)
    assert settled()[-1] == ("joined", "loose", "a key file without a token")
    (federation.folder / "loose.pub").unlink()
    assert settled()[-1] == ("revoked", "loose", "the key file without a token is gone")
    path.write_text(stranger.public)
    assert settled()[-1] == ("revoked", "hospital-a", "its key file holds another key, which has no token")
    path.unlink()
    assert settled()[-1] == ("revoked", "hospital-a", "its key file is gone")
    path.write_bytes(before)
    assert settled()[-1] == ("joined", "hospital-a", "its key file is back")
    assert len(settled()) == 5


# a changed register

SWAPS = {
    "two names": "UPDATE devices SET name = CASE name WHEN 'hospital-a' THEN 'hospital-b' ELSE 'hospital-a' END",
    "two numbers": "UPDATE devices SET number = 1 - number",
    "one number": "UPDATE devices SET number = 5 WHERE name = 'hospital-a'",
    "a longer token": "UPDATE devices SET ends = ends + 1 WHERE name = 'hospital-a'",
    "a lost device": "DELETE FROM devices WHERE name = 'hospital-b'",
    "a device of nobody's": "INSERT INTO devices SELECT 'ff', 9, 'ghost', ends, '', 0, 0 FROM devices LIMIT 1",
    "another address": "UPDATE settings SET value = 'evil:1' WHERE name = 'address'",
    "another log": "UPDATE settings SET value = 'x' WHERE name = 'log'",
}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_register_that_somebody_has_changed_is_told_and_is_written_again(
    swap: str, folder: Path, capsys: Any
) -> None:
    before = registration.devices(folder)
    change(folder, SWAPS[swap])
    words = ("server", "token", folder)
    for more in ((), ("--list",), ("--revoke", "hospital-a")):
        code, text = said(capsys, *words, *more)
        assert (code, "was changed by somebody else than polyfed" in text) == (2, True), text
    with refuses(RecipeError, "changed by somebody"):
        HubServer(folder, "127.0.0.1", 0)
    register = Register(folder)
    with refuses(RecipeError, "changed by somebody"):
        register.numbers()
    register.close()
    (folder / REGISTER).unlink()
    assert registration.devices(folder) == before
    assert registration.issue(folder, "", None).entry.number == 2


def test_the_sentence_names_the_swapped_device_and_both_names(folder: Path, capsys: Any) -> None:
    change(folder, SWAPS["two names"])
    _, text = said(capsys, "server", "token", folder, "--list")
    assert "device 0, hospital-a, has name = 'hospital-b', and the signed log says 'hospital-a'" in text


def test_a_swapped_number_ends_a_run_that_begins(federation: Federation) -> None:
    federation.joined()
    federation.joined(1, "second")
    register = Register(federation.folder)
    assert sorted(register.numbers().values()) == [0, 1]
    change(federation.folder, SWAPS["two numbers"])
    with refuses(RecipeError, "number = 1"):
        register.numbers()
    register.close()


def test_a_revoked_device_is_not_brought_back(federation: Federation) -> None:
    federation.joined()
    kept = federation.place / "kept"
    shutil.copytree(federation.folder, kept, ignore=shutil.ignore_patterns("queue"))
    with registration.registered(federation.folder) as register:
        register.revoke("hospital-a")
        register.issue("hospital-c")
    for name in (REGISTER, "hospital-a.pub"):
        shutil.copy(kept / name, federation.folder / name)
    with refuses(RecipeError, "ended = 0.0"):
        registration.devices(federation.folder)
    shutil.rmtree(federation.folder / LOG)
    with refuses(RecipeError, "is gone"):
        registration.devices(federation.folder)
    other = federation.place / "other"
    registration.begin(other, ["127.0.0.1"], 9092, ["a"], 1.0)
    shutil.copytree(other / LOG, federation.folder / LOG)
    with refuses(RecipeError, "their keys differ"):
        registration.devices(federation.folder)


# a changed log


def lines_of(folder: Path) -> list[bytes]:
    return (folder / LOG / AUDIT).read_bytes().splitlines(keepends=True)


CHANGES: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "dropped": lambda lines, at: lines[:at] + lines[at + 1 :],
    "moved": lambda lines, at: [*lines[:at], *lines[at : at + 2][::-1], *lines[at + 2 :]],
    "doubled": lambda lines, at: lines[: at + 1] + lines[at:],
    "flipped": lambda lines, at: [
        *lines[:at],
        lines[at].replace(b"hospital-a", b"hospital-z").replace(b":0", b":1", 1),
        *lines[at + 1 :],
    ],
    "cut off": lambda lines, at: lines[:at],
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_line_that_is_dropped_moved_or_flipped_is_found(how: str, folder: Path, capsys: Any) -> None:
    lines, path = lines_of(folder), folder / LOG / AUDIT
    for at in range(len(lines) - (how == "moved")):
        path.write_bytes(b"".join(CHANGES[how](lines, at)))
        assert path.read_bytes() != b"".join(lines), "something was changed"
        with refuses(DataError, "line"):
            verify(folder / LOG)
        assert said(capsys, "audit-log", "show", folder)[0] == 5, (how, at)
    path.write_bytes(b"".join(lines))
    verify(folder / LOG)


def test_a_log_without_its_last_line_stops_the_register(folder: Path) -> None:
    path = folder / LOG / AUDIT
    path.write_bytes(b"".join(lines_of(folder)[:-1]))
    with refuses(CheckpointError, "damaged"):
        registration.devices(folder)
    path.unlink()
    (folder / LOG / HEAD).unlink()
    with refuses(RecipeError, "is gone"):
        registration.issue(folder, "c", None)


# a server that is killed, and one of before the log


class Killed(BaseException):
    """The process ends here."""


def killed(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[Register], Any]) -> None:
    """Do something with the register, and die between its log and the register."""
    note = RegisterLog.note

    def dying(self: RegisterLog, *args: Any) -> None:
        note(self, *args)
        raise Killed

    monkeypatch.setattr(RegisterLog, "note", dying)
    register = Register(folder)
    with pytest.raises(Killed):
        act(register)
    register.close()
    monkeypatch.undo()


def test_a_kill_between_log_and_register_loses_and_invents_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(monkeypatch, folder, lambda register: register.issue("hospital-c"))
    assert [row["name"] for row in registration.devices(folder)] == ["hospital-a", "hospital-b", "hospital-c"]
    killed(monkeypatch, folder, lambda register: register.revoke("hospital-c"))
    assert registration.devices(folder)[2]["state"] == "withdrawn"
    killed(monkeypatch, folder, lambda register: register.address("other:9092"))
    with registration.registered(folder) as register:
        register.check()
        assert register.address() == "other:9092"
    verify(folder / LOG)


def test_a_key_whose_line_cannot_be_written_is_not_registered(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RegisterLog, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RegisterLog, "note", full)
    with refuses(PolyfedError, "cannot register"):
        federation.joined()
    assert federation.keys == []
    monkeypatch.undo()
    federation.joined()
    assert federation.keys == ["hospital-a.pub"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_register_of_before_the_log_is_signed_at_its_next_change(
    dies: bool, federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    federation.joined()
    federation.end()
    shutil.rmtree(federation.folder / LOG)
    change(federation.folder, "DELETE FROM settings WHERE name = 'log'")
    assert len(registration.devices(federation.folder)) == 2
    if dies:
        killed(monkeypatch, federation.folder, Register.settle)
    federation.start()
    assert [(row["event"], row["client"]) for row in told(federation.folder, capsys) if row["event"] != "set"] == [
        ("joined", 0),
        ("invited", 1),
    ]
    change(federation.folder, SWAPS["two numbers"])
    with refuses(RecipeError, "changed by somebody"):
        registration.devices(federation.folder)
