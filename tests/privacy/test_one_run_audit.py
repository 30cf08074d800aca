"""A lower bound on epsilon from one run (Steinke, Nasr, Jagielski, NeurIPS 2023), and the accountant's upper bound."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import polyfed
from polyfed.algorithms.averaging import Update
from polyfed.core import keys
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.replies import Answer, ReplyStack
from polyfed.privacy.differential.accounting import Accounting
from polyfed.selection import Uniform
from privacy.test_private_runs import _interrupt, private
from world import losing, same, through

CANARIES, DELTA, ROUNDS, CONFIDENCE = 200, 1e-5, 2, 0.95


def lower_bound(right: int, guesses: int, canaries: int, delta: float) -> float:
    """Return the largest epsilon at which so many right guesses have a probability below 5 % (their Theorem 5.2)."""

    def chance(epsilon: float) -> float:
        binomial = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
        near, most = 0.0, 0.0
        for step in range(1, right + 1):
            near += float(binomial.pmf(right - step))
            most = max(most, near / step)
        return float(binomial.sf(right - 1)) + 2 * canaries * delta * most

    low, high = 0.0, 20.0
    if chance(low) > 1 - CONFIDENCE:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) <= 1 - CONFIDENCE else (low, middle)
    return low


def audited(noise: float) -> float:
    """Run FedAvg on 200 clients. A fair coin decides for each whether it sends its canary, one large entry, or nothing.

    The attacker sees the global models. For the fifth of the canaries with the largest and with the smallest sum of
    their entries' changes, the attacker guesses inside and outside. For the others the attacker makes no guess.
    """
    made = private(
        "central",
        data=Toy(rows=1000, classes=4, seed=3),
        clients=ClientsSpec(partition="iid", num=CANARIES),
        options={"selector": Uniform(participation=CANARIES)},
        noise_multiplier=noise,
        delta=DELTA,
    )
    parts = assemble(replace(made, rounds=ROUNDS))
    name = max(parts.initial, key=lambda key: parts.initial[key].numel())
    entries = parts.initial[name].numel()
    assert entries >= 100
    names = [(key, place) for key, value in parts.initial.items() for place in range(value.numel())][:CANARIES]
    assert len(names) == CANARIES, "each canary has an entry of its own"
    inside = keys.uniform(keys.key(7, "coins"), CANARIES) < 0.5

    def answer(request: Any, asked: Any, send: Any) -> Answer:
        sent = (send if not isinstance(send, dict) else send[asked[0]]).params
        clients = [client for client in asked if inside[client]]
        trained = {key: value.expand(len(clients), *value.shape).clone() for key, value in sent.items()}
        for position, client in enumerate(clients):
            key, place = names[client]
            trained[key][position].view(-1)[place] += 100.0  # clipped to the clip norm
        zeros = torch.zeros(len(clients))
        missing = {client: "outside" for client in asked if not inside[client]}
        return Answer([ReplyStack(tuple(clients), Update(trained, zeros, zeros.to(torch.int64)))], missing)

    parts.engine.answer = answer  # type: ignore[method-assign]
    params = through(parts, ROUNDS).params
    scores = torch.stack([(params[key] - parts.initial[key]).flatten()[place] for key, place in names])
    order, few = scores.argsort(), CANARIES // 5
    right = int(inside[order[-few:]].sum() + (~inside[order[:few]]).sum())
    return lower_bound(right, 2 * few, CANARIES, DELTA)


def test_the_bound_follows_from_the_binomial_tail() -> None:
    assert lower_bound(50, 100, 200, 0.0) == 0.0
    assert lower_bound(100, 100, 200, 0.0) == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-6)
    assert lower_bound(100, 100, 200, 1e-5) < lower_bound(100, 100, 200, 0.0)


def test_the_lower_bound_stays_below_the_accountant_and_rises_without_noise() -> None:
    upper = Accounting("rdp", DELTA).epsilon(4.0, ROUNDS)
    assert 0 <= audited(4.0) <= upper
    assert audited(1e-6) > 1.5 * upper, "an audit that finds nothing without noise shows nothing"


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_rows_stay_protected_when_replies_are_lost_and_the_run_resumes(engine: str, tmp_path: Path) -> None:
    """A lost reply changes no noise of the others. A resumed run draws the same noise and counts the same epsilon."""
    made = private("example", engine, rounds=3)
    whole = polyfed.run(made, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "cut", listeners=[_interrupt])
    again = polyfed.run(made, tmp_path / "cut", resume=True)
    assert again.result["state_sha256"] == whole.result["state_sha256"]
    assert again.result["privacy"]["epsilon"] == whole.result["privacy"]["epsilon"]
    replies: list[dict[int, Any]] = []
    for lost in (False, True):
        parts = assemble(private("example", engine, rounds=1))
        seen: list[Any] = []
        if lost:
            gone = losing(parts, "update", *sorted(replies[0])[:1])
        with parts.fed.watched(lambda _, got, seen=seen: seen.append(got)):
            through(parts, 1)
        replies.append({client: dict(reply.params) for client, reply in seen[0].items()})
    assert gone
    assert set(replies[1]) == set(replies[0]) - set(gone)
    assert all(same(params, replies[0][client]) for client, params in replies[1].items())
