"""Conversion of a packet to a Flower RecordDict and back: the header is JSON text, and the body is an array of bytes.

So a message takes only two of Flower's objects, however many tensors it has. This module uses neither Flower's nor
PyTorch's serialisation, and no format that could run code.
"""

import json
import re
from itertools import accumulate

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.federation.wire_format import Packet

HEADER, BODY, STYPE = "polyfed", "body", "polyfed.bytes"

MAX_HEADER, MAX_OPENED, MAX_DEPTH = 2**22, 100_000, 8
"""Bounds of a header, checked before parsing: number of characters, number of opening and of closing brackets, and
depth of nesting. A tensor takes about a hundred characters, so `MAX_TENSORS` tensors fit. Within these bounds, the
parser needs less than about 100 MB and a few seconds. We measured 23 kinds of headers of the full length on a busy
core, and the parser needed at most 88 MB and 1.9 seconds."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string. An unfinished string extends to the end of the text, so no attempt to match fails, and a search for strings
reads each character once. If an attempt failed at the end of the text, a search could repeat it from every quote."""

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
        The packet, whose header is parsed but not yet checked. If the records hold no valid packet, a text with the
        reason.
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
    """Return the reason why the text of a header must not be parsed, or "" if it may be parsed."""
    if len(text) > MAX_HEADER:
        return f"its header is too long: {len(text)} characters, allowed are {MAX_HEADER}"
    if sum(map(text.count, "[{")) > MAX_OPENED or sum(map(text.count, "]}")) > MAX_OPENED:
        return "its header has too many lists and tables"
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    return f"its header is nested {depth} levels deep, allowed are {MAX_DEPTH}" if depth > MAX_DEPTH else ""
