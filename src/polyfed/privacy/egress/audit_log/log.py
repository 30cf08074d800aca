"""Audit logs: the rows of a ledger as a chain of lines that nobody can change unnoticed without the private key.

A device keeps one log for all runs in its state folder. The server of a deployment keeps a log in the folder of the
run. In `audit.jsonl`, every part of a message has a line. On a device, every part of a reply that the egress gate
refused has a line too. A line looks like this:

    {"time": ..., "run": ..., ..., "verdict": "allowed", "sha256": CONTENT, "previous": HASH OF THE LINE BEFORE}

An *event* has a line too: an enrolment or a refusal, as a device, a server, or a server's register of devices sees it.

    {"time": ..., "event": "refused", "client": ..., "why": ..., "previous": HASH OF THE LINE BEFORE}

Lines are written in groups. A device writes a group for each request, and a server writes a group for each round. The
last line of each group is its seal, which is signed with the key of the log (Ed25519). `audit-head.json` is signed too.
It holds the length of the log, so that verification notices lines that are missing at the end, and the Merkle tree of
all lines, so that some of them can be proved without the others (`audit_log_proof`).

For each request, a device first writes the group of lines to its disk, and then sends its reply. The reply carries the
hash of the seal, and the server writes this hash into its own rows. So nobody can rewrite one log unnoticed while the
other log exists. Anybody who has the private key of a log can write a different log.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from polyfed.core.errors import CheckpointError
from polyfed.core.system.files import AUDIT, PUBLIC_KEY, append_whole, lock, replace_text, sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.keys import of_hex

if TYPE_CHECKING:
    from polyfed.privacy.egress.ledger import Entry

HEAD, PRIVATE_KEY, LOCK = "audit-head.json", "audit-key.pem", "audit.lock"
"""Names of the files in the same folder as the log."""

START = "0" * 64
"""The value that stands for the hash of the line before the first line."""

LONGEST = 1000
"""Most characters of a text in an event. Somebody else may have written it."""

SIGNATURE = ',"signature":"'
"""The text that stands in a seal directly before the signature."""


@dataclass(frozen=True)
class Head:
    """The length of a log and the hash of its last line.

    Attributes:
        lines: number of lines, including seals.
        size: size of the file in bytes.
        hash: SHA-256 of the last line.
        tree: the roots of the complete subtrees of the Merkle tree of all lines; see `merkle.grown`.
    """

    lines: int = 0
    size: int = 0
    hash: str = START
    tree: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        """The Merkle root of all lines."""
        return merkle.joined([bytes.fromhex(one) for one in self.tree]).hex()

    def signed_bytes(self) -> bytes:
        """Return the bytes that the signature of the head covers."""
        return head_text(self.lines, self.size, self.hash, self.root)


def head_text(lines: int, size: int, last: str, root: str) -> bytes:
    """Return the bytes that the signature of a head covers.

    Args:
        last: SHA-256 of the last line.
        root: Merkle root of all lines.
    """
    return f"polyfed audit head {lines} {size} {last} {root}".encode()


class AuditLog:
    """The audit log of one device or server.

    Args:
        folder: the device's state folder, or the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> bool:
        """Make the key of the log if there is none. Return whether this call made the key.

        Raises:
            CheckpointError: a log exists, but its key is missing.
            OSError: the key cannot be written.
        """
        with self._locked():
            return self._prepare()

    def append(self, entries: Sequence["Entry"], run: str) -> str:
        """Write a group of rows and its seal to the disk. If writing fails, none of these lines stays in the log.

        Args:
            entries: the entries of one request to one client, or of one round of a run.
            run: the run's name.

        Returns:
            The hash of the seal, or "" if there are no entries.

        Raises:
            CheckpointError: the log on disk is damaged.
            OSError: the log cannot be written.
        """
        if not entries:
            return ""
        from polyfed.privacy.egress.ledger import lines  # only here: it imports PyTorch, and a register does without

        last, clients = entries[-1], {client for entry in entries for client in entry.clients}
        place: dict[str, Any] = {"run": run, "round": last.round}
        if len(clients) == 1:
            place |= {"ask": last.request, "client": min(clients)}
        return self._add([json.loads(row) for row in lines(entries, run, contents=True)], place)

    def note(self, events: Sequence[Mapping[str, Any]], place: Mapping[str, Any] | None = None) -> None:
        """Write events and their seal to the disk, all or none of them.

        Args:
            events: `event`, its kind, and what else is known: `client`, `name`, `device` (the fingerprint of its key),
                `run`, `why`.
            place: further entries of the seal.

        Raises:
            CheckpointError, OSError: see `append`.
        """
        if not events:
            return
        rows = [{key: v[:LONGEST] if isinstance(v, str) else v for key, v in one.items()} for one in events]
        clients = {row.get("client") for row in rows}
        whose = {} if len(clients) > 1 or None in clients else {"client": clients.pop()}
        self._add(rows, {"event": rows[-1]["event"], **whose, **(place or {})})

    def resumed(self, round: int) -> None:
        """Record that a run resumes after this round, or from the start (-1).

        The rows of later rounds stay in the log, because their messages were sent.

        Raises:
            CheckpointError, OSError: see `append`.
        """
        if self._has_messages():
            self._add([], {"resumed_after": round})

    def _has_messages(self) -> bool:
        """Return whether a line is about a message: enrolments alone begin no run."""
        path = self.folder / AUDIT
        if not path.exists():
            return False
        with path.open("rb") as file:
            return any(b'"verdict":' in line for line in file)

    @contextmanager
    def alone(self) -> Iterator[Ed25519PrivateKey]:
        """Lock the log against other processes, and yield its key, which is made if there is none.

        Raises:
            CheckpointError, OSError: see `prepare`.
        """
        with self._locked():
            self._prepare()
            yield private_key(self.folder / PRIVATE_KEY)

    def _add(self, rows: list[dict[str, Any]], place: dict[str, Any]) -> str:
        with self.alone() as key:
            head = self._checked_head(key.public_key())
            text, after = _chained(rows, place, head, key)
            path = self.folder / AUDIT
            try:
                append_whole(path, text)
                sync(path)
                self._write_head(after, key)
            except OSError:
                os.truncate(path, head_of(self.folder).size)  # the log must have the length in the signed head
                raise
        return after.hash

    def _prepare(self) -> bool:
        path = self.folder / PRIVATE_KEY
        if path.exists():
            return False
        if (self.folder / AUDIT).exists():
            raise CheckpointError(
                f"{path} is missing, and {AUDIT} beside it is signed with it. Restore it from a copy, or move "
                f"{AUDIT} and {HEAD} away to begin a new log"
            )
        with making_key(self.folder) as key:
            self._write_head(Head(), key)
        return True

    def _checked_head(self, key: Ed25519PublicKey) -> Head:
        """Return the head, and cut the log to the length that the head states.

        An interrupted write can leave further lines at the end of the log. The messages of these lines were not sent.
        """
        head, path = head_of(self.folder, key), self.folder / AUDIT
        path.touch()
        size = path.stat().st_size
        if size < head.size or (head.size and last_hash(path, head.size) != head.hash):
            raise CheckpointError(
                f"{path} is damaged: it does not end as {HEAD} says; `polyfed audit-log verify` names the line. "
                f"Restore both files from a copy, or move them away to begin a new log"
            )
        if size > head.size:
            os.truncate(path, head.size)
        return head

    def _write_head(self, head: Head, key: Ed25519PrivateKey) -> None:
        row = {"lines": head.lines, "bytes": head.size, "hash": head.hash, "tree": head.tree}
        replace_text(self.folder / HEAD, json.dumps(row | {"signature": key.sign(head.signed_bytes()).hex()}))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the log against other processes. Only this process's user can read files made in the `with` block."""
        before = os.umask(0o077)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOCK).open("w") as file:
                lock(file)
                yield
        finally:
            os.umask(before)


@contextmanager
def making_key(folder: Path) -> Iterator[Ed25519PrivateKey]:
    """Make a key. Its public part is in the folder before the `with` block, and its private part after it."""
    key, path = Ed25519PrivateKey.generate(), folder / PRIVATE_KEY
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    replace_text(folder / PUBLIC_KEY, public.decode())
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    sync(draft)
    yield key
    os.replace(draft, path)


def _chained(
    rows: list[dict[str, Any]], place: dict[str, Any], head: Head, key: Ed25519PrivateKey
) -> tuple[bytes, Head]:
    """Return the lines of a group with their seal, and the new head of the log, which counts these lines.

    Args:
        rows: the rows of the group.
        place: the place of the group: run and round, and on a device also the request and the client. The seal
            stores these entries.
        head: the head of the log before the group.
        key: the private key of the log.
    """
    now, previous, written = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}, head.hash, list[bytes]()
    for row in [*rows, place | {"seal": len(rows)}]:
        line = json.dumps(now | row | {"previous": previous}, separators=(",", ":"))
        if "seal" in row:
            line = f'{line[:-1]}{SIGNATURE}{key.sign(line.encode()).hex()}"}}'
        previous = hashlib.sha256(line.encode()).hexdigest()
        written.append(line.encode() + b"\n")
    text, before = b"".join(written), [bytes.fromhex(one) for one in head.tree]
    tree, _ = merkle.grown(before, head.lines, (line.removesuffix(b"\n") for line in written))
    after = tuple(one.hex() for one in tree)
    return text, Head(head.lines + len(written), head.size + len(text), previous, after)


def head_of(folder: Path, key: Ed25519PublicKey | None = None) -> Head:
    """Read the head from the disk. If a key is given, check the signature.

    Raises:
        CheckpointError: the head is missing or damaged.
    """
    path = folder / HEAD
    try:
        row = parse_json(path.read_text())
        head = Head(int(row["lines"]), int(row["bytes"]), str(row["hash"]), tuple(map(str, row["tree"])))
        if key is not None:
            key.verify(of_hex(row["signature"]), head.signed_bytes())
    except InvalidSignature:
        raise CheckpointError(f"{path} is damaged: its signature is not one of the log's own key") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or missing: {error}") from None
    return head


def last_hash(path: Path, end: int) -> str:
    """Return the SHA-256 of the line that ends at this byte."""
    return hashlib.sha256(last_line(path, end)).hexdigest()


def last_line(path: Path, end: int) -> bytes:
    """Return the line that ends at this byte."""
    size = min(end, 1 << 16)
    with path.open("rb") as file:
        file.seek(end - size)
        tail = file.read(size)
    return tail.removesuffix(b"\n").rpartition(b"\n")[2]


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key of a log.

    Raises:
        CheckpointError: the file is damaged, or holds another kind of key.
        OSError: the file cannot be read.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise CheckpointError(f"{path} holds no Ed25519 key. Restore it from a copy")
    return key
