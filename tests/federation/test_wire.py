"""The wire: what was encoded comes back, and nothing else gets through."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.test_mapping import most_while
from polyfed.algorithms.averaging import Update
from polyfed.core.errors import BadReply
from polyfed.core.messages import Message, carries, crossings, message
from polyfed.core.system.mapping import ALIGNED, LARGE, mapped
from polyfed.core.tree import Tree
from polyfed.federation.wire.wire_format import DTYPES, Packet, decode, encode
from refusals import refuses


@message
class Parcel(Message):
    params: Tree = carries("parameters")
    count: Tensor = carries("statistic")


def one() -> Parcel:
    params = {"a.weight": torch.arange(6.0).reshape(2, 3), "shared.bias": torch.tensor([1.5, -0.0])}
    return Parcel(params, torch.tensor(3))


def through_json(packet: Packet) -> Packet:
    return Packet(json.loads(json.dumps(packet.header)), bytes(packet.body))


def equal(a: Parcel, b: Parcel) -> bool:
    assert list(a.params) == list(b.params)
    pairs = [(a.count, b.count), *((a.params[n], b.params[n]) for n in a.params)]
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31))
def test_every_type_and_shape_comes_back_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 2, shape, generator=draw).to(DTYPES[dtype])
    parcel = Parcel({"a.w": value, "b.w": value.t() if value.dim() == 2 else value}, value.sum())
    assert equal(decode(through_json(encode(parcel)), Parcel, limit=10**6), parcel)


def test_an_empty_tree_is_nothing_sent() -> None:
    assert decode(through_json(encode(Parcel({}, torch.tensor(1)))), Parcel, limit=100).params == {}


def test_a_decoded_tensor_owns_its_memory() -> None:
    got = decode(encode(one()), Parcel, limit=1000)
    got.params["a.weight"].add_(1)
    assert float(got.params["a.weight"][0, 0]) == 1.0


def altered(**changes: Any) -> Packet:
    packet = through_json(encode(one()))
    return Packet(packet.header | changes, packet.body)


ROW = ["params", "a.weight", "float32", [2, 3]]
FORGED = {
    "no tensors": (altered(tensors=None), "lists no tensors"),
    "another type": (altered(message="Letter"), "expected Parcel"),
    "other kinds": (altered(kinds={"params": "raw", "count": "statistic"}), "other kinds"),
    "a field too many": (altered(tensors=[["extra", None, "float32", [8]]]), "its type lacks"),
    "a field missing": (Packet(altered().header | {"tensors": [ROW]}, encode(one()).body[:24]), "count is missing"),
    "a name twice": (altered(tensors=[["params", "a.w", "float32", [1]]] * 2), "came twice"),
    "a path for a name": (altered(tensors=[["params", "../../etc", "float32", [6]]]), "cannot read"),
    "an object's type": (altered(tensors=[["params", "a.w", "object", [6]]]), "cannot read"),
    "a negative shape": (altered(tensors=[["params", "a.w", "float32", [-2, 3]]]), "cannot read"),
    "an enormous shape": (altered(tensors=[["params", "a.w", "float32", [2**47, 2]]]), "past the end"),
    "nothing of enormous shape": (altered(tensors=[["params", "a.w", "float32", [0, 2**47, 2**47]]]), "cannot read"),
    "a shape of text": (altered(tensors=[["params", "a.w", "float32", "23"]]), "cannot read"),
    "a truth value in a shape": (altered(tensors=[["params", "a.w", "float32", [True, 3]]]), "cannot read"),
    "a tensor for a tree": (altered(tensors=[["params", None, "float32", [6]]]), "a tree belongs"),
    "bytes left over": (altered(tensors=[ROW, ["count", None, "int64", []]]), "its header says"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_packet_is_refused_in_words(forgery: str) -> None:
    packet, words = FORGED[forgery]
    with refuses(BadReply, words):
        decode(packet, Parcel, limit=10**6)


def test_a_packet_above_the_size_limit_is_refused_and_nan_passes() -> None:
    with refuses(BadReply, "too large"):
        decode(encode(one()), Parcel, limit=10)
    bad = Parcel({"a.w": torch.tensor([float("nan")])}, torch.tensor(1))
    assert decode(encode(bad), Parcel, limit=100).params["a.w"].isnan().all()


def test_a_boolean_is_0_or_1() -> None:
    packet = encode(Parcel({"a.w": torch.tensor([True, False])}, torch.tensor(1)))
    with refuses(BadReply, "neither 0"):
        decode(Packet(packet.header, b"\x07" + packet.body[1:]), Parcel, limit=100)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=8))
def test_noise_never_gets_further_than_a_refusal(body: bytes, noise: Any) -> None:
    header = encode(one()).header
    for forged in (header | {"tensors": [noise]}, header | {"tensors": noise}, {"message": noise}):
        with pytest.raises(BadReply):
            decode(Packet(forged, body), Parcel, limit=100)


def test_a_header_with_more_tensors_than_the_receiver_expects_is_refused_before_any_is_read(monkeypatch: Any) -> None:
    read = list[Any]()
    monkeypatch.setattr("polyfed.federation.wire.wire_format._entry", read.append)
    entries = [["params", f"a.{n}", "bool", [0]] for n in range(11)]
    header = {"message": "Update", "kinds": dict(Update.kinds), "tensors": entries}
    with refuses(BadReply, "many tensors"):
        decode(Packet(header), Update, limit=2**20, most=10)
    assert not read


def test_the_parts_of_a_message_cost_as_much_for_each_tensor_however_many_there_are() -> None:
    """With 600,000 tensors in a block, a quadratic loop would not end before the test's timeout."""
    nothing, one = torch.empty(0), torch.tensor(1)
    update = Update({f"a.{n}": nothing for n in range(600_000)}, one.float(), one)
    assert [part.block for part in crossings(update)] == ["a", "shared", "shared"]


def mixed(tail: float = 7.0) -> Parcel:
    params = {"a.bias": torch.arange(3.0), "a.weight": torch.rand(LARGE // 4 + 5), "b.weight": torch.rand(LARGE // 4)}
    return Parcel(params, torch.tensor(tail))


def test_large_tensors_stay_in_a_mapped_body_as_aligned_as_those_in_memory(tmp_path: Path) -> None:
    sent = mixed()
    packet = encode(sent)
    (tmp_path / "body").write_bytes(bytes(packet.body))
    mapping = mapped(tmp_path / "body")
    (tmp_path / "body").unlink()
    got: list[Parcel] = []
    size = 2 * LARGE
    assert most_while(lambda: got.append(decode(Packet(packet.header, mapping), Parcel, limit=2**30, shared=True))) < (
        size / 4
    )
    assert equal(got[0], sent)
    assert [value.data_ptr() % ALIGNED for value in got[0].params.values() if value.nbytes >= LARGE] == [0, 0]
    got[0].params["a.weight"].zero_()
    assert equal(decode(packet, Parcel, limit=2**30), sent), "a change stays with the receiver"


def test_nothing_hides_between_tensors() -> None:
    packet = encode(mixed())
    body = bytearray(bytes(packet.body))
    gaps = [place for place in range(12, ALIGNED) if body[place] == 0]
    assert len(gaps) == ALIGNED - 12, "after three numbers"
    body[40] = 1
    with refuses(BadReply, "between"):
        decode(Packet(packet.header, bytes(body)), Parcel, limit=2**30)
