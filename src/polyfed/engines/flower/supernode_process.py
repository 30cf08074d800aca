"""The program that a device's SuperNode runs: Flower's `flower-supernode`, with a limit on the size of a message that
it fetches from the server, and with log lines in polyfed's format.

`polyfed supernode` runs this file by its path. This file does not import the package polyfed, because that would load
PyTorch into a process that does not need it.
"""

import os
import runpy
from pathlib import Path

from flwr.supercore.logger import console_handler
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

LOG_LINES = Path(__file__).parents[2] / "core" / "log_lines.py"
FETCH_LIMIT = Path(__file__).with_name("fetch_limit.py")

if __name__ == "__main__":
    log_lines = runpy.run_path(str(LOG_LINES))
    vars(console_handler)["format"] = log_lines["LogLines"]("device").format
    console_handler.addFilter(log_lines["says_something"])
    fetch_limit = runpy.run_path(str(FETCH_LIMIT))
    with fetch_limit["at_most"](start_client_internal, int(os.environ[fetch_limit["DEVICE_LIMIT"]]) * 2**20):
        flower_supernode()
