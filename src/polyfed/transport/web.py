"""A web server that other machines can reach: headers bounded in size and time, and a certificate that renews."""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST_HEAD = 2**15
"""Largest size in bytes of the headers of a call."""

HEAD_SECONDS = 30
"""Seconds within which the headers of a call must have come, so that nobody holds a connection without a call."""


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
    """A connection that ends if the headers of a call are not complete after `HEAD_SECONDS`.

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
        self._watch()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock when a call is awaited, and stop it when its headers have come."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def public_config(app: Any, host: str, port: int, **common: Any) -> uvicorn.Config:
    """Return the configuration of a web server that other machines can reach. It limits the headers of a call."""
    heads: dict[str, Any] = {"http": BoundedHead, "h11_max_incomplete_event_size": LARGEST_HEAD}
    return uvicorn.Config(app, host=host, port=port, lifespan="off", **heads, **common)
