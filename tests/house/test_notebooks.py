"""The notebooks of docs/tutorials run, without a warning, and show what they showed when they were written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the kernel's libraries warn of what is not ours, and warnings are errors here."""
    words = [sys.executable, str(ROOT / "docs" / "notebooks.py"), "--check", str(path)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_and_shows_the_same(path: Path) -> None:
    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_imports_polyfed_in_its_first_code_cell_only(path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    imports = [[line for line in cell.splitlines() if line.startswith(("import ", "from "))] for cell in cells]
    assert any("polyfed" in line for line in imports[0])
    assert not any(imports[1:])


def test_a_notebook_that_fails_warns_or_shows_something_else_is_told(tmp_path: Path) -> None:
    cells = [
        ("1 / 0", "", "ZeroDivisionError"),
        ("import warnings; warnings.warn('beware')", "", "beware"),
        ("print('three', 3)", "four 4\n", "three #"),
    ]
    for source, shown, words in cells:
        output = {"output_type": "stream", "name": "stdout", "text": shown}
        cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": source, "outputs": [output][: bool(shown)]}
        notebook = {"cells": [cell | {"execution_count": None}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "bad.ipynb").write_text(json.dumps(notebook))
        done = check(tmp_path / "bad.ipynb")
        assert done.returncode == 1
        assert words in done.stdout, done.stdout + done.stderr
