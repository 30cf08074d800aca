"""The default encoder of a modality for which a recipe names no encoder. It is small and fits the shape of a sample."""

import math

from polyfed.core.errors import ModelError
from polyfed.model.encoders.images import ResNet18
from polyfed.model.encoders.sequences import ConvGru, TokenTransformer
from polyfed.model.encoders.spec import EncoderSpec, Mlp, Shape

HIDDEN = (64,)
"""The hidden layers of the perceptron for vectors. They are as wide as the default embedding."""

WIDTHS = (16, 32, 64, 64)
"""Channels of the ResNet for images, the same as in HFM's small ResNet (docs/algorithms/hfm.md)."""

LARGE = 64
"""The smallest number of pixels per side for which an image gets the `imagenet` stem. This stem first divides both
sides by four."""


def default_encoder(shape: Shape, vocabulary: int | None = None, embedding: int = 64) -> EncoderSpec:
    """Choose an encoder by the shape of a sample.

    | samples | encoder |
    |---|---|
    | vector (F,) | `mlp` |
    | token ids (T,) | `token-transformer` |
    | time series (T, F) | `conv-gru`, with fewer stages if T is below 8; `mlp` if T is 1 |
    | image (C, H, W), clip (C, T, H, W) | `resnet18` with few channels and group normalisation |

    Group normalisation has no statistics of the batch, so every algorithm can train the encoder on few rows.

    Args:
        shape: shape of one sample.
        vocabulary: number of different token ids, if the samples are token ids; None otherwise.
        embedding: width of the embedding, which must be divisible by the number of attention heads.

    Raises:
        ModelError: no encoder reads samples of this shape.
    """
    if vocabulary is not None and len(shape) == 1:
        heads = next(heads for heads in (4, 3, 2, 1) if embedding % heads == 0)
        return TokenTransformer(vocabulary=vocabulary, heads=heads)
    if len(shape) == 1:
        return Mlp(hidden=HIDDEN)
    if len(shape) == 2:
        stages = min(len(ConvGru.channels), int(math.log2(shape[0])))
        return ConvGru(channels=ConvGru.channels[:stages]) if stages else Mlp(hidden=HIDDEN)
    if len(shape) in (3, 4):
        stem = "imagenet" if min(shape[-2:]) >= LARGE else "cifar"
        return ResNet18(stem=stem, widths=WIDTHS, norm="group")  # type: ignore[arg-type]
    raise ModelError(
        f"no encoder is chosen for samples of shape {shape}: name one in [model.encoders], or store vectors (F,), time "
        "series (T, F) or images (C, H, W)."
    )
