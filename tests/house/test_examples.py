"""The examples run, and so does the Python of the pages that show some."""

import importlib
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laws.rows import Row
from polyfed.data import ClientsSpec
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train
from world import AWKWARD, algorithm, furthest, played, recipe

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_and_learns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = runpy.run_path(str(path))["main"](rounds=4)
    assert result["metrics"]["global"]["accuracy"] > 0.2
    assert capsys.readouterr().out


def test_the_first_script_of_the_page_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _python_of(ROOT / "docs" / "own-method.md")[0]
    (tmp_path / "mine.py").write_text(script)
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    assert "metrics.global.accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_method_with_a_server_state_is_feddyn_and_resumes(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [code for code in _python_of(ROOT / "docs" / "own-method.md") if "class DynState" in code]
    (tmp_path / "page_of_feddyn.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options: dict[str, Any] = {"alpha": 0.2, "aggregation": "uniform", "train": Train(lr=0.1, batch_size=16)}
    mine = importlib.import_module("page_of_feddyn").FedDyn(**options)
    made = recipe(mine, engine, AWKWARD, clients=ClientsSpec(partition="dirichlet", num=5, alpha=1.0))
    _, state, _ = played(made)
    _, theirs, _ = played(replace(made, algorithm=algorithm("feddyn", selector=mine.selector, **options)))
    assert furthest(state.params, theirs.params) < 1e-6
    assert furthest(state.h, theirs.h) < 1e-5
    half, before, _ = played(replace(made, rounds=2))
    modules = checkpoint.modules_of(mine)
    checkpoint.save(tmp_path / "kept", 2, {"state": before, "locals": half.engine.locals}, modules)
    found = checkpoint.load(tmp_path / "kept", modules)
    assert found is not None
    again = assemble(made)
    again.engine.locals, before = found[1]["locals"], found[1]["state"]
    again.fed.template = before.params
    again.fed.begin(3)
    assert checkpoint.digest(mine.round(before, again.fed)) == checkpoint.digest(state)


def test_the_method_in_the_readme_is_complete() -> None:
    found: dict[str, object] = {}
    (code,) = [code for code in _python_of(ROOT / "README.md") if "class FedProx" in code]
    exec(code, found)
    method = found["FedProx"](mu=0.1)  # type: ignore[operator]
    one, two = (played(recipe(method, engine, rounds=2))[1].params for engine in ("sequential", "vectorised"))
    assert furthest(one, two) < 1e-5


def test_pieces_of_the_page_stand_in_the_example() -> None:
    code = "".join((ROOT / "examples" / "steady.py").read_text().split())
    for part in (
        r"agreement: Tree = .*",
        r"step = subtract.*",
        r"agreement = \{.*",
        r"return Steady.*",
        r"return like.*",
    ):
        (line,) = set(re.findall(part, (ROOT / "docs" / "own-method.md").read_text()))
        assert "".join(line.split()) in code


@pytest.mark.slow
def test_the_laws_can_be_run_on_a_method_of_ones_own() -> None:
    words = [sys.executable, "-m", "polyfed.laws", "examples.steady:Steady"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "18 laws kept, 0 broken" in done.stdout


def test_the_example_keeps_its_state_alike_on_both_engines() -> None:
    method = runpy.run_path(str(ROOT / "examples" / "steady.py"))["Steady"]()
    one, state_one, ledger_one = played(recipe(method, "sequential"))
    two, state_two, ledger_two = played(recipe(method, "vectorised"))
    assert furthest(state_one.params, state_two.params) < Row().tolerance
    assert ledger_one == ledger_two
    assert all(furthest(one.engine.locals[c], two.engine.locals[c]) < 10 * Row().tolerance for c in one.engine.locals)


def _python_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
