"""Log lines have a time and a level, and no text of a record can look like a line of its own."""

import contextlib
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.system import log_lines
from polyfed.core.system.log_lines import LOG_FORMAT, LogLines, escaped, logger_of

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) [a-z]+: ")
FORGED = "no\n2026-11-22T08:31:02.123Z INFO polyfed: round 9\r\x1b[2J\u202e\u2028\x85\x00"


def record(text: str, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("polyfed.device", logging.WARNING, "", 0, "%s", (text,), None)
    vars(made).update(more)
    return made


def test_a_line_has_time_level_and_source() -> None:
    line = LogLines("device").format(record("hello", created=1795337120.8085918))
    assert line == "2026-11-22T08:45:20.808Z WARNING polyfed: hello"


@given(st.text())
def test_a_text_is_one_printable_line_whatever_it_holds(text: str) -> None:
    line = LogLines("device").format(record(text))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_neither_a_text_nor_a_traceback_forges_a_line(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, form)
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        made = record(FORGED, exc_info=(type(error), error, error.__traceback__), facts={"reason": FORGED})
    lines = LogLines("device").format(made).splitlines()
    if form == "json":
        (line,) = lines
        assert line.isprintable()
        told = json.loads(line)
        assert told["level"] == "warning"
        assert told["role"] == "device"
        assert told["text"] == FORGED.strip()
        assert told["reason"] == FORGED
        assert "ValueError" in told["trace"]
    else:
        assert LINE.match(lines[0])
        assert all(line.startswith(log_lines.CONTINUED) for line in lines[1:])
        assert any("ValueError: no" in line for line in lines)
        assert all(line.isprintable() for line in lines)


def test_facts_of_a_record_cannot_replace_its_time_level_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, "json")
    lies = {"time": "never", "level": "debug", "text": "another", "role": "server", "source": "x"}
    told = json.loads(LogLines("device").format(record("mine", facts=lies)))
    assert not set(lies.items()) & set(told.items())


def test_escapes_keep_what_can_be_read() -> None:
    assert escaped("Grüße, 世界") == "Grüße, 世界"
    assert escaped("a\x1b[2Jb\u2028") == "a\\x1b[2Jb\\u2028"


def test_a_logger_writes_to_the_stream_of_the_moment_once(capsys: Any) -> None:
    logger_of("device", "stderr")
    logger_of("device", "stderr").info("once")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("once") == 1
    assert LINE.match(err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the file /dev/full, whose disk is always full")
def test_a_log_on_a_full_disk_does_not_stop_the_work_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process that runs the tasks of a device would end with its first line."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115  closing it fails
    monkeypatch.setattr(sys, "stderr", full)
    logger = logger_of("test-of-a-full-disk", "stderr")
    logger.error("one")
    logger.error("two", exc_info=ValueError("x"))
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
