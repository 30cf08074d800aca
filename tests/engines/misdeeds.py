"""What a hostile client does to a reply, in process and in processes of its own."""

import math
import struct
from typing import Any

import torch

from polyfed.federation.wire.wire_format import Packet


def with_header(reply: Packet, **changes: Any) -> Packet:
    return Packet(reply.header | changes, reply.body)


def renamed(request: Packet, reply: Packet) -> Packet:
    (field, name, dtype, shape), *rest = reply.header["tensors"]
    block = name.split(".")[0]
    return with_header(reply, tensors=[[field, f"{block}.unheard_of", dtype, shape], *rest])


def reshaped(request: Packet, reply: Packet) -> Packet:
    (field, name, dtype, shape), *rest = reply.header["tensors"]
    return with_header(reply, tensors=[[field, name, dtype, [*reversed(shape), 1]], *rest])


def boxed(request: Packet, reply: Packet) -> Packet:
    """The loss as a matrix of one entry: the same bytes, and no number."""
    tensors = [[f, n, d, [1, 1] if f == "loss" else s] for f, n, d, s in reply.header["tensors"]]
    return with_header(reply, tensors=tensors)


def counting(rows: int) -> Any:
    """A reply that claims to speak for so many rows."""

    def misdeed(request: Packet, reply: Packet) -> Packet:
        at = 0
        for field, _, dtype, shape in reply.header["tensors"]:
            if field == "num_rows":
                return Packet(reply.header, reply.body[:at] + struct.pack("<q", rows) + reply.body[at + 8 :])
            at += math.prod(shape) * getattr(torch, dtype).itemsize
        raise AssertionError("the reply counts no rows")

    return misdeed


def not_a_number(request: Packet, reply: Packet) -> Packet:
    return Packet(reply.header, b"\xff\xff\xff\xff" + reply.body[4:])


def inflated(request: Packet, reply: Packet) -> Packet:
    return Packet(reply.header, bytes(32 * 2**20))
