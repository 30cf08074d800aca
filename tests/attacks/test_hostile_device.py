"""One device must neither end nor steer the run of all others. No processes: the devices are called directly."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from engines.direct import Hub, HubTransport, over
from polyfed.core.batch import Batch
from polyfed.core.errors import CheckpointError, DataError, RecipeError, TooFewReplies
from polyfed.deploy.server.enrolment import Admission, capped_rows
from polyfed.deploy.server.membership import MEMBERS, Membership, expected
from polyfed.deploy.server.server import serve
from polyfed.engines.protocol import ENROL, Enrolment, hello, one_line
from polyfed.evaluation.scores import OwnScore
from polyfed.experiment.recipes.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.federation.client_registry import registry_of
from polyfed.federation.replies import Replies, stacked
from polyfed.federation.wire.wire_format import Packet
from polyfed.objective.multi_label import MultiLabel
from polyfed.transport.queue import Waiting
from refusals import refuses
from world import algorithm
from world import recipe as laws_recipe

HOSTILE = 1
"""The device that lies; in `RECIPE` it has modality `a` only."""

LENIENT = RECIPE.replace("enrol_seconds = 2.0", "enrol_seconds = 0.5") + "min_nodes = 2\n"
BLIND = LENIENT.replace('name = "toy"\nrows = 240\nclasses = 4', 'name = "npz"\npath = "/nowhere.npz"')
"""A server without rows of its own: only the recipe and the clients can say what shapes and classes there are."""


def said(devices: Devices, out: Path, lie: Callable[[Packet], Packet], capsys: Any) -> str:
    """What the server's log says of a run in which the hostile device's enrolment goes through `lie`."""

    def handler(packet: Packet, config: Mapping[str, Any]) -> Packet:
        reply = devices(packet, config)
        enrols = packet.header.get("want") == ENROL and config["partition-id"] == HOSTILE
        return lie(reply) if enrols else reply

    transport = over(handler, 3)
    serve(devices.app / "recipe.toml", transport, {"out": str(out)}, execute)
    assert json.loads((out / "result.json").read_text())["rounds"] == 2, "the run came to its end"
    return str(capsys.readouterr().err)


def changed(**header: Any) -> Callable[[Packet], Packet]:
    return lambda reply: Packet(reply.header | header, reply.body)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"shapes": {"a": [3]}}, r"samples of 'a' have shape (3,) there"),
    "a huge shape": ({"shapes": {"a": [2**39]}}, "number out of range"),
    "a path for a name": (
        {"modalities": ["../../x"], "shapes": {"../../x": [3]}},
        "enrolled with a modality whose name cannot be used",
    ),
    "an unknown modality": ({"modalities": ["c"], "shapes": {"c": [3]}}, "[model.encoders] has no modality 'c'"),
    "one label too many": ({"num_classes": 5}, "it has labels of 5 classes, there are 4"),
    "a huge head": ({"num_classes": 999_999}, "it has labels of 999999 classes, there are 4"),
    "a huge number": ({"client": 999_998}, "its number is above 999"),
    "a huge silo": ({"silo": 2**70}, "number out of range"),
    "no modality": ({"modalities": [], "shapes": {}}, "enrolled without modalities"),
    "another version": ({"polyfed": "0.0.1"}, "comes from polyfed 0.0.1, wire format"),
    "another wire format": ({"wire": 1}, "wire format 1, the server has polyfed"),
}


@pytest.mark.parametrize("server", ["with rows", "without rows"])
@pytest.mark.parametrize("lie", LIES)
def test_a_device_that_contradicts_the_others_is_left_out_with_a_reason(
    lie: str, server: str, tmp_path: Path, capsys: Any
) -> None:
    devices = Devices(tmp_path, LENIENT)
    header, words = LIES[lie]
    if server == "without rows":  # what two clients alone cannot decide, the recipe says
        classes = "" if "num_classes" in header else "classes = 4\n"
        shape = list(devices(hello(), {"partition-id": 0}).header["shapes"]["a"])
        (devices.app / "recipe.toml").write_text(BLIND + f"shapes = {{ a = {shape} }}\n{classes}")
    told = said(devices, tmp_path / "out", changed(**header), capsys)
    assert words in told
    assert "WARNING polyfed: starting with 2 of 3 clients" in told


@pytest.mark.parametrize("known", [3, 4])
def test_nobody_waits_when_all_registered_devices_have_answered(known: int, tmp_path: Path) -> None:
    """Those of another version are not asked again. One that has not answered may be a spare."""
    devices = Devices(tmp_path)

    def other(packet: Packet, config: Mapping[str, Any]) -> Packet:
        return changed(polyfed="0.0.1")(devices(packet, config))

    transport, heard = over(other, 3), list[int]()
    transport.registered = lambda: [f"device {number}" for number in range(known)]
    transport.vet = Membership(tmp_path).refusal

    def patient(answers: Sequence[Packet]) -> bool:
        heard.append(len(answers))
        return heard.count(3) == 3

    answers = transport.enrol(3, 600.0, patient)
    assert ["same version" in answer.header["reason"] for answer in answers] == [True] * 3
    assert heard.count(3) == (3 if known > 3 else 1)


def blind(more: str = "") -> Recipe:
    """The recipe of a server that has no rows."""
    return parse_recipe(tomllib.loads(BLIND + more))


def told(client: int, shape: tuple[int, ...] = (6,), classes: int = 4, rows: int = 100) -> Enrolment:
    return Enrolment(client, rows, ("a",), None, False, {"a": shape}, classes)


def test_more_than_half_of_the_clients_decide_and_the_recipe_decides_against_them() -> None:
    known = [told(0), told(1), told(2, (7,)), told(3, classes=9)]
    free = Admission.of(blind(), known, 4, Emitter())
    assert (free.shapes["a"], free.num_classes) == ((6,), 4)
    assert [told.client for told in free.clients] == [0, 1]
    pinned = Admission.of(blind("classes = 9\nshapes = { a = [7] }\n"), known, 4, Emitter())
    assert [told.client for told in pinned.clients] == [2]


def test_clients_without_the_last_classes_stay() -> None:
    found = Admission.of(blind(), [told(0), told(1, classes=2), told(2), told(3)], 4, Emitter())
    assert [told.client for told in found.clients] == [0, 1, 2, 3]
    assert found.num_classes == 4


def test_without_a_majority_the_log_says_what_to_pin() -> None:
    found = Admission.of(blind(), [told(0), told(1, (7,))], 2, Emitter())
    assert "no shape of 'a' has a majority; set [deployment] shapes" in found.left_out[0]
    found = Admission.of(blind(), [told(0), told(1, classes=9)], 2, Emitter())
    assert found.left_out[1] == "two clients report different numbers of classes; set [deployment] classes"


def test_a_pin_that_contradicts_the_servers_own_rows_is_the_owners_fault(tmp_path: Path) -> None:
    recipe = load_recipe(Devices(tmp_path).recipe, ["deployment.classes=2"])
    with refuses(DataError, "deployment.classes: own rows"):
        Admission.of(recipe, [], 3, Emitter())


def test_claimed_rows_count_up_to_a_multiple_of_the_median_and_the_log_says_so(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path, LENIENT)
    assert "WARNING polyfed: client 1 reports 1099511627775 rows; " in said(
        devices, tmp_path / "out", changed(rows=2**40 - 1), capsys
    )
    notes: list[str] = []
    emit = Emitter([lambda event, **facts: notes.append(facts["text"])])
    known = [told(0, rows=90), told(1, rows=2**40 - 1), told(2, rows=110)]
    assert capped_rows(known, 10.0, emit) == {0: 90, 1: 1100, 2: 110}
    assert notes == ["WARNING: client 1 reports 1099511627775 rows; 1100 count ([deployment] rows_cap = 10)"]
    assert capped_rows(known, 0.0, emit)[1] == 2**40 - 1
    assert capped_rows(known[:2], 10.0, emit)[1] == 900, "of two clients the smaller one is the median"
    population = Admission.of(blind(), known, 3, Emitter()).population(Emitter())
    assert population.limited == registry_of(population).limited == {1}


@pytest.mark.parametrize("task", [None, MultiLabel()])
def test_claimed_test_rows_weigh_up_to_a_multiple_of_the_median(task: Any) -> None:
    parts = assemble(laws_recipe(algorithm("fedavg")))
    objective = task or parts.fed.context.objective
    parts.fed.context = replace(parts.fed.context, objective=objective)
    outputs, y = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 0.0]]) if task else torch.tensor([1])
    wrong = objective.own_sums(outputs * (-1 if task else 1), Batch({}, y, torch.arange(1)))
    right = objective.own_sums(outputs * (1 if task else -1), Batch({}, y, torch.arange(1)))
    told: dict[int, Any] = {k: OwnScore(wrong * 20, torch.tensor(20)) for k in range(4)}
    told[4] = OwnScore(right * 2.0**40, torch.tensor(2**40))
    name = "pooled_accuracy" if task else "weighted"
    for cap, most in ((0.0, 1.0), (10.0, 200 / 280)):
        parts.fed.rows_cap = cap
        group, scores, _ = parts.algorithm.over_clients(Replies([*stacked(dict(told))]), parts.fed)
        assert group[name] == pytest.approx(most, abs=1e-6)
        assert scores[4] == 1.0


def test_a_client_number_stays_with_the_key_that_enrolled_with_it_first(tmp_path: Path, capsys: Any) -> None:
    """A device's name on the transport is the fingerprint of its key, as `test_own_transport.py` shows."""
    devices, out = Devices(tmp_path, LENIENT), tmp_path / "out"

    def handler(packet: Packet, config: Mapping[str, Any]) -> Packet:
        return devices(packet, {"partition-id": config["partition-id"] % 3})  # the thief has all files of device 0

    hub = Hub(handler, 4)
    honest, thief = hub.names[0], hub.names[3]
    hub.absent = {thief}
    serve(devices.app / "recipe.toml", HubTransport(hub), {"out": str(out)}, execute)
    assert json.loads((out / MEMBERS).read_text())["clients"]["0"] == honest
    assert (out / MEMBERS).stat().st_mode & 0o777 == 0o600
    (out / "result.json").unlink()
    hub.absent = {honest}
    capsys.readouterr()
    serve(devices.app / "recipe.toml", HubTransport(hub), {"out": str(out)}, execute)
    assert f"client 0 belongs to the device with key {honest}" in capsys.readouterr().err
    assert json.loads((out / MEMBERS).read_text())["clients"]["0"] == honest


def test_one_key_is_one_client_however_often_the_server_starts(tmp_path: Path) -> None:
    """A rule counts clients, so a device that is several of them would count several times (a Sybil attack)."""
    for _ in range(3):  # each start of the server asks the device to enrol once
        members = Membership(tmp_path)
        assert members.refusal(Packet(told(0).header()), "SHA256:one") == ""
        for other in (1, 2):
            refusal = members.refusal(Packet(told(other).header()), "SHA256:one")
            assert f"SHA256:one is client 0, and now says that it is client {other}" in refusal
    assert members.refusal(Packet(told(1).header()), "SHA256:two") == "", "the number is still free for its owner"


def test_a_number_can_be_given_to_a_key_before_the_first_run(tmp_path: Path) -> None:
    (tmp_path / MEMBERS).write_text(json.dumps({"clients": {"0": "SHA256:one"}}))
    members = Membership(tmp_path)
    assert members.refusal(Packet(told(0).header()), "SHA256:one") == ""
    assert "belongs to the device with key SHA256:one" in members.refusal(Packet(told(0).header()), "SHA256:two")
    assert members.refusal(Packet(told(1).header()), "SHA256:two") == ""
    for damage in ("{", "[]", '{"clients": {"0": 7}}', '{"session": 1}'):
        (tmp_path / MEMBERS).write_text(damage)
        with refuses(CheckpointError, "is damaged"):
            Membership(tmp_path)


def test_a_node_that_fails_takes_the_place_of_nobody(tmp_path: Path) -> None:
    devices = Devices(tmp_path)

    def handler(packet: Packet, config: Mapping[str, Any]) -> Packet:
        if config["partition-id"] == 0:
            return Packet({"verdict": "failed", "reason": "me first"})
        return devices(packet, {"partition-id": config["partition-id"] - 1})

    hub = Hub(handler, 4)
    hub.absent = {hub.names[3]}

    def arrive(answers: Any) -> bool:
        hub.absent = set() if len(answers) == 3 else hub.absent
        return False

    verdicts = [answer.header["verdict"] for answer in HubTransport(hub).enrol(3, 5.0, arrive)]
    assert sorted(verdicts) == ["enrolled", "enrolled", "enrolled", "failed"]


def test_a_device_that_goes_offline_before_it_has_enrolled_finds_its_request_when_it_is_back(tmp_path: Path) -> None:
    """It may be at work meanwhile, as an edge that waits for its devices; another request would end that work."""
    devices = Devices(tmp_path)

    class Flapping(Hub):
        """Device 0 is offline now and then while it works on its request, or dies with it."""

        asked, looks = set[str](), 0

        def online(self) -> list[str]:
            self.looks += bool(self.asked)
            self.absent = {self.names[0]} if self.looks % 8 in (1, 2, 3, 4) else set()
            return super().online()

        def next_for(self, name: str) -> Waiting | None:
            found = super().next_for(name)
            if found is None or name != self.names[0]:
                return found
            self.asked.add(found.id)
            return found if self.looks > 12 else None

    hub = Flapping(devices, 3)
    verdicts = [answer.header["verdict"] for answer in HubTransport(hub).enrol(3, 5.0)]
    assert (verdicts, len(hub.asked)) == (["enrolled"] * 3, 1)


def test_with_silos_the_server_waits_for_every_device_of_every_silo() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "hfm-mfeat.toml")
    assert expected(recipe) == 10 * 6
    with refuses(RecipeError, "deployment.nodes: 60 devices"):
        expected(replace(recipe, deployment=replace(recipe.deployment, nodes=1)))


def test_the_session_grows_although_the_clock_was_set_back(tmp_path: Path, monkeypatch: Any) -> None:
    first = Membership(tmp_path)
    monkeypatch.setattr("polyfed.deploy.server.membership.time.time", lambda: 1000.0)
    second = Membership(tmp_path)
    assert second.session == first.session + 1


def test_a_reason_is_one_printable_line_of_bounded_length(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path, LENIENT)
    forged = "no\npolyfed: round 9: 3 asked\x1b[2J\u202e" + "x" * 10_000

    def lie(reply: Packet) -> Packet:
        return Packet({"verdict": "failed", "reason": forged})

    told = said(devices, tmp_path / "out", lie, capsys)
    assert "\npolyfed: round 9" not in told
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "no polyfed: round 9: 3 asked [2J" in told
    assert "x" * 2000 not in told
    assert one_line("\ud800") == " "


def test_a_server_of_another_version_is_refused_by_the_device(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    answer = devices(Packet(hello().header | {"wire": 99}), {"partition-id": 0})
    assert answer.header["verdict"] == "failed"
    assert "wire format 99, this device has polyfed" in answer.header["reason"]


@pytest.mark.parametrize("wire", [99, None])
def test_a_server_of_another_version_is_named_as_such_although_its_recipe_cannot_be_read(
    wire: Any, tmp_path: Path
) -> None:
    devices = Devices(tmp_path)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "option_of_a_later_version = 1\n")
    for asking in (hello(), Packet({"want": "ask", "polyfed": "9.9", "wire": 3})):
        answer = devices(Packet(asking.header | {"wire": wire}), {"partition-id": 0})
        assert answer.header["verdict"] == "failed"
        assert "install the same version on both" in answer.header["reason"]


def test_all_that_do_not_fit_are_named_where_too_few_are_left(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    with refuses(TooFewReplies, "labels of 5"):
        said(devices, tmp_path / "out", changed(num_classes=5), capsys)
