"""Devices that work on while the server goes on: what enters a buffer, what is given up, and a server that is killed.

Devices answer after delays of a clock that only waiting moves, as in `attacks/test_late_device.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.test_late_device import CLOCK, DEVICES, Delayed, _clock, transport_of
from engines.direct import HubTransport, enrolled
from polyfed.core.errors import TooFewReplies
from polyfed.data import ClientsSpec
from polyfed.deploy.handlers import Simulated
from polyfed.engines.patience import SECOND_LOOK
from polyfed.engines.protocol import Patience
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import DeploymentSpec
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import Assembly
from polyfed.federation.wire.wire_format import Packet
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, played, recipe, same

_ = _clock  # a fixture: every test has the clock

LAST = DEVICES - 1


def gathered(
    transport: HubTransport, clients: Iterable[int], enough: int, number: int = 0, seconds: float = 60.0, **more: Any
) -> tuple[float, dict[int, Any]]:
    """Seconds that it took, and what came: the number of the request that a client answers, or why it does not."""
    started, interval_s = CLOCK.now, more.pop("interval_s", None)
    packets = {client: Packet({"number": number}) for client in clients}
    answers = transport.gather(packets, Patience(seconds, enough, **more), interval_s)
    told = {client: one if isinstance(one, str) else one.header["number"] for client, one in answers.items()}
    return CLOCK.now - started, told


def test_a_slow_reply_enters_a_later_buffer() -> None:
    transport = transport_of(Delayed(dict.fromkeys(range(DEVICES), 1.0) | {8: 3.0, LAST: 5.0}))
    seconds, first = gathered(transport, range(DEVICES), 8, 1)
    assert first == dict.fromkeys(range(8), 1)
    assert seconds < 2.0
    assert {*transport.working} == {8, LAST}
    _, second = gathered(transport, range(8), 9, 2)
    assert second == dict.fromkeys(range(8), 2) | {8: 1}, "it answers what it was asked"
    _, third = gathered(transport, [], 1)
    assert third == {LAST: 1}
    assert not transport.working
    assert not transport.discarded, "nothing was lost"


def test_a_request_between_two_buffers_does_not_take_what_belongs_to_the_next() -> None:
    """Such as the evaluation after a round."""
    transport = transport_of(Delayed(dict.fromkeys(range(DEVICES), 0.0) | {LAST: 2.0}))
    gathered(transport, range(DEVICES), LAST, 1)
    answers = transport.exchange({client: Packet({"number": 9}) for client in range(DEVICES)}, Patience(60.0, DEVICES))
    assert {one.header["number"] for one in answers.values()} == {9}  # type: ignore[union-attr]
    assert gathered(transport, [], 1)[1] == {LAST: 1}


def test_a_deadline_closes_a_buffer_that_is_not_full_but_waits_for_the_quorum() -> None:
    transport = transport_of(Delayed(dict.fromkeys(range(DEVICES), 4.0) | {0: 1.0, 1: 9.0}))
    seconds, first = gathered(transport, range(DEVICES), DEVICES, interval_s=2.0)
    assert first.keys() == {0}
    assert seconds == pytest.approx(2.0, abs=0.6)
    seconds, second = gathered(transport, [], DEVICES, interval_s=0.1, least=8)
    assert second.keys() == {*range(2, DEVICES)}


def test_a_device_that_never_answers_is_given_up_at_its_own_deadline() -> None:
    transport = transport_of(Delayed(dict.fromkeys(range(DEVICES), 1.0) | {LAST: math.inf}))
    for number in range(8):
        _, answers = gathered(transport, range(DEVICES if number == 0 else LAST), LAST, number, 5.0)
        if LAST in answers:
            break
    assert answers[LAST] == "late: no answer within 5 seconds"
    assert number > 1, "its time is its own, not that of a round"
    assert not transport.working


def test_who_is_offline_is_given_up_after_away_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.engines.patience.LOOK_EVERY", 0.05)
    hub = Delayed(dict.fromkeys(range(DEVICES), 1.0))
    hub.absent = {hub.names[LAST]}
    _, answers = gathered(transport_of(hub), range(DEVICES), DEVICES, away_seconds=2.0)
    assert answers[LAST].startswith("late: its node has been offline for ")


def test_who_was_offline_when_asked_is_given_up_after_a_second_look() -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), 1.0))
    hub.absent = {hub.names[LAST]}
    transport = transport_of(hub)
    first, _ = gathered(transport, range(DEVICES), DEVICES, away_seconds=20.0)
    again, answers = gathered(transport, range(DEVICES), DEVICES, away_seconds=20.0)
    assert (first, again) == (pytest.approx(20.0, abs=0.6), pytest.approx(SECOND_LOOK, abs=0.6))
    assert answers[LAST].startswith("late: its node has been offline for ")


def spec(**options: Any) -> Recipe:
    options = {"selector": Uniform(participation=4), "buffer": 2, "train": Train(lr=0.1, batch_size=16)} | options
    clients = ClientsSpec(partition="iid", num=DEVICES)
    made = recipe(algorithm("fedbuff", **options), clients=clients, rounds=5)
    return replace(made, deployment=DeploymentSpec(reply_seconds=60.0))


def parts_of(made: Recipe, folder: Path, delays: dict[int, float]) -> Assembly:
    hub = Delayed({client: delays.get(client, 1.0) for client in range(DEVICES)}, Simulated(made, folder))
    transport = HubTransport(hub)
    transport.rest = CLOCK.wait  # type: ignore[method-assign]
    hub.delays, own = dict.fromkeys(range(DEVICES), 0.0), hub.delays
    parts = enrolled(made, transport, DEVICES)
    hub.delays = own
    return parts


def rounds(parts: Assembly, state: Any, first: int, last: int) -> Any:
    for round in range(first, last + 1):
        parts.fed.begin(round)
        state = parts.algorithm.round(state, parts.fed)
        parts.engine.saved(parts.algorithm.settled(state, round))
    return state


def test_it_equals_one_process_if_nobody_is_late(tmp_path: Path) -> None:
    made = spec(buffer=1.0)
    parts = parts_of(made, tmp_path, {})
    state = rounds(parts, parts.start(), 1, 5)
    _, alone, ledger = played(made)
    assert same(state.params, alone.params)
    assert list(parts.ledger.rows()) == ledger


def until_it_came(parts: Assembly) -> tuple[int, Any, Any]:
    """The round in which the reply of client 0 came, and the states before and after it."""
    state = parts.start()
    for round in range(1, 6):
        before, state = state, rounds(parts, state, round, round)
        if before.open and not state.open:
            return round, before, state
    raise AssertionError("it never came")


def test_a_late_reply_of_a_device_counts_for_the_model_that_it_had_also_if_the_server_is_killed(tmp_path: Path) -> None:
    """Client 0 needs some rounds of the others. A server that is killed asks it again, with the model of that time."""
    made = spec(selector=Uniform(participation=DEVICES), buffer=DEVICES - 1)
    whole = parts_of(made, tmp_path / "whole", {0: 2.5})
    came, before, after = until_it_came(whole)
    assert came > 2
    assert before.sent.keys() == {1}
    assert after.staleness["shared"] > 0
    late = [row for row in whole.ledger.rows() if row["client"] == 0 and row["round"] == 1]
    assert [row.get("came") for row in late] == [came if row["destination"] == "server" else None for row in late]
    assert not any("came" in row for row in whole.ledger.rows() if row["client"])

    first = parts_of(made, tmp_path / "cut", {0: 2.5})
    state, modules = rounds(first, first.start(), 1, came - 1), checkpoint.modules_of(made.algorithm)
    checkpoint.save(tmp_path / "saved", came - 1, {"state": state}, modules)
    loaded = checkpoint.load(tmp_path / "saved", modules)
    assert loaded is not None
    second = parts_of(made, tmp_path / "cut", {0: 0.4})
    second.resume(loaded[1]["state"], {}, came - 1)
    assert second.engine.kept == 0, "devices keep what an answer to round 1 needs"
    ended = rounds(second, loaded[1]["state"], came, came)
    assert same(ended.params, after.params)
    assert checkpoint.digest(ended) == checkpoint.digest(after)
    again = [row for row in second.ledger.rows() if row["client"] == 0 and row["round"] == 1]
    assert {(row["destination"], row["came"]) for row in again} == {("client", came), ("server", came)}


def test_if_everybody_fails_the_run_ends(tmp_path: Path) -> None:
    parts = parts_of(spec(), tmp_path, dict.fromkeys(range(DEVICES), math.inf))
    with refuses(TooFewReplies, "answered"):
        rounds(parts, parts.start(), 1, 1)
