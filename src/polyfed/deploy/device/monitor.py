"""Health and metrics of a device, on a port of the loopback interface.

One process handles tasks and this port in turn, without threads. It has no threads because it forks a process for each
task, and a fork of a process with threads may hang. So that a request does not delay tasks, the process reads it with a
single call of `recv`. If this call does not return the whole request line, the process does not serve the page.
"""

import json
import socket
import time
from collections import Counter
from typing import Any

from polyfed.deploy.metrics import CONTENT_TYPE, text_of
from polyfed.deploy.processes import HOST

LONGEST_REQUEST = 8192
"""Largest number of bytes that are read of a request. Web servers commonly accept headers up to this size."""

SECONDS = 0.5
"""Most seconds to receive a request, and to send its answer (inferred: the other side is on this machine)."""

UNKNOWN = "crashed"
"""Verdict of a task whose process has reported no verdict."""


class DeviceMonitor:
    """Counts the tasks of a device and answers `GET /health` and `GET /metrics`.

    Args:
        port: port on loopback.

    Raises:
        OSError: another process uses the port.
    """

    def __init__(self, port: int) -> None:
        self.verdicts: Counter[str] = Counter()
        self.bytes_up = 0
        self.latest = 0.0
        self.socket = socket.create_server((HOST, port))

    def done(self, facts: dict[str, Any]) -> None:
        """Count a task that has ended; see `polyfed.engines.flower.device.worker.Duties`."""
        self.verdicts[facts.get("verdict", UNKNOWN)] += 1
        self.bytes_up += facts.get("bytes_up", 0)
        self.latest = time.time()

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
            return "200 OK", "application/json", json.dumps({"status": "ok", "last_task": self.latest}).encode()
        if path != "/metrics":
            return "404 Not Found", "text/plain", b"polyfed: here are /health and /metrics\n"
        gauges = {"polyfed_device_last_task_timestamp_seconds": ("When the last task ended; 0: none yet.", self.latest)}
        counters = {"polyfed_device_bytes_up": ("Bytes of the bodies of replies.", float(self.bytes_up))}
        tasks = ("Tasks that have ended, by verdict.", "verdict", dict(self.verdicts))
        return "200 OK", CONTENT_TYPE, text_of(gauges, counters, {"polyfed_device_tasks": tasks})
