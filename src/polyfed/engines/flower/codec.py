"""A packet as one Flower RecordDict: the header as JSON text, the body as one array of bytes.

A message then takes two of Flower's objects, however many tensors it has. Neither Flower's nor PyTorch's own
serialisation is used, and nothing that could run code.
"""

import json
import re
from itertools import accumulate

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.federation.wire_format import Packet

HEADER, BODY, STYPE = "polyfed", "body", "polyfed.bytes"

MAX_HEADER, MAX_OPENED, MAX_DEPTH = 2**22, 100_000, 8
"""Bounds of a header that are checked before it is parsed: characters (a tensor takes about a hundred, so
`MAX_TENSORS` fit), opening brackets, and nesting. They keep the parser below about 100 MB and a second."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NO_BRACKET = re.compile(r"[^\[\]{}]+")


def records(packet: Packet) -> RecordDict:
    """Encode a packet as Flower's records."""
    content = RecordDict({HEADER: ConfigRecord({"header": json.dumps(packet.header, separators=(",", ":"))})})
    if packet.body:
        array = Array(dtype="uint8", shape=(len(packet.body),), stype=STYPE, data=packet.body)
        content[BODY] = ArrayRecord({BODY: array})
    return content


def packet_of(content: RecordDict) -> Packet | str:
    """Decode Flower's records.

    Returns:
        The packet, whose header is parsed but not yet checked; or the reason why the records hold none.
    """
    try:
        text = content.config_records[HEADER]["header"]
        if not isinstance(text, str) or (flaw := _flaw(text)):
            return "its header is not text" if not isinstance(text, str) else flaw
        header = json.loads(text)
        body = bytes(content.array_records[BODY][BODY].data) if BODY in content.array_records else b""
    except (KeyError, ValueError, RecursionError) as error:
        return f"cannot be read: {type(error).__name__}: {error!s:.200}"
    return Packet(header, body) if isinstance(header, dict) else "its header is not a table"


def _flaw(text: str) -> str:
    """Why the text of a header must not be parsed; empty if it may be."""
    if len(text) > MAX_HEADER:
        return f"its header is too long: {len(text)} characters, allowed are {MAX_HEADER}"
    if text.count("[") + text.count("{") > MAX_OPENED:
        return "its header has too many lists and tables"
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    return f"its header is nested {depth} levels deep, allowed are {MAX_DEPTH}" if depth > MAX_DEPTH else ""
