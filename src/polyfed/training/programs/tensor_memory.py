"""The memory in which tensors lie: which tensors share it, and how one tensor is written into the memory of another."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyfed.training.plain_tensors import below


def snapshot(nest: Any) -> Any:
    """Return a nested structure with copies of its tensors. The copies share no memory, even if the tensors do."""
    return pytree.tree_map_only(Tensor, Tensor.clone, nest)


def apart_from(nest: Any, others: Iterable[Tensor]) -> Any:
    """Return a nested structure with detached tensors that share no memory with `others`.

    Tensors that share no memory with `others` stay the same objects. The function also works inside `vmap`.
    """
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(nest)):
        return nest
    taken = {memory_of(tensor) for tensor in below([*others])[0]}

    def apart(tensor: Tensor) -> Tensor:
        shared = memory_of(below([tensor])[0][0]) in taken
        found = tensor.detach() if tensor.requires_grad else tensor
        return found.clone() if shared else found

    return pytree.tree_map_only(Tensor, apart, nest)


def copies_of(tensors: Iterable[Any]) -> list[Any]:
    """Return copies of tensors; None stays None."""
    return [None if tensor is None else copy_of(tensor) for tensor in tensors]


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, because an operation may round differently for other strides.

    Two entries of the tensor must not share memory; see `repeats`.
    """
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def repeats(tensor: Tensor) -> bool:
    """Return whether entries of the tensor may share memory, as in the result of `expand`."""
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride < span:
                return True
            span = stride * (length - 1) + span
    return False


def fill(kept: Iterable[Tensor | None], given: Iterable[Tensor | None]) -> None:
    """Copy the given tensors to the memory of the kept ones. Skip None, and tensors that are there already."""
    for old, new in zip(kept, given, strict=True):
        if old is not None and new is not None and not same_memory(old, new):
            old.copy_(new)


def with_own_memory(tensors: Sequence[Tensor], others: Iterable[Tensor]) -> list[int]:
    """Return the positions of the tensors that share no memory with `others` or with an earlier tensor."""
    seen, found = {memory_of(tensor) for tensor in others}, []
    for place, tensor in enumerate(tensors):
        if memory_of(tensor) not in seen:
            seen.add(memory_of(tensor))
            found.append(place)
    return found


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory in which a tensor, and perhaps other tensors, lie."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor of a subclass that has no memory of its own
        return id(tensor)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape, strides and address."""
    if one is other:
        return True
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.device == other.device and one.data_ptr() == other.data_ptr()


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Return whether two of these tensors may share memory, because their ranges of addresses overlap.

    A step that changes one of them may then change the other one.
    """
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.itemsize))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))
