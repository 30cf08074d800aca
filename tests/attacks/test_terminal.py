"""Text from files of strangers neither controls the terminal nor forges a line of a finding."""

from typing import Any

from polyfed.cli.comparison import sheet_table
from polyfed.cli.output import print_error, show
from polyfed.report.comparison_tables import Sheet
from polyfed.report.reconciliation import WHAT, _shown

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\u202e\r\u2028\x9b"


def test_errors_and_lines_show_control_characters_as_escapes_and_keep_the_line_breaks_of_errors(capsys: Any) -> None:
    print_error("RecipeError", f"one {HOSTILE}\n  two", 2, as_json=False)
    show(f"line {HOSTILE}\nforged")
    told = capsys.readouterr()
    assert told.err.startswith("polyfed: one \\x1b]0;pwned")
    assert told.err.split("\n")[1:] == ["  two", ""]
    assert all(c.isprintable() or c == "\n" for c in told.err + told.out)
    assert len(told.out.splitlines()) == 1


def test_a_finding_is_one_line_whatever_a_device_wrote_into_its_log() -> None:
    row = tuple(f"{key}{HOSTILE}\n  client 0: forged finding" for key in WHAT)
    assert _shown([((1, 0), row)]).isprintable()


def test_cells_of_a_comparison_are_escaped(capsys: Any) -> None:
    show(sheet_table(Sheet(name="x", title=HOSTILE, headings=(HOSTILE, "b"), rows=[(HOSTILE, "1")], best=set())))  # type: ignore[arg-type]
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)
