"""The table of the bytes that each client sent: one row per client, ordered by the bytes."""

from collections import Counter
from dataclasses import dataclass

from polyfed.core.messages import KINDS
from polyfed.report.formatting import bytes_of
from polyfed.report.reading.egress import Egress
from polyfed.report.reading.run_folder import Folder

MOST_CLIENTS = 1000
"""The largest number of clients in the table, so that the page stays small."""

DOWN = "client"
"""The destination in the ledger for messages to clients."""


@dataclass(frozen=True)
class Sender:
    """What one client sent and received, in bytes.

    Attributes:
        client: the number of the client.
        name: the name of its natural client, if run.json has one.
        modalities: the modalities of the client. None if run.json does not list the client.
        sent: bytes sent in total.
        share: `sent` in percent of the largest `sent` of all clients.
        parts: for each kind of data (a column of the table), the bytes that the client sent, and a text with the bytes
            of each block.
        received: bytes received in total.
    """

    client: int
    name: str
    modalities: list[str] | None
    sent: int
    share: int
    parts: list[tuple[int, str]]
    received: int


@dataclass(frozen=True)
class Senders:
    """The table of clients.

    Attributes:
        kinds: the kinds that at least one client sent.
        rows: the rows of the table.
        total: the number of clients that sent or received anything.
    """

    kinds: list[str]
    rows: list[Sender]
    total: int


def senders(sums: Egress, folder: Folder) -> Senders:
    """The table of a run: at most `MOST_CLIENTS` rows, ordered by bytes sent and then by client number."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for (client, _, _, way), size in sums.clients.items():
        (received if way == DOWN else sent)[client] += size
    ranked = sorted({*sent, *received}, key=lambda client: (-sent[client], client))
    shown = set(ranked[:MOST_CLIENTS])
    parts: dict[tuple[int, str], dict[str, int]] = {}
    for (client, block, kind, way), size in sums.clients.items():
        if way != DOWN and client in shown:
            place = block if way == "server" else f"{block} to the {way}"
            parts.setdefault((client, kind), {})[place] = size
    kinds = [kind for kind in KINDS if any(place[1] == kind for place in parts)]
    names = {int(entry["id"]): str(entry.get("name", "")) for entry in folder.facts.get("clients", [])}
    held = {int(entry["id"]): entry["modalities"] for entry in folder.facts.get("clients", [])}
    most = max(sent.values(), default=0)
    rows = [
        Sender(
            client=client,
            name=names.get(client, ""),
            modalities=held.get(client),
            sent=sent[client],
            share=round(100 * sent[client] / most) if most else 0,
            parts=[_part(parts.get((client, kind), {})) for kind in kinds],
            received=received[client],
        )
        for client in ranked[:MOST_CLIENTS]
    ]
    return Senders(kinds, rows, len(ranked))


def _part(blocks: dict[str, int]) -> tuple[int, str]:
    return sum(blocks.values()), ", ".join(f"{block} {bytes_of(size)}" for block, size in sorted(blocks.items()))
