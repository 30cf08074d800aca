"""Merkle trees as in Certificate Transparency (RFC 6962, section 2.1), with SHA-256.

The hash of a leaf begins with the byte 0 and that of a node with the byte 1, so that nobody can present a node as a
leaf. The root commits to every leaf and its place. Whoever has a run of neighbouring leaves and the hashes outside of
it can compute the root, which proves that these leaves, and no others, lie between two places.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

EMPTY = hashlib.sha256(b"").digest()
"""The root of a tree without leaves."""


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\0" + leaf).digest()


def root_of(leaves: Iterable[bytes]) -> bytes:
    """Return the root of a tree with these leaves, in this order."""
    return grown((), 0, leaves)[1]


def grown(tree: Sequence[bytes], size: int, leaves: Iterable[bytes]) -> tuple[tuple[bytes, ...], bytes]:
    """Add leaves to a tree of which only the roots of its complete subtrees are known.

    Args:
        tree: the roots of the complete subtrees, the largest first: one for each bit of `size`.
        size: number of leaves so far.
        leaves: the leaves to add.

    Returns:
        The roots of the complete subtrees, and the root of the whole tree.
    """
    stack = [*tree]
    for place, leaf in enumerate(leaves, size + 1):
        _add(stack, place, leaf_hash(leaf))
    return tuple(stack), joined(stack)


def joined(tree: Sequence[bytes]) -> bytes:
    """Return the root of the tree whose complete subtrees have these roots, the largest first."""
    if not tree:
        return EMPTY
    *rest, whole = tree
    for left in reversed(rest):
        whole = _node(left, whole)
    return whole


def outside(hashes: Sequence[bytes], start: int, end: int) -> list[bytes]:
    """Return the hashes that prove the leaves from `start` to before `end`, from left to right.

    Args:
        hashes: the hashes of all leaves.
    """

    def walk(low: int, high: int) -> Iterator[bytes]:
        if high <= start or end <= low:
            yield _subtree(hashes[low:high])
        elif high - low > 1:
            middle = low + _split(high - low)
            yield from walk(low, middle)
            yield from walk(middle, high)

    return list(walk(0, len(hashes))) if hashes else []


def root_from(inside: Sequence[bytes], start: int, size: int, rest: Sequence[bytes]) -> bytes:
    """Return the root that a proof leads to, which shows the leaves if it is the root of the tree.

    Args:
        inside: the hashes of the proved leaves.
        start: the place of the first of them.
        size: number of leaves of the tree.
        rest: what `outside` returned.

    Raises:
        ValueError: the number of hashes is not that of such a proof.
    """
    end, others = start + len(inside), iter(rest)

    def walk(low: int, high: int) -> bytes:
        if high <= start or end <= low:
            return next(others)
        if high - low == 1:
            return inside[low - start]
        middle = low + _split(high - low)
        left = walk(low, middle)
        return _node(left, walk(middle, high))

    if not (0 <= start <= end <= size < 2**48) or (size and not inside):
        raise ValueError("the places of the proof are not in the tree")
    try:
        root = walk(0, size) if size else EMPTY
    except StopIteration:
        raise ValueError("the proof lacks a hash") from None
    if next(others, None) is not None:
        raise ValueError("the proof has a hash too many")
    return root


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _split(size: int) -> int:
    """Return the largest power of two below `size`."""
    return 1 << ((size - 1).bit_length() - 1)


def _subtree(hashes: Sequence[bytes]) -> bytes:
    """Return the root of a tree with these hashes of leaves."""
    stack = list[bytes]()
    for place, one in enumerate(hashes, 1):
        _add(stack, place, one)
    return joined(stack)


def _add(stack: list[bytes], place: int, one: bytes) -> None:
    """Add the hash of the leaf with this number, from 1, and join the subtrees that it completes."""
    stack.append(one)
    while place % 2 == 0:
        right = stack.pop()
        stack.append(_node(stack.pop(), right))
        place //= 2
