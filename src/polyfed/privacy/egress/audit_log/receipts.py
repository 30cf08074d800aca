"""What the ledger of one client in one run says, in a form that server and device sign alike.

The ledger of a client is the set of its rows, in the order of their requests: a request that is sent again, and whose
reply is the same bit for bit, adds nothing. A device draws keys and shares of secure aggregation anew for a repeated
request, and only the last ones count, which the server uses. So both sides come to the same root (`ClientLedger.root`),
although one of them may have been killed and have repeated a part of the run.

A device signs a *receipt* with the key of its audit log: run, client, and the root over its own rows. It leaves out the
requests that the server names as unanswered, because there the two sides may rightly differ: a request was lost on its
way, or a reply came too late. The device's login key signs the key of the log, so that whoever knows the device's
public key can check the receipt (`log_keys`). A device of a silo also signs which of its rows left for the server,
because the server sees no others; the edge of the silo signs what `edge_receipts` says.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError
from polyfed.core.system.files import AUDIT
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.mapping import mapped
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.keys import canonical, key_text, signed, tie_in
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.privacy.egress.ledger import DRAWN, NO_RUN, TO_CLIENT

Place = tuple[int, int]
"""(round, number of the request in the round)"""

LeftOut = tuple[int, ...]
"""A place, or (round, first number, end): all requests of a round from one number on, and before the other."""

TO_SERVER = "server"
"""The destination of rows about what left for the server."""

APART = ("time", "previous", "device_seal", "came")
"""The keys of a row that say when and by whom it was logged, and not what was sent. A device knows no `came`."""

RECEIPT = b"polyfed receipt 1\n"
"""What the signed text of a receipt begins with, so that no other signature of the key passes for one."""


STRICT = ConfigDict(extra="forbid", strict=True)

Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


@with_config(STRICT)
class Rows(TypedDict):
    """A part of a ledger: the number of its rows, and their Merkle root."""

    rows: Annotated[int, Field(ge=0, lt=2**53)]
    root: Digest


class SaidOfRun(TypedDict):
    """What every receipt says. Another machine wrote it, so every part has one form."""

    run: Annotated[str, Field(max_length=200)]
    rows: Annotated[int, Field(ge=0, lt=2**53)]
    root: Digest
    unanswered: list[list[int]]
    policy: Digest
    time: Annotated[str, Field(max_length=40)]


@with_config(STRICT)
class Said(SaidOfRun):
    """What a device signs."""

    client: int
    left: NotRequired[Rows]


@with_config(STRICT)
class Tie(TypedDict):
    """What the key of a device signs about that of its log."""

    key: Annotated[str, Field(max_length=4000)]
    signature: Annotated[str, Field(max_length=4000)]


class Signatures(TypedDict):
    """The signatures of a receipt."""

    key: Annotated[str, Field(max_length=100)]
    signature: Annotated[str, Field(max_length=200)]
    tie: NotRequired[Tie]


@with_config(STRICT)
class Receipt(Signatures):
    """A receipt with its signatures, as it travels and as a certificate holds it."""

    receipt: Said


_RECEIPT: TypeAdapter[Any] = TypeAdapter(Receipt)


def receipt_in(header: Mapping[str, Any], form: TypeAdapter[Any] = _RECEIPT) -> dict[str, Any]:
    """Return the receipt in the header of an answer, by default that of a device.

    Raises:
        ValueError: it has not the form of one.
    """
    result = {name: header[name] for name in ("receipt", "key", "signature", "tie") if name in header}
    try:
        form.validate_python(result)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"its receipt has another form: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return result


def receipts_text(kept: Mapping[str, Any]) -> str:
    """Return the text of the file of a run's receipts, in its one form: later ones stand behind the earlier ones."""
    return json.dumps(kept, indent=1)


@dataclass(frozen=True)
class ClientLedger:
    """The rows of one client in one run.

    Attributes:
        rows: place, whether the client sent it, and text of each row, sorted and without repetitions.
    """

    rows: tuple[tuple[Place, bool, bytes], ...] = ()

    @cached_property
    def root(self) -> str:
        """The Merkle root of the rows."""
        return merkle.root_of(text for _, _, text in self.rows).hex()

    @property
    def unanswered(self) -> list[Place]:
        """The requests without a row of a reply."""
        answered = {place for place, up, _ in self.rows if up}
        return sorted({place for place, up, _ in self.rows if not up} - answered)

    @property
    def left(self) -> "ClientLedger":
        """The rows about what left for the server."""
        return ClientLedger(tuple(row for row in self.rows if json.loads(row[2])["destination"] == TO_SERVER))

    @property
    def told(self) -> Rows:
        """How a receipt or a certificate names this ledger."""
        return {"rows": len(self.rows), "root": self.root}

    def without(self, places: Collection[LeftOut]) -> "ClientLedger":
        """Return the ledger without these requests."""
        single = {place for place in places if len(place) == 2}
        ranges = [place for place in places if len(place) > 2]

        def stays(place: Place) -> bool:
            within = any(place[0] == round and first <= place[1] < end for round, first, end in ranges)
            return place not in single and not within

        return ClientLedger(tuple(row for row in self.rows if stays(row[0])))

    def bytes_of(self, *, up: bool) -> int:
        """Return how many bytes the rows that the client sent, or those that it received, name."""
        return sum(int(json.loads(text)["bytes"]) for _, own, text in self.rows if own == up)


def ledgers(rows: Iterable[Mapping[str, Any]], run: str) -> dict[int, ClientLedger]:
    """Return the ledger of each client in a run.

    What a device told at enrolment is in its log without the name of the run, which it did not know yet. Such rows
    belong to the run of the next row.

    Args:
        rows: the rows of a ledger or of an audit log, in the order of the file. Rows about parts that were refused are
            left out, because these did not leave.

    Raises:
        ValueError: a row lacks its place, or it is no place.
    """
    result, enrolled = dict[int, dict[bytes, tuple[Place, bool, bytes]]](), list[Mapping[str, Any]]()
    for row in rows:
        if "verdict" not in row:
            continue
        if row["verdict"] == "allowed" and row.get("run") == NO_RUN:
            enrolled.append(row)
            continue
        for one in [*enrolled, row] if row.get("run") == run else ():
            if one["verdict"] == "allowed":
                entry = _entry(one, run)
                again = (one.get("message"), one.get("field")) in DRAWN
                key = (
                    _text({name: value for name, value in one.items() if name != "sha256"}, run) if again else entry[2]
                )
                result.setdefault(int(one["client"]), {})[key] = entry
        enrolled = []
    return {client: ClientLedger(tuple(sorted(own.values()))) for client, own in sorted(result.items())}


def _entry(row: Mapping[str, Any], run: str) -> tuple[Place, bool, bytes]:
    if not all(type(row.get(name)) is int for name in ("client", "round", "ask", "bytes")):
        raise ValueError("a row has no client, round, ask or bytes")
    return (row["round"], row["ask"]), row.get("destination") != TO_CLIENT, _text(row, run)


def _text(row: Mapping[str, Any], run: str) -> bytes:
    """Return what both sides sign about a row."""
    return canonical({key: value for key, value in row.items() if key not in APART} | {"run": run})


def start_of(path: Path, run: str) -> int:
    """Return the byte of an audit log at which the rows of a run begin, or what its devices told before it had a name.

    The end of the file if the run has no rows.
    """
    text = mapped(path)
    match = re.search(b'"run":"%s"' % re.escape(run.encode()), text)
    end = len(text) if match is None else _begin(text, match.start())
    while end:
        begin = _begin(text, end - 1)
        line = bytes(text[begin:end])
        if b'"run":"%s"' % NO_RUN.encode() not in line and b'"event":' not in line:
            break
        end = begin
    return end


def _begin(text: bytes | memoryview, place: int) -> int:
    """Return where the line begins that has the byte at a place."""
    size = 1 << 12
    while (at := bytes(text[max(place - size, 0) : place]).rfind(b"\n")) < 0 and size < place:
        size *= 2
    return max(place - size, 0) + at + 1


def log_rows(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a ledger or of an audit log, from the byte `start` on.

    Raises:
        DataError: the file is missing, or a line is none of a ledger. The text names the line.
    """
    rows = list[dict[str, Any]]()
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                row = parse_json(line)
                if not isinstance(row, dict) or not line.endswith(b"\n"):
                    raise ValueError("it is not a whole row")
                rows.append(row)
    except FileNotFoundError:
        raise DataError(f"{path} is missing, so nothing says what was sent. Restore it from a copy") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} line {len(rows) + 1} is damaged: {error}. Restore the file from a copy") from None
    return rows


def receipt(
    log: AuditLog, run: str, client: int, unanswered: Sequence[LeftOut], policy: str, *, behind_edge: bool = False
) -> dict[str, Any]:
    """Sign what a device's audit log says about a client in a run.

    Args:
        log: the device's audit log.
        unanswered: the requests that the server has left out.
        policy: SHA-256 of the policy file, or "" for the default policy.
        behind_edge: whether to sign also what left for the server, because another machine heard the rest.

    Returns:
        `receipt`, the signed content; `key`, the key of the log; `signature`; and `tie` if the device's key has signed
        that of the log.

    Raises:
        DataError, CheckpointError: the log is missing or damaged.
    """
    with log.alone() as key:
        own = ledgers(verified_rows(log, run), run).get(client, ClientLedger()).without(unanswered)
    content = {
        "run": run,
        "client": client,
        **own.told,
        "unanswered": [list(place) for place in unanswered],
        "policy": policy,
        "time": now(),
        **({"left": own.left.told} if behind_edge else {}),
    }
    return with_keys(log, key, RECEIPT, content)


def verified_rows(log: AuditLog, run: str) -> list[dict[str, Any]]:
    """Return the rows of a log since the begin of a run, whose chain is verified first: all would take ever longer.

    Raises:
        DataError, CheckpointError: the log is missing or damaged.
    """
    path = log.folder / AUDIT
    start = start_of(path, run) if path.exists() else 0
    verify(log.folder, start=start)
    return log_rows(path, start) if path.exists() else []


def now() -> str:
    """Return the time of a receipt, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def with_keys(log: AuditLog, key: Ed25519PrivateKey, head: bytes, content: dict[str, Any]) -> dict[str, Any]:
    """Return a receipt: its content, the signature of the log's key, and that of the device's key about this key."""
    result = {"receipt": content, "key": key_text(key.public_key()), "signature": signed(key, head, content)}
    return result | ({"tie": tie} if (tie := tie_in(log.folder)) else {})
