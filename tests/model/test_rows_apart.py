"""Modules of the user must compute each row alone, because engines pad the batches of their clients differently."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.errors import ModelError
from polyfed.model import Fusion, ModelSpec, build_model
from refusals import refuses

SHAPES = {"a": (6,), "b": (5,)}


class Mixes(nn.Module):
    """Computes a row from other rows in one of the ways that users know, or from itself only."""

    def __init__(self, shape: tuple[int, ...], embedding: int, way: str) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(shape[0], embedding), nn.BatchNorm1d(embedding)
        self.drop, self.way, self.calls = nn.Dropout(0.5), way, 0

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        self.calls += 1
        if self.way == "mean":
            return z - z.mean(0)
        if self.way == "training":
            return z / z.std() if self.training else z
        if self.way == "softmax":
            return torch.softmax(z @ z.T, 1) @ z
        if self.way == "counts":
            return z * self.calls
        out: Tensor = self.drop(self.norm(z)) - z.mean(1, keepdim=True)
        return out


class Centred(Fusion):
    """A fusion that centres the embeddings over the batch."""

    def __init__(self, embedding: int, head: Any, outputs: int, dropout: float) -> None:
        super().__init__(embedding, head, outputs, dropout)
        self.head = nn.Linear(embedding, outputs)

    @staticmethod
    def part(embedding: int, width: int) -> nn.Module:
        return nn.Linear(embedding, embedding)

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        total = sum(parts[name](value) for name, value in z.items())
        assert isinstance(total, Tensor)
        return total - total.mean(0)


class Whole(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__()
        self.top = nn.Linear(6, num_outputs)

    def forward(self, x: dict[str, Tensor], present: dict[str, Tensor]) -> Tensor:
        z: Tensor = self.top(x["a"] * present["a"].unsqueeze(1))
        return z - z.mean(0)


def spec(way: str) -> ModelSpec:
    encoders = {"a": {"kind": "test_rows_apart:Mixes", "way": way}, "b": {"kind": "mlp"}}
    return ModelSpec(embedding=4, encoders=encoders)


@pytest.mark.parametrize("way", ["mean", "training", "softmax"])
def test_an_encoder_that_mixes_the_rows_is_refused(way: str) -> None:
    with refuses(ModelError, "test_rows_apart:Mixes"):
        build_model(spec(way), SHAPES, 3)


@pytest.mark.parametrize("way", ["norm", "counts"])
def test_batch_norm_dropout_and_numbers_that_change_are_no_mixture(way: str) -> None:
    build_model(spec(way), SHAPES, 3)


def test_a_fusion_and_a_whole_module_that_mix_the_rows_are_refused() -> None:
    encoders = {m: {"kind": "mlp"} for m in SHAPES}
    with refuses(ModelError, "test_rows_apart:Centred"):
        build_model(ModelSpec(embedding=4, encoders=encoders, fusion=Centred), SHAPES, 3)
    with refuses(ModelError, "test_rows_apart:Whole"):
        build_model(ModelSpec(module=Whole, blocks={"a": [], "b": []}), SHAPES, 3)
