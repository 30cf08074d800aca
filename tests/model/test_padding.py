"""Sequences of unequal length: what is padding must not enter the mean."""

import pytest
import torch
from torch.func import grad, vmap

from polyfed.core.batch import Batch
from polyfed.model import ModelSpec, build_model


def batch(x):
    return Batch(x={"x": x}, y=torch.zeros(len(x), dtype=torch.int64), rows=torch.arange(len(x)))


@pytest.fixture
def model():
    entry = {"kind": "conv-gru", "channels": [4, 4], "kernel": 1, "dropout": 0.0}
    return build_model(ModelSpec(embedding=6, encoders={"x": entry}), {"x": (16, 3)}, 2)


def test_more_padding_does_not_change_a_feature_of_conv_gru(model):
    w = model.init(1)
    short = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    short[:, 8:] = 0.0
    entry = {"kind": "conv-gru", "channels": [4, 4], "kernel": 1, "dropout": 0.0}
    cut = build_model(ModelSpec(embedding=6, encoders={"x": entry}), {"x": (8, 3)}, 2)
    with torch.no_grad():
        found = model.features(w, batch(short))["x"]
        torch.testing.assert_close(found, cut.features(w, batch(short[:, :8]))["x"])


def test_a_sample_of_nothing_but_padding_gives_finite_numbers_and_gradients(model):
    w, x = model.init(1), torch.zeros(2, 16, 3)

    def loss(params):
        return model.logits(params, batch(x)).square().mean()

    stacked = {name: torch.stack([value, value]) for name, value in w.items()}
    for value in vmap(grad(loss))(stacked).values():
        assert value.isfinite().all()
