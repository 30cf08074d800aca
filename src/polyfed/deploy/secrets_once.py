"""Each secret of secure aggregation is used for only one request, even if the server returns to an earlier request.

A resumed server may repeat requests, and a device then starts from the local state that it had before the repeated
request. This state still holds the secrets of the earlier request. Without a check, a dishonest server could make
the device use the same masks for two different replies. For one client, the server could also get shares of the mask
key and shares of the self-mask, although a single request never reveals both. The device therefore stores which secrets
it has used for which request. If the same request arrives again, the device answers it, which reveals nothing new. The
device refuses any other request that needs the same secrets.
"""

import hashlib
import json
from pathlib import Path

from polyfed.core.errors import EgressError
from polyfed.core.files import read_notes, replace_text
from polyfed.core.request import Request
from polyfed.core.tasks import info_of
from polyfed.core.tree import Tree, digest, nested, under
from polyfed.federation.secure_aggregation.messages import PublicKeys, RevealedShares
from polyfed.federation.secure_aggregation.state import SECRETS

USED = "used-secrets.json"
"""File with the digests of the secrets that a client has used, and of the requests for which the client used them."""

UNMASKED = "unmasked"
"""Key of the newest request for which the client has revealed shares, with its round and its
number, separated by a space. The other keys are digests."""


def admit_secrets(folder: Path, request: Request, local: Tree | None, body: bytes, client: int) -> None:
    """Record that a task uses the secrets in the local state, or refuse the request.

    Args:
        folder: the folder of the client and the run.
        request: the request.
        local: the local state before the task.
        body: the body of the packet.
        client: the client's number.

    Raises:
        EgressError: the client has used the secrets for another request.
        CheckpointError: the file is damaged.
    """
    path = folder / USED
    if request.reply is PublicKeys:
        _refuse_repetition(read_notes(path, str), request, client)
    block = SECRETS if request.reply.masks is not None else info_of(request.task).once
    secrets = under(block, local or {}) if block else {}
    if not secrets:
        return
    facts = (request.name, request.round, request.rounds, request.seed, request.turn, digest(local or {}))
    use = hashlib.sha256(json.dumps(facts).encode() + body).hexdigest()
    key, used = digest(nested(block, secrets)), read_notes(path, str)
    if used.get(key, use) != use:
        raise EgressError(
            f"client {client} refused task {request.name}: it has used its secrets of secure aggregation for another "
            "request. Keys serve once, and a server that repeats a round begins it with new keys"
        )
    if key not in used:
        used[key] = use
        if request.reply is RevealedShares:
            used[UNMASKED] = f"{request.round} {request.number}"
        replace_text(path, json.dumps(used))


def _refuse_repetition(used: dict[str, str], request: Request, client: int) -> None:
    """Refuse to begin a request again after its shares were revealed.

    A repeated request would give the server a second sum, perhaps over other clients. The clients would send the same
    replies as before, so the difference of the two sums could be the reply of one client.

    Raises:
        EgressError: the client has revealed shares for this request, or for a later one.
    """
    if UNMASKED in used and (request.round, request.number) <= tuple(map(int, used[UNMASKED].split())):
        raise EgressError(
            f"client {client} refused task {request.name}: it has already revealed the masks of this request "
            f"in round {request.round}. Two sums over different clients would tell single replies. Begin a new run in "
            "another folder"
        )
