"""The facts about a round that follow from the ledger."""

from collections.abc import Sequence
from typing import Any

from polyfed.privacy.ledger import TO_CLIENT, Entry


def facts_of_round(round: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """The facts about a round that follow from the ledger: its cohort, who trained which block, bytes up and down."""
    asked: set[int] = set()
    trained: dict[str, set[int]] = {}
    up = down = 0
    for entry in entries:
        if entry.destination == TO_CLIENT:
            asked.update(entry.clients)
            down += entry.bytes
            continue
        up += entry.bytes
        for crossing in entry.crossings:
            if (
                crossing.kind == "parameters" and entry.destination == "server"
            ):  # parameters that stay in a silo will be sent again by its edge
                trained.setdefault(crossing.block, set()).update(entry.clients)
    return {
        "round": round,
        "cohort": sorted(asked),
        "trained": {block: sorted(clients) for block, clients in trained.items()},
        "bytes_up": up,
        "bytes_down": down,
    }
