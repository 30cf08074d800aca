"""`--own` with `--own-recipe`, and the lines that `polyfed algorithms NAME --recipe` prints."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import polyfed
from laws.own import row_from
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging.fedprox import FedProx
from polyfed.cli.init import egress_of, lines_for
from polyfed.core.errors import RecipeError
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train

METHOD = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms import Averaging
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree


@message
class Means(Message):
    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    means: Tree = carries("prototypes", shape=(3,))


@dataclass(frozen=True, kw_only=True)
class Sender(Averaging):
    replies: ClassVar[type[Message]] = Means
    scale: float = 0.0

    def reply(self, context, data, fit, got, local):
        assert self.scale == 2.0, "the option of the recipe"
        return Means(fit.params, fit.loss, data.num_rows, {m: torch.ones(3) for m in context.modalities}), local
"""
RECIPE = '[algorithm]\nscale = 2.0\n[egress."*"]\nserver = ["parameters", "statistic", "prototypes"]\n'


def laws(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    call = [sys.executable, "-m", "pytest", "-n", "0", str(root / "tests/laws/test_laws.py"), "--own", "sender:Sender"]
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [*call, *words], cwd=root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def test_a_method_with_a_policy_and_options_keeps_the_laws(tmp_path: Path) -> None:
    (tmp_path / "sender.py").write_text(METHOD)
    (tmp_path / "mine.toml").write_text(RECIPE)
    few = ("-k", "own and (rehearses or announce)")
    done = laws(tmp_path, "--own-recipe", str(tmp_path / "mine.toml"), *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    (tmp_path / "mine.toml").write_text(RECIPE.replace('"*"', "audio").replace("scale", "skale"))
    wrong = laws(tmp_path, "--own-recipe", str(tmp_path / "mine.toml"), *few)
    assert wrong.returncode == 4
    for words in ("2 problems", "no option 'skale'; did you mean 'scale'", "no row 'audio'"):
        assert words in wrong.stderr


def test_a_row_has_what_the_recipe_says_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[algorithm]\nmu = 0.3\n[train]\nlr = 0.2\n[data]\nname = 'toy'\n")
    row = row_from(FedProx, tmp_path / "r.toml")
    assert row.options == {"mu": 0.3, "train": Train(lr=0.2)}
    (tmp_path / "r.toml").write_text("[algorithm]\nname = 'fedavg'\n")
    with pytest.raises(pytest.UsageError, match="is not the class that --own names"):
        row_from(FedProx, tmp_path / "r.toml")


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"own"}))
def test_the_printed_policy_allows_a_method_and_no_kind_less_would(name: str) -> None:
    rows = egress_of(name)
    assert parse_toml(lines_for(name)).get("egress", {}) == rows
    policy = {"b" if block == "a" else block: row for block, row in rows.items()}
    defaults = {key: ROWS[name].options[key] for key in ("train", "selector") if key in ROWS[name].options}
    made = world(name, **defaults)
    fits = {
        key: ROWS[name].options[key] for key in ("scale_params",) if key in ROWS[name].options
    }  # changes no message
    made = replace(made, algorithm=type(made.algorithm)(evaluation=made.algorithm.evaluation, **fits))
    assert not [row for row in plan(assemble(replace(made, egress=policy))) if not row.allowed]
    try:
        enough = all(row.allowed for row in plan(assemble(replace(made, egress={}))))
    except RecipeError:  # the method needs a row to know what it may share
        enough = False
    assert enough == (not rows), "rows are printed exactly if the default does not do"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_printed_recipe_is_accepted_and_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "printed.toml").write_text(lines_for(name))
    recipe = load_recipe(tmp_path / "printed.toml", ["rounds=1"])
    assert check(recipe).exit_code == 0
    assert len(polyfed.run(recipe).rounds) == 1


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_needed_section_stands_in_the_printed_recipe(name: str) -> None:
    table = parse_toml(lines_for(name))
    for section, options in ALGORITHMS[name].needs.items():
        assert options.items() <= table[section].items()


def test_an_unknown_method_is_told() -> None:
    with pytest.raises(RecipeError, match="did you mean 'fedavg'"):
        lines_for("fedavgg")
    with pytest.raises(RecipeError, match="needs the name of an algorithm"):
        lines_for(None)
