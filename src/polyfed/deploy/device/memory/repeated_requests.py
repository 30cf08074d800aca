"""What a device does if a request comes again: its secrets serve once, and a reply with noise is the one sent before.

**Secrets.** Each secret of secure aggregation serves one request, even if the server returns to an earlier request.

A resumed server may repeat requests, and a device then starts from the local state that it had before the repeated
request. This state still holds the secrets of the earlier request. Without a check, a dishonest server could make
the device use the same masks for two different replies. For one client, the server could also get shares of the mask
key and shares of the self-mask, although a single request never reveals both. The device therefore stores which secrets
it has used for which request. If the same request arrives again, the device answers it, which reveals nothing new. The
device refuses any other request that needs the same secrets.

Everything that decides the reply belongs to a request: its whole header and body, and the *conditions* on the device,
such as the recipe. Otherwise, a server could repeat a request under another recipe and get a second reply with the
same masks. The difference of the two replies would have no mask.

**Replies.** A resumed server repeats the requests after its last checkpoint, and sends a request again if a device was
offline. If nothing in a reply is random, a device computes the same reply again. But noise of [privacy] comes from the
operating system, so a second computation gives another reply, and two replies together reveal more than one of them,
even under the same masks. A device therefore keeps each reply with noise until the server confirms that it will not
repeat the round. The kept reply reveals nothing new, so it costs no epsilon.
"""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import EgressError
from polyfed.core.request import Request
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tasks import info_of
from polyfed.core.tree import Tree, digest, nested, under
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.memory.store import DeviceStore, Memory
from polyfed.engines.protocol import RUN_NAME, RequestId
from polyfed.experiment.running.checkpoint import sha256_of
from polyfed.experiment.running.warm_start import copy_in
from polyfed.federation.secure_aggregation.messages import PublicKeys, RevealedShares
from polyfed.federation.secure_aggregation.state import SECRETS
from polyfed.federation.wire.wire_format import Packet, pieces
from polyfed.privacy.egress.requirements import Release

_OF = "run = ? AND client = ?"
_AT = f"{_OF} AND round = ? AND request = ?"

CHANGING = ("session", "kept")
"""The entries of a header that may differ if a restarted server repeats a request. No reply depends on them."""


def conditions_of(recipe: Path, node: NodeConfig) -> str:
    """Return the digest of what decides the replies of a device, apart from the requests and the local state.

    This is the text of the recipe, the configuration of the device, the text of its policy file, and the name, size and
    time of change of each data file. If the data is a folder, its other files, such as those of an editor, do not
    count. Call this before the files are read, so that the digest never names newer files than the reply depends on.

    Args:
        recipe: path of the recipe that came with the app.
        node: the configuration of the device.

    Raises:
        OSError: a file cannot be read.
    """
    data = Path(node.data).expanduser()  # as `Npz` reads it
    files = sorted(data.glob("*.npy")) if data.is_dir() else [data]
    stats = [(path.name, path.stat()) for path in files if path.exists()]  # the reader of the data names a missing file
    stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    copied = copy_in(recipe.parent)
    init = "" if copied is None else sha256_of(copied)
    parts = (recipe.read_bytes(), node.rules.text, repr((node, stamps, init)).encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def bind_secrets(memory: Memory, request: Request, local: Tree, conditions: str) -> None:
    """Record the conditions under which a client has drawn new secrets. Call this before the public keys leave.

    Args:
        memory: what the device remembers of the client and the run.
        local: the local state after the task.
        conditions: see `conditions_of`.
    """
    if request.reply is PublicKeys:
        _note(memory, _name_of_seeds(under(SECRETS, local)), conditions)


def admit_secrets(memory: Memory, request: Request, local: Tree | None, packet: Packet, conditions: str = "") -> None:
    """Record that a task uses the secrets in the local state, or refuse the request.

    Args:
        memory: what the device remembers of the client and the run.
        local: the local state before the task.
        packet: the packet that holds the request.
        conditions: see `conditions_of`. They are empty in a simulation.

    Raises:
        EgressError: the client has used the secrets for another request, or drew them under other conditions.
    """
    if request.reply is PublicKeys:
        _refuse_repetition(memory, request)
    block = SECRETS if request.reply.masks is not None else info_of(request.task).once
    secrets = under(block, local or {}) if block else {}
    if not secrets:
        return
    use = digest_of_use(request, local or {}, packet, conditions)
    key, seeds = digest(nested(block, secrets)), _name_of_seeds(secrets)
    if _noted(memory, seeds) not in (None, conditions):
        raise EgressError(
            f"client {memory.client} refused task {request.name}: it drew its keys of secure aggregation under another "
            "recipe, policy, configuration or data, and does not use them after such a change. Begin the request with "
            "new keys"
        )
    used = _noted(memory, key)
    if used not in (None, use):
        raise EgressError(
            f"client {memory.client} refused task {request.name}: it has used its secrets of secure aggregation for "
            "another request. Keys serve once, and a server that repeats a round begins it with new keys"
        )
    if used is None:
        _note(memory, key, use)
        _note(memory, seeds, conditions)
        if request.reply is RevealedShares:
            place = (memory.run, memory.client, request.round, request.number)
            memory.rows.execute("INSERT OR REPLACE INTO unmasked VALUES (?, ?, ?, ?)", place)


def kept_reply(memory: Memory, request_id: RequestId, use: str) -> Packet | None:
    """Return the reply that the client has sent to the same request, or None.

    Args:
        memory: what the device remembers of the client and the run.
        use: digest of everything that decides the reply; see `digest_of_use`.

    Raises:
        sqlite3.DatabaseError: the reply on disk is damaged. The transaction turns this into a `CheckpointError`.
    """
    place = (memory.run, memory.client, *request_id.place)
    found = memory.rows.execute(f"SELECT use, header, digest FROM replies WHERE {_AT}", place).fetchone()
    if found is None or found[0] != use:
        return None
    _, header, digest = found
    head, _, content = digest.partition(" ")
    if hashlib.sha256(header.encode()).hexdigest() != head:
        raise sqlite3.DatabaseError(f"the header of the kept reply of round {request_id.round} is damaged")
    return Packet(parse_json(header), memory.read("replies", request_id.place, content))


def keep_reply(memory: Memory, request_id: RequestId, use: str, reply: Packet, kept: int) -> None:
    """Write a reply before it leaves, and forget replies that no request can need any more.

    Args:
        memory: what the device remembers of the client and the run.
        use: digest of everything that decides the reply.
        reply: the reply, without a request id.
        kept: the newest round that the server will never repeat.
    """
    of, header = (memory.run, memory.client), json.dumps(reply.header)

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(pieces(reply.body))

    content = memory.write("replies", request_id.place, fill)
    digest = f"{hashlib.sha256(header.encode()).hexdigest()} {content}"
    row = (*of, *request_id.place, use, header, digest)
    memory.rows.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    memory.rows.execute(  # the server can always repeat its newest request
        f"DELETE FROM replies WHERE {_OF} AND round <= ? AND (round, request) < (?, ?)",
        (*of, max(0, min(kept, request_id.round)), *request_id.place),
    )


def forget_replies(memory: Memory, request_id: RequestId) -> None:
    """Forget the kept replies to this request and to later ones of the run."""
    of = (memory.run, memory.client)
    memory.rows.execute(f"DELETE FROM replies WHERE {_OF} AND (round, request) >= (?, ?)", (*of, *request_id.place))


def unpaid_rounds(hello: Mapping[str, Any], rounds: int, release: Release | None, folder: Path, client: int) -> int:
    """Return in how many rounds a run may still ask a device for a reply that adds to the epsilon of the device.

    The result counts every coming round, except those whose reply the device has kept. If the server lies about the
    coming rounds, it gains nothing, because the device also checks its budget before every single reply.

    Args:
        hello: the header of the request to enrol. It has the number of coming rounds and, if the run goes on, its name.
        rounds: number of rounds of the recipe.
        release: the noise of a reply, and the number of rounds that ask for one. None if the device limits no epsilon.
        folder: the state folder of the device.
        client: the client's number.

    Raises:
        CheckpointError: the store cannot be used.
    """
    if release is None:
        return 0
    left, run = hello.get("rounds_left"), hello.get("run")
    done = max(rounds - (left if type(left) is int else 1), 0)
    last = max(release.rounds, done + 1)
    kept = set[int]()
    if isinstance(run, str) and RUN_NAME.fullmatch(run) and DeviceStore(folder).begun:
        with DeviceStore(folder).transaction(run, client) as memory:
            kept = {round for (round,) in memory.rows.execute(f"SELECT round FROM replies WHERE {_OF}", (run, client))}
    return last - done - sum(done < round <= last for round in kept)


def digest_of_use(request: Request, local: Tree, packet: Packet, conditions: str) -> str:
    """Return the digest of everything that decides the reply to a request.

    The entries of the header keep their order, because the order of the modalities decides the order of the model.
    """
    entries = {name: value for name, value in packet.header.items() if name not in CHANGING}
    if isinstance(request_id := entries.get("request_id"), dict):
        entries["request_id"] = {name: value for name, value in request_id.items() if name not in CHANGING}
    facts = (request.name, request.round, request.rounds, request.number, request.seed, request.turn, digest(local))
    header = json.dumps((facts, conditions, entries)).encode()
    total = hashlib.sha256(hashlib.sha256(header).digest())
    for piece in pieces(packet.body):
        total.update(piece)
    return total.hexdigest()


def _name_of_seeds(secrets: Tree) -> str:
    """Return the name under which the store holds the conditions of secrets. The seeds stay the same in all steps."""
    return f"seeds {digest({name: value for name, value in secrets.items() if name == 'seeds'})}"


def _noted(memory: Memory, name: str) -> str | None:
    result = memory.rows.execute(
        f"SELECT use FROM secrets WHERE {_OF} AND name = ?", (memory.run, memory.client, name)
    ).fetchone()
    return None if result is None else str(result[0])


def _note(memory: Memory, name: str, use: str) -> None:
    memory.rows.execute("INSERT OR REPLACE INTO secrets VALUES (?, ?, ?, ?)", (memory.run, memory.client, name, use))


def _refuse_repetition(memory: Memory, request: Request) -> None:
    """Refuse to begin a request again after its shares were revealed.

    A repeated request would give the server a second sum, perhaps over other clients. The clients would send the same
    replies as before, so the difference of the two sums could be the reply of one client.

    Raises:
        EgressError: the client has revealed shares for this request, or for a later one.
    """
    revealed = memory.rows.execute(
        f"SELECT round, request FROM unmasked WHERE {_OF}", (memory.run, memory.client)
    ).fetchone()
    if revealed is not None and (request.round, request.number) <= revealed:
        raise EgressError(
            f"client {memory.client} refused task {request.name}: it has already revealed the masks of this request "
            f"in round {request.round}. Two sums over different clients would tell single replies. Begin a new run in "
            "another folder"
        )
