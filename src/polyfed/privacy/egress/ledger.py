"""The ledger: one row for each part of a message that a client received, sent or was not allowed to send.

If a request goes to several clients, the ledger rows of these clients differ only in the client's number. So the ledger
stores all rows of the request as one entry with the clients and the parts of the message, and makes the rows on demand.
A request to 50 clients takes one entry, not four hundred dictionaries.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.messages import Crossing

TO_CLIENT = "client"
"""The destination of the messages that a client receives."""


NO_RUN = ""
"""The name of the run in the rows of an enrolment, because a device does not know it before the first request."""

DRAWN = (("PublicKeys", "keys"), ("EncryptedShares", "sealed"))
"""Messages and fields that hold only random numbers, which a device draws anew for a repeated request."""


@dataclass(frozen=True)
class Entry:
    """The message that each of `clients` sent or received in one request.

    Attributes:
        round: the round; 0 is set-up.
        request: number of the request in its round, from 0.
        clients: the numbers of the clients.
        message: name of the message's class.
        crossings: the parts of one message. The messages of all `clients` have the same parts.
        destination: `server`, `silo` or `client`.
        allowed: for each part, whether it may be sent.
        contents: for each part, its SHA-256, or an empty text if the part was refused. Without an audit log: ().
        seal: a hash that a device sends with its reply; only in the server's ledger. The device writes the rows of a
            message to its audit log, followed by a signed line, which is called the seal. The field holds the hash of
            this signed line.
        came: the round in which the message passed, if that is a later one than the round of its request, as under
            buffered aggregation; only in the server's ledger.
    """

    round: int
    request: int
    clients: tuple[int, ...]
    message: str
    crossings: tuple[Crossing, ...]
    destination: str
    allowed: tuple[bool, ...]
    contents: tuple[str, ...] = ()
    seal: str = ""
    came: int | None = None

    @property
    def bytes_each(self) -> int:
        """Bytes that each of `clients` sent or received. Refused parts do not count."""
        return sum(c.bytes for c, ok in zip(self.crossings, self.allowed, strict=True) if ok)

    @property
    def bytes(self) -> int:
        """Total number of bytes that all `clients` sent or received."""
        return self.bytes_each * len(self.clients)


@dataclass
class Ledger:
    """The entries since the last `drain`, and the totals of the whole run.

    Attributes:
        run: the run's name.
        hashing: whether entries hold the SHA-256 of each part.
        entries: the entries since the last `drain`.
        bytes_up: bytes that clients have sent so far.
        bytes_down: bytes that clients have received so far.
    """

    run: str
    hashing: bool = False
    entries: list[Entry] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def book(self, entry: Entry) -> None:
        """Add an entry and its bytes to the totals. Refused parts do not count."""
        self.entries.append(entry)
        if entry.destination == TO_CLIENT:
            self.bytes_down += entry.bytes
        else:
            self.bytes_up += entry.bytes

    def resume(self, run: str) -> None:
        """Continue the ledger of a resumed run, under its name."""
        self.run = run

    def drain(self) -> list[Entry]:
        """Return the entries and remove them from the ledger. The totals stay."""
        entries, self.entries = self.entries, []
        return entries

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the current entries as dictionaries, in the order of `lines`."""
        for line in lines(self.entries, self.run):
            yield json.loads(line)


def lines(entries: Sequence[Entry], run: str, *, contents: bool = False) -> Iterator[str]:
    """Yield the rows of entries as JSON lines, ordered by request, then direction, then client.

    In each request, the messages to the clients come before the replies. The order does not depend on the engine, so
    one can compare the ledgers of two engines row by row.

    Args:
        entries: the entries, in any order.
        run: the run's name.
        contents: whether rows hold the SHA-256 of each part and the hash of the device's seal.
    """
    ordered: list[tuple[tuple[int, int, bool, int], str, list[str]]] = []
    for entry in entries:
        hashes = entry.contents if contents else (None,) * len(entry.crossings)
        parts = zip(entry.crossings, entry.allowed, hashes, strict=True)
        tails = [_tail(entry, crossing, ok, sha256) for crossing, ok, sha256 in parts]
        head = f'{{"run":{json.dumps(run)},"round":{entry.round},"ask":{entry.request},"client":'
        for client in entry.clients:
            place = (entry.round, entry.request, entry.destination != TO_CLIENT, client)
            ordered.append((place, f"{head}{client},", tails))
    ordered.sort(key=lambda item: item[0])
    for _, head, tails in ordered:
        for tail in tails:
            yield head + tail


def _tail(entry: Entry, crossing: Crossing, allowed: bool, sha256: str | None) -> str:
    """Return the end of a row, from the key "message" on."""
    row: dict[str, Any] = {
        "message": entry.message,
        "field": crossing.field,
        "kind": crossing.kind,
        "block": crossing.block,
        "dtype": crossing.dtype,
        "shape": list(crossing.shape),
        "bytes": crossing.bytes,
        "destination": entry.destination,
        "verdict": "allowed" if allowed else "refused",
    }
    if entry.came is not None:
        row["came"] = entry.came
    if crossing.masked:
        row["masked"] = True
    if crossing.compressed:
        row["compressed"] = crossing.compressed
    if sha256 is not None:
        row |= {"sha256": sha256} | ({"device_seal": entry.seal} if entry.seal else {})
    return json.dumps(row, separators=(",", ":"))[1:]
