"""What a hostile client does to a reply, in process and in processes of its own."""

from typing import Any

from polyfed.wire import Packet


def with_header(reply: Packet, **changes: Any) -> Packet:
    return Packet(reply.header | changes, reply.body)


def renamed(ask: Packet, reply: Packet) -> Packet:
    (field, name, dtype, shape), *rest = reply.header["tensors"]
    block = name.split(".")[0]
    return with_header(reply, tensors=[[field, f"{block}.unheard_of", dtype, shape], *rest])


def reshaped(ask: Packet, reply: Packet) -> Packet:
    (field, name, dtype, shape), *rest = reply.header["tensors"]
    return with_header(reply, tensors=[[field, name, dtype, [*reversed(shape), 1]], *rest])


def not_a_number(ask: Packet, reply: Packet) -> Packet:
    return Packet(reply.header, b"\xff\xff\xff\xff" + reply.body[4:])


def inflated(ask: Packet, reply: Packet) -> Packet:
    return Packet(reply.header, bytes(32 * 2**20))
