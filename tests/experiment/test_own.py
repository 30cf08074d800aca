"""The user's own parts by path in a recipe: they run, resume and are told of as those that polyfed brings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.registry import find
from polyfed.data.columns import Columns
from polyfed.data.sources import CgDigits
from polyfed.experiment.recipes.recipe import load_recipe
from refusals import refuses, warned

MODULE = """
from dataclasses import dataclass
from polyfed.algorithms import Averaging
from polyfed.data import Partition, Source
from polyfed.selection import Uniform
from polyfed.core.tree import squared_distance

@dataclass(frozen=True, kw_only=True)
class Pull(Averaging):
    '''FedAvg with a pull towards the global model.'''
    mu: float = 0.1

    def loss(self, site, w, batch, got, local):
        return super().loss(site, w, batch, got, local) + self.mu / 2 * squared_distance(got.params, w)

@dataclass(frozen=True, kw_only=True)
class First(Uniform):
    '''Always the first clients.'''

    def choose(self, memory, params, fed):
        return list(range(3)), memory

class NoDataclass(Source):
    def load(self): ...

@dataclass(frozen=True, kw_only=True)
class Halves(Partition):
    '''The first half of the rows to client 0, the rest to client 1.'''
    num: int = 2

    def split(self, columns, rows, key):
        return [rows[: len(rows) // self.num], rows[len(rows) // self.num :]]
"""

RECIPE = """
rounds = 3
[data]
name = "cg-digits"
[clients]
partition = "iid"
num = 6
[model]
embedding = 8
[model.encoders]
gray = { kind = "mlp", hidden = [8] }
color = { kind = "mlp", hidden = [8] }
[algorithm]
name = "own_parts:Pull"
mu = 0.5
[selection]
name = "own_parts:First"
[train]
batch_size = 64
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def test_own_algorithm_and_selector_run_from_a_recipe_and_resume(recipe: Path, tmp_path: Path) -> None:
    polyfed.run(load_recipe(recipe, ["rounds=2"]), tmp_path / "run")
    first = (tmp_path / "run" / "recipe.toml").read_text()
    assert 'name = "own_parts:Pull"' in first, "the resolved recipe names the class as the recipe did"
    assert 'name = "own_parts:First"' in first
    more = polyfed.run(load_recipe(recipe), tmp_path / "run", resume=True)
    assert more.result["algorithm"] == "own_parts:Pull"
    assert [row["cohort"] for row in more.rounds] == [[0, 1, 2]] * 3
    assert more.result["state_sha256"] == polyfed.run(recipe).result["state_sha256"]
    again = polyfed.run(tmp_path / "run" / "recipe.toml")
    assert again.result["state_sha256"] == more.result["state_sha256"], "the resolved recipe is a recipe"


def test_own_partition_from_a_recipe(recipe: Path) -> None:
    made = load_recipe(recipe, ["clients.partition=own_parts:Halves", "clients.num=2", "selection.name=uniform"])
    found = polyfed.check(made).facts["clients"]
    assert len(found) == 2
    assert abs(found[0]["rows"] - found[1]["rows"]) <= 1


class Anything:
    """A source that is no dataclass."""

    def load(self) -> Columns:
        return CgDigits().load()


def test_a_source_need_not_be_a_dataclass_in_python(recipe: Path, tmp_path: Path) -> None:
    made = replace(load_recipe(recipe), data=Anything())
    polyfed.run(made, tmp_path / "run")
    assert 'name = "test_own:Anything"' in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_bare_tensor_is_no_column() -> None:
    digits = CgDigits().load()
    with refuses(DataError, "modality 'gray'"):
        replace(digits, modalities={"gray": digits.column("gray").values})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.name=own_parts:Push", "algorithm.name: attribute"),
        ("algorithm.name=nowhere:Pull", "algorithm.name: named"),
        (
            "algorithm.name=own_parts:First",
            "algorithm.name: extends",
        ),
        (
            "selection.name=own_parts:Pull",
            "selection.name: extends",
        ),
        ("data.name=own_parts:Halves", "data.name: extends"),
        ("data.name=own_parts:NoDataclass", "data.name: dataclass"),
        ("clients.partition=own_parts:NoDataclass", "clients.partition: extends"),
        ("algorithm.name=fedavgg", "algorithm.name: fedavg"),
        ("algorithm.nu=1.0", "algorithm.nu: option"),
    ],
)
def test_what_is_wrong_with_an_own_part_is_said(recipe: Path, override: str, words: str) -> None:
    with refuses(RecipeError, words):
        load_recipe(recipe, [override])


class Undeclared(Averaging):
    """Lacks its decorator."""

    strength: float = 0.5


def test_options_without_the_decorator_of_a_dataclass_are_told() -> None:
    with refuses(RecipeError, "decorator"):
        find("test_own:Undeclared", {}, Averaging)


def test_a_method_that_is_nearly_a_hook_is_told() -> None:
    with warned("overrides nothing"):

        class Misspelt(Averaging):
            def losses(self, *_: Any) -> None:
                """FedAvg's own loss would be taken."""

            def entirely_new(self) -> None:
                """Nobody would be meant."""
