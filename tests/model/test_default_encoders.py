"""The encoder of a modality without an entry, and the encoder of token ids: alone, stacked and with padding."""

import pytest
import torch
from torch.func import grad, vmap

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.model import ConvGru, EncoderSpec, Mlp, ModelSpec, ResNet18, TokenTransformer, build_model, default_encoder
from refusals import refuses


@pytest.mark.parametrize(
    ("shape", "vocabulary", "expected"),
    [
        ((5,), None, Mlp(hidden=(64,))),
        ((7,), 30, TokenTransformer(vocabulary=30)),
        ((20, 3), None, ConvGru()),
        ((5, 3), None, ConvGru(channels=(32, 64))),
        ((1, 3), None, Mlp(hidden=(64,))),
        ((1, 8, 8), None, ResNet18(stem="cifar", widths=(16, 32, 64, 64), norm="group")),
        ((3, 4, 64, 80), None, ResNet18(stem="imagenet", widths=(16, 32, 64, 64), norm="group")),
    ],
)
def test_the_shape_of_a_sample_decides(shape: tuple[int, ...], vocabulary: int | None, expected: EncoderSpec) -> None:
    found = default_encoder(shape, vocabulary)
    assert found == expected
    model = build_model(ModelSpec(embedding=64, encoders={"x": found}), {"x": shape}, 2)
    assert not model.has_batchnorm


def test_the_heads_divide_the_embedding_and_other_shapes_are_refused() -> None:
    assert default_encoder((4,), 9, embedding=6) == TokenTransformer(vocabulary=9, heads=3)
    with refuses(ModelError, "chosen for samples"):
        default_encoder((1, 2, 3, 4, 5))


def tokens(ids: list[list[int]]) -> Batch:
    x = torch.tensor(ids, dtype=torch.float32)
    return Batch(x={"x": x}, y=torch.zeros(len(x), dtype=torch.int64), rows=torch.arange(len(x)))


@pytest.mark.parametrize("fusion", ["concat", "attention"])
def test_token_transformer_gives_the_same_alone_and_stacked(fusion: str) -> None:
    entry = TokenTransformer(vocabulary=9, feedforward=8)
    model = build_model(ModelSpec(embedding=8, fusion=fusion, encoders={"x": entry}), {"x": (4,)}, 3)  # type: ignore[arg-type]
    batch = tokens([[1, 2, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0]])

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return model.logits(w, batch).square().mean()

    trees = [model.trainable(model.init(key)) for key in (1, 2)]
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    found = vmap(grad(loss))(stacked)
    for place, tree in enumerate(trees):
        for name, value in grad(loss)(tree).items():
            assert value.isfinite().all()
            torch.testing.assert_close(found[name][place], value, rtol=1e-4, atol=1e-6)


def test_padding_does_not_change_an_embedding_and_order_does() -> None:
    entry = TokenTransformer(vocabulary=9, feedforward=8)
    model = build_model(ModelSpec(embedding=8, encoders={"x": entry}), {"x": (4,)}, 3)
    w = model.init(1)
    short, other = tokens([[3, 5, 0, 0]]), tokens([[5, 3, 0, 0]])
    with torch.no_grad():
        before = model.features(w, short)["x"]
        weights = w["x.encoder.tokens.weight"].clone()
        weights[0] += 5.0  # the embedding of the padding
        torch.testing.assert_close(model.features(w | {"x.encoder.tokens.weight": weights}, short)["x"], before)
        assert (model.features(w, other)["x"] - before).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "token-transformer"}, "model.encoders.x: needs vocabulary"),
        ({"kind": "token-transformer", "vocabulary": 0}, "model.encoders.x: at least 1"),
        ({"kind": "token-transformer", "vocabulary": 5, "heads": 7}, "does not divide"),
        ({"kind": "token-transformer", "vocabulary": 5, "padding": "no"}, "model.encoders.x: padding"),
    ],
)
def test_faults_of_token_transformer_are_named(entry: dict[str, object], words: str) -> None:
    with refuses(ModelError, words):
        build_model(ModelSpec(encoders={"x": entry}), {"x": (4,)}, 2)
    with refuses(ModelError, "reads token"):
        build_model(ModelSpec(encoders={"x": {"kind": "token-transformer", "vocabulary": 5}}), {"x": (4, 2)}, 2)
