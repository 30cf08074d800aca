"""A device that was away at the end of a run signs when it is back; nobody signs for another, twice, or too late."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.own_devices import InThreads, OwnDevices
from engines.test_own_modes import method
from polyfed.core.errors import RecipeError
from polyfed.core.system.files import MEMBERS, RECEIPTS
from polyfed.deploy import handlers
from polyfed.deploy.device.agent import Device
from polyfed.deploy.device.joining import renew
from polyfed.deploy.server import countersignatures, late_receipts, server
from polyfed.deploy.server.late_receipts import FOLDER, LateReceipts, collect, read
from polyfed.engines.protocol import SIGNED
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.keys import tie
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.receipts import receipt
from polyfed.transport import hub
from polyfed.transport.connection import Connection
from polyfed.transport.logins import PrivateKey
from refusals import refuses

AWAY = 2
"""The client whose device goes at the end of the run."""


class Federation(OwnDevices):
    """Three devices, of which one can go and come back."""

    def leave(self) -> None:
        device = self.devices[AWAY]
        device.connection.stop = Event()
        device.connection.stop.set()
        self.until(lambda: len(self.server.hub.online) == 2)

    def back(self) -> None:
        one, stop = self.told["devices"][AWAY], Event()
        connection = Connection(
            self.told["server"], Path(self.told["ca"]), PrivateKey(Path(one["key"])), stop, lambda text: None
        )
        self.devices[AWAY] = Device(connection, one["config"], InThreads(), self.told["limit"], lambda facts: None)  # type: ignore[arg-type]
        self.threads.append(Thread(target=self.devices[AWAY].run, daemon=True))
        self.threads[-1].start()
        self.until(lambda: len(self.server.hub.online) == 3)

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end
            time.sleep(0.05)

    @property
    def out(self) -> Path:
        return self.app / "run"

    @property
    def run_name(self) -> str:
        name: str = json.loads((self.out / "run.json").read_text())["run"]
        return name

    def signed(self) -> set[str]:
        return set(json.loads((self.out / RECEIPTS).read_text()))

    def faults(self, certificate: Path) -> list[str]:
        """What a verifier finds who has the keys, the files of the run and the logs of the devices."""
        logs = [self.state(client) for client in range(3)]
        return verify_certificate(certificate, self.credentials, self.out, logs).faults

    def ended(self) -> None:
        for device in self.devices:
            device.connection.stop.set()
        super().ended()


@pytest.fixture(scope="module")
def once(tmp_path_factory: Any) -> Iterator[Federation]:
    """A run at whose end a device has gone."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("late")
    patch.setattr(hub, "AWAY_SECONDS", 0.2)
    patch.setattr(hub, "WAIT_SECONDS", 1.0)  # so that a device that leaves does so at once
    patch.setattr(countersignatures, "AWAY_SECONDS", 0.2)
    made = Federation(folder, method("fedavg").replace("personal_test = 0.3\n", ""))
    made.began()

    def leaving(*args: Any) -> None:
        made.leave()
        countersignatures.collect_receipts(*args)

    patch.setattr(server, "collect_receipts", leaving)
    try:
        made.run()
        (made.credentials / "run.pub").write_bytes((made.out / "audit-key.pub").read_bytes())
        yield made
    finally:
        made.ended()
        patch.undo()


@pytest.fixture
def federation(once: Federation) -> Iterator[Federation]:
    """That run, which each test finds as it was at its end."""
    kept = {path: path.read_bytes() for path in (once.out / RECEIPTS, once.out / MEMBERS, record(once))}
    once.back()
    yield once
    for path, content in kept.items():
        path.write_bytes(content)
    once.leave()


def record(federation: Federation) -> Path:
    return federation.credentials / FOLDER / f"{federation.run_name}.json"


def changed(federation: Federation, **changes: Any) -> None:
    record(federation).write_text(json.dumps(json.loads(record(federation).read_text()) | changes))


def answering(monkeypatch: Any, answer: Callable[[], dict[str, Any]]) -> None:
    monkeypatch.setattr(handlers, "_countersigned", lambda packet, node: Packet({"verdict": SIGNED, **answer()}))


def test_who_was_away_signs_later_and_both_certificates_hold(federation: Federation, monkeypatch: Any) -> None:
    assert federation.signed() == {"0", "1"}
    before, content = certify(federation.out, federation.folder / "before.json", federation.credentials)
    assert [one["receipt"] is None for one in content["clients"]] == [False, False, True]
    asked = list[list[str]]()
    monkeypatch.setattr(late_receipts, "_started", lambda words: asked.append(words))
    late = LateReceipts(federation.credentials)
    late.look()
    ((*_, run, number),) = asked
    late.look()
    assert len(asked) == 1, "it has its pause, whatever the process does"
    assert collect(federation.credentials, run, [int(number)]) == []
    assert federation.signed() == {"0", "1", "2"}
    assert not record(federation).exists()
    after, content = certify(federation.out, federation.folder / "after.json", federation.credentials)
    assert all(one["receipt"] for one in content["clients"])
    assert federation.faults(before) == federation.faults(after) == []
    remarks = verify_certificate(before, None, federation.out).remarks
    assert any("came after the certificate: clients 2" in one for one in remarks)
    late.queue.close()


def test_an_earlier_certificate_tells_what_was_changed_in_later_receipts(federation: Federation) -> None:
    before, _ = certify(federation.out, federation.folder / "before.json", federation.credentials)
    collect(federation.credentials, federation.run_name, [AWAY])
    path, text = federation.out / RECEIPTS, (federation.out / RECEIPTS).read_text()
    told = json.loads(text)
    last = told["2"]
    for changed in (
        text.replace("\n", "\n ", 1),
        json.dumps({"2": last, **{name: one for name, one in told.items() if name != "2"}}, indent=1).replace("2", "1"),
        json.dumps(told | {"2": last | {"signature": "00" * 64}}, indent=1),
        json.dumps(told | {"2": {**last, "receipt": {**last["receipt"], "rows": 1}}}, indent=1),
        json.dumps(told | {"2": told["1"]}, indent=1),
        json.dumps(told | {"2": {}}, indent=1),
        json.dumps(told | {"3": last}, indent=1),
        json.dumps({"0": told["0"], "2": last}, indent=1),
    ):
        path.write_text(changed)
        assert federation.faults(before), changed[-400:]


def test_nobody_comes_and_a_sentence_ends_the_wait(federation: Federation, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(late_receipts, "_started", lambda words: pytest.fail("nobody is asked any more"))
    before = (federation.out / RECEIPTS).read_bytes()
    changed(federation, until=time.time() - 1)
    assert collect(federation.credentials, federation.run_name, [AWAY]) == []
    late = LateReceipts(federation.credentials)
    late.look()
    late.queue.close()
    assert not record(federation).exists()
    assert (federation.out / RECEIPTS).read_bytes() == before
    assert "2 have not signed the run" in caplog.text
    assert "certif" in caplog.text


def test_a_receipt_of_another_run_client_or_device_is_left_out(federation: Federation, monkeypatch: Any) -> None:
    before, state, run = (federation.out / RECEIPTS).read_bytes(), federation.state(AWAY), federation.run_name
    other = federation.folder / "other"
    AuditLog(other).prepare()
    tie(other, PrivateKey(federation.credentials / "node-1.key"))
    unanswered = json.loads(before)["1"]["receipt"]["unanswered"]
    for name, answer in {
        "another run": lambda: receipt(AuditLog(state), "another", AWAY, [], ""),
        "replayed of another client": lambda: json.loads(before)["1"],
        "another client": lambda: receipt(AuditLog(state), run, 1, unanswered, ""),
        "another device": lambda: receipt(AuditLog(other), run, AWAY, unanswered, ""),
        "forged": lambda: receipt(AuditLog(state), run, AWAY, [], "") | {"signature": "00" * 64},
        "more left out": lambda: receipt(AuditLog(state), run, AWAY, [(1, 0)], ""),
        "none": dict[str, Any],
    }.items():
        answering(monkeypatch, answer)
        assert collect(federation.credentials, run, [AWAY]) == [AWAY], name
        assert (federation.out / RECEIPTS).read_bytes() == before, name
        assert read(federation.credentials, run), f"{name}: it may still sign"


def test_a_receipt_that_is_there_stays_whatever_comes_later(federation: Federation) -> None:
    kept, run = record(federation).read_bytes(), federation.run_name
    collect(federation.credentials, run, [AWAY])
    before = (federation.out / RECEIPTS).read_bytes()
    record(federation).write_bytes(kept)  # as after a crash between the two files
    time.sleep(1.1)  # a receipt names the second
    assert collect(federation.credentials, run, [AWAY]) == []
    assert (federation.out / RECEIPTS).read_bytes() == before
    assert collect(federation.credentials, run, [AWAY]) == [], "nobody is owed any more"


def test_a_run_that_has_gone_on_asks_at_its_next_end(federation: Federation) -> None:
    before = (federation.out / RECEIPTS).read_bytes()
    changed(federation, rows=1)
    with refuses(RecipeError, "gone on"):
        collect(federation.credentials, federation.run_name, [AWAY])
    assert not record(federation).exists()
    assert (federation.out / RECEIPTS).read_bytes() == before


def test_a_device_that_has_renewed_its_key_signs_with_the_new_one(federation: Federation) -> None:
    before, content = certify(federation.out, federation.folder / "before.json", federation.credentials)
    (made,) = renew(federation.folder / "device.toml", AWAY)
    federation.until(lambda: len(federation.server.hub.online) == 3)
    assert collect(federation.credentials, federation.run_name, [AWAY]) == []
    after, again = certify(federation.out, federation.folder / "after.json", federation.credentials)
    assert (content["clients"][AWAY]["device"], again["clients"][AWAY]["device"]) == (made.before, made.now)
    assert federation.faults(before) == federation.faults(after) == []


@pytest.mark.parametrize(
    "text", ["", "{", '{"run": "other"}', "[]", '{"run": 3, "out": "/", "recipe": "", "until": 9}']
)
def test_a_damaged_record_is_a_sentence(text: str, federation: Federation, caplog: Any) -> None:
    record(federation).write_text(text)
    late = LateReceipts(federation.credentials)
    late.look()
    late.look()
    late.queue.close()
    assert caplog.text.count("is damaged") == 1
    assert late_receipts.main(federation.credentials, federation.run_name, [AWAY]) == 1
    record(federation).write_text(text)


def test_the_record_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    with refuses(ValueError, "no name"):
        read(tmp_path / FOLDER, "../secret")
    assert (tmp_path / "secret.json").exists()
