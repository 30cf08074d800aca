"""The command line: each verb parses its words, calls one function of the package and prints what it gives.

Errors of the user end with the exit code of their class and without a traceback.
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
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import polyfed
from polyfed.cli import deployment, handbook, preparation, tables
from polyfed.cli.progress import Progress
from polyfed.core.errors import DataError, PolyfedError, PolyfedWarning, RecipeError
from polyfed.core.signals import handling, interrupt
from polyfed.deploy.device_check import inspect
from polyfed.experiment.check import Check
from polyfed.experiment.overrides import as_words, called
from polyfed.experiment.records import dumped
from polyfed.report import REPORT, compare, write_comparison, write_report

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells give it (128 + SIGINT)."""

WIDE = 200
"""Columns of a table that goes to a file or a pipe."""

COMPARISON = "comparison.html"
"""Where `compare --html` writes if it is not told."""

PYTHONS_OWN = warnings.formatwarning
"""How Python writes a warning."""

app = typer.Typer(
    name="polyfed",
    help="Multimodal federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click says it already
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Device(StrEnum):
    """Where tensors live."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class OnCorrupt(StrEnum):
    """What to do with a file that cannot be used."""

    fail = "fail"
    skip = "skip"


RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Override a key of the recipe; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on standard output.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Multimodal federated learning: one text of an algorithm for simulation and for real devices."""
    if version:
        typer.echo(polyfed.__version__)
        raise typer.Exit


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the files of the run. [default: runs/NAME, numbered]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    as_json: AsJson = False,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="Override the recipe's engine.")] = None,
    device: Annotated[Device | None, typer.Option(help="Override the recipe's device.")] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Stop at a client's exception and show where it arose. [engine] debug")
    ] = False,
) -> None:
    """Run an experiment; ends with a short table."""
    if resume and out is None:
        raise RecipeError("--resume needs the folder of the run: --out DIR")
    machine = {"engine.name": engine, "engine.device": device and device.value, "engine.debug": debug or None}
    words = [f"{key}={json.dumps(value)}" for key, value in machine.items() if value is not None]
    overrides = [*(overrides or []), *words]
    loaded = polyfed.load_recipe(recipe, overrides)
    folder = out if out is not None else unused(Path("runs"), loaded.name)
    try:
        # a batch system that takes its machine back sends SIGTERM, and waits a little
        with Progress() as progress, naming(recipe, overrides), handling(interrupt, signal.SIGTERM):
            finished = polyfed.run(loaded, out=folder, resume=resume, listeners=[progress])
    except KeyboardInterrupt:
        again = shlex.join(["polyfed", "run", str(recipe), *as_words(overrides), "--resume", "--out", str(folder)])
        typer.echo(f"go on with: {again}", err=True)
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
        typer.Option(metavar="CONFIG", help="Check this device: words of --node-config, or its policy file."),
    ] = None,
) -> None:
    """Validate a recipe; print clients, blocks, sizes and what can cross. Nothing leaves a client."""
    if node is not None:
        inspection = inspect(recipe, node, overrides or [])
        if as_json:
            print_json(deployment.device_facts(inspection))
        else:
            show(deployment.device_tables(inspection))
        raise typer.Exit(polyfed.core.errors.EgressError.exit_code if inspection.refused else 0)
    loaded = polyfed.load_recipe(recipe, overrides or [])
    with naming(recipe, overrides or []):
        checked = polyfed.check(loaded)
    if as_json:
        print_json(plan_of(checked))
    else:
        show(tables.check_tables(checked))
    if checked.refused:
        raise typer.Exit(polyfed.core.errors.EgressError.exit_code)


@app.command("compare")
def compare_runs(
    dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR... [FILE.html]", help="Folders of runs; with --html, where to write.", show_default=False
        ),
    ],
    html: Annotated[bool, typer.Option("--html", help=f"Write a page as well. [default: {COMPARISON}]")] = False,
    reach: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY", help="Also tell in which round a run first had it, as 0.5.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Table over runs: those that differ only in seed or fold are one line, with mean and spread."""
    targets = [path for path in dirs if html and path.suffix == ".html"]
    comparison = compare((path for path in dirs if path not in targets), reach)
    page = write_comparison(comparison, (targets or [Path(COMPARISON)])[-1]) if html else None
    if as_json:
        print_json(comparison.rows())
    else:
        show(
            tables.comparison_tables(comparison, standard_output().width),
            *([] if page is None else [Text(f"picture in {page}")]),
        )


@app.command()
def report(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.", show_default=False)],
) -> None:
    """Write report.html into the folder of a run, finished or not."""
    show(Text(str(write_report(dir))))


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
) -> None:
    """List the algorithms, or tell what one does, its hyper-parameters and what can cross."""
    show(handbook.algorithm_list() if name is None else handbook.algorithm_page(name))


@app.command()
def data(
    words: Annotated[list[str] | None, typer.Argument(metavar="[NAME] | prepare NAME", show_default=False)] = None,
    source: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="prepare: the published folder.")] = None,
    target: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="prepare: folder of the features.")] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="prepare: files read at the same time.")] = 1,
    on_corrupt: Annotated[OnCorrupt, typer.Option(help="prepare: what to do with unusable files.")] = OnCorrupt.fail,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="key=value", help="prepare: an option of the data source.")
    ] = None,
) -> None:
    """List the data sources, describe one (modalities, licence, options), or extract its features once."""
    match words or []:
        case []:
            show(handbook.source_list())
        case ["prepare", name]:
            show(*preparation.run_prepare(name, source, target, workers, on_corrupt.value, settings or []))
        case [name] if name != "prepare":
            show(handbook.source_page(name))
        case _:
            raise RecipeError("write polyfed data, polyfed data NAME, or polyfed data prepare NAME --from DIR --to DIR")


@app.command("app")
def write_flower_app(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the app.", show_default=False)],
    recipe: Annotated[Path, typer.Option(metavar="RECIPE.toml", help="The recipe.", show_default=False)],
    local: Annotated[
        bool, typer.Option("--local", help="Also start it: a SuperLink and a SuperNode a client, on this machine.")
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
    """Write a Flower app of a recipe, for `flwr run`; see docs/deploy.md."""
    if not local:
        show(*deployment.written(recipe, dir, keys, hosts or []))
        return
    try:
        show(*deployment.run_here(recipe, dir))
    except KeyboardInterrupt:
        typer.echo(f"all processes have ended; go on with: {deployment.again(recipe, dir)}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def naming(recipe: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Put the recipe's name before errors that show only once recipe and data meet; reading it names it already."""
    try:
        yield
    except (RecipeError, polyfed.core.errors.EgressError) as error:
        raise type(error)(f"{called(recipe, overrides)}: {error}") from None


def unused(parent: Path, name: str) -> Path:
    """The first of `parent/name`, `parent/name-2`, ... that is not there yet."""
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def plan_of(checked: Check) -> dict[str, Any]:
    """What `check --json` prints."""
    return checked.facts | {"planned": [dataclasses.asdict(row) for row in checked.planned]}


def print_json(content: Any) -> None:
    """JSON on standard output, and nothing else: as in the files of a run, null for what is not finite."""
    typer.echo(dumped(content))


def standard_output() -> Console:
    """Standard output; wide tables stay whole where there is no terminal to fold them for."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def show(*parts: RenderableType) -> None:
    """Tables and lines on standard output."""
    console = standard_output()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `polyfed` command.

    Raises:
        SystemExit: always; 0, the exit code of a `PolyfedError`, or 2 for words that are no call.
    """
    warnings.formatwarning = _as_one_line
    try:
        app(args=None if args is None else list(args))
    except PolyfedError as error:
        typer.echo(f"polyfed: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        # the reader has gone (`| head`); a later flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:  # a file or a disk that no part of polyfed has words of its own for
        typer.echo(f"polyfed: {error}", err=True)
        raise SystemExit(DataError.exit_code) from None


def _as_one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Our own warnings as our errors look, others as Python writes them."""
    if issubclass(category, PolyfedWarning):
        return f"polyfed: warning: {message}\n"
    return PYTHONS_OWN(message, category, *where, **line)
