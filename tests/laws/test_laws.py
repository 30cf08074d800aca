"""Laws that every algorithm keeps, on every engine."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import SCORING, Algorithm
from polyfed.core.tree import Tree
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly
from polyfed.laws.checks import LAWS, NotApplicable
from polyfed.laws.federation import Trial, trained
from world import played, same

NAMES = sorted(ROWS)


@lru_cache(maxsize=2)  # the laws of a method follow each other, and share runs
def trial(name: str) -> Trial:
    return Trial(ALGORITHMS[name], ROWS[name])


def world(name: str, engine: str = "sequential", encoders: Any = None, **options: Any) -> Recipe:
    return trial(name).recipe(engine, encoders, **options)


def params(state: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state.params
    return found


def models(name: str, parts: Assembly, state: Any) -> list[Tree]:
    """What a method trains: the state's model, or the clients' own."""
    return trained(parts, state)


def test_every_algorithm_has_a_row() -> None:
    assert set(ROWS) == set(ALGORITHMS), "add the algorithm to tests/laws/rows.py"


def test_no_method_repeats_a_task_of_the_evaluation() -> None:
    """It names the class of its message in `evaluates`, and the model in `own_params`."""
    repeated = {
        name: {t for t in SCORING if getattr(cls, t) is not getattr(Algorithm, t)} for name, cls in ALGORITHMS.items()
    }
    assert not {name: tasks for name, tasks in repeated.items() if tasks}


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # the laws' clients have no test rows of their own
@pytest.mark.parametrize("law", [law for law in LAWS if law != "corrupt-replies"])  # test_malformed.py, more cases
@pytest.mark.parametrize("name", NAMES)
def test_every_method_keeps_every_law(name: str, law: str) -> None:
    try:
        LAWS[law].check(trial(name))
    except NotApplicable as why:
        pytest.skip(str(why))


def test_zero_rounds_leave_the_initial_model() -> None:
    parts, state, ledger = played(world("fedavg", "vectorised").__class__(**{**vars(world("fedavg")), "rounds": 0}))
    assert same(state.params, parts.initial)
    assert ledger == []
