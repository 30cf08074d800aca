"""Sums over the ledger of a run, in one pass; memory grows with the number of different rows, not of all rows."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from polyfed.core.files import EGRESS
from polyfed.core.parsing import parse_json
from polyfed.report.run_folder import Folder, damaged
from polyfed.report.run_schema import LIMIT

MOST_SHAPES = 100_000
"""The largest number of different pairs of client and row ending that are counted before they are summed up; it bounds
the memory if every row has another shape."""

CLIENT = '"client":'
"""The text before a client's number in a row."""

Place = tuple[str, str, str]
"""(block, kind, destination)"""


@dataclass(frozen=True)
class Egress:
    """Sums over a ledger.

    Attributes:
        bytes: bytes that crossed, by (block, kind, destination); destination "client" means from the server to clients.
        crossings: the number of rows, by (block, kind, destination).
        refused: the number of rows that the policy refused, by (block, kind, destination); their bytes do not count.
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
        """Everything that crossed or was refused."""
        return sorted({*self.crossings, *self.refused})


def aggregate(folder: Folder) -> Egress:
    """Sum up a run's egress.jsonl.

    The start of a row (run, round, ask, client) differs from row to row, but thousands of rows share the rest, from
    "message" on. Pairs of client and rest are counted as text, and each rest is parsed once.

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
    """The text of the client's number in a line."""
    start = line.find(CLIENT) + len(CLIENT)
    return line[start : line.find(",", start)]


@dataclass(frozen=True)
class _Tail:
    """The content of a row from "message" on."""

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
