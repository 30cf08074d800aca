"""Reads MNIST from any of its usual files: an .npz, Keras' .npz, or the four idx files."""

from pathlib import Path

import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.columns import TEST, TRAIN
from polyfed.data.reading.array_files import Arrays, existing, read_idx

LAYOUT = (
    "an .npz with image, label, split (or Keras' x_train, y_train, x_test, y_test), or a folder with it as "
    "mnist.npz or with the four idx files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..., plain "
    "or .gz"
)
LICENCE = "MNIST: Y. LeCun and C. Cortes, CC BY-SA 3.0 (as quoted in the Keras documentation)"
OBTAIN = "the four idx files of the MNIST distribution, from any mirror you trust"


def read_mnist(path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Read MNIST, 60,000 training and 10,000 test images.

    Args:
        path: A file or a folder, see `LAYOUT`.

    Returns:
        Images uint8 (N, 28, 28), labels int64 (N,) and split codes int8 (N,).

    Raises:
        DataError: A file is missing, damaged, or not MNIST.
    """
    found = existing(path, "MNIST")
    if found.is_dir() and (found / "mnist.npz").exists():
        found = found / "mnist.npz"
    image, label, split = _from_idx(found) if found.is_dir() else _from_npz(found)
    if image.dtype != torch.uint8 or image.dim() != 3 or not len(image) == len(label) == len(split):
        shapes = f"images {image.dtype} {tuple(image.shape)}, {len(label)} labels, {len(split)} split codes"
        raise DataError(f"'{found}' is not MNIST: {shapes}; expected uint8 images (N, 28, 28) with one label each")
    return image, label, split


def _from_npz(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    arrays = Arrays(path)
    if "x_train" not in arrays:
        return arrays.features("image"), arrays.integers("label"), arrays.integers("split").to(torch.int8)
    images = [arrays.features(f"x_{part}") for part in ("train", "test")]
    labels = [arrays.integers(f"y_{part}") for part in ("train", "test")]
    return torch.cat(images), torch.cat(labels), _official(images)


def _from_idx(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    images = [read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte")) for part in ("train", "t10k")]
    labels = [read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte")).long() for part in ("train", "t10k")]
    return torch.cat(images), torch.cat(labels), _official(images)


def _idx_file(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise DataError(f"'{folder}' has no {name} or {name}.gz. Expected: {LAYOUT}")


def _official(images: list[Tensor]) -> Tensor:
    train, test = (len(part) for part in images)
    return torch.tensor([TRAIN] * train + [TEST] * test, dtype=torch.int8)
