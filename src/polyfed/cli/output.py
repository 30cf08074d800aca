"""Standard output: tables, lines, or JSON."""

import sys
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from polyfed.experiment.json_text import to_json

WIDE = 200
"""The width of a table, in characters, when it goes to a file or a pipe."""


def print_json(content: Any) -> None:
    """Print JSON on standard output; as in the files of a run, numbers that are not finite are null."""
    typer.echo(to_json(content))


def standard_output() -> Console:
    """The console of standard output; without a terminal, wide tables are not folded."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def show(*parts: RenderableType) -> None:
    """Print tables and lines on standard output."""
    console = standard_output()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
