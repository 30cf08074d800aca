"""Log lines with a time and a level, as text or as JSON.

Line breaks in the text of a record are escaped. Text that another program sent can therefore not forge a log line.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

LOG_FORMAT = "POLYFED_LOG_FORMAT"
"""Environment variable that selects the format: `text`, which is the default, or `json`."""

CONTINUED = "    | "
"""Prefix of the lines of a traceback in the format `text`, so that nobody mistakes these lines for log lines."""


class LogLines(logging.Formatter):
    """Formats a record as one line: `2026-11-22T08:31:02.123Z INFO polyfed: text`, or a JSON object.

    A JSON object has `time` (UTC, ISO 8601), `level`, `role`, `text`, and `trace` if there is one. It also has the
    facts of the record. The caller passes the trace and the facts as `extra={"trace": text, "facts": {...}}`.

    Args:
        role: the writer: `server` (a run), `device`, or `hub`, the web server of `polyfed server`.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record. In the format `text`, the indented lines of the record's traceback follow."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        trace = getattr(record, "trace", "") or (self.formatException(record.exc_info) if record.exc_info else "")
        source = record.name.partition(".")[0]
        text = record.getMessage().strip()
        if os.environ.get(LOG_FORMAT) == "json":
            facts: dict[str, Any] = getattr(record, "facts", {})
            head = {"time": moment, "level": record.levelname.lower(), "source": source, "role": self.role}
            return json.dumps(facts | head | {"text": text} | ({"trace": trace} if trace else {}), default=str)
        lines = [f"{moment} {record.levelname} {source}: {escaped(text)}"]
        return "\n".join(lines + [CONTINUED + escaped(line) for line in trace.splitlines()])


class _Screen(logging.Handler):
    """Writes to the current `sys.stdout` or `sys.stderr`, which a test or a notebook may replace."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record and flush, because the process may be killed.

        If the line cannot be written, for example because the log is a file on a full disk, the work goes on without
        it, as with the handlers of Python's library.
        """
        try:
            print(self.format(record), file=getattr(sys, self.stream), flush=True)
        except OSError:
            self.handleError(record)


def logger_of(role: str, stream: str, name: str = "", level: int = logging.INFO) -> logging.Logger:
    """Return the logger of a server or of a device, or one of a library whose records become its lines.

    Args:
        role: see `LogLines`.
        stream: `stdout` or `stderr`.
        name: the library's logger.
        level: the lowest level of its lines.
    """
    logger = logging.getLogger(name or f"polyfed.{role}")
    if not logger.handlers:
        handler = _Screen(stream)
        handler.setFormatter(LogLines(role))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    return logger


def escaped_lines(text: str) -> str:
    """Return a text of several lines, whose other unprintable characters become escapes; see `escaped`."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped(text: str) -> str:
    r"""Return a text as one line. Characters that are not printable become escapes, so they cannot forge a log line.

    >>> escaped("late\n2026-11-22T08:31:02.123Z INFO polyfed: round 2")
    'late\\n2026-11-22T08:31:02.123Z INFO polyfed: round 2'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
