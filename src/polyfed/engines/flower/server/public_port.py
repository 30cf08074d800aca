"""A SuperLink with two ports: a public port for SuperNodes, and a port on loopback for commands.

Flower 1.41 serves three interfaces on one port: for SuperNodes (`/v1/fleet`), for commands such as `flwr run`
(`/v1/control`) and for the processes of an app (`/v1/runtime`). Flower authenticates only SuperNodes, so anybody who
reaches the port can submit an app. Here, the public port serves only the paths that authenticated SuperNodes need. It
refuses every other path. The port on loopback serves all three interfaces, but only to processes on the same machine.
"""

import socket
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

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

from polyfed.core.system.log_lines import logger_of
from polyfed.engines.flower.flower_log import adopt_flower_log, web_log_config
from polyfed.engines.flower.server.device_keys import NewKeys, keep_registered, public_key
from polyfed.engines.flower.server.link_facts import database_of_this_release, link_facts, shrink
from polyfed.transport.web import Chain, public_config, refuse

LOOPBACK = "127.0.0.1"

NOT_PUBLIC = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
"""Paths that the public port refuses, because only the operator registers SuperNodes, with their public keys."""

PUBLIC = frozenset(vars(route)["path"] for route in fleet.routes) - NOT_PUBLIC
"""Paths that SuperNodes call. Every path requires a signature by a registered key."""

LOCK_SECONDS = 600
"""Seconds that a write waits for the SuperLink's database. Flower's 5 seconds are too short while large models are
written (inferred): a write would fail with "database is locked" and end the run."""

LARGEST_BODY = 2**23
"""Largest size in bytes of a call's body. Flower 1.41 sends a message in pieces of 5 MiB."""

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
            await refuse(send, 403, "this port is for SuperNodes only")
        elif not await run_in_threadpool(self.is_signed, headers):
            await refuse(send, 401, "the call is not signed by a registered key, or the clocks differ")
        elif not length.isdecimal() or int(length[:20]) > LARGEST_BODY or (body := await _body(receive)) is None:
            await refuse(send, 413, f"the body of a call has at most {LARGEST_BODY} bytes")
        else:
            await self.app(scope, _again(body, receive), send)


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
