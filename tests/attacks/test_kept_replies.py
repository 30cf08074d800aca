"""A device that adds noise sends the same reply again if a request is repeated. A second reply would reveal more."""

import json
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.test_requirements import EXAMPLE, LOCAL, NOISE, SECURE, SPEND, Hostile, device, spent_by, text
from engines.devices import Devices
from polyfed.core.errors import EgressError
from polyfed.deploy.device import runtime as client_runtime
from polyfed.deploy.device.memory.local_states import begin, end, prune
from polyfed.deploy.device.memory.repeated_requests import keep_reply, kept_reply, unpaid_rounds
from polyfed.deploy.device.memory.store import STORE, DeviceStore
from polyfed.engines.protocol import FAILED, REFUSED, REPLY, RequestId, hello
from polyfed.engines.remote import Remote
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.requirements import Release
from polyfed.report.reading.reconciliation import reconcile
from refusals import refuses

EXACTLY = f"max_epsilon = {SPEND + 1e-6}\ndelta = 1e-3\n"
"""A budget for two rounds of LOCAL with NOISE, and not for three."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, round: int) -> Iterator[None]:
    """A server that dies when it has the replies of a round, and before it writes the checkpoint."""
    answer = Remote.answer

    def last(self: Remote, request: Any, clients: Any, send: Any) -> Any:
        answered = answer(self, request, clients, send)
        if request.round == round and request.name == "update":
            raise KeyboardInterrupt
        return answered

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "answer", last)
        yield


def died(devices: Devices, run: Path, monkeypatch: pytest.MonkeyPatch, round: int) -> None:
    """Run until the server dies in this round."""
    with dying(monkeypatch, round), pytest.raises(KeyboardInterrupt):
        devices.serve(run)


def sent(devices: Devices, client: int = 1) -> list[tuple[Any, ...]]:
    """Round, field, block and hash of each part that left a device, from its audit log."""
    lines = (devices.places[client] / "polyfed-state" / "audit.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("destination") == "server"]
    return [(row["round"], row["field"], row["block"], row["sha256"]) for row in rows]


def counted(devices: Devices, client: int = 1) -> int:
    """Number of replies in the privacy budget of a device."""
    return sum(spent_by(devices.places[client]).values())


def replies(devices: Devices, client: int = 1) -> list[tuple[str, tuple[int, int]]]:
    """Run and place of each reply that a device keeps."""
    with closing(sqlite3.connect(next(devices.places[client].rglob(STORE)))) as rows:
        return [(run, (round, at)) for run, round, at in rows.execute("SELECT run, round, request FROM replies")]


@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.parametrize("sections", [LOCAL, EXAMPLE], ids=["client", "example"])
def test_a_device_with_a_budget_for_exactly_the_run_stays_in_it_after_a_restart_of_the_server(
    sections: str, round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = 'unit = "example"\n' if sections is EXAMPLE else ""
    devices = device(tmp_path, EXACTLY + unit, text(sections + NOISE))
    died(devices, tmp_path / "run", monkeypatch, round)
    before = sent(devices)
    assert counted(devices) == round
    assert devices.serve(tmp_path / "run")["rounds"] == 2
    assert counted(devices) == 2, "the repeated reply costs nothing"
    again = [row for row in sent(devices)[len(before) :] if row[0] == round]
    assert again == [row for row in before if row[0] == round], "bit for bit"
    assert len(set(sent(devices))) < len(sent(devices)), "the log names the repeated reply, too"
    state = [place / "polyfed-state" for place in devices.places]
    assert reconcile(tmp_path / "run", state).findings == ()


def test_without_a_budget_a_resumed_run_also_reaches_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own epsilon allows two replies of each client."""
    devices = Devices(tmp_path, text(LOCAL + "epsilon = 9.0\n"))
    died(devices, tmp_path / "run", monkeypatch, 1)
    assert devices.serve(tmp_path / "run")["rounds"] == 2


def test_all_rounds_since_the_last_checkpoint_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = text(LOCAL + NOISE, rounds=4) + "[checkpoint]\nevery = 4\n"
    devices = device(tmp_path, "max_epsilon = 99.0\ndelta = 1e-3\n", recipe)
    died(devices, tmp_path / "run", monkeypatch, 3)
    assert counted(devices) == 3
    assert devices.serve(tmp_path / "run")["rounds"] == 4
    assert counted(devices) == 4
    assert [place for *_, place in replies(devices)] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_server_that_repeats_a_request_learns_nothing_new(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EXACTLY, text(LOCAL + NOISE)))
    answers = [server.ask() for _ in range(6)]
    assert [answer.header["verdict"] for answer in answers] == [REPLY] * 6
    assert {answer.body for answer in answers} == {answers[0].body}
    assert counted(server.devices) == 1


def test_every_change_of_the_request_or_of_the_device_needs_a_new_reply_which_costs(tmp_path: Path) -> None:
    devices = device(tmp_path, "max_epsilon = 99.0\ndelta = 1e-3\n", text(LOCAL + NOISE, rounds=9))
    server, policy = Hostile(devices), devices.places[1] / "policy.toml"
    nudged = {name: value.clone() for name, value in server.params.items()}
    next(iter(nudged.values())).view(-1)[0].nextafter_(torch.tensor(9.0))
    bodies = [server.ask().body, server.ask(params=nudged).body, server.ask().body]
    policy.write_text(policy.read_text() + "\n# a word of the owner\n")
    bodies.append(server.ask().body)
    server.sends(text(LOCAL + NOISE, rounds=9) + "\n# a word of the server\n")
    bodies.append(server.ask().body)
    assert len(set(bodies)) == 5
    assert counted(devices) == 5


def test_a_policy_that_has_become_stricter_holds_for_a_repeated_request(tmp_path: Path) -> None:
    devices = device(tmp_path, EXACTLY, text(LOCAL + NOISE))
    server, policy = Hostile(devices), devices.places[1] / "policy.toml"
    assert server.ask().header["verdict"] == REPLY
    policy.write_text(policy.read_text() + '[egress.a]\nserver = ["statistic"]\n')
    assert server.ask().header["verdict"] == REFUSED


def test_under_secure_aggregation_no_two_replies_have_the_same_masks(tmp_path: Path) -> None:
    """The difference of two such replies has no mask. A task that draws noise a second time gives another reply."""
    devices = device(tmp_path, "secure_aggregation = true", text(EXAMPLE + NOISE + SECURE))
    pairs: list[tuple[bytes, bytes]] = []

    def twice(packet: Packet, config: Mapping[str, Any]) -> Packet:
        answer = Devices.__call__(devices, packet, config)
        if packet.header.get("task") == "update" and config["partition-id"] == 1:
            pairs.append((answer.body, Devices.__call__(devices, packet, config).body))
        return answer

    devices.serve(tmp_path / "run", transport(devices, twice))
    assert len(pairs) == 2
    for first, second in pairs:
        assert first
        assert first == second


def transport(devices: Devices, handler: Any) -> Any:
    from engines.direct import over

    return over(handler, 3)


@pytest.mark.parametrize("kept", [0, 1, 10**6, 10**30, -(10**30)])
def test_a_server_cannot_have_the_newest_reply_deleted(kept: int, tmp_path: Path, monkeypatch: Any) -> None:
    """`kept` is the round up to which the server promises to repeat nothing."""
    server = Hostile(device(tmp_path, EXACTLY, text(LOCAL + NOISE)))
    call = server.devices.__class__.__call__

    def promising(self: Devices, packet: Packet, config: Mapping[str, Any]) -> Packet:
        return call(self, Packet(packet.header | {"kept": kept}, packet.body), config)

    monkeypatch.setattr(Devices, "__call__", promising)
    if not 0 <= kept < 2**63:  # no round has such a number: nothing is drawn, spent or deleted
        assert server.ask().header["verdict"] == FAILED
        return
    assert server.ask().body == server.ask().body
    assert counted(server.devices) == 1


def test_only_the_devices_user_can_read_a_kept_reply_and_a_settled_one_is_deleted(tmp_path: Path) -> None:
    devices = device(tmp_path, EXACTLY, text(LOCAL + NOISE))
    devices.serve(tmp_path / "run")
    assert [place for *_, place in replies(devices)] == [(2, 0)]
    (path,) = devices.places[1].rglob(STORE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (body,) = devices.places[1].rglob("reply-*")
    assert body.name == "reply-000002-000.bin", "the disk has its space again"
    assert stat.S_IMODE(body.stat().st_mode) == 0o600


def test_a_reply_that_cannot_be_kept_or_logged_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hostile(device(tmp_path, "max_epsilon = 99.0\ndelta = 1e-3\n", text(LOCAL + NOISE, rounds=9)))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    for owner, name in ((client_runtime, "keep_reply"), (client_runtime, "book")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            answer = server.ask()
        assert answer.header["verdict"] == FAILED
        assert not answer.body
    assert counted(server.devices) == 2, "a reply counts before it is computed"
    assert server.ask().header["verdict"] == REPLY
    assert counted(server.devices) == 3
    with monkeypatch.context() as patched:
        patched.setattr(client_runtime, "book", full)
        assert server.ask().header["verdict"] == FAILED
    assert server.ask().header["verdict"] == REPLY
    assert counted(server.devices) == 3, "the kept reply is still there"


DAMAGE = ["UPDATE replies SET header = '{}'", "UPDATE replies SET digest = ''", "zero", "cut", "delete", "link"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_reply_is_not_sent_and_not_computed_again(damage: str, tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EXACTLY, text(LOCAL + NOISE)))
    server.ask()
    (path,), (body,) = server.devices.places[1].rglob(STORE), server.devices.places[1].rglob("reply-*")
    content = body.read_bytes()
    match damage:
        case "zero":
            body.write_bytes(bytes(len(content)))
        case "cut":
            body.write_bytes(content[1:])
        case "delete":
            body.unlink()
        case "link":
            body.rename(tmp_path / "elsewhere")
            body.symlink_to(tmp_path / "elsewhere")
        case _:
            with closing(sqlite3.connect(path)) as rows, rows:
                rows.execute(damage)
    assert server.ask().header["verdict"] == FAILED
    assert counted(server.devices) == 1


@pytest.mark.parametrize("run", ["run", "../run", 7, None, "other"])
def test_a_server_that_lies_about_the_coming_rounds_gets_no_more_replies(run: Any, tmp_path: Path) -> None:
    devices = device(tmp_path, EXACTLY, text(LOCAL + NOISE))
    server = Hostile(devices)
    server.ask()
    server.ask(round=2)
    asking = hello(rounds_left=1)
    assert devices(Packet(asking.header | {"run": run}), {"partition-id": 1}).header["verdict"] in ("enrolled", REFUSED)
    assert server.ask(round=1, number=1, run="other").header["verdict"] == REFUSED
    assert counted(devices) == 2


def test_a_new_run_is_refused_although_the_last_round_of_another_run_is_kept(tmp_path: Path) -> None:
    devices = device(tmp_path, EXACTLY, text(LOCAL + NOISE))
    devices.serve(tmp_path / "run")
    with refuses(EgressError, "one more reply"):
        devices.serve(tmp_path / "second")


def test_rounds_that_are_done_or_paid_need_no_budget(tmp_path: Path) -> None:
    """A run of 10 rounds whose epsilon is enough for 6 of them."""
    release = Release("client", 2.0, 1, rounds=6)

    def unpaid(left: Any, run: Any = "") -> int:
        return unpaid_rounds({"rounds_left": left, "run": run}, 10, release, tmp_path, 1)

    assert [unpaid(left) for left in (10, 7, 5, 1, 10**9, -3)] == [6, 3, 1, 1, 6, 1]
    assert unpaid("x") == unpaid(True) == unpaid(None) == 1
    assert not [*tmp_path.iterdir()], "nothing is made before the first request"
    for round in (4, 5):
        with DeviceStore(tmp_path).alone("run", 1) as own, own.transaction() as memory:  # type: ignore[union-attr]
            keep_reply(memory, RequestId("run", 1, round, 0, 1), "use", Packet({}, b"x"), 0)
    assert [unpaid(left, "run") for left in (10, 7, 6, 5)] == [4, 1, 1, 1]
    assert unpaid(7, "other") == 3
    assert unpaid_rounds({}, 10, None, tmp_path, 1) == 0


def test_only_the_replies_of_the_newest_runs_are_kept(tmp_path: Path) -> None:
    body, store = bytes(range(256)) * 40, DeviceStore(tmp_path)
    ids = [RequestId(f"run{number}", 1, 2, 0, 1) for number in range(6)]
    for number, request_id in enumerate(ids):
        with store.alone(request_id.run, 1) as own:
            assert own is not None
            with own.transaction() as memory:
                begin(memory, request_id)
            prune(store, request_id.run, 1)
            with own.transaction() as memory:
                keep_reply(memory, request_id, "use", Packet({"n": number}, body), 0)
        end(store, request_id.run, 1)
    found = []
    for request_id in ids:
        with store.transaction(request_id.run, 1) as memory:
            found.append(kept_reply(memory, request_id, "use"))
            assert kept_reply(memory, request_id, "another") is None
    assert found == [None, None, *(Packet({"n": number}, body) for number in (2, 3, 4, 5))]


def test_a_crash_while_a_reply_is_written_leaves_the_cost_and_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Hostile(device(tmp_path, EXACTLY, text(LOCAL + NOISE)))

    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client_runtime, "bind_secrets", die)
        with pytest.raises(KeyboardInterrupt):
            server.ask()
    assert counted(server.devices) == 1
    assert not replies(server.devices)
    assert server.ask().header["verdict"] == REPLY
    assert counted(server.devices) == 2, "the reply that was lost counts"
    assert server.ask(round=2).header["verdict"] == REFUSED
