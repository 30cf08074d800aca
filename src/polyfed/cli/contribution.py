"""`polyfed contribution`: what each client and each modality added to a run, beside what it cost and gave away."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.application import AsJson, app
from polyfed.cli.output import answer

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES = {"clients": "client", "modalities": "modality", "pairs": "modality of a client"}


@app.command()
def contribution(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    orders: Annotated[
        int, typer.Option(metavar="N", min=2, help="Random orders, where there are too many players for exact values.")
    ] = 200,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="The metric, such as macro_f1 or loss. [default: the task's score]")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the Shapley value of each client, modality and modality of a client, from the updates that a run kept."""
    from polyfed.experiment.contribution import contribution as of_run
    from polyfed.experiment.contribution import write

    found = of_run(run, orders, lambda text: typer.echo(text, err=True), metric)
    path = write(found, run)
    answer(found, *_tables(found), *_notes(found), f"numbers in {path}", as_json=as_json)


def _tables(found: Mapping[str, Any]) -> Iterator["RenderableType"]:
    from polyfed.report.formatting import bytes_of
    from polyfed.report.text_layout import plain_table, titled

    for game, title in TITLES.items():
        told = found[game]
        who = "group of clients" if game == "clients" and found["groups"] else title
        table = plain_table(who, "value", "95 %", "sent", "value per MB", "audit")
        for line in told["players"]:
            called = line.get("name", line["player"])
            player = f"{called} {line['player'][1]}" if isinstance(line["player"], list) else called
            rate, advantage = (line[key] for key in ("per_megabyte", "advantage"))
            error = f"± {line['error']:.4f}"
            words = ("" if number is None else f"{number:+.4f}" for number in (rate, advantage))
            table.add_row(player, f"{line['value']:+.4f}", error, bytes_of(line["bytes_up"]), *words)
        yield titled(f"Shapley values by {who}", table)


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    sign = "" if found["rising"] else ", negated because smaller is better"
    yield (
        f"{found['metric']}{sign}, on {found['rows']:,} rows: {found['none']:.4f} without updates, {found['all']:.4f} "
        f"with all of them averaged again, {found['run']:.4f} of the run's own model"
    )
    if abs(found["all"] - found["none"]) < 1e-9:
        yield (
            "all updates together leave the metric as it is, so the values sum to 0 and say nothing about who helped; "
            "--metric names another, such as loss"
        )
    drawn = any(not found[game]["exact"] for game in TITLES)
    if all(line["error_of_rows"] is None for game in TITLES for line in found[game]["players"]):
        known = "only the error of the random orders" if drawn else "no error is known"
        yield f"95 %: {known}, because this metric is no mean over rows"
    else:
        orders = " and of the random orders" * drawn
        clients = f" of {found['validation_clients']} clients" if found["validation_clients"] else ""
        yield f"95 %: the error of the {found['rows']:,} validation rows{clients}{orders}; below it may be chance"
    if found["groups"]:
        yield "secure aggregation: the server has only sums, so a player is the group of clients of a round"
    yield "audit: the largest advantage of an attack on this block (polyfed audit RUN), empty if it was not audited"
