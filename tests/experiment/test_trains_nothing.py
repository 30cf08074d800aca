"""A run that trains nothing says so: before it starts where that is known, and at its end otherwise."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.algorithms import FedAvg
from polyfed.core.errors import ModelError, RecipeError
from polyfed.training.optimisers import Train
from refusals import refuses, warned

X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
LABEL = np.arange(48) % 3


class Normed(nn.Module):
    """An encoder with BatchNorm."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, embedding))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Scripted(nn.Module):
    """An encoder with a compiled layer."""

    def __init__(self, shape: tuple[int, ...], embedding: int, how: str = "script") -> None:
        super().__init__()
        layer = nn.Linear(shape[0], embedding)
        self.layer = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, torch.zeros(2, *shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Packed(nn.Module):
    """An encoder that packs its sequences."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.gru = nn.GRU(shape[-1], embedding, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        return self.gru(packed)[1][-1]  # type: ignore[no-any-return]


def run(**options: Any) -> Any:
    return polyfed.run(**({"data": {"m": X}, "labels": LABEL, "clients": 4, "rounds": 2} | options))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_batches_of_one_row_for_batchnorm_are_refused(engine: str) -> None:
    normed = {"encoders": {"m": {"kind": Normed}}}
    with refuses(RecipeError, "train.batch_size: training batches"):
        run(model=normed, train={"batch_size": 1}, engine=engine)
    with refuses(RecipeError, "train.batch_size: BatchNorm"):
        run(model=normed, clients=39, test_share=0.2, engine=engine)
    assert run(model=normed, train={"batch_size": 2}, engine=engine).result["concerns"] == []
    assert run(train={"batch_size": 1}, engine=engine).result["concerns"] == []


@pytest.mark.parametrize("train", [{"lr": 0.0}, {"lr": 0.0, "lr_schedule": "linear", "lr_end": 0.0}, {"epochs": 0}])
def test_a_recipe_that_cannot_train_is_refused(train: dict[str, Any]) -> None:
    with refuses(RecipeError, f"train.{next(iter(train))}: nothing would be"):
        run(train=train)
    with refuses(RecipeError, "clients.participation: least 1"):
        run(clients={"num": 4, "participation": 0})


def test_a_rising_schedule_may_begin_at_zero() -> None:
    found = run(train={"lr": 0.0, "lr_schedule": "linear", "lr_end": 0.2}, rounds=3)
    assert found.result["concerns"] == []


def test_a_model_that_never_changes_is_told_at_the_end() -> None:
    with warned("model changed"):
        found = run(algorithm=FedAvg(train=Train(lr=0.0)))
    assert len(found.result["concerns"]) == 1
    assert run(algorithm=FedAvg(train=Train(epochs=0))).result["concerns"] == []  # asked for, to see the initial state


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_compiled_layers_are_a_model_error(how: str) -> None:
    with refuses(ModelError, "torch.jit.script"):
        run(model={"encoders": {"m": {"kind": Scripted, "how": how}}})


def test_packed_sequences_are_a_model_error() -> None:
    series = np.random.default_rng(1).normal(size=(48, 5, 6)).astype(np.float32)
    with refuses(ModelError, "PackedSequence"):
        run(data={"m": series}, model={"encoders": {"m": {"kind": Packed}}})
