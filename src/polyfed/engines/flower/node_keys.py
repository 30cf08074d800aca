"""The keys by which a server identifies the nodes of a Flower grid.

The SuperLink checks that every call of a SuperNode is signed with the key that was registered for this node. The server
gets the public key from the SuperLink (`Grid.get_nodes`, Flower 1.41).
"""

import base64
import hashlib

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.serverapp import Grid


def device_of(grid: Grid, node: int) -> str:
    """Return the name of a node's device: the fingerprint of its key, or the node's number if the grid has no keys.

    If the grid does not list the node, the result is a unique name that no device has.
    """
    keys = {info.node_id: info.public_key for info in grid.get_nodes()}
    return fingerprint(keys[node]) if keys.get(node) else f"node {node}"


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key in the format of `ssh-keygen -l -f node.key.pub`.

    Args:
        key: the public key, PEM.
    """
    line = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
