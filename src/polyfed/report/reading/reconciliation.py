"""Compares the audit logs of a run's server and of its devices. Unexpected differences become findings.

Some differences are expected. They are counted, but are not findings:

- A request that was sent again occurs twice in a log, with the same content.
- A request without a reply may occur only in the server's log.
- A reply that came too late, or that the server dropped, occurs only in the device's log. The server's `rounds.jsonl`
  lists the client as missing in this round, or, under buffered aggregation, in the round in which the server gave it
  up. If it still worked when the run ended, the last line lists it as pending.
- Keys and shares of secure aggregation that a device drew anew, because the server was killed while it asked for them,
  occur only in the device's log.
- Data that a device refused to send occurs only in the device's log.
- In a run with edges, the server exchanges messages with edges. An edge's log also has what passed within its silo.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.core.errors import DataError, counted
from polyfed.core.system.files import AUDIT, EGRESS
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.log_lines import escaped
from polyfed.privacy.egress.ledger import DRAWN, NO_RUN
from polyfed.report.reading.run_folder import Folder

WHAT = ("message", "field", "kind", "block", "destination", "dtype", "shape", "bytes", "sha256")
"""The keys of a row that describe the data that was sent. The other keys describe the time, the sender and the
receiver."""

MOST_DAMAGED = 5
"""The largest number of damaged lines of the ledger that are named. The other damaged lines are counted."""

Place = tuple[int, int]
"""(round, number of the request in the round)"""

Row = tuple[Place, tuple[str, ...]]
"""A place, and the values of `WHAT`."""


@dataclass(frozen=True)
class Reconciliation:
    """The result of a comparison of logs.

    Attributes:
        remarks: sentences about the logs that were read and compared, and about expected differences.
        findings: sentences about faults: a broken chain, a missing row, an additional row.
    """

    remarks: tuple[str, ...]
    findings: tuple[str, ...]


@dataclass
class _Client:
    """The rows of one client in one log.

    Attributes:
        up: row -> how often the log contains it. These rows are about parts of messages that the client sent.
        down: row -> how often the log contains it. These rows are about parts of messages that the client received.
    """

    up: Counter[Row] = field(default_factory=Counter)
    down: Counter[Row] = field(default_factory=Counter)

    @property
    def answered(self) -> set[Place]:
        """The requests with a reply."""
        return {place for place, _ in self.up}


def reconcile(run: str | Path, devices: Sequence[Path] = ()) -> Reconciliation:
    """Check the audit log of a run, and compare it with the run's ledger and with the logs of devices.

    Args:
        run: the folder of the run.
        devices: state folders of devices or, in a run with edges, of edges; or copies of their audit logs with the
            public key and the head.

    Raises:
        DataError: the folder holds no run.
        ImportError: the extra `polyfed[server]` is not installed.
    """
    folder = Folder(Path(run))
    remarks: list[str] = []
    findings: list[str] = []
    if not (folder.path / AUDIT).exists():
        findings.append(f"{folder.path} holds no {AUDIT}: the run was a simulation, or the server's log was removed")
        return Reconciliation((), tuple(findings))
    _verified(folder.path, remarks, findings)
    rows = [row for row, _ in _rows(folder.path)]
    findings += _ledger_differences(folder, rows)
    name = str(folder.facts.get("run"))
    server, seals = _by_client(rows, name), _seals(rows)
    excused = _excused(folder.rounds())
    seen: set[int] = set()
    for place in devices:
        if not _verified(place, remarks, findings):
            continue
        own = list(_rows(place))
        clients = _by_client([row for row, _ in own], name)
        if folder.recipe.get("deployment", {}).get("relay") == "edge":
            clients = {client: _outside(there, server.get(client, _Client())) for client, there in clients.items()}
        _add_enrolments(clients, _by_client([row for row, _ in own], NO_RUN), server)
        seen |= clients.keys()
        refused = sum(row.get("event") == "refused" and row.get("run") == name for row, _ in own)
        if refused:
            remarks.append(f"{place / AUDIT} says that {counted(refused, 'request was', 'requests were')} refused")
        if not clients and not refused:
            findings.append(f"{place / AUDIT} has no row of the run {name}")
        hashes = {hash for _, hash in own}
        for client, there in sorted(clients.items()):
            _compare(client, server.get(client, _Client()), there, excused, remarks, findings)
            lost = [seal for seal in seals[client] if seal not in hashes]
            if lost:
                findings.append(
                    f"client {client}: {len(lost)} of {len(seals[client])} seals that its replies carried are not in "
                    f"{place / AUDIT}. The log was written anew after the replies had left"
                )
    if devices and (absent := sorted(server.keys() - seen)):
        remarks.append(f"no log was given of clients {', '.join(map(str, absent))}")
    return Reconciliation(tuple(remarks), tuple(findings))


def _excused(rounds: Iterable[Mapping[str, Any]]) -> set[tuple[int, str]]:
    """Return the pairs (round, client) of requests of which the server says that it uses no reply."""
    result, open = set[tuple[int, str]](), dict[str, int]()
    for row in rounds:
        for client in row.get("missing", ()):
            result |= {(int(row["round"]), client), (open.get(client, int(row["round"])), client)}
        open = row.get("pending", {})
    return result | {(round, client) for client, round in open.items()}


def _verified(place: Path, remarks: list[str], findings: list[str]) -> bool:
    """Check the chain of a log, and return whether there is a log to compare."""
    from polyfed.privacy.egress.audit_log.verification import verify  # needs the extra polyfed[server]

    try:
        found = verify(place)
        remarks.append(f"{place / AUDIT} is whole: {found.rows:,} rows, {found.seals:,} signatures")
    except DataError as error:
        findings.append(str(error))
    return (place / AUDIT).exists()


def _rows(place: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the readable lines of a log with their hashes. `_verified` reports the other lines."""
    with (place / AUDIT).open("rb") as file:
        for line in file:
            text = line.removesuffix(b"\n")
            try:
                row = parse_json(text)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row, hashlib.sha256(text).hexdigest()


def _by_client(rows: Sequence[Mapping[str, Any]], run: str) -> dict[int, _Client]:
    """Return, by client, the rows about data that was sent or received in a run. Other lines are left out."""
    result: dict[int, _Client] = defaultdict(_Client)
    for row in rows:
        if row.get("verdict") != "allowed" or row.get("run") != run:
            continue
        try:
            client, place = int(row["client"]), (int(row["round"]), int(row["ask"]))
        except (KeyError, ValueError, TypeError, OverflowError):  # JSON may hold Infinity
            continue
        way = result[client].down if row.get("destination") == "client" else result[client].up
        way[place, tuple(str(row.get(key)) for key in WHAT)] += 1
    return dict(result)


def _outside(edge: _Client, server: _Client) -> _Client:
    """Return the rows of an edge about what left its silo or came from the server, whose messages its devices lack."""
    at, received = WHAT.index("destination"), {what[0] for _, what in server.down}
    up = Counter({row: count for row, count in edge.up.items() if row[1][at] == "server"})
    return _Client(up, Counter({row: count for row, count in edge.down.items() if row[1][0] in received}))


def _add_enrolments(
    clients: dict[int, _Client], enrolled: Mapping[int, _Client], server: Mapping[int, _Client]
) -> None:
    """Add the rows of enrolments that the server has too. A device enrols before it knows the name of the run."""
    for client, told in enrolled.items():
        if client in clients and client in server:
            clients[client].up += Counter({row: 1 for row in told.up if row in server[client].up})


def _seals(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    """Return the seals of the replies, by client."""
    result: dict[int, dict[str, None]] = defaultdict(dict)
    for row in rows:
        if isinstance(row.get("device_seal"), str) and type(row.get("client")) is int:
            result[row["client"]][row["device_seal"]] = None
    return defaultdict(list, {client: list(seals) for client, seals in result.items()})


def _compare(
    client: int,
    server: _Client,
    device: _Client,
    excused: set[tuple[int, str]],
    remarks: list[str],
    findings: list[str],
) -> None:
    """Compare the rows of one client in both logs."""
    agreed = len(server.up.keys() & device.up.keys()) + len(server.down.keys() & device.down.keys())
    sent = [row for row in server.down if row not in device.down]
    lacking = [row for row in server.up if row not in device.up]
    lacking += [row for row in sent if row[0] in server.answered]
    foreign = [row for row in device.up if row not in server.up]
    answered = {(place, what[:-1]) for place, what in server.up}  # apart from the hash
    drawn = [row for row in foreign if row[1][:2] in DRAWN and (row[0], row[1][:-1]) in answered]
    foreign = [row for row in foreign if row not in drawn]
    dropped = [row for row in foreign if (row[0][0], str(client)) in excused]
    surplus = [row for row in device.down if row not in server.down]
    surplus += [row for row in foreign if (row[0][0], str(client)) not in excused]
    unanswered = {row[0] for row in sent if row[0] not in server.answered}
    remarks.append(f"client {client}: {agreed:,} rows agree")
    if unanswered:
        remarks.append(f"client {client}: {len(unanswered)} requests were sent and never arrived there")
    if drawn:
        remarks.append(f"client {client}: {len(drawn)} rows are keys and shares that were drawn again after a restart")
    if dropped:
        remarks.append(f"client {client}: {len(dropped)} rows left in replies that the server says it left out")
    if lacking:
        findings.append(f"client {client}: its log lacks {len(lacking)} rows of the server's: {_shown(lacking)}")
    if surplus:
        findings.append(
            f"client {client}: the server's log lacks {len(surplus)} rows of the device's: {_shown(surplus)}. A server "
            "that was killed in this round and did not go on also leaves such rows"
        )


def _shown(rows: Sequence[Row]) -> str:
    """The first row, in words."""
    (round, ask), what = min(rows)
    row = dict(zip(WHAT, what, strict=True))
    place = f"round {round}, request {ask}"
    words = f"the first is {row['message']}.{row['field']} of {row['block']} to the {row['destination']} in {place}"
    return escaped(words)  # a device wrote these values


def _ledger_differences(folder: Folder, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Compare the run's ledger with the rows of its audit log that are not superseded, and name damaged lines."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        if type(back := row.get("resumed_after")) is int:
            kept = [old for old in kept if type(passed := old.get("came", old.get("round"))) is int and passed <= back]
        elif "verdict" in row:
            kept.append(row)
    damaged: list[str] = []
    logged, booked = Counter(map(_plain, kept)), Counter(map(_plain, _ledger_rows(folder, damaged)))
    yield from damaged[:MOST_DAMAGED]
    if len(damaged) > MOST_DAMAGED:
        yield f"{folder.path / EGRESS}: {len(damaged) - MOST_DAMAGED} more lines are damaged"
    for more, fewer, words in ((logged, booked, "lacks"), (booked, logged, "has")):
        if difference := (more - fewer).total():
            tail = "of the audit log" if words == "lacks" else "that the audit log lacks"
            yield f"{folder.path / EGRESS} {words} {difference} rows {tail}: it was changed, or cut off"


def _ledger_rows(folder: Folder, damaged: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of the ledger, and add a sentence about each unreadable line to `damaged`."""
    for number, line in folder.egress_lines():
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            damaged.append(f"{folder.path / EGRESS}, line {number} is damaged: {error}")
        else:
            yield row


def _plain(row: Mapping[str, Any]) -> str:
    """Return a row in the form of the ledger."""
    extra = ("time", "sha256", "device_seal", "previous")
    return repr(sorted((key, value) for key, value in row.items() if key not in extra))
