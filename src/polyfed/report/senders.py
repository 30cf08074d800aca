"""What left which client: a row a client, those that sent most first."""

from collections import Counter
from dataclasses import dataclass

from polyfed.core.messages import KINDS
from polyfed.report.egress import Egress
from polyfed.report.formatting import bytes_of
from polyfed.report.run_folder import Folder

MOST_CLIENTS = 1000
"""Clients that are shown; more would make a page that no mail takes."""

DOWN = "client"
"""Destination of what clients receive."""


@dataclass(frozen=True)
class Sender:
    """What one client sent and received, in bytes.

    Attributes:
        modalities: what it holds; None where the run's facts leave it out.
        sent: in total.
        share: of the largest total, in percent.
        parts: by kind, in the order of the table's columns: bytes, and of which blocks they are.
        received: in total.
    """

    client: int
    modalities: list[str] | None
    sent: int
    share: int
    parts: list[tuple[int, str]]
    received: int


@dataclass(frozen=True)
class Senders:
    """The table: kinds that anybody sent, and its rows; `total` counts the clients that were asked anything."""

    kinds: list[str]
    rows: list[Sender]
    total: int


def senders(sums: Egress, folder: Folder) -> Senders:
    """The table of a run; at most `MOST_CLIENTS` rows, by bytes sent and then by number."""
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
    held = {int(entry["id"]): entry["modalities"] for entry in folder.facts.get("clients", [])}
    most = max(sent.values(), default=0)
    rows = [
        Sender(
            client=client,
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
