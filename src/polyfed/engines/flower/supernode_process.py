"""The program that a device's SuperNode runs: Flower's `flower-supernode`, with three additions.

The program fetches no message above a size limit from the server. If the server refuses the device's key, the program
logs this and exits with code 6. Its log lines have polyfed's format.

`polyfed supernode` runs this file by its path. This file does not import the package polyfed, because that would load
PyTorch into a process that does not need it.
"""

import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.logger import console_handler
from flwr.supercore.retry import http_retry
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

LOG_LINES = Path(__file__).parents[2] / "core" / "log_lines.py"
FETCH_LIMIT = Path(__file__).with_name("fetch_limit.py")

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
        refused: whether the server has refused the key.
    """

    def __init__(self) -> None:
        self.refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, number: int) -> None:
        """Log the reason, and interrupt the process."""
        self.refused = True
        logging.getLogger("flwr").error(REFUSED)
        os.kill(process, number)


def speak_as_polyfed(config: dict[str, Any], log_lines: Any) -> None:
    """Give the web server on loopback polyfed's log format. Flower starts this web server with uvicorn's defaults.

    Args:
        config: uvicorn's default logging configuration, which this function changes.
        log_lines: the class `LogLines`.
    """
    config["formatters"] = {name: {"()": log_lines, "role": "device"} for name in config["formatters"]}


def main() -> None:
    """Run the SuperNode until a signal ends it, or until the server refuses its key."""
    log_lines = runpy.run_path(str(LOG_LINES))
    vars(console_handler)["format"] = log_lines["LogLines"]("device").format
    console_handler.addFilter(log_lines["says_something"])
    speak_as_polyfed(uvicorn.config.LOGGING_CONFIG, log_lines["LogLines"])
    fetch_limit = runpy.run_path(str(FETCH_LIMIT))
    telling = vars(http_retry)["os"] = Telling()
    with fetch_limit["at_most"](start_client_internal, int(os.environ[fetch_limit["DEVICE_LIMIT"]]) * 2**20):
        try:
            flower_supernode()
        finally:
            if telling.refused:
                sys.exit(CONNECTION_FAILED)


if __name__ == "__main__":
    main()
