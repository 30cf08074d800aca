"""The audit log of a device: the rows of its ledger as a chain that nobody can change without its key.

`audit.jsonl` in the folder of the node has a line for every crossing and every refusal, of all runs:

    {"time": ..., "run": ..., ..., "verdict": "allowed", "sha256": CONTENT, "previous": HASH OF THE LINE BEFORE}

The lines of each request end with a seal: a line that the device signs with its own key (Ed25519). So the last line of
every round is a signed one. `audit-head.json` is signed too and says how long the log is, so that lines missing at its
end are found. All of this is on the disk before a reply leaves. Who has the private key can write another log.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from polyfed.core.errors import CheckpointError, DataError
from polyfed.core.files import AUDIT, PUBLIC_KEY, replace_text, sync
from polyfed.privacy.ledger import Entry, lines

HEAD, PRIVATE_KEY, LOCK = "audit-head.json", "audit-key.pem", "audit.lock"
"""Files beside the log in the folder of a node."""

START = "0" * 64
"""The hash before the first line."""

_SIGNATURE = ',"signature":"'


@dataclass(frozen=True)
class Head:
    """How far a log has come.

    Attributes:
        lines: number of lines, seals included.
        size: of the file, in bytes.
        hash: SHA-256 of the last line.
    """

    lines: int = 0
    size: int = 0
    hash: str = START

    def signed_bytes(self) -> bytes:
        """What the signature of the head covers."""
        return f"polyfed audit head {self.lines} {self.size} {self.hash}".encode()


class AuditLog:
    """The audit log of one node.

    Args:
        folder: of the node.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> bool:
        """Make the key if there is none; whether it was made now.

        Raises:
            CheckpointError: there is a log, but its key is missing.
            OSError: the key cannot be written.
        """
        with self._alone():
            return self._prepare()

    def append(self, entries: Sequence[Entry], run: str) -> None:
        """Write the rows of a request and their seal, all or none of them; they are on the disk when this returns.

        Args:
            entries: of one request of one client.
            run: the run's name.

        Raises:
            CheckpointError: the log on disk is damaged.
            OSError: it cannot be written.
        """
        if not entries:
            return
        with self._alone():
            self._prepare()
            key = _private_key(self.folder / PRIVATE_KEY)
            head = self._checked_head(key.public_key())
            text, after = _chained(entries, run, head, key)
            path = self.folder / AUDIT
            try:
                with path.open("ab") as file:
                    file.write(text)
                sync(path)
                self._write_head(after, key)
            except OSError:
                os.truncate(path, _head(self.folder).size)  # what the signed head says is what there is
                raise

    def _prepare(self) -> bool:
        path = self.folder / PRIVATE_KEY
        if path.exists():
            return False
        if (self.folder / AUDIT).exists():
            raise CheckpointError(
                f"{path} is missing, and {AUDIT} beside it is signed with it. Restore it from a copy, or move "
                f"{AUDIT} and {HEAD} away to begin a new log"
            )
        key = Ed25519PrivateKey.generate()
        pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        replace_text(self.folder / PUBLIC_KEY, public.decode())
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private)
        sync(draft)
        self._write_head(Head(), key)
        os.replace(draft, path)
        return True

    def _checked_head(self, key: Ed25519PublicKey) -> Head:
        """The head; what was written after it, when an earlier write did not end, is removed: nothing of it left."""
        head, path = _head(self.folder, key), self.folder / AUDIT
        path.touch()
        size = path.stat().st_size
        if size < head.size or (head.size and _last_hash(path, head.size) != head.hash):
            raise CheckpointError(
                f"{path} is damaged: it does not end as {HEAD} says; `polyfed audit-log verify` names the line. "
                f"Restore both files from a copy, or move them away to begin a new log"
            )
        if size > head.size:
            os.truncate(path, head.size)
        return head

    def _write_head(self, head: Head, key: Ed25519PrivateKey) -> None:
        row = {"lines": head.lines, "bytes": head.size, "hash": head.hash}
        replace_text(self.folder / HEAD, json.dumps(row | {"signature": key.sign(head.signed_bytes()).hex()}))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process writes this log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class Verified:
    """A log that is whole.

    Attributes:
        rows: crossings and refusals.
        seals: signed lines.
        first: time of the first line, or "" where there is none.
        last: time of the last line.
    """

    rows: int
    seals: int
    first: str
    last: str


def verify(folder: Path, key: Path | None = None) -> Verified:
    """Check every hash and signature of a log.

    Args:
        folder: of the node.
        key: the device's public key (PEM), as it was handed over when the device was set up; by default the one in the
            folder, which whoever replaced the whole log replaced too.

    Raises:
        DataError: a file is missing, or the log is damaged; the text names the first bad line.
    """
    path, public = folder / AUDIT, _public_key(key or folder / PUBLIC_KEY)
    try:
        head, text = _head(folder, public), path.read_bytes() if path.exists() else b""
    except (OSError, CheckpointError) as error:
        raise DataError(f"{error}") from None
    rows, seals, times, previous = 0, 0, list[str](), START
    sealed, number = True, 0
    for number, line in enumerate(text[: head.size].splitlines(), 1):
        row = _row(path, number, line)
        if row.get("previous") != previous:
            raise DataError(
                f"{path} line {number} does not follow from line {number - 1}: one of them was changed, or lines "
                "between them were added or removed"
            )
        previous, sealed = hashlib.sha256(line).hexdigest(), "seal" in row
        if sealed and not _is_signed(line, public):
            raise DataError(f"{path} line {number}: its signature is not one of the key {key or folder / PUBLIC_KEY}")
        rows, seals = rows + (not sealed), seals + sealed
        times.append(str(row.get("time", "")))
    if (number, len(text[: head.size]), previous) != (head.lines, head.size, head.hash) or not sealed:
        raise DataError(f"{path} ends after line {number}, but {HEAD} is signed for {head.lines} lines")
    if len(text) > head.size:
        raise DataError(
            f"{path} line {number + 1} was never signed. If writing was interrupted, nothing of it left, and the "
            "device removes it before it answers again"
        )
    return Verified(rows, seals, times[0] if times else "", times[-1] if times else "")


def _chained(entries: Sequence[Entry], run: str, head: Head, key: Ed25519PrivateKey) -> tuple[bytes, Head]:
    """The lines of a request with their seal, and the head after them."""
    now, previous, text, count = datetime.now(UTC).isoformat(timespec="milliseconds"), head.hash, b"", 0
    entry = entries[-1]
    place = {"run": run, "round": entry.round, "ask": entry.request, "client": entry.clients[0]}
    rows = [{"time": now} | json.loads(row) for row in lines(entries, run, contents=True)]
    for row in [*rows, {"time": now} | place | {"seal": len(rows)}]:
        line = json.dumps(row | {"previous": previous}, separators=(",", ":"))
        if "seal" in row:
            line = f'{line[:-1]}{_SIGNATURE}{key.sign(line.encode()).hex()}"}}'
        previous = hashlib.sha256(line.encode()).hexdigest()
        text, count = text + line.encode() + b"\n", count + 1
    return text, Head(head.lines + count, head.size + len(text), previous)


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} line {number} cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path} line {number} is no row of a log")
    return row


def _is_signed(line: bytes, key: Ed25519PublicKey) -> bool:
    """Whether a seal has the signature of its own text."""
    text, _, signature = line.decode().rpartition(_SIGNATURE)
    try:
        key.verify(bytes.fromhex(signature.removesuffix('"}')), f"{text}}}".encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _head(folder: Path, key: Ed25519PublicKey | None = None) -> Head:
    """The head on disk, its signature checked if a key is given.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / HEAD
    try:
        row = json.loads(path.read_text())
        head = Head(int(row["lines"]), int(row["bytes"]), str(row["hash"]))
        if key is not None:
            key.verify(bytes.fromhex(row["signature"]), head.signed_bytes())
    except InvalidSignature:
        raise CheckpointError(f"{path} is damaged: its signature is not one of the device's key") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or missing: {error}") from None
    return head


def _last_hash(path: Path, end: int) -> str:
    """SHA-256 of the line that ends at this byte."""
    size = min(end, 1 << 16)
    with path.open("rb") as file:
        file.seek(end - size)
        tail = file.read(size)
    return hashlib.sha256(tail.removesuffix(b"\n").rpartition(b"\n")[2]).hexdigest()


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise CheckpointError(f"{path} holds no Ed25519 key. Restore it from a copy")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"public key {path}: {error}. Give the {PUBLIC_KEY} of the device: --key PUBLIC") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DataError(f"public key {path} is no Ed25519 key. Give the {PUBLIC_KEY} of the device: --key PUBLIC")
    return key
