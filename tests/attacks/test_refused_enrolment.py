"""A server skips the enrolment and tries facts about the federation until the data of a device fits them."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.cli import main
from polyfed.core.system.files import AUDIT
from polyfed.engines.protocol import FAILED, REFUSED, Facts, RequestId, hello, versions
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.report import reconcile
from refusals import warned

POLICIES = {
    "no statistic": '[egress.shared]\nserver = ["parameters"]\n',
    "too few rows": "[limits]\nmin_rows = 1000\n",
}
"""Policies under which the device takes no part."""

STATE = "polyfed-state"

Shapes = dict[str, tuple[int, ...]]
GUESSES: list[tuple[Shapes, int]] = [
    ({"a": (16,), "b": (16,)}, 4),  # these are right
    ({"a": (16,), "b": (16,)}, 1),
    ({"a": (5,), "b": (16,)}, 4),
    ({"b": (16,)}, 4),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_that_takes_no_part_tells_no_server_whether_a_guess_is_right(policy: str, tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text(POLICIES[policy])
    said = [devices.handler(hello(), devices.configs[1]).header]
    about = {"task": "update", "seed": 0, "rounds": 2, "turn": 0, "modalities": ["a"], "kept": 0, "want": "ask"}
    for shapes, num_classes in GUESSES:
        facts = asdict(Facts(shapes, num_classes))
        header = RequestId("run", 1, 1, 0, 1).header(facts=facts, **versions(), **about)
        said.append(devices.handler(Packet(header), devices.configs[1]).header)
    assert {entry["verdict"] for entry in said} == {REFUSED}
    assert len({entry["reason"] for entry in said}) == 1, "the same answer to every guess"


def shown(log: Path, capsys: Any) -> list[tuple[Any, ...]]:
    """Verify a log, and return its events as `polyfed audit-log show` tells them."""
    with pytest.raises(SystemExit) as end:
        main(["audit-log", "show", str(log), "--json"])
    assert not end.value.code
    events = json.loads(capsys.readouterr().out)["events"]
    return [(row["event"], row.get("client"), row.get("run", ""), row["why"]) for row in events if "why" in row]


def test_what_a_device_refuses_is_in_its_signed_log_before_the_server_hears_of_it(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    state = devices.places[1] / STATE
    devices.handler(hello(), devices.configs[1])
    assert shown(state, capsys) == [("enrolled", 1, "", "scaffold over 2 rounds")]
    (devices.places[1] / "policy.toml").write_text(POLICIES["too few rows"])
    no_enrolment = devices.handler(hello(), devices.configs[1]).header
    about = {"task": "update", "seed": 0, "rounds": 2, "turn": 0, "modalities": ["a"], "kept": 0, "want": "ask"}
    header = RequestId("run-7", 1, 2, 0, 1).header(facts=asdict(Facts(*GUESSES[0])), **versions(), **about)
    no_reply = devices.handler(Packet(header), devices.configs[1]).header
    assert (no_enrolment["verdict"], no_reply["verdict"]) == (REFUSED, REFUSED)
    assert shown(state, capsys)[1:] == [
        ("refused", 1, "", no_enrolment["reason"]),
        ("refused", 1, "run-7", no_reply["reason"]),
    ]
    recipe = hashlib.sha256((devices.app / "recipe.toml").read_bytes()).hexdigest()
    rows = [json.loads(line) for line in (state / AUDIT).read_text().splitlines()]
    assert {row["recipe"] for row in rows if "why" in row} == {recipe}


def test_a_device_whose_log_is_full_takes_no_part_and_says_that_it_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text(POLICIES["too few rows"])

    def full(self: AuditLog, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AuditLog, "note", full)
    said = devices.handler(hello(), devices.configs[1]).header
    assert said["verdict"] == FAILED
    assert "its audit log cannot be written" in said["reason"]


def test_the_run_logs_who_enrolled_whom_it_refused_and_who_refused(tmp_path: Path, capsys: Any) -> None:
    recipe = RECIPE.replace("enrol_seconds = 2.0", 'enrol_seconds = 2.0\nmin_nodes = 1\non_refusal = "drop"')
    devices = Devices(tmp_path, recipe)
    (devices.places[1] / "policy.toml").write_text(POLICIES["too few rows"])
    devices.configs[2]["client"] = 0  # two devices with one number
    out, transport = tmp_path / "run", devices.transport()
    transport.joined = lambda: {"device 1": 1}
    devices.serve(out, transport)
    found = shown(out, capsys)
    events = [json.loads(line) for line in (out / AUDIT).read_text().splitlines()]
    enrolled = [row for row in events if row.get("event") == "enrolled" and "seal" not in row]
    assert {row["client"] for row in enrolled} == {0}
    assert all(row["device"] for row in enrolled)
    refused = sorted((client, why) for event, client, _, why in found if event == "refused")
    assert [client for client, _ in refused] == [0, 1]
    assert "client 0 belongs to the device" in refused[0][1]
    assert "min_rows" in refused[1][1]
    assert reconcile(out, [devices.places[0] / STATE]).findings == ()


def test_a_request_that_a_device_refuses_in_a_round_is_in_both_logs(tmp_path: Path, capsys: Any) -> None:
    recipe = RECIPE.replace("enrol_seconds = 2.0", 'enrol_seconds = 2.0\non_refusal = "drop"')
    devices = Devices(tmp_path, recipe)
    asked = list[int]()
    handler: Any = devices.handler

    class Strict:
        """The owner of device 1 forbids all once the device has enrolled."""

        def __call__(self, packet: Packet, config: Any) -> Packet:
            if packet.header.get("want") == "ask" and not asked:
                asked.append(1)
                (devices.places[1] / "policy.toml").write_text(POLICIES["too few rows"])
            answer: Packet = handler(packet, config)
            return answer

    devices.handler = Strict()
    out = tmp_path / "run"
    with warned("no usable reply"):
        devices.serve(out)
    server = [row for row in shown(out, capsys) if row[0] == "refused"]
    device = [row for row in shown(devices.places[1] / STATE, capsys) if row[0] == "refused"]
    assert server
    assert server == device, "the same requests, for the same reasons"
    assert {row[1] for row in server} == {1}
    found = reconcile(out, [place / STATE for place in devices.places])
    assert found.findings == ()
    assert any("refused" in remark for remark in found.remarks)
