"""The two parts of the Gaussian mechanism of differential privacy: clipping to a norm, and Gaussian noise.

Local training applies both parts to the gradients of single rows. Clients and server apply both parts to the updates of
clients. docs/privacy.md explains the mechanism.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
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
        found = {}
        for group, norm in self._norms(stack).items():
            limit = self.limits[group] if self.limits else self.total
            factor = (limit / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
            found[group] = torch.where(norm <= LARGEST_NORM, factor, 0.0)  # also 0 for NaN
        return {name: found[block_of(name) if self.limits else ""].to(value.dtype) for name, value in stack.items()}

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


def gaussian(base: int | Tensor | None, name: str, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Return standard normal float32 numbers of this shape.

    Args:
        base: a key of `polyfed.core.keys`, or None to use the random generator of the operating system.
        name: name of the tensor that gets the noise. The same key gives different numbers for each name.
        shape: the shape.
        device: the device of the result.
    """
    if base is None:
        return _system_normal(shape).to(device)
    return keys.normal(keys.fold_in(base, keys.key("noise", name)), shape, device)


def _system_normal(shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers: the Box-Muller transform of random bits of the operating system."""
    count = math.prod(shape)
    bits = np.frombuffer(os.urandom(16 * count), dtype=np.uint64).reshape(2, count) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # above 0 and below 1, in steps of 2**-53
    values = np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * math.pi * uniform[1])
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)
