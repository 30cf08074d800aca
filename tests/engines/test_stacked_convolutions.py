"""Which models with 2-d convolutions the vectorised engine stacks on a CPU, and that both ways agree."""

from typing import Any

import pytest

from polyfed.data.sources import Toy
from polyfed.engines import Vectorised
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.events import Emitter
from polyfed.model import ModelSpec
from polyfed.training.optimisers import Train
from world import algorithm, furthest, played, recipe

VECTORISED = EngineSpec(name="vectorised")


def images(side: int, rows: int, engine: EngineSpec = VECTORISED, *, kind: str = "cnn4") -> Recipe:
    data = Toy(rows=240, classes=3, shapes={"a": (side, side), "b": (3, side, side)})
    encoder = {"kind": kind} | ({"stem": "cifar", "widths": [8, 16, 16, 16]} if kind == "resnet18" else {})
    train = Train(lr=0.01, batch_size=rows)
    model = ModelSpec(encoders={"a": encoder, "b": encoder}, embedding=8)
    return recipe(algorithm("fedavg", train=train), engine, data=data, model=model, rounds=1)


def assembled(made: Recipe) -> tuple[Assembly, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    note = Emitter([lambda event, **facts: events.append(facts) if event == "looped" else None])
    return assemble(made, emit=note), events


@pytest.mark.parametrize(
    ("kind", "side", "rows", "loops"),
    [
        ("cnn4", 8, 4, False),  # 2.0 times as fast as the loop
        ("cnn4", 8, 16, False),  # 1.3
        ("cnn4", 12, 16, False),  # 1.2
        ("cnn4", 16, 16, True),  # 1.0
        ("cnn4", 28, 4, True),  # 1.2
        ("cnn4", 8, 64, True),  # 1.0
        ("cnn4", 28, 16, True),  # 0.7
        ("cnn4", 28, 64, True),
        ("resnet18", 8, 16, False),
    ],
)
def test_small_convolutions_are_stacked_and_large_ones_loop(kind: str, side: int, rows: int, loops: bool) -> None:
    parts, _ = assembled(images(side, rows, kind=kind))
    assert isinstance(parts.engine, Vectorised)
    assert parts.engine.convolutions_fill_a_core() == loops


def test_a_recipe_can_insist_on_a_stack() -> None:
    for engine, told in ((VECTORISED, True), (EngineSpec(name="vectorised", stack=6), False)):
        parts, events = assembled(images(16, 16, engine))
        parts.fed.begin(1)
        parts.algorithm.round(parts.algorithm.init(parts.fed, parts.initial), parts.fed)
        assert bool(events) == told
        assert all("[engine] stack insists" in facts["reason"] for facts in events)


def test_stacked_convolutions_agree_with_the_loop() -> None:
    ends = [played(images(8, 16, EngineSpec(name=name)))[1].params for name in ("sequential", "vectorised")]
    assert furthest(*ends) < 1e-5
