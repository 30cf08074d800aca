"""A web server that other machines can reach: bounded headers and connections, TLS 1.3, a certificate that renews."""

import asyncio
import ctypes
import fcntl
import gc
import resource
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.responses import FileResponse
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyfed.core.errors import RecipeError

LARGEST_HEAD = 2**15
"""Largest size in bytes of the headers of a call."""

HEAD_SECONDS = 30
"""Seconds within which the headers of a call must have come, so that nobody holds a connection without a call. A body
that the answer did not wait for gets as long."""

MOST_STRANGERS, MOST_OF_ONE = 500, 4
"""Most connections on which nobody has logged in, and most of one device. One more ends the oldest of its kind, so
that whoever holds connections keeps nobody out. A device uses one; its others are left over from a broken line."""

SILENT_SECONDS = 60
"""A connection ends if the other machine acknowledges nothing for so long, because it has lost power, for example, or
if nothing comes of a body that it has begun to send: a proxy may hold the connection of a device that is gone."""

FIRST_LOOK, LONGEST_LOOK, DRAIN_SECONDS = 0.002, 0.05, 120.0
"""Shortest and longest pause in seconds between two looks whether a device has received all, and for how long."""

Peer = tuple[str, int]
"""Address and port of the other end of a connection, as in the `client` of an ASGI scope."""


async def refuse(send: Any, status: int, why: str) -> None:
    """Answer a call without reading its body, and end the connection."""
    text = f"polyfed: {why}\n".encode()
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def give_back_memory() -> None:
    """Return freed memory to the system. glibc keeps what many handshakes at once have left between what lives on."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # else the C library is not glibc
        trim(0)


class Chain:
    """The server's certificate, which running web servers take over when its file changes.

    Args:
        folder: folder with `server.pem` and `server.key`.
        servers: the web servers. New connections to those with TLS get the new certificate; open ones go on.
    """

    def __init__(self, folder: Path, servers: Sequence[uvicorn.Server]) -> None:
        self.folder, self.servers = folder, servers
        self._stamp = (folder / "server.pem").stat().st_mtime_ns

    def reload(self) -> None:
        """Load the certificate if its file has changed.

        Raises:
            OSError: the files do not belong together (`ssl.SSLError`) or cannot be read. The old one stays in use.
        """
        pem, key = self.folder / "server.pem", self.folder / "server.key"
        if (stamp := pem.stat().st_mtime_ns) == self._stamp:
            return
        self._stamp = stamp
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(pem, key)  # fails here first, if at all
        for server in self.servers:
            if server.config.loaded and server.config.ssl is not None:
                server.config.ssl.load_cert_chain(pem, key)


class BoundedHead(H11Protocol):
    """A connection that ends if headers are not complete after `HEAD_SECONDS`, or a body stops for `SILENT_SECONDS`.

    uvicorn limits only the time between the end of one call and the first byte of the next.
    """

    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # asyncio does so only for sockets whose protocol number is set, which uvicorn leaves open: each small answer in
        # two parts would wait for the other side's delayed acknowledgement, 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._forget()
        self._watch()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock when a call or the rest of an answered call is awaited, and stop it when it has come.

        While the body of a call comes, each piece starts the clock again.
        """
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        awaited = answered or self.conn.their_state is h11.IDLE
        if not awaited or self.transport.is_closing():
            self._forget()
        if self.transport.is_closing():
            return
        if awaited and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not awaited and self.conn.their_state is h11.SEND_BODY:
            self._deadline = self.loop.call_later(SILENT_SECONDS, self._silent)

    def _silent(self) -> None:
        """End the connection, unless the server itself has stopped reading, as on a slow disk."""
        self._deadline = None
        if self.flow.read_paused:
            self._watch()
        else:
            self.transport.abort()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class MeasuredFile(FileResponse):
    """A part of a request on its way to a device, timed until the device has acknowledged its last byte.

    Args:
        path: the file.
        unsent: returns how many bytes the device has not acknowledged, or None if the connection is gone.
        note: called with the bytes of the file that the device has, and the seconds that they took.
    """

    def __init__(self, path: Any, unsent: Callable[[], int | None], note: Callable[[int, float], None]) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self.unsent, self.note = unsent, note

    @override
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began, count = time.monotonic(), 0

        async def counted(event: Any) -> None:
            nonlocal count
            count += len(event.get("body", b""))
            await send(event)

        await super().__call__(scope, receive, counted)  # the device goes on, while this only looks
        with suppress(TimeoutError):
            await asyncio.wait_for(self._acknowledged(), DRAIN_SECONDS)
            if self.unsent() == 0:
                self.note(count, time.monotonic() - began)

    async def _acknowledged(self) -> None:
        pause = FIRST_LOOK
        while self.unsent():
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LONGEST_LOOK)


class _Accepted(socket.socket):
    """A connection that says when it is closed."""

    ended: Callable[[], None]

    @override
    def close(self) -> None:
        super().close()
        self.ended()


class Listener(socket.socket):
    """A listening socket that keeps a bounded number of connections open.

    Args:
        host: address on which to listen.
        port: port on which to listen; 0 for any.

    Attributes:
        changes: how many connections have begun, and how many have ended, together.

    Raises:
        RecipeError: this machine has no such address, or the port is taken or not allowed.
    """

    def __init__(self, host: str, port: int) -> None:
        self.changes = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(family)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((host, port))
        except (OSError, OverflowError) as error:
            self.close()
            why = f"polyfed cannot listen on {host}, port {port}: {error}. Choose another (--host, --port, ...)"
            raise RecipeError(why) from None
        self.listen(2048)
        self._open: dict[Peer, _Accepted] = {}
        self._strangers: dict[Peer, None] = {}
        self._of: dict[str, dict[Peer, None]] = {}  # device -> its connections

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        made, peer = _Accepted(fileno=plain.detach()), (str(address[0]), int(address[1]))
        made.ended = lambda: self._forget(peer, made)
        _notice_silence(made)
        self._open[peer] = made
        self._strangers[peer] = None
        self.changes += 1
        if len(self._strangers) > MOST_STRANGERS:
            self._end(next(iter(self._strangers)))
        if len(self._open) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            self._end(peer)
        return made, address

    def admit(self, peer: Peer, device: str) -> None:
        """Note that the calls of a connection come from a device that has logged in."""
        mine = self._of.setdefault(device, {})
        if peer not in self._open or peer in mine:
            return
        self._strangers.pop(peer, None)
        mine[peer] = None
        if len(mine) > MOST_OF_ONE:
            self._end(next(iter(mine)))

    def unsent(self, peer: Peer) -> int | None:
        """Return how many bytes the other end of a connection has not acknowledged, or None if it is gone."""
        if (made := self._open.get((peer[0], peer[1]))) is None:
            return None
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(made.fileno(), termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # it is being closed, or this system has no such call
            return None
        return int(count)

    def end(self) -> None:
        """End all connections, those that have not finished their handshake too."""
        for peer in list(self._open):
            self._end(peer)

    def _end(self, peer: Peer) -> None:
        """End a connection. Its transport notices that, and closes it."""
        made = self._open[peer]
        self._forget(peer, made)
        with suppress(OSError):  # the other side has ended it
            made.shutdown(socket.SHUT_RDWR)

    def _forget(self, peer: Peer, made: _Accepted) -> None:
        if self._open.get(peer) is not made:  # another connection has the same port by now
            return
        del self._open[peer]
        self.changes += 1
        self._strangers.pop(peer, None)
        for device, mine in list(self._of.items()):
            mine.pop(peer, None)
            if not mine:
                del self._of[device]


def _notice_silence(made: socket.socket) -> None:
    """Let the kernel end a connection whose other side is gone without a word."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS // 2),
        ("TCP_KEEPINTVL", SILENT_SECONDS // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def public_config(app: Any, host: str, port: int, **common: Any) -> uvicorn.Config:
    """Return the configuration of a web server that other machines can reach. It limits the headers of a call.

    A header of the caller never changes who the caller is (`proxy_headers`).
    """
    heads: dict[str, Any] = {"http": BoundedHead, "h11_max_incomplete_event_size": LARGEST_HEAD}
    more: dict[str, Any] = {"lifespan": "off", "proxy_headers": False, "server_header": False}
    config = uvicorn.Config(app, host=host, port=port, **more, **heads, **common)
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return config
