"""The two parts of the Gaussian mechanism of differential privacy: clipping to a norm, and discrete Gaussian noise.

Local training applies both parts to the gradients of single rows. Clients and server apply both parts to the updates of
clients. docs/privacy.md explains the mechanism.

All noise of [privacy] is drawn here. The protected values and the noise are whole multiples of one step, so a released
value is a function of an integer, and its low bits tell nothing about the data. Floating-point noise lacks this
property (Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core import keys
from polyfed.core.tree import block_of

LARGEST_NORM = 1e25
"""A tree with a larger norm, or with a NaN, counts as zero. Clipping could not reduce its norm in float32: infinity
times 0 is NaN, and NaN would leave without noise. The clip norm divided by this number is an ordinary float32."""

LEAST_CLIP, MOST_CLIP = 1e-6, 1e6
"""Range of safe clip norms. Outside of it, rounding errors of float32 come close to the clip norm or to the largest
number, and the noise would not hide them (inferred from the format)."""


@dataclass(frozen=True)
class Clip:
    """Limits on the 2-norm of a tree.

    Attributes:
        total: the limit of the norm over all entries. If `limits` are given, `total` is the root of the sum of their
            squares.
        limits: the limit of each block. If it is empty, only `total` limits the norm.
    """

    total: float
    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, norm: float, blocks: tuple[str, ...], *, by_block: bool) -> "Clip":
        """Return the joint limit `norm`. If `by_block` is true, split it into equal limits for the blocks."""
        return cls(norm, dict.fromkeys(blocks, norm / math.sqrt(len(blocks)))) if by_block else cls(norm)

    def limit(self, block: str) -> float:
        """Return the largest norm that the entries of one block can have after clipping."""
        return self.limits[block] if self.limits else self.total

    @property
    def least(self) -> float:
        """The smallest of the limits of all blocks, or the joint limit if blocks have no limits of their own."""
        return min(self.limits.values(), default=self.total)

    def factors(self, stack: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the factors that scale trees down to their limits. The function `scaled` applies them.

        Args:
            stack: K trees, tensors (K, ...) by name.

        Returns:
            For each name, the factor of each tree, (K,), at most 1. The factor is 0 if the norm of the tree is NaN or
            above `LARGEST_NORM`.
        """
        result = {}
        for group, norm in self._norms(stack).items():
            limit = self.limits[group] if self.limits else self.total
            factor = (limit / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
            result[group] = torch.where(norm <= LARGEST_NORM, factor, 0.0)  # also 0 for NaN
        return {name: result[block_of(name) if self.limits else ""].to(value.dtype) for name, value in stack.items()}

    def _norms(self, stack: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the norms (K,) of the trees, float64, by block.

        Without `limits`, the norm is taken over all blocks together, and the only key of the result is "".
        """
        groups: dict[str, list[Tensor]] = {}
        for name, value in stack.items():
            squares = value.flatten(1).to(torch.float64).square().sum(1)
            groups.setdefault(block_of(name) if self.limits else "", []).append(squares)
        return {group: torch.stack(parts).sum(0).sqrt() for group, parts in groups.items()}

    def within(self, stack: Mapping[str, Tensor], count: int) -> Tensor:
        """Return which trees exceed no limit, bool (K,). A tree without entries has norm 0, so it exceeds no limit.

        Args:
            stack: K trees, tensors (K, ...) by name.
            count: K. It is given separately, because K cannot be read from a stack without tensors.
        """
        inside = torch.ones(count, dtype=torch.bool)
        for group, norm in self._norms(stack).items():
            inside &= (norm <= (self.limits[group] if self.limits else self.total)).cpu()
        return inside


def scaled(stack: Tensor, factors: Tensor) -> Tensor:
    """Multiply entry k of `stack` (K, ...) by entry k of `factors` (K,). A factor of 0 gives 0, even for NaN."""
    each = factors.view(-1, *(1,) * (stack.dim() - 1))
    return torch.where(each > 0, stack * each, 0.0)


COLUMN_BITS, COIN_BITS = 16, 96
"""Width of the two random numbers that a look-up in the table of `_table` needs: which column, and a coin with the
probability of the column's first outcome."""

HALF = 2 ** (COLUMN_BITS - 1)
"""The table holds the integers from -`HALF` to `HALF` - 1. The others have a probability below 2^-180."""

SPREAD, RATIO = 2048, 1024
"""Standard deviation of the numbers in the table, and how many of the fine steps make a coarse one. A number of the
noise is RATIO x coarse + fine, with coarse and fine from the same table."""

STEPS = SPREAD * math.sqrt(1 + RATIO**2)
"""Standard deviation of the noise in steps of the grid, about 2^21."""

INSIDE = 1 - 2.0**-20
"""Limits shrink by this factor before values are multiplied and truncated, so that float32 rounding of the factor and
of the product (2^-24 each) cannot lift a norm above the limit."""

PASS = 2**18
"""How many numbers `DiscreteGaussian.total` rounds at once. The temporary tensors then stay in the cache of a core."""


@dataclass(frozen=True)
class DiscreteGaussian:
    """The discrete Gaussian mechanism.

    The mechanism adds to a vector of integers one discrete Gaussian integer per entry. Its Renyi divergence of order
    alpha for two vectors at distance D is at most alpha D^2 / (2 STEPS^2) (Canonne, Kamath, Steinke, "The Discrete
    Gaussian for Differential Privacy", NeurIPS 2020, Proposition 5, summed over the entries). The accountant counts the
    same for the continuous Gaussian. Everything after the addition is post-processing.

    Attributes:
        deviation: standard deviation of the noise in the unit of the protected values.
    """

    deviation: float

    @property
    def step(self) -> float:
        """The distance between neighbouring values of the grid."""
        return self.deviation / STEPS

    def total(self, stack: Tensor, factors: Tensor) -> Tensor:
        """Return the sum of the scaled values as a whole number of steps.

        Each value is rounded toward zero, so rounding raises no norm, and the sum of integers is exact. The sensitivity
        of the result is therefore the limit to which `factors` scale, without an allowance for rounding.

        Args:
            stack: K values (K, ...).
            factors: their factors (K,), from `Clip.factors`. The factor 0 turns NaN into 0.

        Returns:
            Integers in float64, (...). They are exact below 2^53.
        """
        chunk = max(1, PASS // max(1, stack[0].numel()))
        result = torch.zeros_like(stack[0], dtype=torch.float64)
        for start in range(0, len(stack), chunk):
            part = slice(start, start + chunk)
            result = result + self.whole(stack[part], factors[part]).sum(0, dtype=torch.float64)
        return result

    def whole(self, stack: Tensor, factors: Tensor) -> Tensor:
        """Return each scaled value as a whole number of steps, rounded toward zero, (K, ...)."""
        precise = stack.to(torch.promote_types(stack.dtype, torch.float32))
        scale = factors.to(torch.float64) * (INSIDE / self.step)
        return scaled(precise, scale.to(precise.dtype)).trunc()

    def released(self, whole: Tensor, base: int | Tensor | None, name: str) -> Tensor:
        """Return the noisy values, float64 (...).

        Args:
            whole: integers from `total` or `whole`, (...).
            base: a key of `polyfed.core.keys`, or None to use the random generator of the operating system.
            name: name of the tensor that gets the noise. The same key gives different noise for each name.
        """
        return (whole.to(torch.float64) + discrete_gaussian(base, name, tuple(whole.shape), whole.device)) * self.step


def discrete_gaussian(
    base: int | Tensor | None, name: str, shape: tuple[int, ...], device: torch.device | str
) -> Tensor:
    """Return integers with a discrete Gaussian distribution of standard deviation `STEPS`, int64.

    With numbers of the operating system, the distance in total variation from this distribution is below 2^-90 for each
    integer. With a key, it is below 2^-30, because a coin then has 32 bits.

    The noise is RATIO x coarse + fine. At a given sum, the coarse number is a discrete Gaussian with deviation s =
    SPREAD / sqrt(1 + RATIO^2), nearly 2. By the summation formula of Poisson, its normalising constant is the same for
    all sums up to the factor 1 +- 2 exp(-2 pi^2 s^2), which is 1 +- 2^-112. So the sum is a discrete Gaussian up to
    this factor (Micciancio and Walter, "Gaussian Sampling over the Integers", CRYPTO 2017, in general).

    Args:
        base: a key of `polyfed.core.keys`, or None to use the random generator of the operating system.
        name: name of the tensor that gets the noise.
        device: the device of the result.
    """
    if base is None:
        words = torch.from_numpy(np.frombuffer(bytearray(os.urandom(12 * math.prod(shape))), dtype=np.int32))
        columns, *coins = words.reshape(3, *shape).to(device)
    else:
        base = keys.fold_in(base, keys.key("noise", name))
        columns, *coins = (keys.bits(keys.fold_in(base, number), shape, device) for number in range(3))
    places = (columns >> COLUMN_BITS) & (2 * HALF - 1), columns & (2 * HALF - 1)
    coarse, fine = (
        _looked_up(place.long(), coin, exact=base is None) for place, coin in zip(places, coins, strict=True)
    )
    return RATIO * coarse + fine


def _looked_up(column: Tensor, coin: Tensor, *, exact: bool) -> Tensor:
    """Return the outcome of each column, int64.

    Args:
        column: columns of the table.
        coin: the first 32 bits of each coin, int32.
        exact: whether to draw the other bits of a coin from the operating system if the first do not decide.
    """
    high, low, other = (torch.from_numpy(part) for part in _table())
    threshold = high.to(coin.device)[column]
    first = coin < threshold
    if exact and bool((undecided := coin == threshold).any()):
        more = torch.from_numpy(np.frombuffer(bytearray(os.urandom(8 * int(undecided.sum()))), dtype=np.int64))
        first[undecided] = more.to(coin.device) < low.to(coin.device)[column[undecided]]
    return torch.where(first, column - HALF, other.to(coin.device)[column])


@lru_cache(maxsize=1)
def _table() -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Make the table of the discrete Gaussian distribution with deviation `SPREAD`, by Walker's alias method.

    Column i stands for its first outcome i - HALF with the probability of its coin, and else for another outcome. The
    arithmetic is exact in integers, from weights with an error below 2^-200 (Vose, IEEE Trans. Software Eng., 1991).

    Returns:
        The first 32 bits of the threshold of each coin, minus 2^31; the next 64 bits, minus 2^63; the other outcome.
    """
    count, full = 2 * HALF, 1 << COIN_BITS
    with localcontext() as context:
        context.prec = 100
        unit = 1 << 256
        ratio = int((Decimal(-1) / (2 * SPREAD**2)).exp() * unit)  # the quotient of the weights of 1 and 0
        square = int((Decimal(-1) / SPREAD**2).exp() * unit)  # by which this quotient changes from number to number
    weights = [unit]
    for _ in range(HALF):
        weights.append(weights[-1] * ratio >> 256)
        ratio = ratio * square >> 256
    every = [weights[abs(number)] for number in range(-HALF, HALF)]
    scale = sum(every)
    share = [weight * count * full // scale for weight in every]
    share[HALF] += count * full - sum(share)
    other = list(range(count))
    small = [place for place in range(count) if share[place] < full]
    large = [place for place in range(count) if share[place] >= full]
    while small:
        under, over = small.pop(), large[-1]
        other[under] = over
        share[over] -= full - share[under]
        if share[over] < full:
            small.append(large.pop())
    threshold = [min(part, full - 1) for part in share]  # a full column has its own outcome as the other one, too
    return (
        np.array([(part >> 64) - 2**31 for part in threshold], dtype=np.int32),
        np.array([(part & (2**64 - 1)) - 2**63 for part in threshold], dtype=np.int64),
        np.array(other, dtype=np.int64) - HALF,
    )
