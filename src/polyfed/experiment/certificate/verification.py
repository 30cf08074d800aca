"""Verifies a certificate with public keys, and, as far as they are given, with the run's files and devices' logs.

Everything that is wrong is found at once and told in sentences. Without further files the signatures say who vouches
for which Merkle root; with the files of the run, everything that the certificate says is computed again; with the audit
logs of devices, the rows behind their receipts are too.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError, PolyfedError, counted
from polyfed.core.system.files import AUDIT, PUBLIC_KEY, RECEIPTS
from polyfed.core.system.json_and_toml import parse_json
from polyfed.experiment.certificate.issue import (
    FORMAT,
    SIMULATION,
    VOUCHES,
    WITH_EDGES,
    PublicKeys,
    digest_of,
    evidence,
    receipts_in,
    root_of_clients,
)
from polyfed.privacy.egress.audit_log.edge_receipts import EDGE_RECEIPT, EDGES, EdgeReceipt, crossing
from polyfed.privacy.egress.audit_log.keys import canonical, is_signed, is_tied, key_text
from polyfed.privacy.egress.audit_log.receipts import (
    RECEIPT,
    STRICT,
    ClientLedger,
    LeftOut,
    Receipt,
    ledgers,
    log_rows,
    receipt_in,
    receipts_text,
)
from polyfed.privacy.egress.audit_log.verification import public_key, verify
from polyfed.report.reading.run_folder import Folder
from polyfed.transport.logins import fingerprint

LARGEST = 2**28
"""Largest size in bytes of a certificate that is read: about a million clients (inferred)."""

MOST_TOLD = 20
"""Largest number of faults that are told; the others are counted."""


@with_config(STRICT)
class _Ledger(TypedDict):
    rows: int
    root: str


@with_config(STRICT)
class _Client(TypedDict):
    client: int
    name: str
    device: str
    rows: int
    root: str
    bytes_up: int
    bytes_down: int
    rounds: int
    epsilon: float | None
    answered: _Ledger
    unanswered: list[list[int]]
    receipt: Receipt | None


@with_config(STRICT)
class _Edge(TypedDict):
    silo: int
    name: str
    device: str
    clients: list[int]
    rows: int
    root: str
    answered: _Ledger
    unanswered: list[list[int]]
    receipt: EdgeReceipt | None


@with_config(STRICT)
class _Certificate(TypedDict):
    format: str
    run: str
    kind: str
    vouches: str
    started: str
    finished: bool
    rounds: int
    method: str
    model: str
    versions: dict[str, Any]
    files: dict[str, str]
    policy: str
    announcement: str
    clients: list[_Client]
    edges: NotRequired[list[_Edge]]
    ledgers: str
    privacy: dict[str, Any] | None
    secure_aggregation: list[dict[str, Any]] | None
    leakage: dict[str, Any] | None
    issued: str
    issuer: dict[str, Any]
    key: str


_SCHEMA: TypeAdapter[Any] = TypeAdapter(_Certificate)

APART = ("issued", "issuer", "key", "clients", "edges", "files")
"""What is not compared with the files of the run as one value: it does not follow from them, or is compared in
parts."""


@dataclass
class Verification:
    """What a verification has found.

    Attributes:
        content: the content of the certificate.
        remarks: what holds, and what was not checked, in sentences.
        faults: what is wrong, in sentences; none if the certificate holds.
    """

    content: Mapping[str, Any]
    remarks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def refuse(self, file: Path) -> None:
        """Raise an error that tells the faults.

        Raises:
            DataError: there are faults.
        """
        if self.faults:
            more = len(self.faults) - MOST_TOLD
            told = [*self.faults[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]
            raise DataError("\n".join([f"{file} does not hold:", *(f"  {fault}" for fault in told)]))


def verify_certificate(
    file: Path, keys: Path | None = None, run: Path | None = None, logs: Sequence[Path] = ()
) -> Verification:
    """Verify a certificate.

    Args:
        file: the certificate.
        keys: a folder with the public keys that the reader trusts. Without it, the certificate may be anybody's.
        run: the folder of the run, with which the certificate is compared.
        logs: state folders of devices, or copies of their audit logs, with which the receipts are compared.

    Raises:
        DataError: the file is no certificate that can be read, or its signature does not fit. Other faults are in the
            result.
    """
    content = _opened(file)
    result = Verification(content)
    result.remarks.append(f"the key of the run signed the certificate ({content['key']})")
    trusted = None if keys is None else PublicKeys(keys)
    if trusted is None:
        result.remarks.append("no keys were given (--keys), so compare this key with one that you got by other means")
    elif content["key"] not in trusted.logs:
        result.faults.append(f"it is signed with the key {content['key']}, which is not in {trusted.folder}")
    numbers = [one["client"] for one in content["clients"]]
    if numbers != sorted(set(numbers)):
        result.faults.append("its clients are not listed once each, in the order of their numbers")
    edges = content.get("edges", [])
    if root_of_clients(content["clients"], edges) != content["ledgers"]:
        result.faults.append("the Merkle root of the ledgers is not that of its clients")
    vouched = _check_edges(content, trusted, result)
    for one in content["clients"]:
        _check_client(one, content, trusted, vouched, result)
    if content["kind"] != SIMULATION:
        _count_receipts(content, result)
    names = {} if trusted is None else trusted.devices
    if trusted is not None and (
        others := set(names.values()) - {names.get(one["device"]) for one in (*content["clients"], *edges)}
    ):
        named = ", ".join(sorted(others)[:MOST_TOLD])
        result.remarks.append(f"{trusted.folder} has keys of devices that the certificate does not name: {named}")
    if run is not None:
        _compare_run(content, run, result)
    for place in logs:
        _compare_log(content, place, result)
    return result


def _opened(file: Path) -> Mapping[str, Any]:
    """Return the content of a certificate whose signature fits the key that it names.

    Raises:
        DataError: the file cannot be read, or the signature does not fit.
    """
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        text = file.read_bytes()
        told = parse_json(text)
        content, signature = told["certificate"], told["signature"]
        version = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is no certificate that can be read: {error!s:.200}") from None
    if version != FORMAT:
        raise DataError(
            f"{file} is a '{version!s:.60}', and this polyfed reads '{FORMAT}': use the polyfed that wrote it"
        )
    if canonical(told) + b"\n" != text:
        raise DataError(f"{file} was changed: it is not in the form in which polyfed writes certificates")
    key = content.get("key")
    if not (isinstance(key, str) and isinstance(signature, str)) or not is_signed(
        key, f"{FORMAT}\n".encode(), content, signature
    ):
        raise DataError(f"{file} was changed, or signed with another key: the signature does not fit its content")
    try:
        _SCHEMA.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{file} is signed and no certificate: {place}: {first['msg']}") from None
    if set(told) != {"certificate", "signature"} or content["vouches"] != VOUCHES.get(content["kind"]):
        raise DataError(f"{file} is signed and no certificate: it says more than one does")
    return dict(content)


def _check_edges(content: Mapping[str, Any], trusted: PublicKeys | None, found: Verification) -> dict[int, str]:
    """Check what a certificate says about edges. Return the key of each client's device for which its edge vouches."""
    if ("edges" in content) != (content["kind"] == WITH_EDGES):
        found.faults.append(f"it is the certificate of a {content['kind']}, and does not fit whether it lists edges")
    edges, keys = content.get("edges", []), {one["client"]: one["device"] for one in content["clients"]}
    members = [client for edge in edges for client in edge["clients"]]
    if edges and sorted(members) != sorted(keys):
        found.faults.append("its edges do not name each of its clients once")
    if [edge["silo"] for edge in edges] != sorted({edge["silo"] for edge in edges}):
        found.faults.append("its edges are not listed once each, in the order of their silos")
    vouched = dict[int, str]()
    for edge in edges:
        before = len(found.faults)
        _check_name(f"the edge of silo {edge['silo']}", edge, trusted, found)
        if edge["receipt"] is not None:
            named = _check_edge(edge, content["run"], keys, trusted, found)
            vouched |= named if len(found.faults) == before else {}
    return vouched


def _check_edge(
    edge: Mapping[str, Any], run: str, keys: Mapping[int, str], trusted: PublicKeys | None, found: Verification
) -> dict[int, str]:
    """Check the receipt of an edge. Return the keys that it names for the devices of its silo."""
    who, told, said = f"the edge of silo {edge['silo']}", edge["receipt"], edge["receipt"]["receipt"]
    if not is_signed(told["key"], EDGE_RECEIPT, said, told["signature"]):
        found.faults.append(f"{who}: the signature of its receipt does not fit")
    if (said["run"], said["silo"]) != (run, edge["silo"]):
        found.faults.append(f"{who}: its receipt is that of silo {said['silo']} in the run {said['run']}")
    elif not _same(said, edge["answered"]):
        found.faults.append(
            f"{who} signed another ledger ({said['rows']} rows) of what passed between it and the server than the "
            f"server certifies ({edge['answered']['rows']} rows). `polyfed audit-log reconcile` compares both logs"
        )
    if said["unanswered"] != edge["unanswered"]:
        found.faults.append(f"{who} left out other requests than the certificate names as unanswered")
    named = {client: key for client in edge["clients"] if (key := said["devices"].get(str(client), ""))}
    for client in [client for client, key in named.items() if keys.get(client) != key]:
        found.faults.append(f"client {client} is the device {keys.get(client)}, and {who} says {named[client]}")
    _check_keys(who, edge, told, trusted, found)
    return named


def _check_client(
    one: Mapping[str, Any],
    content: Mapping[str, Any],
    trusted: PublicKeys | None,
    vouched: Mapping[int, str],
    found: Verification,
) -> None:
    """Check what a certificate says about one client."""
    client, told, behind = f"client {one['client']}", one["receipt"], content["kind"] == WITH_EDGES
    _check_name(client, one, trusted, found)
    if told is None:
        return
    said, certified = told["receipt"], one["answered"]
    own = said.get("left", {"rows": 0, "root": ""}) if behind else said
    if not is_signed(told["key"], RECEIPT, said, told["signature"]):
        found.faults.append(f"{client}: the signature of its receipt does not fit")
    if (said["run"], said["client"]) != (content["run"], one["client"]):
        found.faults.append(f"{client}: its receipt is that of client {said['client']} in the run {said['run']}")
    elif behind and not _same(own, certified):
        found.faults.append(
            f"{client}: its device signed other rows ({own['rows']}) for the server than the server certifies "
            f"({certified['rows']}): its edge or the server changed them. `polyfed audit-log reconcile` compares logs"
        )
    elif not _same(own, certified):
        found.faults.append(
            f"{client}: its device signed another ledger ({own['rows']} rows) than the server certifies "
            f"({certified['rows']} rows). `polyfed audit-log reconcile` compares both logs"
        )
    if not behind and said["unanswered"] != one["unanswered"]:
        found.faults.append(f"{client}: its device left out other requests than the certificate names as unanswered")
    _check_keys(client, one, told, trusted, found, vouched=vouched.get(one["client"]) == one["device"] != "")


def _same(said: Mapping[str, Any], certified: Mapping[str, Any]) -> bool:
    return bool((said["rows"], said["root"]) == (certified["rows"], certified["root"]))


def _check_name(who: str, one: Mapping[str, Any], trusted: PublicKeys | None, found: Verification) -> None:
    known = trusted.devices.get(one["device"], "") if trusted is not None else ""
    if trusted is not None and known and one["name"] not in ("", known):
        found.faults.append(f"{who} is called '{one['name']}', and its key is that of '{known}' in {trusted.folder}")


def _check_keys(
    who: str,
    one: Mapping[str, Any],
    told: Mapping[str, Any],
    trusted: PublicKeys | None,
    found: Verification,
    *,
    vouched: bool = False,
) -> None:
    """Check whether the key of a receipt is that of the device of a client or edge, or of one that its edge names."""
    tie = told.get("tie")
    if tie is not None:
        if not is_tied(tie, told["key"]):
            found.faults.append(f"{who}: the key of its log is not signed by the key of a device")
            return
        device = fingerprint(tie["key"].encode())
        if device != one["device"]:
            found.faults.append(f"{who} is the device {one['device']}, and {device} signed the key of its log")
    if trusted is None or told["key"] in trusted.logs:
        return
    if tie is not None and (vouched or one["device"] in trusted.devices):
        return
    found.faults.append(f"{who}: neither the key of its device nor that of its log is in {trusted.folder}")


def _count_receipts(content: Mapping[str, Any], found: Verification) -> None:
    """Tell for which clients and edges the server alone vouches."""
    edges, alone = content.get("edges", []), [one for one in content["clients"] if one["receipt"] is None]
    count = len(content["clients"]) - len(alone)
    devices = counted(count, "device signed the root of its", "devices signed the roots of their")
    found.remarks.append(f"{devices} own ledger{'s' if count != 1 else ''}")
    if edges:
        signed = counted(sum(one["receipt"] is not None for one in edges), "edge", "edges")
        found.remarks.append(f"{signed} of {len(edges)} signed what passed between silo and server")
    if alone:
        named = ", ".join(str(one["client"]) for one in alone[:MOST_TOLD])
        found.remarks.append(f"without receipt, so that the server alone vouches: clients {named}")
    if silent := [str(one["silo"]) for one in edges if one["receipt"] is None]:
        named = ", ".join(silent[:MOST_TOLD])
        found.remarks.append(f"without receipt of their edge, so that server and devices vouch: silos {named}")
    if left := sum(len(one["unanswered"]) for one in (*content["clients"], *edges)):
        found.remarks.append(
            f"receipts leave out {counted(left, 'request', 'requests')} to which the server got no reply"
        )


def _compare_run(content: Mapping[str, Any], run: Path, found: Verification) -> None:
    """Compare a certificate with the files of its run, from which everything in it is computed again."""
    folder, late = Folder(run), False
    for name, digest in content["files"].items():
        if not (folder.path / name).is_file():
            found.faults.append(f"{folder.path / name} is missing")
        elif digest_of(folder.path / name) != digest:
            if name == RECEIPTS and _has_grown(content, folder, digest):
                late = True
            else:
                found.faults.append(f"{folder.path / name} is not the certified file")
    try:
        named = (*content["clients"], *content.get("edges", ()))
        names = {one["device"]: one["name"] for one in named if one["device"]}
        now = evidence(folder, names, _certified(content, receipts_in(folder)) if late else None)
        if late:
            _check_late(content, evidence(folder, names), found)
    except PolyfedError as error:
        found.faults.append(str(error))
        return
    for key in now.keys() - set(APART):
        if now[key] != content.get(key):
            found.faults.append(f"'{key}' of the certificate does not follow from {folder.path}")
    _compare_each("clients", "client", content, now, str(folder.path), found)
    _compare_each("edges", "silo", content, now, str(folder.path), found)
    if not found.faults:
        found.remarks.append(f"all of it follows from the files in {folder.path}")


def _certified(content: Mapping[str, Any], receipts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipts of a run's file that the certificate has, in the order of the file."""
    clients = {str(one["client"]) for one in content["clients"] if one["receipt"] is not None}
    silos = {str(one["silo"]) for one in content.get("edges", ()) if one["receipt"] is not None}
    result = dict[str, Any]()
    for name, told in receipts.items():
        if name == EDGES and "edges" in content:
            result[name] = {silo: one for silo, one in told.items() if silo in silos}
        elif name in clients:
            result[name] = told
    return result


def _has_grown(content: Mapping[str, Any], folder: Folder, digest: str) -> bool:
    """Return whether the file of a run's receipts is the certified one with later receipts behind the others."""
    try:
        receipts = receipts_in(folder)
        text = (folder.path / RECEIPTS).read_text(encoding="utf-8")
    except (OSError, ValueError, DataError):
        return False
    before = receipts_text(_certified(content, receipts)).encode()
    known = {str(one["client"]) for one in content["clients"]} | ({EDGES} if "edges" in content else set())
    whole = receipts_text(receipts) == text and receipts.keys() <= known
    return whole and hashlib.sha256(before).hexdigest() == digest


def _check_late(content: Mapping[str, Any], now: Mapping[str, Any], found: Verification) -> None:
    """Check the receipts that came after the certificate was made, and are not in it."""
    late, faults = list[str](), len(found.faults)
    vouched = _check_edges(now, None, found) if "edges" in content else {}
    before = {one["client"]: one for one in content["clients"]}
    for one in now["clients"]:
        if one["receipt"] is not None and before.get(one["client"], one)["receipt"] is None:
            late.append(str(one["client"]))
            try:
                receipt_in(one["receipt"])
            except ValueError as error:
                found.faults.append(f"client {one['client']}: {error}")
                continue
            _check_client(one, now, None, vouched, found)
    if len(found.faults) == faults:
        named = f"clients {', '.join(late[:MOST_TOLD])}" if late else "an edge"
        found.remarks.append(f"receipts came after the certificate: {named}; `polyfed certify` makes one with them")


def _compare_each(
    part: str, number: str, content: Mapping[str, Any], now: Mapping[str, Any], where: str, found: Verification
) -> None:
    """Compare what a certificate says about each client, or about each edge, with what follows from the run."""
    before = {one[number]: one for one in content.get(part, ())}
    own = {one[number]: one for one in now.get(part, ())}
    who = "client" if number == "client" else "the edge of silo"
    for name in sorted(before.keys() | own.keys()):
        if name not in own or name not in before:
            found.faults.append(f"{who} {name} is missing in {'the certificate' if name in own else where}")
        elif changed := [key for key, value in own[name].items() if key != "epsilon" and value != before[name][key]]:
            found.faults.append(f"{who} {name} has another {', '.join(changed)} in {where}")


def _compare_log(content: Mapping[str, Any], place: Path, found: Verification) -> None:
    """Compare the audit log of a device or of an edge with what the certificate says about its clients."""
    try:
        verify(place)
        rows = log_rows(place / AUDIT)
        logged = ledgers(rows, content["run"])
        if not logged:
            found.faults.append(f"{place / AUDIT} has no row of the run {content['run']}")
        for edge in content.get("edges", ()):
            _compare_edge(content["run"], edge, place, rows, found)
    except (DataError, ValueError) as error:
        found.faults.append(str(error))
        return
    known: dict[int, Mapping[str, Any]] = {one["client"]: one for one in content["clients"]}
    for client, own in logged.items():
        if client not in known:
            found.faults.append(f"{place / AUDIT} has rows of client {client}, which the certificate does not name")
            continue
        if content["kind"] == WITH_EDGES:
            agreed = own.left.without(_left_out(content, client))
        else:
            agreed = own.without([tuple(place) for place in known[client]["unanswered"]])
        if agreed.told != known[client]["answered"]:
            found.faults.append(_difference(f"client {client}", place, agreed, known[client]))
        else:
            found.remarks.append(f"client {client}: {place / AUDIT} holds the certified ledger")


def _left_out(content: Mapping[str, Any], client: int) -> list[LeftOut]:
    """Return the requests that the server named to the edge of a client as unanswered."""
    return [tuple(one) for edge in content["edges"] if client in edge["clients"] for one in edge["unanswered"]]


def _compare_edge(
    run: str, edge: Mapping[str, Any], place: Path, rows: Sequence[Mapping[str, Any]], found: Verification
) -> None:
    """Compare a log with what the certificate says about an edge that has signed with the key of this log."""
    told = edge["receipt"]
    if told is None or key_text(public_key(place / PUBLIC_KEY)) != told["key"]:
        return
    left = [tuple(one) for one in edge["unanswered"]]
    own = crossing(rows, run, told["receipt"]["received"]).without(left)
    who = f"the edge of silo {edge['silo']}"
    if own.told != edge["answered"]:
        found.faults.append(_difference(who, place, own, edge))
    else:
        found.remarks.append(f"{who}: {place / AUDIT} holds the certified ledger")


def _difference(who: str, place: Path, own: ClientLedger, told: Mapping[str, Any]) -> str:
    return (
        f"{who}: {place / AUDIT} holds {len(own.rows)} rows of the run, and not the certified "
        f"{told['answered']['rows']}. `polyfed audit-log reconcile` names them"
    )
