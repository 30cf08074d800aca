"""`polyfed sweep`, which runs a study, and `polyfed recommend`, which finds the method for your data by several."""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.application import AsJson, Interrupted, LeaveOut, Overrides, Person, app, typed_options
from polyfed.cli.output import answer
from polyfed.core.errors import Call, called, command
from polyfed.core.system.stop_signals import handling, interrupt

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polyfed.recommendation.recommend import Recommendation

UNFINISHED = 4
"""The exit code if a run failed or is unfinished. The page gives the reason."""


@app.command("sweep")
def sweep_study(
    context: typer.Context,
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
    known: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl.gz", help="Results that are not computed again; the new ones are added."),
    ] = None,
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
            frame = sweep(study, folder, jobs=jobs, ray=ray, known=known, listeners=[progress])
    except KeyboardInterrupt:
        call = Call("sweep", str(study), typed_options(context))
        raise Interrupted(f"go on with: {call.again()}") from None
    assert progress.board is not None
    more = f"all runs in {folder / PAGE}; tests and figures: {command('compare', folder)}"
    answer(_rows(frame), results_table(progress.board), more, as_json=as_json)
    if progress.board.problems():
        raise typer.Exit(UNFINISHED)


def _rows(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a frame as dictionaries that JSON can hold. Missing values (NaN) have no entry."""
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return [{key: value for key, value in row.items() if value == value} for row in rows]


@app.command("recommend")
def recommend_method(
    context: typer.Context,
    given: Annotated[
        Path, typer.Argument(metavar="DATA|RECIPE.toml", help="A data file or a recipe.", show_default=False)
    ],
    minutes: Annotated[float, typer.Option(min=0, help="The time; 0 only lists what no policy refuses.")] = 30.0,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy file of the devices. [default: the recipe's [egress]]")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What to compare, such as global.uar.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", help="Consider only these methods.")] = None,
    max_bytes: Annotated[
        float | None, typer.Option("--bytes", help="The most bytes of a run, both directions, as in 5e8.")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option("--seconds", help="The most seconds of a run.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of differential privacy of a run.")] = None,
    overrides: Overrides = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME", help="DATA: column of the labels.")] = None,
    client: Annotated[str | None, typer.Option(metavar="NAME", help="DATA: column of the clients.")] = None,
    person: Person = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="DATA: column of train, test, validation.")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="DATA: the task.")] = None,
    leave_out: LeaveOut = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="The most runs at once.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder. The same command goes on in it.")] = Path(
        "runs/recommendation"
    ),
    as_json: AsJson = False,
) -> None:
    """Find the method for your data: what no policy refuses, a pilot within the minutes, a recipe and a paragraph."""
    from polyfed.cli.printing.sweep_progress import SweepProgress
    from polyfed.recommendation.recommend import recommend

    labels = label[0] if label and len(label) == 1 else label or None
    call, progress = Call("recommend", str(given), typed_options(context)), SweepProgress()
    try:
        naming = nullcontext() if given.suffix == ".toml" else called(call)  # a recipe names its columns itself
        with naming, progress, handling(interrupt, signal.SIGTERM):
            found = recommend(
                given,
                out,
                minutes=minutes,
                policy=policy,
                metric=metric,
                methods=[word.strip() for word in (methods or "").split(",") if word.strip()],
                max_bytes=max_bytes,
                max_seconds=max_seconds,
                epsilon=epsilon,
                overrides=overrides or [],
                reading={"label": labels, "client": client, "person": person, "split": split, "leave_out": leave_out},
                task=task,
                jobs=jobs,
                listeners=[progress],
                say=progress.say,
            )
    except KeyboardInterrupt:
        raise Interrupted(f"go on with: {call.again()}") from None
    answer(found.facts(), *_shown(found), as_json=as_json)
    if found.conclusion is not None and not found.conclusion.compared:
        raise typer.Exit(UNFINISHED)


def _shown(found: "Recommendation") -> list["RenderableType"]:
    """Return the tables and lines that the command prints."""
    from rich.text import Text

    from polyfed.recommendation.candidates import options_text
    from polyfed.recommendation.recommend import PAGE, RECIPE
    from polyfed.report.formatting import MISSING, number_of
    from polyfed.report.text_layout import plain_table, titled

    if found.conclusion is None:
        table = plain_table("method", "verdict", "bytes of a reply", "", left=1)
        for name, entries in found.by_method().items():
            first = next((entry for entry in entries if entry.verdict == "accepted"), entries[0])
            verdict = f"with {first.name.partition(' ')[2]}" if first.option else first.verdict
            size = number_of(first.reply_bytes, "bytes") if first.planned else MISSING
            table.add_row(Text(name), Text(verdict), size, Text(options_text(entries)))
        return [titled("What no policy refuses", table), Text("--json tells the reason of each option")]
    metric, rivals = found.conclusion.metric, {rival.name: rival for rival in found.conclusion.rivals}
    table = plain_table("method", "role", metric.title, "seeds", "p", "bytes a round", left=2)
    for row in found.table():
        rival = rivals.get(row["method"])
        p = MISSING if rival is None or rival.p_holm is None else f"{rival.p_holm:.3f}"
        unit = "share" if metric.share else "number"
        score = MISSING if row["mean"] is None else number_of(row["mean"], unit)
        role = (
            row["role"]
            if row["role"] in ("candidate", "floor", "ceiling", "reference")
            else f"placebo of {row['role']}"
        )
        name = f"{row['method']} with {row['option']}" if row["option"] else row["method"]
        table.add_row(name, role, score, str(len(row["seeds"])), p, number_of(row["round_bytes"], "bytes"))
    recipe = found.folder / RECIPE
    go_on = f"page: {found.folder / PAGE}; the recipe: {command('run', recipe)}"
    return [titled("Methods that were tried", table), Text(found.paragraph), Text(go_on)]
