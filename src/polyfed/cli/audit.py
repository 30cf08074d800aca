"""`polyfed audit-log`: whether the audit log of a device is whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.application import HELP_OPTIONS, AsJson
from polyfed.cli.application import app as polyfed_app
from polyfed.cli.output import answer
from polyfed.core.errors import RecipeError
from polyfed.core.files import AUDIT, PUBLIC_KEY

app = typer.Typer(
    name="audit-log",
    help=f"The audit log of a device ({AUDIT} in the folder of its node).",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)
polyfed_app.add_typer(app)


@app.callback()
def root() -> None:
    """Keep `verify` a verb of its own, although it is the only one."""


@app.command("verify")
def verify_log(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the node.", show_default=False)],
    key: Annotated[
        Path | None, typer.Option(metavar="PUBLIC", help=f"The device's public key. [default: {PUBLIC_KEY} in FOLDER]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the chain and the signatures; exit code 0 if the log is whole, 5 and the first bad line if it is not."""
    try:
        from polyfed.privacy.audit import verify  # needs the extra polyfed[flower]
    except ImportError as error:
        raise RecipeError(f"audit-log needs the extra: pip install 'polyfed[flower]' ({error})") from None
    found = verify(folder, key)
    lines = [f"{folder / AUDIT} is whole: {found.rows:,} rows, {found.seals:,} signatures"]
    if found.first:
        lines.append(f"from {found.first} to {found.last}")
    if key is None:
        lines.append(f"checked with {folder / PUBLIC_KEY}; with --key, use the key that you were given by other means")
    facts = {"log": str(folder / AUDIT), "key": str(key or folder / PUBLIC_KEY)} | asdict(found)
    answer(facts, *lines, as_json=as_json)
