"""A federation of silos whose edges are processes of their own gives what it gives in one process."""

import hashlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.edge_devices import EdgeDevices, edge_devices
from engines.test_own_modes import SILOS
from polyfed.core.errors import DataError, EgressError, RecipeError, TooFewReplies
from polyfed.core.system.files import AUDIT
from polyfed.data.reading.row_facts import number_of
from polyfed.deploy.device.data import pseudonyms
from polyfed.deploy.edge.edge_file import edge_file
from polyfed.deploy.local_federation import LocalFederation
from polyfed.deploy.server.queued_run import run_here
from polyfed.federation.wire.wire_format import Packet, unframed
from polyfed.report import reconcile
from refusals import refuses

EDGES = (
    SILOS.replace("server-sees", "edge").replace("rounds = 2", "rounds = 1").replace('"hfm"', '"hfm"\nexchanges = 1')
)
TWICE = (
    EDGES.replace("rounds = 1", "rounds = 2")
    .replace("silos = 2", "silos = 2\npersonal_test = 0.3\npersonal_validation = 0.2")
    .replace("exchanges = 1", "exchanges = 2")
    + '[evaluate]\nconformal = "split"\n'
)

CANARY = 7_000_000_000_123
"""The first sample id, which no other number of a run has."""

CLASSES, LABELS = 240, (131, 149, 157, 163, 173, 181, 199, 211)
"""The labels of all samples. No text in ASCII has such bytes, and no counter of a run takes only such values."""

FEWEST = 8
"""A leak has so many labels side by side, in any order. By chance, 8 bytes are labels once in a million megabytes."""

WIDTHS = ("u1", "<i2", "<i4", "<i8", ">i2", ">i4", ">i8", "<f2", "<f4", "<f8", "bfloat16")
"""The types in which labels could travel: those of the wire format, and integers of the other byte order."""


def encoded(labels: Any, width: str) -> bytes:
    """Labels in a type; the upper halves of floats are in bfloat16."""
    if width == "bfloat16":
        return np.asarray(labels, "<f4").view("<u2")[1::2].tobytes()
    return np.asarray(labels, width).tobytes()


def labels_in(written: bytes) -> set[str]:
    """The types in which labels, or a part of a batch of them in any order, lie side by side; `text` for decimals."""
    found = set[str]()
    for width in WIDTHS:
        size = len(encoded(LABELS[:1], width))
        wanted = np.frombuffer(encoded(LABELS, width), f"u{size}")
        for offset in range(size):
            values = np.frombuffer(written, f"u{size}", (len(written) - offset) // size, offset)
            others = np.flatnonzero(~np.isin(values, wanted))
            if np.diff(others, prepend=-1, append=len(values)).max() > FEWEST:
                found.add(width)
    one = rb"(?<![\d.])(?:%s)(?:\.0*)?(?![\d.])" % b"|".join(str(label).encode() for label in LABELS)
    if re.search(rb"(?:%s[^\w.]{1,16}){%d}%s" % (one, FEWEST - 1, one), written):
        found.add("text")
    return found


def same_run(out: Path, one: Path) -> None:
    """The model, its scores and the training loss are the same bit for bit."""
    there, here = polyfed.load_run(out), polyfed.load_run(one)
    assert all(torch.equal(value, there.state.params[name]) for name, value in here.state.params.items())
    assert [row["train_loss"] for row in there.rounds] == [row["train_loss"] for row in here.rounds]
    assert json.loads((out / "result.json").read_text())["metrics"] == here.result["metrics"]


def rows(*files: Path) -> Counter[str]:
    """The rows of ledgers, without run and number of the request."""
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return Counter(json.dumps({k: v for k, v in row.items() if k not in ("run", "ask")}) for row in found)


def test_a_run_with_edges_gives_what_it_gives_in_one_process(tmp_path: Path) -> None:
    with edge_devices(tmp_path, TWICE) as federation:
        federation.run()
        out = federation.app / "run"
        own = [next(federation.state(silo).glob(f"*/client-{silo}/egress.jsonl")) for silo in (0, 1)]
    polyfed.run(federation.recipe, tmp_path / "one", engine="sequential")
    same_run(out, tmp_path / "one")
    told = json.loads((out / "result.json").read_text())
    assert told["metrics"]["personal"]
    assert told["conformal"] == json.loads((tmp_path / "one" / "result.json").read_text())["conformal"]
    passed = Counter({row: count for row, count in rows(*own).items() if '"ToEdge"' not in row})
    assert passed == rows(tmp_path / "one" / "egress.jsonl"), "the edges have passed what one process books"
    found = reconcile(out, [federation.state(0), federation.state(1)])
    assert not found.findings
    log = federation.state(1) / AUDIT
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"Upload"' not in line))
    assert any("lacks" in finding for finding in reconcile(out, [federation.state(1)]).findings)
    at_server = [json.loads(line) for line in (out / "egress.jsonl").read_text().splitlines()]
    assert {row["destination"] for row in at_server} == {"client", "server"}
    assert {row["message"] for row in at_server} == {"ToEdge", "Adopted", "Upload", "OwnScore", "ScoreCounts"}


@contextmanager
def heard(federation: EdgeDevices) -> Iterator[list[list[Packet]]]:
    """All that comes to the server, and to each edge."""
    found = [list[Packet]() for _ in federation.hubs]
    for hub, own in zip(federation.hubs, found, strict=True):
        queue, deliver = hub.hub.queue, hub.hub.queue.deliver

        def delivered(
            request: Any, kind: str, *carried: Any, queue: Any = queue, deliver: Any = deliver, own: Any = own
        ) -> bool:
            packet = unframed(queue.reply(request.id, kind).read_bytes())
            assert isinstance(packet, Packet)
            own.append(packet)
            return bool(deliver(request, kind, *carried))

        queue.deliver = delivered  # type: ignore[method-assign]
    yield found


def with_canaries(federation: EdgeDevices, *, labels: bool = False) -> None:
    """Give all samples ids that no other number has; with `labels`, also `LABELS`."""
    for place in federation.places:
        with np.load(place / "data.npz") as arrays:
            kept = dict(arrays)
        kept["id"] = kept["id"] + CANARY
        if labels:
            kept["label"] = np.array(LABELS)[kept["label"] % len(LABELS)]
            kept["label_name"] = np.array([f"kind {n}" for n in range(CLASSES)])
        np.savez(place / "data.npz", **kept)


@contextmanager
def ended(folder: Path, recipe: str) -> Iterator[EdgeDevices]:
    """A federation with canaries whose run has ended; its processes go on."""
    with edge_devices(folder, recipe) as federation:
        with_canaries(federation)
        federation.run()
        yield federation


def parts(packets: list[Packet]) -> Iterator[tuple[str, str, bytes]]:
    """Kind, field and bytes of each tensor of device replies."""
    for packet in packets:
        at = 0
        for field, _, dtype, shape in packet.header.get("tensors", []):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            yield packet.header["kinds"][field], field, packet.body[at : at + size]
            at += size


def forwarded(server: list[Packet]) -> list[dict[str, Any]]:
    """The replies of devices that edges pass on to the server."""
    return [one for packet in server for asked in packet.header.get("asked", []) for one in asked["replies"].values()]


def said_and_written(server: list[Packet], run: Path) -> bytes:
    """What the server hears, and the files that it writes."""
    said = b"".join(json.dumps(packet.header).encode() + bytes(packet.body) for packet in server)
    return said + b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


IDS = [CANARY + n for n in range(120)]


def expect_no_embedding_or_id(written: bytes, edges: list[list[Packet]]) -> None:
    secret = [body for own in edges for kind, _, body in parts(own) if kind in ("embeddings", "ids")]
    assert len(secret) == 8, "ids and embeddings of four devices"
    for body in secret:
        assert not any(body[at : at + 8] in written for at in range(0, len(body) - 7, 8)), "8 bytes of an embedding"
    assert not any(str(n).encode() in written or n.to_bytes(8, "little") in written for n in IDS)


def test_the_server_hears_no_embedding_id_or_label_and_an_edge_no_row(tmp_path: Path) -> None:
    text = EDGES.replace("classes = 3", f"classes = {CLASSES}")
    with edge_devices(tmp_path, text) as federation, heard(federation) as (server, *edges):
        with_canaries(federation, labels=True)
        federation.run()
        run = federation.app / "run"
    assert {kind for one in forwarded(server) for kind in one["kinds"].values()} == {"parameters", "statistic"}
    expect_no_embedding_or_id(written := said_and_written(server, run), edges)
    assert not labels_in(written)
    at_edges = b"".join(json.dumps(packet.header).encode() + packet.body for own in edges for packet in own)
    assert any(n.to_bytes(8, "little") in at_edges for n in IDS), "the canaries are in the data"
    for place in federation.places:
        with np.load(place / "data.npz") as arrays:
            for name in {"a", "b"} & {*arrays.files}:
                values = np.ascontiguousarray(arrays[name]).reshape(len(arrays[name]), -1)
                assert not any(row.tobytes() in at_edges for row in values)
        assert "<i8" in labels_in((place / "data.npz").read_bytes()), "the canaries are in the data"
    assert not labels_in(at_edges)


def test_ids_that_overlap_nowhere_end_the_run_in_a_sentence_without_ids(tmp_path: Path) -> None:
    with edge_devices(tmp_path, EDGES.replace('"hfm"', '"hfm"\noverlap = "common"')) as federation:
        with_canaries(federation)
        with np.load(federation.places[3] / "data.npz") as arrays:
            kept = dict(arrays)
        np.savez(federation.places[3] / "data.npz", **kept | {"id": kept["id"] + 1000})
        with refuses(DataError, "sample ids") as refused:
            federation.run()
        assert str(CANARY)[:9] not in str(refused.value)
        assert str(CANARY)[:9] not in "".join(path.read_text() for path in (federation.app / "run").glob("*.json*"))


def test_an_edge_matches_rows_by_pseudonyms_and_reads_no_id(tmp_path: Path) -> None:
    """Ids are words, and two devices of a silo share some of their samples."""
    (tmp_path / "silo.key").write_text("0123456789abcdef" * 4)
    text = EDGES.replace('"hfm"', '"hfm"\noverlap = "common"')
    with edge_devices(tmp_path, text, more={"id_key": str(tmp_path / "silo.key")}) as federation:
        with_canaries(federation)
        words = list[str]()
        for number, place in enumerate(federation.places):
            with np.load(place / "data.npz") as arrays:
                kept = dict(arrays)
            names = [f"patient {one}" for one in kept["id"]]
            names[: 10 * number] = [f"other {one} of {number}" for one in kept["id"][: 10 * number]]
            np.savez(place / "data.npz", **kept | {"id": np.array(names)})
            words += names
        with heard(federation) as (_, *edges):
            federation.run()
    at_edges = b"".join(json.dumps(packet.header).encode() + packet.body for own in edges for packet in own)
    plain = {number_of(hashlib.sha256(word.encode())) for word in words}
    assert not any(one.to_bytes(8, "little") in at_edges or str(one).encode() in at_edges for one in plain)
    assert b"patient" not in at_edges
    for own, common in zip(edges, (38, 18), strict=True):
        a, b = ({*np.frombuffer(body, np.int64)} for kind, field, body in parts(own) if (kind, field) == ("ids", "ids"))
        assert (len(a), len(b), len(a & b)) == (48, 48, common), "what the words share"


@pytest.mark.parametrize("width", [*WIDTHS, "text"])
def test_the_search_for_labels_finds_a_batch_of_any_type_and_order(width: str) -> None:
    other, batch = np.random.default_rng(1).bytes(10_000), [random.choice(LABELS) for _ in range(FEWEST)]
    sent = json.dumps(batch).encode() if width == "text" else encoded(batch, width)
    assert not labels_in(other)
    assert not labels_in(other + sent[: -len(sent) // FEWEST] + other), "fewer labels"
    for shift in range(8):
        assert width in labels_in(other[: 4001 + shift] + sent + other)


@pytest.mark.parametrize("key", ["", "short"])
def test_a_key_of_pseudonyms_that_cannot_be_used_is_named_on_the_device(key: str, tmp_path: Path) -> None:
    path = tmp_path / "silo.key"
    if key:
        path.write_text(key)
    with refuses(DataError, "openssl rand"):
        pseudonyms(torch.arange(3), path)


def test_another_key_gives_other_pseudonyms(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 32)
    a, b = (pseudonyms(torch.arange(100), tmp_path / name) for name in "ab")
    assert not {*a.tolist()} & {*b.tolist()}
    assert torch.equal(a, pseudonyms(torch.arange(100), tmp_path / "a"))
    assert bool((a >= 0).all())


def test_an_edge_without_its_silo_says_who_is_missing(tmp_path: Path) -> None:
    text = EDGES.replace("enrol_seconds = 120.0", "enrol_seconds = 3.0")
    with edge_devices(tmp_path, text, count=lambda silo: 2 + silo) as federation, refuses(TooFewReplies, "1 of 2"):
        federation.run()


def test_an_edge_obeys_its_own_policy(tmp_path: Path) -> None:
    closed = '[egress.a]\nserver = []\n[egress.shared]\nserver = ["parameters", "statistic"]\n'
    with edge_devices(tmp_path, EDGES, policies={1: closed}) as federation:
        with refuses(EgressError, "its policy"):
            federation.run()
        assert not (federation.app / "run" / "result.json").exists()


def test_the_file_of_an_edge_names_all_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[limits]\nmin_rows = 3\n")
    (tmp_path / "edge.toml").write_text('server = "s:1"\nsilo = 0\ndevices = 2\npolicy = "policy.toml"\n')
    with pytest.raises(RecipeError) as refused:
        edge_file(tmp_path / "edge.toml")
    assert all(word in str(refused.value) for word in ("edge.key", "ca.pem", "edge-credentials", "[limits]"))
    for wrong in ("silo = -1", "devices = 0", 'server = "nowhere"', "color = 1"):
        name = wrong.split(" ")[0]
        text = "".join(f"{k} = {v}\n" for k, v in {"server": '"s:1"', "silo": 0, "devices": 2}.items() if k != name)
        (tmp_path / "edge.toml").write_text(text + wrong)
        with pytest.raises(RecipeError) as refused:
            edge_file(tmp_path / "edge.toml")
        assert name in str(refused.value) or "nowhere" in str(refused.value)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_edges_and_devices_that_are_killed_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(EDGES.replace("rounds = 1", "rounds = 6"))
    with LocalFederation(tmp_path / "recipe.toml", tmp_path / "fed") as federation:
        federation.start()
        begun = federation.out / "rounds.jsonl"

        def kill() -> None:
            while not begun.exists():
                time.sleep(0.05)
            for victim in ("edge-0", "device-3", "edge-1", "server", "edge-0"):
                time.sleep(random.random())
                federation.processes[victim].kill()
                federation.processes[victim].wait()
                name, _, number = victim.partition("-")
                starts = {"edge": federation.start_edge, "device": federation.start_device}
                starts[name](int(number)) if number else federation.start_server()

        with ThreadPoolExecutor(1) as other:
            killed = other.submit(kill)
            out = run_here(federation.app, federation.credentials, {})
            killed.result()
    polyfed.run(tmp_path / "recipe.toml", tmp_path / "one", engine="sequential")
    same_run(out, tmp_path / "one")
