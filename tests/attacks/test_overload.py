"""Calls, messages and replies that are too large: each is refused before it is held in memory."""

import asyncio
import json
import runpy
import socket
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode import start_client_internal
from starlette.datastructures import Headers

from engines.devices import RECIPE, Devices
from polyfed.core.errors import RecipeError
from polyfed.deploy.launch import SUPERNODE
from polyfed.engines.flower import DirectGrid, GridTransport, client_app
from polyfed.engines.flower.device.fetch_limit import DEVICE_LIMIT, FEW_PIECES, SLACK, TOO_LARGE, at_most
from polyfed.engines.flower.server.public_port import (
    LARGEST_BODY,
    PUBLIC,
    FleetOnly,
    signed_by_known,
)
from polyfed.engines.flower.server.transport import is_too_large
from polyfed.engines.protocol import Patience
from polyfed.federation.wire_format import Packet
from polyfed.transport.web import LARGEST_HEAD, BoundedHead, public_config
from refusals import refuses

PATH = "/v1/fleet/push-object"
assert PATH in PUBLIC


class Call:
    """A call at the public port whose body comes in pieces of 64 KiB; counts what was read of it."""

    def __init__(self, size: int, headers: Mapping[str, str], signed: bool) -> None:
        self.left, self.read, self.passed, self.status = size, 0, b"", 0
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": pairs}
        asyncio.run(FleetOnly(self._whole, lambda headers: signed)(scope, self._receive, self._send))

    async def _whole(self, scope: Any, receive: Any, send: Any) -> None:
        event = await receive()
        assert not event["more_body"]
        self.passed = event["body"]
        await send({"type": "http.response.start", "status": 200})

    async def _receive(self) -> dict[str, Any]:
        size = min(2**16, self.left)
        self.left, self.read = self.left - size, self.read + size
        return {"type": "http.request", "body": b"x" * size, "more_body": self.left > 0}

    async def _send(self, event: dict[str, Any]) -> None:
        self.status = self.status or event.get("status", 0)


def test_nothing_is_read_of_a_call_that_no_registered_key_has_signed() -> None:
    call = Call(2**30, {"content-length": str(2**30)}, signed=False)
    assert (call.status, call.read) == (401, 0)


def test_nothing_is_read_of_a_body_that_says_that_it_is_too_large() -> None:
    for length in (str(LARGEST_BODY + 1), "9" * 5000, "-1", "x", ""):
        call = Call(2**30, {"content-length": length}, signed=True)
        assert (call.status, call.read) == (413, 0), length


def test_a_body_without_a_length_is_read_up_to_the_limit_only() -> None:
    call = Call(2**30, {"transfer-encoding": "chunked"}, signed=True)
    assert call.status == 413
    assert call.read <= LARGEST_BODY + 2**16


def test_a_body_within_the_limit_is_passed_on_whole() -> None:
    for size in (0, 1, 5 * 2**20 + 1000, LARGEST_BODY):
        call = Call(size, {}, signed=True)
        assert call.status == 200
        assert call.passed == b"x" * size


def headers_of(key: ec.EllipticCurvePrivateKey, known: bytes, **changes: str) -> Headers:
    stamp = changes.pop("stamp", now().isoformat())
    values = {
        "flwr-public-key": b64encode(known).decode(),
        "flwr-signature": b64encode(sign_message(key, stamp.encode("ascii"))).decode(),
        "flwr-timestamp": stamp,
    }
    return Headers({name: value for name, value in (values | changes).items() if value})


def test_a_signature_must_be_fresh_and_by_the_key_that_is_registered() -> None:
    key, other = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    known, stranger = (public_key_to_bytes(k.public_key()) for k in (key, other))
    state = SimpleNamespace(get_node_id_by_public_key=lambda found: 7 if found == known else None)
    check = signed_by_known(lambda: state)
    assert check(headers_of(key, known))
    assert not check(headers_of(other, known)), "signed with another key"
    assert not check(headers_of(other, stranger)), "a key that is not registered"
    assert not check(headers_of(key, known, stamp=(now() - timedelta(hours=1)).isoformat()))
    assert not check(headers_of(key, known, stamp=(now() + timedelta(hours=1)).isoformat()))
    for name in ("flwr-public-key", "flwr-signature", "flwr-timestamp"):
        for value in ("", "?", "x" * 5000):
            assert not check(headers_of(key, known, **{name: value}))
    assert not check(Headers({}))


@contextmanager
def served() -> Iterator[uvicorn.Server]:
    """A public port without TLS."""
    server = uvicorn.Server(
        public_config(FleetOnly(None, lambda headers: False), "127.0.0.1", 0, ws="none", log_level="error")
    )
    opened = server.config.bind_socket()
    opened.listen()
    server.port = opened.getsockname()[1]
    thread = Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        opened.close()


def said_by(port: int, sent: bytes, server: uvicorn.Server) -> bytes:
    """Send bytes and return what the server says before it ends the connection, although the caller stays.

    The server closes with unread bytes. What the caller sees of this depends on the kernel and its buffers: the answer,
    a reset, the end of the connection, or nothing at all. The server has ended the connection in each case.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=10) as caller:
        said = b""
        with suppress(ConnectionError, TimeoutError):
            caller.sendall(sent)
        with suppress(ConnectionError, TimeoutError):
            said = caller.recv(100)
        end = time.monotonic() + 10
        while server.server_state.connections:
            assert time.monotonic() < end, "the server keeps the connection"
            time.sleep(0.01)
    return said


@pytest.mark.usefixtures("loopback")
def test_headers_are_bounded_and_a_stranger_is_answered_before_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    receive = BoundedHead.data_received
    monkeypatch.setattr(
        BoundedHead, "data_received", lambda self, data: (came.append(len(data)), receive(self, data))[1]
    )
    with served() as server:
        said = said_by(
            server.port, f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n\r\n".encode(), server
        )
        assert said.startswith(b"HTTP/1.1 401"), "no byte is unread, so the answer arrives"
        came.clear()
        said = said_by(server.port, f"POST {PATH} HTTP/1.1\r\nX: ".encode() + b"x" * 2**22, server)
        assert said == b"" or said.startswith(b"HTTP/1.1 400")
        assert LARGEST_HEAD < sum(came) <= LARGEST_HEAD + 2**18, "asyncio reads up to 256 KiB at once"


def test_a_caller_that_never_ends_its_headers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stranger could hold as many connections as the process has files, a byte now and then in each."""
    monkeypatch.setattr("polyfed.transport.web.HEAD_SECONDS", 0.5)
    request = f"GET /{PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with served() as server:
        for before in (b"", request.replace(b"\r\n\r\n", b"\r\nX: ")):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as caller:
                started = time.monotonic()
                with suppress(ConnectionError):
                    caller.sendall(before)
                    while time.monotonic() < started + 5:
                        caller.settimeout(0.1)
                        with suppress(TimeoutError):
                            if not caller.recv(100):
                                break
                        if before:
                            caller.sendall(b"x")
                assert 0.4 < time.monotonic() - started < 4, before


LIMIT = 2**22


def fetched(sizes: list[int]) -> int:
    """Fetch objects of these sizes; how many bytes came before it failed, or all of them."""
    contents = {str(number): b"x" * size for number, size in enumerate(sizes)}
    came: list[int] = []

    def fetch(identity: str) -> bytes:
        came.append(len(contents[identity]))
        return contents[identity]

    module = SimpleNamespace(pull_objects=pull_objects)
    enough = sum(sizes) <= LIMIT and len(sizes) <= FEW_PIECES
    with at_most(module, LIMIT), nullcontext() if enough else pytest.raises(ObjectPullError) as failed:
        assert module.pull_objects(object_ids=list(contents), pull_object_fn=fetch) == contents
    assert failed is None or is_too_large(str(failed.value))
    assert module.pull_objects is pull_objects
    return sum(came)


def test_of_a_message_that_is_too_large_at_most_the_limit_is_fetched() -> None:
    piece = 2**20
    assert fetched([piece] * 4) == 4 * piece
    for many in (60, 64):
        assert LIMIT + SLACK < fetched([piece] * many) <= LIMIT + SLACK + 3 * piece
    assert fetched([1] * (FEW_PIECES + 5)) == 0, "so many pieces are not asked for at all"


LARGE = RECIPE.replace("hidden = [8]", "hidden = [600, 600]").replace("rounds = 2", "rounds = 1")


def test_a_run_whose_replies_are_too_large_is_refused_before_its_first_round(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path, LARGE)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "message_megabytes = 2\n")
    with refuses(RecipeError, "task 'update' takes"):
        devices.serve(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (told["error"], told["exit_code"]) == ("RecipeError", 2)
    assert "Write message_megabytes = " in told["text"]
    assert "exit code 2" in capsys.readouterr().out
    assert not (tmp_path / "run" / "egress.jsonl").exists(), "nothing was asked"


def test_a_message_of_the_server_that_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: Any) -> None:
    devices = Devices(tmp_path, LARGE)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "message_megabytes = 2\n")
    monkeypatch.setattr("polyfed.experiment.checks.check.refuse_large", lambda assembly: None)
    with refuses(RecipeError, "to client 0"):
        devices.serve(tmp_path / "run")
    assert not (tmp_path / "nodes" / "0" / "polyfed-state" / "audit.jsonl").exists()


class Oversized(DirectGrid):
    """A grid on which every reply is too large."""

    pushed = 0
    asked: Message

    def push_messages(self, messages: Any) -> Any:
        several = list(messages)
        self.pushed += len(several)
        return super().push_messages(several)

    def pull_messages(self, message_ids: Any) -> list[Message]:
        found = []
        for reply in super().pull_messages(message_ids):
            failed = Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason=str(ObjectPullError("7", TOO_LARGE)))
            failure = Message(failed, reply_to=self.asked)
            failure.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            found.append(failure)
        return found


def test_a_client_whose_reply_is_too_large_is_left_out_at_once_and_not_asked_again() -> None:
    grid = Oversized(client_app(lambda packet, config: Packet({"verdict": "reply"})), 1)
    grid.asked = Message(RecordDict(), 1, "train")
    transport = GridTransport(grid, limit=LIMIT)
    transport.node_of = {0: 1}
    answers = transport.exchange({0: Packet({})}, Patience(20.0, 1))
    assert answers == {0: f"is too large: more than {LIMIT} bytes"}
    assert grid.pushed == 1


def test_a_supernode_fetches_a_message_of_the_server_only_up_to_the_limit_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program of a SuperNode, with Flower's own code for a message that arrives; the connection is a double."""
    piece, came, stored = 2**20, [], []

    def pull_object(run_id: int, identity: str) -> bytes:
        came.append(identity)
        return b"x" * piece

    def receive(pieces: int) -> int | None:
        came.clear()
        message = Message(RecordDict(), 1, "train")
        store = SimpleNamespace(
            preregister=lambda run_id, tree: [str(number) for number in range(pieces)],
            put=lambda identity, content: stored.append(identity),
            delete=lambda identity: None,
            clear=lambda: None,
        )
        state = MagicMock()
        state.create_task.return_value = 1
        config = {"state": state, "object_store": store, "node_config": {}, "receive": lambda: (message, None)}
        found: int | None = start_client_internal._pull_and_store_message(
            **config,
            get_run=MagicMock(),
            get_fab=MagicMock(),
            pull_object=pull_object,
            confirm_message_received=lambda run_id, message_id: None,
            trusted_entities=None,
        )
        return found

    def supernode() -> None:
        assert receive(2) is not None
        assert len(stored) == 2
        assert receive(60) is None, "60 MiB, and the device fetches 4"
        assert LIMIT + SLACK < len(came) * piece <= LIMIT + SLACK + 10 * piece, "the fetches are parallel"
        assert len(stored) == 2

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", supernode)
    monkeypatch.setenv(DEVICE_LIMIT, str(LIMIT // 2**20))
    with pytest.raises(SystemExit):  # Flower's function returns only after an error
        runpy.run_path(str(SUPERNODE), run_name="__main__")
    assert start_client_internal.pull_objects is pull_objects
