"""What crossed, summed from a ledger of any length: one pass, memory for the kinds of rows and not for the rows."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from polyfed.core.files import EGRESS
from polyfed.core.parsing import parse_json
from polyfed.report.run_folder import Folder, damaged
from polyfed.report.run_schema import LIMIT

MOST_SHAPES = 100_000
"""Distinct pairs of client and row ending counted before they are summed up; keeps memory flat when every row has its
own shape."""

CLIENT = '"client":'
"""Stands before a client's number in a row."""

Place = tuple[str, str, str]
"""(block, kind, destination)"""


@dataclass(frozen=True)
class Egress:
    """Sums over a ledger.

    Attributes:
        bytes: what crossed, by (block, kind, destination); destination "client" is the way down.
        crossings: number of rows, likewise.
        refused: number of rows that the policy refused, likewise; they count no bytes.
        messages: bytes by (message, field, kind, destination).
        clients: bytes by (client, block, kind, destination).
    """

    bytes: Counter[Place]
    crossings: Counter[Place]
    refused: Counter[Place]
    messages: Counter[tuple[str, str, str, str]]
    clients: Counter[tuple[int, str, str, str]]

    @property
    def places(self) -> list[Place]:
        """Everything that crossed or tried to."""
        return sorted({*self.crossings, *self.refused})


def aggregate(folder: Folder) -> Egress:
    """Sum up a run's egress.jsonl.

    A row's head (run, round, ask, client) differs from row to row, its tail (from "message" on) is shared by
    thousands: pairs of client and tail are counted as text, and a tail is parsed when it is first met.

    Raises:
        DataError: a row is damaged.
    """
    egress = Egress(Counter(), Counter(), Counter(), Counter(), Counter())
    counts: Counter[tuple[str, str]] = Counter()
    first_seen: dict[str, int] = {}
    for number, line in folder.egress_lines():
        tail = line[line.find('"message"') :] if '"message"' in line else line
        counts[_client(line), tail] += 1
        first_seen.setdefault(tail, number)
        if len(counts) > MOST_SHAPES:
            _add(egress, counts, first_seen, folder)
    _add(egress, counts, first_seen, folder)
    return egress


def _client(line: str) -> str:
    """The client's number as it stands in a line."""
    start = line.find(CLIENT) + len(CLIENT)
    return line[start : line.find(",", start)]


@dataclass(frozen=True)
class _Tail:
    """What a row says from "message" on."""

    place: Place
    message: tuple[str, str, str, str]
    bytes: int
    refused: bool

    @classmethod
    def parse(cls, text: str) -> "_Tail":
        row: dict[str, Any] = parse_json("{" + text)
        block, kind, way = (str(row[key]) for key in ("block", "kind", "destination"))
        message = (str(row["message"]), str(row["field"]), kind, way)
        size = row["bytes"]
        if type(size) is not int or not 0 <= size < LIMIT:
            raise ValueError(f"bytes = {str(size)[:40]} is not a number of bytes")
        return cls((block, kind, way), message, size, row["verdict"] != "allowed")


def _add(egress: Egress, counts: Counter[tuple[str, str]], first_seen: dict[str, int], folder: Folder) -> None:
    parsed: dict[str, _Tail] = {}
    for (client, text), count in counts.items():
        try:
            tail = parsed.get(text) or parsed.setdefault(text, _Tail.parse(text))
            sender = int(client)
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(folder.path / EGRESS, error, first_seen[text]) from None
        if tail.refused:
            egress.refused[tail.place] += count
        else:
            egress.bytes[tail.place] += tail.bytes * count
            egress.crossings[tail.place] += count
            egress.messages[tail.message] += tail.bytes * count
            egress.clients[sender, *tail.place] += tail.bytes * count
    counts.clear()
    first_seen.clear()
