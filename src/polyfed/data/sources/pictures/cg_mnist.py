"""cg-mnist: MNIST as gray and coloured pairs (docs/data.md)."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError
from polyfed.core.option_checks import FRACTION, check_ranges
from polyfed.data.columns import TEST, TRAIN, Columns
from polyfed.data.population.splits import subset
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.pictures import colour, mnist

# Means and deviations that the releases of CMSFed and PMR use, on a scale of [0, 1]
_GRAY = (torch.tensor(0.1307), torch.tensor(0.3081))
_COLOR = (
    torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1),
    torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1),
)


@dataclass(frozen=True, kw_only=True)
class CgMnist(Source):
    """60,000 / 10,000 digits, each as `gray` (1, 28, 28) and `color` (3, 28, 28) of the same image.

    Training colours follow the label, with noise of variance 0.03 on each channel. A test image has the colour of a
    random digit. Images are stored as bytes. When a batch is taken, they are standardised with the means and
    deviations of the CMSFed and PMR releases.

    Attributes:
        path: MNIST, as an .npz or a folder; `polyfed data cg-mnist` prints the layout.
        colored: An .npz with coloured images in MNIST's order: train_image and test_image (N, 28, 28, 3), train_label
            and test_label, converted from the pickle of the release of "learning-not-to-learn". If empty, polyfed
            colours the digits itself.
        subset: Share of the rows of each class that is kept in each split, drawn at random.
        seed: Seed of the colours and the subset, the same in all runs.
    """

    path: str
    colored: str = ""
    subset: Annotated[float, FRACTION] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        gray, label, split = mnist.read_mnist(self.path)
        rows = subset(label, split, self.subset, keys.key(self.seed, "cg-mnist", "subset"))
        if self.colored:
            color = _published(self.colored, label, split)[rows]
        else:
            color = colour.painted(gray[rows], colour.colours(label, split, self.seed)[rows])
        norms = {"gray": _GRAY, "color": _COLOR}
        pair = colour.pair(gray[rows], color)
        return Columns(
            name="cg-mnist",
            modalities={
                name: replace(column, shift=255.0 * norms[name][0], scale=255.0 * norms[name][1])
                for name, column in pair.items()
            },
            label=label[rows],
            num_classes=10,
            split=split[rows],
            ids=rows,
            class_names=tuple("0123456789"),
        )

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data cg-mnist` prints them."""
        return Facts(
            title="MNIST as gray and coloured pairs; only training colours reveal the label",
            modalities={"gray": "(1, 28, 28)", "color": "(3, 28, 28)"},
            licence=mnist.LICENCE,
            obtain=mnist.OBTAIN,
            layout=mnist.LAYOUT,
        )


def _published(path: str, label: Tensor, split: Tensor) -> Tensor:
    """Read the coloured images of the published file, in the order of `label`.

    Args:
        label: Labels of MNIST, int64 (N,), which the file's labels must equal.
        split: Split codes of MNIST, int8 (N,).

    Returns:
        uint8 (N, 3, 28, 28).

    Raises:
        DataError: The file is a pickle, or does not have MNIST's images in MNIST's order.
    """
    if existing(path, "coloured MNIST").suffix == ".npy":
        raise DataError(
            f"'{path}' is a pickled dictionary, which polyfed never opens. Convert it once, if you trust it: "
            "numpy.savez_compressed('colored.npz', **numpy.load(FILE, encoding='latin1', "
            "allow_pickle=True).item())"
        )
    arrays = Arrays(path)
    color = torch.empty(len(label), 3, 28, 28, dtype=torch.uint8)
    for part, code in (("train", TRAIN), ("test", TEST)):
        rows = split == code
        published = arrays.integers(f"{part}_label")
        if not torch.equal(published, label[rows]):
            raise DataError(
                f"'{path}': '{part}_label' differs from MNIST's {part} labels, so pairs would be wrong. "
                "Convert the file again, in MNIST's order"
            )
        images = arrays.features(f"{part}_image")
        if images.dtype != torch.uint8 or tuple(images.shape) != (len(published), 28, 28, 3):
            found = f"{images.dtype} {tuple(images.shape)}"
            raise DataError(f"'{path}': '{part}_image' must be uint8 ({len(published)}, 28, 28, 3), found {found}")
        color[rows] = images.permute(0, 3, 1, 2)
    return color
