"""Each secret of secure aggregation is used for only one request, even if the server returns to an earlier request.

A resumed server may repeat requests, and a device then starts from the local state that it had before the repeated
request. This state still holds the secrets of the earlier request. Without a check, a dishonest server could make
the device use the same masks for two different replies. For one client, the server could also get shares of the mask
key and shares of the self-mask, although a single request never reveals both. The device therefore stores which secrets
it has used for which request. If the same request arrives again, the device answers it, which reveals nothing new. The
device refuses any other request that needs the same secrets.

Everything that decides the reply belongs to a request: its whole header and body, and the *conditions* on the device,
such as the recipe. Otherwise, a server could repeat a request under another recipe and get a second reply with the
same masks. The difference of the two replies would have no mask.
"""

import hashlib
import json
from pathlib import Path

from polyfed.core.errors import EgressError
from polyfed.core.request import Request
from polyfed.core.tasks import info_of
from polyfed.core.tree import Tree, digest, nested, under
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.store import DeviceStore, Memory
from polyfed.engines.protocol import RequestId
from polyfed.federation.secure_aggregation.messages import PublicKeys, RevealedShares
from polyfed.federation.secure_aggregation.state import SECRETS
from polyfed.federation.wire_format import Packet

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
    parts = (recipe.read_bytes(), node.policy_text, repr((node, stamps)).encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def bind_secrets(device: DeviceStore, request_id: RequestId, request: Request, local: Tree, conditions: str) -> None:
    """Record the conditions under which a client has drawn new secrets. Call this before the public keys leave.

    Args:
        device: the store of the device.
        request_id: id of the request.
        request: the request.
        local: the local state after the task.
        conditions: see `conditions_of`.

    Raises:
        CheckpointError: the store cannot be used.
    """
    if request.reply is PublicKeys:
        with device.transaction(request_id.run, request_id.client) as memory:
            _note(memory, _name_of_seeds(under(SECRETS, local)), conditions)


def admit_secrets(memory: Memory, request: Request, local: Tree | None, packet: Packet, conditions: str = "") -> None:
    """Record that a task uses the secrets in the local state, or refuse the request.

    Args:
        memory: what the device remembers of the client and the run.
        request: the request.
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


def digest_of_use(request: Request, local: Tree, packet: Packet, conditions: str) -> str:
    """Return the digest of everything that decides the reply to a request.

    The entries of the header keep their order, because the order of the modalities decides the order of the model.
    """
    entries = {name: value for name, value in packet.header.items() if name not in CHANGING}
    if isinstance(request_id := entries.get("request_id"), dict):
        entries["request_id"] = {name: value for name, value in request_id.items() if name not in CHANGING}
    facts = (request.name, request.round, request.rounds, request.number, request.seed, request.turn, digest(local))
    header = json.dumps((facts, conditions, entries)).encode()
    return hashlib.sha256(hashlib.sha256(header).digest() + packet.body).hexdigest()


def _name_of_seeds(secrets: Tree) -> str:
    """Return the name under which the store holds the conditions of secrets. The seeds stay the same in all steps."""
    return f"seeds {digest({name: value for name, value in secrets.items() if name == 'seeds'})}"


def _noted(memory: Memory, name: str) -> str | None:
    found = memory.rows.execute(
        "SELECT use FROM secrets WHERE run = ? AND client = ? AND name = ?", (memory.run, memory.client, name)
    ).fetchone()
    return None if found is None else str(found[0])


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
        "SELECT round, request FROM unmasked WHERE run = ? AND client = ?", (memory.run, memory.client)
    ).fetchone()
    if revealed is not None and (request.round, request.number) <= revealed:
        raise EgressError(
            f"client {memory.client} refused task {request.name}: it has already revealed the masks of this request "
            f"in round {request.round}. Two sums over different clients would tell single replies. Begin a new run in "
            "another folder"
        )
