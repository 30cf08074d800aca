"""Encoders of one's own with unusual parameters and buffers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.core.errors import DataError, ModelError
from refusals import refuses

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


class Linear(nn.Module):
    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], embedding)
        self.register_buffer("ema", torch.zeros(embedding))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(embedding), persistent=False)
        self.ema: Tensor
        self.seen: Tensor
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.changed(self.linear(x))

    def changed(self, h: Tensor) -> Tensor:
        """Change a buffer in place, which is allowed, and return the embeddings."""
        with torch.no_grad():
            self.ema.mul_(0.9).add_(0.1 * h.mean(0))
        return torch.relu(h + self.ema) * self.mask


class Counting(Linear):
    def changed(self, h: Tensor) -> Tensor:
        self.seen += 1
        return h / (1 + self.seen)


class Masking(Linear):
    def changed(self, h: Tensor) -> Tensor:
        self.mask = self.mask * 0.5
        return h * self.mask


class Rebinding(Linear):
    def changed(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return h + self.ema


class Caching(Linear):
    """Fills a buffer in its first call only."""

    def changed(self, h: Tensor) -> Tensor:
        if not bool(self.seen):
            self.seen.fill_(1)
        return h


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "Counting",
            "evaluation mode",
        ),
        ("Masking", "a.encoder.mask"),
        (
            "Rebinding",
            "assigns",
        ),
    ],
)
def test_a_state_that_polyfed_cannot_keep_for_each_client_is_refused(kind: str, words: str) -> None:
    with refuses(ModelError, words):
        trained(kind)


def test_a_float_buffer_that_changes_in_place_belongs_to_the_client() -> None:
    one, many = trained("Linear"), trained("Linear", "vectorised")
    assert one.params["a.encoder.ema"].abs().sum() > 0
    for name, value in one.params.items():
        torch.testing.assert_close(many.params[name], value, atol=1e-5, rtol=1e-4)
    trained("Caching", rounds=1)


class Shuffling(nn.Module):
    """Draws constants that do not depend on the seed: a buffer that is not saved, and one of integers."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, embedding)
        draw = np.random.default_rng(DRAWS[-1])
        self.register_buffer("map", torch.from_numpy(draw.normal(size=(shape[0], 16))).float(), persistent=False)
        self.register_buffer("order", torch.from_numpy(draw.permutation(16)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.cos(x @ self.map)[:, self.order])
        return out


DRAWS = [0]


def test_other_constant_buffers_are_refused(tmp_path: Path) -> None:
    run = trained("Shuffling", out=tmp_path / "run")
    run.export(tmp_path / "model")
    imports = ["test_own_encoders.*"]
    again = polyfed.load_model(tmp_path / "model", imports=imports)
    assert torch.equal(again.predict({"a": SAMPLES}), run.predict({"a": SAMPLES}))
    assert torch.equal(polyfed.load_run(tmp_path / "run").predict({"a": SAMPLES}), run.predict({"a": SAMPLES}))
    DRAWS.append(1)
    try:
        with refuses(DataError, "buffers differ"):
            polyfed.load_model(tmp_path / "model", imports=imports)
        with refuses(DataError, "cannot load"):
            polyfed.load_run(tmp_path / "run")
        with refuses(DataError, "cannot resume"):
            trained("Shuffling", out=tmp_path / "run", rounds=3, resume=True)
    finally:
        DRAWS.pop()
