"""Verification of an audit log: check every hash and signature, and name the first bad line."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from polyfed.core.errors import CheckpointError, DataError
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.mapping import mapped
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.keys import of_hex
from polyfed.privacy.egress.audit_log.log import HEAD, SIGNATURE, START, head_of, last_hash


@dataclass(frozen=True)
class Verified:
    """The summary of an undamaged log.

    Attributes:
        rows: number of rows. Each row describes a part of a message that was received, sent or refused.
        seals: number of signed lines.
        first: time of the first line, or "" if the log is empty.
        last: time of the last line, or "" if the log is empty.
    """

    rows: int
    seals: int
    first: str
    last: str


def verify(folder: Path, key: Path | None = None, *, start: int = 0) -> Verified:
    """Check every hash and signature of a log.

    Args:
        folder: the device's state folder, or the folder of the run.
        key: path of the log's public key (PEM), copied when the device was set up. By default, the key in the folder
            is used, but somebody who replaces the whole log can replace that key too.
        start: the byte at which the first line to check begins. Nothing is said about the lines before it.

    Raises:
        DataError: a file is missing, or the log is damaged. The text names the first bad line.
    """
    path, public = folder / AUDIT, public_key(key or folder / PUBLIC_KEY)
    try:
        head, text = head_of(folder, public), mapped(path) if path.exists() else b""
    except (OSError, CheckpointError) as error:
        raise DataError(f"{error}") from None
    signed_lines = bytes(text[start : head.size]).splitlines()
    rows, seals, times, previous = 0, 0, list[str](), last_hash(path, start) if start else START
    number = before = head.lines - len(signed_lines) if start else 0
    sealed, tree = True, tuple[bytes, ...]()
    for number, line in enumerate(signed_lines, before + 1):
        row = _row(path, number, line)
        if row.get("previous") != previous:
            raise DataError(
                f"{path} line {number} does not follow from line {number - 1}: one of them was changed, or lines "
                "between them were added or removed"
            )
        previous, sealed = hashlib.sha256(line).hexdigest(), "seal" in row
        if not start:
            tree, _ = merkle.grown(tree, number - 1, [line])
        if sealed and not _is_signed(line, public):
            raise DataError(f"{path} line {number}: its signature is not one of the key {key or folder / PUBLIC_KEY}")
        rows, seals = rows + (not sealed), seals + sealed
        times.append(str(row.get("time", "")))
    if (number, min(len(text), head.size), previous) != (head.lines, head.size, head.hash) or not sealed:
        raise DataError(f"{path} ends after line {number}, but {HEAD} is signed for {head.lines} lines")
    if not start and tuple(one.hex() for one in tree) != head.tree:
        raise DataError(f"{path} holds other lines than {HEAD} is signed for: their Merkle root differs")
    if len(text) > head.size:
        raise DataError(
            f"{path} line {number + 1} was never signed. If writing was interrupted, nothing of it left, and the "
            "next line that is written replaces it"
        )
    return Verified(rows, seals, times[0] if times else "", times[-1] if times else "")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{path} line {number} cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path} line {number} is no row of a log")
    return row


def _is_signed(line: bytes, key: Ed25519PublicKey) -> bool:
    """Return whether the signature of a seal matches the seal's text."""
    text, _, signature = line.decode().rpartition(SIGNATURE)
    try:
        key.verify(of_hex(signature.removesuffix('"}')), f"{text}}}".encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(path: Path) -> Ed25519PublicKey:
    """Read the public key of a log.

    Raises:
        DataError: the file cannot be read, or holds another kind of key.
    """
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"public key {path}: {error}. Give the {PUBLIC_KEY} of the log: --key PUBLIC") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DataError(f"public key {path} is no Ed25519 key. Give the {PUBLIC_KEY} of the log: --key PUBLIC")
    return key
