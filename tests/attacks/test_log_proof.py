"""What left a client in a time has a proof, and whoever changes, shortens or signs it anew is found out."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyfed.cli import main
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.messages import Crossing
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.deploy.credentials import write_credentials
from polyfed.experiment.certificate.answers import answer_of, question
from polyfed.privacy.egress.audit_log import log as audit_log
from polyfed.privacy.egress.audit_log.keys import tie
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.ledger import Entry
from polyfed.transport.logins import PrivateKey
from refusals import refuses
from start_small import simulated

PART = (Crossing("params", "parameters", "audio", "float32", (2,), 8),)
DAYS = ("2027-03-01", "2027-03-02", "2027-03-03")


class Clock(audit_log.datetime):
    """The clock of the machine that writes the log."""

    now_is = ""

    @classmethod
    def now(cls, zone: Any = None) -> Any:
        return audit_log.datetime.fromisoformat(cls.now_is)


def written(folder: Path, monkeypatch: Any, clients: tuple[int, ...] = (7,)) -> Path:
    """A log with a request a day to each client: a row down, a row up, and a refused one on the second day."""
    log = AuditLog(folder)
    for round, day in enumerate(DAYS, 1):
        for hour, client in enumerate(clients, 8):
            Clock.now_is = f"{day}T{hour:02}:00:00+00:00"
            monkeypatch.setattr(audit_log, "datetime", Clock)
            about = round, 0, (client,), "Update", PART
            entries = [Entry(*about, "client", (True,), ("1e" * 32,)), Entry(*about, "server", (True,), ("0f" * 32,))]
            if day == DAYS[1]:
                entries.append(Entry(round, 1, (client,), "Report", PART, "server", (False,), ("",)))
            log.append(entries, "run-1")
            monkeypatch.undo()
    return folder


@pytest.fixture
def log(tmp_path: Path, monkeypatch: Any) -> Path:
    """The log of a device whose login key has signed the key of the log; `keys` has the public one."""
    folder = written(tmp_path / "state", monkeypatch)
    write_credentials(tmp_path / "credentials", 1)
    key = PrivateKey(tmp_path / "credentials" / "node-0.key")
    tie(folder, key)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "north.pub").write_text(key.public)
    return folder


def proved(folder: Path, words: tuple[str | None, str | None, int | None], path: Path) -> Path:
    path.write_text(answer_of(folder, question(*words)).excerpt.proof())
    return path


TUESDAY = ("2027-03-02", "2027-03-02", 7)


def test_what_left_on_tuesday_is_one_answer_from_the_log_and_from_its_proof(log: Path, tmp_path: Path) -> None:
    whole = answer_of(log, question(*TUESDAY), keys=tmp_path / "keys")
    part = answer_of(proved(log, TUESDAY, tmp_path / "proof.json"), question(*TUESDAY), keys=tmp_path / "keys")
    assert whole.content() == part.content()
    assert whole.names == {7: "north"}
    assert [(row["round"], row["verdict"]) for row in whole.rows] == [(2, "allowed"), (2, "refused")]
    assert [one["bytes"] for one in whole.sums] == [8, 0]
    assert "1 part of a message left, 8 bytes together. The policy refused 1 part." in whole.statements
    assert len(answer_of(log, question(*TUESDAY), received=True).rows) == 3


def test_that_nothing_left_is_proved_by_two_neighbours(log: Path, tmp_path: Path) -> None:
    night = ("2027-03-02T20:00", "2027-03-03T06:00", 7)
    path = proved(log, night, tmp_path / "proof.json")
    assert len(json.loads(path.read_text())["lines"]) == 2
    assert answer_of(path, question(*night)).rows == []
    with refuses(DataError, "do not reach"):
        answer_of(path, question("2027-03-01", "2027-03-03", 7))


def test_a_proof_for_one_client_tells_nothing_of_another(tmp_path: Path, monkeypatch: Any) -> None:
    folder = written(tmp_path / "state", monkeypatch, (3, 7, 9))
    asked = (None, None, 7)
    path = proved(folder, asked, tmp_path / "proof.json")
    lines = [line for line in json.loads(path.read_text())["lines"] if isinstance(line, str)]
    assert {json.loads(line).get("client") for line in lines[1:-1]} == {7}
    assert len(answer_of(path, question(*asked)).rows) == 4
    with refuses(DataError, "one client only"):
        answer_of(path, question(None, None, None))


@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_a_proof_fails(log: Path, tmp_path: Path, place: int, bit: int) -> None:
    path = tmp_path / "proof.json"
    before = proved(log, TUESDAY, path).read_bytes()
    place %= len(before)
    path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
    with pytest.raises(DataError):
        answer_of(path, question(*TUESDAY), keys=tmp_path / "keys")


def test_a_signature_has_one_form(log: Path, tmp_path: Path) -> None:
    path = proved(log, TUESDAY, tmp_path / "proof.json")
    changed(lambda told: told["head"].update(signature=told["head"]["signature"].upper()), path)
    with refuses(DataError, "small letters"):
        answer_of(path, question(*TUESDAY))


def test_a_tie_whose_key_is_written_in_another_way_is_none(log: Path, tmp_path: Path) -> None:
    """A compressed point makes the library raise another error."""
    path = proved(log, TUESDAY, tmp_path / "proof.json")
    told = json.loads(path.read_text())
    kind, text = told["tie"]["key"].split()[:2]
    point = bytearray(base64.b64decode(text))
    point[-97] = 2
    changed(lambda content: content["tie"].update(key=f"{kind} {base64.b64encode(point).decode()}"), path)
    with refuses(DataError, "not signed"):
        answer_of(path, question(*TUESDAY))


def changed(change: Callable[[dict[str, Any]], Any], path: Path) -> None:
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told, sort_keys=True, separators=(",", ":")) + "\n")


HARMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a line dropped": lambda told: told["lines"].pop(2),
    "a line doubled": lambda told: told["lines"].insert(2, told["lines"][2]),
    "lines moved": lambda told: told["lines"].insert(3, told["lines"].pop(1)),
    "a line hidden": lambda told: told["lines"].__setitem__(2, {"hash": "0f" * 32}),
    "the end cut off": lambda told: told["lines"].pop(),
    "another place": lambda told: told.update(start=told["start"] + 1),
    "a longer log": lambda told: told["head"].update(lines=told["head"]["lines"] + 1),
    "a hash dropped": lambda told: told["outside"].pop(),
    "another version": lambda told: told.update(format="polyfed log proof 9"),
    "no lines": lambda told: told.update(lines=[]),
    "no number": lambda told: told.update(start="1"),
    "another device": lambda told: told["tie"].update(key="ssh-ed25519 AAAA"),
    "no device": lambda told: told.pop("tie"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_changed_proof_fails_in_words(harm: str, log: Path, tmp_path: Path) -> None:
    path = proved(log, TUESDAY, tmp_path / "proof.json")
    changed(HARMS[harm], path)
    with pytest.raises(DataError) as error:
        answer_of(path, question(*TUESDAY), keys=tmp_path / "keys")
    assert str(error.value)


def test_a_log_of_another_key_is_not_that_of_the_device(log: Path, tmp_path: Path, monkeypatch: Any) -> None:
    forged = written(tmp_path / "forged", monkeypatch)
    (forged / "audit-key.tie").write_bytes((log / "audit-key.tie").read_bytes())
    with refuses(DataError, "not signed"):
        answer_of(forged, question(*TUESDAY), keys=tmp_path / "keys")
    (forged / "audit-key.tie").unlink()
    with refuses(DataError, "neither the key"):
        answer_of(forged, question(*TUESDAY), keys=tmp_path / "keys")
    path = proved(forged, TUESDAY, tmp_path / "proof.json")
    with refuses(DataError, "and not with"):
        answer_of(path, question(*TUESDAY), log / PUBLIC_KEY)


def test_a_damaged_log_answers_nothing(log: Path) -> None:
    text = (log / AUDIT).read_text()
    (log / AUDIT).write_text(text.replace('"bytes":8', '"bytes":4', 1))
    with refuses(DataError, "line 2"):
        answer_of(log, question(*TUESDAY))


def test_questions_are_checked(tmp_path: Path) -> None:
    for words in (("Tuesday", None), ("2027-03-02", "2027-03-01"), (None, "2027-13-01")):
        with refuses(RecipeError, "2027-"):
            question(*words, None) if words[0] != "Tuesday" else question("2027-Tuesday", None, None)


def test_a_simulation_is_told_to_be_certified(tmp_path: Path) -> None:
    with refuses(DataError, "polyfed certify"):
        answer_of(simulated(tmp_path / "run"), question(None, None, None))


def test_the_command_prints_a_table_json_and_a_page(log: Path, tmp_path: Path, capsys: Any) -> None:
    def call(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["audit-log", "show", *map(str, words)])
        return stop.value.code or 0, *capsys.readouterr()

    asked = ("--from", "2027-03-02", "--to", "2027-03-02", "--client", 7, "--keys", tmp_path / "keys")
    proof, page = tmp_path / "proof.json", tmp_path / "page.html"
    code, out, _ = call(log, *asked, "--proof", proof, "--html", page)
    assert code == 0
    assert "What left client 7 (north)" in out
    told = json.loads(call(proof, *asked, "--json")[1])
    assert told["names"] == {"7": "north"}
    assert [row["bytes"] for row in told["rows"]] == [8, 8]
    text = page.read_text()
    assert "client 7 (north)" in text
    assert "http" not in text.split("<main>")[1].split("</main>")[0], "it loads nothing"
    assert "0f0f" in text
    code, _, err = call(proof, "--from", "2027-03-01", "--client", 7)
    assert code == 5
    assert "do not reach" in err
