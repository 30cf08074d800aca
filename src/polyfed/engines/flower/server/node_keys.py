"""The keys by which a server identifies the nodes of a Flower grid.

The SuperLink checks that every call of a SuperNode is signed with the key that was registered for this node. The server
gets the public key from the SuperLink (`Grid.get_nodes`, Flower 1.41).
"""

import base64
import hashlib

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.serverapp import Grid

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
