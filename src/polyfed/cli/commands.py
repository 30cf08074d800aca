"""The verbs about recipes and runs: `run`, `demo`, `check` and `report`.

Each verb parses its arguments, calls one function of the package and prints the result. If the user made an error, the
command prints no traceback and ends with the exit code of the error's class.
"""

import dataclasses
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.application import AsJson, Interrupted, Overrides, RecipePath, app
from polyfed.cli.output import answer, print_json
from polyfed.core.errors import DataError, EgressError, RecipeError, command
from polyfed.core.system.stop_signals import handling, interrupt

if TYPE_CHECKING:
    from polyfed.experiment.checks.check import Check
    from polyfed.experiment.running.events import Listener

DEMO = ("fedavg-cg-digits", "cmsfed-cg-digits")
"""The recipes that `polyfed demo` compares."""

STANDARD_OUTPUT = "-"
"""The argument that selects standard output instead of a file."""


class Device(StrEnum):
    """The device that holds data and models."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the files of the run. [default: runs/NAME, numbered]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    as_json: AsJson = False,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="Override the recipe's engine.")] = None,
    device: Annotated[Device | None, typer.Option(help="Override the recipe's device.")] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Stop at a client's exception and show where it was raised. [engine] debug")
    ] = False,
    events: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write every event as a JSON line to a file; - is standard output."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")] = False,
) -> None:
    """Run an experiment and print a short table of its results."""
    from polyfed.cli.printing import tables
    from polyfed.experiment.recipes.overrides import set_options
    from polyfed.experiment.recipes.recipe import load_recipe
    from polyfed.report import REPORT
    from polyfed.report.progress import Progress
    from polyfed.start import run as run_recipe

    if resume and out is None:
        raise RecipeError("--resume needs the folder of the run: --out DIR")
    if as_json and events == STANDARD_OUTPUT:
        raise RecipeError("--json and --events - both write to standard output. Use one; run-finished has the result")
    machine = {"engine.name": engine, "engine.device": device and device.value, "engine.debug": debug or None}
    words = [f"{key}={json.dumps(value)}" for key, value in machine.items() if value is not None]
    overrides = [*(overrides or []), *words]
    loaded = load_recipe(recipe, overrides)
    folder = out if out is not None else unused_folder(Path("runs"), loaded.name)
    try:
        with (
            event_lines(events) as followers,
            nullcontext() if quiet else Progress() as progress,
            recipe_named(recipe, overrides),
            handling(interrupt, signal.SIGTERM),
        ):
            shown = [] if progress is None else [progress]
            finished = run_recipe(loaded, out=folder, resume=resume, listeners=[*shown, *followers])
    except KeyboardInterrupt:
        again = command("run", recipe, *set_options(overrides), "--resume", "--out", folder)
        raise Interrupted(f"resume with: {again}") from None
    if events == STANDARD_OUTPUT or (quiet and not as_json):
        return
    where = f"files in {folder}, picture in {folder / REPORT}"
    answer(finished.result, tables.result_table(finished.result, folder), where, as_json=as_json)


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for both runs. [default: runs/demo, numbered]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train FedAvg and CMSFed on scanned digits, and compare them. The digits come with polyfed's packages."""
    from polyfed.cli import comparison
    from polyfed.experiment.recipes.collection import path_of
    from polyfed.experiment.recipes.recipe import load_recipe
    from polyfed.report import compare, evidence, write_comparison
    from polyfed.report.progress import Progress
    from polyfed.start import run as run_recipe

    folder = out if out is not None else unused_folder(Path("runs"), "demo")
    folders = [folder / name.partition("-")[0] for name in DEMO]
    for name, place in zip(DEMO, folders, strict=True):
        with Progress() as progress, handling(interrupt, signal.SIGTERM):
            run_recipe(load_recipe(path_of(name), overrides or []), out=place, listeners=[progress])
    compared = compare(folders)
    proof = evidence(compared)
    page = write_comparison(compared, folder / "compare.html", proof)
    if as_json:
        print_json(compared.rows())
    else:
        comparison.print_as(comparison.Format.table, compared, proof, [f"picture in {page}"])


@app.command()
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    node: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Check this device: its file device.toml, or only its policy file."),
    ] = None,
) -> None:
    """Validate a recipe, and print its clients, its blocks and what can leave a client. The command sends nothing."""
    from polyfed.cli.printing import deployment
    from polyfed.deploy.device.recipe_check import inspect
    from polyfed.experiment.checks.check import check as check_recipe
    from polyfed.experiment.checks.check_tables import check_tables
    from polyfed.experiment.recipes.recipe import load_recipe

    if node is not None:
        inspection = inspect(recipe, node, overrides or [])
        answer(deployment.device_facts(inspection), deployment.device_tables(inspection), as_json=as_json)
        refused = inspection.refused or inspection.breaches
        raise typer.Exit(EgressError.exit_code if refused else DataError.exit_code if inspection.unchecked else 0)
    loaded = load_recipe(recipe, overrides or [])
    with recipe_named(recipe, overrides or []):
        checked = check_recipe(loaded)
    answer(plan_of(checked), check_tables(checked), as_json=as_json)
    if checked.exit_code:
        raise typer.Exit(checked.exit_code)


@app.command()
def report(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.", show_default=False)],
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of another run: the page shows each client's gain over it."),
    ] = None,
    device_logs: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="State folder of a device; compare its audit log. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html into the folder of a run, whether it is finished or not."""
    from polyfed.report import write_report

    page = str(write_report(dir, baseline, device_logs or []))
    answer({"report": page}, page, as_json=as_json)


@contextmanager
def event_lines(target: str | None) -> Iterator[list["Listener"]]:
    """Yield the listeners that write the events of a run to a file or to standard output; none if `target` is None."""
    from polyfed.experiment.running.events import EventLines

    if target is None:
        yield []
    elif target == STANDARD_OUTPUT:
        yield [EventLines(sys.stdout)]
    else:
        with Path(target).open("a", encoding="utf-8") as file:
            yield [EventLines(file)]


@contextmanager
def recipe_named(recipe: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add the recipe's path to errors that are found only after the recipe has been read."""
    from polyfed.experiment.recipes.overrides import called

    try:
        yield
    except (RecipeError, EgressError) as error:
        raise type(error)(f"{called(recipe, overrides)}: {error}") from None


def unused_folder(parent: Path, name: str) -> Path:
    """The first of `parent/name`, `parent/name-2`, ... that does not exist yet."""
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def plan_of(checked: "Check") -> dict[str, Any]:
    """The content that `check --json` prints."""
    privacy = {} if checked.privacy is None else {"privacy": checked.privacy}
    failed = {"dry_run_failed": list(checked.remarks)} if checked.remarks else {}
    return checked.facts | {"planned": [dataclasses.asdict(row) for row in checked.planned]} | privacy | failed
