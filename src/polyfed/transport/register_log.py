"""The signed log of a server's register: a line for each device that is invited, joins, renews its key or is revoked.

Every change of the register is a group of lines, whose seal also signs a digest of the whole register after the change.
So a row that was swapped, added or removed in the register's file is noticed at its next use, and the log tells what
the row was. The lines hold the rows, so that the log alone can write the register again. The log's key is signed with
that of the server's certificate. This module needs no PyTorch.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from polyfed.core.errors import CheckpointError, RecipeError
from polyfed.core.system.files import AUDIT
from polyfed.core.system.json_and_toml import parse_json
from polyfed.privacy.egress.audit_log.keys import canonical, key_text, tie
from polyfed.privacy.egress.audit_log.log import PRIVATE_KEY, AuditLog, head_of, last_line, private_key

LOG = "audit"
"""The folder of the log in the credentials; the keys `*.pub` beside it are those of devices."""

Table = dict[str, list[Any]]
"""The register: `KIND KEY` -> the values of a row, in the order of its rows."""

DEVICES, RENEWALS, SETTINGS, FILES = "devices", "renewals", "settings", "files"

COLUMNS: Mapping[str, Sequence[str]] = {
    DEVICES: ("number", "name", "ends", "key", "joined", "ended"),
    RENEWALS: ("device", "name", "since"),
    SETTINGS: ("value",),
    FILES: ("key", "state"),
}
"""The kinds of rows, and the names of their values after the first, which is their key."""

_UNORDERED = (SETTINGS, FILES)

LOOSE, GONE, REPLACED = "loose", "gone", "replaced"
"""What is strange about a key file: it has no token; or that of a device is gone, or holds another key."""

_STRANGE = {
    LOOSE: ("joined", "a key file without a token"),
    GONE: ("revoked", "its key file is gone"),
    REPLACED: ("revoked", "its key file holds another key, which has no token"),
}


class ServerKey:
    """The key of a server's certificate, with which it signs the key of its log as devices sign those of theirs.

    Args:
        path: `server.key`.

    Attributes:
        public: the public key in OpenSSH's format.
    """

    def __init__(self, path: Path) -> None:
        key = load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{path} is no key on an elliptic curve")
        self._key = key
        self.public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

    def sign(self, text: bytes) -> str:
        """Return a signature as text."""
        return base64.b64encode(self._key.sign(text, ec.ECDSA(SHA256()))).decode()


class RegisterLog:
    """The log of a register.

    Args:
        credentials: the folder of the server.
    """

    def __init__(self, credentials: Path) -> None:
        self.folder, self._server_key = credentials / LOG, credentials / "server.key"
        self._log = AuditLog(self.folder)

    @property
    def begun(self) -> bool:
        """Whether the log has a line."""
        return (self.folder / AUDIT).exists()

    def begin(self) -> str:
        """Make the key of the log if there is none, let the server's key sign it, and return it; see `key`."""
        self._log.prepare()
        if self._server_key.is_file():
            tie(self.folder, ServerKey(self._server_key))
        return self.key()

    def key(self) -> str:
        """Return the public key of the log as text.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return key_text(self._private().public_key())

    def _private(self) -> Ed25519PrivateKey:
        try:
            return private_key(self.folder / PRIVATE_KEY)
        except OSError as error:
            raise CheckpointError(f"{error}. Restore {self.folder} from a copy") from None

    def digest(self) -> str:
        """Return the digest of the register that the newest line signs.

        Raises:
            CheckpointError: the log is damaged.
        """
        head, path = head_of(self.folder, self._private().public_key()), self.folder / AUDIT
        line = last_line(path, head.size)
        if hashlib.sha256(line).hexdigest() != head.hash:
            raise CheckpointError(f"{path} is damaged: `polyfed audit-log verify {self.folder}` names the line")
        return str(parse_json(line).get("register", ""))

    def note(self, before: Table, after: Table, events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write what has changed in the register, and further events.

        Raises:
            CheckpointError, OSError: the log is damaged or cannot be written; then nothing is in it.
        """
        self._log.note([*_changes(before, after), *events], {"register": digest(after)})

    def told(self) -> tuple[Table, Table]:
        """Return the register before and after the newest change, as the lines tell it.

        Raises:
            DataError: the log is damaged.
        """
        from polyfed.privacy.egress.audit_log.verification import verify  # only here: it imports PyTorch

        verify(self.folder)
        before, now, group = Table(), Table(), Table()
        size = head_of(self.folder).size
        for line in (self.folder / AUDIT).read_bytes()[:size].splitlines():
            row = parse_json(line)
            if "seal" in row:
                before, now = now, dict(group)
            elif "entry" in row:
                place, values = row["entry"]
                if values is None:
                    group.pop(place, None)
                else:
                    group[place] = values
        return before, now


def digest(table: Table) -> str:
    """Return the SHA-256 of a register. The order of its rows counts where it decides which one is the newest."""
    rows = [[place, table[place]] for kind in COLUMNS for place in of_kind(table, kind)]
    return hashlib.sha256(canonical(rows)).hexdigest()


def of_kind(table: Table, kind: str) -> list[str]:
    """Return the places of the rows of a kind."""
    places = [place for place in table if place.partition(" ")[0] == kind]
    return sorted(places) if kind in _UNORDERED else places


def _named(values: Sequence[Any], kind: str) -> dict[str, Any]:
    return dict(zip(COLUMNS[kind], values, strict=True))


def _changes(before: Table, after: Table) -> Iterator[dict[str, Any]]:
    """Yield an event for each row that differs. `entry` has the row, from which the register can be written again."""
    devices = [_named(after[place], DEVICES) for place in of_kind(after, DEVICES)]
    numbers = {row[by]: row["number"] for by in ("key", "name") for row in devices if row["key"] or by == "name"}
    for place in {**before, **after}:
        old, new = before.get(place), after.get(place)
        if old == new:
            continue
        kind, _, key = place.partition(" ")
        event = _EVENTS[kind](key, *(None if row is None else _named(row, kind) for row in (old, new)))
        if (whose := event.pop("of", "")) in numbers:
            event["client"] = numbers[whose]
        if kind == FILES and new is None and old is not None and old[1] == LOOSE and old[0] in numbers:
            event |= {"event": "changed", "why": "its token registers it now"}
        yield {**event, "entry": [place, new]}


def _of_device(key: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    assert new is not None, "a device stays in the register"
    kind = "changed"
    if new["ended"] and not (old and old["ended"]):
        kind = "revoked" if new["key"] else "withdrawn"
    elif not (old and old["key"]):
        kind = "joined" if new["key"] else "invited"
    return {"event": kind, "client": new["number"], "name": new["name"], "device": new["key"]}


def _of_renewal(key: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    row = new or old or {}
    kind = "renewal dropped" if new is None else "renewed" if new["since"] else "renewing"
    why = f"the next key of the device whose first is {row['device']}"
    return {"event": kind, "name": row["name"], "device": key, "why": why, "of": row["device"]}


def _of_setting(key: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    return {"event": "set", "why": f"{key} = {new['value'] if new else 'nothing'}"}


def _of_file(key: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    if new is not None:
        kind, why = _STRANGE[new["state"]]
    else:
        loose = old is not None and old["state"] == LOOSE
        kind, why = ("revoked", "the key file without a token is gone") if loose else ("joined", "its key file is back")
    return {"event": kind, "name": key, "device": (new or old or {})["key"], "why": why, "of": key}


_EVENTS = {DEVICES: _of_device, RENEWALS: _of_renewal, SETTINGS: _of_setting, FILES: _of_file}


def refuse_difference(path: Path, table: Table, signed: Table) -> None:
    """Say in which row a register differs from what its log signs.

    Raises:
        RecipeError: always.
    """
    found = next((place for place in {**signed, **table} if signed.get(place) != table.get(place)), "")
    kind, _, key = found.partition(" ")
    old, new = (None if one.get(found) is None else _named(one[found], kind) for one in (signed, table))
    row = old or new or {}
    what = {
        DEVICES: f"device {row.get('number')}, {row.get('name')},",
        RENEWALS: f"the renewal of the key of {row.get('name')}",
        SETTINGS: f"the setting {key}",
        FILES: f"the key file {key}",
    }.get(kind, "the order of its rows")
    if old is None or new is None:
        how = "has another order" if not found else "was added" if old is None else "is missing"
    else:
        name = next(name for name in old if old[name] != new[name])
        how = f"has {name} = {new[name]!r}, and the signed log says {old[name]!r}"
    raise RecipeError(
        f"{path} was changed by somebody else than polyfed: {what} {how}. Move it away, and it is written again from "
        f"the log in {path.parent / LOG}"
    )
