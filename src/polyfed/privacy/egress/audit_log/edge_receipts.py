"""What the edge of a silo signs about a run: what of its silo left for the server, and what came from there.

The audit log of an edge has all that passed in its silo; the server has only what passed between them. Both come to the
same root over this part (`crossing`), as server and device do over the rows of a client (`receipts`). A message to an
edge asks for a *part*, whose requests to devices have numbers from that of the message on. If the server got no answer,
it names the numbers up to the next message, and the edge leaves them out, because what it sent there was lost.

An edge also says which keys its devices log in with, as only the edge knows that. Each device signs a receipt of its
own, of which the server can compare what left for it: an edge that changes a reply on its way is found out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, with_config

from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.receipts import (
    STRICT,
    TO_SERVER,
    ClientLedger,
    LeftOut,
    SaidOfRun,
    Signatures,
    ledgers,
    now,
    receipt_in,
    verified_rows,
    with_keys,
)
from polyfed.privacy.egress.ledger import TO_CLIENT

EDGE_RECEIPT = b"polyfed edge receipt 1\n"
"""What the signed text begins with, so that the receipt of an edge never passes for that of a device."""

EDGES = "edges"
"""The key of the edges' receipts in the file of a run, beside which those of devices stand."""

END = 2**31 - 1
"""The end of the numbers of a round's requests."""

MOST_DEVICES = 10_000
"""Most devices of a silo (inferred)."""


@with_config(STRICT)
class SaidByEdge(SaidOfRun):
    """What an edge signs. `devices` holds the key of each device of the silo, `received` the messages to an edge."""

    silo: int
    received: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=100)]
    devices: Annotated[dict[str, Annotated[str, Field(max_length=200)]], Field(max_length=MOST_DEVICES)]


@with_config(STRICT)
class EdgeReceipt(Signatures):
    """The receipt of an edge with its signatures."""

    receipt: SaidByEdge


_EDGE_RECEIPT: TypeAdapter[Any] = TypeAdapter(EdgeReceipt)


@dataclass(frozen=True)
class Edge:
    """An edge that signs: the number of its silo, the messages that it gets from the server, and its devices' keys."""

    silo: int
    received: Sequence[str]
    devices: Mapping[int, str]


def edge_receipt_in(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt in the header of an edge's answer.

    Raises:
        ValueError: it has not the form of one.
    """
    return receipt_in(header, _EDGE_RECEIPT)


def joined(parts: Iterable[ClientLedger]) -> ClientLedger:
    """Return the rows of several clients as one ledger."""
    return ClientLedger(tuple(sorted(row for part in parts for row in part.rows)))


def crossing(rows: Iterable[Mapping[str, Any]], run: str, received: Collection[str]) -> ClientLedger:
    """Return the rows of an edge's log about what passed between its silo and the server.

    Args:
        rows: the rows of the log.
        received: names of the messages that an edge gets from the server; the others to clients are for devices.

    Raises:
        ValueError: see `ledgers`.
    """
    passed = [
        row
        for row in rows
        if row.get("destination") == TO_SERVER
        or (row.get("destination") == TO_CLIENT and row.get("message") in received)
    ]
    return joined(ledgers(passed, run).values())


def within(rows: Iterable[Mapping[str, Any]], run: str, received: Collection[str]) -> dict[int, ClientLedger]:
    """Return the rows of an edge's log about each device of its silo, as the device's log has them.

    Raises:
        ValueError: see `ledgers`.
    """
    return ledgers((row for row in rows if row.get("message") not in received), run)


def unanswered_parts(crossed: ClientLedger) -> list[LeftOut]:
    """Return the requests of each part to which the server got no reply; see `LeftOut`.

    Args:
        crossed: what passed between a silo and the server, as the server has it.
    """
    begins = sorted({place for place, up, _ in crossed.rows if not up})
    replied = {place for place, up, _ in crossed.rows if up}
    result = list[LeftOut]()
    for (round, first), after in zip(begins, [*begins[1:], (-1, 0)], strict=True):
        end = after[1] if after[0] == round else END
        if not any(place[0] == round and first <= place[1] < end for place in replied):
            result.append((round, first, end))
    return result


def edge_receipt(log: AuditLog, run: str, edge: Edge, unanswered: Sequence[LeftOut], policy: str) -> dict[str, Any]:
    """Sign what an edge's audit log says about what passed between its silo and the server in a run.

    Args:
        log: the edge's audit log.
        unanswered: the requests that the server has left out.
        policy: SHA-256 of the policy file, or "" for the default policy.

    Raises:
        DataError, CheckpointError: the log is missing or damaged.
    """
    with log.alone() as key:
        own = crossing(verified_rows(log, run), run, edge.received).without(unanswered)
    content = {
        "run": run,
        "silo": edge.silo,
        **own.told,
        "received": sorted(edge.received),
        "devices": {str(client): device for client, device in sorted(edge.devices.items())},
        "unanswered": [list(place) for place in unanswered],
        "policy": policy,
        "time": now(),
    }
    return with_keys(log, key, EDGE_RECEIPT, content)
