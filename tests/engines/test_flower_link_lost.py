"""A server whose SuperLink has ended says so before Flower can end its process."""

import os
import signal
import socket
import sys
from threading import Event
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from polyfed.core.errors import TransportError
from polyfed.engines.flower.server import server_process as process


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the watch over a port on which nothing listens; returns what happened, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    happened, over = [], Event()
    monkeypatch.setattr(sys, "argv", ["flwr-serverapp", "--runtime-api-address", f"127.0.0.1:{port}"])
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: happened.append(signal.Signals(number).name))
    monkeypatch.setattr(os, "_exit", lambda code: (happened.append(f"exit {code}"), over.set()))

    def watched() -> list[str]:
        process.end_with_link()
        assert over.wait(30)
        return happened

    return happened, watched


def test_what_is_to_be_told_is_told_before_the_interrupt(ended: Any) -> None:
    happened, watched = ended

    def full() -> None:
        happened.append("full")
        raise OSError("no space left on device")

    with process.when_lost(full), process.when_lost(lambda: happened.append("told")):
        assert watched() == ["full", "told", "SIGINT", "exit 1"]


def test_a_run_that_has_ended_tells_nothing(ended: Any) -> None:
    happened, watched = ended
    with pytest.raises(TransportError), process.when_lost(lambda: happened.append("told")):
        raise TransportError("the server could not send messages")
    assert watched() == ["SIGINT", "exit 1"]
