"""`EncoderSpec`, the base of all encoders, and the multilayer perceptron.

An encoder maps the samples of one modality, in the shape of the data, to an embedding. Each kind of encoder is a frozen
dataclass, whose fields are the options of an entry of `[model.encoders]`. Its `build` makes an ordinary PyTorch module.
The model then replaces layers that depend on the batch (`layer_replacement.py`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from polyfed.model.checks import sizes

Shape = tuple[int, ...]
"""Shape of one sample, without the axis of rows."""


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Base class of all encoders.

    Attributes:
        kind: name of the encoder in a recipe.
    """

    kind: str

    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        """Make a new module for samples of this shape, with parameters drawn from PyTorch's global generator.

        Args:
            shape: shape of one sample.
            embedding: width E of the output.
            sequence: whether the module should keep the time axis, if this kind of encoder has one.

        Returns:
            A module from (B, *shape) to (B, E), or to (B, T, E) if it keeps the time axis.

        Raises:
            ModelError: this kind of encoder cannot read samples of this shape.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Mlp(EncoderSpec):
    """Multilayer perceptron on the flattened sample: Linear-ReLU for each hidden size, then Linear to the embedding.

    Attributes:
        hidden: sizes of the hidden layers.
    """

    kind: Literal["mlp"] = "mlp"
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", sizes("hidden", self.hidden))

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        widths = (math.prod(shape), *self.hidden)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return _Flat(*layers, nn.Linear(widths[-1], embedding))


class _Flat(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))  # type: ignore[no-any-return, no-untyped-call]
