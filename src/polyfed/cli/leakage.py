"""`polyfed audit`: measures what the messages of a run reveal. `polyfed audit-log` is another verb, for audit logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.application import AsJson, app
from polyfed.cli.output import answer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polyfed.experiment.leakage import LeakageAudit


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of the recipe to run again.")] = 3,
    clients: Annotated[int, typer.Option(metavar="N", help="Attack the first N clients that reply.")] = 20,
    shadows: Annotated[
        int, typer.Option(metavar="N", help="Shadow models for each client (LiRA); 0 uses the loss alone.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack the messages of a run, by kind and by modality, and print how much the messages reveal."""
    from polyfed.experiment.leakage import audit as audit_run
    from polyfed.experiment.leakage import write
    from polyfed.report import write_report

    found = audit_run(run, rounds=rounds, clients=clients, shadows=shadows)
    path = write(found)
    page = write_report(run)
    answer(found.content(), *_tables(found), f"numbers in {path}, table in {page}", as_json=as_json)


def _tables(found: "LeakageAudit") -> list["RenderableType"]:
    """Return a table of the measured attacks, and the reasons why the other attacks were not measured."""
    from rich.text import Text

    from polyfed.report.pages.leakage import LEVEL, MARKED, unmeasured
    from polyfed.report.text_layout import plain_table, titled

    table = plain_table("attack", "kind", "block", "seen by", "how", "attacker", "guess", "advantage", LEVEL, left=5)
    for one in found.findings:
        if one.status == "measured":
            how = one.method if not one.field else f"{one.method}: {one.field}"
            numbers = (
                f"{one.value:.2f}",
                f"{one.guess:.2f}",
                f"{one.advantage:+.2f}{'*' if one.significant else ''}",
                f"{one.low:+.2f} to {one.high:+.2f}",
            )
            style = "bold" if one.significant else ""
            words = (one.attack, one.kind, one.block, one.seen_by, how, *numbers)
            table.add_row(*(Text(word, style) for word in words))
    what = f"{found.algorithm} on {found.dataset}, {found.rounds} rounds, {found.clients} clients, seed {found.seed}"
    title = f"{what}, with [{'], ['.join(found.defences)}]" if found.defences else what
    lines = [f"* {MARKED}", *found.notes, *unmeasured(found.content()["findings"])]
    return [titled(title, table), Text(""), *(Text(line) for line in lines)]
