"""Answers what left in a time, from an audit log or from a proof, which is a part of the log that proves itself.

A proof holds neighbouring lines of the log: those of the time that was asked for, and the line before and after them.
So it also shows that no line between them was left out. It is signed like the log: the head holds the Merkle root of
all lines. Lines about other clients are only hashes, because the proof may go to somebody who may not read them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature

from polyfed.core.errors import CheckpointError, DataError
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.core.system.json_and_toml import parse_json
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.keys import canonical, is_tied, key_of, key_text, of_hex, tie_in
from polyfed.privacy.egress.audit_log.log import HEAD, head_of, head_text
from polyfed.privacy.egress.audit_log.verification import public_key, verify

FORMAT = "polyfed log proof 1"

LARGEST = 2**28
"""Largest size in bytes of a proof that is read (inferred)."""

EARLIEST, LATEST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        since: the first moment.
        until: the moment after the last one.
        client: the client's number, or None for all.
    """

    since: datetime = EARLIEST
    until: datetime = LATEST
    client: int | None = None

    def is_about(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is about the client and the time."""
        return self.client in (None, row.get("client")) and self.since <= _time(row) < self.until


@dataclass(frozen=True)
class Excerpt:
    """Neighbouring lines of an audit log.

    Attributes:
        texts: the lines; None for one of which only the hash is given.
        hashes: the hashes of the lines as leaves of the tree.
        start: the place of the first line in the log, from 0.
        head: `lines`, `bytes`, `hash`, `root` and `signature` of the log.
        key: the key of the log; see `log_keys.key_text`.
        outside: the hashes that lead from these lines to the root.
        tie: what the device's key has signed about the log's, or None.
    """

    texts: tuple[bytes | None, ...]
    hashes: tuple[bytes, ...]
    start: int
    head: Mapping[str, Any]
    key: str
    outside: tuple[bytes, ...]
    tie: Mapping[str, str] | None

    def rows(self, asked: Question) -> list[dict[str, Any]]:
        """Return the rows and events that answer a question, each with its `line` in the log, from 1.

        Raises:
            DataError: the lines do not reach over the whole time that was asked for, or do not tell this client.
        """
        told = [None if text is None else json.loads(text) for text in self.texts]
        end = self.start + len(told)
        first, last = (told[0], told[-1]) if told else (None, None)
        reaches = (self.start == 0 or (first is not None and _time(first) < asked.since)) and (
            end == self.head["lines"] or (last is not None and _time(last) >= asked.until)
        )
        if not reaches:
            raise DataError(
                f"the proof holds the lines {self.start + 1} to {end} of {self.head['lines']}, and these do not reach "
                "over the time that was asked for. Ask for a shorter time (--from, --to), or for another proof"
            )
        if asked.client is None and None in told:
            raise DataError("the proof tells one client only; ask for it: --client")
        rows = [dict(row) | {"line": self.start + place} for place, row in enumerate(told, 1) if row is not None]
        rows = [row for row in rows if "seal" not in row and ("verdict" in row or "event" in row)]
        return [row for row in rows if asked.is_about(row)]

    @property
    def hidden(self) -> int:
        """The number of lines of which only the hash is given."""
        return self.texts.count(None)

    def proof(self) -> str:
        """Return the text of a proof."""
        lines = [
            {"hash": leaf.hex()} if text is None else text.decode()
            for text, leaf in zip(self.texts, self.hashes, strict=True)
        ]
        content = {
            "format": FORMAT,
            "start": self.start,
            "lines": lines,
            "outside": [one.hex() for one in self.outside],
            "head": dict(self.head),
            "key": self.key,
        }
        return canonical(content | ({} if self.tie is None else {"tie": dict(self.tie)})).decode() + "\n"


def excerpt_of(folder: Path, asked: Question, key: Path | None = None) -> Excerpt:
    """Verify a log, and return the lines that answer a question, with the line before and the one after them.

    Args:
        folder: the state folder of a device, or the folder of a run.
        key: the public key of the log. By default, the key in the folder.

    Raises:
        DataError: the log is missing or damaged.
    """
    verify(folder, key)
    public = public_key(key or folder / PUBLIC_KEY)
    try:
        head, signature = head_of(folder, public), str(parse_json((folder / HEAD).read_text())["signature"])
        text = (folder / AUDIT).read_bytes()[: head.size] if (folder / AUDIT).exists() else b""
    except (OSError, CheckpointError) as error:
        raise DataError(str(error)) from None
    lines = text.splitlines()
    rows = [json.loads(line) for line in lines]
    within = [place for place, row in enumerate(rows) if asked.since <= _time(row) < asked.until]
    later = next((place for place, row in enumerate(rows) if _time(row) >= asked.until), len(rows))
    first, last = (within[0], within[-1] + 1) if within else (later, later)
    start, end = max(first - 1, 0), min(last + 1, len(rows))
    hashes = [merkle.leaf_hash(line) for line in lines]
    result = [
        line if asked.client in (None, row.get("client")) or place in (start, end - 1) else None
        for place, (line, row) in enumerate(zip(lines[start:end], rows[start:end], strict=True), start)
    ]
    facts = {"lines": head.lines, "bytes": head.size, "hash": head.hash, "root": head.root, "signature": signature}
    return Excerpt(
        tuple(result),
        tuple(hashes[start:end]),
        start,
        facts,
        key_text(public),
        tuple(merkle.outside(hashes, start, end)),
        tie_in(folder),
    )


def read_proof(path: Path) -> Excerpt:
    """Read a proof, and check that its lines lead to the root that its key has signed.

    Raises:
        DataError: they do not, or the file is no proof.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        text = path.read_bytes()
        told = parse_json(text)
        if told["format"] != FORMAT:
            raise ValueError(f"it is a '{told['format']!s:.60}', and this polyfed reads '{FORMAT}'")
        result = _excerpt_in(told)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no proof that can be read: {error!s:.200}") from None
    head = result.head
    try:
        root = merkle.root_from(result.hashes, result.start, head["lines"], result.outside).hex()
        if canonical(told) + b"\n" != text or result.proof().encode() != text:
            raise ValueError("it is not in the form in which polyfed writes proofs")
        if root != head["root"]:
            raise ValueError("its lines do not lead to the Merkle root of the log")
        signed = head_text(head["lines"], head["bytes"], head["hash"], head["root"])
        key_of(result.key).verify(of_hex(head["signature"]), signed)
        for line in result.texts:
            if line is not None:
                _time(parse_json(line))
    except InvalidSignature:
        raise DataError(f"{path} was changed: the signature of the log's head does not fit") from None
    except ValueError as error:
        raise DataError(f"{path} was changed: {error}") from None
    return result


def _excerpt_in(told: Mapping[str, Any]) -> Excerpt:
    texts, hashes = list[bytes | None](), list[bytes]()
    for line in told["lines"]:
        texts.append(line.encode() if isinstance(line, str) else None)
        hashes.append(merkle.leaf_hash(line.encode()) if isinstance(line, str) else bytes.fromhex(line["hash"]))
    head = {name: told["head"][name] for name in ("lines", "bytes", "hash", "root", "signature")}
    if type(told["start"]) is not int or type(head["lines"]) is not int:
        raise ValueError("its places are no numbers")
    outside = tuple(map(bytes.fromhex, told["outside"]))
    tie = told.get("tie")
    return Excerpt(tuple(texts), tuple(hashes), told["start"], head, str(told["key"]), outside, tie)


def check_tie(excerpt: Excerpt) -> None:
    """Refuse an excerpt whose log is said to be that of a device whose key has not signed the log's.

    Raises:
        DataError: the signature does not fit.
    """
    tie = excerpt.tie
    if tie is not None and (set(tie) != {"key", "signature"} or not is_tied(tie, excerpt.key)):
        raise DataError("the key of the log is not signed by the key of the device that it names")


def _time(row: Mapping[str, Any]) -> datetime:
    """Return the time of a line.

    Raises:
        ValueError: it has none.
    """
    result = datetime.fromisoformat(str(row.get("time", "")))
    if result.tzinfo is None:
        raise ValueError("a line has no time in UTC")
    return result
