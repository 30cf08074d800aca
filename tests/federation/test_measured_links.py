"""Rates that the server measures: the estimate, what a device can do to it, and clocks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.experiment.running.run_state import _wrong_key
from polyfed.federation.links.measured import LEAST_BYTES, SHORTEST_S, WINDOW, MeasuredLinks, is_content
from polyfed.federation.links.network import Network
from polyfed.transport.carried import MOST_REQUESTS, Carried, Meter

PRIOR_UP, PRIOR_DOWN = 1e6, 4e6
SECONDS = st.floats(0.01, 100.0)


def links(clients: int = 3) -> MeasuredLinks:
    network = Network(channel="measured", rate_up_bps=PRIOR_UP, rate_down_bps=PRIOR_DOWN)
    return MeasuredLinks(clients, network)


def up(of: MeasuredLinks) -> list[float]:
    of.begin()
    rates: list[float] = of.rates().up_bps.tolist()
    return rates


def test_before_the_first_measurement_the_sections_rates_count() -> None:
    made = links()
    made.begin()
    assert made.rates().up_bps.tolist() == [PRIOR_UP] * 3
    assert made.rates().down_bps.tolist() == [PRIOR_DOWN] * 3
    assert made.work_s("practise").tolist() == [0.0] * 3
    assert made.facts() == {}


def test_the_estimate_is_bits_by_seconds_after_a_few_transfers_and_directions_are_apart() -> None:
    made = links()
    for _ in range(3):
        made.learn(1, up=(10_000, 2.0), down=(50_000, 1.0), work=("practise", 7.0))
    assert up(made) == [PRIOR_UP, 40_000.0, PRIOR_UP]
    assert made.rates().down_bps.tolist() == [PRIOR_DOWN, 400_000.0, PRIOR_DOWN]
    assert made.work_s("practise").tolist() == [0.0, 7.0, 0.0]
    assert made.work_s("install").tolist() == [0.0] * 3
    assert made.facts() == {"up": {"1": 40_000.0}, "down": {"1": 400_000.0}, "work.practise": {"1": 7.0}}


def test_of_two_measurements_the_middle_is_geometric() -> None:
    made = links()
    made.learn(0, up=(LEAST_BYTES, 8 * LEAST_BYTES / 1e4))
    assert up(made)[0] == pytest.approx(math.sqrt(PRIOR_UP * 1e4))


@given(
    steady=st.floats(1e3, 1e9), odd=st.floats(1e-3, 1e3), place=st.integers(0, WINDOW - 1), many=st.integers(3, WINDOW)
)
def test_one_odd_measurement_changes_nothing_among_steady_ones(
    steady: float, odd: float, place: int, many: int
) -> None:
    made = links(1)
    for number in range(WINDOW + many):
        factor = odd if number == WINDOW + place % many else 1.0
        made.learn(0, up=(10**6, 8e6 / steady * factor))
    assert up(made)[0] == pytest.approx(8e6 / max(8e6 / steady, SHORTEST_S))


def test_a_link_that_changes_is_known_after_three_transfers() -> None:
    made = links(1)
    for _ in range(WINDOW):
        made.learn(0, up=(10**6, 8.0))
    for _ in range(WINDOW // 2 + 1):
        made.learn(0, up=(10**6, 80.0))
    assert up(made) == [1e5]


def test_small_and_very_short_transfers() -> None:
    made = links(1)
    made.learn(0, up=(LEAST_BYTES - 1, 1e-9))
    assert up(made) == [PRIOR_UP], "it tells of the delay"
    for _ in range(WINDOW):
        made.learn(0, up=(LEAST_BYTES, 0.0), down=(LEAST_BYTES, 0.0))
    assert up(made) == [8 * LEAST_BYTES / SHORTEST_S], "finite"


@given(lies=st.lists(st.tuples(st.integers(0, 10**9), SECONDS), max_size=10))
def test_whatever_a_device_does_the_estimates_of_the_others_stay(lies: list[tuple[int, float]]) -> None:
    honest, beside = links(), links()
    for one in (honest, beside):
        one.learn(0, up=(10**6, 1.0), work=("practise", 1.0))
        one.learn(2, up=(10**6, 3.0), work=("practise", 2.0))
    for count, seconds in lies:
        beside.learn(1, up=(count, seconds), down=(count, seconds), work=("practise", seconds))
    now, then = up(beside), up(honest)
    assert (now[0], now[2]) == (then[0], then[2])
    assert beside.work_s("practise")[[0, 2]].tolist() == honest.work_s("practise")[[0, 2]].tolist()


def test_what_is_measured_in_a_round_counts_in_the_next_and_survives_a_checkpoint() -> None:
    made = links()
    made.learn(0, up=(10**6, 1.0), work=("practise", 3.0))
    made.begin()
    before = made.rates().up_bps
    made.learn(0, up=(10**6, 9.0))
    assert torch.equal(made.rates().up_bps, before)
    other = links()
    other.restore(made.content())
    assert up(other) == up(made)
    other.learn(0, up=(10**6, 5.0))
    assert up(other) != up(made), "nothing is shared"


@pytest.mark.parametrize("wrong", [[], {"up": []}, {"up": {"0": [1.0]}}, {"up": {0: []}}, {"up": {0: [math.nan]}}])
def test_a_checkpoint_with_other_measurements_is_refused(wrong: Any) -> None:
    assert is_content(links().content())
    assert not is_content(wrong)
    whole: dict[str, Any] = {"run": "r", "round": 1, "state": 0, "locals": {}, "places": {}, "best": None}
    totals = dict.fromkeys(("bytes_up", "bytes_down", "seconds", "simulated_seconds"), 0)
    assert _wrong_key(whole | {"totals": totals, "links": wrong}) == "links"


# the server's clock


class Watch:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_request_is_timed_from_its_offer_to_its_reply_by_the_servers_clock() -> None:
    clock = Watch()
    meter = Meter(clock)
    meter.offered("r")
    clock.now += 5.0
    meter.down("r", 1000, 4.0)
    clock.now += 30.0  # the device trains
    since = meter.begins("r")
    clock.now += 2.0
    meter.up("r", 500, since)
    clock.now += 60.0  # the line is cut between two pieces
    since = meter.begins("r")
    clock.now += 3.0
    meter.up("r", 300, since)
    assert meter.ended("r") == Carried(800, 5.0, 1000, 4.0, 30.0)
    assert meter.ended("r") == Carried(), "it is forgotten"


def test_a_request_that_is_offered_again_is_timed_from_then_on() -> None:
    clock = Watch()
    meter = Meter(clock)
    meter.offered("r")
    clock.now += 500.0  # the device was killed
    meter.offered("r")
    clock.now += 1.0
    meter.begins("r")
    assert meter.ended("r").work_s == 1.0


def test_a_piece_of_an_unknown_request_or_without_bytes_counts_nothing() -> None:
    meter = Meter(Watch())
    meter.up("x", 10, meter.begins("x"))
    meter.down("x", 10, 1.0)
    assert meter.ended("x") == Carried()
    meter.offered("r")
    meter.up("r", 0, meter.begins("r"))
    assert meter.ended("r").up_s == 0.0


def test_requests_that_nobody_answers_do_not_fill_the_memory() -> None:
    meter = Meter(Watch())
    for number in range(MOST_REQUESTS + 10):
        meter.offered(str(number))
    assert len(meter._open) == MOST_REQUESTS
