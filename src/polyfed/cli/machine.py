"""The verbs `doctor`, which checks this machine, and `completion`, which installs Tab completion."""

from enum import StrEnum
from typing import Annotated

import typer

from polyfed.cli.application import COMPLETE_VARIABLE, AsJson, app
from polyfed.cli.output import answer
from polyfed.core.errors import PolyfedError, RecipeError

COMMAND = "polyfed"


class Shell(StrEnum):
    """The shells for which polyfed can install Tab completion."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"
    pwsh = "pwsh"


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, threads, GPU, optional parts, memory, disk. Print what to install."""
    from polyfed.cli import doctor as examination

    found = examination.examine()
    answer(found, examination.page(found), as_json=as_json)
    if not found["works"]:
        raise typer.Exit(PolyfedError.exit_code)


@app.command()
def completion(
    shell: Annotated[Shell | None, typer.Argument(help="The shell. [default: the one that you use]")] = None,
    show_script: Annotated[bool, typer.Option("--show", help="Print the script and install nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Install Tab completion of verbs and options for your shell."""
    from typer.completion import get_completion_script, install  # type: ignore[attr-defined]  # it names no exports

    name = shell.value if shell is not None else detected()
    if show_script:
        script = get_completion_script(prog_name=COMMAND, complete_var=COMPLETE_VARIABLE, shell=name)
        answer({"shell": name, "script": script}, *script.split("\n"), as_json=as_json)
        return
    _, path = install(name, COMMAND, COMPLETE_VARIABLE)
    answer(
        {"shell": name, "installed": str(path)},
        f"completion for {name} is in {path}; open a new terminal to use it",
        as_json=as_json,
    )


def detected() -> str:
    """The name of the shell that called the command.

    Raises:
        RecipeError: the shell is not known, or polyfed cannot install completion for it.
    """
    import shellingham

    allowed = ", ".join(Shell)
    try:
        name: str = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, RuntimeError):
        raise RecipeError(f"completion: your shell was not recognised. Name it: {allowed}") from None
    if name not in list(Shell):
        raise RecipeError(f"completion: {name} is not supported. Allowed: {allowed}")
    return name
