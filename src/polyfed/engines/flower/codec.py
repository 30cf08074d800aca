"""A packet as one RecordDict: the header as JSON text, the body as one array of bytes.

A message is then two objects of Flower's, however many tensors it has. No serialisation of Flower's or PyTorch's own
is used, and none that could run code.
"""

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.federation.wire_format import Packet

HEADER, BODY, STYPE = "polyfed", "body", "polyfed.bytes"
MAX_HEADER = 2**26
"""Bytes of a header; a tensor's line takes about a hundred (MAX_TENSORS of them fit)."""


def records(packet: Packet) -> RecordDict:
    """A packet as Flower's records."""
    content = RecordDict({HEADER: ConfigRecord({"header": json.dumps(packet.header, separators=(",", ":"))})})
    if packet.body:
        array = Array(dtype="uint8", shape=(len(packet.body),), stype=STYPE, data=packet.body)
        content[BODY] = ArrayRecord({BODY: array})
    return content


def packet_of(content: RecordDict) -> Packet | str:
    """The packet in Flower's records, or why there is none; what it says has still to be checked."""
    try:
        text = content.config_records[HEADER]["header"]
        if not isinstance(text, str) or len(text) > MAX_HEADER:
            return "its header is no text, or too long"
        header = json.loads(text)
        body = bytes(content.array_records[BODY][BODY].data) if BODY in content.array_records else b""
    except (KeyError, ValueError, RecursionError) as error:
        return f"cannot be read: {type(error).__name__}: {error}"
    return Packet(header, body) if isinstance(header, dict) else "its header is no table"
