"""The program that a device's SuperNode runs: Flower's `flower-supernode`, with log lines in polyfed's format.

`polyfed supernode` runs this file by its path. This file does not import the package polyfed, because that would load
PyTorch into a process that does not need it.
"""

import runpy
from pathlib import Path

from flwr.supercore.logger import console_handler
from flwr.supernode.cli import flower_supernode

LOG_LINES = Path(__file__).parents[2] / "core" / "log_lines.py"

if __name__ == "__main__":
    log_lines = runpy.run_path(str(LOG_LINES))
    vars(console_handler)["format"] = log_lines["LogLines"]("device").format
    console_handler.addFilter(log_lines["says_something"])
    flower_supernode()
