"""Text from files of strangers neither controls the terminal nor forges a line of a finding."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.text import Text
from typer.testing import CliRunner

from polyfed.cli import app, main
from polyfed.cli.application import _as_one_line
from polyfed.cli.comparison import sheet_table
from polyfed.cli.output import print_error, show
from polyfed.cli.preparation import PrepareProgress
from polyfed.cli.printing.tables import result_table
from polyfed.core.errors import PolyfedWarning
from polyfed.report.comparison.tables import Sheet, latex
from polyfed.report.reading.reconciliation import WHAT, _shown
from polyfed.report.text_layout import SafeConsole

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\u202e\r\u2028\x9b"

RECIPE = """
rounds = 1
[data]
name = "npz"
path = "/nowhere/\\u001b]0;pwned\\u0007\\u001b[2J"
modalities = ["a"]
[task]
name = "classification"
[model.encoders]
a = { kind = "mlp" }
[algorithm]
name = "fedavg"
[train]
lr = 0.1
batch_size = 8
epochs = 1
"""


def test_errors_and_lines_show_control_characters_as_escapes_and_keep_the_line_breaks_of_errors(capsys: Any) -> None:
    print_error("RecipeError", f"one {HOSTILE}\n  two", 2, as_json=False)
    show(f"line {HOSTILE}\nforged")
    print(_as_one_line(PolyfedWarning(HOSTILE), PolyfedWarning), end="")
    told = capsys.readouterr()
    assert told.err.startswith("polyfed: one \\x1b]0;pwned")
    assert told.err.split("\n")[1:] == ["  two", ""]
    assert all(c.isprintable() or c == "\n" for c in told.err + told.out)
    assert len(told.out.splitlines()) == 2


def test_words_of_a_data_file_control_no_terminal_in_check_and_run(tmp_path: Path, capsys: Any) -> None:
    """Class names, the file's name and the modalities come from a file that somebody else has made."""
    rng, words = np.random.default_rng(0), np.array([f"cat{HOSTILE}", "dog", "cow"])
    features = {"a": rng.normal(size=(60, 5)), "b": rng.normal(size=(60, 4))}
    np.savez(tmp_path / f"ta{HOSTILE}ble.npz", label=words[rng.integers(0, 3, 60)], **features)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'rounds = 1\n[data]\nname = "npz"\npath = {json.dumps(str(tmp_path / f"ta{HOSTILE}ble.npz"))}\n'
        'modalities = ["a", "b"]\n[clients]\nnum = 3\n[model]\nembedding = 4\n[algorithm]\nname = "fedavg"\n'
    )
    for verb in (["check", str(recipe)], ["run", str(recipe), "--out", str(tmp_path / "out")]):
        with pytest.raises(SystemExit) as stop:
            main(verb)
        assert stop.value.code == 0
        told = capsys.readouterr()
        assert "cat\\x1b]0;pwned" in told.out + told.err
        assert all(c.isprintable() or c == "\n" for c in told.out + told.err)


def test_a_clip_of_a_data_set_controls_no_terminal(capsys: Any) -> None:
    with PrepareProgress() as progress:
        progress("clip-skipped", name=HOSTILE, reason=HOSTILE)
        progress("prepare-unchanged", name=HOSTILE)
    told = capsys.readouterr().err
    assert "skipped \\x1b]0;pwned" in told
    assert all(c.isprintable() or c == "\n" for c in told)


def test_a_finding_is_one_line_whatever_a_device_wrote_into_its_log() -> None:
    row = tuple(f"{key}{HOSTILE}\n  client 0: forged finding" for key in WHAT)
    assert _shown([((1, 0), row)]).isprintable()


def test_cells_of_a_comparison_are_escaped(capsys: Any) -> None:
    show(sheet_table(Sheet(name="x", title=HOSTILE, headings=(HOSTILE, "b"), rows=[(HOSTILE, "1")], best=set())))  # type: ignore[arg-type]
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


def test_tables_and_styled_lines_are_escaped_wherever_their_text_comes_from(capsys: Any) -> None:
    result = {"algorithm": HOSTILE, "dataset": HOSTILE, "rounds": 1, "seed": 1, "bytes_up": 1, "bytes_down": 1}
    result |= {"metrics": {"global": {"accuracy": 0.5}, "unimodal": {HOSTILE: 0.5}}, "seconds_per_round": 1.0}
    show(result_table(result), Text(f"styled {HOSTILE}", "bold red"))
    told = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in told)
    assert "\\x1b]0;pwned" in told


def test_a_check_on_a_device_escapes_the_path_of_the_recipes_data(tmp_path: Path) -> None:
    """The engineer of a device runs `polyfed check RECIPE --node POLICY` with a recipe that a stranger wrote."""
    (tmp_path / "policy.toml").write_text("[limits]\nmin_rows = 2\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    told = CliRunner().invoke(app, ["check", str(tmp_path / "recipe.toml"), "--node", str(tmp_path / "policy.toml")])
    assert "NOT CHECKED" in told.output
    assert all(c.isprintable() or c == "\n" for c in told.output)


def test_colours_and_line_breaks_stay() -> None:
    file = StringIO()
    SafeConsole(file=file, force_terminal=True, color_system="standard").print(Text("one\ntwo", "red"))
    assert file.getvalue() == "\x1b[31mone\x1b[0m\n\x1b[31mtwo\x1b[0m\n"


def test_a_note_of_a_strangers_run_adds_no_line_to_a_latex_file() -> None:
    text = latex([], ["the run failed: one\n\\input{/etc/passwd}"])
    assert all(line.startswith("%") for line in text.splitlines())


def test_warnings_are_escaped() -> None:
    assert _as_one_line(HOSTILE, PolyfedWarning).removesuffix("\n").isprintable()
