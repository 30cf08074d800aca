"""The signed log of a device tells when it joined, and when its key and the server's certificate changed."""

import hashlib
import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.own_devices import InThreads, OwnDevices, own_devices
from engines.test_own_modes import method
from polyfed.cli import main
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.deploy.credentials import _resigned
from polyfed.deploy.device.agent import Device
from polyfed.deploy.device.contacts import FILE, Contact, note_contact
from polyfed.deploy.device.joining import renew
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.report import reconcile
from polyfed.transport.connection import Connection
from polyfed.transport.logins import PrivateKey

TEXT = method("fedavg").replace("personal_test = 0.3\n", "")


def told(state: Path) -> list[tuple[str, int, str, str]]:
    """The events in a device's log that are no enrolments."""
    rows = [json.loads(line) for line in (state / AUDIT).read_text().splitlines()]
    own = [row for row in rows if "seal" not in row and row.get("event") in ("joined", "renewed")]
    return [(row["event"], row["client"], row.get("device", ""), row["why"]) for row in own]


def again(federation: OwnDevices, client: int) -> None:
    """Let the next process of a device log in, which ends the present one."""
    one = federation.told["devices"][client]
    line = Connection(
        federation.told["server"], Path(federation.told["ca"]), PrivateKey(Path(one["key"])), Event(), lambda text: None
    )
    assert not line.is_open("0123456789abcdef.0123456789abcdef"), "it logs in"
    Device(line, one["config"], InThreads(), 2**29, lambda facts: None)._note_contact()  # type: ignore[arg-type]
    line.close()


def ran(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    assert not ended.value.code


def test_joining_and_renewals_are_signed_lines_that_show_tells(tmp_path: Path, capsys: Any) -> None:
    with own_devices(tmp_path, TEXT) as federation:
        federation.run()
        state, out = federation.state(1), federation.app / "run"
        authority = hashlib.sha256((federation.credentials / "ca.pem").read_bytes()).hexdigest()
        key = PrivateKey(federation.credentials / "node-1.key").fingerprint
        ((event, client, device, why),) = told(state)
        assert (event, client, device) == ("joined", 1, key)
        assert f"the server {federation.told['server']} of the authority {authority}" in why
        first = json.loads((state / AUDIT).read_text().splitlines()[0])
        assert first["event"] == "joined", "before anything leaves"
        (made,) = renew(tmp_path / "device.toml", 1)
        again(federation, 1)
        assert told(state)[1:] == [("renewed", 1, made.now, f"the key of this device; before: {made.before}")]
        again(federation, 1)
        assert len(told(state)) == 2, "a line for each change"
        states = [federation.state(number) for number in range(3)]
        assert reconcile(out, states).findings == ()
        path, _ = certify(out)
        assert not verify_certificate(path, run=out, logs=states).faults
    verify(state, state / PUBLIC_KEY)
    ran("audit-log", "show", state)
    table = capsys.readouterr().out
    assert table.count("renewed") == 1
    ran("audit-log", "show", state, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert [one["event"] for one in shown["events"]] == ["joined", "enrolled", "renewed"]
    ran("audit-log", "show", state, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert made.before in page
    assert authority in page


def contact(**changes: Any) -> Contact:
    facts = {"server": "s:1", "authority": "aa", "client": 2, "device": "SHA256:one", "certificate": "cc", "ends": 9e8}
    return Contact(**(facts | changes))


def test_each_change_is_one_line_and_none_is_none(tmp_path: Path) -> None:
    note_contact(tmp_path, contact())
    note_contact(tmp_path, contact())
    note_contact(tmp_path, contact(certificate="dd", ends=1e9))
    note_contact(tmp_path, contact(certificate="dd", ends=1e9, device="SHA256:two"))
    note_contact(tmp_path, contact(certificate="dd", ends=1e9, device="SHA256:two", authority="bb"))
    found = told(tmp_path)
    assert [(event, device) for event, _, device, _ in found] == [
        ("joined", "SHA256:one"),
        ("renewed", ""),
        ("renewed", "SHA256:two"),
        ("joined", "SHA256:two"),
    ]
    assert found[1][3] == "the server's certificate: now the certificate dd, valid until 2001-09-09"
    assert "authority bb" in found[3][3]
    assert verify(tmp_path, tmp_path / PUBLIC_KEY).seals == 4


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"server": 1}'])
def test_a_log_of_before_goes_on_and_says_so(damage: str, tmp_path: Path) -> None:
    note_contact(tmp_path, contact())
    (tmp_path / FILE).write_text(damage)
    note_contact(tmp_path, contact())
    assert ["earlier lines" in why for *_, why in told(tmp_path)] == [False, True]
    verify(tmp_path, tmp_path / PUBLIC_KEY)


def test_a_device_sees_that_the_servers_certificate_is_another(tmp_path: Path) -> None:
    with own_devices(tmp_path, TEXT) as federation:
        federation.run()
        _resigned(federation.credentials, ["127.0.0.1"])
        end, seen = 200, [*federation.server.seen]
        while federation.server.seen == seen and (end := end - 1):
            Event().wait(0.05)
        again(federation, 0)
        (_, (event, client, _, why)) = told(federation.state(0))
    assert (event, client) == ("renewed", 0)
    assert "the server's certificate: now" in why
