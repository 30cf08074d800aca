"""Digests of messages: the SHA-256 of each part of a message, for the audit log of a device."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyfed.core.messages import LABELS, OF_THE_MODEL, Crossing, Message
from polyfed.core.tree import block_of


def contents(msg: Message, parts: Sequence[Crossing], allowed: Sequence[bool]) -> tuple[str, ...]:
    """Return the SHA-256 of each part of one client's message. The entry of a refused part is empty."""
    return tuple(_digest(msg, part) if ok else "" for part, ok in zip(parts, allowed, strict=True))


def _digest(msg: Message, part: Crossing) -> str:
    """Return the SHA-256 over name, type, shape and bytes of a part's tensors, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(_tensors(msg, part), key=lambda pair: pair[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return total.hexdigest()


def _tensors(msg: Message, part: Crossing) -> Iterator[tuple[str, Tensor]]:
    value = getattr(msg, part.field)
    if isinstance(value, Tensor):
        yield "", value
        return
    for name, tensor in value.items():
        owner = block_of(name) if part.kind in OF_THE_MODEL else name
        if LABELS == part.block == part.kind or owner == part.block:
            yield name, tensor
