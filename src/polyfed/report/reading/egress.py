"""Sums over the ledger of a run, computed in one pass. Rows that repeat earlier rows need no more memory."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.system.files import EGRESS
from polyfed.core.system.json_and_toml import parse_json
from polyfed.report.reading.run_folder import Folder, damaged
from polyfed.report.reading.run_schema import LIMIT

MOST_SHAPES = 100_000
"""The largest number of different pairs (client, tail of a row) that are counted before they are summed up. It limits
the memory if every row is different. The tail is the text of a row from the key "message" on."""

CLIENT, ROUND, ASK = '"client":', '"round":', '"ask":'
"""The texts that stand before the numbers of the client, the round and the request in a row."""

Place = tuple[str, str, str]
"""(block, kind, destination)"""


@dataclass(frozen=True)
class Egress:
    """Sums over a ledger.

    Attributes:
        bytes: bytes that were sent, by (block, kind, destination). The destination "client" stands for data that the
            server sends to clients.
        crossings: the number of rows, by (block, kind, destination).
        refused: the number of rows that the policy refused, by (block, kind, destination). The bytes of these rows do
            not count.
        messages: bytes by (message, field, kind, destination).
        clients: bytes by (client, block, kind, destination).
        evaluation: the same sums over the rows that belong to evaluations. None if it is not known which rows these
            are. All rows then count as training.
    """

    bytes: Counter[Place]
    crossings: Counter[Place]
    refused: Counter[Place]
    messages: Counter[tuple[str, str, str, str]]
    clients: Counter[tuple[int, str, str, str]]
    evaluation: "Egress | None" = None

    @classmethod
    def empty(cls, evaluation: "Egress | None" = None) -> "Egress":
        """Return sums over no rows."""
        return cls(Counter(), Counter(), Counter(), Counter(), Counter(), evaluation)

    @property
    def places(self) -> list[Place]:
        """Return the places of all data that was sent or refused."""
        return sorted({*self.crossings, *self.refused})


def aggregate(folder: Folder, requests: Mapping[int, int] | None = None) -> Egress:
    """Sum up a run's egress.jsonl.

    Each row is a line of JSON. The text of a row from the key "message" to the end is called its tail. Thousands of
    rows have the same tail, and differ only in their start (run, round, ask, client). The function therefore does not
    parse every row. It first compares tails as text, and counts how often each client has each tail. Then it parses
    every distinct tail once and multiplies its bytes by the count.

    Args:
        folder: the run.
        requests: round -> how many training requests the round has. The training requests of a round come first, and
            all its other requests are evaluations. None if the numbers are not known.

    Raises:
        DataError: a row is damaged.
    """
    evaluation = Egress.empty()
    egress = Egress.empty(evaluation if requests else None)
    sides = {False: (egress, _Counts()), True: (evaluation, _Counts())}
    for number, line in folder.egress_lines():
        tail = line[line.find('"message"') :] if '"message"' in line else line
        sums, counts = sides[bool(requests) and _evaluates(line, requests or {})]
        counts.pairs[_text(line, CLIENT), tail] += 1
        counts.first_seen.setdefault(tail, number)
        if len(counts.pairs) > MOST_SHAPES:
            _add(sums, counts, folder)
    for sums, counts in sides.values():
        _add(sums, counts, folder)
    return egress


@dataclass(frozen=True)
class _Counts:
    """Counts of rows with the same tail. A tail is the text of a row from the key "message" to the end.

    Attributes:
        pairs: how often each tail occurs for each client, by (client, tail).
        first_seen: the number of the first line with each tail.
    """

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_seen: dict[str, int] = field(default_factory=dict)


def _evaluates(line: str, requests: Mapping[int, int]) -> bool:
    """Whether a row belongs to an evaluation."""
    try:
        return int(_text(line, ASK)) >= requests.get(int(_text(line, ROUND)), LIMIT)
    except ValueError:
        return False  # a damaged row, which is reported when its tail is parsed


def _text(line: str, key: str) -> str:
    """Return the number that follows `key` in a row, as text."""
    start = line.find(key) + len(key)
    return line[start : line.find(",", start)]


@dataclass(frozen=True)
class _Tail:
    """The parsed tail of a row: the values of "message" and of all keys after it."""

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


def _add(egress: Egress, counts: _Counts, folder: Folder) -> None:
    parsed: dict[str, _Tail] = {}
    for (client, text), count in counts.pairs.items():
        try:
            tail = parsed.get(text) or parsed.setdefault(text, _Tail.parse(text))
            sender = int(client)
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(folder.path / EGRESS, error, counts.first_seen[text]) from None
        if tail.refused:
            egress.refused[tail.place] += count
        else:
            egress.bytes[tail.place] += tail.bytes * count
            egress.crossings[tail.place] += count
            egress.messages[tail.message] += tail.bytes * count
            egress.clients[sender, *tail.place] += tail.bytes * count
    counts.pairs.clear()
    counts.first_seen.clear()
