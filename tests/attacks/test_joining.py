"""Joining a server with a token: by its holder, by strangers, and at a server that wants to harm the device."""

import base64
import http.client
import io
import itertools
import json
import os
import random
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from polyfed.cli import main
from polyfed.core.errors import DataError, PolyfedError, RecipeError, TransportError
from polyfed.deploy.credentials import _authority, _secret, _server, write_credentials
from polyfed.deploy.device import joining
from polyfed.deploy.device.configuration import DevicePolicy
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.device.joining import CA, DEVICE, KEY, POLICY, STAGE, Wanted, join
from polyfed.deploy.processes import free_ports
from polyfed.deploy.server import registration
from polyfed.deploy.server.membership import Membership
from polyfed.privacy.egress.policy import Policy
from polyfed.transport import connection, hub
from polyfed.transport import joining as calls
from polyfed.transport.connection import Connection
from polyfed.transport.hub import HubServer
from polyfed.transport.joining import WHY, Door
from polyfed.transport.logins import PrivateKey
from polyfed.transport.tokens import JOINED, JoinToken, Register, joining_text
from refusals import refuses

RECIPE = """
rounds = 1
[data]
name = "npz"
path = "of-the-server.npz"
modalities = ["upper", "lower"]
[clients]
num = 2
[model.encoders]
upper = { kind = "mlp", hidden = [4] }
lower = { kind = "mlp", hidden = [4] }
[train]
batch_size = 8
[algorithm]
name = "fedavg"
"""


class Federation:
    """A server in this process with tokens for two devices, and data for them."""

    def __init__(self, place: Path, recipe: str = "") -> None:
        self.place, self.folder, self.data = place, place / "server", place / "mine.npz"
        (self.port,) = free_ports(1)
        path = place / "recipe.toml"
        path.write_text(recipe)
        names = ["hospital-a", "hospital-b"]
        made = registration.begin(self.folder, ["127.0.0.1"], self.port, names, 1.0, path if recipe else None)
        self.tokens = [one.token for one in made]
        values = np.random.default_rng(0).random((40, 2, 3), dtype=np.float32)
        np.savez(self.data, upper=values, lower=values + 1, label=np.arange(40) % 3)
        self.start()

    def start(self) -> None:
        self.server = HubServer(self.folder, "127.0.0.1", self.port)
        self.thread = Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.server.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def door(self, number: int = 0) -> Door:
        made = Door(JoinToken.read(self.tokens[number]))
        made.recognise()
        return made

    def joined(self, number: int = 0, folder: str = "device", **more: Any) -> Any:
        agree = more.pop("agree", lambda proposal: True)
        return join(self.tokens[number], Wanted(self.data, self.place / folder, **more), agree)

    def call(self, body: bytes, source: str = "127.0.0.1") -> tuple[int, bytes]:
        """Make a call to the door with any body, from any address of this machine."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        way = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, source_address=(source, 0))
        with closing(way):
            way.request("POST", "/v1/join", body=body)
            answer = way.getresponse()
            return answer.status, answer.read()

    def words(self, mine: PrivateKey, number: int = 0, *, pem: Path | None = None, **changes: str) -> bytes:
        """The body with which a device registers its key."""
        seen = ssl.PEM_cert_to_DER_cert((pem or self.folder / "server.pem").read_text())
        secret = JoinToken.read(self.tokens[number]).secret
        words = {"secret": secret.hex(), "key": mine.public, "signature": mine.sign(joining_text(secret, seen))}
        return json.dumps(words | changes).encode()

    @property
    def keys(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.pub"))

    def connection(self, file: Path) -> Connection:
        told = device_file(file)
        key = PrivateKey(Path(told["devices"][0]["key"]))
        return Connection(told["server"], Path(told["ca"]), key, Event(), lambda text: None)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.end()


def a_key(folder: Path) -> PrivateKey:
    folder.mkdir(exist_ok=True)
    return joining.key_at(folder / KEY)


# the holder of a token


def test_one_command_makes_a_device_whose_key_never_leaves_it(federation: Federation) -> None:
    shown: list[Any] = []
    made = federation.joined(agree=lambda proposal: bool(shown.append(proposal)) or True)
    folder = made.file.parent
    assert sorted(path.name for path in folder.iterdir()) == sorted([CA, POLICY, KEY, DEVICE])
    assert stat.S_IMODE((folder / KEY).stat().st_mode) == 0o600
    assert (folder / CA).read_bytes() == (federation.folder / "ca.pem").read_bytes()
    assert made.number == shown[0].place.number == 0
    assert shown[0].place.name == "hospital-a"
    assert shown[0].inspection.rows == (40, 0)
    connection = federation.connection(made.file)
    assert not connection.is_open("0123456789abcdef.0123456789abcdef"), "it is logged in, and asked of nothing"
    connection.close()
    assert federation.keys == ["hospital-a.pub"]
    private, secret = (folder / KEY).read_bytes(), JoinToken.read(federation.tokens[0]).secret
    kept = b"".join(path.read_bytes() for path in federation.folder.rglob("*") if path.is_file())
    marks = (private, private.splitlines()[3], secret, secret.hex().encode(), federation.tokens[0].encode())
    assert not [mark for mark in marks if mark in kept], "the server has neither the key nor the secret"


def test_the_policy_names_what_the_file_holds_and_allows_the_default(federation: Federation) -> None:
    odd = federation.place / "odd.npz"
    values = np.zeros((12, 2), dtype=np.float32)
    np.savez(odd, **{"blood pressure": values, 'a"b': values}, diagnosis=np.arange(12) % 2, note=np.arange(12))
    federation.data = odd
    made = federation.joined()
    rules = DevicePolicy.read(str(made.file.parent / POLICY))
    names = ("blood pressure", 'a"b')
    assert set(rules.egress) == {*names, "labels"}
    assert rules.allowance.label == ("diagnosis",)
    own = Policy.parse(rules.egress, names).for_client(names)
    assert own.table(names) == Policy().for_client(names).table(names)
    stricter = Policy.parse({**rules.egress, names[0]: {"server": []}}, names).for_client(names)
    assert not stricter.kinds("shared", "server"), "a row that the owner empties holds for the shared layers too"


def test_the_owner_sees_what_the_servers_recipe_would_send(tmp_path: Path) -> None:
    made, seen = Federation(tmp_path, RECIPE), list[Any]()
    try:
        made.joined(agree=lambda proposal: bool(seen.append(proposal)) or True)
        (tmp_path / "server" / "recipe.toml").write_text(RECIPE.replace('"fedavg"', '"nowhere.module:Mean"'))
        made.joined(1, "other", agree=lambda proposal: bool(seen.append(proposal)) or True)
    finally:
        made.end()
    assert {row.block for row in seen[0].inspection.planned if row.allowed} >= {"upper", "lower", "shared"}
    assert not seen[1].inspection.planned
    assert "[allow] imports" in seen[1].notes[-1], "code of the server is not imported to be shown"
    assert STAGE not in seen[1].notes[-1]


def test_an_owner_who_says_no_leaves_nothing_and_the_token_unused(federation: Federation) -> None:
    assert federation.joined(agree=lambda proposal: False) is None
    assert not (federation.place / "device").exists()
    assert federation.keys == []
    assert federation.joined() is not None


def test_nothing_is_written_over(federation: Federation) -> None:
    for name, link in itertools.product((CA, POLICY, KEY, DEVICE), (False, True)):
        folder = federation.place / f"{name}-{link}"
        folder.mkdir()
        if link:
            (folder / name).symlink_to(federation.place / "elsewhere")
        else:
            (folder / name).write_text("mine")
        with refuses(RecipeError, f"{name} already"):
            federation.joined(folder=folder.name)
        assert not (federation.place / "elsewhere").exists()
        assert [path.name for path in folder.iterdir()] == [name]
        assert link or (folder / name).read_text() == "mine"


def test_a_policy_of_the_owner_is_used_as_it_is(federation: Federation) -> None:
    own = federation.place / "own.toml"
    own.write_text("[egress.upper]\nserver = []\n")
    made = federation.joined(policy=own)
    assert not (made.file.parent / POLICY).exists()
    assert device_file(made.file)["devices"][0]["config"]["policy"] == str(own)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_call_that_breaks_off_goes_on_with_the_same_key(
    lost: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = Door.register

    def broken(door: Door, key: PrivateKey) -> None:
        if lost == "after":
            register(door, key)
        raise TransportError("the line broke")

    with monkeypatch.context() as patch:
        patch.setattr(Door, "register", broken)
        with refuses(TransportError, "line"):
            federation.joined()
    first = PrivateKey(federation.place / "device" / STAGE / KEY).fingerprint
    made = federation.joined()
    assert PrivateKey(made.file.parent / KEY).fingerprint == first
    assert federation.keys == ["hospital-a.pub"]
    assert not (made.file.parent / STAGE).exists()


@pytest.mark.parametrize("puts", range(4))
def test_a_full_disk_at_any_file_is_made_good_by_the_same_command(
    puts: int, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = joining._put, list[Path]()

    def full(source: Path, target: Path) -> None:
        if len(done) == puts:
            raise OSError(28, "No space left on device")
        done.append(target)
        put(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(joining, "_put", full)
        with refuses(OSError, "space"):
            federation.joined()
    federation.end()  # nothing is asked of the server again
    try:
        made = federation.joined()
    finally:
        federation.start()
    assert sorted(path.name for path in made.file.parent.iterdir()) == sorted([CA, POLICY, KEY, DEVICE])
    assert device_file(made.file)["devices"][0]["config"]["client"] == 0


def test_data_that_a_device_would_refuse_are_refused_before_the_server_hears_of_it(federation: Federation) -> None:
    federation.end()
    for name, values in (("words", np.array(["a", "b"] * 20)), ("split", None)):
        more = {"label": np.arange(40) % 2, "split": np.ones(40, dtype=int)} if values is None else {"label": values}
        np.savez(federation.place / f"{name}.npz", upper=np.zeros((40, 3), dtype=np.float32), **more)
    (federation.place / "table.csv").write_text("a,label\n1,0\n")
    (federation.place / "damaged.npz").write_text("no archive")
    for name in ("words.npz", "split.npz", "table.csv", "damaged.npz", "nowhere.npz"):
        federation.data = federation.place / name
        with refuses(DataError, name):
            federation.joined()
        assert not (federation.place / "device").exists()
    federation.start()


# tokens that do not do


@pytest.mark.parametrize("why", ["used", "late", "revoked", "unknown"])
def test_a_token_that_is_not_good_is_refused_in_a_sentence_and_leaves_nothing(why: str, federation: Federation) -> None:
    if why == "used":
        federation.joined(folder="first")
    elif why == "revoked":
        with registration.registered(federation.folder) as register:
            register.revoke("hospital-a")
    elif why == "late":
        with registration.registered(federation.folder) as register:
            register._rows.execute("UPDATE devices SET ends = ?", (time.time() - 1,))
    else:
        known = JoinToken.read(federation.tokens[0])
        federation.tokens[0] = JoinToken(known.address, known.authority, b"0" * 16).text()
    before = federation.keys
    with refuses(RecipeError, " ".join(WHY[why].split()[:3])):
        federation.joined()
    data, folder = federation.place / "mine.npz", federation.place / "device"
    with pytest.raises(SystemExit) as stop:
        main(("device", "join", federation.tokens[0], "--data", str(data), "--folder", str(folder), "--yes"))
    assert stop.value.code == 2
    assert federation.keys == before
    assert not folder.exists()


def test_any_slip_in_a_token_is_noticed() -> None:
    text = JoinToken("server.example.org:9092", bytes(range(32)), b"s" * 16).text()
    assert JoinToken.read(f"  {text[:40]}\n{text[40:]} ").address == "server.example.org:9092"
    draw = random.Random(1)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_ .!é"
    slips = [
        text[:place] + draw.choice(letters.replace(text[place], "")) + text[place + 1 :] for place in range(len(text))
    ]
    slips += [text[:-1], text[1:], text + "A", text[:20] + text[21] + text[20] + text[22:], "", text.lower()]
    for slip in slips:
        if "".join(slip.split()) != text:
            with pytest.raises(RecipeError):
                JoinToken.read(slip)


@pytest.mark.parametrize("address", ["a b:1", "x\ny:1", "host", "host:0", "h:99999", "\x1b[2J:1", ":9092"])
def test_no_token_brings_an_address_that_is_none(address: str) -> None:
    with pytest.raises(RecipeError):
        JoinToken.read(JoinToken(address, bytes(32), bytes(16)).text())


def test_a_token_of_another_server_tells_this_one_nothing(federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Federation(tmp_path / "b")
    other.end()
    known = JoinToken.read(other.tokens[0])
    federation.tokens[0] = JoinToken(f"127.0.0.1:{federation.port}", known.authority, known.secret).text()
    with refuses(TransportError, "not the server"):
        federation.joined()


def test_the_commands_end_with_a_sentence_and_an_exit_code(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(federation.place)

    def code(*words: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main(words)
        out = capsys.readouterr()
        assert "Traceback" not in out.err
        said = [line for line in out.err.splitlines() if not line.startswith("20")]  # without the log of the server
        assert not stop.value.code or said[0].startswith(("polyfed: ", "Usage: "))
        return int(stop.value.code or 0)

    token, more = federation.tokens[0], ("--data", "mine.npz", "--folder", "d")
    monkeypatch.setattr("sys.stdin", io.StringIO())  # no terminal
    assert code("device", "join", token[:-1], *more) == 2
    assert code("device", "join", token, *more) == 2, "nobody can say yes"
    assert code("device", "join", token, "--data", "nowhere.npz", "--yes") == 5
    assert code("device", "join", token, *more, "--yes") == 0
    assert code("device", "join", token, *more, "--yes") == 2, "the files are there"
    assert code("device", "join", token, "--data", "mine.npz", "--folder", "e", "--yes") == 2, "used"
    assert code("server", "init", "server", "--host", "127.0.0.1") == 2, "there is a server"
    (half := Path("half")).mkdir()
    (half / "ca.key").write_text("")
    assert code("server", "init", "half", "--host", "127.0.0.1") == 2, "an earlier command was cut off"
    assert [one.name for one in half.iterdir()] == ["ca.key"]
    assert code("server", "init", "new", "--host", "no host") == 2
    assert code("server", "init", "new", "--host", "localhost", "--name", "a", "--name", "a") == 2
    assert code("server", "init", "new", "--host", "localhost", "--name", "a", "--devices", "1") == 2
    assert not Path("new").exists()
    assert code("server", "token", "nowhere") == 2
    assert code("server", "token", "server", "--hours", "0") == 2
    assert code("server", "token", "server", "--number", "0") == 2, "device 0 has joined"
    assert code("server", "token", "server", "--address", "other.example.org:1") == 2, "not in the certificate"
    assert code("server", "token", "server") == 0
    assert code("server", "token", "server", "--list", "--json") == 0
    assert code("server", "revoke", "server", "nobody") == 2
    assert code("server", "revoke", "server", "0") == 0
    federation.end()
    assert code("device", "join", federation.tokens[1], "--data", "mine.npz", "--folder", "f", "--yes") == 6, "away"
    federation.start()
    assert not Path("f").exists()


# the register


def test_a_copy_of_the_folder_is_the_same_server_on_another_machine(federation: Federation) -> None:
    """What docs/operations.md says of a backup: devices, numbers and open tokens go along."""
    made = federation.joined()
    before = registration.devices(federation.folder)
    federation.end()
    subprocess.run(["cp", "-a", federation.folder, federation.place / "copy"], check=True)  # with its named pipe
    shutil.rmtree(federation.folder)
    federation.folder = federation.place / "copy"
    federation.start()
    assert registration.devices(federation.folder) == before
    device = federation.connection(made.file)
    device.is_open("0123456789abcdef.0123456789abcdef")  # which asks for a login
    device.close()
    federation.joined(1, "second")
    assert [row["state"] for row in registration.devices(federation.folder)] == ["joined", "joined"]


def test_a_revoked_device_is_refused_at_its_next_call_and_its_number_is_free(federation: Federation) -> None:
    made = federation.joined()
    device = federation.connection(made.file)
    device.is_open("0123456789abcdef.0123456789abcdef")
    with registration.registered(federation.folder) as register:
        assert register.revoke("0").state == "revoked"
    with refuses(TransportError, "refused the key"):
        device.is_open("0123456789abcdef.0123456789abcdef")
    device.close()
    assert registration.issue(federation.folder, "hospital-c", None).entry.number == 0


def test_a_key_whose_file_an_operator_deletes_is_revoked_too(federation: Federation) -> None:
    federation.joined()
    (federation.folder / "hospital-a.pub").unlink()
    assert [row["state"] for row in registration.devices(federation.folder)] == ["revoked", "open"]
    with refuses(RecipeError, "revoked"):
        federation.joined(folder="again")


def test_no_two_devices_have_one_number_name_or_key(federation: Federation, tmp_path: Path) -> None:
    made = federation.joined()
    for name, number, what in (("", 0, "number 0"), ("", 1, "number 1"), ("hospital-a", 7, "name hospital-a")):
        with refuses(RecipeError, what):
            registration.issue(federation.folder, name, number)
    (federation.folder / "by-hand.pub").write_bytes((federation.folder / "hospital-a.pub").read_bytes())
    with refuses(RecipeError, "another device"):
        registration.issue(federation.folder, "by-hand", None)
    with refuses(RecipeError, "already, under another"):
        federation.door(1).register(PrivateKey(made.file.parent / KEY))
    with registration.registered(federation.folder) as register:
        members = Membership(tmp_path, register.numbers)
        key = PrivateKey(made.file.parent / KEY).fingerprint
        assert "joined the server as client 0" in members._not_as_joined(1, key)
        assert "another key" in members._not_as_joined(0, "SHA256:other")
        assert not members._not_as_joined(0, key)
        assert not members._not_as_joined(5, "SHA256:other")


def test_no_name_of_a_device_is_a_path(federation: Federation) -> None:
    for name in ("../x", "a/b", ".hidden", "0", "-rf", "a b", "a\nb", "x" * 65, "a.pub", "é", "a\0b"):
        with refuses(RecipeError, "a name has"):
            registration.issue(federation.folder, name, None)
        with refuses(RecipeError, "no device"), registration.registered(federation.folder) as register:
            register.revoke(name if name != "0" else "../server")
    assert federation.keys == []


def test_only_the_operator_reads_the_register(federation: Federation) -> None:
    assert stat.S_IMODE((federation.folder / "devices.sqlite3").stat().st_mode) == 0o600
    (federation.place / "linked").mkdir()
    (federation.place / "linked" / "devices.sqlite3").symlink_to(federation.place / "elsewhere")
    with refuses(RecipeError, "cannot be used"):
        Register(federation.place / "linked")
    assert not (federation.place / "elsewhere").exists()
    (federation.place / "linked" / "devices.sqlite3").unlink()
    (federation.place / "linked" / "devices.sqlite3").write_text("no database, " * 100)
    with refuses(RecipeError, "cannot be used"):
        Register(federation.place / "linked")


# strangers


def test_of_many_who_hold_one_token_one_joins(federation: Federation) -> None:
    keys = [a_key(federation.place / str(number)) for number in range(6)]
    barrier, won, lost = threading.Barrier(len(keys)), list[str](), list[str]()

    def race(key: PrivateKey) -> None:
        door = federation.door()
        barrier.wait(20)
        try:
            door.register(key)
            won.append(key.fingerprint)
        except RecipeError as error:
            lost.append(str(error))

    threads = [Thread(target=race, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(won), len(lost)) == (1, 5)
    with registration.registered(federation.folder) as register:
        assert register.numbers() == {won[0]: 0}
    assert federation.keys == ["hospital-a.pub"]


def test_who_guesses_is_slowed_down_unheard_and_keeps_nobody_else_out(
    federation: Federation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    guesses = [json.dumps({"secret": os.urandom(16).hex()}).encode() for _ in range(int(hub.FAILED) + 5)]
    found = [federation.call(guess, "127.0.0.2") for guess in guesses]
    assert [status for status, _ in found] == [403] * int(hub.FAILED) + [429] * 5
    assert json.loads(found[0][1]) == {"refused": "unknown"}
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting for devices" not in line]
    assert not said, "a stranger writes no line of the log"
    good = json.dumps({"secret": JoinToken.read(federation.tokens[0]).secret.hex()}).encode()
    assert federation.call(good, "127.0.0.2")[0] == 429
    assert federation.call(good)[0] == 200
    monkeypatch.setattr(hub, "MOST_ADDRESSES", 3)
    for last in range(3, 9):
        federation.call(b"{}", f"127.0.0.{last}")
    assert len(federation.server.hub._failed) == 3


def test_a_recorded_call_registers_nothing_new(federation: Federation) -> None:
    body = federation.words(a_key(federation.place / "a"))
    first, again = federation.call(body), federation.call(body)
    assert first == again
    assert first[0] == 200
    with registration.registered(federation.folder) as register:
        register.revoke("0")
    assert json.loads(federation.call(body)[1]) == {"refused": "revoked"}
    assert federation.keys == []


def test_nobody_registers_a_key_that_he_does_not_hold_or_that_was_signed_for_another_server(
    federation: Federation,
) -> None:
    mine, other = a_key(federation.place / "a"), a_key(federation.place / "b")
    elsewhere = write_credentials(federation.place / "elsewhere", 0, ["127.0.0.1"]) / "server.pem"
    for body in (
        federation.words(mine, key=other.public),
        federation.words(mine, signature=""),
        federation.words(mine, signature="!!"),
        federation.words(mine, pem=elsewhere),
        federation.words(mine, secret=JoinToken.read(federation.tokens[1]).secret.hex()),
    ):
        assert federation.call(body)[0] == 400
    assert federation.keys == []


COMPRESSED = b"".join(
    len(part).to_bytes(4, "big") + part for part in (b"ecdsa-sha2-nistp384", b"nistp384", b"\2" + bytes(48))
)
KEYS = [
    "ecdsa-sha2-nistp384 " + base64.b64encode(COMPRESSED).decode(),
    "",
    "ssh-rsa AAAA",
    "ecdsa-sha2-nistp384 AAAA",
    "A" * 3000,
    "ecdsa-sha2-nistp384 " + base64.b64encode(os.urandom(60)).decode(),
]


BODIES = (
    [b"", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"secret": 7}', b'{"secret": "zz"}', b'{"secret": "\\u0000"}']
    + [json.dumps({"secret": "00" * 16, "key": key}).encode() for key in KEYS]
    + [json.dumps({"secret": "00" * 16, "key": [key]}).encode() for key in KEYS[:1]]
)


def test_a_call_that_is_none_is_refused(federation: Federation, capsys: Any) -> None:
    for number, body in enumerate(BODIES, start=2):
        assert federation.call(body, f"127.0.0.{number}")[0] in (400, 403), body
    assert federation.keys == []
    assert "a call failed" not in capsys.readouterr().err


def test_of_a_call_to_join_little_is_read(federation: Federation) -> None:
    assert federation.call(b"x" * (hub.LARGEST_LOGIN + 1))[0] == 413
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.pem"))
    plain = socket.create_connection(("127.0.0.1", federation.port), 10)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as line:
        line.sendall(b"POST /v1/join HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        with pytest.raises((OSError, AssertionError)):  # noqa: PT012  it may fail at any of the pieces
            for _ in range(100):
                line.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
                time.sleep(0.001)
            assert b" 413 " not in line.recv(2**16)


def test_a_key_is_written_without_what_stands_beside_it_and_through_no_link(federation: Federation) -> None:
    key = a_key(federation.place / "a")
    (federation.folder / "hospital-a.pub").symlink_to(federation.place / "elsewhere")
    assert json.loads(federation.call(federation.words(key))[1]) == {"refused": "name"}
    assert not (federation.place / "elsewhere").exists()
    (federation.folder / "hospital-a.pub").unlink()
    assert federation.call(federation.words(key, key=f"{key.public} root@x"))[0] == 200
    assert (federation.folder / "hospital-a.pub").read_text() == key.public
    assert not list(federation.folder.glob(".*.pub*")), "no drafts"


# a server that wants to harm the device


class Hostile:
    """An HTTPS server that answers as it likes, and hears what a device says."""

    def __init__(self, federation: Federation, pages: dict[str, Any], *, own: bool) -> None:
        folder = federation.place / "hostile"
        folder.mkdir()
        if own:
            authority, ca = _authority()
            key, certificate = _server(authority, ca, ["127.0.0.1"])
            from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

            (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
            (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
            _secret(folder / "server.key", key, PrivateFormat.PKCS8)
        else:
            folder = federation.folder
        self.heard: list[bytes] = []
        outer = self

        class Answers(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                outer.heard.append(self.requestline.encode() + self.rfile.read(length))
                found = pages.get(self.path, b"")
                status, text = found if isinstance(found, tuple) else (200, found)
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        known = JoinToken.read(federation.tokens[0])
        address = f"127.0.0.1:{self.server.server_address[1]}"
        federation.tokens[0] = JoinToken(address, known.authority, known.secret).text()
        self.secret = known.secret

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize("passes_on", [False, True])
def test_somebody_in_between_hears_no_secret(passes_on: bool, federation: Federation) -> None:
    folder = federation.folder if passes_on else federation.place / "hostile"
    pages: dict[str, Any] = {}
    hostile = Hostile(federation, pages, own=True)
    pages["/v1/authority"] = (folder / "ca.pem").read_bytes()
    try:
        with refuses(TransportError, "certificate is not" if passes_on else "not the server"):
            federation.joined()
    finally:
        hostile.end()
    assert hostile.heard == [b"GET /v1/authority HTTP/1.1"]
    assert not (federation.place / "device").exists()


ANSWERS = [
    b"",
    b"[]",
    b"{" * 5000,
    b'{"number": -1, "name": "a", "recipe": ""}',
    b'{"number": true, "name": "a", "recipe": ""}',
    b'{"number": 1, "name": "../../x", "recipe": ""}',
    b'{"number": 1, "name": "a\\nclient = 2", "recipe": ""}',
    b'{"number": 1, "name": "a", "recipe": 5}',
    b'{"number": 99999999999999999999, "name": "a", "recipe": ""}',
    (403, b'{"refused": "\\u001b[2J"}'),
    (403, b'{"refused": ["used"]}'),
    (302, b"elsewhere"),
    (500, b"\x1b[2J"),
    b" " * (calls.LARGEST_TOLD + 1),
]


def test_no_answer_of_a_server_ends_otherwise_than_in_a_sentence(federation: Federation) -> None:
    pages = {"/v1/authority": (federation.folder / "ca.pem").read_bytes()}
    hostile = Hostile(federation, pages, own=False)
    try:
        for pages["/v1/join"] in ANSWERS:
            with pytest.raises(PolyfedError) as found:
                federation.joined()
            assert str(found.value).isprintable()
            assert not (federation.place / "device").exists()
    finally:
        hostile.end()


def test_a_recipe_of_a_hostile_server_is_shown_and_nothing_else(federation: Federation) -> None:
    told = json.dumps({"number": 1, "name": "a", "recipe": "\x1b[2J = [" + "[" * 3000}).encode()
    pages = {"/v1/authority": (federation.folder / "ca.pem").read_bytes(), "/v1/join": told}
    hostile, seen = Hostile(federation, pages, own=False), list[Any]()
    try:
        assert federation.joined(agree=lambda proposal: bool(seen.append(proposal))) is None
    finally:
        hostile.end()
    assert "would refuse the recipe" in seen[0].notes[-1]


def test_a_server_that_drips_does_not_hold_the_device(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 2.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(federation.folder / "server.pem", federation.folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            plain, _ = listening.accept()
            with plain, suppress(OSError), context.wrap_socket(plain, server_side=True) as line:
                line.sendall(b"HTTP/1.1 200 OK\r\n")
                for number in range(90):
                    line.sendall(f"x-{number}: y\r\n".encode())
                    time.sleep(0.1)

        thread = Thread(target=drip, daemon=True)
        thread.start()
        known = JoinToken.read(federation.tokens[0])
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        begun = time.monotonic()
        with refuses(TransportError, "does not answer"):
            Door(JoinToken(address, known.authority, known.secret)).recognise()
        assert time.monotonic() - begun < 8
        thread.join(20)


def test_a_link_in_place_of_the_folder_of_preparation_is_not_followed(federation: Federation) -> None:
    (federation.place / "device").mkdir()
    (federation.place / "elsewhere").mkdir()
    (federation.place / "device" / STAGE).symlink_to(federation.place / "elsewhere")
    with refuses(RecipeError, "cannot be used"):
        federation.joined()
    assert not list((federation.place / "elsewhere").iterdir())


# clocks and ends


@pytest.mark.parametrize("days", [-2, 30])
def test_a_certificate_that_has_ended_is_told_with_this_devices_clock(days: int, federation: Federation) -> None:
    folder = federation.place / "old"
    folder.mkdir()
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    authority, ca = _authority()
    key, certificate = _server(authority, ca, ["127.0.0.1" if days < 0 else "127.0.0.9"], days)
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", key, PrivateFormat.PKCS8)
    server = HubServer(folder, "127.0.0.1", 0)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    digest = registration.hashlib.sha256((folder / "ca.pem").read_bytes()).digest()
    federation.tokens[0] = JoinToken(f"127.0.0.1:{server.socket.getsockname()[1]}", digest, b"s" * 16).text()
    try:
        with refuses(TransportError, "clock says" if days < 0 else "for this name"):
            federation.joined()
    finally:
        server.server.should_exit = True
        thread.join(20)


def test_a_device_tells_its_owner_of_clocks_and_of_the_end_of_the_certificate_once(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, notes = federation.joined(), list[str]()
    device = federation.connection(made.file)
    device.note = notes.append
    name = "0123456789abcdef.0123456789abcdef"
    device.is_open(name)
    assert not notes
    assert device.ends == pytest.approx(time.time() + 30 * connection.DAY, abs=100)
    monkeypatch.setattr(connection, "WARNED_DAYS", 31)
    monkeypatch.setattr(connection, "ahead_of", lambda date: 7300.0)
    for _ in range(3):
        device.is_open(name)
    assert len(notes) == 2
    assert "ends in 30.0 days" in notes[0]
    assert "2 hours ahead of" in notes[1]
    device._once("GET", "/v1/challenge")
    way = device._way
    device._once("GET", "/v1/challenge")
    assert device._way is way
    device._opened -= 2 * connection.DAY
    device._once("GET", "/v1/challenge")
    assert device._way is not way, "a new line shows whether the certificate has been renewed"
    device.close()


def test_a_clock_that_differs_is_told_and_keeps_nobody_from_joining(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "ahead_of", lambda date: -9 * connection.DAY)
    seen: list[Any] = []
    assert federation.joined(agree=lambda proposal: bool(seen.append(proposal)) or True) is not None
    assert "9 days behind" in seen[0].notes[-1]
    assert federation.server.register.entries()[0].state == JOINED
