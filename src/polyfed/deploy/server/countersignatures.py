"""At the end of a run, the server asks each device to sign what its audit log says about the run.

The signed receipts are evidence for others, which `polyfed certify` puts into the certificate of the run. They change
nothing in the run, so whatever goes wrong here is a line of the log.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.system.files import AUDIT, RECEIPTS, replace_text
from polyfed.deploy.server.run_log import LOGGER
from polyfed.engines.protocol import SIGNED, Patience, one_line, sign_packet
from polyfed.federation.wire_format import Packet
from polyfed.privacy.egress.log_keys import is_signed, is_tied
from polyfed.privacy.egress.receipts import RECEIPT, ClientLedger, ledgers, log_rows

SIGN_SECONDS = 60.0
"""How long the server waits for the receipts: a device reads its whole audit log for one (inferred)."""

AWAY_SECONDS = 5.0
"""How long the server waits for a device that is offline at the end of the run (inferred)."""


def collect_receipts(out: Path, run: str, transport: Any) -> None:
    """Ask all devices of a finished run for their receipts, and write these to the run folder.

    Args:
        out: the folder of the run.
        run: the run's name.
        transport: carries packets to the devices that have enrolled.
    """
    try:
        known = ledgers(log_rows(out / AUDIT), run) if (out / AUDIT).exists() else {}
        there = {client: own for client, own in known.items() if client in transport.node_of}
        packets = {client: sign_packet(run, client, own.unanswered) for client, own in there.items()}
        patience = Patience(SIGN_SECONDS, len(packets), 1, AWAY_SECONDS)
        answers: Mapping[int, Packet | str] = transport.exchange(packets, patience) if packets else {}
        kept = dict[str, Any]()
        for client, answer in answers.items():
            if why := _flaw(answer, run, client, there[client]):
                LOGGER.warning("client %d has not signed its ledger of the run: %s", client, why)
            else:
                assert isinstance(answer, Packet)
                kept[str(client)] = {name: answer.header[name] for name in _parts(answer)}
        replace_text(out / RECEIPTS, json.dumps(kept, indent=1))
        LOGGER.info("%d of %d devices have signed their ledgers", len(kept), len(known))
    except (PolyfedError, OSError, ValueError) as error:
        LOGGER.warning("no device was asked to sign its ledger of the run: %s", error)


def _parts(answer: Packet) -> list[str]:
    return [name for name in ("receipt", "key", "signature", "tie") if name in answer.header]


def _flaw(answer: Packet | str, run: str, client: int, own: ClientLedger) -> str:
    """Return why an answer is no receipt of a client. One over other rows is a receipt, which the certificate tells."""
    if isinstance(answer, str):
        return one_line(answer)
    match answer.header:
        case {"verdict": "signed", "receipt": dict(told), "key": str(key), "signature": str(signature), **rest}:
            tie = rest.get("tie")
            if (told.get("run"), told.get("client")) != (run, client):
                return "its receipt is for another run or client"
            if not is_signed(key, RECEIPT, told, signature):
                return "its receipt is not signed by the key that it names"
            if tie is not None and not (_is_tie(tie) and is_tied(tie, key)):
                return "the key of its log is not signed by the key of a device"
            if told.get("root") != own.without(own.unanswered).root:
                LOGGER.warning(
                    "client %d has signed another ledger than this server's: `polyfed audit-log reconcile`", client
                )
            return ""
    return one_line(answer.header.get("reason")) if answer.header.get("verdict") != SIGNED else "it is no receipt"


def _is_tie(told: Any) -> bool:
    return isinstance(told, dict) and set(map(type, told.values())) == {str} and set(told) == {"key", "signature"}
