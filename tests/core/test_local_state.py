"""Local state that changes its form between rounds, on both engines."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from polyfed.algorithm import Averaging, Update
from polyfed.data import ClientsSpec
from polyfed.errors import RecipeError
from polyfed.optim import Train
from polyfed.selection import Uniform
from polyfed.tree import Tree
from world import played, recipe

TRAIN = Train(lr=0.1, batch_size=16)


@dataclass(frozen=True, kw_only=True)
class Counting(Averaging):
    """Remembers how often it took part, without a word in `local`."""

    def reply(self, site: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Update, Tree]:
        return Update(fit.params, fit.loss, data.num_rows), {"n": local.get("n", torch.zeros(())) + 1}


@dataclass(frozen=True, kw_only=True)
class Hoarding(Averaging):
    """Keeps the logits of all of its rows where it had a vector before."""

    def local(self, site: Any, key: int) -> Tree:
        return {"z": torch.zeros(3)}

    def reply(self, site: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Update, Tree]:
        logits = data.collect(lambda batch: {"z": site.model.logits(fit.params, batch)})
        return Update(fit.params, fit.loss, data.num_rows), logits


def test_clients_that_keep_something_and_clients_that_do_not_yet_meet_in_a_round() -> None:
    counted = []
    for engine in ("sequential", "vectorised"):
        method = Counting(train=TRAIN, selector=Uniform(participation=3))
        parts, _, _ = played(recipe(method, engine, rounds=6, clients=ClientsSpec(partition="iid", num=6)))
        counted.append({client: float(tree["n"]) for client, tree in parts.engine.locals.items()})
    assert counted[0] == counted[1]
    assert sum(counted[0].values()) == 18
    assert len(set(counted[0].values())) > 1, "some took part more often than others"


def test_an_entry_per_row_is_not_kept_with_the_padding_of_a_stack() -> None:
    parts, _, _ = played(recipe(Hoarding(train=TRAIN), "sequential", rounds=1))
    assert all(len(tree["z"]) == parts.fed.clients[c].num_rows for c, tree in parts.engine.locals.items())
    with pytest.raises(RecipeError, match=r"task update keeps 'z' with an entry for each.*loop_because"):
        played(recipe(Hoarding(train=TRAIN), "vectorised", rounds=1))
