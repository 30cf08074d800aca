"""Health and metrics of a device, on a port of the loopback interface.

One process handles tasks and this port in turn, without threads. It has no threads because it forks a process for each
task, and a fork of a process with threads may hang. So that a request does not delay tasks, the process reads it with a
single call of `recv`. If this call does not return the whole request line, the process does not serve the page.
"""

import json
import os
import socket
import time
from typing import Any

from polyfed.deploy.metrics import CONTENT_TYPE, registry
from polyfed.deploy.processes import HOST

LONGEST_REQUEST = 8192
"""Largest number of bytes that are read of a request. Web servers commonly accept headers up to this size."""

SECONDS = 0.5
"""Most seconds to receive a request, and to send its answer (inferred: the other side is on this machine)."""

UNKNOWN = "crashed"
"""Verdict of a task whose process has reported no verdict."""


SILENCE_SECONDS = 90.0
"""A device is healthy if the server answered one of its calls in this time. It sends a heartbeat every 30 seconds."""


class DeviceMonitor:
    """Counts the tasks of a device and answers `GET /health` and `GET /metrics`.

    Args:
        port: port on loopback.
        contact: an open file. Its time of change is the reading of the monotonic clock at the last answer of the
            server, or 0 if the server has not answered yet.

    Attributes:
        certificate: when the server's certificate ends, in seconds since 1970; 0 if that is not known.

    Raises:
        OSError: another process uses the port.
    """

    def __init__(self, port: int, contact: int) -> None:
        from prometheus_client import Counter, Gauge

        self.contact, self.latest, self.certificate = contact, 0.0, 0.0
        self.registry = registry()
        self.tasks = Counter(
            "polyfed_device_tasks", "Tasks that have ended, by verdict.", ["verdict"], registry=self.registry
        )
        self.bytes_up = Counter("polyfed_device_bytes_up", "Bytes of the bodies of replies.", registry=self.registry)
        self.ended, self.answered, ends = (
            Gauge(f"polyfed_device_{name}_timestamp_seconds", text, registry=self.registry)
            for name, text in (
                ("last_task", "When the last task ended; 0: none yet."),
                ("last_contact", "When the server last answered this device; 0: never."),
                ("certificate_ends", "When the server's certificate ends, after which no device connects; 0: unknown."),
            )
        )
        ends.set_function(lambda: self.certificate)
        self.answered.set_function(self.last_contact)
        self.socket = socket.create_server((HOST, port))

    def last_contact(self) -> float:
        """Return when the server last answered this device, in seconds since 1970, or 0 if it never did."""
        marked = os.fstat(self.contact).st_mtime
        return time.time() - (time.monotonic() - marked) if marked else 0.0

    def done(self, facts: dict[str, Any]) -> None:
        """Count a task that has ended; see `polyfed.deploy.device.tasks.answer`."""
        self.tasks.labels(facts.get("verdict", UNKNOWN)).inc()
        self.bytes_up.inc(facts.get("bytes_up", 0))
        self.latest = time.time()
        self.ended.set(self.latest)

    def wait(self, seconds: float) -> None:
        """Wait for HTTP requests and answer them, until this number of seconds has passed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                connection, _ = self.socket.accept()
            except TimeoutError:
                return
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        try:
            words = connection.recv(LONGEST_REQUEST).split(b"\r\n", 1)[0].split(b" ")
            path = words[1].decode("ascii") if len(words) == 3 and words[0] == b"GET" else ""
            status, kind, body = self.page(path)
            head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        except (OSError, UnicodeDecodeError):  # the other side has ended, is too slow, or does not send HTTP
            return

    def page(self, path: str) -> tuple[str, str, bytes]:
        """Return HTTP status, content type and body of a page."""
        if path == "/health":
            return self._health()
        if path != "/metrics":
            return "404 Not Found", "text/plain", b"polyfed: here are /health and /metrics\n"
        from prometheus_client import generate_latest

        return "200 OK", CONTENT_TYPE, generate_latest(self.registry)

    def _health(self) -> tuple[str, str, bytes]:
        contact = self.last_contact()
        connected = time.time() - contact < SILENCE_SECONDS
        told = {"status": "ok" if connected else "no contact with the server"}
        facts = {"last_contact": contact, "last_task": self.latest, "certificate_ends": self.certificate}
        body = json.dumps(told | facts).encode()
        return "200 OK" if connected else "503 Service Unavailable", "application/json", body
