"""Attacks on the digits of noisy values: floating-point noise leaves traces of the data there (Mironov, CCS 2012).

Before, a server that sent float64 got noise of 24 bits in an answer of 53: at epsilon 1, a raw row to 6e-6.
"""

import math
from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.privacy_noise import HALF, SPREAD, STEPS, Clip, DiscreteGaussian, _table, discrete_gaussian
from polyfed.core.tree import Tree
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.training.per_sample import PerSample

COUNT, DEVIATION = 40_000, 3.0

Release = Callable[[Tensor, Tensor], Tensor]
"""`release(sent, update)` returns what an observer of the mechanism sees of the update, with fresh noise."""


def at_the_client(sent: Tensor, update: Tensor) -> Tensor:
    mechanism = Mechanism("client", False, Clip(1.5), 2.0, {"update": ("params",)}, {}, secure=True)
    reply = Update({"a.w": sent + update}, torch.zeros(()), torch.zeros(()))
    released: Tensor = mechanism.of_one("update", Broadcast({"a.w": sent}), reply, 0).params["a.w"]
    return released


def at_the_server(sent: Tensor, update: Tensor) -> Tensor:
    mechanism = Mechanism("client", True, Clip(1.5), 2.0, {}, {}, {"a": 1.0}, secure=True)
    part = ReplyStack((0,), Update({"a.w": (sent + update)[None]}, torch.zeros(1), torch.zeros(1)))
    return PrivateMean(mechanism, 0).of(Replies([part]), "params", {"a.w": sent})["a.w"]


def in_a_step(sent: Tensor, update: Tensor) -> Tensor:
    """A loss whose gradient is the update, so the parameters after a step of plain SGD are what an observer sees."""

    def loss(params: Tree, batch: Batch) -> Tensor:
        return (params["a.w"] * update).sum() * batch.x["a"].mean()

    batch = Batch({"a": torch.ones(1, 1, dtype=sent.dtype)}, torch.zeros(1), torch.zeros(1, dtype=torch.long), key=5)
    found, _ = PerSample(Clip(1.5), DEVIATION, secure=True).gradient(loss, {"a.w": sent}, {}, batch, 1)
    return sent + found["a.w"]


PLACES = [at_the_client, at_the_server, in_a_step]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("release", PLACES)
def test_a_released_value_is_a_function_of_a_whole_number(release: Release, kind: torch.dtype) -> None:
    """The update has digits far below the step. None of them is in the result, whatever the precision."""
    draws = torch.Generator().manual_seed(1)
    sent = torch.zeros(COUNT, dtype=kind)  # so that no digit of the noise is lost in the sum
    update = 1e-4 * torch.rand(COUNT, generator=draws, dtype=torch.float64).to(kind)
    out, step = release(sent, update), DiscreteGaussian(DEVIATION).step
    whole = (out.double() / step).round()
    assert float(whole.std()) == pytest.approx(STEPS, rel=0.05)
    assert torch.equal(out, (whole * step).to(kind))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("release", PLACES)
def test_the_low_bits_of_two_adjacent_updates_are_alike(release: Release, kind: torch.dtype) -> None:
    """The lowest eight bits, as whole steps and as digits of the number: a chi-square test on a table of two rows."""
    sent = torch.zeros(COUNT, dtype=kind)
    none, full = release(sent, sent), release(sent, torch.full_like(sent, 1.49 / math.sqrt(COUNT)))
    step = DiscreteGaussian(DEVIATION).step
    steps = [(out.double() / step).round().long() & 255 for out in (none, full)]
    digits = [out.view(torch.int32 if kind == torch.float32 else torch.int64).long() & 255 for out in (none, full)]
    for low in (steps, digits):
        table = torch.stack([torch.bincount(part, minlength=256) for part in low])
        table = table[:, table.sum(0) > 0]
        assert stats.chi2_contingency(table.numpy()).pvalue > 1e-6


@pytest.mark.parametrize("release", PLACES)
def test_the_digits_below_float32_hold_no_update(release: Release) -> None:
    """Against noise of 24 bits in numbers of 53 bits, this attack reads a tiny update exactly, at any epsilon."""
    draws = torch.Generator().manual_seed(2)
    sent = torch.zeros(COUNT, dtype=torch.float64)
    update = 1e-9 * torch.randn(COUNT, generator=draws, dtype=torch.float64)
    scaled = release(sent, update) / DEVIATION
    guess = scaled - scaled.float().double()
    assert abs(float(torch.corrcoef(torch.stack([guess, update]))[0, 1])) < 5 / math.sqrt(COUNT)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-3, 0.05, 2.0, 1e4]),
    st.sampled_from([1e-6, 0.3, 40.0, 1e6]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_rounding_lifts_no_norm_above_its_limit(seed: int, size: float, noise: float, kind: torch.dtype) -> None:
    """In exact arithmetic. With rounding to the nearest step, the norm of many small entries grows."""
    draws = torch.Generator().manual_seed(seed)
    stack = {name: (size * torch.randn(3, 90, generator=draws)).to(kind) for name in ("a.w", "b.w")}
    clip, grid = Clip(0.7), DiscreteGaussian(noise * 0.7)
    factors = clip.factors(stack)
    for client in range(3):
        whole = [grid.whole(stack[n], factors[n])[client] for n in stack]
        assert all(torch.equal(part, part.trunc()) for part in whole)
        square = sum(int(value) ** 2 for part in whole for value in part.tolist())
        assert square * Fraction(grid.step) ** 2 <= Fraction(0.7) ** 2
    total = grid.total(stack["a.w"], factors["a.w"])
    exact = [sum(int(v) for v in column) for column in grid.whole(stack["a.w"], factors["a.w"]).T.tolist()]
    assert total.tolist() == exact


def test_the_table_is_the_discrete_gaussian_to_thirty_digits() -> None:
    getcontext().prec = 60
    high, low, other = _table()
    share = [0] * (2 * HALF)
    for column in range(2 * HALF):
        threshold = ((int(high[column]) + 2**31) << 64) + int(low[column]) + 2**63
        share[column] += threshold
        share[int(other[column]) + HALF] += 2**96 - threshold
    assert sum(share) == 2 * HALF * 2**96
    for number in (1, -1, 700, -2048, 9000):
        expected = (Decimal(-(number**2)) / (2 * SPREAD**2)).exp()
        assert abs(Decimal(share[number + HALF]) / Decimal(share[HALF]) - expected) < Decimal(10) ** -24


@pytest.mark.parametrize("base", [11, None], ids=["key", "system"])
def test_the_noise_is_gaussian_and_uses_every_step(base: int | None) -> None:
    drawn = discrete_gaussian(base, "a.weight", (200_000,), "cpu")
    assert stats.kstest(drawn.double().numpy() / STEPS, "norm").pvalue > 1e-6
    for divisor in (2, 1024, 3):
        counts = torch.bincount(drawn % divisor, minlength=divisor)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-6
