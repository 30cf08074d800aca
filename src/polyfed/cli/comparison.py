"""`polyfed compare`: compares runs or studies in the terminal, in files for a paper, and as figures."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.application import AsJson, app
from polyfed.cli.output import print_json, show, standard_output
from polyfed.core.errors import RecipeError
from polyfed.core.system.log_lines import escaped, escaped_lines

if TYPE_CHECKING:
    from rich.console import Group

    from polyfed.report import Comparison, Evidence
    from polyfed.report.comparison.tables import Sheet

COMPARISON = "comparison.html"
"""The file that `compare --html` writes if no file is named."""


class Format(StrEnum):
    """How a comparison is printed."""

    table = "table"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"
    json = "json"


class PairedTest(StrEnum):
    """The paired test over seeds."""

    t = "t"
    wilcoxon = "wilcoxon"


Columns = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Only these numbers of result.json, separated by commas, as 'global.uar,bytes_up'; * is any text.",
        show_default=False,
    ),
]


@app.command("compare")
def compare_runs(
    dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR... [FILE.html]",
            help="Folders of runs or of studies; with --html also the file to write.",
            show_default=False,
        ),
    ],
    html: Annotated[bool, typer.Option("--html", help=f"Also write an HTML page. [default: {COMPARISON}]")] = False,
    reach: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY",
            help="Also print the first round in which each run had this accuracy, as 0.5.",
            show_default=False,
        ),
    ] = None,
    columns: Columns = None,
    as_json: AsJson = False,
    form: Annotated[
        Format, typer.Option("--format", help="How to print; csv and json hold numbers at full precision.")
    ] = Format.table,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP.NAME", help="What the tests and figures are about, as global.uar.", show_default=False
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="The method that the others are tested against. [default: the first]"),
    ] = None,
    test: Annotated[PairedTest, typer.Option(help="The paired test over seeds.")] = PairedTest.t,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write figures as SVG and PDF.", show_default=False)
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Draw the figures for a dark background.")] = False,
) -> None:
    """Compare runs. Runs that differ only in seed or fold share a line with their mean, spread and paired tests."""
    from polyfed.report import compare, evidence, write_comparison, write_figures

    if as_json and form is not Format.table:
        raise RecipeError(f"--json and --format {form.value} both say what to print; keep one of them")
    targets = [path for path in dirs if html and path.suffix == ".html"]
    comparison = compare((path for path in dirs if path not in targets), reach)
    if columns is not None:
        comparison = comparison.with_columns(name.strip() for name in columns.split(","))
    proof = evidence(comparison, metric, baseline, test.value)
    written = []
    if html:
        page = write_comparison(comparison, (targets or [Path(COMPARISON)])[-1], proof)
        written.append(f"picture in {page}")
    if figures is not None:
        drawn = write_figures(comparison, proof, figures, metric=metric, dark=dark)
        written.append(f"{len(drawn)} figures in {figures}")
    if as_json:
        print_json([*comparison.rows(), *comparison.absent_rows()])
        tell(written)
    else:
        print_as(form, comparison, proof, written)


def tell(written: list[str]) -> None:
    """Say on standard error which files were written, because standard output holds the comparison alone."""
    for line in written:
        typer.echo(f"polyfed: {line}", err=True)


def print_as(form: Format, comparison: "Comparison", proof: "Evidence", written: list[str]) -> None:
    """Print a comparison, and `written`, the lines about the files that were written."""
    from rich.text import Text

    from polyfed.cli.printing import tables
    from polyfed.report.comparison import tables as comparison_tables

    if form is not Format.table:
        tell(written)
    match form:
        case Format.json:
            print_json(comparison_tables.content(comparison, proof))
        case Format.csv:
            typer.echo(escaped_lines(comparison_tables.csv(comparison, proof)), nl=False)
        case Format.markdown:
            sheets = comparison_tables.sheets_of(comparison, proof)
            typer.echo(escaped_lines(comparison_tables.markdown(sheets, comparison.not_compared)), nl=False)
        case Format.latex:
            sheets = comparison_tables.sheets_of(comparison, proof)
            typer.echo(escaped_lines(comparison_tables.latex(sheets, comparison.not_compared)), nl=False)
        case Format.table:
            found = [comparison_tables.scenarios_sheet(comparison, proof), *comparison_tables.tests_of(proof)]
            show(
                tables.comparison_tables(comparison, standard_output().width),
                *(part for sheet in found if sheet is not None for part in (Text(""), sheet_table(sheet))),
                *(Text(line) for line in written),
            )


def sheet_table(sheet: "Sheet") -> "Group":
    """A table of text for the terminal, below its title. Names come from files of runs, so they are escaped."""
    from rich.text import Text

    from polyfed.report.text_layout import plain_table, titled

    table = plain_table(*map(escaped, sheet.headings))
    for number, row in enumerate(sheet.rows):
        table.add_row(*(Text(escaped(cell), "bold" if (number, n) in sheet.best else "") for n, cell in enumerate(row)))
    return titled(escaped(sheet.title), table)
