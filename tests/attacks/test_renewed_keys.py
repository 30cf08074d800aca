"""Renewing the key of a device: whatever breaks off, and by thieves of the old key, strangers and other devices."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from attacks.test_joining import Federation
from engines.own_devices import OwnDevices, own_devices
from engines.test_own_modes import method
from polyfed.cli import main
from polyfed.core.errors import RecipeError, TransportError
from polyfed.core.system.files import AUDIT, MEMBERS, PUBLIC_KEY, ROUNDS
from polyfed.deploy.app_folder import write_app
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device import joining
from polyfed.deploy.device.joining import renew
from polyfed.deploy.server import registration
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.transport.connection import Connection
from polyfed.transport.logins import PrivateKey, renewal_text
from polyfed.transport.register_log import LOG
from polyfed.transport.tokens import RETIRED
from refusals import refuses


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.end()


class Thief:
    """Somebody with a copy of a device's key."""

    def __init__(self, federation: Federation, key: Path, copy: str = "stolen.key") -> None:
        self.federation, self.path = federation, federation.place / copy
        shutil.copy(key, self.path)
        self.line = Connection(
            f"127.0.0.1:{federation.port}",
            federation.folder / "ca.pem",
            PrivateKey(self.path),
            Event(),
            lambda text: None,
        )

    def gets_in(self) -> bool:
        try:
            return not self.line.is_open("0123456789abcdef.0123456789abcdef")
        except TransportError:
            return False
        finally:
            self.line.close()

    def call(self, **changes: Any) -> int:
        """Make a call to renew the key, of which parts are changed, and return the status."""
        _, told = self.line._once("GET", "/v1/challenge")
        seen: bytes = self.line._way.sock.getpeercert(binary_form=True)  # type: ignore[union-attr]
        new, challenge = changes.pop("new", self.line.key), changes.pop("challenge", told["challenge"])
        text = renewal_text(challenge, self.line.key.fingerprint, new.fingerprint, changes.pop("seen", seen))
        words = {"device": self.line.key.fingerprint, "challenge": challenge, "signature": self.line.key.sign(text)}
        words |= {"key": new.public, "proof": new.sign(text)} | changes
        self.words = {name: word for name, word in words.items() if word is not None}
        return self.again()

    def again(self) -> int:
        """Make the same call once more."""
        status, _ = self.line._once("POST", "/v1/renew", body=json.dumps(self.words).encode())
        self.line.close()
        return status


def a_key(federation: Federation, name: str) -> PrivateKey:
    return joining.key_at(federation.place / name)


def registered(federation: Federation) -> dict[str, str]:
    return {path.name: path.read_text() for path in federation.folder.glob("*.pub")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: Any) -> Iterator[OwnDevices]:
    recipe = method("scaffold").replace("rounds = 2", "rounds = 3")
    with own_devices(tmp_path_factory.mktemp("renewal"), recipe) as federation:
        yield federation


def test_a_key_is_renewed_in_the_middle_of_a_run_which_loses_nothing(toy: OwnDevices) -> None:
    """The device's process runs on, its number stays its own, and the certificate knows the new key and the old one."""
    path, rounds = toy.folder / "credentials" / "node-1.key", toy.app / "run" / ROUNDS
    old = PrivateKey(path)
    thread = Thread(target=toy.run)
    thread.start()
    while not rounds.exists() or not rounds.read_text():
        assert thread.is_alive()
    (made,) = renew(toy.folder / "device.toml", 1)
    thread.join()
    assert (made.before, made.now) == (old.fingerprint, PrivateKey(path).fingerprint)
    assert toy.threads[2].is_alive(), "the device"
    result = json.loads((toy.app / "run" / "result.json").read_text())
    assert (
        result["state_sha256"]
        == polyfed.run(toy.recipe, toy.folder / "one", engine="sequential").result["state_sha256"]
    )
    assert json.loads((toy.app / "run" / MEMBERS).read_text())["signed"]["1"] == made.now
    shutil.copy(toy.app / "run" / PUBLIC_KEY, toy.credentials / "run.pub")
    file, content = certify(toy.app / "run", keys=toy.credentials)
    assert content["clients"][1]["name"] == "node-1"
    renew(toy.folder / "device.toml", 1)
    told = verify_certificate(file, keys=toy.credentials, run=toy.app / "run", logs=[toy.state(1)])
    assert not told.faults, "a key that was retired since"
    assert not [remark for remark in told.remarks if "does not name" in remark]
    (toy.credentials / "run.pub").unlink()


def test_a_device_with_a_new_key_takes_part_in_the_next_run_under_its_number(toy: OwnDevices, tmp_path: Path) -> None:
    for _ in range(2):
        renew(toy.folder / "device.toml", 0)
    away = toy.server.hub.facts()["away"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(method("fedavg").replace("rounds = 2", "rounds = 1"))
    app = write_app(recipe, tmp_path / "app")
    assert toy.run(app)["rounds"] == 1
    key = PrivateKey(toy.folder / "credentials" / "node-0.key").fingerprint
    assert json.loads((app / "run" / MEMBERS).read_text())["clients"]["0"] == key
    assert not away


@pytest.mark.parametrize("lost", range(6))
def test_wherever_it_breaks_off_the_key_in_the_file_is_taken_and_the_same_command_goes_on(
    lost: int, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each of the calls, and before and after the new key takes its place."""
    file = federation.joined().file
    path, calls = file.parent / "node.key", list[str]()
    asked, rename = Connection.renew, Path.rename

    def breaks(step: str) -> None:
        if len(calls) == lost:
            raise TransportError("the line broke")
        calls.append(step)

    def renewing(line: Connection, new: PrivateKey | None = None) -> None:
        breaks("before a call")
        asked(line, new)
        breaks("after a call")

    def renaming(source: Path, target: Path) -> Path:
        if not source.name.endswith("polyfed-next"):
            return rename(source, target)
        breaks("before the place is taken")
        made = rename(source, target)
        breaks("after the place is taken")
        return made

    before = PrivateKey(path).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "renew", renewing)
        patch.setattr(Path, "rename", renaming)
        with suppress(TransportError):
            renew(file)
    assert len(calls) == lost
    if lost % 2:  # the next use of the key may be by the device
        assert Thief(federation, path).gets_in()
    (made,) = renew(file)
    assert made.before == before
    assert made.now == PrivateKey(path).fingerprint != before
    assert sorted(one.name for one in file.parent.iterdir()) == ["ca.pem", "device.toml", "node.key", "policy.toml"]
    assert federation.keys == ["hospital-a.pub"]
    assert Thief(federation, path).gets_in()


def test_the_old_key_and_what_it_has_opened_end_with_the_first_use_of_the_new_one(federation: Federation) -> None:
    file = federation.joined().file
    thief = Thief(federation, file.parent / "node.key")
    assert thief.gets_in()
    token, said = thief.line._token, list[Any]()
    waiting = Thread(target=lambda: said.append(thief.line._once("GET", "/v1/next", patient=True)[0]))
    waiting.start()
    while federation.server.hub._calls.total() < 1:
        pass
    renew(file)
    waiting.join(20)
    assert said == [401], "its call that waited"
    assert not thief.gets_in()
    assert federation.server.hub.logins.device_of(token) == ""
    assert thief.call(new=a_key(federation, "his.key")) == 403
    retired = next((federation.folder / RETIRED).glob("*.pub"))
    shutil.copy(retired, federation.folder / "again.pub")  # by an operator, or from a copy
    federation.server.hub.logins.keys.look()
    assert not thief.gets_in()
    (federation.folder / "again.pub").unlink()
    (federation.place / "other").mkdir()
    shutil.copy(thief.path, federation.place / "other" / "stolen")
    door = federation.door(1)
    with refuses(RecipeError, "key of this"):
        door.register(PrivateKey(federation.place / "other" / "stolen"))
    assert federation.keys == ["hospital-a.pub"]


def changed(federation: Federation, thief: Thief) -> dict[str, Callable[[], int]]:
    """Calls by which somebody would give a device a key, and each lacks something."""
    mine, other = a_key(federation, "mine.key"), a_key(federation, "other.key")
    _, told = thief.line._once("GET", "/v1/challenge")
    noise = base64.b64encode(b"0" * 96).decode()
    return {
        "no signature of the old key": lambda: thief.call(new=mine, signature=noise),
        "signed by the new key only": lambda: thief.call(new=mine, signature=mine.sign(b"")),
        "the name of another device": lambda: thief.call(new=mine, device=other.fingerprint),
        "for another server": lambda: thief.call(new=mine, seen=b"another certificate"),
        "another key than was signed": lambda: thief.call(new=mine, key=other.public),
        "the new key is somebody else's": lambda: thief.call(new=mine, proof=noise),
        "no proof": lambda: thief.call(new=mine, proof=None),
        "a challenge of nobody": lambda: thief.call(new=mine, challenge="1.0-" + "0" * 32 + "-" + "0" * 64),
        "a challenge that was used": lambda: (
            thief.call(new=mine, challenge=told["challenge"], proof=noise),
            thief.again(),
        )[1],
        "no key": lambda: thief.call(new=mine, key="ssh-rsa AAAA"),
        "a long key": lambda: thief.call(new=mine, key=f"{mine.public} {'x' * 2000}"),
    }


def test_nobody_gives_a_device_a_key_without_both_keys_and_a_fresh_challenge(federation: Federation) -> None:
    file = federation.joined().file
    thief = Thief(federation, file.parent / "node.key")
    before = registered(federation)
    for how, call in changed(federation, thief).items():
        assert call() in (400, 403), how
        assert registered(federation) == before, how
    assert thief.gets_in()


def test_no_key_is_that_of_two_devices(federation: Federation) -> None:
    one, two = federation.joined().file, federation.joined(1, "second").file
    before = registered(federation)
    mine = Thief(federation, one.parent / "node.key")
    for new in (mine.line.key, PrivateKey(two.parent / "node.key")):
        assert mine.call(new=new) == 409
    first = PrivateKey(two.parent / "node.key")
    shutil.copy(two.parent / "node.key", federation.place / "second-old.key")
    renew(two)
    assert mine.call(new=first) == 409, "nor a retired one"
    assert registered(federation)["hospital-a.pub"] == before["hospital-a.pub"]


def test_a_key_that_a_thief_has_planted_is_out_after_a_renewal_and_after_a_revocation(federation: Federation) -> None:
    file = federation.joined().file
    thief = Thief(federation, file.parent / "node.key")
    planted = a_key(federation, "planted.key")
    assert thief.call(new=planted) == 200
    assert set(federation.keys) == {"hospital-a.pub", "hospital-a.next.pub"}
    assert [row["name"] for row in registration.devices(federation.folder)] == ["hospital-a", "hospital-b"]
    renew(file)
    assert not Thief(federation, federation.place / "planted.key", "copy.key").gets_in()
    assert federation.keys == ["hospital-a.pub"]
    again = Thief(federation, file.parent / "node.key", "again.key")
    assert again.call(new=a_key(federation, "next.key")) == 200
    with registration.registered(federation.folder) as register:
        register.revoke("hospital-a")
    federation.server.hub.logins.keys.look()
    assert federation.keys == []
    for name in ("again.key", "next.key"):
        assert not Thief(federation, federation.place / name, f"revoked-{name}").gets_in()


def test_a_device_that_renews_without_end_must_wait(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.transport.logins.MOST_LOGINS", 3)
    thief = Thief(federation, federation.joined().file.parent / "node.key")
    found = [thief.call(new=a_key(federation, f"{number}.key")) for number in range(5)]
    assert found == [200, 200, 200, 429, 429]


def test_a_device_that_renews_each_new_key_fills_neither_log_nor_folder(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key of the chain is another one, and the server knows that they are one device's."""
    monkeypatch.setattr("polyfed.transport.hub.RENEWALS", 3.0)
    thief, log = Thief(federation, federation.joined().file.parent / "node.key"), federation.folder / LOG / AUDIT

    def renewed(name: str) -> int:
        new = a_key(federation, f"{name}.key")
        if (status := thief.call(new=new)) == 200:
            thief.line.key = new
        return status

    assert [renewed(str(number)) for number in range(3)] == [200] * 3
    size, known = len(log.read_bytes()), registered(federation)
    assert renewed("refused") == 429
    assert renewed("refused again") == 429
    assert not registered(federation).keys() - known.keys()
    grown = log.read_bytes()[size:]
    assert len(grown.splitlines()) == 2, "the first use of the third key, and its seal"
    assert b'"event":"renewing"' not in grown
    other = Thief(federation, federation.joined(1, "second").file.parent / "node.key", "second.key")
    assert other.call(new=a_key(federation, "second-new.key")) == 200, "another device is not kept out"
    monkeypatch.setattr("polyfed.transport.hub.RENEWAL_SECONDS", 1e-3)
    assert renewed("after a while") == 200


def test_the_command(federation: Federation, capsys: Any) -> None:
    file = federation.joined().file
    key = PrivateKey(file.parent / "node.key").fingerprint

    def said(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        told = capsys.readouterr()
        return int(end.value.code or 0), " ".join((told.out or told.err).split())

    code, told = said("device", "renew", file, "--client", 7)
    assert (code, "no device with the number 7" in told) == (2, True)
    code, told = said("device", "renew", file, "--json")
    assert (code, json.loads(told)["renewed"][0]["before"]) == (0, key)
    elsewhere = federation.place / "etc.key"
    shutil.copy(file.parent / "node.key", elsewhere)  # systemd gives the service a copy
    assert said("device", "renew", file, "--key", elsewhere)[0] == 0
    assert Thief(federation, elsewhere).gets_in()
    assert not Thief(federation, file.parent / "node.key").gets_in()
    code, told = said("device", "renew", file)
    assert (code, "the server refused the key" in told) == (2, True)
    write_credentials(federation.place / "other", 0)
    shutil.copy(federation.place / "other" / "ca.pem", file.parent / "ca.pem")
    code, told = said("device", "renew", file)
    assert (code, "does not fit" in told) == (6, True)
