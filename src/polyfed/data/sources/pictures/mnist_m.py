"""mnist-m: MNIST and MNIST-M of the same digits (docs/data.md)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError
from polyfed.core.option_checks import FRACTION, check_ranges
from polyfed.data.columns import Column, Columns
from polyfed.data.population.splits import subset
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.pictures import mnist
from polyfed.data.sources.pictures.picture_files import pictures, read_picture

SIDE = 28


@dataclass(frozen=True, kw_only=True)
class MnistM(Source):
    """60,000 / 10,000 digits, each as `mnist` (1, 28, 28) and `mnist_m` (3, 28, 28).

    MNIST-M is |background - digit|. The digit is binarised to 0 or 255, and the background is a random crop of a
    natural image (Ganin & Lempitsky, ICML 2015). The rows are the same as in MNIST, so the split differs from the
    published MNIST-M files: their script splits the digits 55,000 / 5,000 / 10,000. Both modalities are scaled to
    [0, 1].

    Attributes:
        path: MNIST, as an .npz or a folder; `polyfed data mnist-m` prints the layout.
        backgrounds: Folder of pictures of at least 28 x 28 pixels, originally BSDS500's training images, or an .npz
            file with the array `image`, uint8 (n, H, W, 3).
        subset: Share of the rows of each class that is kept in each split, drawn at random.
        seed: Seed of the crops and the subset, the same in all runs; 42 in the public script.
    """

    path: str
    backgrounds: str
    subset: Annotated[float, FRACTION] = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        gray, label, split = mnist.read_mnist(self.path)
        rows = subset(label, split, self.subset, keys.key(self.seed, "mnist-m", "subset"))
        crops = _crops(_backgrounds(self.backgrounds), len(label), keys.generator(keys.key(self.seed, "mnist-m")))
        scale = torch.tensor(255.0)
        return Columns(
            name="mnist-m",
            modalities={
                "mnist": Column(gray[rows, None], scale=scale),
                "mnist_m": Column(blended(gray, crops)[rows], scale=scale),
            },
            label=label[rows],
            num_classes=10,
            split=split[rows],
            ids=rows,
            class_names=tuple("0123456789"),
        )

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data mnist-m` prints them."""
        return Facts(
            title="MNIST and MNIST-M of the same digits",
            modalities={"mnist": "(1, 28, 28)", "mnist_m": "(3, 28, 28), over natural backgrounds"},
            licence=mnist.LICENCE + "; backgrounds: yours (BSDS500 in the original)",
            obtain=mnist.OBTAIN + "; any folder of photographs as backgrounds",
            layout=mnist.LAYOUT,
        )


def blended(gray: Tensor, crops: Tensor) -> Tensor:
    """Blend digits d with backgrounds b: |b - d|, where d is binarised at 128 to 0 or 255.

    Args:
        gray: Digits, uint8 (N, 28, 28).
        crops: Backgrounds, uint8 (N, 3, 28, 28).

    Returns:
        uint8 (N, 3, 28, 28): 255 - b where d is 255, b where d is 0.
    """
    return torch.where(gray[:, None] >= 128, 255 - crops, crops)


def _crops(backgrounds: list[Tensor], num: int, draw: np.random.Generator) -> Tensor:
    out = torch.empty(num, 3, SIDE, SIDE, dtype=torch.uint8)
    which = draw.integers(0, len(backgrounds), num).tolist()
    spots = draw.random((num, 2)).tolist()
    for row, (number, (down, right)) in enumerate(zip(which, spots, strict=True)):
        picture = backgrounds[number]
        top, left = int(down * (picture.shape[1] - SIDE + 1)), int(right * (picture.shape[2] - SIDE + 1))
        out[row] = picture[:, top : top + SIDE, left : left + SIDE]
    return out


def _backgrounds(path: str) -> list[Tensor]:
    found = existing(path, "backgrounds of MNIST-M")
    if found.suffix == ".npz":
        images = list(Arrays(found).features("image").permute(0, 3, 1, 2))
    else:
        images = [read_picture(file) for file in pictures(found, "backgrounds of MNIST-M")]
    for number, image in enumerate(images):
        if image.dtype != torch.uint8 or image.shape[0] != 3 or min(image.shape[1:]) < SIDE:
            what = f"{image.dtype} {tuple(image.shape)}"
            raise DataError(
                f"'{found}': background {number} is {what}; expected uint8 (3, 28, 28) or larger. Remove it"
            )
    return images
