"""Compressed tensors: three forms in which the difference of a tensor can be sent, with sizes known beforehand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyfed.core import keys

Form = Literal["bf16", "int8", "top-k"]

Place = tuple[str, str | None]
"""The field of a message, and the name of a tensor in its tree, or None if the field is a tensor."""

LEVELS = 127
"""Largest magnitude of a code of `int8`."""


@dataclass(frozen=True)
class Packing:
    """How a tensor is compressed. The size depends only on shape and type, so both sides know it.

    - `bf16`: the nearest number of bfloat16.
    - `int8`: x / scale, rounded up or down at random so that its mean is exact, where scale is the largest magnitude
      divided by 127. Source: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NIPS 2017, with the maximum norm.
    - `top-k`: the share `fraction` of the entries, those with the largest magnitude. Of equal ones, the first count.

    Attributes:
        form: one of the three.
        fraction: share of the entries that `top-k` sends, at least one entry.
        by_row: whether `int8` has a scale for each entry of the first axis, if there are several axes.
    """

    form: Form
    fraction: float = 1.0
    by_row: bool = True

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Return the types and the shapes of the pieces in which a tensor is sent."""
        if self.form == "bf16":
            return ((torch.bfloat16, shape),)
        if self.form == "int8":
            return (torch.float32, (self._rows(shape),)), (torch.int8, shape)
        count = max(1, math.ceil(self.fraction * math.prod(shape) - 1e-9))
        return (torch.int32, (count,)), (dtype, (count,))

    def size(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the size of the pieces in bytes."""
        return sum(kind.itemsize * math.prod(sides) for kind, sides in self.layout(shape, dtype))

    def packed(self, value: Tensor, key: int) -> tuple[Tensor, ...]:
        """Compress a tensor of at least one entry.

        Args:
            key: random key of the rounding.
        """
        if self.form == "bf16":
            return (value.to(torch.bfloat16),)
        if self.form == "int8":
            rows = value.reshape(self._rows(tuple(value.shape)), -1)
            scale = (rows.abs().amax(1) / LEVELS).to(torch.float32)
            steps = rows / torch.where(scale > 0, scale, torch.ones_like(scale)).to(rows.dtype)[:, None]
            steps = torch.floor(steps + keys.uniform(key, tuple(rows.shape), rows.device)).clamp(-LEVELS, LEVELS)
            return scale, torch.nan_to_num(steps).to(torch.int8).reshape(value.shape)
        places = self._largest(value.reshape(-1).abs())
        return places.to(torch.int32), value.reshape(-1)[places]

    def flaw(self, pieces: tuple[Tensor, ...], shape: tuple[int, ...]) -> str:
        """Return what is wrong with pieces that another machine sent, or ""."""
        if self.form == "int8":
            scale, codes = pieces
            if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
                return "has a scale that is no finite number of at least 0"
            return "has a code that does not exist" if bool((codes == -LEVELS - 1).any()) else ""
        if self.form == "top-k":
            places = pieces[0].to(torch.int64)
            if not (int(places[0]) >= 0 and int(places[-1]) < math.prod(shape)) or bool((places.diff() <= 0).any()):
                return "names entries that do not exist, or are not in ascending order"
        return ""

    def unpacked(self, pieces: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that pieces stand for. They have no flaw."""
        if self.form == "bf16":
            return pieces[0].to(dtype)
        if self.form == "int8":
            scale, codes = pieces
            return (codes.reshape(len(scale), -1).to(dtype) * scale.to(dtype)[:, None]).reshape(shape)
        places, values = pieces
        flat = torch.zeros(math.prod(shape), dtype=dtype, device=values.device)
        return flat.index_copy(0, places.to(torch.int64), values).reshape(shape)

    def _rows(self, shape: tuple[int, ...]) -> int:
        return shape[0] if self.by_row and len(shape) > 1 else 1

    def _largest(self, sizes: Tensor) -> Tensor:
        """Return the places of the largest entries of a vector, in ascending order. NaN counts as infinite."""
        sizes = torch.where(sizes.isnan(), torch.full_like(sizes, torch.inf), sizes)
        count = max(1, math.ceil(self.fraction * len(sizes) - 1e-9))
        least = torch.topk(sizes, count).values.min()
        above, equal = (sizes > least).nonzero().flatten(), (sizes == least).nonzero().flatten()
        return torch.cat([above, equal[: count - len(above)]]).sort().values


Packings = Mapping[Place, Packing]
"""The tensors of a message that are compressed."""

Pieces = dict[Place, tuple[Tensor, ...]]
"""What is sent in place of the compressed tensors of a message."""
