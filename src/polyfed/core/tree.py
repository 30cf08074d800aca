"""Trees: flat dictionaries of tensors, named as in the module, parameters and buffers alike.

A *block* is a selection by name, the first dotted component: `audio.encoder.0.weight` belongs to block `audio`
(its encoder and its own part of the first fusion layer), `shared.bias` to the block that no single modality owns.
Nothing is ever turned into nested blocks and back. All functions return new trees and leave their inputs alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]

SHARED = "shared"
"""The block of parameters that belong to no single modality."""


def block_of(name: str) -> str:
    """The block a name belongs to.

    >>> block_of("audio.encoder.0.weight")
    'audio'
    """
    return name.split(".", 1)[0]


def blocks(tree: Iterable[str]) -> tuple[str, ...]:
    """The blocks that occur in a tree, in order of first appearance."""
    return tuple(dict.fromkeys(block_of(name) for name in tree))


def select(tree: Mapping[str, Tensor], wanted: Iterable[str]) -> Tree:
    """The part of a tree that lies in the wanted blocks."""
    keep = set(wanted)
    return {name: value for name, value in tree.items() if block_of(name) in keep}


def like(tree: Mapping[str, Tensor], fill: float = 0.0) -> Tree:
    """A tree of the same names, shapes and types, filled with one value."""
    return {name: torch.full_like(value, fill) for name, value in tree.items()}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """An independent copy, detached from any graph."""
    with torch.no_grad():
        return {name: value.clone() for name, value in tree.items()}


def zip_map(function: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """`function(a, b, ...)` on tensors of the same name; the names are those of the first tree."""
    return {name: function(value, *(other[name] for other in rest)) for name, value in first.items()}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """a - b, over the names of a."""
    return zip_map(torch.sub, a, b)


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Tree:
    """a + scale * b, over the names of a."""
    return {name: value + scale * b[name] for name, value in a.items()}


def scaled(tree: Mapping[str, Tensor], by: float | Tensor) -> Tree:
    """by * tree."""
    return {name: value * by for name, value in tree.items()}


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum over the names of a of ||a - b||^2; a 0-dim tensor."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()


def vector(tree: Mapping[str, Tensor]) -> Tensor:
    """All entries in one vector (P,), names in sorted order."""
    return torch.cat([tree[name].reshape(-1) for name in sorted(tree)]) if tree else torch.zeros(0)


def keep_on_host(record: object, *fields: str) -> None:
    """For a frozen dataclass's `__post_init__`: fields that are the server's books, tensors or Trees, stay on the CPU.

    They meet other books there, and a checkpoint that is read brings all its tensors onto the run's device.
    """
    for field in fields:
        value = getattr(record, field)
        here = value.cpu() if isinstance(value, Tensor) else {name: tensor.cpu() for name, tensor in value.items()}
        object.__setattr__(record, field, here)


def size_bytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of all entries."""
    return sum(value.numel() * value.element_size() for value in tree.values())


def digest(tree: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, names sorted: equal trees, equal digests."""
    sha = hashlib.sha256()
    for name in sorted(tree):
        value = tree[name].detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
