"""The program that a device's SuperNode runs: Flower's `flower-supernode`, with some additions.

The program fetches no message above a size limit from the server, and follows no redirect. If the server refuses the
device's key, or if an error ends the connection, the program logs this and exits with code 6. If the process that runs
the tasks ends, the program logs this and exits with code 1. Its log lines have polyfed's format.

`polyfed supernode` runs this file by its path. This file does not import the package polyfed, because that would load
PyTorch into a process that does not need it.
"""

import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from flwr.supercore.exit.exit_handler import trigger_exit_handlers
from flwr.supercore.logger import console_handler
from flwr.supercore.retry import http_retry
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

LOG_LINES = Path(__file__).parents[2] / "core" / "log_lines.py"
FETCH_LIMIT = Path(__file__).with_name("fetch_limit.py")
CAREFUL_HTTP = Path(__file__).with_name("careful_http.py")

WORKER = "POLYFED_WORKER"
"""Environment variable with the id of the process that runs the tasks; `polyfed supernode` sets it."""

LOST = (
    "the process that runs the tasks of this device has ended (killed, or out of memory). The SuperNode ends too, "
    "because the server would otherwise wait for a device that answers nothing. Start `polyfed supernode` again, or "
    "run it under a service manager that does so"
)

LET_END = 10.0
"""Seconds between the end of the process that runs the tasks and the end of this program. If both got the same signal,
this program signs off from the server and ends by itself within this time. Flower takes at most 5 seconds."""

BROKEN = (
    "the connection to the server has ended with the error above, for example because the server has a new certificate "
    "(this device then needs the new ca.pem). Start `polyfed supernode` again, or run it under a service manager that "
    "does so"
)

REFUSED = (
    "the server refused the key of this device: the key is not registered there, or the clocks of the two machines "
    "differ. Ask the server's operator to put this device's public key (*.pub) into the credentials folder, and to "
    "start `polyfed superlink` again"
)

CONNECTION_FAILED = 6
"""The exit code of `polyfed.core.errors.TransportError`."""


class Telling:
    """Replaces the module `os` in `http_retry`, which is Flower's code that repeats failed calls to the server.

    If the server answers "unauthorized", Flower's code interrupts the process with `os.kill`. Flower does not log that
    the server refused the key, and the process would exit with code 0. This class logs the refusal, and remembers it so
    that `main` can exit with another code.

    Attributes:
        code: the exit code of the program, or None if nothing has happened that needs a code of its own.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, number: int) -> None:
        """Log that the server has refused the key, and interrupt the process."""
        self.end(REFUSED, CONNECTION_FAILED, number)

    def watch(self, worker: int) -> None:
        """End this process when the process that runs the tasks, a child of this process, has ended."""

        def wait() -> None:
            os.waitpid(worker, 0)
            time.sleep(LET_END)
            self.end(LOST, 1, signal.SIGTERM)

        Thread(target=wait, daemon=True).start()

    def end(self, why: str, code: int, number: int) -> None:
        """Log a reason, and end this process by a signal and with this exit code."""
        self.code = code
        logging.getLogger("flwr").error(why)
        os.kill(os.getpid(), number)


def speak_as_polyfed(config: dict[str, Any], log_lines: Any) -> None:
    """Give the web server on loopback polyfed's log format. Flower starts this web server with uvicorn's defaults.

    Args:
        config: uvicorn's default logging configuration, which this function changes.
        log_lines: the class `LogLines`.
    """
    config["formatters"] = {name: {"()": log_lines, "role": "device"} for name in config["formatters"]}


def main() -> None:
    """Run the SuperNode until a signal or an error ends it.

    If an error ends the connection to the server, Flower's function returns, but Flower's web server for tasks would
    keep this process alive. The device would then never connect again, and no service manager would start it again.
    """
    log_lines = runpy.run_path(str(LOG_LINES))
    vars(console_handler)["format"] = log_lines["LogLines"]("device").format
    console_handler.addFilter(log_lines["says_something"])
    speak_as_polyfed(uvicorn.config.LOGGING_CONFIG, log_lines["LogLines"])
    fetch_limit, careful_http = runpy.run_path(str(FETCH_LIMIT)), runpy.run_path(str(CAREFUL_HTTP))
    telling = vars(http_retry)["os"] = Telling()
    if WORKER in os.environ:
        telling.watch(int(os.environ[WORKER]))
    limit = int(os.environ[fetch_limit["DEVICE_LIMIT"]]) * 2**20
    with fetch_limit["at_most"](start_client_internal, limit), careful_http["careful_calls"]():
        try:
            flower_supernode()
            logging.getLogger("flwr").error(BROKEN)
            trigger_exit_handlers(run_before_force_exit=False)
            telling.code = CONNECTION_FAILED
        finally:
            if telling.code is not None:
                sys.exit(telling.code)


if __name__ == "__main__":
    main()
