"""`Scaling`: the shift and the scale that turn the stored samples of a modality into inputs of a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """The numbers that turn stored samples of a modality into the input of a model: (x - shift) / scale.

    Both broadcast over one sample: of shape (F,) or (1, F) for features along the last axis, and (C, 1, 1) for the
    channels of an image. The scale is float32. The shift is float32, or float64 for values that float32 cannot tell
    apart, such as times in milliseconds since 1970. If polyfed standardised the modality, `shift` holds the means and
    `scale` the deviations of the training rows, in the unit of the stored values.
    """

    shift: Tensor
    scale: Tensor

    def applied(self, x: Tensor) -> Tensor:
        """Return the scaled samples, float32 (n, *shape), for stored samples (n, *shape) of any real type.

        In sequences (T, F), time steps that are all zero are padding and stay zero.
        """
        shift, scale = self.shift.to(x.device), self.scale.to(x.device)
        moved = (x.to(shift.dtype) - shift).to(torch.float32)
        if x.dim() == 3 and shift.dim():
            moved = torch.where(x.ne(0).any(-1, keepdim=True), moved, torch.zeros_like(moved))
        return moved / scale

    def as_lists(self) -> dict[str, Any]:
        """Return both tensors as nested lists of numbers for a JSON file, with the type of a shift in float64."""
        wide = {"dtype": "float64"} if self.shift.dtype == torch.float64 else {}
        return {name: value.tolist() for name, value in self._asdict().items()} | wide

    @classmethod
    def read(cls, value: Mapping[str, Any], shape: tuple[int, ...]) -> "Scaling":
        """Return a `Scaling` with these values. `as_lists` is the inverse function.

        Args:
            value: the entries `shift` and `scale`, as nested lists or as tensors.
            shape: the shape of one sample.

        Raises:
            ValueError: an entry is not finite or does not broadcast over a sample, or the scale is not positive.
            KeyError, TypeError: an entry is missing, or does not consist of numbers.
        """
        shift = value["shift"]
        wide = shift.dtype == torch.float64 if isinstance(shift, Tensor) else value.get("dtype") == "float64"
        result = cls(
            torch.as_tensor(shift, dtype=torch.float64 if wide else torch.float32),
            torch.as_tensor(value["scale"], dtype=torch.float32),
        )
        for name, numbers in result._asdict().items():
            fits = numbers.dim() <= len(shape) and all(
                side in (1, wanted) for side, wanted in zip(reversed(numbers.shape), reversed(shape), strict=False)
            )
            if not fits:
                raise ValueError(f"the {name} has the shape {tuple(numbers.shape)}, and a sample has {shape}")
            if not numbers.isfinite().all():
                raise ValueError(f"the {name} is not finite")
        if (result.scale <= 0).any():
            raise ValueError("the scale is not positive")
        return result
