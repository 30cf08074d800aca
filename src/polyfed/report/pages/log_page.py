"""What left a client, from an audit log: sums for the terminal, and a page for a data protection officer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.system.log_lines import escaped
from polyfed.report.pages.page import render
from polyfed.report.pages.template import write_page

SAME = ("client", "run", "kind", "block", "destination", "verdict")
"""The keys in which the rows of one line of the sums agree."""


def sums(rows: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the rows of a log summed up: for each client, run, kind, block and direction, the times and the bytes.

    Args:
        rows: the rows, in the order of the log.
        names: names of clients.
    """
    result = dict[tuple[Any, ...], dict[str, Any]]()
    for row in rows:
        key = tuple(row.get(name) for name in SAME)
        one = result.setdefault(key, dict(zip(SAME, key, strict=True)) | {"first": row["time"], "parts": 0, "bytes": 0})
        one |= {"last": row["time"], "parts": one["parts"] + 1, "name": names.get(row.get("client", -1), "")}
        one["bytes"] += row["bytes"] if row["verdict"] == "allowed" else 0
    return sorted(result.values(), key=lambda one: (str(one["client"]), one["first"], str(one["block"]), one["kind"]))


def event_words(event: Mapping[str, Any]) -> list[str]:
    """Return what a table shows of an event: its kind, the client, its name, its key, the run, and why."""
    times = f" ({event['times']} times)" if event.get("times") else ""
    texts = [event.get(name, "") for name in ("client", "name", "device", "run", "why")]
    return [escaped(str(text)) for text in (f"{event['event']}{times}", *texts)]


def write_log_page(
    path: Path,
    title: str,
    statements: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> Path:
    """Write a page that answers what left, with every row.

    Args:
        path: the file.
        title: what was asked.
        statements: what the log proves, in sentences.
        rows: the rows that answer the question.
        events: the enrolments and refusals of that time.
        names: names of clients.

    Raises:
        RecipeError: the page cannot be written, or another file has its name.
    """
    drawn: dict[str, list[Any]] = {"charts": []}
    facts = {"title": title, "statements": statements, "sums": sums(rows, names), "rows": rows, "names": names}
    told = [(event["line"], event["time"], *event_words(event)) for event in events]
    text = render("log.html", **facts, events=told, drawn=drawn)
    return write_page(path, text)
