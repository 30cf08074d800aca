"""The wire format of messages: a JSON header that describes every tensor, and a body with the values, without pickle.

The header holds the name of the message class, the kind of every field, and the name, type and shape of every tensor.
The body holds the tensors' bytes one after another, little-endian. Zeros stand before a large tensor, so that it begins
at a multiple of `ALIGNED` bytes and can stay in a mapped file. `decode` does not trust the sender. It checks class,
fields, kinds, names, types, shapes and sizes against the message class that the receiver expects.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from polyfed.core.errors import BadReply
from polyfed.core.messages import Message, tensors
from polyfed.core.packing import Packing, Pieces, Place
from polyfed.core.system.mapping import ALIGNED, LARGE, bytes_of, gap
from polyfed.core.tree import Tree

Header = dict[str, Any]
"""A JSON object."""

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
"""The tensor types that a message may hold, by their names in a header."""

WIRE_FORMAT = 3
"""Version of the format of headers and bodies. Increase it with every change that an older version would misread."""

MAX_TENSORS, MAX_AXES = 40_000, 16
"""Limits on the work that a forged header can cause. The models that polyfed builds are far below these limits."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
"""Pattern of the names of parameters and modalities."""

MAX_HEADER, MAX_OPENED, MAX_DEPTH = 2**22, 100_000, 8
"""Bounds of a header, checked before parsing: number of characters, number of opening and of closing brackets, and
depth of nesting. A tensor takes about a hundred characters, so `MAX_TENSORS` tensors fit. Within these bounds, the
parser needs less than about 100 MB and a few seconds. We measured 23 kinds of headers of the full length on a busy
core, and the parser needed at most 88 MB and 1.9 seconds."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string. An unfinished string extends to the end of the text, so no attempt to match fails, and a search for strings
reads each character once. If an attempt failed at the end of the text, a search could repeat it from every quote."""

_NO_BRACKET = re.compile(r"[^\[\]{}]+")

assert sys.byteorder == "little", "polyfed's wire format is little-endian"


class Chunks:
    """The body of a large message: the memory of its tensors, one after another. Nothing is copied.

    Args:
        parts: views of bytes. Nobody may change them while the message is in use.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Body = bytes | memoryview | Chunks
"""The body of a packet: bytes, a view of a mapped file, or the memory of tensors."""


def pieces(body: Body) -> Iterator[bytes | memoryview]:
    """Yield a body piece by piece."""
    if isinstance(body, Chunks):
        yield from body
    else:
        yield body


@dataclass(frozen=True)
class Packet:
    """A message as it is sent: a header and a body."""

    header: Header
    body: Body = b""


def header_of(text: object) -> Header | str:
    """Parse the JSON text of a header that another machine sent, or return the reason why it is not parsed."""
    if not isinstance(text, str):
        return "its header is not text"
    if flaw := _flaw(text):
        return flaw
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"cannot be read: {type(error).__name__}: {error!s:.200}"
    return header if isinstance(header, dict) else "its header is not a table"


def _flaw(text: str) -> str:
    """Return the reason why the text of a header must not be parsed, or "" if it may be parsed."""
    if len(text) > MAX_HEADER:
        return f"its header is too long: {len(text)} characters, allowed are {MAX_HEADER}"
    if sum(map(text.count, "[{")) > MAX_OPENED or sum(map(text.count, "]}")) > MAX_OPENED:
        return "its header has too many lists and tables"
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    return f"its header is nested {depth} levels deep, allowed are {MAX_DEPTH}" if depth > MAX_DEPTH else ""


def frames(packet: Packet) -> Iterator[bytes | memoryview]:
    """Yield a packet as it is written: the length of the header in four bytes, the header with blanks, the body.

    The body begins at a multiple of `ALIGNED` bytes, as its large tensors do.
    """
    header = json.dumps(packet.header, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 4) % ALIGNED)
    yield len(header).to_bytes(4, "little")
    yield header
    yield from pieces(packet.body)


def framed(packet: Packet) -> bytes:
    """Return a packet as bytes; see `frames`."""
    return b"".join(frames(packet))


def unframed(content: bytes | memoryview) -> Packet | str:
    """Return the packet in some bytes that another machine sent, or the reason why they hold none."""
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 + size or size > 4 * MAX_HEADER:
        return "is no packet: its header ends after its end"
    try:
        header = header_of(bytes(content[4 : 4 + size]).decode("utf-8"))
    except UnicodeDecodeError:
        return "is no packet: its header is not text"
    return header if isinstance(header, str) else Packet(header, content[4 + size :])


class Unpacking(Protocol):
    """The tensors of a message that the sender has compressed, as the receiver knows without the sender."""

    def packing(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Packing | None:
        """Return how a tensor of a header is compressed, or None; raise BadReply if it cannot be such a tensor."""

    def value(self, place: Place, pieces: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that pieces without a flaw stand for."""


def encode(msg: Message, packed: Pieces | None = None) -> Packet:
    """Encode a message of one client as a packet. A stack of messages cannot be encoded.

    Args:
        msg: the message.
        packed: what is sent in place of the tensors that are compressed. The header names their type and shape.
    """
    entries: list[list[Any]] = []
    parts: list[memoryview] = []
    place = 0
    for field, name, value in tensors(msg):
        for piece in (packed or {}).get((field, name), (value,)):
            content = bytes_of(piece.detach().cpu().contiguous())
            if blank := gap(place, len(content)):
                parts.append(memoryview(bytes(blank)))
            parts.append(content)
            place += blank + len(content)
        entries.append([field, name, str(value.dtype).removeprefix("torch."), list(value.shape)])
    header = {"message": type(msg).__name__, "kinds": dict(msg.kinds), "tensors": entries}
    body = Chunks(parts)
    return Packet(header, body if len(body) >= LARGE else bytes(body))


def decode(
    packet: Packet,
    expected: type[Message],
    *,
    limit: int,
    most: int = MAX_TENSORS,
    unpacking: Unpacking | None = None,
    shared: bool = False,
) -> Any:
    """Check a packet and decode its message.

    Args:
        packet: the packet that arrived.
        expected: the class that the message must have.
        limit: largest allowed size of the body, in bytes.
        most: largest allowed number of tensors. It is checked before the first tensor is read.
        unpacking: the tensors that are compressed.
        shared: whether large tensors stay in the memory of a mapped body.

    Raises:
        BadReply: the packet does not hold a valid message of this class. The text gives the reason.
    """
    header = packet.header
    body = bytes(packet.body) if isinstance(packet.body, Chunks) else packet.body
    if len(body) > limit:
        raise BadReply(f"is too large: {len(body)} bytes, allowed are {limit}")
    if header.get("message") != expected.__name__:
        raise BadReply(f"sent {header.get('message')!r:.100}, expected {expected.__name__}")
    if header.get("kinds") != dict(expected.kinds):
        raise BadReply(f"declares other kinds than {expected.__name__}: {header.get('kinds')!r:.300}")
    values = _empty(expected)
    place = 0
    for field, name, dtype, shape in _entries(header, min(most, MAX_TENSORS)):
        value, place = _read(body, place, (field, name), shape, dtype, unpacking, shared=shared)
        _put(values, field, name, value)
    if place != len(body):
        raise BadReply(f"holds {len(body) - place} bytes more than its header says")
    for field, found in values.items():
        if found is None:
            raise BadReply(f"{field} is missing")
    return expected(**values)


_Entry = tuple[str, str | None, torch.dtype, tuple[int, ...]]


def _read(
    body: bytes | memoryview,
    place: int,
    of: Place,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    unpacking: Unpacking | None,
    *,
    shared: bool,
) -> tuple[Tensor, int]:
    """Return a tensor that begins at a place of the body, and where it ends."""
    packing = None if unpacking is None else unpacking.packing(of, shape, dtype)
    result: list[Tensor] = []
    for kind, sides in ((dtype, shape),) if packing is None else packing.layout(shape, dtype):
        size = math.prod(sides) * kind.itemsize
        blank = gap(place, size)
        if any(body[place : place + blank]):
            raise BadReply(f"holds something between its tensors, before {of[0]}")
        place += blank
        if place + size > len(body):
            raise BadReply(f"{of[0]} runs past the end of the message")
        result.append(_tensor(body, place, kind, sides, shared=shared))
        place += size
    if packing is None or unpacking is None:
        return result[0], place
    if flaw := packing.flaw(tuple(result), shape):
        raise BadReply(f"{of[0]}.{of[1]} {flaw}")
    return unpacking.value(of, tuple(result), shape, dtype), place


def _empty(expected: type[Message]) -> dict[str, Tensor | Tree | None]:
    """Return the initial value of each field: an empty tree, or None for a field that holds a single tensor."""
    return {field: None if said.bare else {} for field, said in expected.declared.items()}


def _entries(header: Header, most: int) -> list[_Entry]:
    listed = header.get("tensors")
    if not isinstance(listed, list):
        raise BadReply("its header lists no tensors")
    if len(listed) > most:
        raise BadReply(f"its header lists too many tensors: {len(listed)}, allowed are {most}")
    return [_entry(item) for item in listed]


def _entry(item: Any) -> _Entry:
    match item:
        case [str(field), str() | None as name, str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= MAX_AXES:
            whole = all(type(n) is int and n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) < 2**60
            if whole and (name is None or NAME.fullmatch(name)):
                return field, name, DTYPES[dtype], tuple(shape)
    raise BadReply(f"its header has a tensor that polyfed cannot read: {str(item)[:120]}")


def _tensor(
    body: bytes | memoryview, place: int, dtype: torch.dtype, shape: tuple[int, ...], *, shared: bool
) -> Tensor:
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    stays = shared and size >= LARGE and isinstance(body, memoryview) and place % dtype.itemsize == 0
    if stays and dtype is not torch.bool:
        return torch.frombuffer(body, dtype=dtype, count=count, offset=place).reshape(shape)
    # copy, so that the tensor does not keep the whole body alive or use read-only, unaligned memory
    flat = torch.empty(size, dtype=torch.uint8)
    flat.numpy().data[:] = memoryview(body)[place : place + size]
    if dtype is torch.bool and int(flat.max()) > 1:
        raise BadReply("holds a boolean that is neither 0 nor 1")
    return flat.view(dtype).reshape(shape)


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
