"""The keys of audit logs: signatures by them, and how the key of a device vouches for that of its log.

A device logs in with one key and signs its audit log with another, because the process that writes the log is not that
of the connection. The first key signs the second one, so that whoever knows the device's public key, such as from the
folder of a server's registered keys, can check the log too. This module needs no PyTorch.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

from polyfed.core.system.files import PUBLIC_KEY, TIE, replace_text
from polyfed.core.system.json_and_toml import parse_json


class LoginKey(Protocol):
    """The key of a device, `polyfed.transport.logins.PrivateKey`.

    Attributes:
        public: its public part in OpenSSH's format.
    """

    public: str

    def sign(self, text: bytes) -> str:
        """Return a signature in base64."""


def canonical(content: Any) -> bytes:
    """Return JSON in its one form here: sorted keys, no blanks, ASCII. What is signed is always in this form."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signed(key: Ed25519PrivateKey, head: bytes, content: Any) -> str:
    """Return the signature of a content, in hexadecimal digits."""
    return key.sign(head + canonical(content)).hex()


def is_signed(key: str, head: bytes, content: Any, signature: str) -> bool:
    """Return whether a signature is that of this content and key, which is `key_text` of an Ed25519 key."""
    try:
        key_of(key).verify(of_hex(signature), head + canonical(content))
    except (ValueError, InvalidSignature):
        return False
    return True


def of_hex(text: str) -> bytes:
    """Read hexadecimal digits in the one form in which polyfed writes them, so that no changed letter passes.

    Raises:
        ValueError: these are other characters, or capital letters.
    """
    made = bytes.fromhex(text)
    if made.hex() != text:
        raise ValueError("hexadecimal digits must be small letters without blanks")
    return made


def key_text(key: Ed25519PublicKey) -> str:
    """Return a public key as text: its 32 bytes in base64."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def key_of(text: str) -> Ed25519PublicKey:
    """Return the public key of a text of `key_text`.

    Raises:
        ValueError: it is no such text, or the same key written in another way.
    """
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    if key_text(key) != text:
        raise ValueError("the key is not in its canonical form")
    return key


def tie(folder: Path, key: LoginKey) -> None:
    """Sign the key of the log in a state folder with the device's key, unless this has been done.

    Raises:
        OSError: the signature cannot be written.
    """
    path = folder / PUBLIC_KEY
    if not path.is_file():  # the first contact makes it
        return
    try:
        log = load_pem_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):  # the log refuses it, in words
        return
    if not isinstance(log, Ed25519PublicKey):
        return
    text, known = key_text(log), tie_in(folder)
    if known is None or known["key"] != key.public or not is_tied(known, text):
        told = {"key": key.public, "signature": key.sign(tie_text(text))}
        replace_text(folder / TIE, json.dumps(told))


def tie_text(key: str) -> bytes:
    """Return what the key of a device signs about the key of its audit log."""
    return f"polyfed audit log key\n{key}".encode()


def tie_in(folder: Path) -> dict[str, str] | None:
    """Return what the device's key has signed about the log in a state folder, or None."""
    try:
        result = parse_json((folder / TIE).read_bytes())
        return {"key": str(result["key"]), "signature": str(result["signature"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_tied(tie: Mapping[str, str], log_key: str) -> bool:
    """Return whether a device's public key has signed the key of a log.

    Args:
        tie: `key`, a public key in OpenSSH's format without a comment, and `signature`, base64.
        log_key: the key of the log, `key_text`.
    """
    try:
        key, made = load_ssh_public_key(tie["key"].encode()), base64.b64decode(tie["signature"], validate=True)
        if base64.b64encode(made).decode() != tie["signature"]:
            return False
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(made, tie_text(log_key), ec.ECDSA(SHA256()))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(made, tie_text(log_key))
        else:
            return False
    except (ValueError, InvalidSignature, UnsupportedAlgorithm, NotImplementedError):  # a point that is compressed
        return False
    return True
