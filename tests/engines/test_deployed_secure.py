"""Secure aggregation behind the wire: the sums of one process, and what a dishonest server gets from a device."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
import world
from engines.devices import RECIPE, Devices
from engines.direct import hub_of, joined, over, played
from engines.misdeeds import with_header
from engines.test_behind_the_wire import order, own_ledgers
from polyfed.algorithms.averaging import Update
from polyfed.core.masked import masked_class
from polyfed.deploy.device.memory.store import STORE
from polyfed.engines.protocol import FAILED, REFUSED, REPLY
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running import checkpoint
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.secure_aggregation.messages import PublicKeys, RevealedShares, Unmasking
from polyfed.federation.secure_aggregation.state import SECRETS
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.selection import Uniform
from refusals import warned

FIVE = (
    RECIPE.replace("num = 3", "num = 5")
    .replace('[["a", "b"], ["a"], ["b"]]', '[["a", "b"], ["a", "b"], ["a"], ["a", "b"]]')
    .replace("rounds = 2", "rounds = 1")
    .replace('name = "scaffold"', 'name = "fedavg"\n[secure_aggregation]')
)


class Observed(Devices):
    """Five devices under secure aggregation; keeps every request and the answer to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FIVE)
        self.folder, self.later = folder, 0
        self.result: dict[str, Any] = {}
        self.seen: list[tuple[Packet, Packet, Mapping[str, Any]]] = []

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        answer = super().__call__(packet, config)
        self.seen.append((packet, answer, config))
        return answer

    def of(self, task: str, client: int) -> tuple[Packet, Packet, Mapping[str, Any]]:
        """The last request for a task, and the answer to it."""
        return next(
            item
            for item in reversed(self.seen)
            if item[0].header.get("task") == task and item[0].header["request_id"]["client"] == client
        )

    def again(self, task: str, client: int, body: bytes | None = None, **changes: Any) -> Packet:
        """What a device answers if a server that was started again repeats a request, perhaps with changes."""
        asked, _, config = self.of(task, client)
        request_id = asked.header["request_id"]
        self.later += 1
        renewed = with_header(asked, request_id=request_id | {"session": request_id["session"] + self.later}, **changes)
        return super().__call__(Packet(renewed.header, asked.body if body is None else body), config)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: Any) -> Observed:
    """Devices after a run of one round."""
    folder = tmp_path_factory.mktemp("devices")
    made = Observed(folder)
    made.result = made.serve(folder / "run")
    return made


def test_parameters_and_ledgers_equal_the_sequential_engines(tmp_path: Path) -> None:
    method = world.algorithm("scaffold", selector=Uniform(), secure_aggregation=SecureAggregation())
    made = world.recipe(method, EngineSpec(name="flower"), rounds=1)
    _, state_one, ledger_one = world.played(replace(made, engine=EngineSpec(name="sequential")))
    state, ledger = played(made, joined(made, hub_of(made, tmp_path)))
    assert checkpoint.digest(state_one) == checkpoint.digest(state)
    assert ledger == ledger_one, "the server's ledger"
    assert own_ledgers(tmp_path) == sorted(ledger_one, key=order), "the clients' own ledgers"
    masked = {(row["message"], row["field"]) for row in ledger if row.get("masked")}
    assert masked == {("MaskedControlledUpdate", field) for field in ("params", "control", "loss", "num_rows")}


def test_devices_equal_the_simulation_and_no_packet_holds_a_reply(devices: Observed, tmp_path: Path) -> None:
    got, one = devices.result, polyfed.run(devices.recipe, tmp_path / "one", engine="sequential").result
    assert got["state_sha256"] == one["state_sha256"], "the masks are others, and the sums are the same"
    assert got["metrics"]["personal"] == one["metrics"]["personal"]
    assert set(one["metrics"]["personal"]) == {"weighted"}, "the accuracy over all test rows, and of no single client"
    answers = [(asked.header, answer) for asked, answer, _ in devices.seen if asked.header["want"] == "ask"]
    assert len(answers) == 10 * 5, "five requests for training, and five for evaluation"
    for _, answer in answers:
        kinds = {dtype for _, _, dtype, _ in answer.header["tensors"]}
        assert kinds <= {"uint8", "int32", "int64"}, "a plain reply would hold float32"
    _, update, _ = devices.of("update", 0)
    assert update.header["message"] == "MaskedUpdate"
    hidden = decode(update, masked_class(Update), limit=2**29).params
    values = torch.cat([value.flatten() for value in hidden.values()]).double() / 2**31
    assert abs(float(values.mean())) < 5 * (1 / 3 / len(values)) ** 0.5, "uniform on [-1, 1)"
    assert float(values.std()) == pytest.approx((1 / 3) ** 0.5, rel=0.1)


def test_no_secret_is_left_on_a_device_after_a_round(devices: Observed) -> None:
    for client, place in enumerate(devices.places):
        (run,) = {path.parents[1].name for path in place.rglob("client-*/egress.jsonl")}
        states = world.kept_states(place / "polyfed-state", run, client)
        assert not [name for name in states[max(states)] if name.startswith(SECRETS)]


def test_a_server_that_goes_back_gets_no_second_answer_from_the_same_secrets(devices: Observed) -> None:
    _, first, _ = devices.of("secure_aggregation.unmask", 1)
    assert not bool(decode(first, RevealedShares, limit=2**20).of_keys.any())
    again = devices.again("secure_aggregation.unmask", 1)
    assert again.header["verdict"] == REPLY
    assert again.body == first.body, "the same shares as before tell nothing new"
    dropped = torch.tensor([False, False, False, False, True])
    other = encode(Unmasking(~dropped, dropped))
    refused = devices.again("secure_aggregation.unmask", 1, other.body, **other.header)
    assert refused.header["verdict"] == REFUSED
    assert "has used its secrets of secure aggregation for another request" in refused.header["reason"]


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_a_device_draws_new_keys_for_every_request(tmp_path: Path) -> None:
    devices, answers = Observed(tmp_path), []

    def asking(packet: Packet, config: Mapping[str, Any]) -> Packet:
        answer = devices(packet, config)
        first = packet.header.get("task") == "secure_aggregation.advertise" and not answers
        if first and packet.header["request_id"]["client"] == 3:  # client 3 then answers only the newer session
            answers.extend([answer, *(devices.again("secure_aggregation.advertise", 3) for _ in range(2))])
        return answer

    devices.serve(tmp_path / "run", over(asking, 5))
    assert len({decode(answer, PublicKeys, limit=2**20).keys.numpy().tobytes() for answer in answers}) == 3


def test_a_device_begins_no_request_again_whose_masks_it_has_revealed(devices: Observed) -> None:
    """A server that repeats a round after it has read its sum would learn from a second sum what one client sent."""
    answer = devices.again("secure_aggregation.advertise", 3)
    assert answer.header["verdict"] == REFUSED
    assert "has already revealed the masks of this request" in answer.header["reason"]


def test_a_dishonest_server_gets_neither_a_second_reply_nor_both_shares(tmp_path: Path) -> None:
    devices = Observed(tmp_path)
    refused: list[Packet] = []
    asked: list[Packet] = []

    def asking(packet: Packet, config: Mapping[str, Any]) -> Packet:
        task = packet.header.get("task")
        if task == "secure_aggregation.unmask":
            everyone = torch.ones(5, dtype=torch.bool)
            both = encode(Unmasking(everyone, everyone))
            asked.append(devices(Packet(packet.header | both.header, both.body), config))
            return asked[-1]
        answer = devices(packet, config)
        if task == "update" and packet.header["request_id"]["client"] == 2:  # again, under the same masks
            other = bytes([packet.body[0] ^ 1]) + packet.body[1:]
            refused.extend([devices.again("update", 2, other), devices.again("update", 2, turn=1)])
            assert devices.again("update", 2).body == answer.body, "the same reply tells nothing new"
        return answer

    with pytest.raises(polyfed.core.errors.TooFewReplies):
        devices.serve(tmp_path / "run", over(asking, 5))
    assert [answer.header["verdict"] for answer in refused] == [REFUSED] * 2
    assert all("has used its secrets" in answer.header["reason"] for answer in refused)
    assert {answer.header["verdict"] for answer in asked} == {FAILED}
    assert any("Refusal" in answer.header["reason"] for answer in asked), "the type; the text stays on the device"
    places = [*tmp_path.rglob(STORE)]
    assert len(places) == 5
    assert all(place.stat().st_mode & 0o077 == 0 for place in places), "only the owner reads them"


CHANGES = {
    "range": ("[secure_aggregation]", "[secure_aggregation]\nrange = 32.0"),
    "rate": ("lr = 0.1", "lr = 1e-30"),
    "comment": ("lr = 0.1", "lr = 0.1 # the same"),
}
"""Changes of the recipe: the difference of two replies would be the update itself, or nothing."""


def test_a_server_that_changes_the_recipe_or_the_header_gets_no_second_reply(tmp_path: Path) -> None:
    """The masks of both replies would be the same, so their difference would give the plain update."""
    devices = Observed(tmp_path)
    recipe, policy = devices.app / "recipe.toml", devices.places[2] / "policy.toml"
    answers: dict[str, Packet] = {}

    def under_another(path: Path, text: str, task: str) -> Packet:
        honest = path.read_text()
        path.write_text(text)
        answer = devices.again(task, 2)
        path.write_text(honest)
        return answer

    def asking(packet: Packet, config: Mapping[str, Any]) -> Packet:
        task, honest = packet.header.get("task"), recipe.read_text()
        of_two = packet.header.get("request_id", {}).get("client") == 2
        if task == "secure_aggregation.share" and of_two:  # the keys were drawn under the honest recipe
            recipe.write_text(honest.replace(*CHANGES["range"]))
            answers["first share"] = devices(packet, config)
            recipe.write_text(honest)
        answer = devices(packet, config)
        if task == "update" and of_two:
            for name, (old, new) in CHANGES.items():
                answers[name] = under_another(recipe, honest.replace(old, new), task)
            answers["policy"] = under_another(policy, policy.read_text() + "\n[limits]\nmin_steps = 1\n", task)
            turned, shapes = packet.header["tensors"][::-1], packet.header["facts"]["shapes"]
            answers["tensors"] = devices.again(task, 2, tensors=turned)
            facts = packet.header["facts"] | {"shapes": dict(reversed(shapes.items()))}
            answers["facts"] = devices.again(task, 2, facts=facts)
            answers["more"] = devices.again(task, 2, further=1)
            honest_again = devices.again(task, 2, kept=7)
            assert honest_again.body == answer.body, "a repeated request after a lost connection"
        return answer

    with warned("no usable reply"):
        devices.serve(tmp_path / "run", over(asking, 5))
    assert len(answers) == 8
    assert {name: answer.header["verdict"] for name, answer in answers.items()} == dict.fromkeys(answers, REFUSED)
    for name in ("first share", *CHANGES, "policy"):
        assert "drew its keys of secure aggregation under another" in answers[name].header["reason"], name
    for name in ("tensors", "facts", "more"):
        assert "has used its secrets" in answers[name].header["reason"], name
