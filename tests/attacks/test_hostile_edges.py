"""Hostile edges, and hostile servers of edges."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.test_own_modes import SILOS
from polyfed.algorithms.hfm.messages import Embedded, ToEdge, Upload
from polyfed.core.errors import TooFewReplies
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.tasks import packed
from polyfed.deploy.edge.runtime import DEVICES, AtEdge
from polyfed.engines.edges import EdgeRemote
from polyfed.engines.protocol import FAILED, REPLY, Enrolment, Patience
from polyfed.engines.remote import ReplyTerms
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import Assembly, assemble, population_of
from polyfed.federation.wire.wire_format import Packet, encode
from refusals import refuses

EDGES = SILOS.replace("server-sees", "edge")


class Answering:
    """A transport whose edges answer what a test says."""

    def __init__(self) -> None:
        self.discarded: Counter[int] = Counter()
        self.asked: dict[int, Packet] = {}
        self.says: Callable[[int, Packet], Packet] = lambda silo, packet: packet

    def taken_measurements(self) -> list[Any]:
        return []

    def exchange(self, packets: dict[int, Packet], patience: Patience, sent: Any) -> dict[int, Packet]:
        self.asked = packets
        sent(list(packets))
        return {silo: self.says(silo, packet) for silo, packet in packets.items()}


def server(folder: Path) -> tuple[Assembly, Answering]:
    (folder / "recipe.toml").write_text(EDGES)
    recipe, transport = load_recipe(folder / "recipe.toml"), Answering()
    recipe = replace(recipe, engine=replace(recipe.engine, name="devices"))
    engine = partial(EdgeRemote, transport=transport, terms=ReplyTerms())
    return assemble(recipe, population=population_of(recipe), engine=engine), transport


def honest(parts: Assembly, silo: int, packet: Packet) -> tuple[dict[str, Any], list[bytes]]:
    """The header of an honest edge's answer, and the bodies of its replies."""
    replies, bodies = {}, []
    for client in (2 * silo, 2 * silo + 1):
        own = {n: v for n, v in parts.initial.items() if n.split(".")[0] in parts.fed.clients.owned(client)}
        one, five = torch.tensor(9), torch.zeros(5, dtype=torch.float64)
        said = encode(Upload({n: v for n, v in own.items() if n not in parts.fed.context.model.head()}, one, one, five))
        replies[str(client)] = said.header | {"size": len(said.body)}
        bodies.append(said.body)
    asked = [{"task": "upload", "number": 3, "turn": 0, "replies": replies, "missing": {}}]
    return {"request_id": packet.header["request_id"], "verdict": REPLY, "last": 4, "asked": asked}, bodies


def list_of_lies() -> list[Callable[[dict[str, Any], list[bytes]], Any]]:
    """What a hostile edge may do to the header of its answer and to the bodies of its replies."""
    secret = encode(Embedded({"a": torch.zeros(3, 6)}))

    def embeddings(header: dict[str, Any], bodies: list[bytes], task: str = "embed") -> None:
        header["asked"][0]["task"] = task
        header["asked"][0]["replies"] = {"2": secret.header | {"size": len(secret.body)}}
        bodies[:] = [secret.body]

    def reply(key: str, value: Any) -> Callable[..., None]:
        return lambda header, bodies: header["asked"][0]["replies"]["2"].update({key: value})

    def asked(key: str, value: Any) -> Callable[..., None]:
        return lambda header, bodies: header["asked"][0].update({key: value})

    def top(key: str, value: Any) -> Callable[..., None]:
        return lambda header, bodies: header.update({key: value})

    def foreign(header: dict[str, Any], bodies: list[bytes]) -> None:
        replies = header["asked"][0]["replies"]
        replies["0"] = replies.pop("2")

    return [
        embeddings,
        lambda header, bodies: embeddings(header, bodies, "upload"),
        foreign,
        *(reply("size", size) for size in (-1, 10**9, "8", None, 0)),
        *(reply("message", name) for name in ("Embedded", None, 7)),
        *(asked("task", name) for name in ("identify", "practise", "__class__", "nothing", None)),
        *(asked("number", number) for number in (-1, 4, True, "3", None)),
        *(asked("replies", value) for value in ([], None, {"2": None}, {"2": 3})),
        asked("missing", {"0": "gone"}),
        asked("turn", "no"),
        *(top("last", last) for last in (-1, 10**9, None, "4")),
        top("asked", None),
        top("verdict", "maybe"),
        top("request_id", {}),
        lambda header, bodies: bodies.append(b"more"),
        lambda header, bodies: bodies.pop(),
    ]


def test_the_server_takes_nothing_else_from_an_edge(tmp_path: Path) -> None:
    parts, transport = server(tmp_path)
    method, fed = parts.recipe.algorithm, parts.fed
    fed.begin(1)

    def answered(change: Callable[[dict[str, Any], list[bytes]], Any]) -> Any:
        """What the server takes if the edge of silo 1 changes its answer."""

        def says(silo: int, packet: Packet) -> Packet:
            header, bodies = honest(parts, silo, packet)
            if silo == 1:
                header = json.loads(json.dumps(header))
                change(header, bodies)
            return Packet(header, b"".join(bodies))

        transport.says, fed.asked = says, 0
        return fed.in_silos(method.trained, method.devices(fed), {}, ToEdge(parts.initial))

    whole = answered(lambda header, bodies: None)
    assert set(whole.of(method.upload)) == {0, 1, 2, 3}
    assert fed.asked == 4

    lies = list_of_lies()
    for number, lie in enumerate(lies):
        found = answered(lie)
        assert set(found.missing) == {1}, f"lie {number}"
        assert set(found.of(method.upload)) == {0, 1}, f"lie {number}"
    booked = [(entry.clients, entry.message) for entry in parts.ledger.entries if entry.destination == "server"]
    assert {message for _, message in booked} == {"Upload"}
    assert [clients for clients, _ in booked].count((2,)) == 1, "of a lie, nothing is booked"

    def refuse(silo: int, packet: Packet) -> Packet:
        return Packet({"request_id": packet.header["request_id"], "verdict": FAILED, "reason": "gone\nforged line"})

    transport.says, fed.asked = refuse, 0
    with refuses(TooFewReplies, "no edge answered") as error:
        fed.in_silos(method.trained, method.devices(fed), {}, ToEdge(parts.initial))
    assert "\n" not in str(error.value)


def test_an_edge_takes_nothing_else_from_a_server(tmp_path: Path) -> None:
    parts, transport = server(tmp_path)
    method, fed = parts.recipe.algorithm, parts.fed
    transport.says = lambda silo, packet: Packet({})
    fed.begin(1)
    with refuses(TooFewReplies, "no edge answered"):
        fed.in_silos(method.trained, method.devices(fed), {}, ToEdge(parts.initial))
    honest_packet = transport.asked[1]

    state = tmp_path / "state"
    state.mkdir()
    own = {"silo": 1, "tested": False, "num_classes": 3, "rows": 20}
    told = [
        Enrolment(client=2, modalities=("a",), shapes={"a": parts.fed.context.model.shapes["a"]}, **own),
        Enrolment(client=3, modalities=("b",), shapes={"b": parts.fed.context.model.shapes["b"]}, **own),
    ]
    (state / DEVICES).write_text(json.dumps({"devices": [one.header() for one in told], "nodes": {}}))
    file = {"server": "127.0.0.1:1", "silo": 1, "devices": 2, "state": str(state)}
    file["credentials"] = str(write_credentials(tmp_path / "credentials", 0))
    handler = AtEdge(tmp_path / "recipe.toml", packed(EDGES, ""))

    def answer(header: Mapping[str, Any] = {}, body: bytes = honest_packet.body) -> Packet:
        return handler(Packet({**honest_packet.header, **header}, body), {"edge": file})

    of = honest_packet.header["request_id"]
    nan = encode(ToEdge({n: torch.full_like(v, float("nan")) for n, v in parts.initial.items()}))
    wide = encode(ToEdge({n: torch.zeros(3, *v.shape) for n, v in parts.initial.items()}))
    attacks: list[tuple[Mapping[str, Any], bytes]] = [
        *(({"part": name}, honest_packet.body) for name in ("embed", "__init__", "identified", None, 5)),
        ({"want": "ask", "task": "embed"}, honest_packet.body),
        ({"request_id": {**of, "client": 0}}, honest_packet.body),
        ({"request_id": {**of, "round": 9}}, honest_packet.body),
        ({"request_id": {**of, "run": "../x"}}, honest_packet.body),
        ({"rounds": 99}, honest_packet.body),
        ({"seed": "1"}, honest_packet.body),
        ({"facts": None}, honest_packet.body),
        ({"polyfed": "0"}, honest_packet.body),
        (nan.header, nan.body),
        (wide.header, wide.body),
        ({}, honest_packet.body[:-4]),
    ]
    for number, (header, body) in enumerate(attacks):
        said = answer(header, body)
        assert said.header["verdict"] == FAILED, f"attack {number}: {said.header}"
        assert not said.body
        assert str(tmp_path) not in json.dumps(said.header)
    ledgers = [line for path in state.rglob("egress.jsonl") for line in path.read_text().splitlines()]
    assert not ledgers, "no device was asked"
