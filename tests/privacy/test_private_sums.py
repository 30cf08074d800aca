"""[privacy] and [secure_aggregation] together: the server reads only sums of clipped updates, and adds the noise."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.test_secure_aggregation import captured, secured
from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import Clip
from polyfed.core.tree import Tree
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.fixed_point import Scale
from privacy.test_private_runs import private, uninterrupted
from world import furthest, played


def both(kind: str = "central", engine: str = "sequential", **changes: Any) -> Recipe:
    """A private recipe whose six clients all take part."""
    return secured(private(kind, engine, **changes), min_clients=2)


@pytest.mark.parametrize("kind", ["central", "central-per-block", "local", "example", "client-scaffold"])
def test_engines_agree_and_the_server_reads_no_single_update(kind: str) -> None:
    one, many = assemble(both(kind, rounds=2)), both(kind, "vectorised", rounds=2)
    seen = captured(one)
    _, state_many, ledger_many = played(many)
    state = one.algorithm.init(one.fed, one.initial)
    for round in (1, 2):
        one.fed.begin(round)
        state = one.algorithm.round(state, one.fed)
    assert furthest(state.params, state_many.params) < 1e-4
    assert math.isnan(state.train_loss)
    updates = [reply for task, _, reply in seen if task == "update"]
    assert updates
    assert all(type(reply).masks is not None for reply in updates)
    assert any(row.get("masked") for row in ledger_many)


@pytest.mark.parametrize("kind", ["central", "central-per-block", "local", "example"])
def test_the_sums_change_nothing_but_the_rounding(kind: str) -> None:
    """With next to no noise, since the two runs draw different noise."""
    made = both(kind, rounds=2, noise_multiplier=1e-7, epsilon=None)
    plain = replace(made, algorithm=replace(made.algorithm, secure_aggregation=None))
    ours, theirs = played(made)[1].params, played(plain)[1].params
    assert furthest(ours, theirs) < 1e-5


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted(both(), tmp_path)


def test_the_check_says_who_has_to_be_trusted_with_the_clipping() -> None:
    trust = "The server reads only sums, so the guarantee assumes that every client clips its own update"
    assert trust in " ".join(check(both()).promises)
    assert trust not in " ".join(check(both("local")).promises), "the noise of the clients does not need the server"
    assert trust not in " ".join(check(private()).promises)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: both(amplification=True), "the clients of a cohort see one another's public keys"),
        (lambda: both("example", options={"aggregation": "weighted"}), 'aggregation = "uniform"'),
    ],
)
def test_what_does_not_hold_for_sums_is_refused(made: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        assemble(made())
    assert words in str(error.value)


SHAPES = {"a.w": (40,), "b.w": (7,), "shared.w": (3, 5)}


def summed(updates: dict[int, Tree], sent: Tree, scale: Scale) -> SummedReplies:
    """What the server reads of these updates, which the clients round to integers."""
    sums, senders, errors = {}, {}, {}
    for name, start in sent.items():
        whole = sum(scale.integers((start + u[name]).numpy(), 1.0, name).astype("int64") for u in updates.values())
        real = scale.real(whole.astype("uint32"))  # type: ignore[union-attr]
        sums["params", name] = torch.from_numpy(real)
        senders["params", name], errors["params", name] = tuple(updates), scale.error(1)
    return SummedReplies([], {}, tuple(updates), sums, senders, {}, sent, errors)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([3, 8, 20]), st.booleans())
def test_the_noise_covers_the_rounding_of_one_client(seed: int, exponent: int, by_block: bool) -> None:
    """With coarse integers, rounding moves the sum further than the clip norm. The noise grows by as much."""
    draws = torch.Generator().manual_seed(seed)
    sent = {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}
    clip = Clip.of(0.5, ("a", "b", "shared"), by_block=by_block)
    mechanism = Mechanism("client", True, clip, 1.0, {}, {}, dict.fromkeys(("a", "b", "shared"), 1.0))
    updates = {}
    for client in range(4):
        raw = {name: torch.randn(1, *shape, generator=draws) for name, shape in SHAPES.items()}
        factors = clip.factors(raw)
        updates[client] = {
            name: (value * factors[name].view(-1, *(1,) * (value.dim() - 1)))[0] for name, value in raw.items()
        }
    scale = Scale(32, 64.0, exponent)
    own = PrivateMean(mechanism, 5)

    def noiseless(inside: dict[int, Tree]) -> tuple[Tree, float]:
        quiet = PrivateMean(replace(mechanism, noise_multiplier=1e-7), 5)
        sums = summed(inside, sent, scale)
        exact, noisy = quiet.of(sums, "params", sent), own.of(sums, "params", sent)
        noise = torch.cat([(noisy[n] - exact[n]).flatten() for n in sent])
        drawn = PrivateMean(mechanism, 5).of(SummedReplies([]), "params", sent)
        plain = torch.cat([(drawn[n] - sent[n]).flatten() for n in sent])
        return exact, float(noise.norm() / plain.norm())

    everyone, grown = noiseless(updates)
    others, _ = noiseless({client: updates[client] for client in range(1, 4)})
    moved = torch.cat([(everyone[n] - others[n]).flatten() for n in sent]).norm()
    assert float(moved) <= 0.5 * grown * (1 + 1e-4)
    if by_block:
        for name in sent:
            block = float((everyone[name] - others[name]).norm())
            assert block <= clip.limit(name.partition(".")[0]) * grown * (1 + 1e-4)
    if exponent == 20:
        assert grown < 1.001
