"""Keys, masks and secret shares of secure aggregation, built from the primitives of two libraries.

Key agreement is X25519 with HKDF-SHA256, a mask is a ChaCha20 keystream, and shares travel under ChaCha20-Poly1305 (all
from `cryptography`). Secrets are shared with Shamir's scheme over GF(2^128) from PyCryptodome, 16 bytes at a time.

Every secret that the server may have to reconstruct is therefore a *seed* of 16 bytes, from which the keys are derived.
Functions import the libraries when they need them, because a run without secure aggregation needs neither of them.
docs/secure-aggregation.md describes the protocol. docs/decisions/0019-secure-aggregation.md gives our reasons.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from polyfed.core.errors import RecipeError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SEED, KEY, TAG = 16, 32, 16
"""Sizes in bytes of a seed, of a key of X25519 or ChaCha20, and of the tag of Poly1305 (RFC 7748, RFC 8439).

A seed has the block size of PyCryptodome's scheme, and this size is also the security level of X25519."""

PRIME = 2**255 - 19
"""The order of the field of Curve25519 (RFC 7748, Section 4.1). Public keys of honest clients are numbers below it."""


def require_libraries() -> None:
    """Check that the libraries are installed.

    Raises:
        RecipeError: one of the libraries is missing. The text names the extra of polyfed that installs them.
    """
    for name in ("Crypto.Protocol.SecretSharing", "cryptography.hazmat.primitives.ciphers.aead"):
        try:
            import_module(name)
        except ImportError as error:
            text = f"[secure_aggregation] needs two libraries ({error}): pip install 'polyfed[secure]'"
            raise RecipeError(text) from None


def derived(secret: bytes, *purpose: bytes) -> bytes:
    """Return a key of 32 bytes for a purpose from a secret (HKDF-SHA256, RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"".join(len(part).to_bytes(4, "little") + part for part in (b"polyfed secure aggregation", *purpose))
    return HKDF(SHA256(), KEY, None, info).derive(secret)


def public_key(seed: bytes) -> bytes:
    """Return the X25519 public key (32 bytes) whose private key is derived from a seed."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return _private(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def agreed(seed: bytes, peer: bytes) -> bytes:
    """Return the common secret (32 bytes) of two owners: the owner of a seed and the owner of a public key.

    Both owners compute the same secret from their own seed and the other's public key (X25519, RFC 7748).

    Raises:
        ValueError: the public key is not a point of full order.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return _private(seed).exchange(X25519PublicKey.from_public_bytes(peer))


def is_usable(peer: bytes) -> bool:
    """Return whether a public key can serve for key agreement.

    With a point of small order, the common secret would be zero for every private key (RFC 7748, Section 6.1). X25519
    also accepts a second encoding of some points, with the highest bit set or a number of at least 2^255 - 19. Honest
    clients never send one. A server could use it to list the key of one client twice, so that the masks of the pair
    cancel each other.
    """
    if int.from_bytes(peer, "little") >= PRIME:
        return False
    try:
        agreed(bytes(SEED), peer)
    except ValueError:
        return False
    return True


def _private(seed: bytes) -> "X25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(derived(seed, b"key agreement"))


def seal(secret: bytes, text: bytes, *about: bytes) -> bytes:
    """Encrypt and authenticate a text under a shared secret.

    Args:
        secret: the secret that sender and receiver have agreed upon.
        about: bytes that say for what purpose the ciphertext is made, such as the request. The receiver must give the
            same bytes to `opened`. A text that is sealed for one direction of one request therefore cannot be opened
            elsewhere. Each key seals only one text, so the nonce is constant.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(derived(secret, b"shares", *about)).encrypt(bytes(12), text, None)


def opened(secret: bytes, sealed: bytes, *about: bytes) -> bytes:
    """Decrypt a ciphertext of `seal`.

    Raises:
        ValueError: the ciphertext was changed, or `seal` made it with another secret or another purpose (`about`).
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(derived(secret, b"shares", *about)).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        raise ValueError("a share was changed on its way, or is not for this client and request") from None


def keystream(key: bytes, num_bytes: int) -> bytes:
    """Return the first bytes of the ChaCha20 keystream of a key (RFC 8439). Use a key for one mask only."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(num_bytes))


def mask(key: bytes, short: int, long: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask: uniform uint32 (short,) and uniform uint64 (long,)."""
    stream = keystream(key, 8 * long + 4 * short)
    return np.frombuffer(stream, np.uint32, short, 8 * long), np.frombuffer(stream, np.uint64, long)


def split(seed: bytes, threshold: int, num: int) -> list[bytes]:
    """Split a seed into `num` shares of 16 bytes. Any `threshold` shares give the seed. Fewer reveal nothing.

    The coefficients come from the system's secure generator (Shamir, "How to Share a Secret", CACM 1979).
    """
    from Crypto.Protocol.SecretSharing import Shamir

    return [share for _, share in Shamir.split(threshold, num, seed, ssss=False)]


def combined(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the seed that these shares give.

    Args:
        shares: pairs (place in the result of `split`, share), as many as the threshold of `split`.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    result: bytes = Shamir.combine([(place + 1, share) for place, share in shares], ssss=False)
    return result
