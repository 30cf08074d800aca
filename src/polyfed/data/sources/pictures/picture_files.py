"""Reads picture files with Pillow, which is imported only when a picture is read."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.reading.array_files import existing

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm")


def pictures(folder: str | Path, what: str) -> list[Path]:
    """Return the picture files of a folder, in order of their names.

    Raises:
        DataError: The folder is missing, or has no picture. The message begins with `what`, a description of the wanted
            files.
    """
    found = existing(folder, what)
    paths = sorted(path for path in found.glob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{what}: '{found}' holds no pictures ({', '.join(SUFFIXES)})")
    return paths


def read_picture(path: Path, *, gray: bool = False, size: int | None = None) -> Tensor:
    """Read a picture.

    Args:
        gray: If True, convert the picture to one channel. Otherwise the result has three channels.
        size: Scale the picture to `size` x `size` pixels. If None, the picture keeps its size.

    Returns:
        uint8 (C, H, W).

    Raises:
        DataError: Pillow is not installed, or the file is damaged, not a picture, or suspiciously large.
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading '{path}' needs Pillow: pip install pillow") from None
    try:
        with Image.open(path) as picture:
            picture = picture.convert("L" if gray else "RGB")  # type: ignore[assignment]
            if size is not None:
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)  # type: ignore[assignment]
            array = np.array(picture, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' is damaged or not a picture ({error}). Copy it again or remove it") from error
    return torch.from_numpy(array[None] if gray else array.transpose(2, 0, 1).copy())
