"""The keys by which a server knows the nodes of a Flower grid.

The SuperLink checks that every call of a SuperNode is signed with the key that was registered for this node, and tells
the server the public key (`Grid.get_nodes`, Flower 1.41).
"""

import base64
import hashlib

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.serverapp import Grid


def device_of(grid: Grid, node: int) -> str:
    """What a node is known by: the fingerprint of its key. Where a grid has no keys, the node's number.

    A node that the grid does not list gets a name of its own, which is no device's.
    """
    keys = {info.node_id: info.public_key for info in grid.get_nodes()}
    return fingerprint(keys[node]) if keys.get(node) else f"node {node}"


def fingerprint(key: bytes) -> str:
    """The fingerprint of a public key, as `ssh-keygen -l -f node.key.pub` prints it.

    Args:
        key: the public key, PEM.
    """
    line = load_pem_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
