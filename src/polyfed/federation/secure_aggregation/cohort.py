"""What both halves of secure aggregation compute in the same way: keys of masks, and vectors of masked integers."""

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
    """The clients of a request, as both sides know them.

    Attributes:
        keys: public keys, uint8 (n, 2, 32).
        members: for each block, which clients have it, bool (n,).
    """

    keys: np.ndarray
    members: Mapping[str, np.ndarray]

    @property
    def blocks(self) -> list[str]:
        """The blocks in the order in which both sides list them."""
        return sorted(self.members)

    @cached_property
    def transcript(self) -> bytes:
        """The digest of the cohort. It enters every key, so keys of clients with different rosters never fit."""
        sha = hashlib.sha256(self.keys.tobytes())
        for block in self.blocks:
            sha.update(block.encode() + b"\0" + self.members[block].astype(np.uint8).tobytes())
        return sha.digest()

    def shared(self, seed: bytes, peer: int) -> bytes:
        """Return the secret that the owner of a mask seed shares with another client."""
        return masks.agreed(seed, self.keys[peer, 1].tobytes())

    def pair_key(self, shared: bytes, block: str) -> bytes:
        """Return the key of the mask for a block of two clients that share a secret."""
        return masks.derived(shared, b"pair mask", block.encode(), self.transcript)

    def self_key(self, seed: bytes, block: str) -> bytes:
        """Return the key of a client's self-mask for a block."""
        return masks.derived(seed, b"self mask", block.encode(), self.transcript)

    def summed(self, senders: np.ndarray, least: int) -> dict[str, np.ndarray]:
        """Return the blocks that at least `least` of the senders have, each with these senders, bool (n,)."""
        groups = {block: senders & has for block, has in self.members.items()}
        return {block: groups[block] for block in self.blocks if groups[block].sum() >= least}


Entry = tuple[str, str | None]
"""A field of a message, and a name in its tree, or None if the field is a tensor."""

Numbers = dict[Entry, np.ndarray]
"""The tensors of a message as unsigned integers."""


def by_block(kind: Message | type[Message], numbers: Mapping[Entry, object]) -> dict[str, list[Entry]]:
    """Return the entries of each block, in the order in which they are masked."""
    found: dict[str, list[Entry]] = {}
    for field, key in sorted(numbers, key=lambda entry: (entry[0], entry[1] or "")):
        found.setdefault(owner(kind.declared[field], key), []).append((field, key))
    return found


@dataclass
class Vector:
    """The integers of one block: those of 32 bits and those of 64 bits, each as one vector, to mask them in one go.

    Attributes:
        short: uint32.
        long: uint64.
        forms: for each tensor, whether it is short, and its shape.
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
        """Return the tensors."""
        found, places = [], {True: 0, False: 0}
        for short, shape in self.forms:
            start, size = places[short], math.prod(shape)
            found.append((self.short if short else self.long)[start : start + size].reshape(shape))
            places[short] = start + size
        return found
