"""At the end of a run, the server asks each device to sign what its audit log says about the run.

With edges it asks each edge, which signs what passed between its silo and the server, and which asks its devices as a
server does (`device_receipts`) and passes their receipts on.

The signed receipts are evidence for others, which `polyfed certify` puts into the certificate of the run. They change
nothing in the run, so whatever goes wrong here is a line of the log. Who is away at the end signs later
(`late_receipts`): what it signs does not change any more, and its receipt is added behind the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.system.files import AUDIT, RECEIPTS, replace_text
from polyfed.deploy.server.run_log import LOGGER
from polyfed.engines.protocol import MOST_UNANSWERED, SIGNED, Patience, one_line, sign_packet
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.edge_receipts import (
    EDGE_RECEIPT,
    EDGES,
    edge_receipt_in,
    joined,
    unanswered_parts,
)
from polyfed.privacy.egress.audit_log.keys import is_signed, is_tied
from polyfed.privacy.egress.audit_log.receipts import (
    RECEIPT,
    ClientLedger,
    LeftOut,
    ledgers,
    log_rows,
    receipt_in,
    receipts_text,
)
from polyfed.transport.logins import fingerprint

SIGN_SECONDS = 60.0
"""How long the server waits for the receipts: a device reads all of its audit log since the run began (inferred)."""

AWAY_SECONDS = 5.0
"""How long the server waits for a device that is offline at the end of the run (inferred)."""

DEVICES = "devices"
"""The key of the receipts of its devices in the answer of an edge."""

Warn = Callable[[str], object]
"""Writes a line to the log."""

SignedBy = Callable[[int, str], bool]
"""Called with each client, or silo with an edge, and the fingerprint of the key of a device that has signed. Returns
whether this is the device of the client."""


def collect_receipts(
    out: Path,
    run: str,
    transport: Any,
    signed_by: SignedBy = lambda client, key: True,
    silos: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Ask all devices of a finished run for their receipts, and write these to the run folder.

    Args:
        out: the folder of the run.
        run: the run's name.
        transport: carries packets to the devices that have enrolled.
        signed_by: see `SignedBy`.
        silos: the devices of each silo if silos have edges, which have enrolled in place of the devices.
    """
    try:
        known = ledgers_of(out, run)
        kept = receipts_of(known, run, transport, signed_by, silos)
        if silos is None:
            LOGGER.info("%d of %d devices have signed their ledgers", len(kept), len(known))
        else:
            told = len(kept[EDGES]), len(silos), len(kept) - 1, sum(map(len, silos.values()))
            LOGGER.info("%d of %d edges and %d of %d devices have signed their ledgers", *told)
        replace_text(out / RECEIPTS, receipts_text(kept))
    except (PolyfedError, OSError, ValueError) as error:
        LOGGER.warning("no device was asked to sign its ledger of the run: %s", error)


def ledgers_of(out: Path, run: str) -> dict[int, ClientLedger]:
    """Return the ledger of each client in a run, as the server has it.

    Raises:
        DataError, ValueError: the audit log is damaged.
    """
    return ledgers(log_rows(out / AUDIT), run) if (out / AUDIT).exists() else {}


def receipts_of(
    known: Mapping[int, ClientLedger],
    run: str,
    transport: Any,
    signed_by: SignedBy,
    silos: Mapping[int, Sequence[int]] | None,
) -> dict[str, Any]:
    """Ask who is in `transport.node_of`, and return the receipts as the file of a run holds them."""
    if silos is not None:
        return _edge_receipts(known, run, transport, signed_by, silos)
    return device_receipts(known, run, transport, SIGN_SECONDS, LOGGER.warning, signed_by=signed_by)


def without_receipt(
    kept: Mapping[str, Any], known: Iterable[int], silos: Mapping[int, Sequence[int]] | None
) -> list[int]:
    """Return the clients that have not signed; with edges the silos of which the edge or a device has not."""
    if silos is None:
        return sorted(client for client in known if str(client) not in kept)
    signed, asked = kept.get(EDGES, {}), set(known)
    return sorted(
        silo
        for silo, own in silos.items()
        if str(silo) not in signed or any(str(one) not in kept for one in own if one in asked)
    )


def with_late(kept: Mapping[str, Any], late: Mapping[str, Any], warn: Warn) -> dict[str, Any]:
    """Return the receipts with later ones behind them. What has been signed stays, as certificates may hold it.

    A device behind an edge is left out if the edge has named another key for it when it signed.
    """
    result = dict(kept)
    if EDGES in late:
        before = kept.get(EDGES, {})
        result[EDGES] = {**before, **{silo: told for silo, told in late[EDGES].items() if silo not in before}}
    named = {
        client: key for told in result.get(EDGES, {}).values() for client, key in told["receipt"]["devices"].items()
    }
    for client, told in late.items():
        if client == EDGES or client in kept:
            continue
        key = fingerprint(told["tie"]["key"].encode()) if "tie" in told else ""
        if key and named.get(client, key) != key:
            warn(f"client {client} has signed with the key {key}, and its edge named {named[client]}: left out")
            continue
        result[client] = told
    return result


def device_receipts(
    known: Mapping[int, ClientLedger],
    run: str,
    transport: Any,
    seconds: float,
    warn: Warn,
    *,
    left_out: Sequence[LeftOut] = (),
    signed_by: SignedBy = lambda client, key: True,
) -> dict[str, Any]:
    """Ask devices for their receipts, and return the receipt of each client that has signed.

    Args:
        known: the ledger of each client, as it is here.
        seconds: how long to wait.
        warn: told why a device has not signed, or that it has signed another ledger.
        left_out: further requests that every device leaves out.
    """
    there = {client: own for client, own in known.items() if client in transport.node_of}
    left = {client: [*left_out, *own.unanswered][:MOST_UNANSWERED] for client, own in there.items()}

    def read(client: int, answer: Packet | str) -> dict[str, Any]:
        told = receipt_in(_signed(answer))
        _check(told, {"run": run, "client": client, "unanswered": _listed(left[client])}, RECEIPT)
        return told

    answers = _answers(transport, {client: sign_packet(run, client, left[client]) for client in there}, seconds)
    kept = _receipts_in("client", answers, read, warn)
    kept = _own("client", kept, signed_by, warn)
    _compare("client", kept, {client: own.without(left[client]).root for client, own in there.items()}, warn)
    return {str(client): told for client, told in kept.items()}


def _edge_receipts(
    known: Mapping[int, ClientLedger],
    run: str,
    transport: Any,
    signed_by: SignedBy,
    silos: Mapping[int, Sequence[int]],
) -> dict[str, Any]:
    """Ask the edges for their receipts and those of their devices, and return what the file of a run holds."""
    crossed = {silo: joined(known[one] for one in own if one in known) for silo, own in silos.items()}
    left = {silo: unanswered_parts(own)[:MOST_UNANSWERED] for silo, own in crossed.items()}
    asked = {silo: sign_packet(run, silo, left[silo]) for silo in silos if silo in transport.node_of}

    def read(silo: int, answer: Packet | str) -> dict[str, Any]:
        told = edge_receipt_in(_signed(answer))
        _check(told, {"run": run, "silo": silo, "unanswered": _listed(left[silo])}, EDGE_RECEIPT)
        return told

    answers, warn = _answers(transport, asked, SIGN_SECONDS), LOGGER.warning
    kept = _own("the edge of silo", _receipts_in("the edge of silo", answers, read, warn), signed_by, warn)
    roots = {silo: own.without(left[silo]).root for silo, own in crossed.items()}
    _compare("the edge of silo", kept, roots, warn)
    passed = dict[str, Any]()
    for silo in kept:
        passed |= _passed_on(_signed(answers[silo]), run, silos[silo])
    return {EDGES: {str(silo): told for silo, told in kept.items()}, **passed}


def _passed_on(header: Mapping[str, Any], run: str, members: Sequence[int]) -> dict[str, Any]:
    """Return the receipts of devices that an edge has passed on."""
    given = header.get(DEVICES)

    def read(client: int, one: Any) -> dict[str, Any]:
        if not isinstance(one, dict):
            raise ValueError("its edge has passed on no receipt")
        told = receipt_in(one)
        _check(told, {"run": run, "client": client}, RECEIPT)
        if "left" not in told["receipt"]:
            raise ValueError("its receipt does not say what left for the server")
        return told

    parts = {client: given.get(str(client)) if isinstance(given, dict) else None for client in members}
    return {str(client): told for client, told in _receipts_in("client", parts, read, LOGGER.warning).items()}


def _receipts_in(
    who: str, answers: Mapping[int, Any], read: Callable[[int, Any], dict[str, Any]], warn: Warn
) -> dict[int, dict[str, Any]]:
    """Return the receipts in answers, and warn of the answers without one, for which `read` raises a ValueError."""
    kept = dict[int, dict[str, Any]]()
    for number, answer in answers.items():
        try:
            kept[number] = read(number, answer)
        except ValueError as error:
            warn(f"{who} {number} has not signed its ledger of the run: {one_line(error)}")
    return kept


def _compare(who: str, kept: Mapping[int, Mapping[str, Any]], roots: Mapping[int, str], warn: Warn) -> None:
    """Warn of receipts over other ledgers than those here, which have these Merkle roots."""
    for number, told in kept.items():
        if told["receipt"]["root"] != roots[number]:
            warn(f"{who} {number} has signed another ledger than the one here: `polyfed audit-log reconcile`")


def _answers(transport: Any, packets: dict[int, Packet], seconds: float) -> Mapping[int, Packet | str]:
    result: Mapping[int, Packet | str] = {}
    if packets:
        result = transport.exchange(packets, Patience(seconds, len(packets), 1, AWAY_SECONDS))
    return result


def _signed(answer: Packet | str) -> dict[str, Any]:
    """Return the header of an answer with a receipt.

    Raises:
        ValueError: it has none.
    """
    if isinstance(answer, str):
        raise ValueError(answer)
    if answer.header.get("verdict") != SIGNED:
        raise ValueError(str(answer.header.get("reason")))
    return answer.header


def _check(told: Mapping[str, Any], asked: Mapping[str, Any], head: bytes) -> None:
    """Check whether a receipt is what was asked for. One over other rows is a receipt too; the certificate tells it.

    Raises:
        ValueError: it is another one, or its signatures do not fit.
    """
    said = told["receipt"]
    if any(said[name] != value for name, value in asked.items()):
        raise ValueError("its receipt is for another run or client, or leaves out other requests")
    if not is_signed(told["key"], head, said, told["signature"]):
        raise ValueError("its receipt is not signed by the key that it names")
    if "tie" in told and not is_tied(told["tie"], told["key"]):
        raise ValueError("the key of its log is not signed by the key of a device")


def _own(who: str, kept: Mapping[int, dict[str, Any]], signed_by: SignedBy, warn: Warn) -> dict[int, dict[str, Any]]:
    """Return the receipts without those that another device has signed, and warn of these."""
    result = dict(kept)
    for number, told in kept.items():
        if "tie" in told and not signed_by(number, key := fingerprint(told["tie"]["key"].encode())):
            warn(f"{who} {number} has not signed its ledger of the run: the device with the key {key} has")
            del result[number]
    return result


def _listed(left: Sequence[LeftOut]) -> list[list[int]]:
    return [list(place) for place in left]
