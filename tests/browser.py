"""A real browser for tests: headless Chromium, driven over the pipe of its DevTools protocol."""

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")

needs_browser = pytest.mark.skipif(not PROGRAM, reason="no chromium, chromium-browser or google-chrome is on PATH")

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
"""Chromium refuses to run as root with its sandbox, and containers have a small /dev/shm."""

PATIENCE = 60.0
"""Seconds for any answer."""


class Browser:
    """One window of a browser.

    Attributes:
        events: what the page has done: (method, parameters) of the DevTools protocol.
    """

    def __init__(self, write: int, read: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._write, self._read, self._got, self._count, self._session = write, read, b"", 0, ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, address: str, width: int, height: int = 800) -> None:
        """Load a page in a window of this size in CSS pixels, as a phone lays it out, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        told = self._ask("Page.navigate", url=address)
        assert "errorText" not in told, told["errorText"]
        self._wait(lambda: "Page.loadEventFired" in [method for method, _ in self.events])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element that the selector finds."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        middle = self.value(
            f"(r => ({{x: r.x + r.width / 2, y: r.y + r.height / 2}}))({place}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **middle)

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the page's events of these kinds so far."""
        self.value("0")  # what came before the answer has been read
        return [parameters for method, parameters in self.events if method in methods]

    def close(self) -> None:
        """Ask the browser to end."""
        self._session = ""
        with suppress(OSError, AssertionError):
            self._ask("Browser.close")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number, found = self._send(method, **parameters), list[dict[str, Any]]()
        self._wait(lambda: bool(found), lambda told: found.append(told) if told.get("id") == number else None)
        assert "error" not in found[0], (method, found[0])
        return dict(found[0]["result"])

    def _send(self, method: str, **parameters: Any) -> int:
        self._count += 1
        text: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            text["sessionId"] = self._session
        os.write(self._write, json.dumps(text).encode() + b"\0")
        return self._count

    def _wait(self, done: Callable[[], bool], look: Callable[[dict[str, Any]], None] = lambda told: None) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(self._read, 2**16)
            assert more, "the browser has ended"
            *whole, self._got = (self._got + more).split(b"\0")
            for told in map(json.loads, whole):
                look(told)
                if "method" in told:
                    self.events.append((told["method"], told["params"]))
                if told.get("method") == "Page.javascriptDialogOpening":
                    self._send("Page.handleJavaScriptDialog", accept=True)  # until then the page stands still


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a new profile in the folder, and end it with all of its processes."""
    (theirs_read, write), (read, theirs_write) = os.pipe(), os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    places = [
        (os.POSIX_SPAWN_DUP2, one, other) for other, one in enumerate((null, null, null, theirs_read, theirs_write))
    ]
    words = [PROGRAM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = os.posix_spawn(PROGRAM, words, {**os.environ, "HOME": str(folder)}, file_actions=places, setpgroup=0)
    for number in (theirs_read, theirs_write, null):
        os.close(number)
    try:
        made = Browser(write, read)
        yield made
        made.close()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(write)
        os.close(read)
