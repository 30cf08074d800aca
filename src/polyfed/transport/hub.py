"""The server's web application for devices: they log in, wait for requests, fetch what these carry, and send replies.

A call by a stranger is refused before its body is read. A device reaches only its own open requests. Bodies travel as
files: a device fetches one from any byte on, and sends its reply in pieces, each of which says where it begins, so that
a connection that breaks costs only what was under way.
"""

import asyncio
import hashlib
import logging
import os
import resource
import socket
import sqlite3
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, Router
from typing_extensions import override

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.system.files import lock
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.log_lines import logger_of
from polyfed.transport.carried import Carried, Meter
from polyfed.transport.connection import FULL
from polyfed.transport.logins import Keys, Logins, fingerprint, has_signed, renewal_text
from polyfed.transport.queue import ANSWERED, OPEN, REQUEST, SERVER, Bell, Queue, Waiting
from polyfed.transport.refusals import Refusals
from polyfed.transport.tokens import LARGEST_RECIPE, Entry, NotJoined, Register, joining_text, public_line
from polyfed.transport.web import Chain, Listener, MeasuredFile, Peer, give_back_memory, public_config, refuse

WAIT_SECONDS = 25.0
"""How long a call waits for a request. Many proxies end a silent connection after 30 or 60 seconds."""

AWAY_SECONDS = 5.0
"""A device is online while one of its calls goes on, and for so long afterwards."""

LARGEST_LOGIN, LOGIN_SECONDS = 2**12, 20.0
"""Largest size in bytes of the body of a login and of joining, and within how many seconds the body must have come."""

FAILED, FAILED_SECONDS, MOST_ADDRESSES = 10.0, 6.0, 1000
"""How often an address may fail to join at once, the seconds after which it may once more, and the number of addresses
that the server remembers. A secret has 128 bits, so nobody guesses one; the limit is for the log and the disk."""

RENEWALS, RENEWAL_SECONDS = 10.0, 3600.0
"""How many next keys a device may register at once, and the seconds after which it may one more. Each stays in the log,
and one that is used in the folder and the register, too."""

OPEN_PAGES = ("/v1/challenge", "/v1/login", "/v1/authority", "/v1/join", "/v1/renew")
"""The pages for those who have not logged in."""

CALLS, CALLS_PER_SECOND = 500.0, 100.0
"""Calls that a device may make at once, and afterwards per second. Later ones wait, so that no device takes all of the
server's time. A small task takes four calls, and a device at least 0.1 seconds."""

LARGEST_PIECE, DRAIN_SECONDS = 2**23, 20.0
"""Most bytes that are read of a piece of a reply that is refused, and for how long."""

LOOK_SECONDS, TIDY_SECONDS, DAY = 1.0, 5.0, 24 * 3600.0
"""Seconds between two looks for devices that are gone, for new keys and for runs that have ended, and of a day."""

MANY, TRIM_SECONDS = 50, 60.0
"""After so many connections have begun or ended, memory goes back to the system, at most once in these seconds
(inferred)."""

END_SECONDS = 2
"""How long a server that ends waits for the calls that go on, and for devices that do not close their connections."""

UNKNOWN_KEY = "the key is not registered, or the signature is wrong"

LOGGER = logger_of("hub", "stderr")


class Hub:
    """The ASGI application.

    Args:
        queue: the requests and replies.
        keys: the keys of the devices that may take part. Their folder has `ca.pem`, and `recipe.toml` for new devices.
        register: the devices that may join, and those that have.
        certificates: returns the server's certificates (DER) that a device may have seen.
        admit: called with the other end of a connection and the device that has made a call on it.
        hang_up: ends all connections.
        unsent: returns how many bytes the other end of a connection has not acknowledged, or None if nobody knows.
    """

    def __init__(
        self,
        queue: Queue,
        keys: Keys,
        register: Register,
        certificates: Callable[[], Sequence[bytes]],
        admit: Callable[[Peer, str], None] = lambda peer, device: None,
        hang_up: Callable[[], None] = lambda: None,
        unsent: Callable[[Peer], int | None] = lambda peer: None,
    ) -> None:
        self.queue, self.logins, self.certificates, self.register = queue, Logins(keys), certificates, register
        self.admit, self.hang_up, self.unsent, self.meter = admit, hang_up, unsent, Meter()
        self.ended, self.refusals = False, Refusals(self._note)
        self.online: dict[str, float] = {}  # device -> time of its last contact
        self._calls: Counter[str] = Counter()  # calls of each device that go on
        self._wake: dict[str, asyncio.Event] = {}  # device -> its call waits for a request
        self._uploads: dict[str, object] = {}  # request -> the newest call that sends its reply
        self._quota: dict[str, tuple[float, float]] = {}  # device -> calls that it may make at once, and since when
        self._failed: dict[str, tuple[float, float]] = {}  # address -> tries that it may fail at once, and since when
        self._renewals: dict[str, tuple[float, float]] = {}  # device -> keys that it may register now, and since when
        self._open = Router(
            [
                Route("/v1/challenge", self._challenge),
                Route("/v1/login", self._login, methods=["POST"]),
                Route("/v1/authority", self._authority),
                Route("/v1/join", self._join, methods=["POST"]),
                Route("/v1/renew", self._renew, methods=["POST"]),
            ],
            redirect_slashes=False,
        )
        self._closed = Router(
            [
                Route("/v1/next", self._next),
                Route("/v1/requests/{request}", self._is_open),
                Route("/v1/requests/{request}/{part:str}", self._part),
                Route("/v1/replies/{request}", self._reply, methods=["PUT"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call."""
        if scope["type"] != "http":
            return
        try:
            if scope["path"] in OPEN_PAGES:
                await self._open(scope, receive, send)
                return
            self.logins.keys.look_if_changed()
            scope["device"] = device = self._known(scope)
            self.admit(scope["client"], device)
            with self._contact(device):
                await self._turn(device)
                await self._answered(scope, receive, send)
        except HTTPException as error:
            await refuse(send, error.status_code, error.detail)
        except (OSError, sqlite3.Error, RuntimeError, PolyfedError) as error:  # a full disk, ...; devices try again
            LOGGER.warning("a call failed: %s", error)
            full = getattr(error, "errno", 0) in FULL or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            with suppress(RuntimeError):  # the answer has begun
                await refuse(send, 507 if full else 503, "the server cannot do this now")
        except ClientDisconnect:
            pass

    async def _answered(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a device. If it is refused, read the piece that it sends, which else could hide the answer from it."""
        ended = False

        async def heard() -> Any:
            nonlocal ended
            event = await receive()
            ended = not event.get("more_body", False)
            return event

        async def drained() -> None:
            left = LARGEST_PIECE
            while not ended and left > 0:
                left -= len((await heard()).get("body", b""))

        try:
            await self._closed(scope, heard, send)
        except HTTPException:
            with suppress(TimeoutError):
                await asyncio.wait_for(drained(), DRAIN_SECONDS)
            raise

    async def _turn(self, device: str) -> None:
        """Let a device that makes many calls wait."""
        now = time.monotonic()
        left = _refilled(self._quota.get(device), CALLS, CALLS_PER_SECOND, now) - 1
        self._quota[device] = left, now
        if left < 0:
            await asyncio.sleep(-left / CALLS_PER_SECOND)

    def _known(self, scope: Any) -> str:
        """Return the device that makes a call.

        Raises:
            HTTPException: nobody has logged in with the token of the call.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        token = given[0].removeprefix(b"Bearer ").decode("latin-1") if len(given) == 1 else ""
        if device := self.logins.device_of(token):
            return device
        if self.logins.replaced(token):
            raise HTTPException(409, "another process with this key has logged in")
        raise HTTPException(401, "log in first")

    @contextmanager
    def _contact(self, device: str) -> Iterator[None]:
        """Count the device as online during a call, and for a while afterwards."""
        if device not in self.online:
            self.queue.mark({device: True})
            LOGGER.info("device %s is online", device)
        self.online[device] = time.monotonic()
        self._calls[device] += 1
        try:
            yield
        finally:
            self._calls[device] -= 1
            self.online[device] = time.monotonic()

    async def _challenge(self, call: Request) -> Response:
        return JSONResponse({"challenge": self.logins.challenge()})

    async def _login(self, call: Request) -> Response:
        told = await _words(call, "device", "challenge", "signature")
        device, challenge, signature = (told[name] for name in ("device", "challenge", "signature"))
        if self.logins.crowded(device):
            raise HTTPException(429, "this device has logged in too often")
        if not (token := self.logins.enter(device, challenge, signature, self.certificates())):
            self.refusals.add(f"login: {UNKNOWN_KEY}", device)
            raise HTTPException(403, UNKNOWN_KEY)
        self._confirm(device)
        return JSONResponse({"token": token})

    async def _renew(self, call: Request) -> Response:
        """Register the next key of a device, which its present one has signed; or end the present one's predecessor."""
        told = await _words(call, "device", "challenge", "signature")
        old, challenge, line, key = told["device"], told["challenge"], b"", None
        if self.logins.crowded(old):
            raise HTTPException(429, "this device has called too often")
        try:
            line, key = public_line(told["key"]) if "key" in told else (b"", None)
        except ValueError:
            raise HTTPException(400, "this is no public key") from None
        new = fingerprint(line) if line else ""
        texts = [renewal_text(challenge, old, new, seen) for seen in self.certificates()]
        if not self.logins.signed(old, challenge, told["signature"], texts):
            self.refusals.add(f"renewal: {UNKNOWN_KEY}", old)
            raise HTTPException(403, UNKNOWN_KEY)
        if self._confirm(old):
            self.logins.end(device := self.logins.keys.device(old))  # also of whoever has logged in with the old key
            if device in self._wake:
                self._wake[device].set()
        if line:
            if not any(has_signed(key, text, told.get("proof", "")) for text in texts):
                self.refusals.add("renewal: the new key has not signed", new)
                raise HTTPException(400, "the new key has not signed")
            self._take_key(old, new, line)
        return JSONResponse({"device": self.logins.keys.device(old)})

    def _take_key(self, old: str, new: str, line: bytes) -> None:
        """Register the next key of the device whose present key is `old`.

        Raises:
            HTTPException: the next key is known already, or the device has had too many.
        """
        self.logins.keys.look()
        path, device, now = self.logins.keys.file_of(old), self.logins.keys.device(old), time.monotonic()
        try:
            if path is None or new in self.logins.keys.known.keys() - self.logins.keys.pending:
                raise NotJoined("known")
            if (left := _refilled(self._renewals.get(device), RENEWALS, 1 / RENEWAL_SECONDS, now)) < 1:
                raise HTTPException(429, "this device has renewed its key too often")
            self._renewals[device] = left - 1, now  # of the device: each key of a chain could renew once
            self.register.renew(device, path.stem, line)
        except NotJoined:
            self.refusals.add("renewal: the server knows this key already", new)
            raise HTTPException(409, "the server knows this key already") from None
        self.logins.keys.look()
        LOGGER.info("the device with the key %s renews it; its next key is %s", old, new)

    def _confirm(self, key: str) -> bool:
        """End the predecessor of a key that has just been used for the first time. Return whether it was the first."""
        if key not in self.logins.keys.pending:
            return False
        self.register.confirm(key)
        self.logins.keys.look()
        return True

    async def _authority(self, call: Request) -> Response:
        """Send `ca.pem`, which is no secret: a new device compares it with its token."""
        path = self.logins.keys.folder / "ca.pem"
        if not path.is_file():
            raise HTTPException(404, "this server has no ca.pem")
        return FileResponse(path, media_type="application/x-pem-file")

    async def _join(self, call: Request) -> Response:
        """Tell the holder of a token what it gives, or register the public key that comes with it."""
        if self._tries(address := _address(call)) < 1:
            raise HTTPException(429, "too many failed tries from this address")
        words = dict[str, str]()
        try:
            words = await _words(call, "secret")
            entry = self._entered(words, bytes.fromhex(words["secret"]))
        except (HTTPException, NotJoined, ValueError) as error:
            left = self._tries(address) - 1
            self._failed.pop(address, None)  # so that the newest stand last
            self._failed[address] = left, time.monotonic()
            for old in list(self._failed)[:-MOST_ADDRESSES]:
                del self._failed[old]
            if isinstance(error, NotJoined):
                number, name = (None, "") if error.entry is None else (error.entry.number, error.entry.name)
                self.refusals.add(f"token: {error}", _fingerprint_in(words), number, name)
                return JSONResponse({"refused": str(error)}, 403)
            raise error if isinstance(error, HTTPException) else HTTPException(400, "this is no call to join") from None
        recipe = self.logins.keys.folder / "recipe.toml"
        text = recipe.read_text(encoding="utf-8") if recipe.is_file() and "key" not in words else ""
        return JSONResponse({"number": entry.number, "name": entry.name, "recipe": text[:LARGEST_RECIPE]})

    def _entered(self, words: dict[str, str], secret: bytes) -> Entry:
        """Return the device of a secret, and register its key if there is one.

        Raises:
            NotJoined: there is no such device, or it has another key.
            ValueError: the key is none, or the call is not signed with it for this server.
        """
        if "key" not in words:
            return self.register.find(secret, words.get("device", ""))
        line, key = public_line(words["key"])
        self.register.find(secret, fingerprint(line))  # before the signature, whose check takes time
        seen = (joining_text(secret, one) for one in self.certificates())
        if not any(has_signed(key, text, words.get("signature", "")) for text in seen):
            raise ValueError("no signature for this server")
        self.logins.keys.look()
        known = fingerprint(line) in {*self.logins.keys.known, *self.register.replaced()}
        entry = self.register.enter(secret, line, known)
        self.logins.keys.look()
        LOGGER.info("device %d, %s, has joined with the key %s", entry.number, entry.name, entry.key)
        return entry

    def _note(self, events: Sequence[dict[str, Any]]) -> None:
        """Write refusals to the register's log. A call is refused also if they cannot be written."""
        try:
            self.register.note(events)
        except (OSError, sqlite3.Error, PolyfedError) as error:
            LOGGER.warning("refusals are not in the log: %s", error)

    def _tries(self, address: str) -> float:
        """Return how often an address may fail now."""
        return _refilled(self._failed.get(address), FAILED, 1 / FAILED_SECONDS, time.monotonic())

    async def _next(self, call: Request) -> Response:
        """Wait for a request to the device, and describe it; 204 if none comes."""
        device, end = call.scope["device"], time.monotonic() + WAIT_SECONDS
        gone = asyncio.ensure_future(_disconnected(call))
        if device in self._wake:
            self._wake[device].set()  # an older call ends, as its connection may have broken without a word
        self._wake[device] = wake = asyncio.Event()
        try:
            while self._wake.get(device) is wake:
                self._known(call.scope)  # else its token has ended meanwhile
                wake.clear()
                if (result := self.queue.next_for(device)) is not None:
                    self.meter.offered(result.id)
                    return JSONResponse(_offer(result, self.queue))
                rung = asyncio.ensure_future(wake.wait())
                await asyncio.wait([gone, rung], timeout=end - time.monotonic(), return_when="FIRST_COMPLETED")
                rung.cancel()
                if gone.done() or self.ended or time.monotonic() >= end:
                    break
            return Response(status_code=204)
        finally:
            gone.cancel()
            if self._wake.get(device) is wake:
                del self._wake[device]

    async def _is_open(self, call: Request) -> Response:
        """Say whether anybody waits for the reply to a request, whether it has come, and how much of it."""
        found = self._own(call)
        part = self.queue.reply(found.id, "part")
        received = part.stat().st_size if part.exists() else 0
        result = {"open": found.state == OPEN, "answered": found.state == ANSWERED, "received": received}
        return JSONResponse(result)

    async def _part(self, call: Request) -> Response:
        """Send the body or the app of a request; a range if the call asks for one."""
        found = self._own(call)
        if "," in call.headers.get("range", ""):
            raise HTTPException(400, "a call asks for one range")
        name = {"body": found.body, "app": found.app}.get(call.path_params["part"])
        path = self.queue.file(found.run, name or "none")
        if found.state != OPEN or not path.is_file():
            raise HTTPException(410, "nobody waits for this request any more")
        peer = call.scope["client"]
        return MeasuredFile(path, lambda: self.unsent(peer), partial(self.meter.down, found.id))

    async def _reply(self, call: Request) -> Response:
        """Take a piece of a reply. The answer says how many bytes of the reply have come, and thus where to go on."""
        found = self._own(call)
        offset, size, digest = _numbers(call)
        if size > found.most:
            raise HTTPException(413, f"a reply to this request has at most {found.most} bytes")
        part = self.queue.reply(found.id, "part")
        if found.state != OPEN:
            part.unlink(missing_ok=True)
        if found.state == ANSWERED:
            return JSONResponse({"received": size})  # the answer to the last piece was lost
        if found.state != OPEN:
            raise self._too_late(found)
        self._uploads[found.id] = mine = object()  # an older call may be of a connection that has broken
        try:
            received = await self._take(call, part, offset, size, found.id, lambda: self._uploads.get(found.id) is mine)
            if received == size:
                del self._uploads[found.id]
                await self._complete(found, digest, call)
            return JSONResponse({"received": received})
        except FileNotFoundError:  # the request was closed meanwhile, for example because its run has ended
            raise self._too_late(found) from None
        finally:
            if self._uploads.get(found.id) is mine:
                del self._uploads[found.id]
            now = self.queue.find(found.id)
            if now is None or now.state != OPEN:  # it was closed meanwhile, and `shut` came before us
                part.unlink(missing_ok=True)

    async def _take(
        self, call: Request, part: Path, offset: int, size: int, request: str, newest: Callable[[], bool]
    ) -> int:
        """Add a piece to the file of a reply, and return the size of the file.

        A piece that begins elsewhere than at the end of the file adds nothing, and neither does one of an older call.

        Raises:
            FileNotFoundError: the request was closed meanwhile, and the file deleted.
        """
        since = self.meter.begins(request)
        with open(part, "ab", buffering=0) as file:  # so that an older call has nothing left to write when it ends
            before, fits = file.tell(), file.tell() == offset
            try:
                async for piece in call.stream():  # to its end, because the other side reads no answer before
                    if not newest():
                        raise HTTPException(429, "another call sends this reply")
                    if not os.fstat(file.fileno()).st_nlink:  # closed meanwhile; the open file would hold the disk
                        raise FileNotFoundError(part)
                    if fits and file.tell() + len(piece) > size:
                        raise HTTPException(413, f"this reply has {size} bytes")
                    while fits and piece:
                        piece = piece[file.write(piece) :]
            except OSError as error:
                if error.errno not in FULL:
                    raise
                LOGGER.warning("a reply does not fit the disk: %s", error)
                raise HTTPException(507, "the disk of the server is full") from error
            finally:
                self.meter.up(request, file.tell() - before, since)  # of a piece that breaks too
            return min(file.tell(), size)

    async def _complete(self, found: Waiting, digest: str, call: Request) -> None:
        """Check the digest of a whole reply, and hand the reply to the run.

        Raises:
            FileNotFoundError: the request was closed meanwhile.
        """
        part, whole = self.queue.reply(found.id, "part"), self.queue.reply(found.id, "whole")
        part.rename(whole)  # no call adds to it any more
        if await asyncio.to_thread(_digest_of, whole) != digest:
            whole.unlink(missing_ok=True)
            raise HTTPException(422, "the reply has another digest")
        try:
            self._known(call.scope)  # its key may have been revoked meanwhile
        except HTTPException:
            whole.unlink(missing_ok=True)
            raise
        carried = self.meter.ended(found.id)
        if not self.queue.deliver(found, "whole", carried):
            raise self._too_late(found, carried)

    def _too_late(self, found: Waiting, carried: Carried | None = None) -> HTTPException:
        """Note that a reply came after its request was closed, and return the answer to it."""
        self.queue.too_late(found, carried or self.meter.ended(found.id))
        return HTTPException(410, "nobody waits for this reply any more")

    def _own(self, call: Request) -> Waiting:
        """Return the request that a call names.

        Raises:
            HTTPException: there is no such request for this device.
        """
        name = call.path_params["request"]
        result = self.queue.find(name) if REQUEST.fullmatch(name) else None
        if result is None or result.device != call.scope["device"]:
            raise HTTPException(410, "there is no such request for this device")
        return result

    async def look(self, bell: Bell) -> None:
        """Wake the calls of devices for which there are requests, and notice which devices are gone. Never ends."""
        asyncio.get_running_loop().add_reader(bell.number, self._rung, bell)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self._rung(bell)
                self._notice()
            except (OSError, sqlite3.Error) as error:
                LOGGER.warning("the queue cannot be read or written now: %s", error)

    def _notice(self) -> None:
        """Note which devices have gone."""
        now = time.monotonic()
        gone = [one for one, last in self.online.items() if not self._calls[one] and now - last > AWAY_SECONDS]
        if gone:
            self.queue.mark(dict.fromkeys(gone, False))
        for device in gone:
            LOGGER.info("device %s is offline", device)
            del self.online[device], self._calls[device]
            self._quota.pop(device, None)

    def _rung(self, bell: Bell) -> None:
        bell.drain()
        for device in self.queue.wanted() & self._wake.keys():
            self._wake[device].set()

    def end(self) -> None:
        """Answer the calls that wait, because the server ends."""
        self.ended = True
        for wake in self._wake.values():
            wake.set()

    def facts(self) -> dict[str, Any]:
        """Return facts for the status page: see `polyfed.deploy.server.monitor.status_of`."""
        known, online = self.logins.keys.devices(), set(self.online)  # copies: another thread may ask
        away = sorted(key for device, key in known.items() if device not in online)
        return {"nodes": {"registered": len(known), "online": len(online)}, "away": away}


def _offer(found: Waiting, queue: Queue) -> dict[str, Any]:
    app = queue.file(found.run, found.app)
    return {
        "id": found.id,
        "header": found.header,
        "body": {"sha256": found.body, "size": found.size},
        "app": {"sha256": found.app, "size": app.stat().st_size if app.is_file() else 0},
    }


def _numbers(call: Request) -> tuple[int, int, str]:
    """Return offset, size and digest of a piece of a reply.

    Raises:
        HTTPException: one is missing or malformed.
    """
    words = [call.query_params.get(name, "") for name in ("offset", "size")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 16 for word in words):
        raise HTTPException(400, "a piece of a reply says its offset and the size of the reply")
    return int(words[0]), int(words[1]), call.query_params.get("sha256", "")


async def _words(call: Request, *needed: str) -> dict[str, str]:
    """Read the words that a stranger sends.

    Raises:
        HTTPException: the body is no table of ASCII texts, lacks one of these, is too large, or comes too slowly.
    """
    try:
        result = parse_json(await asyncio.wait_for(_body(call, LARGEST_LOGIN), LOGIN_SECONDS))
        if not isinstance(result, dict) or not all(
            isinstance(word, str) and word.isascii() for word in result.values()
        ):
            raise ValueError("no texts")
        return {name: result[name] for name in needed} | result
    except (ValueError, KeyError, TypeError, TimeoutError) as error:
        raise HTTPException(400, "the body does not have the words that this call needs") from error


def _fingerprint_in(words: dict[str, str]) -> str:
    """Return the fingerprint of the key with which somebody would join, or "" if there is none."""
    try:
        return fingerprint(public_line(words["key"])[0])
    except (ValueError, KeyError):
        return ""


def _address(call: Request) -> str:
    """Return what one caller has alone: an address of IPv4, or a network of IPv6."""
    address = ip_address((call.client.host if call.client is not None else "::").partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address if address.version == 4 else ip_network((address, 64), strict=False))


async def _body(call: Request, most: int) -> bytes:
    """Read the body of a call, unless it is too large."""
    body, length = bytearray(), call.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise HTTPException(413, f"a body of this call has at most {most} bytes")
    async for piece in call.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"a body of this call has at most {most} bytes")
    return bytes(body)


async def _disconnected(call: Request) -> None:
    with suppress(ClientDisconnect):
        async for piece in call.stream():
            if piece:
                return  # a call that waits has no body
    while (await call.receive())["type"] != "http.disconnect":
        pass


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Ending(uvicorn.Server):
    """The web server for devices. When it stops, it answers the calls that wait."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self.hub = hub

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.hub.end()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # of devices that do not close them
            vars(connection)["transport"].abort()
        self.hub.hang_up()
        for _ in range(3):  # until the transports have noticed
            await asyncio.sleep(0)


class HubServer:
    """The web server for devices.

    Args:
        credentials: folder with `server.pem`, `server.key` and a public key `*.pub` for every device. The queue is in
            its folder `queue`.
        host: address on which to listen.
        port: port on which to listen; 0 for any.
        daily: called once a day, for example to renew the certificate.

    Raises:
        RecipeError: another server uses the folder, or it cannot listen there.
    """

    def __init__(self, credentials: Path, host: str, port: int, daily: Callable[[], None] = lambda: None) -> None:
        self.credentials, self.daily = credentials, daily
        queue = Queue(credentials / "queue")
        self._lock = open(queue.folder / "server.lock", "wb")  # noqa: SIM115  for the life of the server
        with ExitStack() as failed:
            failed.callback(self._lock.close)
            try:
                lock(self._lock, wait=False)
            except BlockingIOError:
                raise RecipeError(f"another server uses {credentials}; end it first") from None
            self.register, self._keys = Register(credentials), frozenset[str]()
            failed.callback(self.register.close)
            self.register.settle()
            self.socket = Listener(host, port)  # now, so that the command ends if the port is taken
            failed.pop_all()
        self._given_back = time.monotonic(), 0  # when memory was last given back, and the changes until then
        self.bell = Bell(queue.bell(SERVER))
        queue.nobody_is_online()
        queue.tidy()
        keys = Keys(credentials, self.register.renewals)
        keys.look()
        self.seen = [_certificate(credentials)]
        more = self.socket.end, self.socket.unsent
        self.hub = Hub(queue, keys, self.register, lambda: self.seen, self.socket.admit, *more)
        self.server = _Ending(self._config(self.hub, host, port, tls=True), self.hub)
        self.others: list[uvicorn.Server] = []

    def add(self, app: Any, host: str, port: int, *, tls: bool) -> None:
        """Serve another web application in a thread.

        Raises:
            RecipeError: it cannot listen there.
        """
        sockets: list[socket.socket] = [Listener(host, port)]
        self.others.append(server := uvicorn.Server(self._config(app, host, port, tls=tls)))
        # with asyncio's own loop: uvloop, which `Server.run` takes if it is there, would not ask the listener
        Thread(target=lambda: asyncio.run(server.serve(sockets)), daemon=True).start()

    def run(self) -> None:
        """Serve until a signal ends this process, or `server.should_exit` is set."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a file
        try:
            asyncio.run(self._serve())
        finally:
            self.hub.queue.mark(dict.fromkeys(self.hub.online, False))
            self.hub.refusals.end()
            self.bell.close()
            self.hub.queue.close()
            self.register.close()
            self._lock.close()

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self.hub.look(self.bell)), asyncio.create_task(self._care())]
        LOGGER.info("waiting for devices on port %d", self.socket.getsockname()[1])
        await self.server.serve([self.socket])
        for task in tasks:
            task.cancel()
        for other in self.others:
            other.should_exit = True

    def _config(self, app: Any, host: str, port: int, *, tls: bool) -> uvicorn.Config:
        files = {"ssl_keyfile": self.credentials / "server.key", "ssl_certfile": self.credentials / "server.pem"}
        # uvicorn's own way would close all handlers of this process; warnings of strangers could fill the disk
        logger_of("hub", "stderr", "uvicorn", logging.ERROR)
        more: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none", "timeout_keep_alive": 120}
        more["timeout_graceful_shutdown"] = END_SECONDS
        return public_config(app, host, port, **more, **(files if tls else {}))

    async def _care(self) -> None:
        """Look for new keys, a new certificate, and runs that have ended. No error, such as a full disk, ends it."""
        chain = Chain(self.credentials, [self.server, *self.others])
        tidied = day = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if time.monotonic() - day > DAY:
                    day = time.monotonic()
                    self.daily()
                chain.reload()
                if (certificate := _certificate(self.credentials)) not in self.seen:
                    self.seen = [*self.seen[-1:], certificate]  # a connection may be of the time before a renewal
                self.hub.logins.keys.look()
                if (known := frozenset(self.hub.logins.keys.known)) != self._keys:
                    self._keys = known
                    self.register.settle()
                if time.monotonic() - tidied > TIDY_SECONDS:
                    tidied = time.monotonic()
                    self.hub.queue.tidy()
                self._give_back()
            except Exception as error:  # the next look may succeed
                LOGGER.warning("the folder %s cannot be looked after now: %s", self.credentials, error)

    def _give_back(self) -> None:
        """Return the memory of many connections to the system, a while after they came."""
        (moment, before), now = self._given_back, time.monotonic()
        if now - moment > TRIM_SECONDS:
            many = self.socket.changes - before >= MANY
            self._given_back = now, self.socket.changes if many else before
            if many:
                give_back_memory()


def _refilled(kept: tuple[float, float] | None, most: float, per_second: float, now: float) -> float:
    """Return how many tries are left now: those that were left at a moment, and those since; at first `most`."""
    left, since = (most, now) if kept is None else kept
    return min(most, left + (now - since) * per_second)


def _certificate(folder: Path) -> bytes:
    text = (folder / "server.pem").read_text()
    end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(text[:end][text.index("-----BEGIN CERTIFICATE-----") :] + "\n")
