"""Computations that client and server share in secure aggregation: keys of masks, and vectors of masked integers."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polyfed.core.masked import owner
from polyfed.core.messages import Message
from polyfed.privacy import masks
from polyfed.privacy.fixed_point import UNSIGNED


@dataclass(frozen=True)
class Cohort:
    """What the server and every client know about the clients of a request.

    Attributes:
        keys: public keys, uint8 (n, 2, 32).
        members: for each block, marks the clients that have the block, bool (n,).
    """

    keys: np.ndarray
    members: Mapping[str, np.ndarray]

    @property
    def blocks(self) -> list[str]:
        """The blocks, in the same order on client and server."""
        return sorted(self.members)

    @cached_property
    def transcript(self) -> bytes:
        """The digest of the cohort. Every key depends on it, so clients with different rosters get different keys."""
        sha = hashlib.sha256(self.keys.tobytes())
        for block in self.blocks:
            sha.update(block.encode() + b"\0" + self.members[block].astype(np.uint8).tobytes())
        return sha.digest()

    def shared(self, seed: bytes, peer: int) -> bytes:
        """Return the secret that the owner of a mask seed shares with another client."""
        return masks.agreed(seed, self.keys[peer, 1].tobytes())

    def pair_key(self, shared: bytes, block: str) -> bytes:
        """Return the key of the mask that two clients use for a block. `shared` is the secret of these two clients."""
        return masks.derived(shared, b"pair mask", block.encode(), self.transcript)

    def self_key(self, seed: bytes, block: str) -> bytes:
        """Return the key of a client's self-mask for a block."""
        return masks.derived(seed, b"self mask", block.encode(), self.transcript)

    def summed(self, senders: np.ndarray, least: int) -> dict[str, np.ndarray]:
        """Return, for each block, the senders that have the block, as bool (n,) over the cohort.

        A block that fewer than `least` senders have is left out.
        """
        groups = {block: senders & has for block, has in self.members.items()}
        return {block: groups[block] for block in self.blocks if groups[block].sum() >= least}


Entry = tuple[str, str | None]
"""A field of a message, and a name in the tree of this field. The name is None if the field is a tensor."""

Numbers = dict[Entry, np.ndarray]
"""The tensors of a message as unsigned integers."""


def by_block(kind: Message | type[Message], numbers: Mapping[Entry, object]) -> dict[str, list[Entry]]:
    """Return the entries of each block, in the order in which they are masked."""
    result: dict[str, list[Entry]] = {}
    for field, key in sorted(numbers, key=lambda entry: (entry[0], entry[1] or "")):
        result.setdefault(owner(kind.declared[field], key), []).append((field, key))
    return result


@dataclass
class Vector:
    """The integers of one block, in two vectors: the 32-bit integers and the 64-bit integers.

    Joined like this, all tensors of the block are masked at once.

    Attributes:
        short: the 32-bit integers, uint32.
        long: the 64-bit integers, uint64.
        forms: for each tensor, whether its integers are in `short` (True) or in `long` (False), and the tensor's shape.
    """

    short: np.ndarray
    long: np.ndarray
    forms: list[tuple[bool, tuple[int, ...]]]

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> "Vector":
        """Join tensors of unsigned integers."""
        split = {kind: [part.reshape(-1) for part in parts if part.dtype == kind] for kind in UNSIGNED.values()}
        short, long = (np.concatenate([np.zeros(0, kind), *split[kind]]) for kind in (np.uint32, np.uint64))
        return cls(short, long, [(part.dtype == np.uint32, part.shape) for part in parts])

    def add(self, key: bytes, sign: int) -> None:
        """Add the mask of a key, or subtract it if the sign is -1."""
        short, long = masks.mask(key, len(self.short), len(self.long))
        step = np.add if sign > 0 else np.subtract
        step(self.short, short, out=self.short)
        step(self.long, long, out=self.long)

    def parts(self) -> list[np.ndarray]:
        """Split `short` and `long` into the original tensors. This is the inverse of `of`."""
        result, places = [], {True: 0, False: 0}
        for short, shape in self.forms:
            start, size = places[short], math.prod(shape)
            result.append((self.short if short else self.long)[start : start + size].reshape(shape))
            places[short] = start + size
        return result
