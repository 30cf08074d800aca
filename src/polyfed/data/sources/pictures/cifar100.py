"""cifar100: CIFAR-100 as colour and gray pairs (docs/data.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError
from polyfed.core.option_checks import FRACTION, check_ranges
from polyfed.data.column_scaling import moments
from polyfed.data.columns import TEST, TRAIN, Column, Columns
from polyfed.data.population.splits import subset
from polyfed.data.reading.array_files import Arrays, existing, stored_name
from polyfed.data.sources.base import Facts, Source

LAYOUT = (
    "an .npz with image (N, 32, 32, 3), label, split; or the folder of CIFAR's binary version, with train.bin and "
    "test.bin (a record is coarse label, fine label, 3 x 32 x 32 bytes)"
)

# Mean and deviation of the training images by channel, on a scale of [0, 1]
_MEAN = torch.tensor([0.5071, 0.4866, 0.4409]).view(3, 1, 1)
_DEVIATION = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)

# Weights of the channels in the gray image, those of ITU-R BT.601, as in HFM's report
_LUMA = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)

_RECORD = 2 + 3 * 32 * 32  # bytes of a record of the binary version

_ROWS_AT_ONCE = 4096  # converted at a time, so that 60,000 images are never in memory as floats


@dataclass(frozen=True, kw_only=True)
class Cifar100(Source):
    """Images as `rgb` (3, 32, 32) and `gray` (1, 32, 32); a row holds both versions of one image. No augmentation.

    Images are stored as bytes (gray is rounded) and standardised when a batch is taken. `rgb` uses the usual mean and
    deviation of CIFAR-100. `gray` uses its own mean and deviation over the training rows.

    Attributes:
        path: An .npz, or the folder of CIFAR's binary version (not the pickled python version); `polyfed data cifar100`
            prints the layout.
        labels: With the binary version: "fine" (100 classes) or "coarse" (20 superclasses).
        subset: Share of the rows of each class that is kept in each split, drawn at random.
        seed: Seed of the subset, the same in all runs.
    """

    path: str
    labels: Literal["fine", "coarse"] = "fine"
    subset: Annotated[float, FRACTION] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        path = existing(self.path, "CIFAR-100")
        image, label, split, names = _binary(path, self.labels) if path.is_dir() else _arrays(path)
        rows = subset(label, split, self.subset, keys.key(self.seed, "cifar100", "subset"))
        image, label, split = image[rows], label[rows], split[rows]
        gray = Column(_gray(image), scale=torch.tensor(255.0))
        result = moments(gray, (split == TRAIN).nonzero()[:, 0])
        return Columns(
            name="cifar100" if path.is_dir() else stored_name(path),
            modalities={
                "rgb": Column(image, shift=255.0 * _MEAN, scale=255.0 * _DEVIATION),
                "gray": Column(gray.values, shift=result.mean.float(), scale=result.deviation.float()),
            },
            label=label,
            num_classes=int(label.max()) + 1 if names is None else len(names),
            split=split,
            ids=rows,
            class_names=names,
        )

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data cifar100` prints them."""
        return Facts(
            title="CIFAR-100 as colour and gray pairs, two devices of a silo in HFM",
            modalities={"rgb": "(3, 32, 32)", "gray": "(1, 32, 32)"},
            licence="none stated by its owner (A. Krizhevsky, University of Toronto)",
            obtain="cifar-100-binary.tar.gz of the CIFAR home page, unpacked",
            layout=LAYOUT,
        )


_Read = tuple[Tensor, Tensor, Tensor, tuple[str, ...] | None]


def _arrays(path: Path) -> _Read:
    if path.suffix != ".npz":
        raise DataError(f"'{path}' is not read: polyfed opens no pickles. Give {LAYOUT}")
    arrays = Arrays(path)
    image = arrays.features("image")
    if image.dtype != torch.uint8 or tuple(image.shape[1:]) != (32, 32, 3):
        raise DataError(f"'{path}': image is {image.dtype} {tuple(image.shape)}, expected uint8 (N, 32, 32, 3)")
    names = arrays.strings("label_name") if "label_name" in arrays else None
    split = arrays.integers("split").to(torch.int8)
    return image.permute(0, 3, 1, 2).contiguous(), arrays.integers("label"), split, names


def _binary(folder: Path, labels: str) -> _Read:
    parts, splits = [], []
    for name, code in (("train.bin", TRAIN), ("test.bin", TEST)):
        raw = np.fromfile(existing(folder / name, "CIFAR-100, binary version"), np.uint8)
        if len(raw) == 0 or len(raw) % _RECORD:
            raise DataError(f"'{folder / name}' has {len(raw)} bytes, no multiple of {_RECORD}. Fetch it again")
        parts.append(raw.reshape(-1, _RECORD))
        splits.append(np.full(len(parts[-1]), code, np.int8))
    records = torch.from_numpy(np.concatenate(parts))
    label = records[:, 0 if labels == "coarse" else 1].long()
    return records[:, 2:].reshape(-1, 3, 32, 32), label, torch.from_numpy(np.concatenate(splits)), None


def _gray(image: Tensor) -> Tensor:
    out = torch.empty(len(image), 1, 32, 32, dtype=torch.uint8)
    for part in torch.split(torch.arange(len(image)), _ROWS_AT_ONCE):
        out[part] = (image[part].float() * _LUMA).sum(1, keepdim=True).round_().to(torch.uint8)
    return out
