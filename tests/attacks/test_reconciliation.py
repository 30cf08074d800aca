"""Whoever removes, adds or changes rows of the server's log or of a device's, chained anew or not, is found out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.cli import main
from polyfed.core.errors import DataError, TransportError
from polyfed.core.system.files import AUDIT, EGRESS, PUBLIC_KEY, ROUNDS
from polyfed.engines.protocol import ASK, FAILED, RequestId, reason
from polyfed.experiment.running import checkpoint
from polyfed.privacy.egress.audit_log import log as audit_log
from polyfed.privacy.egress.audit_log.log import HEAD, PRIVATE_KEY
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.report import reconcile, write_report
from refusals import refuses


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    """A run of two rounds: the server's folder `run`, devices in `nodes/<k>/polyfed-state`."""
    folder: Path = tmp_path_factory.mktemp("run")
    Devices(folder).serve(folder / "run")
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def states(folder: Path) -> list[Path]:
    return [folder / "nodes" / str(client) / "polyfed-state" for client in range(3)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines about messages, with their seals."""
    return [row for line in (folder / AUDIT).read_text().splitlines() if "event" not in (row := json.loads(line))]


def forged(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], key_kept: bool = True) -> None:
    """Write a log anew, its rows changed, its chain and signatures whole: what the owner of the log can do."""
    rows = change([row for row in rows_of(folder) if "seal" not in row])
    for name in (AUDIT, HEAD, *(() if key_kept else (PRIVATE_KEY, PUBLIC_KEY))):
        (folder / name).unlink()
    log = audit_log.AuditLog(folder)
    if key_kept:
        log._write_head(audit_log.Head(), audit_log.private_key(folder / PRIVATE_KEY))
    plain = [{key: value for key, value in row.items() if key not in ("time", "previous")} for row in rows]
    log._add(plain, {"run": plain[0]["run"]})
    assert verify(folder).rows == len(rows)


def found(folder: Path) -> str:
    return "\n".join(reconcile(folder / "run", states(folder)).findings)


def test_logs_of_an_honest_run_agree_and_the_report_says_so(finished: Path, capsys: Any) -> None:
    result = reconcile(finished / "run", states(finished))
    assert result.findings == ()
    rows = rows_of(finished / "run")
    assert json.loads((finished / "run" / AUDIT).read_text().splitlines()[0])["previous"] == audit_log.START
    assert all(row["time"].endswith("+00:00") for row in rows)
    booked = [row for row in rows if "seal" not in row]
    assert all(len(row["sha256"]) == 64 for row in booked)
    assert all(("device_seal" in row) == (row["destination"] == "server") for row in booked)
    assert {f"client {client}" for client in range(3)} <= {text.split(":")[0] for text in result.remarks}
    agreed = sum(int(text.split()[2]) for text in result.remarks if text.endswith("rows agree"))
    assert agreed == len(booked)
    with pytest.raises(SystemExit) as stop:
        main(("audit-log", "verify", str(finished / "run")))
    assert not stop.value.code
    with pytest.raises(SystemExit) as stop:
        main(("audit-log", "reconcile", str(finished / "run"), *map(str, states(finished))))
    assert not stop.value.code
    assert "the audit logs agree" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(("audit-log", "reconcile", str(finished / "run"), *map(str, states(finished)), "--json"))
    assert json.loads(capsys.readouterr().out) == {"findings": [], "remarks": list(result.remarks)}
    assert "The audit logs agree." in write_report(finished / "run", device_logs=states(finished)).read_text()


def without_third(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for number, row in enumerate(rows) if number % 3]


def invented(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reply that no device gave."""
    up = next(row for row in rows if row.get("destination") == "server")
    return [*rows, up | {"sha256": "0f" * 32}]


def other_content(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | ({"sha256": "0f" * 32} if number == 5 else {}) for number, row in enumerate(rows)]


def smaller(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"bytes": 1} for row in rows]


CHANGES = {
    "rows removed": without_third,
    "a reply invented": invented,
    "another content": other_content,
    "fewer bytes": smaller,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_servers_log_written_anew_does_not_agree_with_the_devices(change: str, copied: Path) -> None:
    forged(copied / "run", CHANGES[change])
    rows = [row for row in rows_of(copied / "run") if "seal" not in row]
    extra = ("time", "previous", "sha256", "device_seal")
    plain = [{key: value for key, value in row.items() if key not in extra} for row in rows]
    (copied / "run" / EGRESS).write_text("".join(json.dumps(row) + "\n" for row in plain))
    told = found(copied)
    assert "client" in told
    assert ("the server's log lacks" in told) or ("its log lacks" in told)


@pytest.mark.parametrize("change", ["rows removed", "another content", "fewer bytes"])
@pytest.mark.parametrize("key_kept", [True, False])
def test_a_devices_log_written_anew_lacks_the_seals_that_its_replies_carried(
    change: str, key_kept: bool, copied: Path
) -> None:
    state = states(copied)[1]
    forged(state, CHANGES[change], key_kept)
    told = found(copied)
    assert "client 1: its log lacks" in told
    assert "seals that its replies carried are not in" in told
    assert "client 0" not in told


def test_rows_removed_from_the_ledger_are_told_by_the_report(copied: Path, capsys: Any) -> None:
    ledger = copied / "run" / EGRESS
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:4] + lines[7:]))
    assert found(copied) == f"{ledger} lacks 3 rows of the audit log: it was changed, or cut off"
    assert "lacks 3 rows of the audit log" in write_report(copied / "run").read_text()
    ledger.write_text("".join([*lines, lines[0]]))
    assert found(copied) == f"{ledger} has 1 rows that the audit log lacks: it was changed, or cut off"
    with pytest.raises(SystemExit) as stop:
        main(("audit-log", "reconcile", str(copied / "run")))
    assert stop.value.code == 5
    assert "that the audit log lacks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(("audit-log", "reconcile", str(copied / "run"), "--json"))
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "DataError"


@pytest.mark.parametrize(
    "damage", ["XX", "[1, 2]", "3", "[" * 100_000, ""], ids=["text", "list", "number", "deep", "empty"]
)
def test_a_damaged_line_of_the_ledger_is_a_finding_and_ends_no_command_with_a_traceback(
    damage: str, copied: Path, capsys: Any
) -> None:
    ledger = copied / "run" / EGRESS
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([lines[0], f"{damage}\n", *lines[2:]]))
    result = reconcile(copied / "run", states(copied))
    assert len(result.findings) == 2
    assert result.findings[0].startswith(f"{ledger}, line 2 is damaged: ")
    assert result.findings[1] == f"{ledger} lacks 1 rows of the audit log: it was changed, or cut off"
    with pytest.raises(SystemExit) as stop:
        main(("audit-log", "reconcile", str(copied / "run")))
    assert stop.value.code == 5
    assert "line 2 is damaged" in " ".join(capsys.readouterr().err.split())


def test_many_damaged_lines_of_the_ledger_are_counted(copied: Path) -> None:
    ledger = copied / "run" / EGRESS
    ledger.write_text(ledger.read_text() + "XX\n" * 30)
    findings = reconcile(copied / "run").findings
    assert len(findings) == 6
    assert findings[-1] == f"{ledger}: 25 more lines are damaged"


@pytest.mark.parametrize("whose", ["run", "nodes/1/polyfed-state"])
def test_a_broken_chain_is_told_by_the_report(whose: str, copied: Path) -> None:
    path = copied / whose / AUDIT
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], *lines[4:]]))
    told = found(copied)
    assert f"{path} line 4 does not follow from line 3" in told
    page = write_report(copied / "run", device_logs=states(copied)).read_text()
    assert "line 4 does not follow from line 3" in page
    assert "The audit logs agree." not in page


def test_a_log_that_is_gone_is_a_finding(copied: Path) -> None:
    (copied / "run" / AUDIT).unlink()
    assert "holds no audit.jsonl" in found(copied)
    assert "holds no audit.jsonl" in write_report(copied / "run").read_text()


def test_a_line_nested_too_deeply_is_named_and_ends_no_command_with_a_traceback(copied: Path) -> None:
    path = copied / "run" / AUDIT
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "[" * 100_000 + "\n", *lines[1:]]))
    assert "line 2 cannot be read" in found(copied)


@pytest.mark.parametrize("key", ["round", "ask", "client"])
def test_a_row_at_infinity_and_a_missing_client_without_a_number_end_no_command_with_a_traceback(
    key: str, copied: Path
) -> None:
    path = copied / "run" / AUDIT
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], json.dumps(json.loads(lines[1]) | {key: float("inf")}) + "\n", *lines[2:]]))
    rounds = copied / "run" / ROUNDS
    rows = [json.loads(line) | {"missing": {"nobody": "lost"}} for line in rounds.read_text().splitlines()]
    rounds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "does not follow from line" in found(copied)


class Killed(BaseException):
    """Ends the server in place of writing a checkpoint."""


@pytest.mark.parametrize(("dies", "resumed"), [(1, -1), (2, 1)])
def test_a_run_that_was_killed_and_went_on_keeps_its_chain_and_agrees(
    dies: int, resumed: int, tmp_path: Path, monkeypatch: Any
) -> None:
    devices, save = Devices(tmp_path), checkpoint.save

    def dying(folder: Path, round: int, *rest: Any) -> None:
        if round == dies and folder.parent.name == "run":
            raise Killed
        save(folder, round, *rest)

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(Killed):
        devices.serve(tmp_path / "run")
    before = (tmp_path / "run" / AUDIT).read_bytes()
    monkeypatch.setattr(checkpoint, "save", save)
    devices.serve(tmp_path / "run")
    assert (tmp_path / "run" / AUDIT).read_bytes().startswith(before), "nothing is removed: it had crossed"
    assert [row["resumed_after"] for row in rows_of(tmp_path / "run") if "resumed_after" in row] == [resumed]
    result = reconcile(tmp_path / "run", states(tmp_path))
    assert result.findings == ()
    assert verify(tmp_path / "run").rows > len((tmp_path / "run" / EGRESS).read_text().splitlines())


def test_a_full_disk_of_the_server_leaves_no_half_of_a_round(tmp_path: Path, monkeypatch: Any) -> None:
    devices, sync = Devices(tmp_path), audit_log.sync

    def full(path: Path) -> None:
        if path == tmp_path / "run" / AUDIT and b'"round":2' in path.read_bytes():
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(audit_log, "sync", full)
    with refuses(DataError, "No space left"):
        devices.serve(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert "No space left" in told["text"]
    assert told["exit_code"] == 5
    assert '"round":2' not in (tmp_path / "run" / AUDIT).read_text()
    assert '"round":2' not in (tmp_path / "run" / EGRESS).read_text()
    assert verify(tmp_path / "run").rows
    monkeypatch.setattr(audit_log, "sync", sync)
    devices.serve(tmp_path / "run")
    assert reconcile(tmp_path / "run", states(tmp_path)).findings == ()


def test_a_message_that_never_left_is_not_booked(tmp_path: Path, monkeypatch: Any) -> None:
    devices = Devices(tmp_path)
    transport = devices.transport()
    push, calls = transport.push, [0]

    def gone(packets: Any, seconds: float, *, enrols: bool) -> Any:
        calls[0] += not enrols
        if calls[0] == 3:
            raise TransportError("the server is gone")
        return push(packets, seconds, enrols=enrols)

    monkeypatch.setattr(transport, "push", gone)
    with refuses(TransportError, "server is gone"):
        devices.serve(tmp_path / "run", transport)
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (told["error"], told["exit_code"]) == ("TransportError", 6)
    server = [row for row in rows_of(tmp_path / "run") if "seal" not in row]
    assert server
    places = {(row["round"], row["ask"]) for row in server}
    heard = {(row["round"], row["ask"]) for row in rows_of(states(tmp_path)[0]) if "seal" in row}
    assert places == heard


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_an_unanswered_request_and_a_dropped_reply_are_no_findings(tmp_path: Path) -> None:
    devices = Devices(tmp_path, RECIPE + "[engine]\nmin_replies = 2\n")
    handler = devices.handler

    def late(packet: Any, config: Any) -> Any:
        reply = handler(packet, config)
        if config["client"] == 1 and reply.header.get("verdict") == "reply":
            reply.header["request_id"]["round"] += 7
        return reply

    devices.handler = late  # type: ignore[assignment]
    devices.serve(tmp_path / "run")
    result = reconcile(tmp_path / "run", states(tmp_path))
    assert result.findings == ()
    assert any("rows left in replies that the server says it left out" in text for text in result.remarks)


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_a_request_that_never_arrived_does_not_count_as_agreeing(tmp_path: Path) -> None:
    devices = Devices(tmp_path, RECIPE + "[engine]\nmin_replies = 2\n")
    handler = devices.handler

    def deaf(packet: Any, config: Any) -> Any:
        if config["client"] == 1 and packet.header["want"] == ASK and RequestId.read(packet.header).round == 2:
            return reason(FAILED, RequestId.read(packet.header), "the request was lost")
        return handler(packet, config)

    devices.handler = deaf  # type: ignore[assignment]
    devices.serve(tmp_path / "run")
    result = reconcile(tmp_path / "run", states(tmp_path))
    assert result.findings == ()
    rows = [row for row in rows_of(tmp_path / "run") if row.get("client") == 1]
    lost = {row["ask"] for row in rows if row["round"] == 2}
    assert [text for text in result.remarks if text.startswith("client 1")] == [
        f"client 1: {sum(row['round'] == 1 for row in rows)} rows agree",
        f"client 1: {len(lost)} requests were sent and never arrived there",
    ]


def is_update(row: dict[str, Any], round: int) -> bool:
    return (row.get("client"), row.get("round"), row.get("ask"), row.get("destination")) == (0, round, 0, "server")


def rewritten(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    rows = change([json.loads(line) for line in (folder / EGRESS).read_text().splitlines()])
    (folder / EGRESS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def pending(folder: Path, number: int, client: int, round: int) -> None:
    rows = [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]
    rows[number]["pending"] = {str(client): round}
    (folder / ROUNDS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_device_that_still_worked_at_the_end_is_no_finding_but_only_if_the_server_says_so(copied: Path) -> None:
    """Under buffered aggregation its reply may have left, and the server was gone."""
    gone = lambda rows: [row for row in rows if not is_update(row, 2)]  # noqa: E731
    forged(copied / "run", gone)
    rewritten(copied / "run", gone)
    assert "the server's log lacks" in found(copied)
    pending(copied / "run", 0, 0, 1)
    assert "the server's log lacks" in found(copied), "another request was pending, and not at the end"
    pending(copied / "run", -1, 0, 2)
    assert found(copied) == ""


def test_a_reply_that_came_in_a_later_round_belongs_to_it_when_a_run_is_resumed(copied: Path) -> None:
    """Client 0's reply of round 1 came in round 2, which was played twice."""

    def late(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        one = [row for row in rows if row.get("round") in (0, 1) and not is_update(row, 1)]
        came = [row | {"came": 2} for row in rows if is_update(row, 1)]
        return [one, [*(row for row in rows if row.get("round") == 2), *came]]

    def twice(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        one, two = late(rows)
        return [*one, *two, {"run": one[0]["run"], "resumed_after": 1}, *two]

    forged(copied / "run", twice)
    rewritten(copied / "run", lambda rows: [row for part in late(rows) for row in part])
    assert found(copied) == ""
