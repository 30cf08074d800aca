"""Commands that polyfed prints can be pasted into a shell, also if a path has blanks."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from polyfed.cli import main
from polyfed.cli.application import app, typed_options
from polyfed.core.errors import command

SOURCES = Path(__file__).parents[2] / "src" / "polyfed"
VERBS = (
    "|".join(
        info.name or info.callback.__name__.replace("_", "-")
        for info in app.registered_commands
        if info.callback is not None
    )
    + "|server|device"
)
OPEN = re.compile(rf"polyfed ({VERBS})( --?[a-z-]+| [A-Za-z.]+)* $")
"""The end of a text in which a value would be the next word of a command."""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(words)
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return called


def unquoted(path: Path) -> Iterator[str]:
    """Yield the f-strings in which a value stands unquoted in a command. Names of data sources have no blanks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for text, value in zip(node.values, node.values[1:], strict=False):
                is_open = isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)
                if is_open and (found := OPEN.search(str(text.value))) and not found[0].startswith("polyfed data"):  # type: ignore[attr-defined]
                    yield f"{path.name}:{node.lineno} {found[0]}"


def test_no_command_holds_an_unquoted_value() -> None:
    found = [line for path in SOURCES.rglob("*.py") for line in unquoted(path)]
    assert not [line for line in found if "audit head" not in line]  # these are signed bytes, and no command


def test_an_unquoted_value_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('x = f"go on with: polyfed run {path}"\ny = f"polyfed app a --recipe {path}."\n')
    assert len(list(unquoted(tmp_path / "a.py"))) == 2


def commands_in(text: str) -> list[list[str]]:
    """The commands in a printed line, as a shell would split them."""
    found = []
    for part in re.split(r"(?=polyfed [a-z])", text)[1:]:
        words = shlex.split(re.split(r", then |\. It has|, or labels=|\n", part)[0])
        found.append(words[1:])
    return found


def test_printed_commands_run_with_a_path_that_has_blanks(tmp_path: Path, call: Call, monkeypatch: Any) -> None:
    place = tmp_path / "my own data"
    place.mkdir()
    monkeypatch.chdir(place)
    draw = np.random.default_rng(0)
    table = pd.DataFrame({f"a_{n}": draw.normal(size=90) for n in range(3)}).assign(kind=np.arange(90) % 3)
    table.to_csv(place / "my table.csv", index=False)
    code, out, err = call("init", "my table.csv", "--out", "my recipe.toml")
    (advice,) = commands_in(err)
    assert (code, advice) == (2, ["init", "my table.csv", "--out", "my recipe.toml", "--label", "NAME"])
    code, out, err = call(*[word.replace("NAME", "kind") for word in advice], "--out", "my recipe.toml")
    assert code == 0, err
    advised = commands_in(out)
    assert advised == [["check", "my recipe.toml"], ["run", "my recipe.toml"]]
    for words in advised:
        more = ("--set", "rounds=1", "--quiet") if words[0] == "run" else ("--set", "rounds=1")
        assert call(*words, *more)[0] == 0
    code, out, _ = call("recipes", "fedavg-cg-digits", "--copy")
    (words,) = commands_in(out)
    assert words == ["run", "fedavg-cg-digits.toml"]
    assert call(*words, "--set", "rounds=1", "--quiet")[0] == 0


def test_the_words_of_a_command_survive_a_shell() -> None:
    words = ["run", "my recipe.toml", "--set", 'data.path="a b"', "it's"]
    assert shlex.split(command(*words)) == ["polyfed", *words]


def test_a_command_is_printed_as_it_was_typed() -> None:
    verbs, typed = typer.Typer(), []

    @verbs.command()
    def verb(
        context: typer.Context, minutes: float = 30.0, quiet: bool = True, again: bool = False, name: str = ""
    ) -> None:
        typed.append([word for words in typed_options(context) for word in words])

    for words in (["--minutes", "0"], ["--minutes", "0.25", "--no-quiet"], ["--again", "--name", "lr=1.0"], []):
        assert CliRunner().invoke(verbs, words).exit_code == 0
        assert typed.pop() == words
