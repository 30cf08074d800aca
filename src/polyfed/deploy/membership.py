"""Who takes part in the run of a folder: which device has which client number, and the number of the server's session.

A device proves that it is the same one again by a token. It derives the token from a secret on its own disk and the
id of the server's run folder, so no other device and no other server can present it. The server keeps a digest.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply, CheckpointError
from polyfed.core.files import replace_text
from polyfed.engines.protocol import Enrolment
from polyfed.federation.wire_format import Packet

MEMBERS = ".clients.json"
"""The file of a run folder that says which device has which client number."""

SECRET = "identity"
"""The file in a device's state folder that holds its secret."""

_TOKEN = re.compile(r"[0-9a-f]{64}")


class Membership:
    """The clients of a run folder. The first device that enrols with a client number keeps the number.

    Only one server may use the folder at a time (`polyfed.deploy.server.only_server`).

    Args:
        folder: the run folder; it exists.

    Attributes:
        federation: id of the folder, from which devices derive their tokens.
        session: number of this start of the server; larger than that of every earlier start, whatever the clock says.
        left_out: clients that may not take part in this session, with the reason.

    Raises:
        CheckpointError: the file in the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / MEMBERS
        before = self._read()
        self.federation: str = before["federation"]
        self.session: int = max(before["session"] + 1, int(time.time() * 1000))
        self.left_out: dict[int, str] = {}
        self._clients: dict[str, dict[str, Any]] = before["clients"]
        self._write()

    def refusal(self, packet: Packet, node: int) -> str:
        """Why a device that enrols must be refused; empty if it may take part. Notes the device of a new number.

        Args:
            packet: the enrolment; nothing in it has been checked.
            node: id of the Flower node that sent it.
        """
        try:
            enrolment = Enrolment.read(packet.header)
        except BadReply as error:
            return str(error)
        if not _TOKEN.fullmatch(enrolment.token):
            return f"client {enrolment.client} enrolled without a token"
        if enrolment.client in self.left_out:
            return f"client {enrolment.client} was left out: {self.left_out[enrolment.client]}"
        digest = hashlib.sha256(enrolment.token.encode()).hexdigest()
        known = self._clients.get(str(enrolment.client))
        if known is not None and known["node"] != node and not hmac.compare_digest(known["token"], digest):
            return (
                f"client {enrolment.client} belongs to another device, which enrolled first. Give this device another "
                f"client number; if it replaces that device, remove the number from {MEMBERS} in the run folder"
            )
        entry = {"node": node, "token": digest}
        if known != entry:
            self._clients[str(enrolment.client)] = entry
            self._write()
        return ""

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"federation": secrets.token_hex(16), "session": -1, "clients": {}}
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
            for entry in found["clients"].values():
                int(entry["node"]), str(entry["token"])
            return {
                "federation": str(found["federation"]),
                "session": int(found["session"]),
                "clients": found["clients"],
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}. Restore it from a copy") from error

    def _write(self) -> None:
        facts = {"federation": self.federation, "session": self.session, "clients": self._clients}
        replace_text(self._path, json.dumps(facts, indent=1))
        self._path.chmod(0o600)


def token_of(state: Path, federation: str) -> str:
    """The token by which the server of a federation recognises this device.

    Args:
        state: the device's state folder; the secret is drawn when it is first needed.
        federation: id of the server's run folder.

    Raises:
        OSError: the state folder cannot be written or read.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state / SECRET
    if not path.exists():
        draft = path.with_name(f".{SECRET}-{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first: then its secret holds
            os.link(draft, path)
        draft.unlink()
    return hmac.new(path.read_bytes(), federation.encode(), hashlib.sha256).hexdigest()
