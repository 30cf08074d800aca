"""`polyfed board`: packs the method of a study, runs such a file again, and writes the page of several."""

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.application import HELP_OPTIONS, AsJson
from polyfed.cli.application import app as polyfed_app
from polyfed.cli.output import answer
from polyfed.core.errors import command

app = typer.Typer(
    name="board",
    help="Results that others can run again: entries with control and placebo, and their page.",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)
polyfed_app.add_typer(app)

EntryFile = Annotated[Path, typer.Argument(metavar="ENTRY", help="An entry.", show_default=False)]


@app.command("pack")
def pack_study(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="Folder of a study.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The entry to write.", show_default=False)],
    method: Annotated[str | None, typer.Option(help="The method. [default: the only one]")] = None,
    scenario: Annotated[str | None, typer.Option(help="The scenario. [default: the only one]")] = None,
    control: Annotated[str | None, typer.Option(help="The control. [default: that of fedavg]")] = None,
    placebo: Annotated[str | None, typer.Option(help="The placebo. [default: by algorithm.placebo]")] = None,
    no_placebo: Annotated[str, typer.Option(metavar="WHY", help="Why a method of your own has none.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write a study's method into one file: recipes, versions, code and results, with its control and its placebo."""
    from polyfed.experiment.leaderboard.entry import parts_of
    from polyfed.experiment.leaderboard.packing import pack_entry

    rest = {"method": method, "scenario": scenario, "control": control, "placebo": placebo}
    entry = pack_entry(study, out, no_placebo=no_placebo, **rest)
    runs = {role: len(part["runs"]) for role, part in parts_of(entry)}
    told = ", ".join(f"{count} of the {role}" for role, count in runs.items())
    line = f"wrote {out} with {told}; run them again: {command('board', 'verify', out)}"
    answer({"entry": str(out), "method": entry["method"]["name"], "runs": runs}, line, as_json=as_json)


@app.command("verify")
def verify_file(
    entry: EntryFile,
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="The data, unless polyfed brings it.")] = None,
    code: Annotated[Path | None, typer.Option(metavar="FILE", help="Your copy of the method's code.")] = None,
    run_code: Annotated[str, typer.Option(metavar="SHA256", help="Run the entry's code, which has this digest.")] = "",
    search: Annotated[bool, typer.Option("--search", help="Repeat the runs of the search too.")] = False,
    receipt: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what you checked, for a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run an entry again on the CPU, and compare every number. If one differs, say which, and exit with code 5."""
    from polyfed.experiment.leaderboard.verification import refuse_differing, verify_entry

    found = verify_entry(
        entry,
        data=data,
        code=code,
        run_code=run_code,
        search=search,
        receipt=receipt,
        say=lambda text: typer.echo(f"polyfed: {text}", err=True),
    )
    refuse_differing(entry, found)
    line = f"{entry} repeats: {found.runs} runs with the same numbers and the same models"
    answer(found.receipt() | {"remarks": found.remarks}, line, *found.remarks, as_json=as_json)


@app.command("code")
def show_code(entry: EntryFile, as_json: AsJson = False) -> None:
    """Print the code of an entry's method, to be read before it runs."""
    from polyfed.experiment.leaderboard.verification import code_of

    text = code_of(entry)
    answer({"code": text}, *text.splitlines(), as_json=as_json)


@app.command("page")
def write_board(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Entries and receipts.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="PAGE.md", help="The page to write.")] = Path("board.md"),
    as_json: AsJson = False,
) -> None:
    """Write a page with a line for each entry: score, differences to control and placebo, bytes, who repeated it."""
    from polyfed.experiment.leaderboard.page import write_page

    rows = write_page(files, out)
    answer(rows, f"wrote {out} with {len(rows)} entries", as_json=as_json)
