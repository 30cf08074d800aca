"""Whoever changes a certificate, a ledger, a log or a policy behind it, or signs for another, is found out."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attacks.test_reconciliation import forged
from engines.devices import RECIPE, Devices
from polyfed.core.errors import DataError
from polyfed.core.system.files import AUDIT, EGRESS, FACTS, LEAKAGE, PUBLIC_KEY, RECEIPTS, RESULT, ROUNDS
from polyfed.core.system.files import RECIPE as RECIPE_FILE
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.handlers import Deployed
from polyfed.deploy.server.countersignatures import collect_receipts
from polyfed.engines.protocol import FAILED, SIGN, SIGNED, RequestId, reason, sign_packet
from polyfed.experiment.certificate import certify, verify_certificate, write_crate
from polyfed.experiment.certificate.issue import sealed
from polyfed.experiment.leakage import audit, write
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.keys import key_text, tie
from polyfed.privacy.egress.audit_log.log import HEAD, PRIVATE_KEY, AuditLog, private_key
from polyfed.transport.logins import PrivateKey
from refusals import refuses
from start_small import simulated

SECURE = (
    RECIPE.replace("rounds = 2", "rounds = 1")
    .replace('[["a", "b"], ["a"], ["b"]]', '[["a", "b"]]')
    .replace('name = "scaffold"', 'name = "fedavg"\n[secure_aggregation]\nmin_clients = 3')
)


def deployed(folder: Path, recipe: str = RECIPE, wrap: Any = None) -> Path:
    """A finished run of three devices with keys: `run`, `nodes/<k>/polyfed-state`, the public keys in `keys`."""
    devices = Devices(folder, recipe)
    if wrap is not None:
        devices.handler = wrap(devices.handler)
    write_credentials(folder / "credentials", 3)
    transport = devices.transport()
    for number in range(3):
        key = PrivateKey(folder / "credentials" / f"node-{number}.key")
        AuditLog(state(folder, number)).prepare()
        tie(state(folder, number), key)
        transport.hub.names[number] = key.fingerprint
    devices.serve(folder / "run", transport)
    (folder / "keys").mkdir()
    for number, name in enumerate(("north", "south", "west")):
        shutil.copy(folder / "credentials" / f"node-{number}.pub", folder / "keys" / f"{name}.pub")
    shutil.copy(folder / "run" / PUBLIC_KEY, folder / "keys" / "server.pub")
    return folder


def state(folder: Path, client: int) -> Path:
    return folder / "nodes" / str(client) / "polyfed-state"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    folder: Path = deployed(tmp_path_factory.mktemp("run"))
    write(audit(folder / "run", rounds=1, clients=2))
    certify(folder / "run", keys=folder / "keys")
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    for name in ("run", "nodes", "keys"):
        shutil.copytree(finished / name, tmp_path / name)
    return tmp_path


def faults(folder: Path, *, files: bool = True) -> str:
    """What a verifier who trusts the keys says: with the files of run and devices, or with the certificate alone."""
    more: dict[str, Any] = {"run": folder / "run", "logs": [state(folder, k) for k in range(3)]} if files else {}
    try:
        return "\n".join(verify_certificate(folder / "run" / "certificate.json", folder / "keys", **more).faults)
    except DataError as error:
        return str(error)


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "certificate.json").read_text())["certificate"]
    return content


def resigned(folder: Path, change: Callable[[dict[str, Any]], Any], key: Ed25519PrivateKey | None = None) -> None:
    """Change the certificate and sign it, as the server can."""
    content = content_of(folder)
    change(content)
    signer = key or private_key(folder / "run" / PRIVATE_KEY)
    content["key"] = key_text(signer.public_key())
    (folder / "run" / "certificate.json").write_text(sealed(content, signer))


def test_an_honest_certificate_holds_and_says_who_vouches(finished: Path) -> None:
    assert faults(finished, files=False) == ""
    assert faults(finished) == ""
    content = content_of(finished)
    assert [one["name"] for one in content["clients"]] == ["north", "south", "west"]
    assert all(one["receipt"]["tie"]["key"] for one in content["clients"])
    found = verify_certificate(finished / "run" / "certificate.json", finished / "keys")
    assert "3 devices signed the roots of their own ledgers" in found.remarks


def independent_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word for word."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + independent_root(leaves[:k]) + independent_root(leaves[k:])).digest()


def test_the_roots_are_those_of_the_rfc_over_the_rows_of_server_and_device(finished: Path) -> None:
    for one in content_of(finished)["clients"]:
        for log in (finished / "run", state(finished, one["client"])):
            rows = [json.loads(line) for line in (log / AUDIT).read_text().splitlines()]
            own = [row for row in rows if row.get("verdict") == "allowed" and row["client"] == one["client"]]
            plain = [{k: v for k, v in row.items() if k not in ("time", "previous", "device_seal")} for row in own]
            ordered = sorted(
                (
                    row["round"],
                    row["ask"],
                    row["destination"] != "client",
                    json.dumps(row, sort_keys=True, separators=(",", ":")),
                )
                for row in plain
            )
            assert len(ordered) == one["rows"]
            assert independent_root([row[3].encode() for row in ordered]).hex() == one["root"]


@given(st.lists(st.binary(max_size=4), max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_range_of_leaves_proves_itself_and_no_other_range(leaves: list[bytes], data: Any) -> None:
    assert merkle.root_of(leaves) == independent_root(leaves)
    cut = data.draw(st.integers(0, len(leaves)))
    tree, _ = merkle.grown((), 0, leaves[:cut])
    assert merkle.grown(tree, cut, leaves[cut:])[1] == independent_root(leaves)
    if not leaves:
        return
    start = data.draw(st.integers(0, len(leaves) - 1))
    end = data.draw(st.integers(start + 1, len(leaves)))
    hashes = [merkle.leaf_hash(leaf) for leaf in leaves]
    rest = merkle.outside(hashes, start, end)
    assert merkle.root_from(hashes[start:end], start, len(leaves), rest) == independent_root(leaves)
    for first, more in ((start + 1, []), (start, [merkle.EMPTY]), (start - 1, [])):
        with contextlib.suppress(ValueError):
            found = merkle.root_from(hashes[start:end], first, len(leaves), [*rest, *more])
            assert found != independent_root(leaves) or len(set(leaves)) < len(leaves)


@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_a_certificate_fails(finished: Path, place: int, bit: int) -> None:
    path = finished / "run" / "certificate.json"
    before = path.read_bytes()
    place %= len(before)
    path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
    try:
        assert faults(finished, files=False)
    finally:
        path.write_bytes(before)


def flipped(text: bytes, n: int, bit: int) -> bytes:
    place = n % len(text)
    return text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :]


def by_lines(change: Callable[[list[bytes], int, int], list[bytes]]) -> Callable[[bytes, int, int], bytes]:
    def harm(text: bytes, n: int, m: int) -> bytes:
        lines = text.splitlines(keepends=True)
        return b"".join(change(lines, n % len(lines), m % len(lines)))

    return harm


HARMS: dict[str, Callable[[bytes, int, int], bytes]] = {
    "flip": flipped,
    "drop": by_lines(lambda lines, n, m: lines[:n] + lines[n + 1 :]),
    "duplicate": by_lines(lambda lines, n, m: [*lines[:n], lines[m], *lines[n:]]),
    "move": by_lines(lambda lines, n, m: [*(rest := lines[:n] + lines[n + 1 :])[:m], lines[n], *rest[m:]]),
    "truncate": lambda text, n, m: text[: n % len(text)],
}
FILES = [f"run/{name}" for name in (EGRESS, AUDIT, HEAD, ROUNDS, FACTS, RECIPE_FILE, RECEIPTS, RESULT, LEAKAGE)]
LOGS = [f"nodes/{client}/polyfed-state/{name}" for client in range(3) for name in (AUDIT, HEAD)]


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_may_get_a_byte_more_or_be_lost(name: str, copied: Path) -> None:
    (copied / name).write_bytes((copied / name).read_bytes() + b" ")
    assert faults(copied)
    (copied / name).unlink()
    assert faults(copied)


@given(st.sampled_from(FILES + LOGS), st.sampled_from(sorted(HARMS)), st.integers(min_value=0), st.integers(0, 7))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_harm_to_a_line_of_a_run_or_a_log_fails(finished: Path, name: str, harm: str, n: int, m: int) -> None:
    path = finished / name
    before = path.read_bytes()
    after = HARMS[harm](before, n, m)
    if after == before:
        return
    path.write_bytes(after)
    try:
        told = faults(finished)
        assert told, (name, harm, n, m)
        assert "Traceback" not in told
    finally:
        path.write_bytes(before)


def test_the_certificate_has_the_upper_bounds_of_the_audit_and_no_other(copied: Path) -> None:
    run = copied / "run"
    measured = [one for one in audit(run, rounds=1, clients=2).findings if one.status == "measured"]
    told = content_of(copied)["leakage"]
    assert (told["rounds"], told["clients"], told["shadows"]) == (1, 2, 0)
    parts = ("attack", "kind", "block", "seen_by", "method")
    bounds = {tuple(one[part] for part in parts): (one["advantage"], one["at_most"]) for one in told["bounds"]}
    assert len(bounds) == len(told["bounds"]) == len(measured) > 1
    for one in measured:
        advantage, most = bounds[one.attack, one.kind, one.block, one.seen_by, one.method]
        assert (advantage, most) == (pytest.approx(one.advantage), pytest.approx(one.high))
        assert most >= advantage
    resigned(copied, lambda content: content["leakage"]["bounds"][0].update(at_most=0.0))
    assert "leakage" in faults(copied), "a server that signs a lower bound than its audit found"
    (run / LEAKAGE).unlink()
    assert certify(run)[1]["leakage"] is None, "no bounds without an audit"


def swapped_ledgers(content: dict[str, Any]) -> None:
    one, other = content["clients"][1:3]
    for part in ("rows", "root", "answered", "unanswered"):
        one[part], other[part] = other[part], one[part]


def swapped_receipts(content: dict[str, Any]) -> None:
    one, other = content["clients"][1:3]
    one["receipt"], other["receipt"] = other["receipt"], one["receipt"]


def swapped_policy(content: dict[str, Any]) -> None:
    content["clients"][1]["receipt"]["receipt"]["policy"] = "0f" * 32


def swapped_names(content: dict[str, Any]) -> None:
    one, other = content["clients"][1:3]
    one["name"], other["name"] = other["name"], one["name"]


def fewer_rows(content: dict[str, Any]) -> None:
    content["clients"][1]["receipt"]["receipt"]["rows"] -= 1


def other_device(content: dict[str, Any]) -> None:
    content["clients"][1]["device"] = content["clients"][2]["device"]


def untied(content: dict[str, Any]) -> None:
    content["clients"][1]["receipt"]["tie"] = content["clients"][2]["receipt"]["tie"]


def without_a_client(content: dict[str, Any]) -> None:
    del content["clients"][1]


def left_out(content: dict[str, Any]) -> None:
    content["clients"][1]["unanswered"] = [[1, 0]]


LIES = {
    swapped_ledgers: "client 1: its device signed another ledger",
    swapped_receipts: "client 1: its receipt is that of client 2",
    swapped_policy: "client 1: the signature of its receipt",
    swapped_names: "client 1 is called 'west'",
    fewer_rows: "client 1: the signature of its receipt",
    other_device: "client 1 is the device",
    untied: "client 1: the key of its log",
    without_a_client: "Merkle root of the ledgers",
    left_out: "client 1: its device left out other requests",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_server_that_signs_a_lie_about_a_device_is_found_out_with_public_keys(lie: Any, copied: Path) -> None:
    resigned(copied, lie)
    assert LIES[lie] in faults(copied, files=False)


def test_a_server_that_drops_rows_and_signs_its_log_again_is_found_out(copied: Path) -> None:
    """It also writes the ledger that fits, so that its own files agree."""
    run = copied / "run"
    lost = [row for row in rows_of(run) if row.get("client") == 1 and row.get("round") == 2]
    forged(run, lambda rows: [row for row in rows if row not in lost])
    extra = ("time", "previous", "sha256", "device_seal")
    kept = [row for row in rows_of(run) if "seal" not in row]
    lines = [json.dumps({k: v for k, v in row.items() if k not in extra}) + "\n" for row in kept]
    (run / EGRESS).write_text("".join(lines))
    rounds = [json.loads(line) for line in (run / ROUNDS).read_text().splitlines()]
    rounds[1]["cohort"] = [0, 2]
    (run / ROUNDS).write_text("".join(json.dumps(row) + "\n" for row in rounds))
    certify(run, keys=copied / "keys")
    assert "client 1: its device signed another ledger" in faults(copied, files=False)
    assert "client 0" not in faults(copied, files=False)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT).read_text().splitlines()]


def test_another_key_is_told(copied: Path) -> None:
    resigned(copied, lambda content: None, Ed25519PrivateKey.generate())
    assert "which is not in" in faults(copied, files=False)
    found = verify_certificate(copied / "run" / "certificate.json")
    assert any("no keys were given" in remark for remark in found.remarks), "without keys it may be anybody's"
    (copied / "keys" / "south.pub").unlink()
    assert "client 1: neither the key" in faults(copied, files=False)


def test_what_is_no_certificate_is_refused_in_words(copied: Path, tmp_path: Path) -> None:
    path = copied / "run" / "certificate.json"
    resigned(copied, lambda content: content.update(format="polyfed certificate 9"))
    with refuses(DataError, "polyfed certificate 9"):
        verify_certificate(path)
    for text in ("", "[]", "{}", '{"certificate": 1, "signature": 2}', "[" * 100_000):
        path.write_text(text)
        with refuses(DataError, "no certificate"):
            verify_certificate(path)
    with refuses(DataError, "no certificate"):
        verify_certificate(tmp_path / "nowhere.json")
    with refuses(DataError, "no public key"):
        certify(copied / "run", keys=copied / "nodes")
    (copied / "keys" / "north.pub").write_text("hello")
    with refuses(DataError, "no public key"):
        certify(copied / "run", keys=copied / "keys")


def test_a_signed_certificate_of_another_form_is_refused_in_words(copied: Path) -> None:
    for change in (
        lambda content: content.update(clients=[{}]),
        lambda content: content.update(more=1),
        lambda content: content.update(vouches="The devices vouch for everything."),
        lambda content: content["clients"][0].update(rows="many"),
    ):
        shutil.copy(copied / "run" / "certificate.json", copied / "kept.json")
        resigned(copied, change)
        assert "signed and no certificate" in faults(copied, files=False)
        shutil.copy(copied / "kept.json", copied / "run" / "certificate.json")


def test_damage_is_found_before_anything_is_certified(copied: Path) -> None:
    run = copied / "run"
    text = (run / AUDIT).read_text()
    (run / AUDIT).write_text(text.replace('"bytes":', '"bytes":1', 1))
    with refuses(DataError, "cannot be certified"):
        certify(run)
    (run / AUDIT).write_text(text)
    (run / PRIVATE_KEY).unlink()
    with refuses(DataError, "is missing"):
        certify(run)


class Failing:
    """A device that works on its request in round 1, and then tells the server that it failed."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, packet: Any, config: Mapping[str, Any]) -> Any:
        reply = self.handler(packet, config)
        if config["client"] == 1 and "request_id" in packet.header:
            asked = RequestId.read(packet.header)
            if asked.place == (1, 0):
                return reason(FAILED, asked, "lost")
        return reply


def test_requests_without_a_reply_are_named_by_both_and_do_not_break_the_certificate(tmp_path: Path) -> None:
    folder = deployed(tmp_path, wrap=Failing)
    certify(folder / "run", keys=folder / "keys")
    one = content_of(folder)["clients"][1]
    assert one["unanswered"] == one["receipt"]["receipt"]["unanswered"] == [[1, 0]]
    assert one["answered"]["rows"] < one["rows"]
    assert faults(folder) == ""


class Lying:
    """Device 1 changes what it says when it is asked to sign."""

    def __init__(self, handler: Any, lie: Callable[[dict[str, Any]], Any]) -> None:
        self.handler, self.lie = handler, lie

    def __call__(self, packet: Any, config: Mapping[str, Any]) -> Any:
        reply = self.handler(packet, config)
        if config["client"] == 1 and packet.header["want"] == SIGN:
            self.lie(reply.header)
        return reply


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another run": lambda header: header["receipt"].update(run="other"),
    "more": lambda header: header["receipt"].update(more=[[]]),
    "no number": lambda header: header["receipt"].update(rows=float("nan")),
    "long": lambda header: header["receipt"].update(time="9" * 10**6),
    "unsigned": lambda header: header.update(signature="00"),
    "no key": lambda header: header.update(key=7),
    "strange tie": lambda header: header.update(tie={"key": "ssh-ed25519 AAAA", "signature": ""}),
    "no receipt": lambda header: header.pop("receipt"),
    "no verdict": lambda header: header.pop("verdict"),
}


def test_a_device_that_sends_something_else_than_a_receipt_spoils_nothing(tmp_path: Path) -> None:
    """The server asks each time that the run ends, here again with `collect_receipts`."""
    devices, out = Devices(tmp_path), tmp_path / "run"
    devices.serve(out, transport := devices.transport())
    run, honest = json.loads((out / FACTS).read_text())["run"], devices.handler
    for name, lie in FORMS.items():
        devices.handler = Lying(honest, lie)  # type: ignore[assignment]
        collect_receipts(out, run, transport)
        assert sorted(json.loads((out / RECEIPTS).read_text())) == ["0", "2"], name
    path, content = certify(out)
    assert [one["receipt"] is None for one in content["clients"]] == [False, True, False]
    found = verify_certificate(path, run=out)
    assert found.faults == []
    assert any("the server alone vouches: clients 1" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    "header",
    [
        {"run": "../x"},
        {"client": True},
        {"client": 0},
        {"unanswered": [[1]]},
        {"unanswered": [[1, True]]},
        {"run": None},
    ],
)
def test_a_device_signs_only_its_own_ledger(header: dict[str, Any], copied: Path) -> None:
    config = {"data": str(copied / "nodes" / "1" / "data.npz"), "client": 1, "modalities": "a"}
    asked = sign_packet(content_of(copied)["run"], 1, [])
    handler = Deployed(copied / "recipe.toml")
    assert handler(asked, config).header["verdict"] == SIGNED
    answer = handler(Packet(asked.header | header), config)
    assert answer.header["verdict"] == FAILED
    log = state(copied, 1) / AUDIT
    log.write_text(log.read_text()[:-5])
    answer = handler(asked, config)
    assert answer.header["verdict"] == FAILED
    assert str(copied) not in answer.header["reason"]


def test_the_transcript_of_secure_aggregation_has_a_root_for_each_round(tmp_path: Path) -> None:
    folder = deployed(tmp_path, SECURE)
    certify(folder / "run")
    told = content_of(folder)["secure_aggregation"]
    assert [one["round"] for one in told] == [1]
    names = {"Opening", "PublicKeys", "Roster", "EncryptedShares", "Delivery", "Ready", "Unmasking", "RevealedShares"}
    rows = [row for row in rows_of(folder / "run") if row.get("round") == 1]
    assert told[0]["rows"] == len([row for row in rows if row.get("message") in names or row.get("masked")])
    assert faults(folder) == ""


# simulations


def test_a_simulation_is_certified_by_its_own_key_and_says_so(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run")
    path, content = certify(run)
    assert content["kind"] == "simulation"
    assert "only its owner" in content["vouches"]
    assert [one["receipt"] for one in content["clients"]] == [None] * len(content["clients"])
    assert verify_certificate(path, run=run).faults == []
    again = certify(run)[1]
    assert again["key"] == content["key"], "one run has one key"
    text = (run / EGRESS).read_text()
    lines = text.splitlines(keepends=True)
    (run / EGRESS).write_text("".join([*lines[:3], *lines[4:]]))
    told = "\n".join(verify_certificate(path, run=run).faults)
    assert f"{EGRESS} is not the certified file" in told
    assert "has another rows" in told
    (run / EGRESS).write_text("".join(line for line in lines if '"client":1,' not in line))
    with refuses(DataError, "client 1"):
        certify(run)
    (run / EGRESS).write_text("{}\n[]\n")
    with refuses(DataError, "line 2"):
        certify(run)
    (run / EGRESS).unlink()
    with refuses(DataError, "is missing"):
        certify(run)


def test_epsilon_is_that_of_the_rounds_in_which_a_client_was_asked(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra polyfed[privacy] is not installed")
    privacy = (
        '[privacy]\nunit = "client"\nnoise_at = "client"\ndelta = 1e-3\nnoise_multiplier = 8.0\nclip_norm = 0.01\n'
    )
    run = simulated(tmp_path / "run", privacy + 'unprotected = ["statistic"]\n', cohort=2)
    content = certify(run)[1]
    whole = content["privacy"]["epsilon"]
    asked = {one["rounds"]: one["epsilon"] for one in content["clients"]}
    assert min(asked) < content["rounds"], "a client was not asked in every round"
    assert all(epsilon < whole for rounds, epsilon in asked.items() if rounds < content["rounds"])
    assert list(dict(sorted(asked.items())).values()) == sorted(asked.values())


def test_the_command_writes_and_verifies(copied: Path, capsys: Any) -> None:
    from polyfed.cli import main

    def call(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, words)])
        return stop.value.code or 0, *capsys.readouterr()

    run, keys, file = copied / "run", copied / "keys", copied / "signed.json"
    code, out, _ = call("certify", run, "-o", file, "--keys", keys, "--json")
    assert code == 0
    assert json.loads(out)["content"]["clients"][0]["name"] == "north"
    code, out, _ = call("certify", "--verify", file, run, "--keys", keys, "--device-logs", state(copied, 1))
    assert code == 0
    assert "3 of 3 devices signed" in out
    file.write_text(file.read_text().replace("north", "NORTH"))
    code, _, err = call("certify", "--verify", file, "--keys", keys)
    assert code == 5
    assert "was changed" in err
    assert call("certify")[0] == 2
    assert call("certify", run, "--verify", file, "-o", file)[0] == 2


def test_a_crate_describes_the_files_and_not_the_private_key(copied: Path) -> None:
    path, content = certify(copied / "run")
    described = write_crate(copied / "run", content)
    told = {one["@id"]: one for one in json.loads(described.read_text())["@graph"]}
    assert told["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    parts = {part["@id"] for part in told["./"]["hasPart"]}
    assert {path.name, RECIPE_FILE, EGRESS, AUDIT, PUBLIC_KEY} <= parts
    assert PRIVATE_KEY not in told
    for name in parts:
        text = (copied / "run" / name).read_bytes()
        assert told[name]["sha256"] == hashlib.sha256(text).hexdigest()
        assert told[name]["contentSize"] == str(len(text))
    refers = [reference["@id"] for one in told.values() for value in one.values() for reference in references(value)]
    assert {name for name in refers if "://" not in name} <= told.keys(), "each entity that is named is described"
    library = pytest.importorskip("rocrate.rocrate", reason="rocrate is not installed")
    read = library.ROCrate(copied / "run")
    assert {entity.id for entity in read.data_entities} == parts
    assert read.root_dataset["mentions"][0].type == "CreateAction"


def references(value: Any) -> list[dict[str, str]]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, dict) and set(one) == {"@id"}]
