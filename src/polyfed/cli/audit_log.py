"""`polyfed audit-log`: checks whether audit logs are complete, and whether the logs of server and devices agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.application import HELP_OPTIONS, AsJson
from polyfed.cli.application import app as polyfed_app
from polyfed.cli.output import answer, show
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.system.files import AUDIT, PUBLIC_KEY
from polyfed.deploy.metrics import INSTALL

app = typer.Typer(
    name="audit-log",
    help=f"Audit logs: {AUDIT} in the state folder of a device, and in the folder of a run on the server.",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)
polyfed_app.add_typer(app)


@contextmanager
def _needing_extra() -> Iterator[None]:
    """Turn the failed import of a package into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise RecipeError(f"audit-log needs an extra: {INSTALL} ({error})") from None


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
    with _needing_extra():
        from polyfed.privacy.egress.audit_log_verification import verify
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

    with _needing_extra():
        found = reconcile(run, devices or [])
    if not as_json:
        show(*found.remarks)
    if found.findings:
        raise DataError("\n".join(["the audit logs do not agree:", *(f"  {finding}" for finding in found.findings)]))
    answer(asdict(found), "the audit logs agree", as_json=as_json)
