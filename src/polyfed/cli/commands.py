"""The command line: each verb parses its arguments, calls one function of the package and prints the result.

A user's error ends with the exit code of its class, without a traceback.
"""

import dataclasses
import itertools
import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from polyfed.cli import audit, catalogue_pages, comparison, deployment, preparation, starting, sweep, tables
from polyfed.cli.output import print_json, show
from polyfed.cli.progress import Progress
from polyfed.core.errors import DataError, EgressError, PolyfedError, PolyfedWarning, RecipeError
from polyfed.core.signals import handling, interrupt
from polyfed.deploy.device_check import inspect
from polyfed.experiment.check import Check
from polyfed.experiment.check import check as check_recipe
from polyfed.experiment.overrides import called, set_options
from polyfed.experiment.recipe import load_recipe
from polyfed.report import REPORT, write_report
from polyfed.run import run as run_recipe

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM: 128 + SIGINT, as in shells."""

PYTHON_FORMAT = warnings.formatwarning
"""Python's own format of a warning."""

app = typer.Typer(
    name="polyfed",
    help="Multimodal federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests the nearest command already
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(audit.app)
app.add_typer(comparison.app)
app.add_typer(sweep.app)
app.command("init")(starting.init)


class Device(StrEnum):
    """The device that holds data and models."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class OnCorrupt(StrEnum):
    """What `data prepare` does with a file that cannot be used."""

    fail = "fail"
    skip = "skip"


RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Override a key of the recipe; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Multimodal federated learning: an algorithm is written once, for simulation and for real devices."""
    if version:
        typer.echo(version_of("polyfed"))
        raise typer.Exit


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
) -> None:
    """Run an experiment and print a short table of its results."""
    if resume and out is None:
        raise RecipeError("--resume needs the folder of the run: --out DIR")
    machine = {"engine.name": engine, "engine.device": device and device.value, "engine.debug": debug or None}
    words = [f"{key}={json.dumps(value)}" for key, value in machine.items() if value is not None]
    overrides = [*(overrides or []), *words]
    loaded = load_recipe(recipe, overrides)
    folder = out if out is not None else unused_folder(Path("runs"), loaded.name)
    try:
        # a batch system that ends a job sends SIGTERM first, and SIGKILL some seconds later
        with Progress() as progress, recipe_named(recipe, overrides), handling(interrupt, signal.SIGTERM):
            finished = run_recipe(loaded, out=folder, resume=resume, listeners=[progress])
    except KeyboardInterrupt:
        again = shlex.join(["polyfed", "run", str(recipe), *set_options(overrides), "--resume", "--out", str(folder)])
        typer.echo(f"resume with: {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    page = folder / REPORT
    if as_json:
        print_json(finished.result)
        return
    show(tables.result_table(finished.result), Text(f"files in {folder}, picture in {page}"))


@app.command()
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    node: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Check this device: the value of its --node-config, or its policy file."),
    ] = None,
) -> None:
    """Validate a recipe; print its clients, blocks and sizes, and what can cross. Nothing leaves a client."""
    if node is not None:
        inspection = inspect(recipe, node, overrides or [])
        if as_json:
            print_json(deployment.device_facts(inspection))
        else:
            show(deployment.device_tables(inspection))
        raise typer.Exit(EgressError.exit_code if inspection.refused or inspection.breaches else 0)
    loaded = load_recipe(recipe, overrides or [])
    with recipe_named(recipe, overrides or []):
        checked = check_recipe(loaded)
    if as_json:
        print_json(plan_of(checked))
    else:
        show(tables.check_tables(checked))
    if checked.refused:
        raise typer.Exit(EgressError.exit_code)


@app.command()
def report(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.", show_default=False)],
    device_logs: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="State folder of a device; compare its audit log. May be repeated."),
    ] = None,
) -> None:
    """Write report.html into the folder of a run, whether it is finished or not."""
    show(Text(str(write_report(dir, device_logs or []))))


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Print the [algorithm] and [egress] lines that a recipe needs for NAME.")
    ] = False,
) -> None:
    """List the algorithms, or describe one: its idea, its hyper-parameters and what can cross."""
    if recipe:
        typer.echo(starting.lines_for(name))
        return
    show(catalogue_pages.algorithm_list() if name is None else catalogue_pages.algorithm_page(name))


@app.command()
def data(
    words: Annotated[list[str] | None, typer.Argument(metavar="[NAME] | prepare NAME", show_default=False)] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="prepare: the folder of the published data set.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="prepare: the folder to write the features to.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="prepare: how many files are read at the same time.")] = 1,
    on_corrupt: Annotated[
        OnCorrupt, typer.Option(help="prepare: fail at a file that cannot be used, or skip it.")
    ] = OnCorrupt.fail,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="key=value", help="prepare: an option of the data source.")
    ] = None,
) -> None:
    """List the data sources, describe one (modalities, licence, options), or extract its features once."""
    match words or []:
        case []:
            show(catalogue_pages.source_list())
        case ["prepare", name]:
            show(*preparation.run_prepare(name, source, target, workers, on_corrupt.value, settings or []))
        case [name] if name != "prepare":
            show(catalogue_pages.source_page(name))
        case _:
            raise RecipeError(
                "write `polyfed data`, `polyfed data NAME`, or `polyfed data prepare NAME --from DIR --to DIR`"
            )


@app.command("app")
def write_flower_app(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the app.", show_default=False)],
    recipe: Annotated[Path, typer.Option(metavar="RECIPE.toml", help="The recipe.", show_default=False)],
    local: Annotated[
        bool, typer.Option("--local", help="Also run it on this machine: a SuperLink, and a SuperNode for each client.")
    ] = False,
    keys: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Write a server certificate and N keys of devices to DIR-credentials."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="The certificate is for this name or address; may be repeated."),
    ] = None,
) -> None:
    """Write a Flower app for a recipe, which `flwr run` starts; see docs/deploy.md."""
    if not local:
        show(*deployment.write_app(recipe, dir, keys, hosts or []))
        return
    try:
        show(*deployment.run_locally(recipe, dir))
    except KeyboardInterrupt:
        typer.echo(f"all processes have ended; resume with: {deployment.resume_command(recipe, dir)}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def recipe_named(recipe: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Put the recipe's path before errors that are found only after the recipe has been read."""
    try:
        yield
    except (RecipeError, EgressError) as error:
        raise type(error)(f"{called(recipe, overrides)}: {error}") from None


def unused_folder(parent: Path, name: str) -> Path:
    """The first of `parent/name`, `parent/name-2`, ... that does not exist yet."""
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def plan_of(checked: Check) -> dict[str, Any]:
    """The content that `check --json` prints."""
    return checked.facts | {"planned": [dataclasses.asdict(row) for row in checked.planned]}


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `polyfed` command.

    Raises:
        SystemExit: always, with 0, the exit code of a `PolyfedError`, or 2 for arguments that are not valid.
    """
    warnings.formatwarning = _as_one_line
    try:
        app(args=None if args is None else list(args))
    except PolyfedError as error:
        typer.echo(f"polyfed: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        # the reader of the pipe has ended (`| head`); redirect, so that the flush at exit does not fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:  # a file or a disk failed where no part of polyfed words the error
        typer.echo(f"polyfed: {error}", err=True)
        raise SystemExit(DataError.exit_code) from None


def _as_one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Format a `PolyfedWarning` like an error of polyfed, and any other warning like Python does."""
    if issubclass(category, PolyfedWarning):
        return f"polyfed: warning: {message}\n"
    return PYTHON_FORMAT(message, category, *where, **line)
