"""Who a device is: it signs a challenge of the server with its key, and gets a token for its further calls.

A device that renews its key stays the same device: the server names it by its first key, whatever its key is now. The
signature also covers the certificate that the device has seen, so that another server, which a device trusts too,
cannot pass a challenge on and log in as the device. No clock of a device is involved.
"""

import base64
import hashlib
import hmac
import secrets
import time
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from polyfed.core.errors import RecipeError
from polyfed.core.system.log_lines import logger_of

CHALLENGE_SECONDS = 60.0
"""How long a device may take to sign a challenge."""

MOST_LOGINS = 20
"""Most logins of a device within about `CHALLENGE_SECONDS`. It needs one each time it or the server starts."""

KEPT_TOKENS = 10_000
"""Number of replaced tokens that the server remembers, to tell their holders why they are refused."""

HOW = "Make the key on the device by: ssh-keygen -t ecdsa -b 384 -N '' -f node.key"


def fingerprint(line: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's format, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def message(challenge: str, certificate: bytes) -> bytes:
    """Return what a device signs to log in.

    Args:
        challenge: the server's challenge.
        certificate: the server's certificate, DER.
    """
    return f"polyfed login\n{challenge}\n{hashlib.sha256(certificate).hexdigest()}".encode()


def renewal_text(challenge: str, device: str, new: str, certificate: bytes) -> bytes:
    """Return what both keys of a device sign to replace the first by the second.

    Args:
        device: fingerprint of the key that signs, which is registered.
        new: fingerprint of the new key, or "" to say that the first one has replaced its predecessor.
        certificate: the server's certificate, DER.
    """
    return f"polyfed renew\n{challenge}\n{device}\n{new}\n{hashlib.sha256(certificate).hexdigest()}".encode()


class Renewal(NamedTuple):
    """A key that replaces, or has replaced, another one of the same device.

    Attributes:
        key: fingerprint of the new key.
        device: that of the device's first key, which names the device.
        name: the name of the key's file, without `.pub`.
        since: when the new key was first used, and the old one ended; 0 if it has not been used yet.
    """

    key: str
    device: str
    name: str
    since: float


def replaced_keys(renewals: Iterable[Renewal]) -> dict[str, str]:
    """Return old key -> the present one of its device, for keys that were replaced; see `Register.renewals`."""
    used: dict[str, list[str]] = {}
    for one in renewals:
        if one.since:
            used.setdefault(one.device, [one.device]).append(one.key)
    return {old: keys[-1] for keys in used.values() for old in keys[:-1]}


class PrivateKey:
    """The key of a device.

    Args:
        path: the file, in OpenSSH's format.

    Attributes:
        public: the public key, in the same format.
        fingerprint: that of the public key.

    Raises:
        RecipeError: the file cannot be read, or holds no key of a kind that polyfed uses.
    """

    def __init__(self, path: Path) -> None:
        try:
            key = load_ssh_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise RecipeError(
                f"{path} is no private key in OpenSSH's format without a password ({error}). {HOW}"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
            raise RecipeError(f"{path} is a key of type {type(key).__name__}; use ECDSA or Ed25519. {HOW}")
        self._key, self._path = key, path
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        self.public, self.fingerprint = public.decode(), fingerprint(public)

    def read_again(self) -> Self:
        """Return the key that is in the file now; this one if there is none."""
        try:
            return type(self)(self._path)
        except RecipeError:
            return self

    def sign(self, text: bytes) -> str:
        """Return a signature as text."""
        key = self._key
        signed = key.sign(text, ec.ECDSA(SHA256())) if isinstance(key, ec.EllipticCurvePrivateKey) else key.sign(text)
        return base64.b64encode(signed).decode()


def has_signed(key: Any, text: bytes, signature: str) -> bool:
    """Return whether the holder of a public key has signed a text; see `PrivateKey.sign`."""
    try:
        made = base64.b64decode(signature, validate=True)
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(made, text, ec.ECDSA(SHA256()))
        else:
            key.verify(made, text)
        return True
    except (InvalidSignature, Base64Error, ValueError):
        return False


_NOBODY = ec.generate_private_key(ec.SECP384R1()).public_key()


@dataclass
class Keys:
    """The public keys of the devices that may take part, one in each file `*.pub` of a folder.

    Attributes:
        folder: the folder.
        renewals: returns the keys that replace, or have replaced, another one, the newest last.
        known: fingerprint -> key. For a device that renews its key, also the new one, until that is used.
        pending: the new keys that have not been used yet.
    """

    folder: Path
    renewals: Callable[[], Sequence[Renewal]] = tuple
    known: dict[str, Any] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    _device: dict[str, str] = field(default_factory=dict)
    _read: dict[Path, tuple[tuple[int, int], str]] = field(default_factory=dict)
    _stamp: int = 0

    def look_if_changed(self) -> None:
        """Look if a file of the folder has come or gone, so that a revoked key is refused from its next call on."""
        with suppress(OSError):  # the next look says why
            if self.folder.stat().st_mtime_ns != self._stamp:
                self.look()

    def look(self) -> None:
        """Read new and changed files, and drop the keys of files that are gone. The log names each key and fault."""
        logger, found = logger_of("hub", "stderr"), dict[Path, tuple[tuple[int, int], str]]()
        self._stamp = self.folder.stat().st_mtime_ns  # before the look: what changes meanwhile is looked for again
        renewals = self.renewals()
        self._device = {one.key: one.device for one in renewals}
        self.pending = {one.key for one in renewals if not one.since}
        replaced = replaced_keys(renewals)
        for path in sorted(self.folder.glob("*.pub")):
            try:
                stamp = path.stat().st_mtime_ns, path.stat().st_size
                if self._read.get(path, ((0, 0), ""))[0] == stamp:
                    found[path] = self._read[path]
                    continue
                found[path] = stamp, ""
                line = path.read_bytes()
                key = load_ssh_public_key(line)
                if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
                    raise ValueError(f"a key of type {type(key).__name__}, and not ECDSA or Ed25519")
                if (name := fingerprint(line)) in replaced:
                    raise ValueError(f"the device has replaced it by {replaced[name]}")
                found[path], self.known[name] = (stamp, name), key
                logger.info("the key %s of %s is registered", name, path)
            except (OSError, ValueError, UnsupportedAlgorithm, NotImplementedError) as error:  # a compressed point
                logger.warning("%s is no public key in OpenSSH's format (%s). %s", path, error, HOW)
        self._read = found
        for name in self.known.keys() - ({name for _, name in found.values()} - replaced.keys()):
            del self.known[name]
            why = "the device has renewed it" if name in replaced else "its file *.pub is gone"
            logger.warning("the key %s is revoked, because %s", name, why)

    def device(self, key: str) -> str:
        """Return the name of the device that has a key: the fingerprint of its first key."""
        return self._device.get(key, key)

    def has(self, device: str) -> bool:
        """Return whether a key of a device is registered."""
        return device in self.known or any(self._device[key] == device for key in self._device.keys() & self.known)

    def devices(self) -> dict[str, str]:
        """Return the registered devices, each with its present key."""
        result = {self.device(key): key for key in list(self.known) if key not in self.pending}
        return {self.device(key): key for key in list(self.known)} | result

    def file_of(self, key: str) -> Path | None:
        """Return the file of a registered key."""
        return next((path for path, (_, name) in self._read.items() if name == key), None)

    def signed(self, device: str, text: bytes, signature: str) -> bool:
        """Return whether a device has signed a text. It takes as long for a device that is not known."""
        return has_signed(self.known.get(device, _NOBODY), text, signature) and device in self.known


class Logins:
    """Challenges and tokens of a server. Both end with its process; devices then log in again.

    Args:
        keys: the registered keys.
    """

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, tuple[float, str]] = {}  # challenge -> when it ends, and who has signed it
        self._device: dict[bytes, str] = {}  # digest of each token -> its device
        self._token: dict[str, bytes] = {}  # device -> digest of its token
        self._replaced: dict[bytes, None] = {}

    def challenge(self) -> str:
        """Return a text to sign. It proves by itself that this server has made it, so that it needs no memory."""
        text = f"{time.monotonic():.3f}-{secrets.token_hex(16)}"
        return f"{text}-{self._proof(text)}"

    def enter(self, device: str, challenge: str, signature: str, certificates: Iterable[bytes]) -> str:
        """Return a token for a device that has signed a challenge, or "" if it has not. Its older token ends.

        Args:
            certificates: the certificates (DER) that the device may have seen.
        """
        if not self.signed(device, challenge, signature, [message(challenge, seen) for seen in certificates]):
            return ""
        device, token = self.keys.device(device), secrets.token_hex(32)
        if (old := self.end(device)) is not None:
            self._replaced[old] = None
            for forgotten in list(self._replaced)[:-KEPT_TOKENS]:
                del self._replaced[forgotten]
        self._token[device] = _digest(token)
        self._device[_digest(token)] = device
        return token

    def signed(self, key: str, challenge: str, signature: str, texts: Iterable[bytes]) -> bool:
        """Return whether a registered key has signed one of these texts, which hold a challenge. It serves once."""
        text, _, proof = challenge.rpartition("-")
        if not hmac.compare_digest(proof.encode(), self._proof(text).encode()):
            return False
        now, made = time.monotonic(), float(text.partition("-")[0])
        self._used = {used: (end, who) for used, (end, who) in self._used.items() if end > now}
        if now - made > CHALLENGE_SECONDS or challenge in self._used:
            return False
        if not any(self.keys.signed(key, one, signature) for one in texts):
            return False
        self._used[challenge] = made + CHALLENGE_SECONDS + 1, key
        return True

    def end(self, device: str) -> bytes | None:
        """End the token of a device, which has to log in again. Return the digest of the token."""
        if (old := self._token.pop(device, None)) is not None:
            del self._device[old]
        return old

    def crowded(self, device: str) -> bool:
        """Return whether a device has logged in so often that it must wait."""
        now = time.monotonic()
        return sum(end > now and who == device for end, who in self._used.values()) >= MOST_LOGINS

    def device_of(self, token: str) -> str:
        """Return the device that holds a token, or "" if nobody does, or its key is no longer registered."""
        device = self._device.get(_digest(token), "")
        return device if self.keys.has(device) else ""

    def replaced(self, token: str) -> bool:
        """Return whether another process with the same key has logged in since."""
        return _digest(token) in self._replaced

    def _proof(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
