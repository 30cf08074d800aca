"""A device's calls to the server. It talks to the server alone: it follows no redirect, and bounds what it reads.

It uses the standard library, because a device that waits should need little memory.
"""

import errno
import hashlib
import http.client
import json
import math
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from polyfed.core.errors import BadReply, RecipeError, TransportError
from polyfed.core.system.files import without_links
from polyfed.transport.logins import PrivateKey, message, renewal_text
from polyfed.transport.proxy import BehindProxy, https_to

SECONDS = 20.0
"""How long the other side may be silent, beyond the time for which a call is to wait."""

LONGEST_WAIT = 45.0
"""How long an answer to a call that waits may take; the server answers after 25 seconds."""

PIECE = 2**23
"""Size in bytes of the pieces in which a reply is sent."""

BLOCK = 2**16
"""Size in bytes of the blocks of a piece. `SECONDS` count for each of them, so that a slow link is not a silent one."""

UNSENT = 2**18
"""Most bytes that wait in the kernel (which takes twice as many). On a slow link, more would still be on their way when
the answer is given up. They bound the rate to 20 Mbit/s if a round trip takes 200 ms."""

LARGEST_ANSWER = 2**23
"""Largest size in bytes of an answer that is not written to a file. The header of a request has at most 4 MiB."""

FIRST_PAUSE, LONGEST_PAUSE, TOLD_AFTER = 0.5, 30.0, 3
"""Shortest and longest pause in seconds before a call is tried again; each is twice the one before, and varies. After
so many tries, the owner of the device is told."""

CUT, CUT_SECONDS = (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError), 1.0
"""The errors of a call that somebody on the way has cut, if it has waited for so long, after the login: a busy server
itself cuts those that come before."""

CUT_WAIT = (
    "calls that wait for a request are cut after {waited:.0f} seconds without an answer. Let the proxy or firewall on "
    "the way to {where} keep silent connections for 30 seconds; until then, this device calls again and again"
)

LONGEST_WORD = 500
"""Largest length of a challenge and of a token; those of polyfed have 125 and 64 characters."""

MOST_STALLS = 5
"""How often a server may ask for bytes that it has got already. Then the device gives the reply up for a while."""

WARNED_DAYS = 7
"""Days before the end of a server's certificate from which server and devices warn of it."""

DAY = 24 * 3600.0

SKEW_SECONDS = 120.0
"""A clock that differs from the server's by more is told to the owner of the device."""

ANSWERS = (200, 204, 206, 410, 413, 422)
"""The statuses with which the server answers a call. After others, such as those of a proxy, the call is repeated."""

REFUSED = (
    "the server refused the key of this device. Ask the server's operator to put this device's public key (*.pub) into "
    "the credentials folder; the server reads it within seconds"
)
WHY = {503: "the server cannot take it now", 507: "the disk of the server is full"}
"""What some answers mean after which a call is repeated."""

AGAIN = "the same command goes on"
TAKEN_KEY = "the server has the next key of this device already, for another one. Delete the file and call again"

REPLACED = "another process with the key of this device has logged in to the server, so this one ends. End one of them"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk."""

TAKEN, CLOSED, TOO_LARGE = "taken", "closed", "too large"
"""What becomes of a reply: the server has it, nobody waits for it, or the server takes none of this size."""

UNKNOWN_SERVER = (
    "the certificate of the server does not fit {ca}: {error}. If the server has a new authority, this device needs "
    "the new ca.pem"
)


class Piece:
    """A piece of a file, as the body of a call, which may be made several times.

    Args:
        file: an open file, whose position changes.
        offset: where the piece begins.
        size: its size in bytes, at most.
    """

    def __init__(self, file: BinaryIO, offset: int, size: int = PIECE) -> None:
        self.file, self.offset = file, offset
        self.size = max(min(size, file.seek(0, 2) - offset), 0)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        self.file.seek(self.offset)
        left = self.size
        while block := self.file.read(min(left, BLOCK)):
            left -= len(block)
            yield block


class Connection:
    """The calls of one device to its server. Each is repeated until the server answers.

    Args:
        address: `host:port` of the server.
        ca: path of `ca.pem`, which verifies the server's certificate.
        key: the device's key.
        stop: ends the repetition.
        note: called with a sentence when the connection breaks and when it is back.

    Attributes:
        contact: the reading of the monotonic clock when the server last answered; 0 if it never did.
        ends: when the server's certificate ends, in seconds since 1970; 0 if it has shown none.
        certificate: SHA-256 of that certificate, in the form of DER; "" if it has shown none.
        authority: SHA-256 of the file `ca`.
        told_of_cuts: the reading of the clock when the owner was last told that calls are cut.

    Raises:
        RecipeError: the address or the file is wrong.
    """

    def __init__(self, address: str, ca: Path, key: PrivateKey, stop: Event, note: Callable[[str], None]) -> None:
        self.host, self.port = host_and_port(address)
        self.ca, self.key, self.stop, self.note = ca, key, stop, note
        self.contact, self.ends, self.certificate = 0.0, 0.0, ""
        self._opened, self._warned, self._skewed, self.told_of_cuts = 0.0, -DAY, False, -DAY
        self._token, self._sent = "", math.inf
        self._way: http.client.HTTPSConnection | None = None
        try:
            self.authority = hashlib.sha256(ca.read_bytes()).hexdigest()
            self._context = ssl.create_default_context(cafile=str(ca))
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        except (OSError, ssl.SSLError) as error:
            raise RecipeError(f"{ca} cannot be used ({error}); copy ca.pem from the server") from None

    def next(self) -> dict[str, Any] | None:
        """Wait for a request, and return its description, or None if none came in time."""
        status, result = self._call("GET", "/v1/next", patient=True)
        return result if status == 200 else None

    def is_open(self, request: str) -> bool:
        """Return whether the server still waits for the reply to a request."""
        status, result = self._call("GET", f"/v1/requests/{request}")
        return status == 200 and result.get("open") is True

    def fetch(self, request: str, part: str, sha256: str, size: int, path: Path) -> bool:
        """Write a part of a request to a file. A file that has the beginning is continued.

        Args:
            part: `body` or `app`.
            sha256: the digest of the part.
            size: its size in bytes. Nothing beyond it is read.

        Returns:
            Whether the file is complete; not so if nobody waits for the request any more.

        Raises:
            BadReply: the part has another digest, the server sends something else, or the disk of this device is full.
        """
        while (before := _size(path)) < size:
            status, _ = self._call("GET", f"/v1/requests/{request}/{part}", to=path, most=size)
            if status == 410:
                return False
            if status not in (200, 206):
                raise BadReply(f"could not be fetched: the server answered {status}")
            if _size(path) <= before:
                raise BadReply("could not be fetched: the server sends nothing of it")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256 or path.stat().st_size != size:
            path.unlink()
            raise BadReply("has another digest than the server says")
        return True

    def send(self, request: str, path: Path) -> str:
        """Send the reply in a file, piece by piece. Return `TAKEN`, `CLOSED` or `TOO_LARGE`.

        Raises:
            BadReply: the server asks for the same bytes again and again.
        """
        size, offset, stalls = path.stat().st_size, 0, -1
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            while stalls < MOST_STALLS:
                words = f"/v1/replies/{request}?offset={offset}&size={size}&sha256={digest}"
                status, told = self._call("PUT", words, body=Piece(file, offset), again=False)
                if not status:  # the connection broke, and with it perhaps the answer
                    status, told = self._call("GET", f"/v1/requests/{request}")
                    if told.get("answered") is True:
                        return TAKEN
                    status = status if told.get("open") is True else 410
                elif status == 200 and told.get("received", 0) >= size:
                    return TAKEN
                if status != 200 and status != 422:
                    return TOO_LARGE if status == 413 else CLOSED
                # 422: what had come before was of another reply to this request
                received = 0 if status == 422 else min(told.get("received", 0), size)
                stalls = stalls + 1 if received <= offset else 0
                offset = received
        raise BadReply("could not be answered: the server asks for the same bytes of the reply again and again")

    def close(self) -> None:
        """End the connection."""
        if self._way is not None:
            self._way.close()
        self._way = None

    def _call(self, method: str, path: str, *, again: bool = True, **how: Any) -> tuple[int, dict[str, Any]]:
        """Make a call, log in if needed, and repeat the call while the server does not answer.

        Args:
            method: of HTTP.
            path: path and query of the call.
            again: whether to repeat a call that broke. If not, the status of such a call is 0: the server may have
                answered 401, for example, and ended the connection before it had read the body.
            how: see `_once`.

        Raises:
            TransportError: the server refuses this device, or is another one.
            InterruptedError: `stop` is set.
        """
        failures, logins = _Failures(self), 0
        while not self.stop.is_set():
            status, answer = self._tried(method, path, **how)
            if status == 401 and not logins:
                logins = 1
                self._login()
            elif status == 409:
                raise TransportError(REPLACED)
            elif status not in ANSWERS:
                self.stop.wait(failures.add(answer.get("error", status), cut="cut" in answer))
                logins = 0
                if not status and not again:
                    return 0, {}
            else:
                failures.end()
                return status, answer
        raise InterruptedError

    def _tried(self, method: str, path: str, **how: Any) -> tuple[int, dict[str, Any]]:
        """Make a call. If it breaks, return the status 0 and the error, and `cut` if its wait was cut.

        Raises:
            TransportError: no call has succeeded yet, and the server's certificate does not fit.
        """
        self._sent, cut = math.inf, {}
        try:
            return self._once(method, path, **how)
        except ssl.SSLCertVerificationError as error:
            why = UNKNOWN_SERVER.format(ca=self.ca, error=error.verify_message)
            if not self.contact:  # later, somebody in between may be the reason, and the server comes back
                raise TransportError(why) from None
        except BehindProxy as error:
            why = str(error)
        except (OSError, http.client.HTTPException) as error:
            why, waited = f"{type(error).__name__}: {error}", time.monotonic() - self._sent
            if how.get("patient") and isinstance(error, CUT) and waited > CUT_SECONDS:
                why, cut = CUT_WAIT.format(waited=waited, where=f"{self.host}:{self.port}"), {"cut": True}
        self.close()
        return 0, {"error": why, **cut}

    def _login(self) -> None:
        """Log in with the key.

        Raises:
            TransportError: the server refuses the key.
            OSError: the connection broke.
        """
        with suppress(OSError, http.client.HTTPException):
            status, told = self._once("GET", "/v1/challenge")
            sock = self._way.sock if self._way is not None else None
            if status != 200 or not isinstance(sock, ssl.SSLSocket):
                return
            challenge, self.key = told.get("challenge", ""), self.key.read_again()  # it may have been renewed
            signature = self.key.sign(message(challenge, sock.getpeercert(binary_form=True) or b""))
            words = {"device": self.key.fingerprint, "challenge": challenge, "signature": signature}
            status, told = self._once("POST", "/v1/login", body=json.dumps(words).encode())
            if status == 403:
                raise TransportError(REFUSED)
            self._token = told.get("token", "")

    def renew(self, new: PrivateKey | None = None) -> None:
        """Register the device's next key, which both keys sign; or, without one, end the predecessor of this key.

        Neither logs in, so the process of the device goes on. Nothing is repeated, because somebody waits for it.

        Raises:
            RecipeError: the server does not know the key, or has the next one already for another device.
            TransportError: the server does not answer, or is another one.
        """
        where = f"{self.host}:{self.port}"
        try:
            status, told = self._once("GET", "/v1/challenge")
            sock = self._way.sock if self._way is not None else None
            if status != 200 or not isinstance(sock, ssl.SSLSocket):
                raise OSError(f"it answers {status}")
            challenge, seen = told.get("challenge", ""), sock.getpeercert(binary_form=True) or b""
            text = renewal_text(challenge, self.key.fingerprint, new.fingerprint if new is not None else "", seen)
            words = {"device": self.key.fingerprint, "challenge": challenge, "signature": self.key.sign(text)}
            words |= {"key": new.public, "proof": new.sign(text)} if new is not None else {}
            status, _ = self._once("POST", "/v1/renew", body=json.dumps(words).encode())
        except ssl.SSLCertVerificationError as error:
            raise TransportError(UNKNOWN_SERVER.format(ca=self.ca, error=error.verify_message)) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{where} does not answer ({error}). Both keys are kept; {AGAIN}") from None
        if status in (403, 409):
            raise RecipeError(f"{where}: {REFUSED if status == 403 else TAKEN_KEY}")
        if status != 200:
            raise TransportError(f"{where} answers {status}: it cannot renew a key now. Both keys are kept; {AGAIN}")

    def _once(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Piece | None = None,
        to: Path | None = None,
        most: int = LARGEST_ANSWER,
        patient: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Make one call. Return its status and its answer, a table unless the answer was written to a file.

        Args:
            to: a file that the answer completes.
            most: largest number of bytes of the answer, or of the file.
            patient: whether the server may take its time.
        """
        way = self._connected(LONGEST_WAIT if patient else SECONDS)
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        if to is not None and (have := _size(to)):
            headers["range"] = f"bytes={have}-"
        if body is not None:
            headers["content-length"] = str(len(body))
        way.request(method, path, body=body, headers=headers)
        if self._token:
            self._sent = time.monotonic()
        answer = way.getresponse()
        self.contact = time.monotonic()
        self._look_at_clocks(answer.getheader("date", ""))
        if to is not None and answer.status in (200, 206):
            _write(answer, to, most, answer.status == 206)
            return answer.status, {}
        text = answer.read(most + 1)
        if len(text) > most:
            raise OSError(f"an answer of more than {most} bytes")
        if answer.will_close:
            self.close()
        if answer.status != 200:
            return answer.status, {"error": WHY.get(answer.status, f"status {answer.status}")}
        try:
            result = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OSError(f"an answer that is no JSON: {type(error).__name__}") from None
        return 200, _checked(result)

    def _connected(self, seconds: float) -> http.client.HTTPSConnection:
        if self._way is not None and self._ends_soon and time.monotonic() - self._opened > DAY:
            self.close()  # a new line shows whether the certificate has been renewed
        if self._way is not None and self._way.sock is None:
            self.close()  # it broke, and nobody was told, because a failed login only means another try
        if self._way is None:
            way = https_to(self.host, self.port, self._context, SECONDS)
            try:
                way.connect()
            except BaseException:
                way.close()
                raise
            way.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
            self._way = way  # only now, because one that never connected would stay and fail
            self._opened = time.monotonic()
            shown: Any = self._way.sock.getpeercert() if isinstance(self._way.sock, ssl.SSLSocket) else None
            self.ends = ssl.cert_time_to_seconds(shown["notAfter"]) if shown else 0.0
            whole = self._way.sock.getpeercert(binary_form=True) if shown else None
            self.certificate = hashlib.sha256(whole).hexdigest() if whole else ""
        self._way.sock.settimeout(seconds)
        return self._way

    @property
    def _ends_soon(self) -> bool:
        return bool(self.ends) and self.ends - time.time() <= WARNED_DAYS * DAY

    def _look_at_clocks(self, date: str) -> None:
        """Tell the owner, once a day, that the certificate ends soon, and once that the clocks differ.

        Args:
            date: the header of an answer.
        """
        if self._ends_soon and time.monotonic() - self._warned > DAY:
            self._warned = time.monotonic()
            left = (self.ends - time.time()) / DAY
            self.note(f"the server's certificate ends in {left:.1f} days. Then this device cannot connect: {RENEW}")
        skew = ahead_of(date)
        if abs(skew) <= SKEW_SECONDS:
            self._skewed = False
        elif not self._skewed:
            self._skewed = True
            self.note(different_clocks(skew))


class _Failures:
    """The failures of one call: the pauses between its tries, and what its owner is told.

    A call that waited and was then cut did reach the server, so its tries need no growing pauses.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self._pause, self._told = connection, FIRST_PAUSE, False
        self._count, self._cut = 0, False

    def add(self, why: Any, *, cut: bool) -> float:
        """Note a failure, and whether somebody cut the call. Return how many seconds to pause."""
        made, self._count, self._cut = self.connection, self._count + 1 if cut == self._cut else 1, cut
        if cut:
            self.end()
        if self._count == TOLD_AFTER and not cut and not self._told:
            self._told = True
            made.note(f"no contact with {made.host}:{made.port}, trying again ({why})")
        elif self._count == TOLD_AFTER and cut and time.monotonic() - made.told_of_cuts > DAY:
            made.told_of_cuts = time.monotonic()
            made.note(why)
        pause, self._pause = self._pause, FIRST_PAUSE if cut else min(2 * self._pause, LONGEST_PAUSE)
        return pause * random.uniform(0.5, 1.0)

    def end(self) -> None:
        """Tell the owner that there is contact again, if the last word was that there is none."""
        if self._told:
            self._told = False
            self.connection.note(f"contact with {self.connection.host}:{self.connection.port} again")


RENEW = "the server's operator puts ca.key back into the server's folder, and `polyfed server` renews it"


def ahead_of(date: str) -> float:
    """Return by how many seconds this machine's clock is ahead of the date in an answer; 0 without one."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0


def different_clocks(skew: float) -> str:
    """Say that this machine's clock is so many seconds ahead of the server's, and what follows."""
    size, name = next(((size, name) for size, name in _TIMES if abs(skew) >= 2 * size), _TIMES[-1])
    where = "ahead of" if skew > 0 else "behind"
    return (
        f"the clock of this device is {abs(skew) / size:.0f} {name} {where} the server's. Joining and training do not "
        "depend on it, but a certificate that seems to have ended, or not to have begun, does: set it"
    )


_TIMES = ((DAY, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def _write(answer: http.client.HTTPResponse, path: Path, most: int, more: bool) -> None:
    """Write an answer to a file, or add it if it is `more` of it, until the file has `most` bytes.

    Raises:
        OSError: the answer is longer.
        BadReply: the disk is full. The server offers the request again.
    """
    with open(path, "ab" if more else "wb", opener=without_links) as file:
        while piece := answer.read(min(2**20, most - file.tell() + 1)):
            if file.tell() + len(piece) > most:
                raise OSError("the server sends more bytes than it said")
            try:
                file.write(piece)
                file.flush()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                why = f"does not fit the disk of this device ({error.strerror}). Make room; it is fetched again"
                raise BadReply(why) from None


def _checked(told: Any) -> dict[str, Any]:
    """Return what the server said, if the parts that this module uses are such as a server says.

    Raises:
        OSError: it is not.
    """
    if not isinstance(told, dict):
        raise OSError("an answer that is no table")
    words, received = (told.get("challenge", ""), told.get("token", "")), told.get("received", 0)
    if not all(isinstance(word, str) and word.isascii() and word.isprintable() for word in words):
        raise OSError("an answer with words that are none")
    if max(map(len, words)) > LONGEST_WORD or type(received) is not int or received < 0:
        raise OSError("an answer with a word that is too long, or a number that is none")
    return told


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address.

    Raises:
        RecipeError: it is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host.strip("[]") or not port.isdigit() or not 0 < int(port) < 2**16:
        raise RecipeError(f"'{address}' is not an address; write HOST:PORT, as server.example.org:9092")
    return host.strip("[]"), int(port)
