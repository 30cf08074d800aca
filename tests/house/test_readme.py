"""The README's lines for one's own data run as they are printed."""

import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from polyfed.cli import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    """The only block of code of this language that holds a word."""
    blocks = README.split("```")[1::2]  # the text inside of fences
    (found,) = [text for text in blocks if text.startswith(f"{language}\n") and word in text]
    return found.partition("\n")[2]


def test_the_lines_of_python_train_and_predict(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block("python", "labels=label")],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == block("", "Run(fedavg on data, 20 rounds")
    assert not list(tmp_path.iterdir())


def run_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the commands in a folder, one after another, in this process."""
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for command in block("", "polyfed init").splitlines():
            with pytest.raises(SystemExit) as stop:
                main(shlex.split(command, comments=True)[1:])
            assert stop.value.code == 0, command


def write(folder: Path, lines: list[str]) -> None:
    """Write the table, and another one of its kind."""
    (folder / "my.csv").write_text("\n".join(lines))
    (folder / "new.csv").write_text("\n".join([lines[0], *lines[40:80]]))


def test_the_commands_write_a_recipe_check_and_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = np.arange(120) % 3
    values = np.random.default_rng(0).normal(size=(120, 4)) + label[:, None]
    lines = ["audio_0,audio_1,text_0,text_1,label,client"]
    lines += [",".join([*map(str, row), ["a", "b", "c"][label[n]], f"p{n % 4}"]) for n, row in enumerate(values)]
    write(tmp_path, lines)
    run_commands(tmp_path, monkeypatch)
    assert list((tmp_path / "runs").glob("*/result.json"))
    assert (tmp_path / "runs" / "recipe" / "report.html").exists()


def test_a_table_with_holes_leads_to_scores_of_subsets_and_sets_with_a_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    label = np.arange(400) % 3
    values = draw.normal(size=(400, 4)) + label[:, None]
    holes = draw.random(400) < 0.3
    lines = ["audio_0,audio_1,text_0,text_1,label"]
    for row, lacks, number in zip(values, holes, label, strict=True):
        lines.append(",".join([*(["", ""] if lacks else map(str, row[:2])), *map(str, row[2:]), "abc"[number]]))
    write(tmp_path, lines)
    run_commands(tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "accuracy from text" in said
    assert "worst subset" in said
    begin = "import numpy as np, polyfed\ntext = np.zeros((5, 2))\n"
    code = begin + block("python", "predict_set") + "\nprint(len(sets.classes), sets.subsets[0])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 text\n"
