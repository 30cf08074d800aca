"""Clipping and noise: norms, noise level, where the noise comes from, and the server's private mean."""

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.privacy_noise import STEPS, Clip, discrete_gaussian
from polyfed.core.tree import Tree, block_of
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.privacy.differential.mechanism import Mechanism

BLOCKS = ("a", "b", "shared")
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (5,), "shared.bias": (2,)}


def mechanism(**changes: Any) -> Mechanism:
    options: dict[str, Any] = {
        "unit": "client",
        "central": True,
        "clip": Clip(1.5),
        "noise_multiplier": 1e-6,
        "protected": {"update": ("params",)},
        "withheld": {"update": ("loss", "num_rows")},
        "denominators": {"a": 3.0, "b": 2.0, "shared": 4.0},
    }
    return Mechanism(**(options | changes))


def tree(seed: int, scale: float, shapes: dict[str, tuple[int, ...]] | None = None) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in (shapes or SHAPES).items()}


def norm(values: Tree) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in values.values()))


def minus(a: Tree, b: Tree) -> Tree:
    return {n: a[n] - b[n] for n in a}


def update(params: Tree) -> Update:
    return Update(params, torch.tensor(0.7), torch.tensor(33))


def replies(updates: dict[int, Tree], sent: Tree) -> Replies:
    parts = []
    for client, change in updates.items():
        params = {n: (sent[n] + change[n]).unsqueeze(0) for n in change}
        parts.append(ReplyStack((client,), Update(params, torch.zeros(1), torch.zeros(1))))
    return Replies(parts)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.3, 5.0, 1e4]), st.booleans())
def test_an_update_is_scaled_down_to_its_limit_and_never_up(seed: int, scale: float, by_block: bool) -> None:
    clip = Clip.of(1.5, BLOCKS, by_block=by_block)
    before, sent = tree(seed, scale), tree(seed + 1, 1.0)
    trained = {n: sent[n] + before[n] for n in sent}
    after = minus(mechanism(clip=clip).of_one("update", Broadcast(sent), update(trained), 1).params, sent)
    groups = [[n for n in before if block_of(n) == block] for block in BLOCKS] if by_block else [list(before)]
    limit = 1.5 / math.sqrt(3) if by_block else 1.5
    for names in groups:
        own = {n: before[n] for n in names}
        factor = min(1.0, limit / norm(own))
        for n in names:
            torch.testing.assert_close(after[n], factor * before[n], atol=1e-5, rtol=2e-3)
    assert norm(after) <= 1.5 * (1 + 1e-3)


def test_a_stack_is_treated_like_its_clients_one_by_one() -> None:
    sent, keys = tree(0, 1.0), [11, 12, 13]
    own = mechanism(central=False, noise_multiplier=0.5)
    trained = [tree(k, 2.0) for k in keys]
    stack = Update({n: torch.stack([t[n] for t in trained]) for n in sent}, torch.ones(3), torch.ones(3))
    many = own.of_stack("update", {"params": sent}, stack, keys)
    for i, (key, one) in enumerate(zip(keys, trained, strict=True)):
        alone = own.of_one("update", Broadcast(sent), update(one), key)
        for n in sent:
            torch.testing.assert_close(many.params[n][i], alone.params[n])
    assert not many.loss.any()
    assert not many.num_rows.any()


def test_other_tasks_are_left_alone() -> None:
    reply = update(tree(0, 9.0))
    assert mechanism().of_one("tune", Broadcast({}), reply, 1) is reply


@pytest.mark.parametrize("base", [7, None], ids=["key", "system"])
def test_noise_is_standard_normal_on_ten_thousand_draws(base: int | None) -> None:
    drawn = discrete_gaussian(base, "a.weight", (10_000,), "cpu").double() / STEPS
    # four standard errors: 1 / sqrt(n) of the mean, 1 / sqrt(2 n) of the deviation, sqrt(24 / n) of the kurtosis
    assert abs(float(drawn.mean())) < 4 / 100
    assert abs(float(drawn.std()) - 1) < 4 / math.sqrt(20_000)
    assert abs(float(drawn.pow(4).mean()) - 3) < 4 * math.sqrt(96 / 10_000)


def test_each_tensor_and_each_key_has_noise_of_its_own() -> None:
    one, other, name = (discrete_gaussian(k, n, (10_000,), "cpu") for k, n in ((7, "a"), (8, "a"), (7, "b")))
    assert torch.equal(one, discrete_gaussian(7, "a", (10_000,), "cpu"))
    for stream in (other, name):
        assert abs(float(torch.corrcoef(torch.stack([one, stream]).double())[0, 1])) < 4 / 100


def test_the_system_draws_from_urandom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or urandom(size))  # type: ignore[func-returns-value]
    sent = tree(0, 1.0)
    own = mechanism(central=False, noise_multiplier=0.5, secure=True)
    first, second = (own.of_one("update", Broadcast(sent), update(sent), 1).params for _ in range(2))
    assert sum(asked) == 2 * 12 * sum(v.numel() for v in sent.values())
    assert not torch.equal(first["a.weight"], second["a.weight"])


@pytest.mark.parametrize("central", [True, False])
def test_the_noise_level_of_a_release_on_ten_thousand_draws(central: bool) -> None:
    sent = tree(0, 1.0, {"a.weight": (10_000,)})
    own = mechanism(central=central, noise_multiplier=2.0, denominators={"a": 4.0})
    if central:
        noise = minus(
            PrivateMean(own, 5).of(replies({0: tree(0, 0.0, {"a.weight": (10_000,)})}, sent), "params", sent), sent
        )
        expected = 2.0 * 1.5 / 4.0
    else:
        noise = minus(own.of_one("update", Broadcast(sent), update(sent), 5).params, sent)
        expected = 2.0 * 1.5
    assert float(noise["a.weight"].std()) == pytest.approx(expected, rel=4 / math.sqrt(20_000))


def test_the_private_mean_divides_by_constants_and_clips_again() -> None:
    sent, small = tree(0, 1.0), tree(1, 0.05)
    liar = tree(2, 1e3)
    got = PrivateMean(mechanism(), 5).of(replies({0: small, 3: liar}, sent), "params", sent)
    bounded = {n: v * 1.5 / norm(liar) for n, v in liar.items()}
    for n, value in got.items():
        expected = sent[n] + (small[n] + bounded[n]) / {"a": 3.0, "b": 2.0, "shared": 4.0}[block_of(n)]
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_a_block_that_nobody_sent_gets_noise_too() -> None:
    sent = tree(0, 1.0)
    only_a = {n: v for n, v in tree(1, 0.1).items() if block_of(n) == "a"}
    got = PrivateMean(mechanism(noise_multiplier=1.0), 5).of(replies({0: only_a}, sent), "params", sent)
    assert got.keys() == sent.keys()
    assert not torch.equal(got["b.weight"], sent["b.weight"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 3), st.booleans())
def test_one_client_changes_the_sum_by_at_most_the_clip_norm(seed: int, dropped: int, by_block: bool) -> None:
    sent = tree(seed, 1.0)
    held = [BLOCKS, ("a", "shared"), ("b", "shared"), BLOCKS]
    updates = {
        k: {n: v for n, v in tree(seed + k, 10.0 ** (k - 1)).items() if block_of(n) in held[k]} for k in range(4)
    }
    own = PrivateMean(mechanism(clip=Clip.of(1.5, BLOCKS, by_block=by_block), noise_multiplier=1.0), 5)
    everyone = own.of(replies(updates, sent), "params", sent)
    others = own.of(replies({k: u for k, u in updates.items() if k != dropped}, sent), "params", sent)
    # the noise is the same because the key is, so only the sum differs
    apart = {n: (everyone[n] - others[n]) * own.mechanism.denominators[block_of(n)] for n in sent}
    assert norm(apart) <= 1.5 * (1 + 1e-4)
