"""A run that will measure nothing says so before it trains, and names the key to set."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check, warn_unmeasured
from polyfed.experiment.running.assembly import assemble
from polyfed.start import run
from refusals import warned
from world import algorithm, played, recipe

OWN = ClientsSpec(partition="iid", num=6, personal_test=0.2)


def remarks(made: Any) -> list[str]:
    """What `warn_unmeasured` alone says of a recipe."""
    parts = assemble(made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_unmeasured(parts)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_it_is_said_of_those_whose_evaluation_is_empty_and_of_no_other(name: str) -> None:
    made = replace(world(name), rounds=1)
    parts, state, _ = played(made)
    empty = not made.algorithm.evaluate(state, parts.fed).metrics
    assert bool(remarks(made)) == empty
    assert not remarks(replace(made, clients=replace(made.clients, personal_test=0.3))), "with own test rows"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pfmml", {}),
        ("fedamp", {}),
        ("fedfomo", {}),
        ("local", {"global_test": "never"}),
        ("fedproto", {"mode": "original"}),
    ],
)
def test_the_key_is_named(name: str, options: dict[str, Any]) -> None:
    made = recipe(algorithm(name, **(ROWS[name].options | options)), clients=ClientsSpec(partition="iid", num=6))
    (text,) = remarks(made)
    assert text.startswith(f"{name} on data 'toy' measures nothing")
    assert "[clients] personal_test = 0.2" in text
    assert not remarks(replace(made, clients=OWN))
    mute = replace(made.algorithm, evaluation=Evaluation(personal=False))
    (text,) = remarks(replace(made, algorithm=mute, clients=OWN))
    assert "[evaluate] personal = true" in text


def test_run_and_check_say_it() -> None:
    made = recipe(algorithm("fedfomo", uploads=3), rounds=1)
    with warned("measures nothing"):
        assert run(made).result["metrics"] == {}
    with warned("measures nothing"):
        check(made)
