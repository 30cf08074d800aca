"""What a device's audit log says about its place in a federation: whose it became a part, and which keys changed.

The process of the connection writes these lines when the server has let the device in. What it knew before is in
`contact.json` of the state folder, so that each change is one line. This module needs no PyTorch.
"""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyfed.core.system.files import AUDIT, PUBLIC_KEY, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.log_lines import logger_of
from polyfed.privacy.egress.audit_log.log import AuditLog

FILE = "contact.json"
"""The file in the state folder with the newest contact."""

LOGGER = logger_of("device", "stderr")


@dataclass(frozen=True)
class Contact:
    """How a device and its server know each other.

    Attributes:
        server: address of the server.
        authority: SHA-256 of `ca.pem`, the fingerprint of a token.
        client: number of the device, or of the silo of an edge.
        device: fingerprint of the device's key.
        certificate: SHA-256 of the server's certificate.
        ends: when that ends, in seconds since 1970.
    """

    server: str
    authority: str
    client: int
    device: str
    certificate: str
    ends: float


def note_contact(state: Path, now: Contact) -> None:
    """Write to the audit log of a device what has changed since its last contact.

    Raises:
        CheckpointError, OSError: the log is damaged, or cannot be written.
    """
    before, log = _known(state / FILE), AuditLog(state)
    earlier = before is None and (state / AUDIT).exists()
    if log.prepare():
        LOGGER.info("made the key of the audit log; keep a copy of %s elsewhere", state / PUBLIC_KEY)
    if events := _changes(before, now, earlier=earlier):
        log.note(events)
        replace_text(state / FILE, json.dumps(asdict(now)))


def _known(path: Path) -> Contact | None:
    try:
        result = Contact(**parse_json(path.read_text(encoding="utf-8")))
        return result if isinstance(result.ends, int | float) else None
    except (OSError, ValueError, TypeError):
        return None


def _changes(before: Contact | None, now: Contact, *, earlier: bool) -> list[dict[str, Any]]:
    """Return the events between two contacts.

    Args:
        earlier: whether the log has lines, although no earlier contact is known.
    """
    place: dict[str, Any] = {"client": now.client, "device": now.device}
    until = f"{datetime.fromtimestamp(now.ends, UTC):%Y-%m-%d}"
    shown = f"certificate {now.certificate}, valid until {until}"
    if before is None or (before.server, before.authority, before.client) != (now.server, now.authority, now.client):
        since = "; earlier lines are of a time in which the log did not note it" if earlier else ""
        why = f"the server {now.server} of the authority {now.authority}, with the {shown}{since}"
        return [{"event": "joined", **place, "why": why}]
    result = list[dict[str, Any]]()
    if before.device != now.device:
        result.append({"event": "renewed", **place, "why": f"the key of this device; before: {before.device}"})
    if before.certificate != now.certificate:
        result.append({"event": "renewed", "client": now.client, "why": f"the server's certificate: now the {shown}"})
    return result
