"""What an absent or late device costs the others. Replies come after a delay of a clock that only waiting moves.

So a busy machine changes nothing: a second here is what the server waits, not what this machine computes.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from engines.direct import Hub, HubTransport
from polyfed.engines.patience import FIRST_WAIT, LOOK_EVERY, SECOND_LOOK
from polyfed.engines.protocol import REPLY, Patience
from polyfed.federation.wire.wire_format import Packet
from polyfed.transport.queue import Waiting

DEVICES = 10
WORK = 0.4
"""Seconds of a device's work."""

DEADLINE, ROUNDING = 1.5, 1e-9
LAST = DEVICES - 1

AWAY = 8.0
"""The `away_seconds` of the tests of absent devices, whose deadline is far."""


class Clock:
    """A monotonic clock that stands still but for `wait`, which stands for `PatientTransport.rest`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", CLOCK)


class Delayed(Hub):
    """The reply of device k comes `delays[k]` seconds after the request, also if nobody waits for it any more."""

    def __init__(self, delays: Mapping[int, float], handler: Any = None) -> None:
        super().__init__(handler or answered, DEVICES)
        self.delays = dict(delays)
        self._due: dict[str, tuple[float, Waiting]] = {}

    def work(self) -> None:
        now = time.monotonic()
        for number, name in enumerate(self.names):
            if (found := self.queue.next_for(name)) is not None:
                self._due.setdefault(found.id, (now + self.delays[number], found))
        for request, (due, found) in list(self._due.items()):
            if due <= now and found.device not in self.absent:
                del self._due[request]
                self.deliver(found, self.answer(found))


def answered(packet: Packet, config: Mapping[str, Any]) -> Packet:
    return Packet({"verdict": REPLY, "number": packet.header.get("number")})


def transport_of(hub: Delayed) -> HubTransport:
    transport = HubTransport(hub)
    transport.rest = CLOCK.wait  # type: ignore[method-assign]
    transport.node_of = dict(enumerate(hub.names))
    return transport


def played(transport: HubTransport, clients: Iterable[int], patience: Patience, number: int = 0) -> Any:
    """One request to these clients: seconds it took, and the answers."""
    started = time.monotonic()
    answers = transport.exchange({client: Packet({"number": number}) for client in clients}, patience)
    return time.monotonic() - started, answers


def waiting(seconds: float = DEADLINE, enough: int = DEVICES, **more: Any) -> Patience:
    return Patience(seconds, enough, **more)


def test_a_device_that_never_answers_costs_the_deadline_once_and_a_fifth_at_most_afterwards() -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), WORK) | {LAST: math.inf})
    transport = transport_of(hub)
    nine = min(played(transport, range(LAST), waiting())[0] for _ in range(2))
    first, answers = played(transport, range(DEVICES), waiting())
    assert first >= DEADLINE - ROUNDING
    assert answers[LAST] == f"late: no answer within {DEADLINE:g} seconds"
    for _ in range(2):
        again, answers = played(transport, range(DEVICES), waiting())
        assert again <= 1.2 * nine
        assert answers[LAST].startswith("late: no answer to this request in ")
        assert all(isinstance(answers[client], Packet) for client in range(LAST))
    assert played(transport, range(DEVICES), waiting())[0] >= DEADLINE - ROUNDING, (
        "it gets the full deadline again now and then"
    )
    costs = [played(transport, range(DEVICES), waiting())[0] for _ in range(4)]
    assert max(costs) <= 1.2 * nine, "less often after every deadline that it missed"


def test_a_late_device_that_answers_in_time_again_is_waited_for_again() -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), 0.1) | {LAST: math.inf})
    transport = transport_of(hub)
    played(transport, range(DEVICES), waiting(0.3))
    hub.delays[LAST] = 0.1
    _, answers = played(transport, range(DEVICES), waiting(0.3))
    assert isinstance(answers[LAST], Packet)
    hub.delays[LAST] = 0.5
    seconds, answers = played(transport, range(DEVICES), waiting(2.0))
    assert isinstance(answers[LAST], Packet)
    assert seconds >= 0.5


def test_where_only_late_devices_are_asked_they_get_the_whole_time() -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), 0.0) | {LAST: math.inf})
    transport = transport_of(hub)
    played(transport, range(DEVICES), waiting(0.2))
    hub.delays[LAST] = 0.4
    _, answers = played(transport, [LAST], waiting(1.0, 1))
    assert isinstance(answers[LAST], Packet)
    hub.delays[0] = 0.4
    _, answers = played(transport, [0, LAST], waiting(1.0, 2, least=2))
    assert all(isinstance(answer, Packet) for answer in answers.values()), "the recipe's min_replies are waited for"


def test_a_request_is_closed_when_enough_have_replied_and_late_replies_are_discarded_and_counted() -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), 0.1) | {8: 0.6, LAST: 0.6})
    transport = transport_of(hub)
    seconds, answers = played(transport, range(DEVICES), waiting(enough=8), number=1)
    assert seconds < 0.5
    assert answers[8] == answers[LAST] == "late: the request was closed when 8 of 10 clients had replied"
    assert not transport.discarded
    hub.delays = dict.fromkeys(range(DEVICES), 0.8)
    _, answers = played(transport, range(DEVICES), waiting(), number=2)
    assert transport.discarded == {8: 1, LAST: 1}
    assert {answer.header["number"] for answer in answers.values()} == {2}, "no reply of the request before"


def test_failures_do_not_close_a_request() -> None:
    def failing(packet: Packet, config: Mapping[str, Any]) -> Packet:
        return Packet({"verdict": "failed", "reason": ""}) if config["partition-id"] < 5 else answered(packet, config)

    hub = Delayed(dict.fromkeys(range(5), 0.0) | dict.fromkeys(range(5, DEVICES), 0.3), failing)
    _, answers = played(transport_of(hub), range(DEVICES), waiting(enough=5))
    assert sum(answer.header["verdict"] == REPLY for answer in answers.values()) == 5


def test_a_device_that_signed_off_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.engines.patience.LOOK_EVERY", 0.05)
    hub = Delayed(dict.fromkeys(range(DEVICES), 0.2) | {LAST: math.inf})
    hub.absent = {hub.names[LAST]}
    seconds, answers = played(transport_of(hub), range(DEVICES), waiting(20.0, away_seconds=0.0))
    assert seconds < 5.0
    assert answers[LAST].startswith("late: its node has been offline for ")


def absence(last: float = 0.2) -> tuple[Delayed, HubTransport]:
    """Devices that answer at once but for the last one, which stops after its first answer."""
    hub = Delayed(dict.fromkeys(range(DEVICES), 0.1) | {LAST: last})
    transport = transport_of(hub)
    asked(transport)
    hub.absent = {hub.names[LAST]}
    return hub, transport


def asked(transport: HubTransport, clients: Iterable[int] = range(DEVICES), **more: Any) -> tuple[float, Any]:
    """Seconds of a request, and the answer of the last device."""
    seconds, answers = played(transport, clients, waiting(100.0, away_seconds=AWAY, **more))
    return seconds, answers.get(LAST)


def test_an_absence_costs_away_seconds_once_however_many_requests_it_lasts() -> None:
    _, transport = absence()
    nine, _ = asked(transport, range(LAST))
    first, answer = asked(transport)
    assert AWAY <= first + LOOK_EVERY <= AWAY + 2 * LOOK_EVERY + 0.5
    assert answer.startswith("late: its node has been offline for ")
    later = [asked(transport) for _ in range(70)]
    assert max(seconds for seconds, _ in later) <= nine + FIRST_WAIT + ROUNDING
    assert later[-1][1].startswith("late: its node has been offline for "), "and since when is told"


def test_a_device_that_is_back_takes_part_at_once_with_all_its_time_and_its_next_absence_is_another() -> None:
    hub, transport = absence(last=3.0)
    for _ in range(20):
        asked(transport)
    hub.absent = set()
    CLOCK.wait(1.1 * LOOK_EVERY)
    assert isinstance(asked(transport)[1], Packet)
    hub.absent = {hub.names[LAST]}
    assert asked(transport)[0] >= AWAY - ROUNDING


def test_the_server_notices_who_is_back_while_it_asks_only_others() -> None:
    hub, transport = absence()
    hub.delays[LAST] = math.inf  # no late answer tells that it is back
    for _ in range(4):
        asked(transport)
    hub.absent = set()
    for _ in range(20):
        asked(transport, range(LAST))
    hub.absent = {hub.names[LAST]}
    assert asked(transport)[0] >= AWAY - LOOK_EVERY


def test_an_answer_ends_an_absence_also_between_two_looks() -> None:
    hub, transport = absence(last=0.0)
    asked(transport)
    CLOCK.wait(2 * LOOK_EVERY)
    asked(transport)
    hub.absent = set()
    assert isinstance(asked(transport)[1], Packet)
    hub.absent = {hub.names[LAST]}
    assert asked(transport)[0] >= AWAY - ROUNDING


def test_a_device_that_shows_up_for_a_moment_in_each_request_is_waited_for_less_and_less_often() -> None:
    hub, transport = absence(last=math.inf)
    costs = []
    for _ in range(20):
        hub.absent = set()
        CLOCK.wait(2 * LOOK_EVERY)
        asked(transport, range(LAST))
        hub.absent = {hub.names[LAST]}
        costs.append(asked(transport)[0])
    assert sum(seconds > 1.0 for seconds in costs) <= 4


def test_who_was_gone_before_gets_a_second_look_if_too_few_others_reply() -> None:
    hub, transport = absence(last=SECOND_LOOK - LOOK_EVERY - 0.6)
    asked(transport)
    seconds, answer = asked(transport, [LAST])
    assert SECOND_LOOK - ROUNDING <= seconds <= SECOND_LOOK + 0.5
    assert answer.startswith("late: its node has been offline for ")
    assert asked(transport, [0, LAST], least=2)[0] == pytest.approx(SECOND_LOOK, abs=0.5)
    hub.absent = set()
    assert isinstance(asked(transport, [LAST])[1], Packet)


def test_nobody_is_away_while_the_server_itself_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Delayed(dict.fromkeys(range(DEVICES), 3 * AWAY))
    transport, back = transport_of(hub), CLOCK.now + 2 * AWAY
    monkeypatch.setattr(hub.queue, "online", lambda: None if CLOCK.now < back else hub.online())
    assert isinstance(asked(transport)[1], Packet)
