"""Registers the keys of devices with a SuperLink, and revokes the keys whose files are gone."""

import base64
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.serverapp import Grid
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from polyfed.core.errors import RecipeError
from polyfed.core.system.log_lines import logger_of

_HOW = "Make the key on the device by: ssh-keygen -t ecdsa -b 384 -N '' -f node.key"


def public_key(path: Path) -> bytes:
    """Read the public key of a device and return it as Flower stores it, in PEM format.

    Raises:
        RecipeError: the file holds no key in OpenSSH's format, or a key of a type that Flower does not accept.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RecipeError(f"{path} is not a public key in OpenSSH's format ({error}). {_HOW}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RecipeError(f"{path} is a key of type {type(key).__name__}; Flower takes ECDSA keys only. {_HOW}")
    return bytes(public_key_to_bytes(key))


def keep_registered(state: Any, keys: Mapping[bytes, Path]) -> None:
    """Make the SuperLink's database hold these keys and no others.

    The owner of every key is the local account of `flwr`. A key that is not among `keys` is revoked: the SuperLink then
    refuses every call that this key has signed. The log gets a line for each revoked key.

    Args:
        state: the SuperLink's state.
        keys: the public keys, each with its file.

    Raises:
        RecipeError: a key was revoked earlier. Flower's database never registers a key a second time.
    """
    logger = logger_of("superlink", "stderr")
    for node in state.get_node_info():
        if node.status != NodeStatus.UNREGISTERED and bytes(node.public_key) not in keys:
            state.delete_node(node.owner_aid, node.node_id)
            text = "the key %s is revoked, because its file *.pub is no longer in the folder of credentials"
            logger.log(logging.WARNING, text, fingerprint(bytes(node.public_key)))
    for key, path in keys.items():
        _register(state, key, path)


def _register(state: Any, key: bytes, path: Path) -> bool:
    """Register a key, unless it is registered. Return whether this call registered it."""
    if state.get_node_id_by_public_key(key) is not None:
        return False
    try:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)
    except ValueError:
        raise RecipeError(
            f"{path} holds the key {fingerprint(key)}, which was revoked earlier, and Flower's database does not "
            "register a revoked key again. Make a new key on the device and remove this file; or, if the "
            "revocation was a mistake, move link.db elsewhere and start again (a run goes on from its checkpoint)"
        ) from None
    return True


@dataclass
class NewKeys:
    """Registers the keys of devices that join while the SuperLink runs. It revokes none, which needs a restart.

    Attributes:
        folder: the folder of credentials, in which each device has a file `*.pub`.
        seen: time of change and size of each file that has been read, so that a faulty one is reported once.
    """

    folder: Path
    seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def register(self, state: Any) -> None:
        """Register the keys of new and of changed files. The log gets a line for each key and for each faulty file."""
        logger = logger_of("superlink", "stderr")
        for path in sorted(self.folder.glob("*.pub")):
            try:
                facts = path.stat()
                if self.seen.get(path) == (stamp := (facts.st_mtime_ns, facts.st_size)):
                    continue
                self.seen[path] = stamp
                key = public_key(path)
                if _register(state, key, path):
                    logger.log(logging.INFO, "the key %s of %s is registered", fingerprint(key), path)
            except (RecipeError, OSError) as error:
                logger.log(logging.WARNING, "a key was not registered: %s", error)


PEM = b"-----BEGIN "
"""A SuperLink stores public keys in PEM format (RFC 7468), which begins with these bytes."""


def device_of(grid: Grid, node: int) -> str:
    """Return the name of a node's device: the fingerprint of its key, or the node's number if the node has no key.

    If the grid does not list the node, the result is a unique name that no device has. In Flower's simulation, the
    public key of a node consists of random bytes. Such a node counts as a node without a key.
    """
    key = next((info.public_key for info in grid.get_nodes() if info.node_id == node), b"")
    return fingerprint(key) if key.startswith(PEM) else f"node {node}"


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key in the format of `ssh-keygen -l -f node.key.pub`.

    Args:
        key: the public key, PEM.
    """
    line = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
