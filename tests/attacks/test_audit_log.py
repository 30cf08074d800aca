"""Whoever changes, removes or adds lines of a device's audit log is found out, and nothing leaves that it lacks."""

import hashlib
import json
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from engines.devices import Devices
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, DataError, TooFewReplies
from polyfed.core.messages import Crossing
from polyfed.core.system import mapping
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.deploy.device import runtime as client_runtime
from polyfed.privacy.egress.audit_log import log as audit_log
from polyfed.privacy.egress.audit_log.log import HEAD, PRIVATE_KEY, START, AuditLog
from polyfed.privacy.egress.audit_log.receipts import ledgers, log_rows, receipt, start_of
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.privacy.egress.ledger import NO_RUN, Entry
from refusals import refuses

PARTS = tuple(Crossing("params", "parameters", block, "float32", (2,), 8) for block in ("a", "b"))


def entry(round: int, destination: str = "server", allowed: bool = True) -> Entry:
    contents = ("0f" * 32, "1e" * 32) if allowed else ("", "")
    return Entry(round, 0, (4,), "Update", PARTS, destination, (allowed, allowed), contents)


def written(folder: Path, rounds: int = 4) -> AuditLog:
    """A log of some rounds: 2 rows down, 2 rows up and a seal each."""
    log = AuditLog(folder)
    for round in range(1, rounds + 1):
        log.append([entry(round, "client"), entry(round)], "run-1")
    return log


def lines_of(folder: Path) -> list[str]:
    return (folder / AUDIT).read_text().splitlines()


def test_every_line_has_time_content_and_the_hash_of_the_line_before(tmp_path: Path) -> None:
    written(tmp_path)
    previous, rows = START, lines_of(tmp_path)
    assert len(rows) == 20
    for line in rows:
        row = json.loads(line)
        assert row["previous"] == previous
        assert row["time"].endswith("+00:00")
        assert ("signature" in row) == ("seal" in row)
        assert "seal" in row or len(row["sha256"]) == 64
        previous = hashlib.sha256(line.encode()).hexdigest()
    found = verify(tmp_path)
    assert (found.rows, found.seals) == (16, 4)
    assert stat.S_IMODE((tmp_path / PRIVATE_KEY).stat().st_mode) == 0o600


def removed(rows: list[str]) -> list[str]:
    return rows[:7] + rows[8:]


def changed(rows: list[str]) -> list[str]:
    return [*rows[:7], rows[7].replace('"bytes":8', '"bytes":4'), *rows[8:]]


def swapped(rows: list[str]) -> list[str]:
    return [*rows[:6], rows[7], rows[6], *rows[8:]]


def doubled(rows: list[str]) -> list[str]:
    return [*rows[:8], rows[7], *rows[8:]]


def rechained(rows: list[str]) -> list[str]:
    """A row changed, and every hash after it made to fit; the seals cannot be."""
    after, previous = rows[:7], json.loads(rows[7])["previous"]
    for line in changed(rows)[7:]:
        row = json.loads(line) | {"previous": previous}
        after.append(json.dumps(row, separators=(",", ":")))
        previous = hashlib.sha256(after[-1].encode()).hexdigest()
    return after


def unsealed(rows: list[str]) -> list[str]:
    return rows[:9] + rows[10:]


def half(rows: list[str]) -> list[str]:
    return [*rows[:7], rows[7][:20], *rows[8:]]


@pytest.mark.parametrize("large", [False, True])
def test_a_receipt_takes_the_lines_since_its_run_began(large: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Also what was told at enrolment, before the run had a name; an earlier run costs no time."""
    monkeypatch.setattr(mapping, "LARGE", 1 if large else 2**20)
    log = written(tmp_path)
    for run in ("run-2", "run-3"):
        log.append([entry(0)], NO_RUN)
        log.append([entry(0)], NO_RUN)
        for round in (1, 2):
            log.append([entry(round, "client"), entry(round)], run)
        log.append([entry(3)], "run-1")  # a job beside it
    path = tmp_path / AUDIT
    rows = log_rows(path)
    for run, least in (("run-1", 0), ("run-2", 20), ("run-3", 20 + 19), ("run-4", len(rows))):
        found = log_rows(path, start_of(path, run))
        assert found == rows[least:]
        assert ledgers(found, run) == ledgers(rows, run)
    text = path.read_text()
    path.write_text(text.replace('"round":2', '"round":9', 1))  # of run-1
    assert receipt(log, "run-3", 4, [], "")["receipt"]["root"] == ledgers(rows, "run-3")[4].root
    with refuses(DataError, "line"):
        receipt(log, "run-1", 4, [], "")
    with refuses(DataError, "line"):
        verify(tmp_path)
    path.write_text(text[:-1000] + text[-1000:].replace('"round":3', '"round":9', 1))
    with refuses(DataError, "line"):
        receipt(log, "run-3", 4, [], "")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (removed, "line 7"),
        (changed, "line 9"),
        (swapped, "line 6"),
        (doubled, "line 9"),
        (rechained, "its signature"),
        (unsealed, "line 9"),
        (half, "line 8 cannot"),
        (lambda rows: rows[:15], "after line 15"),
        (lambda rows: [], "after line 0"),
        (lambda rows: [*rows, rows[-1]], "line 21"),
    ],
)
def test_verify_names_the_first_bad_line(harm: Any, words: str, tmp_path: Path, capsys: Any) -> None:
    written(tmp_path)
    (tmp_path / AUDIT).write_text("".join(f"{row}\n" for row in harm(lines_of(tmp_path))))
    with refuses(DataError, words):
        verify(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(("audit-log", "verify", str(tmp_path)))
    assert stop.value.code == 5
    assert words in capsys.readouterr().err


def test_a_whole_log_ends_with_0(tmp_path: Path, capsys: Any) -> None:
    written(tmp_path)
    for words in ((), ("--key", str(tmp_path / PUBLIC_KEY))):
        with pytest.raises(SystemExit) as stop:
            main(("audit-log", "verify", str(tmp_path), *words))
        assert not stop.value.code
        assert "is whole: 16 rows, 4 signatures" in capsys.readouterr().out


def test_another_log_with_another_key_is_found_by_the_key_that_was_handed_over(tmp_path: Path) -> None:
    written(tmp_path / "own")
    handed_over = tmp_path / "handed-over.pub"
    handed_over.write_bytes((tmp_path / "own" / PUBLIC_KEY).read_bytes())
    written(tmp_path / "forged", rounds=2)
    assert verify(tmp_path / "forged").rows == 8
    with refuses(DataError, "log's own key"):
        verify(tmp_path / "forged", handed_over)
    with refuses(DataError, "public key"):
        verify(tmp_path / "own", tmp_path / "nowhere.pub")


def test_a_device_goes_on_from_its_log_and_not_from_a_damaged_one(tmp_path: Path) -> None:
    log = written(tmp_path)
    AuditLog(tmp_path).append([entry(5)], "run-1")
    assert verify(tmp_path).rows == 18
    before = (tmp_path / AUDIT).read_bytes()
    (tmp_path / AUDIT).write_bytes(before + b'{"time":"')  # the power went off while a line was written
    log.append([entry(6)], "run-1")
    assert verify(tmp_path).rows == 20
    (tmp_path / AUDIT).write_bytes(before)
    with refuses(CheckpointError, "does not end"):
        log.append([entry(7)], "run-1")
    (tmp_path / PRIVATE_KEY).unlink()
    with refuses(CheckpointError, "signed with it"):
        log.append([entry(7)], "run-1")


def test_a_full_disk_leaves_no_half_of_a_request(tmp_path: Path) -> None:
    log = written(tmp_path)
    before, limits = (tmp_path / AUDIT).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 300, limits[1]))
    try:
        with refuses(OSError, "too large"):
            log.append([entry(5)], "run-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / AUDIT).read_bytes() == before
    log.append([entry(5)], "run-1")
    assert verify(tmp_path).rows == 18


# a device in a run


def folder_of(devices: Devices, client: int) -> Path:
    return devices.places[client] / "polyfed-state"


def test_a_run_leaves_a_signed_log_on_every_device_that_equals_its_ledger(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run")
    run = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    for client in range(3):
        folder = folder_of(devices, client)
        assert verify(folder).rows > 0
        rows = [json.loads(line) for line in lines_of(folder)]
        booked = [row for row in rows if "verdict" in row]
        assert all(len(row["sha256"]) == 64 for row in booked)
        own = (folder / run / f"client-{client}" / "egress.jsonl").read_text().splitlines()
        extra = ("time", "sha256", "previous")
        assert [{k: v for k, v in row.items() if k not in extra} for row in booked] == list(map(json.loads, own))
        assert {"seal", "signature"} <= rows[-1].keys(), "every request ends with a signature, so every round does"
        assert load_pem_private_key((folder / PRIVATE_KEY).read_bytes(), None)


def test_equal_contents_have_equal_hashes_and_others_do_not(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run")
    down = {
        client: {
            (row["round"], row["ask"], row["field"], row["block"]): row["sha256"]
            for row in map(json.loads, lines_of(folder_of(devices, client)))
            if row.get("destination") == "client"
        }
        for client in range(3)
    }
    both = down[0].keys() & down[1].keys()
    assert both
    assert all(down[0][place] == down[1][place] for place in both if place[2] == "params"), "one model for all"
    params = {place: sha for place, sha in down[0].items() if place[2:] == ("params", "shared") and place[0] > 0}
    assert len({place[0] for place in params}) > 1
    assert len(set(params.values())) > 1, "the model changes from round to round"


def failing(monkeypatch: Any, module: Any, name: str, folder: Path) -> None:
    """This function of a module finds no room for files in this folder."""
    original = getattr(module, name)

    def full(*args: Any, **options: Any) -> Any:
        if any(isinstance(arg, Path) and folder in arg.parents for arg in args):
            raise OSError(28, "No space left on device")
        return original(*args, **options)

    monkeypatch.setattr(module, name, full)


@pytest.mark.parametrize("where", ["the ledger", "the audit log", "the state"])
def test_what_cannot_be_booked_does_not_leave_and_what_did_not_leave_is_not_booked(
    where: str, tmp_path: Path, monkeypatch: Any
) -> None:
    devices = Devices(tmp_path)
    folder = folder_of(devices, 1)
    serving = devices.handler
    answers: list[Any] = []

    def listening(packet: Any, config: Any) -> Any:
        asked = config["client"] == 1 and "request_id" in packet.header
        if asked and not answers:
            fill()
        reply = serving(packet, config)
        if asked:
            answers.append(reply)
        return reply

    def fill() -> None:
        """The disk is full from the first request on."""
        if where == "the state":
            monkeypatch.setattr(module, name, _no_room(module.keep, folder))
        else:
            failing(monkeypatch, module, name, folder)

    devices.handler = listening  # type: ignore[assignment]
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "[engine]\nmin_replies = 3\n")
    AuditLog(folder).prepare()
    module, name = {
        "the ledger": (client_runtime, "book"),
        "the audit log": (audit_log, "sync"),
        "the state": (client_runtime, "keep"),
    }[where]
    with refuses(TooFewReplies, "No space left"):
        devices.serve(tmp_path / "run")
    assert answers
    assert all(answer.body == b"" and answer.header["verdict"] == "failed" for answer in answers)
    booked = [
        json.loads(line)
        for line in "".join(path.read_text() for path in folder.glob("*/client-1/egress.jsonl")).splitlines()
    ]
    booked += [json.loads(line) for line in (lines_of(folder) if (folder / AUDIT).exists() else [])]
    assert not [row for row in booked if row.get("destination") == "server"]
    assert not [*folder.glob("*/client-1/state-*")], "the state goes on from where the server thinks it is"
    assert verify(folder).rows == len([row for row in booked if "previous" in row and "seal" not in row])


def _no_room(keep: Any, folder: Path) -> Any:
    def full(store: Any, *args: Any) -> None:
        if folder in store.folder.parents:
            raise OSError(28, "No space left on device")
        keep(store, *args)

    return full


def test_the_head_of_another_log_does_not_fit(tmp_path: Path) -> None:
    written(tmp_path / "one", 3)
    written(tmp_path / "two", 3)
    (tmp_path / "one" / HEAD).write_bytes((tmp_path / "two" / HEAD).read_bytes())
    with refuses(DataError, "log's own key"):
        verify(tmp_path / "one")
