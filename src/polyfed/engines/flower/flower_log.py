"""Writes Flower's log messages in polyfed's log format: one line for each record, with time and level."""

from typing import Any

from flwr.supercore import http_logging, logger

from polyfed.core.system.log_lines import LogLines, says_something

ROUTINE = {"/metrics", "/status"}
"""Paths that a monitoring system requests every few seconds."""


def adopt_flower_log(role: str) -> None:
    """Write Flower's log messages in this process in polyfed's log format; see `LogLines` for `role`."""
    # Flower's handler ignores the formatter that it is given, so replace its `format` method
    vars(logger.console_handler)["format"] = LogLines(role).format
    logger.console_handler.addFilter(says_something)


def web_log_config(role: str) -> dict[str, Any]:
    """Return the logging configuration for a web server in this process, with polyfed's format."""
    hidden = vars(http_logging)  # the log shows requests to these paths only if they fail
    hidden["ROUTINE_ACCESS_PATHS"] |= ROUTINE
    config = http_logging.get_uvicorn_log_config(logger.console_handler.level)
    config["formatters"] = {name: {"()": LogLines, "role": role} for name in config["formatters"]}
    return config
