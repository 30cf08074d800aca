"""At the end of a run, the server asks each device to sign what its audit log says about the run.

The signed receipts are evidence for others, which `polyfed certify` puts into the certificate of the run. They change
nothing in the run, so whatever goes wrong here is a line of the log.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.system.files import AUDIT, RECEIPTS, replace_text
from polyfed.deploy.server.run_log import LOGGER
from polyfed.engines.protocol import MOST_UNANSWERED, SIGNED, Patience, one_line, sign_packet
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.keys import is_signed, is_tied
from polyfed.privacy.egress.audit_log.receipts import RECEIPT, ClientLedger, ledgers, log_rows, receipt_in
from polyfed.transport.logins import fingerprint

SIGN_SECONDS = 60.0
"""How long the server waits for the receipts: a device reads all of its audit log since the run began (inferred)."""

AWAY_SECONDS = 5.0
"""How long the server waits for a device that is offline at the end of the run (inferred)."""


def collect_receipts(
    out: Path, run: str, transport: Any, signed_by: Callable[[int, str], None] = lambda client, key: None
) -> None:
    """Ask all devices of a finished run for their receipts, and write these to the run folder.

    Args:
        out: the folder of the run.
        run: the run's name.
        transport: carries packets to the devices that have enrolled.
        signed_by: called with each client, and the fingerprint of its device's key at this time.
    """
    try:
        known = ledgers(log_rows(out / AUDIT), run) if (out / AUDIT).exists() else {}
        there = {client: own for client, own in known.items() if client in transport.node_of}
        packets = {client: sign_packet(run, client, own.unanswered) for client, own in there.items()}
        patience = Patience(SIGN_SECONDS, len(packets), 1, AWAY_SECONDS)
        answers: Mapping[int, Packet | str] = transport.exchange(packets, patience) if packets else {}
        kept = dict[str, Any]()
        for client, answer in answers.items():
            try:
                kept[str(client)] = told = _receipt_of(answer, run, client, there[client])
                if "tie" in told:
                    signed_by(client, fingerprint(told["tie"]["key"].encode()))
            except ValueError as error:
                LOGGER.warning("client %d has not signed its ledger of the run: %s", client, one_line(error))
        replace_text(out / RECEIPTS, json.dumps(kept, indent=1))
        LOGGER.info("%d of %d devices have signed their ledgers", len(kept), len(known))
    except (PolyfedError, OSError, ValueError) as error:
        LOGGER.warning("no device was asked to sign its ledger of the run: %s", error)


def _receipt_of(answer: Packet | str, run: str, client: int, own: ClientLedger) -> dict[str, Any]:
    """Return the receipt of a client. One over other rows is a receipt too, and the certificate tells it.

    Raises:
        ValueError: the answer is none.
    """
    if isinstance(answer, str):
        raise ValueError(answer)
    if answer.header.get("verdict") != SIGNED:
        raise ValueError(str(answer.header.get("reason")))
    result = receipt_in(answer.header)
    said, left = result["receipt"], own.unanswered[:MOST_UNANSWERED]
    if (said["run"], said["client"], said["unanswered"]) != (run, client, [list(place) for place in left]):
        raise ValueError("its receipt is for another run or client, or leaves out other requests")
    if not is_signed(result["key"], RECEIPT, said, result["signature"]):
        raise ValueError("its receipt is not signed by the key that it names")
    if "tie" in result and not is_tied(result["tie"], result["key"]):
        raise ValueError("the key of its log is not signed by the key of a device")
    if said["root"] != own.without(left).root:
        LOGGER.warning("client %d has signed another ledger than this server's: `polyfed audit-log reconcile`", client)
    return result
