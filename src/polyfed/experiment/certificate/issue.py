"""Issues the certificate of a run: everything in it follows from the folder of the run, so that others can repeat it.

The ledgers of all clients are the leaves of a Merkle tree, and so are the rows of each ledger. The run's key signs the
whole: in a deployment the key of the server's audit log, in a simulation a key that is made for this purpose. Each
device of a deployment signs the root of its own ledger (`polyfed.privacy.egress.audit_log.receipts`). If silos have
edges, each edge signs what passed between its silo and the server (`edge_receipts`), and the certificate names it.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.system.files import (
    AUDIT,
    CERTIFICATE,
    EGRESS,
    FACTS,
    LEAKAGE,
    MEMBERS,
    RECEIPTS,
    RECIPE,
    RESULT,
    ROUNDS,
    SIGNED,
    replace_text,
)
from polyfed.core.system.json_and_toml import parse_json
from polyfed.engines.protocol import MOST_UNANSWERED
from polyfed.experiment.results.round_facts import versions
from polyfed.experiment.running.lock import alone_in
from polyfed.federation.secure_aggregation import messages as secure
from polyfed.privacy.differential.accounting import Accounting
from polyfed.privacy.egress.audit_log import merkle
from polyfed.privacy.egress.audit_log.edge_receipts import EDGES, edge_receipt_in, joined, unanswered_parts
from polyfed.privacy.egress.audit_log.keys import canonical, key_text, signed
from polyfed.privacy.egress.audit_log.log import HEAD, PRIVATE_KEY, making_key, private_key
from polyfed.privacy.egress.audit_log.receipts import ClientLedger, ledgers, log_rows, receipt_in
from polyfed.report import reconcile
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.run_schema import LEAKAGE_AUDIT
from polyfed.transport.logins import fingerprint
from polyfed.transport.tokens import RETIRED

FORMAT = "polyfed certificate 1"
"""The first entry of every certificate of this version, with which also the signed text begins."""

FILES = (RECIPE, FACTS, ROUNDS, EGRESS, AUDIT, HEAD, RESULT, RECEIPTS, LEAKAGE)
"""The files of a run whose digests are in its certificate."""

TRANSCRIPT = frozenset(
    kind.__name__
    for kind in (
        secure.Opening,
        secure.PublicKeys,
        secure.Roster,
        secure.EncryptedShares,
        secure.Delivery,
        secure.Ready,
        secure.Unmasking,
        secure.RevealedShares,
    )
)
"""The messages of secure aggregation, besides the masked replies."""

DEPLOYMENT, WITH_EDGES, SIMULATION = "deployment", "deployment with edges", "simulation"

VOUCHES = {
    SIMULATION: "One process simulated all clients, so only its owner vouches for their ledgers.",
    DEPLOYMENT: "The server vouches for what it sent and received, and each device for what its receipt signs.",
    WITH_EDGES: "The server vouches for what it sent and received, each edge for what passed between its silo and the "
    "server and for the keys of its devices, and each device for what its receipt signs.",
}


class PublicKeys:
    """The public keys in a folder: of devices in OpenSSH's format, and of audit logs and runs in PEM.

    Args:
        folder: the folder, whose files `*.pub` are read, and the keys in `retired` that devices have replaced since.

    Attributes:
        devices: fingerprint of a device's key -> name of its file without `.pub`, that of its present key.
        logs: the keys of audit logs and runs.

    Raises:
        DataError: the folder has no such file, or one of them is no public key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices, self.logs = dict[str, str](), set[str]()
        paths = [*sorted((folder / RETIRED).glob("*.pub")), *sorted(folder.glob("*.pub"))]
        for path in paths:
            try:
                self._read(path)
            except (OSError, ValueError, UnsupportedAlgorithm, NotImplementedError, IndexError) as error:
                raise DataError(f"{path} is no public key in OpenSSH's format or in PEM ({error})") from None
        if not paths:
            raise DataError(
                f"{folder} holds no public key (*.pub). Copy those of the devices and audit-key.pub of the run into it"
            )

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        if text.startswith(b"-----"):
            key = load_pem_public_key(text)
            if not isinstance(key, Ed25519PublicKey):
                raise ValueError("a key of another kind than Ed25519")
            self.logs.add(key_text(key))
        else:
            load_ssh_public_key(text)
            retired = path.parent.name == RETIRED
            self.devices[fingerprint(text)] = (
                path.stem.rpartition(".")[0] if retired else path.stem.removesuffix(".next")
            )


def certify(run: str | Path, out: Path | None = None, keys: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the certificate of a run.

    Args:
        run: the folder of the run, whether it is finished or not.
        out: the file; by default `certificate.json` in the folder.
        keys: a folder with public keys of devices, whose names the certificate gives to the clients.

    Returns:
        The path of the file, and the content of the certificate.

    Raises:
        DataError: the folder holds no run, a file is damaged, or ledger and audit log disagree.
        RecipeError: another process is writing the run.
    """
    folder = Folder(Path(run))
    names = {} if keys is None else PublicKeys(keys).devices
    with alone_in(folder.path, "another process is writing this run", "Wait for its end"):
        key = _key_of_run(folder.path)
        content = evidence(folder, names)
        content |= {"issued": datetime.now(UTC).isoformat(timespec="seconds"), "issuer": versions()}
        content |= {"key": key_text(key.public_key())}
        path = out or folder.path / CERTIFICATE
        replace_text(path, sealed(content, key))
    return path, content


def sealed(content: Mapping[str, Any], key: Ed25519PrivateKey) -> str:
    """Return the text of a certificate: its content and the signature, in canonical JSON."""
    signature = signed(key, f"{FORMAT}\n".encode(), content)
    return canonical({"certificate": content, "signature": signature}).decode() + "\n"


def _key_of_run(folder: Path) -> Ed25519PrivateKey:
    """Return the key of a run, which is made for a simulation that has none."""
    path = folder / PRIVATE_KEY
    if not path.exists():
        if (folder / AUDIT).exists():
            raise DataError(f"{path} is missing, with which {AUDIT} is signed. Certify the run on its server")
        with making_key(folder):
            pass
    return private_key(path)


def evidence(folder: Folder, names: Mapping[str, str], receipts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the files of a run say, for its certificate.

    Args:
        folder: the run.
        names: fingerprint of a device's key -> name of the device.
        receipts: what devices and edges have signed; by default, all that the folder holds. Further ones may have come
            since a certificate was made.

    Raises:
        DataError: a file is missing or damaged, or the files contradict each other.
    """
    facts, result, rounds = folder.facts, folder.result, list(folder.rounds())
    name, audited = str(facts.get("run", "")), (folder.path / AUDIT).exists()
    if audited and (findings := reconcile(folder.path).findings):
        raise DataError("\n".join([f"{folder.path} cannot be certified:", *(f"  {one}" for one in findings)]))
    rows = log_rows(folder.path / (AUDIT if audited else EGRESS))
    try:
        known = ledgers(rows, name)
    except ValueError as error:
        raise DataError(f"{folder.path / EGRESS} is damaged: {error}. Restore it from a copy") from None
    signed = receipts_in(folder) if receipts is None else receipts
    edges = list(_edges(folder, known, names, signed)) if audited and _has_edges(folder) else None
    clients = list(_clients(folder, known, rounds, names, edges, signed))
    _refuse_gaps(folder, known, rounds)
    kind = SIMULATION if not audited else DEPLOYMENT if edges is None else WITH_EDGES
    return {
        "format": FORMAT,
        "run": name,
        "kind": kind,
        "vouches": VOUCHES[kind],
        "started": str(facts.get("started", "")),
        "finished": bool(result),
        "rounds": len(rounds),
        "method": str(folder.recipe.get("algorithm", {}).get("name", "")),
        "model": str(result.get("state_sha256", "")),
        "versions": facts.get("versions", {}),
        "files": {file: digest_of(folder.path / file) for file in FILES if (folder.path / file).is_file()},
        "policy": _digest(facts.get("egress")),
        "announcement": _digest(facts.get("announced")),
        "clients": clients,
        **({} if edges is None else {"edges": edges}),
        "ledgers": root_of_clients(clients, edges or ()),
        "privacy": _privacy(result),
        "secure_aggregation": _transcripts(known),
        "leakage": _leakage(folder),
    }


def root_of_clients(clients: Sequence[Mapping[str, Any]], edges: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the Merkle root of all ledgers: the root over number, key, name and ledger of each client and edge."""
    parts = ("silo", "client", "name", "device", "rows", "root")
    leaves = ({part: one[part] for part in parts if part in one} for one in (*clients, *edges))
    return merkle.root_of(map(canonical, leaves)).hex()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Any) -> str:
    return "" if content is None else hashlib.sha256(canonical(content)).hexdigest()


def _has_edges(folder: Folder) -> bool:
    return bool(folder.recipe.get("deployment", {}).get("relay") == "edge")


def _members(folder: Folder, key: str) -> dict[int, Any]:
    """Return what the file about the members of a run says: the key of each member, or the devices of each silo."""
    return {int(number): told for number, told in _table(folder.path / MEMBERS).get(key, {}).items()}


def _keys(folder: Folder, receipts: Mapping[str, Any]) -> dict[int, str]:
    """Return the key of each member: as it logged in, or the one that it had renewed to when it signed."""
    signed = {number: key for number, key in _members(folder, SIGNED).items() if str(number) in receipts}
    return _members(folder, "clients") | signed


def receipts_in(folder: Folder) -> dict[str, Any]:
    """Return what devices and edges have signed, as the file of a run holds it.

    Raises:
        DataError: the file is damaged.
    """
    result = _table(folder.path / RECEIPTS)
    if _has_edges(folder):
        _receipts_behind(folder, result)
    return result


def _edges(
    folder: Folder, known: Mapping[int, ClientLedger], names: Mapping[str, str], signed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield what the certificate says about the edge of each silo: what passed between it and the server."""
    receipts = _receipts_behind(folder, signed)[0]
    keys = _keys(folder, receipts)
    for silo, clients in sorted(_members(folder, "silos").items()):
        own = joined(known.get(client, ClientLedger()) for client in clients)
        left = unanswered_parts(own)[:MOST_UNANSWERED]
        yield {
            "silo": silo,
            "name": names.get(keys.get(silo, ""), ""),
            "device": keys.get(silo, ""),
            "clients": clients,
            **own.told,
            "answered": own.without(left).told,
            "unanswered": [list(place) for place in left],
            "receipt": receipts.get(str(silo)),
        }


def _devices(folder: Folder, receipts: Mapping[str, Any], edges: Sequence[Mapping[str, Any]] | None) -> dict[int, str]:
    """Return the key of the device of each client: as it logged in here, or as its edge or its receipt says."""
    if edges is None:
        return _keys(folder, receipts)
    result = dict[int, str]()
    for edge in edges:
        told = {} if edge["receipt"] is None else edge["receipt"]["receipt"]["devices"]
        for client in edge["clients"]:
            tie = receipts.get(str(client), {}).get("tie")
            result[client] = told.get(str(client)) or ("" if tie is None else fingerprint(tie["key"].encode()))
    return result


def _receipts_behind(folder: Folder, signed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the receipts of edges and those of devices behind edges, whose keys the certificate names.

    Raises:
        DataError: one has another form.
    """
    told = dict(signed)
    try:
        edges = {silo: edge_receipt_in(one) for silo, one in told.pop(EDGES, {}).items()}
        return edges, {client: receipt_in(one) for client, one in told.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{folder.path / RECEIPTS} is damaged: {error}. Restore it from a copy") from None


def _clients(
    folder: Folder,
    known: Mapping[int, ClientLedger],
    rounds: list[dict[str, Any]],
    names: Mapping[str, str],
    edges: Sequence[Mapping[str, Any]] | None,
    signed: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield what the certificate says about each client. Behind an edge, its receipt answers for what left."""
    asked = Counter(client for row in rounds for client in row.get("cohort", ()))
    receipts = signed if edges is None else _receipts_behind(folder, signed)[1]
    devices = _devices(folder, receipts, edges)
    facts = {one["id"]: one for one in folder.facts.get("clients", ())}
    for client in sorted({*known, *asked, *devices}):
        own = known.get(client, ClientLedger())
        left = own.unanswered[:MOST_UNANSWERED] if edges is None else []
        agreed = own.without(left) if edges is None else own.left
        yield {
            "client": client,
            "name": names.get(devices.get(client, ""), str(facts.get(client, {}).get("name", ""))),
            "device": devices.get(client, ""),
            **own.told,
            "bytes_up": own.bytes_of(up=True),
            "bytes_down": own.bytes_of(up=False),
            "rounds": asked[client],
            "epsilon": _epsilon(folder, asked[client]),
            "answered": agreed.told,
            "unanswered": [list(place) for place in left],
            "receipt": receipts.get(str(client)),
        }


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        result = parse_json(path.read_text())
        if not isinstance(result, dict):
            raise ValueError("it is no JSON object")
        return result
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}. Restore it from a copy") from None


def _refuse_gaps(folder: Folder, known: Mapping[int, ClientLedger], rounds: list[dict[str, Any]]) -> None:
    """Refuse a ledger that has no row of a client in a round in which it was asked.

    A client that still worked on an earlier request when the run went on was asked for that one again.

    Raises:
        DataError: there is such a client.
    """
    places, open = {client: {round for (round, _), _, _ in own.rows} for client, own in known.items()}, dict[str, int]()
    for row in rounds:
        again, open = open, row.get("pending", {})
        for client in row.get("cohort", ()):
            if not {row["round"], again.get(str(client))} & places.get(client, set()):
                raise DataError(
                    f"{folder.path / EGRESS} has no row of client {client} in round {row['round']}, in which it was "
                    "asked: the ledger is not whole. Restore it from a copy"
                )


def _epsilon(folder: Folder, asked: int) -> float | None:
    """Return the epsilon that a client has spent in the rounds in which it was asked, or None without [privacy].

    Repeated rounds count for every client. If the cohort is drawn in secret, it is the epsilon of all rounds.
    """
    told, spec = folder.result.get("privacy"), folder.recipe.get("privacy", {})
    if told is None:
        return None
    whole: float | None = told["epsilon"]
    repeated = max(int(told.get("rounds", 0)) - int(folder.result["rounds"]), 0)
    if spec.get("amplification") or whole is None:
        return whole
    uses = 1
    if told["unit"] == "example":
        train = folder.recipe.get("train", {})
        uses = int(train.get("epochs", 1)) + int(folder.recipe.get("algorithm", {}).get("private_epochs", 0) or 0)
    swing = 2.0 if told["unit"] == "client" and told.get("noise_at") == "client" else 1.0
    accounting = Accounting(told["accountant"], told["delta"], uses=uses, swing=swing)
    try:
        if not math.isclose(accounting.epsilon(told["noise_multiplier"], int(told["rounds"])), whole):
            return whole  # the run was counted in another way
        return min(accounting.epsilon(told["noise_multiplier"], asked + repeated), whole)
    except RecipeError:  # the library is not installed here
        return whole


def _privacy(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the guarantee of the run, which holds for every client, or None without [privacy]."""
    told = result.get("privacy")
    if told is None:
        return None
    parts = ("unit", "epsilon", "delta", "accountant", "noise_multiplier", "neighbours", "simulated")
    return {part: told.get(part) for part in parts} | {"unprotected": sorted({p["kind"] for p in told["unprotected"]})}


def _transcripts(known: Mapping[int, ClientLedger]) -> list[dict[str, Any]] | None:
    """Return a digest of the messages of secure aggregation in each round, or None if there are none."""
    found = dict[int, list[bytes]]()
    for own in known.values():
        for (round, _), _, text in own.rows:
            row = json.loads(text)
            if row["message"] in TRANSCRIPT or row.get("masked"):
                found.setdefault(round, []).append(text)
    transcripts = [
        {"round": round, "rows": len(texts), "root": merkle.root_of(sorted(texts)).hex()}
        for round, texts in sorted(found.items())
    ]
    return transcripts or None


def _leakage(folder: Folder) -> dict[str, Any] | None:
    """Return the upper bounds of `polyfed audit`: the upper ends of the intervals of the advantages."""
    result = folder.json(LEAKAGE, LEAKAGE_AUDIT)
    if not result:
        return None
    parts = ("attack", "kind", "block", "seen_by", "method", "advantage")
    measured = [one for one in result["findings"] if one["status"] == "measured"]
    bounds = [{part: one[part] for part in parts} | {"at_most": one["high"]} for one in measured]
    return {"rounds": result["rounds"], "clients": result["clients"], "shadows": result["shadows"], "bounds": bounds}
