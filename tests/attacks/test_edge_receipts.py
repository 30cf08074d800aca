"""The certificate of a run with edges: an edge or a server that hides or changes what passed between them is found."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from attacks.test_certificate import HARMS, content_of, independent_root, resigned
from attacks.test_reconciliation import forged
from engines.edge_devices import EdgeDevices, edge_devices
from engines.test_edges import EDGES
from polyfed.algorithms.hfm.messages import Upload
from polyfed.core.errors import DataError
from polyfed.core.system.files import AUDIT, EGRESS, FACTS, PUBLIC_KEY, RECEIPTS
from polyfed.data.column_fitting import Told
from polyfed.deploy.device.tasks import packed
from polyfed.deploy.edge.runtime import AtEdge, AtWork
from polyfed.deploy.server.countersignatures import collect_receipts, with_late
from polyfed.deploy.server.late_receipts import collect, read
from polyfed.engines.protocol import ENROLLED, FAILED, REFUSED, SIGNED, Enrolment, hello, sign_packet
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.edge_receipts import END, unanswered_parts
from polyfed.privacy.egress.audit_log.keys import canonical, key_text, signed
from polyfed.privacy.egress.audit_log.log import HEAD, private_key
from polyfed.privacy.egress.audit_log.receipts import ClientLedger
from polyfed.privacy.egress.contents import contents
from polyfed.report import reconcile

TWICE = EDGES.replace("rounds = 1", "rounds = 2")


def run_of(federation: EdgeDevices, folder: Path) -> Path:
    """Run it, and copy what a verifier may get: `run`, `edge-<silo>`, `device-<client>`, and public keys in `keys`."""
    federation.run()
    shutil.copytree(federation.app / "run", folder / "run")
    (folder / "keys").mkdir()
    for silo, told in enumerate(federation.devices):
        shutil.copytree(federation.state(silo), folder / f"edge-{silo}")
        shutil.copy(
            federation.credentials / f"node-{silo}.pub", folder / "keys" / f"{'north' if silo else 'south'}.pub"
        )
        for one in told["devices"]:
            shutil.copytree(one["config"]["state"], folder / f"device-{one['config']['client']}")
    shutil.copy(folder / "run" / PUBLIC_KEY, folder / "keys" / "server.pub")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    with edge_devices(tmp_path_factory.mktemp("federation"), TWICE) as federation:
        folder: Path = run_of(federation, tmp_path_factory.mktemp("run"))
    certify(folder / "run", keys=folder / "keys")
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def faults(folder: Path, *, files: bool = True, logs: tuple[str, ...] = ("edge-0", "edge-1", "device-3")) -> str:
    more: dict[str, Any] = {"run": folder / "run", "logs": [folder / name for name in logs]} if files else {}
    try:
        return "\n".join(verify_certificate(folder / "run" / "certificate.json", folder / "keys", **more).faults)
    except DataError as error:
        return str(error)


def test_every_edge_and_every_device_signs_and_the_certificate_says_so(finished: Path) -> None:
    content = content_of(finished)
    assert (content["kind"], "each edge" in content["vouches"]) == ("deployment with edges", True)
    assert [(one["silo"], one["name"], one["clients"]) for one in content["edges"]] == [
        (0, "south", [0, 1]),
        (1, "north", [2, 3]),
    ]
    assert faults(finished) == ""
    assert faults(finished, files=False) == "", "the keys of the edges are enough"
    for one in content["edges"]:
        own = [client for client in content["clients"] if client["client"] in one["clients"]]
        assert one["rows"] == sum(client["rows"] for client in own)
        assert one["unanswered"] == [[0, 0, END]], "the first message, after which the server hears nothing"
        assert one["answered"]["rows"] == one["rows"] - 3, "the three blocks of the first message"
        assert one["receipt"]["receipt"]["received"] == ["ToEdge"]
    for one in content["clients"]:
        said = one["receipt"]["receipt"]
        assert said["left"] == one["answered"]
        assert said["rows"] > said["left"]["rows"], "the device has also signed what went to its edge"
    found = verify_certificate(finished / "run" / "certificate.json", finished / "keys")
    assert "2 edges of 2 signed what passed between silo and server" in found.remarks
    assert "4 devices signed the roots of their own ledgers" in found.remarks


def test_the_root_of_an_edge_is_over_what_passed_and_no_other_row(finished: Path) -> None:
    for one in content_of(finished)["edges"]:
        for log in (finished / "run", finished / f"edge-{one['silo']}"):
            rows = [json.loads(line) for line in (log / AUDIT).read_text().splitlines()]
            own = [
                {k: v for k, v in row.items() if k not in ("time", "previous", "device_seal")}
                for row in rows
                if row.get("client") in one["clients"]
                and "verdict" in row
                and (row["destination"] == "server" or row.get("message") == "ToEdge")
            ]
            ordered = sorted((row["round"], row["ask"], row["destination"] != "client", canonical(row)) for row in own)
            assert len(ordered) == one["rows"]
            assert independent_root([row[-1] for row in ordered]).hex() == one["root"]


@pytest.mark.parametrize(
    "name", ["edge-1/" + AUDIT, "edge-1/" + HEAD, f"run/{AUDIT}", f"run/{EGRESS}", f"run/{RECEIPTS}"]
)
@pytest.mark.parametrize("harm", sorted(HARMS))
def test_a_dropped_moved_or_altered_line_fails_the_verification(name: str, harm: str, copied: Path) -> None:
    path = copied / name
    before = path.read_bytes()
    for n, m in ((3, 1), (len(before) // 2, 2), (len(before) - 2, 5)):
        after = HARMS[harm](before, n, m)
        if after != before:
            path.write_bytes(after)
            told = faults(copied)
            assert told, (name, harm, n, m)
            assert "Traceback" not in told


def without_an_upload(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lost = next(row for row in rows if row.get("message") == "Upload")
    return [row for row in rows if row is not lost]


def with_other_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lost = next(row for row in rows if row.get("message") == "Upload")
    return [row | {"sha256": "0f" * 32} if row is lost else row for row in rows]


def moved_to_another_round(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lost = next(row for row in rows if row.get("message") == "Upload")
    return [row | {"round": 2} if row is lost else row for row in rows]


def without_what_it_received(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("message") != "ToEdge"]


LIES = (without_an_upload, with_other_bytes, moved_to_another_round, without_what_it_received)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: Any) -> Any:
    """A federation whose run has ended; its processes still answer."""
    with edge_devices(tmp_path_factory.mktemp("ended"), EDGES) as federation:
        run_of(federation, folder := tmp_path_factory.mktemp("ended-run"))
        yield federation, folder


def signed_again(federation: EdgeDevices, folder: Path, recipe: str = EDGES) -> dict[str, Any]:
    """What the edge of silo 1, with its state in `folder`, says when the server asks it to sign. No device answers."""
    run = json.loads((folder / "run" / FACTS).read_text())["run"]
    file = federation.edges[1]["devices"][0]["config"]["edge"] | {"state": str(folder / "edge-1")}
    (folder / "recipe.toml").write_text(recipe)
    handler = AtEdge(folder / "recipe.toml", packed(recipe, ""))
    with patch("polyfed.deploy.edge.signing.SIGN_SECONDS", 0.0):
        answer = handler(sign_packet(run, 1, []), {"edge": file})
    return dict(answer.header)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_an_edge_that_books_less_or_otherwise_than_it_sent_is_named(lie: Any, ended: Any, tmp_path: Path) -> None:
    """It rewrites its log with its own key before it signs, so that the log is whole."""
    federation, folder = ended
    shutil.copytree(folder, tmp_path / "copy")
    copy = tmp_path / "copy"
    forged(copy / "edge-1", lie)
    said = signed_again(federation, copy)
    assert said["verdict"] == SIGNED, said
    receipts = json.loads((copy / "run" / RECEIPTS).read_text())
    receipts["edges"]["1"] = {name: said[name] for name in ("receipt", "key", "signature", "tie")}
    (copy / "run" / RECEIPTS).write_text(json.dumps(receipts))
    certify(copy / "run", keys=copy / "keys")
    told = faults(copy, files=False)
    assert "the edge of silo 1 signed another ledger" in told
    assert "silo 0" not in told
    assert any("client" in finding for finding in reconcile(copy / "run", [copy / "edge-1"]).findings)


def test_an_edge_whose_log_is_damaged_signs_nothing(ended: Any, tmp_path: Path) -> None:
    federation, folder = ended
    shutil.copytree(folder, tmp_path / "copy")
    log = tmp_path / "copy" / "edge-1" / AUDIT
    log.write_text(log.read_text().replace('"Upload"', '"Upl0ad"', 1))
    said = signed_again(federation, tmp_path / "copy")
    assert said["verdict"] == FAILED
    assert str(tmp_path) not in said["reason"]


def test_an_edge_that_changes_a_reply_on_its_way_is_found_out_by_the_device(tmp_path: Path) -> None:
    """Edge and server agree about what passed between them, but a device has signed what it sent."""
    honest = AtWork.forwarded

    def changed(self: AtWork, made: Any) -> Packet:
        replies = [answer.replies[3] for answer in made.answers if 3 in answer.replies]
        for upload in [reply for reply in replies if isinstance(reply, Upload)]:
            next(iter(upload.params.values())).add_(1.0)
            entries = self.engine.ledger.entries
            at = next(n for n, one in enumerate(entries) if (one.clients, one.message) == ((3,), "Upload"))
            parts, allowed = entries[at].crossings, entries[at].allowed
            entries[at] = replace(entries[at], contents=contents(upload, parts, allowed))
        return honest(self, made)

    (tmp_path / "fed").mkdir()
    with patch.object(AtWork, "forwarded", changed), edge_devices(tmp_path / "fed", EDGES) as federation:
        folder = run_of(federation, tmp_path / "copy")
    certify(folder / "run", keys=folder / "keys")
    assert "client 3: its device signed other rows" in (told := faults(folder, files=False))
    assert "client 2" not in told
    assert "the edge of" not in told, "what it sent is what the server got"


def swapped_edges(content: dict[str, Any]) -> None:
    one, other = content["edges"]
    one["receipt"], other["receipt"] = other["receipt"], one["receipt"]


def fewer_rows(content: dict[str, Any]) -> None:
    content["edges"][1]["receipt"]["receipt"]["rows"] -= 1


def smaller_ledger(content: dict[str, Any]) -> None:
    content["edges"][1]["answered"]["rows"] -= 1


def left_out(content: dict[str, Any]) -> None:
    content["edges"][1]["unanswered"] = [[1, 0, END]]


def other_device(content: dict[str, Any]) -> None:
    content["clients"][3]["device"] = content["clients"][2]["device"]


def without_edges(content: dict[str, Any]) -> None:
    del content["edges"]


def without_an_edge(content: dict[str, Any]) -> None:
    del content["edges"][1]


def as_if_without_edges(content: dict[str, Any]) -> None:
    del content["edges"]
    content["kind"] = "deployment"
    content["vouches"] = "The server vouches for what it sent and received, and each device for what its receipt signs."


def no_word_of_what_left(content: dict[str, Any]) -> None:
    content["clients"][3]["receipt"]["receipt"].pop("left")


SERVER_LIES = {
    swapped_edges: "the edge of silo 0: its receipt is that of silo 1",
    fewer_rows: "the edge of silo 1: the signature of its receipt",
    smaller_ledger: "the edge of silo 1 signed another ledger",
    left_out: "the edge of silo 1 left out other requests",
    other_device: "client 3 is the device",
    without_edges: "whether it lists edges",
    without_an_edge: "each of its clients once",
    as_if_without_edges: "its device signed another ledger",
    no_word_of_what_left: "client 3: the signature of its receipt",
}


@pytest.mark.parametrize("lie", SERVER_LIES, ids=lambda lie: lie.__name__)
def test_a_server_that_signs_a_lie_about_an_edge_is_found_out_with_public_keys(lie: Any, copied: Path) -> None:
    resigned(copied, lie)
    assert SERVER_LIES[lie] in faults(copied, files=False)


def test_devices_of_a_silo_count_only_through_an_edge_whose_key_is_trusted(copied: Path) -> None:
    (copied / "keys" / "north.pub").unlink()
    told = faults(copied, files=False)
    assert "the edge of silo 1: neither the key" in told
    assert "client 2: neither the key" in told
    assert "client 1" not in told


def test_an_edge_that_made_up_the_receipt_of_a_device_needs_a_key_that_signs_it(copied: Path) -> None:
    """It signs with its own key for client 2, whose device it names rightly."""
    content = content_of(copied)
    key = private_key(copied / "edge-1" / "audit-key.pem")
    one = content["clients"][2]["receipt"]
    forged_one = {"receipt": one["receipt"], "key": key_text(key.public_key()), "tie": one["tie"]}
    forged_one["signature"] = signed(key, b"polyfed receipt 1\n", one["receipt"])

    def change(content: dict[str, Any]) -> None:
        content["clients"][2]["receipt"] = forged_one

    resigned(copied, change)
    assert "client 2: the key of its log is not signed by the key of a device" in faults(copied, files=False)


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another run": lambda header: header["receipt"].update(run="other"),
    "another silo": lambda header: header["receipt"].update(silo=0),
    "more": lambda header: header["receipt"].update(more=[[]]),
    "no number": lambda header: header["receipt"].update(rows=float("nan")),
    "long": lambda header: header["receipt"].update(received=["x"] * 1000),
    "unsigned": lambda header: header.update(signature="00"),
    "no receipt": lambda header: header.pop("receipt"),
    "no verdict": lambda header: header.pop("verdict"),
}


class Saying:
    """A transport of a server: edges answer what they have said, after a change."""

    def __init__(self, answers: dict[int, Packet]) -> None:
        self.answers, self.node_of = answers, dict.fromkeys(answers, 0)

    def exchange(self, packets: dict[int, Packet], patience: Any) -> dict[int, Packet]:
        return {silo: self.answers[silo] for silo in packets}


def as_said(folder: Path, silo: int, clients: list[int]) -> dict[str, Any]:
    told = json.loads((folder / "run" / RECEIPTS).read_text())
    return {"verdict": SIGNED, **told["edges"][str(silo)], "devices": {str(one): told[str(one)] for one in clients}}


def test_an_edge_that_sends_something_else_than_a_receipt_spoils_nothing(copied: Path) -> None:
    run, out, silos = content_of(copied)["run"], copied / "run", {0: [0, 1], 1: [2, 3]}
    honest = {0: Packet(as_said(copied, 0, [0, 1])), 1: Packet(as_said(copied, 1, [2, 3]))}

    def kept(header: dict[str, Any]) -> dict[str, Any]:
        collect_receipts(out, run, Saying({**honest, 1: Packet(header)}), silos=silos)
        result: dict[str, Any] = json.loads((out / RECEIPTS).read_text())
        return result

    assert sorted(kept(dict(honest[1].header))) == ["0", "1", "2", "3", "edges"]
    for name, lie in FORMS.items():
        header = json.loads(json.dumps(honest[1].header))
        lie(header)
        told = kept(header)
        assert (sorted(told["edges"]), sorted(told)) == (["0"], ["0", "1", "edges"]), name
    strange: tuple[Any, ...] = (
        None,
        [],
        {"2": 7},
        {"0": honest[0].header["devices"]["0"]},
        {"2": honest[1].header["devices"]["3"]},
    )
    for devices in strange:
        told = kept({**honest[1].header, "devices": devices})
        assert (sorted(told["edges"]), sorted(told)) == (["0", "1"], ["0", "1", "edges"]), devices
    path, content = certify(out)
    assert [one["receipt"] is None for one in content["clients"]] == [False, False, True, True]
    assert not verify_certificate(path, run=out).faults


def test_an_edge_that_is_away_leaves_the_server_alone_with_its_word(copied: Path) -> None:
    told = json.loads((copied / "run" / RECEIPTS).read_text())
    del told["edges"]["1"]
    (copied / "run" / RECEIPTS).write_text(json.dumps(told))
    path, _ = certify(copied / "run", keys=copied / "keys")
    found = verify_certificate(path)
    assert not found.faults
    assert any("without receipt of their edge" in remark and "silos 1" in remark for remark in found.remarks)


def test_parts_without_an_answer_are_left_out_up_to_the_next_message() -> None:
    def row(round: int, ask: int, up: bool) -> tuple[tuple[int, int], bool, bytes]:
        return (round, ask), up, b"{}"

    asked = [row(1, 0, False), row(1, 4, True), row(1, 6, False), row(1, 9, False), row(1, 9, True), row(2, 0, False)]
    assert unanswered_parts(ClientLedger(tuple(asked))) == [(1, 6, 9), (2, 0, END)]
    whole = ClientLedger(tuple(asked))
    assert [place for place, _, _ in whole.without([(1, 6, 9), (2, 0, END)]).rows] == [(1, 0), (1, 4), (1, 9), (1, 9)]


@pytest.mark.parametrize("allowed", [True, False])
def test_an_edge_books_what_its_devices_tell_of_their_columns_or_refuses_it(
    allowed: bool, ended: Any, tmp_path: Path
) -> None:
    """Statistics of columns leave the silo at enrolment, under the policy of the edge."""
    federation, _ = ended
    statistics = {"a": {"sex": Told(words=("f", "m"))}}
    own: dict[str, Any] = {"silo": 1, "tested": False, "num_classes": 3, "rows": 20}
    known = [
        Enrolment(client=2, modalities=("a",), shapes={"a": (6,)}, columns=statistics, **own),
        Enrolment(client=3, modalities=("b",), shapes={"b": (6,)}, **own),
    ]
    policy = tmp_path / "policy.toml"
    kinds = '["parameters", "statistic"]'
    policy.write_text(
        f"[egress.a]\nserver = {kinds if allowed else ['parameters']}\n[egress.shared]\nserver = {kinds}\n".replace(
            "'", '"'
        )
    )
    file = federation.edges[1]["devices"][0]["config"]["edge"]
    file = file | {"state": str(tmp_path / "state"), "policy": str(policy)}
    (tmp_path / "recipe.toml").write_text(EDGES)
    handler = AtEdge(tmp_path / "recipe.toml", packed(EDGES, ""))
    with patch("polyfed.deploy.edge.runtime.met", lambda transport, edge, seconds: known):
        said = handler(hello(), {"edge": file})
    assert said.header["verdict"] == (ENROLLED if allowed else REFUSED), said.header
    log = tmp_path / "state" / AUDIT
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    booked = [(row["client"], row["field"], row["kind"], row["run"]) for row in rows if "verdict" in row]
    assert booked == ([(2, "sex", "statistic", "")] if allowed else [])


def test_an_edge_and_a_device_behind_one_that_were_away_sign_later(tmp_path: Path) -> None:
    """Edge 1 and a device of silo 0 are away at the end; edge 0 has signed, and its receipt stays as it is."""
    real = AtEdge._countersigned

    def away(self: AtEdge, edge: Any, recipe: Any, packet: Packet) -> Packet:
        if edge.silo == 1:
            return Packet({"verdict": FAILED, "reason": "away"})
        told = real(self, edge, recipe, packet)
        return Packet({**told.header, "devices": {"0": told.header["devices"]["0"]}})

    with edge_devices(tmp_path, EDGES) as federation:
        with patch.object(AtEdge, "_countersigned", away):
            federation.run()
        out, keys = federation.app / "run", tmp_path / "keys"
        keys.mkdir()
        for silo in range(2):
            shutil.copy(federation.credentials / f"node-{silo}.pub", keys / f"silo-{silo}.pub")
        shutil.copy(out / PUBLIC_KEY, keys / "server.pub")
        first = json.loads((out / RECEIPTS).read_text())
        assert [[*first["edges"]], sorted(first)] == [["0"], ["0", "edges"]]
        before, _ = certify(out, tmp_path / "before.json", keys)
        run = json.loads((out / FACTS).read_text())["run"]
        owed = read(federation.credentials, run)
        assert owed is not None
        assert sorted(owed.absent) == [0, 1]
        with patch.object(AtEdge, "_countersigned", away):
            assert collect(federation.credentials, run, [0, 1]) == [0, 1]
        assert json.loads((out / RECEIPTS).read_text()) == first
        assert collect(federation.credentials, run, [0, 1]) == []
        receipts = json.loads((out / RECEIPTS).read_text())
        assert [[*receipts["edges"]], sorted(receipts)] == [["0", "1"], ["0", "1", "2", "3", "edges"]]
        assert receipts["edges"]["0"] == first["edges"]["0"]
        after, content = certify(out, tmp_path / "after.json", keys)
    assert all(one["receipt"] for one in (*content["clients"], *content["edges"]))
    for certificate in (before, after):
        assert verify_certificate(certificate, keys, out, [federation.state(0), federation.state(1)]).faults == []
    assert any("came after" in one for one in verify_certificate(before, None, out).remarks)
    other = receipts["2"] | {"tie": receipts["3"]["tie"]}
    kept, warned = {name: one for name, one in receipts.items() if name != "2"}, list[str]()
    assert with_late(kept, {"2": other}, warned.append) == kept
    assert "its edge named" in warned[0]
