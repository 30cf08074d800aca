"""Encoders of one's own with unusual parameters and buffers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed

LABELS = torch.arange(48) % 3
SAMPLES = torch.randn(48, 6, generator=torch.Generator().manual_seed(4)) + LABELS[:, None]


class Temperature(nn.Module):
    """Has a parameter without dimensions, as the temperature of CLIP, and an empty one."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], embedding)
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


class Double(nn.Module):
    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], embedding).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.double()).float()
        return out


def trained(kind: str, engine: str = "sequential", workers: int = 1, **options: Any) -> polyfed.Run:
    encoders = {"a": {"kind": f"test_own_encoders:{kind}"}}
    return polyfed.run(
        data={"a": SAMPLES},
        labels=LABELS,
        engine={"name": engine, "workers": workers},
        model={"embedding": 8, "encoders": encoders},
        **{"clients": 3, "rounds": 2} | options,
    )


@pytest.mark.parametrize("kind", ["Temperature", "Double"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_parameters_without_dimensions_and_of_double_precision_train(kind: str, engine: str) -> None:
    run = trained(kind, engine, clients=1, rounds=1)
    norms = run.rounds[-1]["norms"]
    assert norms["clients"] == pytest.approx(norms["model"])
    assert norms["clients"]["a"] > 0
