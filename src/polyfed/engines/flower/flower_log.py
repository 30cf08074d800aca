"""Flower's own log lines in the format of polyfed's: time, level, one line for each record."""

from typing import Any

from flwr.supercore import logger
from flwr.supercore.http_logging import get_uvicorn_log_config

from polyfed.core.log_lines import LogLines


def adopt_flower_log(role: str) -> None:
    """Format what Flower logs in this process as polyfed does; see `LogLines` for `role`."""
    # Flower's handler formats records by itself, whatever formatter it is given
    vars(logger.console_handler)["format"] = LogLines(role).format


def web_log_config(role: str) -> dict[str, Any]:
    """The logging configuration of a web server of this process, in polyfed's format."""
    config = get_uvicorn_log_config(logger.console_handler.level)
    config["formatters"] = {name: {"()": LogLines, "role": role} for name in config["formatters"]}
    return config
