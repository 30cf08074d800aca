"""`polyfed sweep`: runs a study, with a live table of its runs."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.application import AsJson, Interrupted, app
from polyfed.cli.output import answer
from polyfed.core.errors import command
from polyfed.core.system.stop_signals import handling, interrupt

UNFINISHED = 4
"""The exit code if a run failed or is unfinished. The page gives the reason."""


@app.command("sweep")
def sweep_study(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study.", show_default=False)],
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The most runs at once. [default: the number of cores]"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Run on the nodes of this Ray cluster, which share the folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study. [default: runs/NAME]")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a study (methods x scenarios x settings x seeds), several runs at once. A second call continues the study."""
    from polyfed.cli.printing.sweep_progress import SweepProgress, results_table
    from polyfed.experiment.study import sweep
    from polyfed.experiment.study.results import PAGE

    folder = out or Path("runs") / study.stem
    progress = SweepProgress()
    try:
        with progress, handling(interrupt, signal.SIGTERM):
            frame = sweep(study, folder, jobs=jobs, ray=ray, listeners=[progress])
    except KeyboardInterrupt:
        where = [] if ray is None else ["--ray", ray]
        again = command("sweep", study, *where, "--out", folder)
        raise Interrupted(f"go on with: {again}") from None
    assert progress.board is not None
    more = f"all runs in {folder / PAGE}; tests and figures: {command('compare', folder)}"
    answer(_rows(frame), results_table(progress.board), more, as_json=as_json)
    if progress.board.problems():
        raise typer.Exit(UNFINISHED)


def _rows(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a frame as dictionaries that JSON can hold. Missing values (NaN) have no entry."""
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return [{key: value for key, value in row.items() if value == value} for row in rows]
