"""The ledger: one row for everything that crossed a client's border, or was refused there, in both directions.

All rows of a request that goes to several clients are alike but for the client's number. So the ledger keeps them as
entries (clients, crossings) and writes rows out on demand: a cohort of 50 costs one entry, not four hundred
dictionaries.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.messages import Crossing

TO_CLIENT = "client"
"""The destination of what a client receives."""


@dataclass(frozen=True)
class Entry:
    """What each of `clients` sent, or received, in one request.

    Attributes:
        round: the round; 0 is set-up.
        request: number of the request in its round, from 0.
        clients: their numbers.
        message: name of the message's class.
        crossings: the parts of the message of one client.
        destination: `server`, `silo` or `client`.
        allowed: whether each part may cross.
        contents: the SHA-256 of each part, empty for a part that was refused; () where no audit log is kept.
        seal: on the server, the hash of the seal under these rows in the device's audit log.
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

    @property
    def bytes_each(self) -> int:
        """Bytes that each of `clients` sent or received; refused crossings count nothing."""
        return sum(c.bytes for c, ok in zip(self.crossings, self.allowed, strict=True) if ok)

    @property
    def bytes(self) -> int:
        """Bytes of all of `clients` together."""
        return self.bytes_each * len(self.clients)


@dataclass
class Ledger:
    """Entries since the last `drain`, and totals of the whole run.

    Attributes:
        run: the run's name.
        hashing: whether entries have the SHA-256 of what crosses.
        entries: since the last `drain`.
        bytes_up: sent by clients so far.
        bytes_down: received by clients so far.
    """

    run: str
    hashing: bool = False
    entries: list[Entry] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def book(self, entry: Entry) -> None:
        """Add an entry; refused crossings count no bytes."""
        self.entries.append(entry)
        if entry.destination == TO_CLIENT:
            self.bytes_down += entry.bytes
        else:
            self.bytes_up += entry.bytes

    def drain(self) -> list[Entry]:
        """Hand over the entries and forget them; totals stay."""
        entries, self.entries = self.entries, []
        return entries

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of all entries held, in the order of `lines`."""
        for line in lines(self.entries, self.run):
            yield json.loads(line)


def lines(entries: Sequence[Entry], run: str, *, contents: bool = False) -> Iterator[str]:
    """The rows of entries as JSON lines: request by request, what went down before what came up, clients ascending.

    The order depends on the federation alone, not on the engine, so ledgers of two engines compare row by row.

    Args:
        entries: in any order.
        run: the run's name.
        contents: whether rows have the SHA-256 of what crossed, and the device's seal.
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
    """A row from "message" on."""
    row = {
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
    if sha256 is not None:
        row |= {"sha256": sha256} | ({"device_seal": entry.seal} if entry.seal else {})
    return json.dumps(row, separators=(",", ":"))[1:]
