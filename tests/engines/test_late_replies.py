"""Buffered rounds with real processes: a reply that comes buffers later equals a simulation with the same order. Slow.

The slow device is stopped while it trains, so the server fills its buffers with the others and goes on.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.federations import rows
from engines.test_own_processes import PATIENCE, RECIPE, OwnFederation, begun
from polyfed.federation import federation as asking
from polyfed.federation.open_work import Buffer, OpenWork, first_to_arrive
from polyfed.federation.replies import Replies

__all__ = ["begun"]

SLOW, ROUNDS = 0, 30
BUFFERED = (
    RECIPE.replace('name = "scaffold"', 'name = "fedbuff"\nbuffer = 2').replace("lr = 0.1", "lr = 0.1\nsteps = 300")
).format(rounds=ROUNDS)
"""A training takes long enough that a device is stopped in it."""


def arrivals(out: Path) -> dict[tuple[int, int], int]:
    """Client and the round in which it was asked -> the round in whose buffer its reply was, by the server's ledger."""
    found = rows(out / "egress.jsonl")
    return {(row["client"], row["round"]): row.get("came", row["round"]) for row in found if row["message"] == "Update"}


def in_this_order(came: Mapping[tuple[int, int], int]) -> Callable[..., Buffer]:
    """`first_to_arrive` of a simulation whose replies arrive in these rounds; those that never came arrive last."""

    def buffer(fresh: Replies, works: Sequence[OpenWork], *more: Any, **times: Any) -> Buffer:
        placed = [replace(one, arrives_s=float(came.get((one.client, one.round), ROUNDS + 1))) for one in works]
        now = max(one.round for one in works)  # whoever replies begins again in the next round
        return first_to_arrive(fresh, placed, sum(one.arrives_s <= now for one in placed))

    return buffer


@contextmanager
def stopped(device: psutil.Process) -> Iterator[None]:
    """A device, and the processes of its tasks, do nothing meanwhile."""
    family = [device, *device.children(recursive=True)]
    for one in family:
        one.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in family:
            one.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("killed", [False, True], ids=["the run goes on", "the run is killed meanwhile"])
def test_a_late_reply_counts_with_its_staleness_as_in_a_simulation(
    killed: bool, begun: Callable[..., OwnFederation], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = begun(ROUNDS, recipe=BUFFERED)
    slow = psutil.Process(federation.processes[f"device-{SLOW}"].pid)
    run = federation.start("run")
    federation.until(lambda: "round 1:" in federation.log("run"), "round 1")
    with stopped(slow):
        federation.until(lambda: "round 6:" in federation.log("run"), "later rounds")
        if killed:  # a device that is stopped cannot enrol, and the next run asks it again for its reply
            federation.kill("run")
            run = federation.start("run")
    assert run.wait(PATIENCE) == 0, federation.log("run")
    out = federation.app / "run"
    came = arrivals(out)
    late = {place: round for place, round in came.items() if round - place[1] >= 4}
    assert {client for client, _ in late} == {SLOW}
    told = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    monkeypatch.setattr(asking, "first_to_arrive", in_this_order(came))
    one = polyfed.run(federation.recipe, federation.folder / "one", engine="sequential")
    there = polyfed.load_run(out)
    assert all(torch.equal(value, one.state.params[name]) for name, value in there.state.params.items())
    for key in ("train_loss", "logged", "metrics", *(() if killed else ("cohort",))):
        assert [row[key] for row in told] == [row[key] for row in one.rounds], key
    assert max(row["logged"]["staleness.shared"] for row in told) >= 2, "the mean of a late reply and a fresh one"
