"""Messages as bytes: a JSON header that names every tensor, and one body that holds their values. No pickle.

The header says the message's type, and for every field its kind and its tensors' names, types and shapes; the body is
the tensors' bytes one after another, little-endian. Nothing of it is believed: `decode` checks type, fields, kinds,
names, types, shapes, sizes and, where asked, finiteness against the message class that the receiver expects, before
it makes a tensor.
"""

import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import BadReply
from polyfed.core.messages import Message, tensors
from polyfed.core.tree import Tree

Header = dict[str, Any]
"""What JSON can hold."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
"""Types that may cross."""

WIRE_FORMAT = 2
"""Version of headers and bodies. Raise it whenever an older peer would misread them."""

MAX_TENSORS, MAX_AXES = 40_000, 16
"""Far above any model of today (inferred); they bound the work that a forged header can cause."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
"""What the name of a parameter or modality may look like."""

assert sys.byteorder == "little", "polyfed's wire format is little-endian"


@dataclass(frozen=True)
class Packet:
    """What crosses: a header and a body."""

    header: Header
    body: bytes = b""


def encode(msg: Message) -> Packet:
    """The packet of a message (of one client, not of a stack)."""
    entries, parts = [], []
    for field, name, value in tensors(msg):
        flat = value.detach().cpu().contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        entries.append([field, name, str(value.dtype).removeprefix("torch."), list(value.shape)])
    header = {"message": type(msg).__name__, "kinds": dict(msg.kinds), "tensors": entries}
    return Packet(header, b"".join(parts))


def decode(packet: Packet, expected: type[Message], *, limit: int, finite: bool = False) -> Any:
    """The message of a packet, every part of it checked.

    Args:
        packet: from the other side.
        expected: the message's type.
        limit: most bytes of its body.
        finite: refuse NaN and infinity.

    Raises:
        BadReply: with what is wrong.
    """
    header, body = packet.header, packet.body
    if len(body) > limit:
        raise BadReply(f"is too large: {len(body)} bytes, allowed are {limit}")
    if header.get("message") != expected.__name__:
        raise BadReply(f"sent {header.get('message')!r:.100}, expected {expected.__name__}")
    if header.get("kinds") != dict(expected.kinds):
        raise BadReply(f"declares other kinds than {expected.__name__}: {header.get('kinds')!r:.300}")
    values = _empty(expected)
    place = 0
    for field, name, dtype, shape in _entries(header):
        size = math.prod(shape) * dtype.itemsize
        if place + size > len(body):
            raise BadReply(f"{field} runs past the end of the message")
        value = _tensor(body, place, dtype, shape)
        place += size
        if finite and value.is_floating_point() and not bool(value.isfinite().all()):
            raise BadReply(f"{field}{f'.{name}' if name else ''} is not finite")
        _put(values, field, name, value)
    if place != len(body):
        raise BadReply(f"holds {len(body) - place} bytes more than its header says")
    for field, found in values.items():
        if found is None:
            raise BadReply(f"{field} is missing")
    return expected(**values)


_Entry = tuple[str, str | None, torch.dtype, tuple[int, ...]]


def _empty(expected: type[Message]) -> dict[str, Tensor | Tree | None]:
    """A place for each field: a tree to fill, or None for a tensor to come."""
    return {field: None if said.bare else {} for field, said in expected.declared.items()}


def _entries(header: Header) -> list[_Entry]:
    listed = header.get("tensors")
    if not isinstance(listed, list) or len(listed) > MAX_TENSORS:
        raise BadReply("its header lists no tensors, or too many")
    return [_entry(item) for item in listed]


def _entry(item: Any) -> _Entry:
    match item:
        case [str(field), str() | None as name, str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= MAX_AXES:
            whole = all(type(n) is int and n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) < 2**60
            if whole and (name is None or NAME.fullmatch(name)):
                return field, name, DTYPES[dtype], tuple(shape)
    raise BadReply(f"its header has a tensor that polyfed cannot read: {str(item)[:120]}")


def _tensor(body: bytes, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    # a copy: the tensor must neither keep the whole body alive nor share unwritable, unaligned memory
    data = bytearray(body[place : place + count * dtype.itemsize])
    if dtype is torch.bool and max(data) > 1:
        raise BadReply("holds a boolean that is neither 0 nor 1")
    return torch.frombuffer(data, dtype=dtype, count=count).reshape(shape)


def _put(values: dict[str, Tensor | Tree | None], field: str, name: str | None, value: Tensor) -> None:
    if field not in values:
        raise BadReply(f"has a field '{field:.100}' that its type lacks")
    held = values[field]
    if name is None and held is None:
        values[field] = value
    elif name is not None and isinstance(held, dict) and name not in held:
        held[name] = value
    else:
        raise BadReply(f"{field}{f'.{name}' if name else ''} came twice, or is a tensor where a tree belongs")
