"""Flower's own log lines in the format of polyfed's: time, level, one line for each record."""

from typing import Any

from flwr.supercore import http_logging, logger

from polyfed.core.log_lines import LogLines, says_something

ROUTINE = {"/metrics", "/status"}
"""Paths that a monitor asks every few seconds."""


def adopt_flower_log(role: str) -> None:
    """Format what Flower logs in this process as polyfed does; see `LogLines` for `role`."""
    # Flower's handler formats records by itself, whatever formatter it is given
    vars(logger.console_handler)["format"] = LogLines(role).format
    logger.console_handler.addFilter(says_something)


def web_log_config(role: str) -> dict[str, Any]:
    """The logging configuration of a web server of this process, in polyfed's format."""
    hidden = vars(http_logging)  # requests to these paths are logged only if they fail
    hidden["ROUTINE_ACCESS_PATHS"] |= ROUTINE
    config = http_logging.get_uvicorn_log_config(logger.console_handler.level)
    config["formatters"] = {name: {"()": LogLines, "role": role} for name in config["formatters"]}
    return config
