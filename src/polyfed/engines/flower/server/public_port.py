"""A SuperLink with two ports: a public port for SuperNodes, and a port on loopback for commands.

Flower 1.41 serves three interfaces on one port: for SuperNodes (`/v1/fleet`), for commands such as `flwr run`
(`/v1/control`) and for the processes of an app (`/v1/runtime`). Flower authenticates only SuperNodes, so anybody who
reaches the port can submit an app. Here, the public port serves only the paths that authenticated SuperNodes need. It
refuses every other path. The port on loopback serves all three interfaces, but only to processes on the same machine.
"""

import asyncio
import socket
import ssl
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

import h11
import uvicorn
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore import sql_mixin
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from flwr.superlink.routers.fleet.router import router as fleet
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyfed.core.system.log_lines import logger_of
from polyfed.engines.flower.flower_log import adopt_flower_log, web_log_config
from polyfed.engines.flower.server.device_keys import NewKeys, keep_registered, public_key
from polyfed.engines.flower.server.link_facts import database_of_this_release, link_facts, shrink

LOOPBACK = "127.0.0.1"

NOT_PUBLIC = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
"""Paths that the public port refuses, because only the operator registers SuperNodes, with their public keys."""

PUBLIC = frozenset(vars(route)["path"] for route in fleet.routes) - NOT_PUBLIC
"""Paths that SuperNodes call. Every path requires a signature by a registered key."""

LOCK_SECONDS = 600
"""Seconds that a write waits for the SuperLink's database. Flower's 5 seconds are too short while large models are
written (inferred): a write would fail with "database is locked" and end the run."""

LARGEST_BODY, LARGEST_HEAD = 2**23, 2**15
"""Largest sizes in bytes of a call's body and of its headers. Flower 1.41 sends a message in pieces of 5 MiB."""

HEAD_SECONDS = 30
"""Seconds within which the headers of a call must have come, so that nobody holds a connection without a call."""

KEY_SECONDS, DAY = 3.0, 24 * 3600.0
"""Seconds between two looks for the public keys of devices that join, and seconds of a day."""

Scope = MutableMapping[str, Any]


class FleetOnly:
    """An ASGI application that forwards calls of registered SuperNodes, and refuses all other calls.

    It checks the signature before it reads the body, and reads at most `LARGEST_BODY` bytes. Flower itself reads the
    whole body first.

    Args:
        app: the SuperLink's application.
        is_signed: returns whether the headers hold a recent signature by a registered key.
    """

    def __init__(self, app: Any, is_signed: Callable[[Headers], bool]) -> None:
        self.app, self.is_signed = app, is_signed

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if scope["method"] != "POST" or scope["path"] not in PUBLIC:
            await _refuse(send, 403, "this port is for SuperNodes only")
        elif not await run_in_threadpool(self.is_signed, headers):
            await _refuse(send, 401, "the call is not signed by a registered key, or the clocks differ")
        elif not length.isdecimal() or int(length[:20]) > LARGEST_BODY or (body := await _body(receive)) is None:
            await _refuse(send, 413, f"the body of a call has at most {LARGEST_BODY} bytes")
        else:
            await self.app(scope, _again(body, receive), send)


async def _refuse(send: Any, status: int, why: str) -> None:
    text = f"polyfed: {why}\n".encode()
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def _body(receive: Any) -> bytes | None:
    """Return the body of a call, or None if the body is too large."""
    body, more = bytearray(), True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False) and event["type"] == "http.request"
        if len(body) > LARGEST_BODY:
            return None
    return bytes(body)


def _again(body: bytes, receive: Any) -> Any:
    """Return a replacement for `receive`, because the body of the request has already been read.

    The first call of the replacement returns this body. Every later call is passed on to `receive`.
    """
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def handed() -> Any:
        return left.pop() if left else await receive()

    return handed


def signed_by_known(state: Callable[[], Any]) -> Callable[[Headers], bool]:
    """Return the function `is_signed` for `FleetOnly`, which checks the signature of a call.

    Flower repeats this check. It also checks that the public key in the headers belongs to the node that the body of
    the call names.

    Args:
        state: returns the SuperLink's state, which holds the registered keys.
    """

    def check(headers: Headers) -> bool:
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            stamp = headers[TIMESTAMP_HEADER]
            age = (now() - datetime.fromisoformat(stamp)).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            if not fresh or state().get_node_id_by_public_key(key) is None:
                return False
            return bool(verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature))
        except (KeyError, ValueError, TypeError):  # a header is missing or malformed
            return False

    return check


@dataclass(frozen=True)
class Service:
    """A web application that runs in the SuperLink's process, but listens on a separate port.

    Attributes:
        app: makes the application, given a function that returns the result of `link_facts`.
        host: address on which the application listens.
        port: port on which the application listens.
        tls: whether the application uses TLS with the server's certificate.
    """

    app: Callable[[Callable[[], dict[str, Any]]], Any]
    host: str
    port: int
    tls: bool


class _Whole(uvicorn.Server):
    """The web server on loopback. When it stops, it also stops the other web servers."""

    def __init__(self, config: uvicorn.Config, others: Sequence[uvicorn.Server]) -> None:
        super().__init__(config)
        self.others = others

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections on all ports."""
        for other in self.others:
            other.should_exit = True
        await super().shutdown(sockets)


def run_superlink(
    *,
    credentials: Path,
    keys: Iterable[Path],
    database: str,
    control_port: int,
    host: str,
    port: int,
    services: Iterable[Service] = (),
    daily: Callable[[], None] = lambda: None,
) -> None:
    """Run a SuperLink until a signal ends it.

    Args:
        credentials: folder with `ca.pem`, `server.pem` and `server.key`.
        keys: files with the public keys of the SuperNodes that may take part.
        database: file in which the SuperLink stores its state.
        control_port: port on loopback for `flwr` and for the processes of an app.
        host: address of the public port, for SuperNodes.
        port: number of the public port, for SuperNodes.
        services: additional web applications.
        daily: called once a day, for example to renew the certificate.

    Raises:
        RecipeError: Flower does not accept a public key, the database cannot register it again, or a newer release of
            Flower has written the database.
    """
    adopt_flower_log("superlink")
    known = {public_key(path): path for path in keys}
    Path(database).touch(mode=0o600)  # it holds the messages; SQLite gives the files beside it the same mode
    Path(database).chmod(0o600)
    shrink(database)
    pragmas = vars(sql_mixin)
    pragmas["SQLITE_PRAGMAS"] = _patient(pragmas["SQLITE_PRAGMAS"])
    sys.argv = ["flower-superlink", *_words(credentials, database, control_port)]
    config = _parse_superlink_lifespan_config()
    with database_of_this_release(database):
        app = create_app(config, SuperLinkLifespan)
        state = app.state.linkstate_factory.state
        keep_registered(state(), known)
    common: dict[str, Any] = {"log_config": web_log_config("superlink"), "ws": "none"}
    tls: dict[str, Any] = {"ssl_keyfile": config.ssl_keyfile, "ssl_certfile": config.ssl_certfile}
    # bound before anything starts, so that the command ends if another process uses the port
    outer = [public_config(FleetOnly(app, signed_by_known(state)), host, port, **tls, **common)]
    for service in services:
        made, secured = service.app(lambda: link_facts(state())), tls if service.tls else {}
        outer.append(public_config(made, service.host, service.port, **secured, **common))
    opened = [(uvicorn.Server(one), one.bind_socket()) for one in outer]
    whole = _Whole(
        uvicorn.Config(app, host=LOOPBACK, port=control_port, **tls, **common), [server for server, _ in opened]
    )
    for server, bound in opened:
        Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True).start()
    chain = Chain(credentials, [whole, *(server for server, _ in opened)])
    Thread(target=_look_after, args=(NewKeys(credentials), state, chain, daily), daemon=True).start()
    whole.run()


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


def _look_after(keys: NewKeys, state: Callable[[], Any], chain: Chain, daily: Callable[[], None]) -> None:
    """Look for keys of devices that join and for a new certificate. No error, such as a full disk, ends this."""
    day = time.monotonic()
    while True:
        time.sleep(KEY_SECONDS)
        try:
            if time.monotonic() - day > DAY:
                day = time.monotonic()
                daily()
            chain.reload()
            keys.register(state())
        except Exception as error:
            keys.seen.clear()  # the next look reads all files again
            logger_of("superlink", "stderr").warning("the folder of credentials cannot be used now: %s", error)


class BoundedHead(H11Protocol):
    """A connection that ends if the headers of a call are not complete after `HEAD_SECONDS`.

    uvicorn limits only the time between the end of one call and the first byte of the next.
    """

    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
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


def _words(credentials: Path, database: str, control_port: int) -> Sequence[str]:
    """Return the options of Flower's own command for the SuperLink on loopback."""
    options = {
        "host": LOOPBACK,
        "port": str(control_port),
        "ssl-ca-certfile": str(credentials / "ca.pem"),
        "ssl-certfile": str(credentials / "server.pem"),
        "ssl-keyfile": str(credentials / "server.key"),
        "database": database,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [*words, "--enable-supernode-auth", "--disable-runtime-dependency-installation"]


def _patient(pragmas: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return Flower's settings of SQLite, but with polyfed's waiting time `LOCK_SECONDS`."""
    assert any(name == "busy_timeout" for name, _ in pragmas), "Flower 1.41 sets busy_timeout"
    return tuple((name, str(LOCK_SECONDS * 1000) if name == "busy_timeout" else value) for name, value in pragmas)
