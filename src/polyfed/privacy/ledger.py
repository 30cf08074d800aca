"""The ledger: one row for everything that crossed a client's border, or was refused there, in both directions.

Rows of an ask share all but the client's number, so they are kept as (clients, crossings) and written out on demand:
a cohort of 50 costs one entry, not four hundred dictionaries.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.messages import Crossing

TO_CLIENT = "client"


@dataclass(frozen=True)
class Entry:
    """What each of `clients` sent, or received, in one ask."""

    round: int
    request: int
    clients: tuple[int, ...]
    message: str
    crossings: tuple[Crossing, ...]
    destination: str
    allowed: tuple[bool, ...]

    @property
    def bytes_each(self) -> int:
        """What each of `clients` moved; refused crossings count nothing."""
        return sum(c.bytes for c, ok in zip(self.crossings, self.allowed, strict=True) if ok)

    @property
    def bytes(self) -> int:
        """What all of `clients` together moved."""
        return self.bytes_each * len(self.clients)


@dataclass
class Ledger:
    """Entries since the last `drain`, and totals of the whole run."""

    run: str
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
        """The rows of all entries held, in order of ask, direction and client."""
        for line in lines(self.entries, self.run):
            yield json.loads(line)


def lines(entries: Sequence[Entry], run: str) -> Iterator[str]:
    """The rows of entries as JSON lines: ask by ask, what went down before what came up, clients ascending.

    The order depends on the federation alone, not on the engine, so ledgers of two engines compare row by row.
    """
    ordered: list[tuple[tuple[int, int, bool, int], str, list[str]]] = []
    for entry in entries:
        tails = [_tail(entry, crossing, ok) for crossing, ok in zip(entry.crossings, entry.allowed, strict=True)]
        head = f'{{"run":{json.dumps(run)},"round":{entry.round},"ask":{entry.request},"client":'
        for client in entry.clients:
            place = (entry.round, entry.request, entry.destination != TO_CLIENT, client)
            ordered.append((place, f"{head}{client},", tails))
    ordered.sort(key=lambda item: item[0])
    for _, head, tails in ordered:
        for tail in tails:
            yield head + tail


def _tail(entry: Entry, crossing: Crossing, allowed: bool) -> str:
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
    return json.dumps(row, separators=(",", ":"))[1:]
