"""Conversion of a packet to a Flower RecordDict and back: the header is JSON text, and the body is an array of bytes.

So a message takes only two of Flower's objects, however many tensors it has. This module uses neither Flower's nor
PyTorch's serialisation, and no format that could run code.
"""

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.federation.wire.wire_format import Packet, header_of

HEADER, BODY, STYPE = "polyfed", "body", "polyfed.bytes"


def records(packet: Packet) -> RecordDict:
    """Encode a packet as Flower's records."""
    content = RecordDict({HEADER: ConfigRecord({"header": json.dumps(packet.header, separators=(",", ":"))})})
    if body := bytes(packet.body):
        array = Array(dtype="uint8", shape=(len(body),), stype=STYPE, data=body)
        content[BODY] = ArrayRecord({BODY: array})
    return content


def packet_of(content: RecordDict) -> Packet | str:
    """Decode Flower's records.

    Returns:
        The packet, whose header is parsed but not yet checked. If the records hold no valid packet, a text with the
        reason.
    """
    try:
        text = content.config_records[HEADER]["header"]
        header = header_of(text)
        if isinstance(header, str):
            return header
        body = bytes(content.array_records[BODY][BODY].data) if BODY in content.array_records else b""
    except (KeyError, ValueError) as error:
        return f"cannot be read: {type(error).__name__}: {error!s:.200}"
    return Packet(header, body)
