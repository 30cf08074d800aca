"""Random numbers as a pure function of a key. No generator state is stored.

A key is made from (run seed, purpose, round, client, ...). A key gives a sequence of random numbers: the number at a
position of the sequence is a hash of the key and the position. This is a counter-based generator as described by Salmon
et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The hash is "triple32", a 32-bit function from the
project hash-prospector by Chris Wellons (public domain). It was chosen because its bias is near the noise floor, and
because 32-bit products vectorise on every CPU.

The random numbers of a key therefore do not depend on earlier draws. A resumed run draws the same numbers, and CPU and
GPU agree. The functions also run under `torch.func.vmap` with one key for each client.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_SHIFTS = (17, 11, 15, 14)
_MULTIPLIERS_32 = tuple(np.uint32(factor) for factor in _MULTIPLIERS)
_SHIFTS_32 = tuple(np.uint32(shift) for shift in _SHIFTS[:3])
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: decorrelates neighbouring keys (Weyl sequence)
_SALT = 0x5BD1E995  # keeps counter 0 from being the fixed point 0 of the mixing function
_MASK = 0xFFFFFFFF


def key(*parts: int | str) -> int:
    """Make a 31-bit key from some parts; their order and types matter.

    >>> key(1, "cohort", 3) == key(1, "cohort", 3), key(1, "cohort", 3) == key(1, "cohort", 4)
    (True, False)
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


@overload
def fold_in(base: int, number: int) -> int: ...
@overload
def fold_in(base: int | Tensor, number: int | Tensor) -> int | Tensor: ...
def fold_in(base: int | Tensor, number: int | Tensor) -> int | Tensor:
    """Derive a key from a key and a number, like `jax.random.fold_in`; either may be a 0-dim integer tensor."""
    if isinstance(base, int) and isinstance(number, int):
        return _mix_int((base ^ _mix_int(number * _GOLDEN & _MASK)) & _MASK) >> 1
    device = base.device if isinstance(base, Tensor) else number.device  # type: ignore[union-attr]
    base_t, number_t = (torch.as_tensor(v, device=device).to(torch.int32) for v in (base, number))
    return _shift(_mix(base_t ^ _mix(number_t * _signed(_GOLDEN))), 1)


def fold_in_all(bases: np.ndarray, numbers: int | np.ndarray) -> np.ndarray:
    """Return `fold_in(base, number)` for every base, uint32 (K,), as one operation for many keys.

    If `numbers` is an array of integers of at least 0, it broadcasts against `bases`.
    """
    if isinstance(numbers, int):
        mixed: np.uint32 | np.ndarray = np.uint32(_mix_int(numbers * _GOLDEN & _MASK))
    else:
        mixed = _mix_array(numbers.astype(np.uint32) * np.uint32(_GOLDEN))
    return _mix_array(bases ^ mixed) >> np.uint32(1)


def bits(base: int | Tensor, shape: int | tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """Uniform 32-bit integers, int32 of this shape; element i in row-major order is a hash of (key, i)."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if isinstance(base, Tensor):
        device = base.device
    return _bits_at(base, torch.arange(math.prod(shape), dtype=torch.int32, device=device)).view(shape)


def uniform(base: int | Tensor, shape: int | tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """Uniform float32 numbers in [0, 1) of this shape, multiples of 2**-24."""
    return _shift(bits(base, shape, device), 8).to(torch.float32) * 2.0**-24


def uniform_at(base: int, places: Tensor) -> Tensor:
    """The numbers of `uniform` at the integer positions `places`, float32 of the shape of `places`."""
    return _shift(_bits_at(base, places.to(torch.int32)), 8).to(torch.float32) * 2.0**-24


def normal(base: int | Tensor, shape: int | tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """Standard normal float32 numbers of this shape, by the Box-Muller transform."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold_in(base, 0), shape, device)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold_in(base, 1), shape, device))


def permutation(base: int | Tensor, n: int, device: torch.device | str | None = None) -> Tensor:
    """A random permutation of range(n), int64 (n,)."""
    if isinstance(base, int):
        return torch.from_numpy(_noise(np.uint32(base), n).argsort(kind="stable")).to(device)
    return torch.argsort(bits(base, n, device), stable=True)


def permutations(bases: Sequence[int] | np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Several permutations at once, a NumPy array int64 (K, max(counts)).

    Row k begins with `permutation(bases[k], counts[k])`; the remaining numbers follow in ascending order. NumPy
    computes them on the CPU, because the overhead of tensor operations dominates for short rows.
    """
    longest = max(counts, default=0)
    noise = _noise(np.asarray(bases, dtype=np.uint32)[:, None], longest)
    if min(counts, default=0) < longest:
        behind = np.arange(longest) >= np.array(counts)[:, None]
        noise = np.where(behind, np.int64(1) << 40, noise)
    return np.argsort(noise, axis=1, kind="stable")


def choice(base: int, n: int, k: int) -> list[int]:
    """`k` distinct members of range(n), ascending, in O(k) time for any n (Robert Floyd, CACM 30(9), 1987)."""
    assert 0 <= k <= n, f"cannot draw {k} of {n}"
    chosen: set[int] = set()
    for top, word in zip(range(n - k, n), _words(base, k), strict=True):
        pick = word * (top + 1) >> 64
        chosen.add(pick if pick not in chosen else top)
    return sorted(chosen)


def generator(base: int) -> np.random.Generator:
    """A NumPy generator, for set-up work on the CPU such as partitions and synthetic data."""
    return np.random.Generator(np.random.Philox(key=base))


def _bits_at(base: int | Tensor, places: Tensor) -> Tensor:
    """The 32-bit integers of a key at these positions, int32 (...)."""
    offset = base.to(torch.int32) if isinstance(base, Tensor) else _signed(base & _MASK)
    # The key enters between two rounds of mixing, so that the streams of neighbouring keys do not overlap.
    return _mix(_mix(places * _signed(_GOLDEN) ^ _SALT) + offset)


def _words(base: int, count: int) -> list[int]:
    """Return `count` random integers of 64 bits; two hashes of (key, position) make each of them."""
    halves = _mix_array(_mix_array(np.arange(2 * count, dtype=np.uint32)) + np.uint32(base & _MASK)).astype(np.uint64)
    words: list[int] = (halves[::2] << np.uint64(32) | halves[1::2]).tolist()
    return words


@lru_cache(maxsize=4)
def _positions(count: int) -> np.ndarray:
    """Apply the first of the two mixing rounds of `bits` to the positions 0 to `count` - 1.

    `bits` adds the key only after this round, so the result of the first round is the same for all keys.
    """
    counter = np.arange(count, dtype=np.uint32) * np.uint32(_GOLDEN)
    return _mix_array(counter ^ np.uint32(_SALT))


def _noise(base: np.uint32 | np.ndarray, count: int) -> np.ndarray:
    """Compute `bits(key, count)` with NumPy: int32 (count,) for one key, and (K, count) for an array of keys (K, 1)."""
    return _mix_array(_positions(count) + base).view(np.int32)


def _mix_int(value: int) -> int:
    value = (value ^ value >> _SHIFTS[0]) * _MULTIPLIERS[0] & _MASK
    value = (value ^ value >> _SHIFTS[1]) * _MULTIPLIERS[1] & _MASK
    value = (value ^ value >> _SHIFTS[2]) * _MULTIPLIERS[2] & _MASK
    return value ^ value >> _SHIFTS[3]


def _mix_array(value: np.ndarray) -> np.ndarray:
    """Mix `value`, uint32, in place, and return it."""
    for shift, factor in zip(_SHIFTS_32, _MULTIPLIERS_32, strict=True):
        value ^= value >> shift
        value *= factor
    value ^= value >> np.uint32(_SHIFTS[3])
    return value


def _mix(value: Tensor) -> Tensor:
    value = value ^ _shift(value, _SHIFTS[0])
    for shift, factor in zip(_SHIFTS[1:], _MULTIPLIERS, strict=True):
        value = value * _signed(factor)
        value = value ^ _shift(value, shift)
    return value


def _shift(value: Tensor, by: int) -> Tensor:
    """Logical right shift, because PyTorch's shift of signed integers copies the sign bit."""
    return (value >> by) & (_MASK >> by)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
