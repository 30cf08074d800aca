"""Colour digits: `cg-digits` and `cg-mnist` hold every digit as a gray and a coloured image (docs/data.md)."""

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.data.columns import TRAIN, Column

MEAN_COLOURS = torch.tensor(
    [
        (220, 20, 60),
        (0, 128, 128),
        (253, 233, 16),
        (0, 149, 182),
        (237, 145, 33),
        (145, 30, 188),
        (70, 240, 240),
        (250, 197, 187),
        (210, 245, 60),
        (128, 0, 0),
    ],
    dtype=torch.float32,
)
"""Mean colour of each digit, RGB 0..255 (10, 3), from the learning-not-to-learn project."""

VARIANCE = 0.03
"""Variance of the noise on each channel of a colour, on a scale of [0, 1]."""

_ROWS_AT_ONCE = 4096  # coloured at a time, so that 60,000 images are never in memory as floats


def colours(label: Tensor, split: Tensor, seed: int) -> Tensor:
    """Draw a colour for every row.

    A training row takes the mean colour of its label. Every other row takes the mean colour of a digit drawn uniformly
    from the ten digits. Colour therefore predicts the label in training, but not in the test. Then noise N(0, 0.03),
    where 0.03 is the variance, is added to each channel, and the result is clipped.

    Args:
        label: int64 (N,).
        split: Split codes, int8 (N,).
        seed: Seed of the draws.

    Returns:
        float32 (N, 3) in [0, 1].
    """
    rows = len(label)
    drawn = (keys.uniform(keys.key(seed, "colour", "digit"), rows) * 10).long().clamp(max=9)
    mean = MEAN_COLOURS[torch.where(split == TRAIN, label, drawn)] / 255.0
    noise = keys.normal(keys.key(seed, "colour", "noise"), (rows, 3)) * VARIANCE**0.5
    return torch.clamp(mean + noise, 0.0, 1.0)


def painted(gray: Tensor, colour: Tensor) -> Tensor:
    """Colour gray images as gray * colour, rounded. The stroke is coloured and the background stays black.

    Args:
        gray: uint8 (N, H, W).
        colour: float32 (N, 3) in [0, 1].

    Returns:
        uint8 (N, 3, H, W).
    """
    out = torch.empty(len(gray), 3, *gray.shape[1:], dtype=torch.uint8)
    for part in torch.split(torch.arange(len(gray)), _ROWS_AT_ONCE):
        out[part] = (gray[part, None].float() * colour[part, :, None, None]).round_().to(torch.uint8)
    return out


def pair(gray: Tensor, color: Tensor) -> dict[str, Column]:
    """The columns `gray` (1, H, W) and `color` (3, H, W): bytes that are scaled to [0, 1] when a batch is taken."""
    scale = torch.tensor(255.0)
    return {"gray": Column(gray[:, None], scale=scale), "color": Column(color, scale=scale)}
