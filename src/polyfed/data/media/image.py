"""Reads images with Pillow, as pixels of a fixed size."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from polyfed.data.media.clip import Clip, Norm, PlainExtractor, corrupt, optional

IMAGENET: tuple[tuple[float, ...], tuple[float, ...]] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's channels, on a scale of [0, 1]."""

_MARGIN = 256 / 224  # as for MobileNetV2 in docs/data.md: shorter side 256, middle 224


def bytes_norm(axes: int) -> Norm:
    """Return the shift and the scale that standardise bytes by ImageNet's mean and standard deviation.

    Args:
        axes: How many axes a sample has: 3 for an image (3, height, width). The first axis holds the three colour
            channels.
    """
    mean, std = (255.0 * torch.tensor(values).view(3, *(1,) * (axes - 1)) for values in IMAGENET)
    return mean, std


@dataclass(frozen=True, kw_only=True)
class Image(PlainExtractor):
    """Pixels of an image, uint8 (3, size, size). They are standardised by ImageNet's norm when a batch is taken.

    Attributes:
        size: Height and width.
        fit: How an image is brought to (size, size). "crop" scales the image until its shorter side is 256/224 * size,
            and then cuts out the middle, as is usual for ImageNet's models. "stretch" scales both sides to `size`.
    """

    size: int = 224
    fit: Literal["crop", "stretch"] = "crop"

    @property
    @override
    def norm(self) -> Norm:
        return bytes_norm(3)

    def __call__(self, clip: Clip) -> NDArray[np.uint8]:
        """Pixels of an image file, uint8 (3, size, size).

        Raises:
            DataError: The file is not a whole image.
        """
        pillow = optional("PIL.Image", "image")
        try:
            with pillow.open(clip.stream()) as opened:
                return fitted(opened.convert("RGB"), self.size, self.fit)
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise corrupt(clip, f"is not a whole image ({error})") from error


def fitted(image: Any, size: int, fit: str) -> NDArray[np.uint8]:
    """Fit a Pillow image as `Image` describes, and return its pixels, uint8 (3, size, size)."""
    pillow = optional("PIL.Image", "image")
    wide, high = size, size
    if fit == "crop":
        factor = size * _MARGIN / min(image.size)
        wide, high = (max(size, round(side * factor)) for side in image.size)
    scaled = image.resize((wide, high), pillow.Resampling.BILINEAR)
    left, top = (wide - size) // 2, (high - size) // 2
    pixels = np.asarray(scaled.crop((left, top, left + size, top + size)), dtype=np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
