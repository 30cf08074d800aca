"""The layout of terminal output: tables without lines, titles, blank lines."""

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text


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


def titled(title: str, table: Table) -> Group:
    """A table below its title, which may be wider than the table."""
    return Group(Text(title, "bold"), table)


def stacked(*parts: RenderableType) -> Group:
    """The parts, separated by blank lines."""
    spaced = [entry for part in parts for entry in (Text(""), part)]
    return Group(*spaced[1:])
