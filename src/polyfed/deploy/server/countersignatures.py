"""At the end of a run, the server asks each device to sign what its audit log says about the run.

With edges it asks each edge, which signs what passed between its silo and the server, and which asks its devices as a
server does (`device_receipts`) and passes their receipts on.

The signed receipts are evidence for others, which `polyfed certify` puts into the certificate of the run. They change
nothing in the run, so whatever goes wrong here is a line of the log.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.system.files import AUDIT, RECEIPTS, replace_text
from polyfed.deploy.server.run_log import LOGGER
from polyfed.engines.protocol import MOST_UNANSWERED, SIGNED, Patience, one_line, sign_packet
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.edge_receipts import EDGE_RECEIPT, edge_receipt_in, joined, unanswered_parts
from polyfed.privacy.egress.audit_log.keys import is_signed, is_tied
from polyfed.privacy.egress.audit_log.receipts import (
    RECEIPT,
    ClientLedger,
    LeftOut,
    ledgers,
    log_rows,
    receipt_in,
)
from polyfed.transport.logins import fingerprint

SIGN_SECONDS = 60.0
"""How long the server waits for the receipts: a device reads all of its audit log since the run began (inferred)."""

AWAY_SECONDS = 5.0
"""How long the server waits for a device that is offline at the end of the run (inferred)."""

EDGES, DEVICES = "edges", "devices"
"""The key of the edges' receipts in the file of a run, and that of its devices' receipts in the answer of an edge."""

Warn = Callable[[str], object]
"""Writes a line to the log."""

SignedBy = Callable[[int, str], object]
"""Called with each client, or silo with an edge, and the fingerprint of its device's key at this time."""


def collect_receipts(
    out: Path,
    run: str,
    transport: Any,
    signed_by: SignedBy = lambda client, key: None,
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
        known = ledgers(log_rows(out / AUDIT), run) if (out / AUDIT).exists() else {}
        if silos is None:
            kept = device_receipts(known, run, transport, SIGN_SECONDS, LOGGER.warning, signed_by=signed_by)
            LOGGER.info("%d of %d devices have signed their ledgers", len(kept), len(known))
        else:
            kept = _edge_receipts(known, run, transport, signed_by, silos)
            told = len(kept[EDGES]), len(silos), len(kept) - 1, sum(map(len, silos.values()))
            LOGGER.info("%d of %d edges and %d of %d devices have signed their ledgers", *told)
        replace_text(out / RECEIPTS, json.dumps(kept, indent=1))
    except (PolyfedError, OSError, ValueError) as error:
        LOGGER.warning("no device was asked to sign its ledger of the run: %s", error)


def device_receipts(
    known: Mapping[int, ClientLedger],
    run: str,
    transport: Any,
    seconds: float,
    warn: Warn,
    *,
    left_out: Sequence[LeftOut] = (),
    signed_by: SignedBy = lambda client, key: None,
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
    kept = dict[str, Any]()
    for client, answer in _answers(transport, {c: sign_packet(run, c, left[c]) for c in there}, seconds).items():
        try:
            told = receipt_in(_signed(answer))
            _check(told, {"run": run, "client": client, "unanswered": _listed(left[client])}, RECEIPT)
        except ValueError as error:
            warn(f"client {client} has not signed its ledger of the run: {one_line(error)}")
            continue
        kept[str(client)] = told
        _note(told, partial(signed_by, client))
        if told["receipt"]["root"] != there[client].without(left[client]).root:
            warn(f"client {client} has signed another ledger than the one here: `polyfed audit-log reconcile`")
    return kept


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
    edges, kept = dict[str, Any](), dict[str, Any]()
    for silo, answer in _answers(transport, asked, SIGN_SECONDS).items():
        try:
            header = _signed(answer)
            told = edge_receipt_in(header)
            _check(told, {"run": run, "silo": silo, "unanswered": _listed(left[silo])}, EDGE_RECEIPT)
        except ValueError as error:
            LOGGER.warning("the edge of silo %d has not signed its ledger of the run: %s", silo, one_line(error))
            continue
        edges[str(silo)] = told
        _note(told, partial(signed_by, silo))
        if told["receipt"]["root"] != crossed[silo].without(left[silo]).root:
            where = "the edge of silo %d has signed another ledger than this server's: `polyfed audit-log reconcile`"
            LOGGER.warning(where, silo)
        kept |= _passed_on(header, run, silos[silo])
    return {EDGES: edges, **kept}


def _passed_on(header: Mapping[str, Any], run: str, members: Sequence[int]) -> dict[str, Any]:
    """Return the receipts of devices that an edge has passed on."""
    kept, given = dict[str, Any](), header.get(DEVICES)
    for client in members:
        one = given.get(str(client)) if isinstance(given, dict) else None
        try:
            if not isinstance(one, dict):
                raise ValueError("its edge has passed on no receipt")
            told = receipt_in(one)
            _check(told, {"run": run, "client": client}, RECEIPT)
            if "left" not in told["receipt"]:
                raise ValueError("its receipt does not say what left for the server")
            kept[str(client)] = told
        except ValueError as error:
            LOGGER.warning("client %d has not signed its ledger of the run: %s", client, one_line(error))
    return kept


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


def _note(told: Mapping[str, Any], signed_by: Callable[[str], object]) -> None:
    if "tie" in told:
        signed_by(fingerprint(told["tie"]["key"].encode()))


def _listed(left: Sequence[LeftOut]) -> list[list[int]]:
    return [list(place) for place in left]
