"""Under `min_batch_size`, training tells nothing of a modality or a target that too few rows of a batch have."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from laws.rows import ROWS
from laws.test_laws import world
from polyfed.core.batch import Batch
from polyfed.core.messages import tensors
from polyfed.core.request import Request
from polyfed.data import ClientsSpec, Columns
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.replies import Answer
from polyfed.laws.replies import everybody
from polyfed.objective.regression import Regression
from polyfed.privacy.egress.limits import Limits
from polyfed.training.optimisers import Train
from world import algorithm, on_device, recipe, through

LEAST = 8
OF_ROWS = {"embeddings", "raw"}
BY_LOSS = ("fedcouncil", "fedfomo", "mfedmc")
"""Methods that choose by losses on rows, which tell at least as much as a score (docs/egress.md)."""

SILENT = [
    name
    for name in sorted(ROWS)
    if name not in BY_LOSS
    and not any(kind in OF_ROWS for row in ROWS[name].egress.values() for kinds in row.values() for kind in kinds)
]
"""The methods whose clients send nothing of single rows."""


@dataclass(frozen=True)
class Sparse(Toy):
    """Every `step`-th row has the modality `b`, whose samples are shifted."""

    step: int = 15
    shift: float = 0.0

    @override
    def load(self) -> Columns:
        columns = super().load()
        there = torch.arange(len(columns.label)) % self.step == 0
        column = columns.modalities["b"]
        values = torch.where(there[:, None], column.values + self.shift, 0.0)
        modalities = {**columns.modalities, "b": replace(column, values=values)}
        return replace(columns, modalities=modalities, present={} if self.step == 1 else {"b": there})


@dataclass(frozen=True)
class Known(Toy):
    """Two targets, of which every 15th row knows the second one, which is shifted."""

    shift: float = 0.0

    @override
    def load(self) -> Columns:
        columns = super().load()
        there = torch.arange(len(columns.label)) % 15 == 0
        second = torch.where(there, columns.label + self.shift, torch.nan)
        return replace(columns, label=torch.stack([columns.label.float(), second], 1), num_classes=2)


def sent(made: Recipe, least: int) -> list[tuple[str, tuple[int, ...], str, Tensor]]:
    """Every tensor that the clients send in a round."""
    seen = list[tuple[str, tuple[int, ...], str, Tensor]]()
    parts = on_device(replace(made, rounds=1), limits=Limits(min_batch_size=least))
    answer = parts.fed.engine.answer

    def spied(request: Request, *asked: object) -> Answer:
        got = answer(request, *asked)  # type: ignore[arg-type]
        for part in got.parts:
            seen.extend((request.name, part.clients, f"{field}.{key}", t) for field, key, t in tensors(part.message))
        return got

    parts.fed.engine.answer = spied  # type: ignore[method-assign]
    through(parts, 1)
    return seen


def differs(made: Recipe, least: int) -> bool:
    """Whether something that leaves depends on the samples or targets that few rows have."""
    one, other = (sent(replace(made, data=replace(made.data, shift=shift)), least) for shift in (0.0, 3.0))  # type: ignore[call-arg]
    assert [place[:3] for place in one] == [place[:3] for place in other]
    return any(not torch.equal(a, b) for (*_, a), (*_, b) in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SILENT)
def test_nothing_tells_of_a_modality_that_few_rows_have(name: str) -> None:
    made = everybody(world(name))
    assert not differs(replace(made, data=Sparse(rows=330, classes=4, seed=3)), LEAST)


@pytest.mark.parametrize("data", [Sparse(rows=330, classes=4, seed=3), Known(rows=330, classes=4, seed=3)])
def test_without_the_limit_such_rows_are_told(data: Toy) -> None:
    made = everybody(recipe(algorithm("fedavg"), clients=ClientsSpec(partition="iid", num=6)))
    made = replace(made, data=data, task=Regression(shift=0.0, scale=1.0) if isinstance(data, Known) else None)
    assert differs(made, 0)
    assert not differs(made, LEAST)


def test_dropout_of_modalities_leaves_no_few_rows() -> None:
    train = Train(lr=0.1, batch_size=16, epochs=1, modality_dropout={"b": 0.95})  # type: ignore[arg-type]
    made = everybody(recipe(algorithm("fedavg", train=train)))
    made = replace(made, clients=replace(made.clients, holdings=[["a", "b"]]), data=Sparse(rows=330, seed=3, step=1))
    assert differs(made, 0)
    assert not differs(made, LEAST)


def test_what_enough_rows_have_stays_and_copies_of_a_row_count_once() -> None:
    x = {"a": torch.ones(9, 2), "b": torch.ones(9, 2)}
    there = torch.arange(9) < 4
    y = torch.where(torch.arange(9)[:, None] < torch.tensor([9, 4, 0]), 1.0, torch.nan)
    batch = Batch(x=x, y=y, rows=torch.arange(9), present={"b": there})
    assert batch.of_enough_rows(4) is batch
    few = batch.of_enough_rows(5)
    assert not few.present["b"].any()
    assert not few.x["b"].any()
    assert torch.equal(few.x["a"], x["a"])
    assert (~few.y.isnan()).sum(0).tolist() == [9, 0, 0]
    copies = replace(batch, rows=torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 6]))
    assert not copies.of_enough_rows(3).present["b"].any()
    padded = replace(batch, ok=torch.arange(9) < 2)
    assert not padded.of_enough_rows(3).present["b"].any()
