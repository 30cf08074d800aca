"""The layout of text output: tables without lines, titles, blank lines."""

from collections.abc import Iterator
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from polyfed.core.system.log_lines import escaped_lines

WIDE = 200
"""The width, in characters, of text that does not go to a terminal, such as text in a file or a pipe."""

UNBOUNDED = 100_000
"""A width, in characters, that no table reaches."""


class SafeConsole(Console):
    """A console that shows unprintable characters as escapes, whichever table or line they are in.

    Names of files, classes and modalities can come from data files and recipes that strangers wrote. Without escapes,
    these names could control the terminal or forge a line.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as `Console` does. Line breaks stay, and the codes for colours and cursor are not part of the text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(escaped_lines(segment.text), segment.style)


def plain_table(*columns: str, left: int = 1) -> Table:
    """A table without lines.

    Args:
        columns: the headings; no header is shown if all are empty.
        left: the number of columns with text, which are aligned left. The other columns hold numbers and are aligned
            right.
    """
    named = any(columns)
    table = Table(box=None, show_header=named, pad_edge=False)
    for number, column in enumerate(columns):
        justify: JustifyMethod = "left" if number < left or not named else "right"
        table.add_column(Text(column, "dim"), justify=justify, overflow="fold")
    return table


def whole(table: Table) -> Table:
    """Give a table the width that all of its cells need.

    A table that is too wide folds its cells, and a number in two lines reads as two numbers. Here the lines stay whole,
    and a terminal that is narrower wraps them.
    """
    console = Console(width=UNBOUNDED)
    table.width = Measurement.get(console, console.options, table).maximum
    return table


def titled(title: str, table: Table) -> Group:
    """A table with a title above it. The title may be wider than the table."""
    return Group(Text(title, "bold"), table)


def stacked(*parts: RenderableType) -> Group:
    """The parts, separated by blank lines."""
    spaced = [entry for part in parts for entry in (Text(""), part)]
    return Group(*spaced[1:])


def text_of(part: RenderableType) -> str:
    """A part as plain text of the width `WIDE`, without a line break at its end."""
    file = StringIO()
    SafeConsole(file=file, highlight=False, width=WIDE, color_system=None).print(part)
    return file.getvalue().removesuffix("\n")
