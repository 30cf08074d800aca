"""[wire]: each form against NumPy, error feedback, every method, every engine, devices, and devices that lie."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyfed
import world
from engines.direct import hub_of, joined, played
from laws.rows import ROWS
from laws.test_laws import world as law_world
from polyfed.core import keys
from polyfed.core.errors import BadReply, RecipeError
from polyfed.core.messages import crossings
from polyfed.core.packing import Packing
from polyfed.core.request import Request, noise_key
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.settings import DeploymentSpec, EngineSpec
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.wire.compression import RESIDUAL, Compression, Expected, Wire, rounded_at_random
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.selection.divfl import DivFl
from refusals import refuses

MIXED = Wire(compress={"a": "int8", "b": "top-k", "shared": "bf16"}, fraction=0.1, down="bf16")
FORMS = {
    "bf16": Packing("bf16"),
    "int8": Packing("int8"),
    "int8 by tensor": Packing("int8", by_row=False),
    "top-k": Packing("top-k", 0.3),
}


def bf16_of(x: np.ndarray) -> np.ndarray:
    """The upper half of the bits, after rounding to the nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def int8_of(x: np.ndarray, key: int, by_row: bool) -> np.ndarray:
    noise = keys.uniform(key, x.shape).numpy()
    rows = x.reshape(len(x), -1) if by_row and x.ndim > 1 else x.reshape(1, -1)
    scale = (np.abs(rows).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
    safe = np.where(scale > 0, scale, np.float32(1))
    codes = np.floor(rows / safe + noise.reshape(rows.shape)).clip(-127, 127)
    return (codes * scale).reshape(x.shape)


def top_of(x: np.ndarray, fraction: float) -> np.ndarray:
    order = sorted(range(x.size), key=lambda i: (-abs(float(x.flat[i])), i))
    out = np.zeros_like(x)
    for place in order[: max(1, math.ceil(fraction * x.size))]:
        out.flat[place] = x.flat[place]
    return out


def oracle(name: str, x: np.ndarray, key: int) -> np.ndarray:
    packing = FORMS[name]
    if packing.form == "bf16":
        return bf16_of(x)
    return top_of(x, packing.fraction) if packing.form == "top-k" else int8_of(x, key, packing.by_row)


def through(packing: Packing, value: Tensor, key: int = 1) -> Tensor:
    return packing.unpacked(packing.packed(value, key), tuple(value.shape), value.dtype)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2**20))
def test_each_form_is_what_numpy_computes(name: str, shape: list[int], seed: int) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=shape).round(1).astype(np.float32))
    pieces = FORMS[name].packed(values, seed)
    assert FORMS[name].flaw(pieces, tuple(shape)) == ""
    assert sum(piece.nbytes for piece in pieces) == FORMS[name].size(tuple(shape), values.dtype)
    assert torch.equal(through(FORMS[name], values, seed), torch.from_numpy(oracle(name, values.numpy(), seed)))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_takes_zeros_and_one_number(name: str) -> None:
    for value in (torch.zeros(3, 4), torch.tensor([2.0])):
        assert torch.allclose(through(FORMS[name], value), value, atol=1e-6)


@pytest.mark.parametrize("draw", [lambda x, key: through(Packing("int8"), x, key), rounded_at_random])
def test_random_rounding_has_the_exact_mean(draw: Callable[[Tensor, int], Tensor]) -> None:
    x = keys.normal(7, (4, 50))
    drawn = torch.stack([draw(x, keys.key("draw", number)) for number in range(1000)]).double()
    step = drawn.amax(0) - drawn.amin(0)
    assert float(step.max()) > 0
    error = torch.maximum(drawn.std(0), 0.1 * step) / math.sqrt(len(drawn))  # that of a rare step is not normal
    z = ((drawn.mean(0) - x) / error)[step > 0]
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.5)


class Asked:
    """A request of FedAvg to client 0, and what compresses its reply."""

    def __init__(self, wire: Wire) -> None:
        self.parts = assemble(law_world("fedavg"))
        self.method: Any = self.parts.algorithm
        self.compression = Compression(wire, self.parts.model)
        self.got = self.method.outgoing(self.method.init(self.parts.fed, self.parts.initial), [0], self.parts.fed)

    def request(self, round: int = 1) -> Request:
        return Request(self.method.update, "update", round, 9, 0, 5)

    def reply(self, seed: int, size: float = 1.0) -> Any:
        params = {
            name: value + size * keys.normal(keys.key(seed, name), tuple(value.shape))
            for name, value in self.got.params.items()
        }
        return self.method.replies(params, torch.tensor(1.0), torch.tensor(7))


@pytest.mark.parametrize("form", ["bf16", "int8", "top-k"])
def test_what_was_sent_and_what_is_left_are_the_sum_of_all_updates(form: str) -> None:
    asked, residuals, sent, true = Asked(Wire(compress=form)), dict[str, Tensor](), dict[str, Any](), dict[str, Any]()
    for round in range(1, 6):
        reply = asked.reply(round)
        read, residuals, *_ = asked.compression.sent(asked.request(round), 0, asked.got, reply, residuals)
        for name, base in asked.got.params.items():
            sent[name] = sent.get(name, 0) + read.params[name].double() - base
            true[name] = true.get(name, 0) + reply.params[name].double() - base
    assert set(residuals) == {f"{RESIDUAL}update.params.{name}" for name in true}
    for name in true:
        left = residuals[f"{RESIDUAL}update.params.{name}"].double()
        assert torch.allclose(sent[name] + left, true[name], atol=1e-4)
        assert float(left.abs().max()) > 0


def test_without_error_feedback_nothing_is_kept_and_a_broken_reply_does_not_spoil_what_is_kept() -> None:
    asked = Asked(Wire(compress="int8", error_feedback=False))
    assert asked.compression.sent(asked.request(), 0, asked.got, asked.reply(1), {})[1] == {}
    asked = Asked(Wire(compress="top-k"))
    _, kept, *_ = asked.compression.sent(asked.request(), 0, asked.got, asked.reply(1), {})
    read, after, *_ = asked.compression.sent(asked.request(2), 0, asked.got, asked.reply(2, math.nan), kept)
    assert world.same(kept, after)
    assert all(bool(value.isnan().any()) for value in read.params.values()), "the server sees it, and drops the reply"


def test_a_client_rounds_by_its_own_key_in_every_round() -> None:
    asked = Asked(Wire(compress="int8"))
    read = [
        asked.compression.sent(asked.request(r), c, asked.got, asked.reply(1), {})[0]
        for r, c in [(1, 0), (1, 1), (2, 0)]
    ]
    assert not world.same(read[0].params, read[1].params)
    assert not world.same(read[0].params, read[2].params)
    assert noise_key(asked.request(1), 0) != noise_key(asked.request(1), 1)


# what a device sends


def packet_of(asked: Asked) -> tuple[Packet, Any, Expected]:
    read, _, pieces, packings = asked.compression.sent(asked.request(), 0, asked.got, asked.reply(1), {})
    packet = encode(read, pieces)
    assert len(packet.body) == sum(part.bytes for part in crossings(read, packings=packings)), "booked as sent"
    return packet, read, Expected(asked.compression.slots(asked.request(), asked.got))


@pytest.mark.parametrize("form", ["bf16", "int8", "top-k"])
def test_the_server_reads_what_the_client_computed_bit_for_bit(form: str) -> None:
    asked = Asked(Wire(compress=form))
    packet, read, expected = packet_of(asked)
    found = decode(packet, type(read), limit=10**6, unpacking=expected)
    assert world.same(found.params, read.params)
    whole = len(encode(read).body)
    assert len(packet.body) < {"bf16": 0.55, "int8": 0.45, "top-k": 0.2}[form] * whole


def first(packet: Packet) -> list[Any]:
    entry: list[Any] = packet.header["tensors"][0]
    return entry


LIES: dict[str, tuple[str, str, Callable[[Packet], Packet]]] = {}


def lie(form: str, reason: str) -> Callable[[Any], Any]:
    def note(tell: Any) -> Any:
        LIES[tell.__name__] = form, reason, tell
        return tell

    return note


def overwritten(packet: Packet, values: Any, place: int = 0) -> Packet:
    body = bytearray(packet.body)
    content = np.asarray(values).tobytes()
    body[place : place + len(content)] = content
    return Packet(packet.header, bytes(body))


@lie("top-k", "ascending order")
def a_place_twice(packet: Packet) -> Packet:
    return overwritten(packet, np.array([3, 3], np.int32))


@lie("top-k", "ascending order")
def a_negative_place(packet: Packet) -> Packet:
    return overwritten(packet, np.array([-1], np.int32))


@lie("top-k", "ascending order")
def a_place_behind_the_end(packet: Packet) -> Packet:
    return overwritten(packet, np.array([0, 2**31 - 1], np.int32))


@lie("top-k", "was sent")
def a_huge_shape(packet: Packet) -> Packet:
    first(packet)[3] = [2**40, 2**10]
    return packet


@lie("int8", "was sent")
def a_larger_shape(packet: Packet) -> Packet:
    first(packet)[3] = [2**20]
    return packet


@lie("bf16", "was sent")
def another_type(packet: Packet) -> Packet:
    first(packet)[2] = "float64"
    return packet


@lie("int8", "scale")
def a_scale_of_nan(packet: Packet) -> Packet:
    return overwritten(packet, np.array([np.nan], np.float32))


@lie("int8", "scale")
def an_infinite_scale(packet: Packet) -> Packet:
    return overwritten(packet, np.array([np.inf], np.float32))


@lie("int8", "scale")
def a_negative_scale(packet: Packet) -> Packet:
    return overwritten(packet, np.array([-1.0], np.float32))


@lie("int8", "code")
def a_code_that_does_not_exist(packet: Packet) -> Packet:
    return overwritten(packet, np.array([-128], np.int8), 4 * first(packet)[3][0])


@lie("top-k", "past the end")
def fewer_entries(packet: Packet) -> Packet:
    return Packet(packet.header, packet.body[: len(packet.body) // 2])


@lie("top-k", "bytes more")
def more_entries(packet: Packet) -> Packet:
    return Packet(packet.header, packet.body + b"\0" * 8)


@lie("int8", "bytes more")
def whole_tensors(packet: Packet) -> Packet:
    return Packet(packet.header, packet.body * 4)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_apart_before_it_takes_memory(name: str) -> None:
    form, reason, tell = LIES[name]
    packet, read, expected = packet_of(Asked(Wire(compress=form, fraction=0.1)))
    with refuses(BadReply, reason):
        decode(tell(packet), type(read), limit=10**9, unpacking=expected)


def small(name: str, wire: Wire = MIXED, **changes: Any) -> Recipe:
    made = law_world(name)
    terms = {"engine": EngineSpec(name="flower"), "deployment": DeploymentSpec(relay="server-sees"), "rounds": 2}
    return replace(made, **{**terms, "wire": wire, **changes})


def in_one_process(made: Recipe) -> Recipe:
    return replace(made, engine=EngineSpec(name="sequential"))


@pytest.mark.parametrize("name", ["a_huge_shape", "a_scale_of_nan", "a_place_twice"])
def test_a_run_goes_on_without_a_device_that_lies(name: str, tmp_path: Path) -> None:
    form, reason, tell = LIES[name]

    def wrap(handler: Any) -> Any:
        def answer(packet: Any, config: Any) -> Any:
            reply = handler(packet, config)
            return tell(reply) if config["partition-id"] == 1 and reply.header.get("verdict") == "reply" else reply

        return answer

    made = small("fedavg", Wire(compress=form, fraction=0.1))
    parts, said = joined(made, hub_of(made, tmp_path, wrap)), list[Any]()
    parts.fed.emit = lambda event, **facts: said.append((event, facts))
    state, _ = played(made, parts)
    assert not world.same(state.params, parts.initial)
    told = {facts["client"]: facts["reason"] for event, facts in said if event == "client-missing"}
    assert set(told) == {1}
    assert reason in told[1]


# every method, every engine

REFUSED = {
    **dict.fromkeys(["scaffold", "feddyn"], "drift apart"),
    **dict.fromkeys(["hfm", "vfl", "pfmml"], "bytes"),
    "mfedmc": "another message",
    **dict.fromkeys(
        ["centralized", "creamfl", "fedamp", "fedfomo", "fedgkt", "local", "split-learning", "splitfed"], "gradients"
    ),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_method_trains_with_compressed_messages_or_refuses_them(name: str) -> None:
    table = {"a": "int8", "shared": "top-k"} if name == "hfl" else MIXED.compress
    compress = replace(MIXED, compress=table)
    if name in REFUSED:
        with refuses(RecipeError, f"wire: {REFUSED[name]}"):
            replace(law_world(name), wire=compress)
        return
    _, state, rows = world.played(replace(law_world(name), rounds=1, wire=compress))
    up = [row for row in rows if row["destination"] != "client" and "compressed" in row]
    assert {row["compressed"] for row in up} >= {"int8"}
    assert all(row["bytes"] < 4 * math.prod(row["shape"]) for row in up)
    assert all(bool(torch.isfinite(value).all()) for value in state.params.values())


@pytest.mark.parametrize("name", ["fedavg", "cmsfed"])
def test_devices_and_engines_have_the_same_numbers_and_book_what_they_send(name: str, tmp_path: Path) -> None:
    made = small(name, rounds=2 if name == "fedavg" else 1)
    one, state_one, ledger_one = world.played(in_one_process(made))
    bodies: list[int] = []

    def wrap(handler: Any) -> Any:
        def answer(packet: Any, config: Any) -> Any:
            reply = handler(packet, config)
            bodies.append(len(packet.body) + len(reply.body))
            return reply

        return answer

    state, ledger = played(made, joined(made, hub_of(made, tmp_path, wrap)))
    assert checkpoint.digest(state_one) == checkpoint.digest(state)
    assert ledger == ledger_one
    assert sum(bodies) == sum(row["bytes"] for row in ledger), "every byte of every body is booked"
    for client, tree in one.engine.locals.items():
        states = world.kept_states(tmp_path, "run", client)
        assert world.same(tree, states[max(states)]), f"residuals of client {client}"
    stacked, state_many, ledger_many = world.played(replace(made, engine=EngineSpec(name="vectorised")))
    assert world.furthest(state_one.params, state_many.params) < 1e-5
    assert ledger_many == ledger_one
    assert stacked.engine.locals.keys() == one.engine.locals.keys()


def test_gradients_of_a_selector_are_compressed_too() -> None:
    method = world.algorithm("fedavg", selector=DivFl(participation=3))
    _, _, rows = world.played(world.recipe(method, rounds=2, wire=Wire(compress="int8")))
    assert {row["field"] for row in rows if "compressed" in row} == {"gradient", "params"}


def test_workers_and_a_resumed_run_end_with_the_same_bits(tmp_path: Path) -> None:
    made = replace(world.recipe(world.algorithm("fedavg"), "vectorised"), wire=MIXED)
    whole = polyfed.run(made, tmp_path / "whole").result["state_sha256"]

    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "half", listeners=[stop])
    assert polyfed.run(made, tmp_path / "half", resume=True).result["state_sha256"] == whole
    shared = replace(made, engine=EngineSpec(name="vectorised", workers=2))
    assert polyfed.run(shared, tmp_path / "shared").result["state_sha256"] == whole


def test_simulated_time_counts_what_is_sent(tmp_path: Path) -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "rounds": 1, "network": {"channel": "fixed"}}
    whole = polyfed.run(parse_recipe(table), tmp_path / "whole").result
    half = polyfed.run(parse_recipe(table | {"wire": {"compress": "bf16", "down": "bf16"}}), tmp_path / "half").result
    assert 0.45 < half["bytes_up"] / whole["bytes_up"] < 0.55
    assert 0.45 < half["bytes_down"] / whole["bytes_down"] < 0.55
    assert half["simulated_seconds"] < whole["simulated_seconds"]
    assert json.loads((tmp_path / "half" / "run.json").read_text())


@pytest.mark.parametrize(
    ("wire", "key"),
    [
        ({"compress": "gzip"}, "wire.compress: gzip"),
        ({"compress": {"a": "int4"}}, "wire.compress: int4"),
        ({"compress": {"image": "int8"}}, "wire.compress: image"),
        ({"compress": 3}, "wire.compress: 3"),
        ({"compress": "top-k", "fraction": 0.0}, "wire.fraction: above 0"),
        ({"compress": "top-k", "fraction": 2.0}, "wire.fraction: above 0"),
        ({}, "wire.compress: nothing"),
    ],
)
def test_a_faulty_section_is_refused(wire: dict[str, Any], key: str) -> None:
    with refuses(RecipeError, key):
        assemble(parse_recipe({"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "wire": wire}))
