"""Two forward passes in one training step: the same dropout masks, or others with `Batch.redrawn`, on every engine."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import polyfed
from polyfed.algorithms import Averaging
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import ModelSpec, build_model
from polyfed.training.optimisers import Train
from polyfed.training.programs import replay as step_replay
from stacks import steps_of_programs
from world import furthest

ENCODERS = {"a": {"kind": "test_second_pass:Drop"}}


class Drop(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__(nn.Linear(shape[0], 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, embedding))


@dataclass(frozen=True, kw_only=True)
class RDrop(Averaging):
    """Wu et al., "R-Drop", 2021, with a squared distance: the predictions under two masks should agree."""

    apart: ClassVar[list[bool]] = []

    def loss(self, context: Any, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        one, two = context.model.logits(w, batch), context.model.logits(w, batch.redrawn())
        if not torch._C._are_functorch_transforms_active():
            RDrop.apart.append(bool((one != two).any()))
        return context.objective.loss(one, batch) + batch.mean((one - two).square().sum(1))


def test_a_second_pass_has_other_masks_that_agree_between_engines_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = steps_of_programs(monkeypatch)
    monkeypatch.setattr(step_replay, "_known", OrderedDict())
    monkeypatch.setattr(step_replay, "FEW", 2)
    RDrop.apart.clear()
    x = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
    runs = [
        polyfed.run(
            data={"a": x}, labels=torch.arange(150) % 3, clients=4, rounds=2, engine=engine,
            algorithm=RDrop(train=Train(lr=0.05, batch_size=8, epochs=3)),
            model={"embedding": 8, "encoders": ENCODERS},
        )
        for engine in ("sequential", {"name": "vectorised", "replay": False}, {"name": "vectorised", "replay": True})
    ]  # fmt: skip
    assert RDrop.apart
    assert all(RDrop.apart)
    assert taken, "programs took steps"
    for run in runs[1:]:
        assert furthest(runs[0].params, run.params) < 1e-5


def test_the_masks_are_a_function_of_the_batch() -> None:
    model = build_model(ModelSpec(embedding=8, encoders=ENCODERS), {"a": (6,)}, 3)
    w, y = model.init(0), torch.zeros(4, dtype=torch.int64)
    batch = Batch(x={"a": torch.ones(4, 6)}, y=y, rows=torch.arange(4), key=5)
    passes = [batch, batch.redrawn(), batch.redrawn(2), batch.redrawn().redrawn()]
    found = [model.logits(w, one) for one in passes]
    assert all(torch.equal(z, model.logits(w, one)) for z, one in zip(found, passes, strict=True))
    assert not any(torch.equal(z, other) for k, z in enumerate(found) for other in found[:k])
    plain = batch.evaluation()
    assert plain.redrawn() is plain


class Normed(nn.Module):
    """An encoder with BatchNorm."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, embedding))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_batch_norm_sees_two_batches_in_one_step(engine: str) -> None:
    """CreamFL trains on own rows and on public rows; the second pass changes the running statistics of the first."""
    x = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
    encoders = {m: {"kind": "test_second_pass:Normed"} for m in ("a", "b")}
    run = polyfed.run(
        data={"a": x, "b": x.flip(1)}, labels=torch.arange(192) % 3, clients={"num": 4, "validation": 0.1}, rounds=1,
        algorithm="creamfl", engine={"name": engine, "debug": True}, train={"batch_size": 16, "epochs": 2},
        model={"embedding": 4, "encoders": encoders},
        egress={m: {"server": ["embeddings", "statistic"]} for m in ("a", "b", "shared")},
    )  # fmt: skip
    assert all(bool(value.isfinite().all()) for value in run.params.values())
