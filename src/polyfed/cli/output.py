"""Prints tables, lines or JSON on standard output, and errors on standard error."""

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from polyfed.core.system.log_lines import escaped, escaped_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def print_json(content: Any) -> None:
    """Print JSON on standard output. As in the files of a run, numbers that are not finite are null."""
    from polyfed.core.system.json_and_toml import to_json

    typer.echo(to_json(content))


def print_error(kind: str, text: str, code: int, *, as_json: bool, shown: bool = False) -> None:
    """Print an error on standard error. If `as_json` is true, also print it as a JSON object on standard output.

    On standard error, unprintable characters except line breaks become escapes, so that text from a file cannot control
    the terminal.

    Args:
        kind: the name of the exception's class.
        text: where the error is, what is wrong, what is allowed.
        code: the exit code of the command.
        as_json: whether the command was called with `--json`.
        shown: whether standard error already shows the text.
    """
    if not shown:
        typer.echo(f"polyfed: {escaped_lines(text)}", err=True)
    if as_json:
        typer.echo(json.dumps({"error": {"kind": kind, "exit_code": code, "message": text}}, indent=1))


def standard_output() -> "Console":
    """Return the console of standard output. If the output is not a terminal, tables may be `WIDE` characters wide."""
    from polyfed.report.text_layout import WIDE, SafeConsole

    return SafeConsole(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def show(*parts: "RenderableType") -> None:
    """Print tables and lines on standard output. A string is a line; its unprintable characters become escapes."""
    from rich.text import Text

    console = standard_output()
    for part in parts:
        line = Text(escaped(part)) if isinstance(part, str) else part
        console.print(line, soft_wrap=isinstance(line, Text), crop=False)


def answer(content: Any, *parts: "RenderableType", as_json: bool) -> None:
    """Print the content as JSON if `--json` was given, and otherwise print the tables and lines."""
    if as_json:
        print_json(content)
    else:
        show(*parts)
