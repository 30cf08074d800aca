"""The calls with which a new device joins a server: it recognises the server first, and only then says anything secret.

The first call asks for `ca.pem` over a line that proves nothing yet, and sends nothing. Only if its digest is that of
the token does the device trust this authority, and it opens a second line, on which TLS checks the server's
certificate, its host and its time. Whoever sits in between can pass `ca.pem` on, but has no certificate.
"""

import hashlib
import hmac
import http.client
import json
import socket
import ssl
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Timer
from typing import Any

from polyfed.core.errors import RecipeError, TransportError
from polyfed.transport.connection import SECONDS, ahead_of, host_and_port
from polyfed.transport.logins import PrivateKey
from polyfed.transport.proxy import BehindProxy, https_to
from polyfed.transport.tokens import LARGEST_RECIPE, MOST_NUMBER, NAME, JoinToken, joining_text

CALL_SECONDS = 60.0
"""How long a call may take, however slowly the other side answers."""

LARGEST_AUTHORITY, LARGEST_TOLD = 2**16, 8 * LARGEST_RECIPE
"""Largest sizes in bytes of `ca.pem`, and of the server's answer, in which a letter of the recipe may take several."""

AGAIN = "Ask the server's operator for a new one: polyfed server token DIR"

WHY = {
    "unknown": f"the server knows no such token; it is another server's, or the server has lost its register. {AGAIN}",
    "used": "the token has been used already, and by another key than this device's. If you did not use it, somebody "
    f"else has: tell the server's operator, who revokes that device. {AGAIN}",
    "late": f"the token came too late: its time is over by the server's clock. {AGAIN}",
    "revoked": f"the server's operator has revoked the token, or this device. {AGAIN}",
    "known": "the server knows the key of this device already, under another name or number. One key is one device: "
    "join from another --folder, which gets a key of its own",
    "name": "the server has a file with the name of this device already. Ask its operator for another name",
}
"""The words with which a server refuses to register a key, and what they mean. No text of a server is shown."""


@dataclass(frozen=True)
class Place:
    """What a server gives to the holder of a token.

    Attributes:
        number: the client number of the device.
        name: its name at the server.
        recipe: the recipe that the server is about to run, or "" if it tells none.
    """

    number: int
    name: str
    recipe: str


class Door:
    """The calls of a device that joins. None is repeated, because somebody waits before the terminal.

    Attributes:
        authority: the bytes of `ca.pem`, after `recognise`.
        skew: by how many seconds this device's clock is ahead of the server's, after `ask`.
    """

    def __init__(self, token: JoinToken) -> None:
        self.token, self.authority, self.skew = token, b"", 0.0
        self.host, self.port = host_and_port(token.address)

    def recognise(self) -> None:
        """Fetch `ca.pem` and compare it with the token. Nothing is sent but the name of the page.

        Raises:
            TransportError: the server does not answer, or is not that of the token.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # whatever comes is compared with the token
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        status, text = self._call(context, "GET", "/v1/authority", LARGEST_AUTHORITY)
        if status != 200:
            raise TransportError(f"{self.token.address} answers {status}, as no polyfed server of this version does")
        came = hashlib.sha256(text).digest()
        if not hmac.compare_digest(came, self.token.authority):
            raise TransportError(
                f"{self.token.address} is not the server of this token: its authority has the fingerprint "
                f"{came.hex()[:16]}..., the token says {self.token.authority.hex()[:16]}... Somebody is in between, "
                "it is another server, or its operator has made a new authority. Nothing was sent. Compare with: "
                "sha256sum DIR/ca.pem"
            )
        self.authority = text

    def ask(self, device: str = "") -> Place:
        """Ask what the token gives. It stays unused.

        Args:
            device: fingerprint of the key of this device, if an earlier call may have registered it.

        Raises:
            RecipeError: the server does not take the token.
            TransportError: the server does not answer, or is not that of the token.
        """
        match self._told({"device": device}):
            case {"number": int(number), "name": str(name), "recipe": str(recipe)} if (
                type(number) is int
                and 0 <= number < MOST_NUMBER
                and NAME.fullmatch(name)
                and len(recipe) <= LARGEST_RECIPE
            ):
                return Place(number, name, recipe)
        raise TransportError(f"{self.token.address} answers as no polyfed server of this version does")

    def register(self, key: PrivateKey) -> None:
        """Register the public key of this device. The same key may do so again, because an answer may be lost.

        Raises:
            RecipeError: the server does not take the token or the key.
            TransportError: see `ask`.
        """
        self._told({"key": key.public}, key)

    def _told(self, words: dict[str, str], key: PrivateKey | None = None) -> dict[str, Any]:
        """Send the secret and further words to the server, and return its answer."""
        assert self.authority, "the server is recognised before anything is sent"
        try:
            context = ssl.create_default_context(cadata=self.authority.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise TransportError(f"{self.token.address}: its ca.pem holds no certificate. Ask its operator") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        words = {"secret": self.token.secret.hex(), **words}
        status, text = self._call(context, "POST", "/v1/join", LARGEST_TOLD, words, key)
        if status == 429:
            raise TransportError(
                "the server has had too many failed tries from this address. Wait a minute, then again"
            )
        try:
            result = json.loads(text)
            if not isinstance(result, dict):
                raise ValueError("no table")
        except (ValueError, RecursionError):
            result = {}
        if status == 403 and isinstance(why := result.get("refused"), str) and why in WHY:
            raise RecipeError(f"{self.token.address}: {WHY[why]}")
        if status != 200:
            raise TransportError(
                f"{self.token.address} answers {status}: it cannot register this device now. Try again"
            )
        return result

    def _call(
        self,
        context: ssl.SSLContext,
        method: str,
        path: str,
        most: int,
        words: dict[str, str] | None = None,
        key: PrivateKey | None = None,
    ) -> tuple[int, bytes]:
        """Make one call on a line of its own.

        Args:
            words: the body; with `key`, a signature is added that holds for the certificate of this line alone.

        Raises:
            TransportError: the server does not answer in time, sends more than `most` bytes, or is another one.
        """
        way = https_to(self.host, self.port, context, SECONDS)
        watch = Timer(CALL_SECONDS, lambda: _cut(way))  # whatever it says after that is no whole answer
        watch.daemon = True
        watch.start()
        held = ExitStack()
        try:
            way.connect()
            if words is not None and key is not None:
                seen = way.sock.getpeercert(binary_form=True) or b""
                words = {**words, "signature": key.sign(joining_text(self.token.secret, seen))}
            way.request(method, path, body=None if words is None else json.dumps(words).encode())
            answer = held.enter_context(way.getresponse())
            self.skew = ahead_of(answer.getheader("date", ""))
            if answer.length is None:
                raise OSError("it takes too long, or broke off")
            if answer.length > most:
                raise TransportError(f"{self.token.address} sends more than a polyfed server does")
            text = answer.read()
            return answer.status, text
        except ssl.SSLCertVerificationError as error:
            raise TransportError(_not_trusted(self.token.address, error)) from None
        except BehindProxy as error:
            raise TransportError(f"{error}. The token stays as it is; the same command tries again") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a socket that was cut
            raise TransportError(
                f"{self.token.address} does not answer ({type(error).__name__}: {error}). Is it running, and "
                "its port open? The token stays as it is; the same command tries again"
            ) from None
        finally:
            watch.cancel()
            held.close()
            way.close()


def _cut(way: http.client.HTTPSConnection) -> None:
    with suppress(OSError, AttributeError):
        way.sock.shutdown(socket.SHUT_RDWR)


def _not_trusted(address: str, error: ssl.SSLCertVerificationError) -> str:
    """Say why TLS does not take the server's certificate, and what this device's clock has to do with it."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    timed = error.verify_code in (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
    cause = (
        f"This device's clock says {now}. If it is wrong, set it; else the server's operator renews the certificate"
        if timed
        else "Somebody is in between, or the certificate is not for this name: ask the server's operator"
    )
    return f"{address}: its certificate is not valid ({error.verify_message}). Nothing was sent. {cause}"
