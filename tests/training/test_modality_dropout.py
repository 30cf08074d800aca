"""`[train] modality_dropout`: how often which rows lose a modality, what they keep, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyfed.core.batch import Batch
from polyfed.core.errors import PolyfedError
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.training.modality_dropout import with_dropout
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, played, recipe

ROWS = 40_000


def batch(key: int = 1, names: str = "abc", rows: int = ROWS, **present: torch.Tensor) -> Batch:
    x = {m: torch.ones(rows, 2) for m in names}
    return Batch(x=x, y=torch.zeros(rows).long(), rows=torch.arange(rows), present=present, key=key)


def shares(found: Batch) -> dict[str, float]:
    return {m: 1 - float(there.float().mean()) for m, there in found.present.items()}


def test_rows_lose_each_modality_at_its_rate_and_independently() -> None:
    found = with_dropout(batch(), Train(modality_dropout={"a": 0.5, "b": 0.2}))
    assert shares(found) == {m: pytest.approx(rate, abs=0.01) for m, rate in {"a": 0.5, "b": 0.2, "c": 0.0}.items()}
    both = (~found.present["a"] & ~found.present["b"]).float().mean()
    assert float(both) == pytest.approx(0.1, abs=0.01)
    for m, value in found.x.items():
        assert torch.equal(value[:, 0] == 1, found.present[m]), "a lost modality reads as zeros"


def test_a_row_that_would_lose_everything_keeps_one_drawn_evenly() -> None:
    found = with_dropout(batch(), Train(modality_dropout=0.9))
    there = torch.stack([found.present[m] for m in "abc"])
    assert bool(there.any(0).all())
    one = there[:, there.sum(0) == 1].float().mean(1)
    assert torch.allclose(one, torch.full((3,), 1 / 3), atol=0.02)
    assert float((there.sum(0) == 1).float().mean()) == pytest.approx(0.9**3 + 3 * 0.1 * 0.9**2, abs=0.01)


def test_a_row_keeps_the_only_modality_that_it_has() -> None:
    lone = torch.arange(ROWS) % 2 == 0
    found = with_dropout(batch(names="ab", b=lone), Train(modality_dropout=0.7))
    assert bool(found.present["a"][~lone].all())
    assert not bool(found.present["b"][~lone].any())
    assert float((~found.present["a"][lone]).float().mean()) == pytest.approx(0.7 - 0.49 / 2, abs=0.01)


def test_draws_depend_on_key_row_and_name_alone() -> None:
    train = Train(modality_dropout={"a": 0.5, "b": 0.3})
    first, again, other = (with_dropout(batch(key), train) for key in (1, 1, 2))
    assert torch.equal(first.present["a"], again.present["a"])
    assert 0.4 < float((first.present["a"] != other.present["a"]).float().mean()) < 0.6
    short = with_dropout(batch(names="ab", rows=9), train)
    assert torch.equal(short.present["a"], with_dropout(batch(names="ab"), train).present["a"][:9])
    stacked = torch.func.vmap(lambda key: with_dropout(replace(batch(), key=key), train).present["a"])(
        torch.tensor([2, 1], dtype=torch.int32)
    )
    assert torch.equal(stacked, torch.stack([other.present["a"], first.present["a"]]))


@pytest.mark.parametrize("train", [Train(), Train(modality_dropout={}), Train(modality_dropout={"z": 0.4})])
def test_rate_0_leaves_the_batch_as_it_is(train: Train) -> None:
    given = batch()
    assert with_dropout(given, train) is given


def test_evaluations_and_other_modalities_see_complete_rows() -> None:
    plain, dropped = (
        played(recipe(algorithm("fedavg", train=Train(lr=0.1, batch_size=16, modality_dropout=rate))))
        for rate in (0.0, 0.4)
    )
    assert not any(torch.equal(plain[1].params[n], dropped[1].params[n]) for n in ("shared.bias",))
    tests = [parts.algorithm.evaluate(plain[1], parts.fed).metrics for parts in (plain[0], dropped[0])]
    assert tests[0] == tests[1]


@pytest.mark.parametrize(
    ("train", "clients", "said"),
    [
        ({"modality_dropout": 1.0}, {}, "train.modality_dropout: including"),
        ({"modality_dropout": {"a": -0.1}}, {}, "train.modality_dropout: modality_dropout.a"),
        ({"modality_dropout": {"z": 0.1}}, {}, "train.modality_dropout: names modality"),
        ({"modality_dropout": 0.2}, {"holdings": [["a"], ["b"]]}, "train.modality_dropout: client"),
        ({"moddrop": 0.2}, {}, "train.moddrop: mean 'modality_dropout'"),
    ],
)
def test_bad_rates_are_refused(train: dict[str, Any], clients: dict[str, Any], said: str) -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "train": train, "clients": clients}
    with refuses(PolyfedError, said):
        played(replace(parse_recipe(table), rounds=0))


def test_a_task_on_pairs_refuses_it() -> None:
    made = recipe(algorithm("fedavg", train=Train(modality_dropout=0.2)), clients=ClientsSpec(num=5))
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "task": {"name": "retrieval"}}
    pairs = parse_recipe(table)
    with refuses(PolyfedError, "train.modality_dropout: learns"):
        played(replace(pairs, algorithm=made.algorithm, clients=made.clients, rounds=0))
