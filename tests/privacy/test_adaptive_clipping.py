"""Adaptive clipping: an oracle in NumPy, the split of the noise, whole runs, and refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import dp_accounting.rdp
import numpy as np
import pytest
import torch

from federation.test_secure_aggregation import secured
from polyfed.core import privacy_noise
from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import Clip
from polyfed.core.request import Request
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.privacy.differential.adaptive_clipping import AdaptiveClipping
from polyfed.privacy.differential.section import Privacy
from polyfed.report import write_report
from polyfed.selection import Uniform
from privacy.test_private_runs import private, uninterrupted
from refusals import refuses
from world import algorithm, furthest, played, through

ADAPTIVE = {"clip": "adaptive", "clip_norm": 0.1, "count_noise": 0.6, "noise_multiplier": 0.7}


def adaptive(engine: Any = "sequential", **changes: Any) -> Recipe:
    return private("central", engine, **(ADAPTIVE | changes))


def test_a_run_equals_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Andrew et al., 2021, Algorithm 1, as a loop over clients. Every number of the noise is one deviation."""
    monkeypatch.setattr(
        privacy_noise, "discrete_gaussian", lambda base, name, shape, on: torch.full(shape, privacy_noise.STEPS)
    )
    made = adaptive(rounds=3, clip_quantile=0.4, clip_lr=0.3)
    parts = assemble(made)
    seen: list[tuple[Any, Any]] = []
    state = parts.algorithm.init(parts.fed, parts.initial)
    norm, noise = 0.1, (0.7**-2 - (2 * 0.6) ** -2) ** -0.5
    assert parts.fed.privacy is not None
    denominators = parts.fed.privacy.denominators
    cohort = denominators["shared"]
    assert cohort == 4
    for round in (1, 2, 3):
        parts.fed.begin(round)
        before = {name: value.double().numpy() for name, value in state.params.items()}
        with parts.fed.watched(lambda sent, replies: seen.append((sent, replies))):
            state = parts.algorithm.round(state, parts.fed)
        replies = seen[-1][1]
        sums, count = {name: np.zeros_like(value) for name, value in before.items()}, 0.0
        for reply in replies.values():
            update = {name: value.double().numpy() - before[name] for name, value in reply.params.items()}
            size = math.sqrt(sum(float((value**2).sum()) for value in update.values()))
            for name, value in update.items():
                sums[name] += value * min(1.0, norm / size)
            count += float(size <= norm)
        for name, value in before.items():
            expected = value + (sums[name] + noise * norm) / denominators[name.partition(".")[0]]
            np.testing.assert_allclose(state.params[name].double().numpy(), expected, atol=2e-5)
        share = (count - 0.5 * len(replies) + 0.6) / cohort + 0.5
        norm *= math.exp(-0.3 * (share - 0.4))
        assert float(state.moments["clip_norm"]["clip_norm"]) == pytest.approx(norm, rel=1e-6)  # terms are whole steps


@pytest.mark.parametrize(("z", "sigma"), [(0.5, 0.3), (1.0, 5.0), (3.3, 1.7), (0.1, 50.0)])
def test_updates_and_count_together_spend_what_the_accountant_counts(z: float, sigma: float) -> None:
    """By the library: the two Gaussian mechanisms of a round have the Renyi divergences of one with multiplier z."""
    rule = AdaptiveClipping(0.5, 0.2, sigma)

    def epsilon(*multipliers: float) -> float:
        accountant = dp_accounting.rdp.RdpAccountant()
        for multiplier in multipliers:
            accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
        return float(accountant.get_epsilon(1e-5))

    assert epsilon(rule.update_noise(z), 2 * sigma) == pytest.approx(epsilon(z), rel=1e-9)


def sending_nothing(parts: Assembly, client: int) -> list[int]:
    """Have a client send an update without parameters. The list fills with the client for each such reply."""
    answer, sent = parts.engine.answer, list[int]()

    def hostile(request: Request, asked: Any, send: Any) -> Answer:
        got = answer(request, asked, send)
        replies = {c: reply for part in got.parts for c, reply in Replies([part]).items()}
        if client in replies:
            replies[client] = replace(replies[client], params={})
            sent.append(client)
        return Answer.of(stacked(replies), got.missing)

    parts.engine.answer = hostile  # type: ignore[method-assign]
    return sent


def test_an_empty_update_has_norm_zero_and_does_not_end_the_run() -> None:
    everyone = {"selector": Uniform(participation=6)}
    honest, hostile = (
        assemble(adaptive(rounds=1, clip_norm=1e-4, count_noise=1.0, options=everyone)) for _ in range(2)
    )
    sent = sending_nothing(hostile, 2)
    norms = [float(through(parts, 1).moments["clip_norm"]["clip_norm"]) for parts in (honest, hostile)]
    assert sent == [2]
    assert norms[1] == pytest.approx(norms[0] * math.exp(-0.2 / 6)), "one more of six updates is below the clip norm"
    assert Clip(1.0).within({}, 3).tolist() == [True] * 3


def test_clients_whose_blocks_are_all_private_send_an_empty_update() -> None:
    parts, state, _ = played(adaptive(rounds=2, options={"private": ("shared", "a")}))
    assert any(parts.fed.clients.owned(client) == ("a",) for client in parts.fed.clients)
    assert float(state.moments["clip_norm"]["clip_norm"]) > 0


def test_the_split_of_the_noise_has_sensible_limits() -> None:
    noises = [AdaptiveClipping(0.5, 0.2, sigma).update_noise(1.0) for sigma in (0.501, 1.0, 10.0, 1e3, 1e8)]
    assert noises == sorted(noises, reverse=True)
    assert noises[0] > 10, "a count with almost all of epsilon leaves almost none for the updates"
    assert noises[-1] == pytest.approx(1.0, abs=1e-12), "a count without information costs nothing"
    assert AdaptiveClipping(0.5, 0.2, 5.0).update_noise(1.0) == pytest.approx(1.0050378, abs=1e-6)
    for sigma in (0.5, 0.1):
        with refuses(RecipeError, "privacy.count_noise: multiplier"):
            AdaptiveClipping(0.5, 0.2, sigma).update_noise(1.0)


@pytest.mark.parametrize("sigma", [1e-3, 0.6, 5.0, 777.0])
def test_at_the_least_noise_the_count_still_spends_a_part_of_epsilon(sigma: float) -> None:
    rule = AdaptiveClipping(0.5, 0.2, sigma)
    assert rule.update_noise(rule.least_noise) > rule.least_noise


def test_the_clip_norm_converges_to_the_quantile() -> None:
    """Without noise, on fixed norms 1 to 100, from far below and from far above."""
    rule, norms = AdaptiveClipping(0.3, 0.2, 1.0), np.arange(1, 101)
    for norm in (1e-3, 1e4):
        for _ in range(400):
            norm = rule.after(norm, float(((norms <= norm) - 0.5).sum()), 100.0)
        assert norm == pytest.approx(30.5, abs=1.5)


def test_a_lost_reply_does_not_move_the_norm() -> None:
    rule = AdaptiveClipping(0.5, 0.2, 1.0)
    assert rule.after(2.0, 0.0, 10.0) == 2.0, "nobody replied, and gamma is one half"


def test_engines_agree_and_the_norm_moves() -> None:
    _, one, ledger_one = played(adaptive(rounds=3))
    _, many, ledger_many = played(adaptive("vectorised", rounds=3))
    assert furthest(one.params, many.params) < 1e-4
    norm, other = (float(state.moments["clip_norm"]["clip_norm"]) for state in (one, many))
    assert norm == pytest.approx(other)
    assert abs(norm - 0.1) > 1e-3
    assert ledger_one == ledger_many


def test_clients_leave_the_clipping_to_the_server() -> None:
    parts, seen = assemble(adaptive(rounds=1)), []
    state = parts.start()
    parts.fed.begin(1)
    with parts.fed.watched(lambda sent, replies: seen.append((sent.params, replies))):  # type: ignore[union-attr]
        parts.algorithm.round(state, parts.fed)
    ((sent, replies),) = seen
    sizes = [math.sqrt(sum(float((v - sent[n]).square().sum()) for n, v in r.params.items())) for r in replies.values()]
    assert max(sizes) > 0.2
    assert all(float(reply.loss) == 0.0 for reply in replies.values())


def test_a_resumed_run_equals_the_uninterrupted_one_and_logs_the_norms(tmp_path: Path) -> None:
    whole = uninterrupted(adaptive(), tmp_path)
    texts = [(tmp_path / name / "rounds.jsonl").read_text() for name in ("whole", "cut")]
    rows = [[json.loads(row)["privacy"] for row in text.splitlines()] for text in texts]
    assert rows[0] == rows[1]
    norms = [row["clip_norm"] for row in rows[0]]
    assert len({*norms}) == 3
    assert norms[-1] == float(whole.state.moments["clip_norm"]["clip_norm"])
    assert "Differential privacy" in write_report(tmp_path / "whole").read_text()


def test_the_accountant_counts_the_whole_noise_and_the_check_says_the_split() -> None:
    said, plain = check(adaptive()), check(private(noise_multiplier=0.7))
    assert said.privacy is not None
    assert plain.privacy is not None
    assert said.privacy["epsilon"] == plain.privacy["epsilon"]
    assert said.privacy["update_noise"] > 0.7
    assert "follows the 0.5 quantile of the norms of the updates" in " ".join(said.promises)


def test_a_server_optimiser_keeps_the_norm() -> None:
    state = played(adaptive(options={"server": ServerOptimiser(optimiser="adam", lr=0.1)}, rounds=2))[1]
    assert {*state.moments} == {"first", "second", "clip_norm"}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: private("local", **ADAPTIVE), "clients that add noise would have to receive the clip norm"),
        (lambda: private("example", clip="adaptive"), "clients that add noise would have to receive the clip norm"),
        (lambda: assemble(secured(adaptive())), "needs the norms of single updates"),
        (lambda: assemble(adaptive(count_noise=0.3)), "must be above half of the noise multiplier (0.7)"),
        (lambda: assemble(adaptive(count_noise=None)), "count_noise = 0.2: must be above half"),
        (lambda: assemble(adaptive(count_noise=5.0)), "must be at most 4, the expected size of the cohort"),
        (lambda: assemble(adaptive(noise_multiplier=1e-9)), "must be at least 4e-08 with count_noise = 0.6"),
        (lambda: Privacy(unit="client", delta=0.1, epsilon=1.0, clip="adaptive", clip_quantile=1.0), "below 1"),
        (lambda: Privacy(unit="client", delta=0.1, epsilon=1.0, clip="adaptive", clip_lr=0.0), "above 0"),
    ],
)
def test_what_adaptive_clipping_cannot_honour_is_refused(made: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        made()
    assert words in str(error.value)


def test_a_cohort_of_clients_that_share_no_state_stays_secret_with_adaptive_clipping() -> None:
    made = replace(adaptive(amplification=True), algorithm=algorithm("fedavg", aggregation="uniform"))
    guarantee = assemble(made).guarantee
    assert guarantee is not None
    assert guarantee.accounting.swing == 2.0
