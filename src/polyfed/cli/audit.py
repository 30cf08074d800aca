"""`polyfed audit-log`: whether audit logs are whole, and whether those of server and devices say the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.files import AUDIT, PUBLIC_KEY
from polyfed.report import reconcile

app = typer.Typer(
    name="audit-log",
    help=f"Audit logs: {AUDIT} in the state folder of a device, and in the folder of a run on the server.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def _needing_flower() -> Iterator[None]:
    """Turn a failed import of the extra into a sentence that says what to install."""
    try:
        yield
    except ImportError as error:
        raise RecipeError(f"audit-log needs the extra: pip install 'polyfed[flower]' ({error})") from None


@app.command("verify")
def verify_log(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="State folder of a device, or folder of a run.", show_default=False)
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="PUBLIC", help=f"The public key of the log. [default: {PUBLIC_KEY} in FOLDER]"),
    ] = None,
) -> None:
    """Check the chain and the signatures; exit code 0 if the log is whole, 5 and the first bad line if it is not."""
    with _needing_flower():
        from polyfed.privacy.audit_check import verify
    found = verify(folder, key)
    typer.echo(f"{folder / AUDIT} is whole: {found.rows:,} rows, {found.seals:,} signatures")
    if found.first:
        typer.echo(f"from {found.first} to {found.last}")
    if key is None:
        typer.echo(f"checked with {folder / PUBLIC_KEY}; with --key, use the key that you were given by other means")


@app.command("reconcile")
def reconcile_logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    devices: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="State folders of devices, or copies of them.", show_default=False),
    ] = None,
) -> None:
    """Compare the server's audit log with its ledger and with devices' logs; exit code 5 if anything does not agree."""
    with _needing_flower():
        found = reconcile(run, devices or [])
    for remark in found.remarks:
        typer.echo(remark)
    if found.findings:
        raise DataError("\n".join(["the audit logs do not agree:", *(f"  {finding}" for finding in found.findings)]))
    typer.echo("the audit logs agree")
