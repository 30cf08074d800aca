"""Answers "What left device 7 on Tuesday?" from an audit log or a proof, with the keys that a reader trusts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from polyfed.core.errors import DataError, RecipeError, command, counted
from polyfed.core.system.files import AUDIT, CERTIFICATE, EGRESS
from polyfed.experiment.certificate.issue import PublicKeys
from polyfed.experiment.certificate.verification import verify_certificate
from polyfed.privacy.egress.audit_log.keys import key_text
from polyfed.privacy.egress.audit_log.proof import (
    EARLIEST,
    LATEST,
    Excerpt,
    Question,
    check_tie,
    excerpt_of,
    read_proof,
)
from polyfed.privacy.egress.audit_log.verification import public_key
from polyfed.privacy.egress.ledger import TO_CLIENT
from polyfed.report.pages.log_page import sums
from polyfed.transport.logins import fingerprint
from polyfed.transport.register_log import LOG as REGISTER_LOG


@dataclass(frozen=True)
class LogAnswer:
    """The answer to a question.

    Attributes:
        asked: the question.
        excerpt: the lines of the log behind it.
        rows: the rows that answer it.
        events: the enrolments and refusals of that time.
        names: names of clients.
        statements: what the lines prove and what not, in sentences.
    """

    asked: Question
    excerpt: Excerpt
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    names: Mapping[int, str]
    statements: tuple[str, ...]

    @property
    def title(self) -> str:
        """What was asked."""
        who = "the clients" if self.asked.client is None else _named(self.asked.client, self.names)
        since = "" if self.asked.since == EARLIEST else f" from {_moment(self.asked.since)}"
        until = "" if self.asked.until == LATEST else f" until {_moment(self.asked.until)}"
        return f"What left {who}{since}{until}"

    @property
    def sums(self) -> list[dict[str, Any]]:
        """The rows, summed up."""
        return sums(self.rows, self.names)

    def content(self) -> dict[str, Any]:
        """Return what `polyfed audit-log show --json` prints."""
        names = {str(client): name for client, name in self.names.items()}
        rows, events = ([dict(row) for row in some] for some in (self.rows, self.events))
        told = {"statements": list(self.statements), "names": names, "sums": self.sums}
        return {**told, "rows": rows, "events": events}


def question(since: str | None, until: str | None, client: int | None) -> Question:
    """Return the question of a command line.

    Args:
        since: the first day or moment.
        until: the last day, or the moment after the last one.

    Raises:
        RecipeError: a text is no time.
    """
    first = EARLIEST if since is None else _parsed("--from", since)
    last = LATEST if until is None else _parsed("--to", until)
    if until is not None and len(until) == len("2027-03-02"):
        last += timedelta(days=1)
    if first >= last:
        raise RecipeError(f"--from {since} is not before --to {until}")
    return Question(first, last, client)


def _parsed(option: str, text: str) -> datetime:
    try:
        result = datetime.fromisoformat(text)
        return (result if result.tzinfo else result.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise RecipeError(f"{option} {text}: write a day or a moment, as 2027-03-02 or 2027-03-02T08:00") from None


def answer_of(
    log: Path, asked: Question, key: Path | None = None, keys: Path | None = None, *, received: bool = False
) -> LogAnswer:
    """Answer a question from a log or from a proof.

    Args:
        log: the state folder of a device, the folder of a run, that of a server, or a proof.
        key: the public key of the log.
        keys: a folder with the public keys that the reader trusts.
        received: whether to tell also what the client received.

    Raises:
        DataError: the log or the proof does not hold, or its key is not one of the trusted.
    """
    if log.is_dir() and not (log / AUDIT).exists() and (log / REGISTER_LOG / AUDIT).exists():
        log /= REGISTER_LOG
    if log.is_dir() and not (log / AUDIT).exists() and (log / EGRESS).exists():
        raise DataError(
            f"{log} is a simulation, whose ledger has no times. Its certificate signs the ledgers of all clients: "
            f"{command('certify', log)}"
        )
    excerpt = excerpt_of(log, asked, key) if log.is_dir() else read_proof(log)
    check_tie(excerpt)
    if key is not None and key_text(public_key(key)) != excerpt.key:
        raise DataError(f"{log} is signed with the key {excerpt.key}, and not with {key}")
    trusted = None if keys is None else PublicKeys(keys)
    device = "" if excerpt.tie is None else fingerprint(excerpt.tie["key"].encode())
    known = trusted is not None and (excerpt.key in trusted.logs or device in trusted.devices)
    if trusted is not None and not known:
        raise DataError(f"neither the key of {log} nor that of its device is in {trusted.folder}")
    try:
        told = excerpt.rows(asked)
    except ValueError as error:
        raise DataError(f"{log} cannot be read: {error}") from None
    rows, events = ([row for row in told if ("event" in row) is event] for event in (False, True))
    result = [row for row in rows if received or row.get("destination") != TO_CLIENT]
    names = _names(log, rows, device, trusted, keys)
    statements = (_sum(result), *_events(events), *_proved(excerpt, device, names, trusted=known or key is not None))
    return LogAnswer(asked, excerpt, result, events, names, statements)


def _names(
    log: Path, rows: Sequence[Mapping[str, Any]], device: str, trusted: PublicKeys | None, keys: Path | None
) -> dict[int, str]:
    """Return the names of clients: of a device from its trusted key, of a run from its certificate."""
    if trusted is not None and device in trusted.devices:
        return {client: trusted.devices[device] for client in {row["client"] for row in rows}}
    if (log / CERTIFICATE).is_file():
        result = verify_certificate(log / CERTIFICATE, keys)
        if not result.faults:
            return {one["client"]: one["name"] for one in result.content["clients"] if one["name"]}
    return {}


def _sum(rows: Sequence[Mapping[str, Any]]) -> str:
    left = [row for row in rows if row["verdict"] == "allowed" and row["destination"] != TO_CLIENT]
    refused = sum(row["verdict"] != "allowed" for row in rows)
    size = sum(row["bytes"] for row in left)
    more = f" The policy refused {counted(refused, 'part', 'parts')}." if refused else ""
    return f"{counted(len(left), 'part of a message', 'parts of messages')} left, {size:,} bytes together.{more}"


def _events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    if not events:
        return []
    refused = sum(int(row.get("times", 1)) for row in events if row["event"] == "refused")
    others = sum(row["event"] != "refused" for row in events)
    kinds = counted(others, "enrolment or change", "enrolments and changes"), counted(refused, "refusal", "refusals")
    return [f"{', '.join(kinds)}."]


def _proved(excerpt: Excerpt, device: str, names: Mapping[int, str], *, trusted: bool) -> list[str]:
    """Return what the lines prove, and what they do not."""
    first, last, size = excerpt.start + 1, excerpt.start + len(excerpt.texts), excerpt.head["lines"]
    whose = f"the key {excerpt.key}"
    if device:
        whose += f", which the key {device} has signed"
    checked = "which you trust" if trusted else "which nothing here vouches for (--key, --keys)"
    result = [
        f"Lines {first} to {last} of {size:,} of the log were checked: none of them was changed, added or left out "
        f"since they were signed with {whose}, {checked}."
    ]
    if excerpt.hidden:
        result.append(f"{counted(excerpt.hidden, 'line is', 'lines are')} about others, and only the hashes are here.")
    return [*result, "The times are those of the clock of the machine that wrote the log."]


def _named(client: int, names: Mapping[int, str]) -> str:
    return f"client {client} ({names[client]})" if names.get(client) else f"client {client}"


def _moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
