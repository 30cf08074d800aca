"""Trees: flat dictionaries of tensors (parameters and buffers) with the names of the PyTorch module.

The part of a name before the first dot is its *block*. `audio.encoder.0.weight` belongs to the block `audio`, which
holds the encoder of this modality and the modality's own part of the first fusion layer. `shared.bias` belongs to the
block `shared`, which no single modality owns. Trees stay flat, and blocks are selected by name. All functions return
new trees and do not change their arguments.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]

SHARED = "shared"
"""The block of parameters that belong to no single modality."""


def block_of(name: str) -> str:
    """Return the block that a name belongs to.

    >>> block_of("audio.encoder.0.weight")
    'audio'
    """
    return name.split(".", 1)[0]


def blocks(tree: Iterable[str]) -> tuple[str, ...]:
    """Return the blocks that occur in a tree, in order of first appearance."""
    return tuple(dict.fromkeys(block_of(name) for name in tree))


def select(tree: Mapping[str, Tensor], wanted: Iterable[str]) -> Tree:
    """Return the entries of a tree that belong to the wanted blocks."""
    keep = set(wanted)
    return {name: value for name, value in tree.items() if block_of(name) in keep}


def nested(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """Return the tree with `prefix.` before every name, so that one tree can hold several trees. `under` undoes this.

    The prefix becomes the first part of each name, and is therefore the block.

    >>> nested("previous", {"audio.weight": torch.zeros(1)})
    {'previous.audio.weight': tensor([0.])}
    """
    return {f"{prefix}.{name}": value for name, value in tree.items()}


def under(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    """Return the entries whose names begin with `prefix.`, without this prefix. The result may be empty.

    >>> under("previous", {"previous.audio.weight": torch.zeros(1), "audio.weight": torch.ones(1)})
    {'audio.weight': tensor([0.])}
    """
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tree.items() if name.startswith(start)}


def like(tree: Mapping[str, Tensor], fill: float = 0.0) -> Tree:
    """Return a tree with the same names, shapes and dtypes, filled with one value."""
    return {name: torch.full_like(value, fill) for name, value in tree.items()}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """Return an independent copy, detached from any graph."""
    with torch.no_grad():
        return {name: value.clone() for name, value in tree.items()}


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether two trees hold the same tensor objects under the same names. Values are not compared."""
    return a.keys() == b.keys() and all(value is b[name] for name, value in a.items())


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory in which a tensor, and perhaps other tensors, lie."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor of a subclass that has no memory of its own
        return id(tensor)


def zip_map(function: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """Return `function(a, b, ...)` of the tensors of the same name, for every name of the first tree."""
    return {name: function(value, *(other[name] for other in rest)) for name, value in first.items()}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """Return a - b, for every name of a."""
    return zip_map(torch.sub, a, b)


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Tree:
    """Return a + scale * b, for every name of a."""
    return {name: value + scale * b[name] for name, value in a.items()}


def scaled(tree: Mapping[str, Tensor], by: float | Tensor) -> Tree:
    """Return the tree with every tensor multiplied by `by`."""
    return {name: value * by for name, value in tree.items()}


def weighted_sum(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the sum of tensors of one shape, each times its share. For integers, such as counters, the maximum."""
    if not values[0].is_floating_point():
        return torch.stack([*values]).amax(0)
    total: Tensor = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total.add_(value, alpha=share)
    return total


def mean_of(trees: Mapping[int, Tree], weights: Mapping[int, float]) -> Tree:
    """Return the weighted mean of trees. Each tensor is averaged over the clients that have it.

    For integers, the result is the maximum, as in `weighted_sum`.

    Args:
        trees: client -> its tree.
        weights: client -> its positive weight.
    """
    result: Tree = {}
    for name in dict.fromkeys(name for tree in trees.values() for name in tree):
        holders = [client for client in sorted(trees) if name in trees[client]]
        total = sum(weights[client] for client in holders)
        shares = [weights[client] / total for client in holders]
        result[name] = weighted_sum([trees[client][name] for client in holders], shares)
    return result


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum of ||a - b||^2 over the names of a, as a 0-dim tensor."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()


def vector(tree: Mapping[str, Tensor]) -> Tensor:
    """Return all entries as one vector (P,), with the names in sorted order."""
    return torch.cat([tree[name].reshape(-1) for name in sorted(tree)]) if tree else torch.zeros(0)


def keep_on_host(record: object, *fields: str) -> None:
    """Move fields of a frozen dataclass to the CPU. The dataclass calls this function in its `__post_init__`.

    Use this function for records of the server that are combined with other tensors on the CPU. Reading a checkpoint
    puts all of its tensors on the run's device, so the dataclass has to move these fields back.

    Args:
        record: an instance of a frozen dataclass.
        fields: names of fields that hold a tensor or a Tree.
    """
    for field in fields:
        value = getattr(record, field)
        here = value.cpu() if isinstance(value, Tensor) else {name: tensor.cpu() for name, tensor in value.items()}
        object.__setattr__(record, field, here)


def size_bytes(tree: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of all tensors together."""
    return sum(value.numel() * value.element_size() for value in tree.values())


def digest(tree: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names (sorted), dtypes, shapes and bytes: equal trees have equal digests."""
    sha = hashlib.sha256()
    for name in sorted(tree):
        value = tree[name].detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
