"""`polyfed audit-log` checks whether audit logs are complete and agree, and `polyfed certify` signs what they say."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed import deploy
from polyfed.cli.application import HELP_OPTIONS, AsJson
from polyfed.cli.application import app as polyfed_app
from polyfed.cli.output import answer, show
from polyfed.core.errors import DataError, RecipeError, counted
from polyfed.core.system.files import AUDIT, CERTIFICATE, LEAKAGE, PUBLIC_KEY, replace_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polyfed.experiment.certificate.answers import LogAnswer

app = typer.Typer(
    name="audit-log",
    help=f"Audit logs: {AUDIT} in the state folder of a device, and in the folder of a run on the server.",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)
polyfed_app.add_typer(app)


@app.command("verify")
def verify_log(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="State folder of a device, or folder of a run.", show_default=False)
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="PUBLIC", help=f"The public key of the log. [default: {PUBLIC_KEY} in FOLDER]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the chain and the signatures. If the log is damaged, show the first bad line and exit with code 5."""
    with deploy.needing_extra("audit-log", linux=False):
        from polyfed.privacy.egress.audit_log.verification import verify
    found = verify(folder, key)
    lines = [f"{folder / AUDIT} is whole: {found.rows:,} rows, {found.seals:,} signatures"]
    if found.first:
        lines.append(f"from {found.first} to {found.last}")
    if key is None:
        lines.append(f"checked with {folder / PUBLIC_KEY}; with --key, use the key that you were given by other means")
    facts = {"log": str(folder / AUDIT), "key": str(key or folder / PUBLIC_KEY)} | asdict(found)
    answer(facts, *lines, as_json=as_json)


@app.command("reconcile")
def reconcile_logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    devices: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="State folders of devices, or copies of them.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the server's audit log with its ledger and with devices' logs. The exit code is 5 if they disagree."""
    from polyfed.report import reconcile

    with deploy.needing_extra("audit-log", linux=False):
        found = reconcile(run, devices or [])
    if not as_json:
        show(*found.remarks)
    if found.findings:
        raise DataError("\n".join(["the audit logs do not agree:", *(f"  {finding}" for finding in found.findings)]))
    answer(asdict(found), "the audit logs agree", as_json=as_json)


@app.command("show")
def show_log(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help="Folder of a device's state, a run or a server, or a proof.", show_default=False
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="First day or moment (UTC): 2027-03-02, 2027-03-02T08:00."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Last day, or the moment after the last one (UTC).")
    ] = None,
    client: Annotated[int | None, typer.Option(metavar="N", help="Only this client.")] = None,
    received: Annotated[bool, typer.Option("--received", help="Also what the client received.")] = False,
    key: Annotated[Path | None, typer.Option(metavar="PUBLIC", help="The public key of the log.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Public keys *.pub that you trust; their files name the clients."),
    ] = None,
    proof: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a proof, which `show` reads without the log.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that opens offline.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what left a client, who enrolled and what was refused, and when.

    The lines are verified first; the exit code is 5 if they do not hold.
    """
    with deploy.needing_extra("audit-log", linux=False):
        from polyfed.experiment.certificate import answers
    from polyfed.report.pages.log_page import write_log_page

    asked = answers.question(since, until, client)
    found = answers.answer_of(log, asked, key, keys, received=received)
    if proof is not None:
        replace_text(proof, found.excerpt.proof())
    if html is not None:
        write_log_page(html, found.title, found.statements, found.rows, found.events, found.names)
    written = [f"written: {path}" for path in (proof, html) if path is not None]
    answer(found.content(), *_sums(found), *written, as_json=as_json)


def _sums(found: "LogAnswer") -> list["RenderableType"]:
    """Return the answer in sums, and what the log proves."""
    from rich.text import Text

    from polyfed.report.formatting import bytes_of
    from polyfed.report.pages.log_page import event_words
    from polyfed.report.text_layout import plain_table, titled

    table = plain_table(
        "client", "run", "kind", "of", "to", "verdict", "first (UTC)", "last (UTC)", "parts", "bytes", left=8
    )
    for one in found.sums:
        who = f"{one['client']} {one['name']}".strip()
        words = (who, one["run"] or "enrolment", one["kind"], one["block"], one["destination"], one["verdict"])
        times = (one["first"][:19], one["last"][:19])
        table.add_row(*(Text(str(word)) for word in (*words, *times, one["parts"], bytes_of(one["bytes"]))))
    parts: list[RenderableType] = [titled(found.title, table) if found.sums else found.title]
    if found.events:
        events = plain_table("time (UTC)", "event", "client", "name", "key", "run", "why", left=7)
        for event in found.events:
            events.add_row(*(Text(word) for word in (event["time"][:19], *event_words(event))))
        parts.append(titled("Enrolments and refusals", events))
    return [*parts, *found.statements]


@polyfed_app.command()
def certify(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help=f"The certificate. [default: RUN/{CERTIFICATE}]")
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Verify this certificate, with RUN also against the files of the run."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Public keys *.pub of devices, and that of the run, which you trust."),
    ] = None,
    device_logs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="With --verify: a device's state folder, or a copy of its log. May be repeated."
        ),
    ] = None,
    leakage: Annotated[
        bool, typer.Option("--audit", help="Run `polyfed audit` first, if it has not been run.")
    ] = False,
    crate: Annotated[
        bool, typer.Option("--crate", help="Also describe the folder as a Research Object Crate (RO-Crate 1.1).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a signed certificate of a run: what was run, what left each client, epsilon. Or verify one."""
    if verify is None and (run is None or device_logs):
        raise RecipeError(
            "certify needs the folder of a run, or a certificate: --verify FILE. --device-logs needs both"
        )
    if verify is not None and (out or leakage or crate):
        raise RecipeError("--verify writes nothing: leave out --out, --audit and --crate")
    with deploy.needing_extra("certify", linux=False):
        from polyfed.experiment import certificate
    if verify is not None:
        found = certificate.verify_certificate(verify, keys, run, device_logs or [])
        if not as_json:
            show(*found.remarks)
        found.refuse(verify)
        facts = {"certificate": str(verify), "remarks": found.remarks, "content": found.content}
        answer(facts, f"{verify} holds: {_summary(found.content)}", as_json=as_json)
        return
    assert run is not None
    if leakage and not (run / LEAKAGE).exists():
        from polyfed.experiment.leakage import audit, write

        write(audit(run))
    path, content = certificate.certify(run, out, keys)
    facts, lines = {"certificate": str(path), "content": content}, [f"{path}: {_summary(content)}"]
    if crate:
        described = certificate.write_crate(run, content)
        facts, lines = facts | {"crate": str(described)}, [*lines, str(described)]
    answer(facts, *lines, as_json=as_json)


def _summary(content: Mapping[str, Any]) -> str:
    """Return what a certificate says, on one line."""
    clients = content["clients"]
    signed = sum(one["receipt"] is not None for one in clients)
    by = f"{signed} of {counted(len(clients), 'device', 'devices')} signed" if signed else content["kind"]
    if edges := content.get("edges"):
        by += f", {sum(one['receipt'] is not None for one in edges)} of {counted(len(edges), 'edge', 'edges')}"
    sent = sum(one["bytes_up"] for one in clients)
    privacy = "" if content["privacy"] is None else f", epsilon {content['privacy']['epsilon']}"
    rounds, who = counted(content["rounds"], "round", "rounds"), counted(len(clients), "client", "clients")
    return f"{content['method']}, {rounds}, {who} sent {sent:,} bytes{privacy}; {by}"
