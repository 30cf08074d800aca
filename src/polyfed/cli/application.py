"""The basis of the `polyfed` command: shared options, and how an error becomes text, JSON and an exit code.

This file and the files with the verbs import little, so that `polyfed --help` is fast. Each verb imports what it needs
when it runs.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from polyfed.cli.output import print_error
from polyfed.core.errors import DataError, PolyfedError, PolyfedWarning, RecipeError
from polyfed.core.system.log_lines import escaped_lines

UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The class of all errors about arguments. Typer before 0.26 takes it from click, later releases bring their own."""

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM: 128 + SIGINT, as in shells."""

JSON_OPTION = "--json"

COMPLETE_VARIABLE = "_POLYFED_COMPLETE"
"""The environment variable that a shell sets when it asks for completions of an unfinished command."""

PYTHON_FORMAT = warnings.formatwarning
"""Python's own format of a warning."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

typer.core.HAS_RICH = False  # or Typer 0.20 writes a backslash before the brackets of plain help

app = typer.Typer(
    name="polyfed",
    help="Multimodal federated learning.",
    no_args_is_help=True,
    add_completion=False,  # `polyfed completion` installs it
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, because the import of rich takes longer than all other imports together
    suggest_commands=False,  # click already suggests the nearest command
    context_settings=HELP_OPTIONS,
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Override a key of the recipe; may be repeated."),
]
Person = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Array or column of persons; no random split divides the rows of one."),
]
LeaveOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", metavar="COLUMN", help="Column or array that is no input; may be repeated."),
]
AsJson = Annotated[bool, typer.Option(JSON_OPTION, help="Print JSON, and nothing else, on standard output.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Multimodal federated learning: an algorithm is written once, for simulation and for real devices."""
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("polyfed"))
        raise typer.Exit


def typed_options(context: typer.Context) -> tuple[tuple[str, ...], ...]:
    """Return the options of a verb that the user typed, one tuple of words for each; see `Call`."""
    result: list[tuple[str, ...]] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.param_type_name != "option" or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[str(parameter.name)]
        flag = (parameter.secondary_opts if value is False else parameter.opts)[0]
        values = value if isinstance(value, list | tuple) else [value]
        result += [(flag,)] if isinstance(value, bool) else [(flag, _typed(one)) for one in values]
    return tuple(result)


def _typed(value: Any) -> str:
    """Return the value of an option as a user types it: 30 minutes, not 30.0."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM ended a verb; the text says how to resume."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `polyfed` command.

    With `--json`, an error is also a JSON object on standard output. The text on standard error and the exit code are
    the same with and without it.

    Raises:
        SystemExit: always. The exit code is 0 after success, `exit_code` of the error after a `PolyfedError`, and 2 if
            the arguments are not valid.
    """
    warnings.formatwarning = _as_one_line
    words = list(sys.argv[1:] if args is None else args)
    as_json = JSON_OPTION in words
    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # typer names no exports

        completion_init()
    if words and (instead := _replaced(words[0])):
        text = f"there is no `polyfed {words[0]}` any more: {instead}"
        _end("RecipeError", text, RecipeError.exit_code, as_json=as_json)
    try:
        code = app(args=words, prog_name="polyfed", standalone_mode=False)
    except PolyfedError as error:
        _end(type(error).__name__, str(error), error.exit_code, as_json=as_json)
    except UsageError as error:  # the arguments are not a valid call of a verb
        usage: Any = error
        usage.show()
        _end(type(error).__name__, usage.format_message(), usage.exit_code, as_json=as_json, shown=True)
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        _end("Interrupted", str(stop), INTERRUPTED, as_json=as_json, shown=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:  # a file or disk error that polyfed does not translate
        _end(type(error).__name__, str(error), DataError.exit_code, as_json=as_json)
    if code == INTERRUPTED:  # typer's word for Ctrl-C in a verb that has nothing to resume
        _end("Interrupted", "interrupted", INTERRUPTED, as_json=as_json)
    raise SystemExit(code if isinstance(code, int) else 0)


def _replaced(word: str) -> str:
    """Return what to type in place of a verb of deployments on Flower, or "" for any other word."""
    server, device = "start the server with `polyfed server DIR`", "start a device with `polyfed device FILE.toml`"
    known = {"superlink": server, "supernode": device, "flower-superlink": server, "flower-supernode": device}
    flower = f"{server}, and {device}" if word.startswith("flower-") else ""
    result = known.get(word, flower)
    return result and f"{result} (polyfed docs deploy)"


def _end(kind: str, text: str, code: int, *, as_json: bool, shown: bool = False) -> NoReturn:
    """Print an error, unless standard error already shows it, and end with its exit code."""
    print_error(kind, text, code, as_json=as_json, shown=shown)
    raise SystemExit(code) from None


def _as_one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Format a `PolyfedWarning` like an error of polyfed, and any other warning like Python does."""
    if issubclass(category, PolyfedWarning):
        return f"polyfed: warning: {escaped_lines(str(message))}\n"
    return PYTHON_FORMAT(message, category, *where, **line)
