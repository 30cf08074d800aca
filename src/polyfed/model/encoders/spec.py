"""`EncoderSpec`, the base of all encoders, and the multilayer perceptron.

An encoder maps the samples of one modality, in the shape of the data, to an embedding. Each kind of encoder is a frozen
dataclass, whose fields are the options of an entry of `[model.encoders]`. Its `build` makes an ordinary PyTorch module.
The model then replaces layers that depend on the batch (`layer_replacement.py`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.errors import ModelError
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

    def num_ids(self, shape: Shape) -> int | None:
        """The number of token ids that the encoder reads in samples of this shape, or None if they are numbers."""
        return None


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


@dataclass(frozen=True, kw_only=True)
class Tabular(EncoderSpec):
    """Multilayer perceptron on the columns of a table, in which words have trained vectors.

    The words of a column are numbers that are 1 for the word of a row and 0 for all others, so a layer without offset
    holds their vectors in its columns, and a row without a known word gets zeros.

    Attributes:
        hidden: sizes of the hidden layers.
        embeddings: for each column of words with a vector: the place of its first number in a sample, the number of its
            words, and the length of a vector. polyfed fills it in from [data.columns] if it is empty.
    """

    kind: Literal["tabular"] = "tabular"
    hidden: tuple[int, ...] = (64,)
    embeddings: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", sizes("hidden", self.hidden))
        places = tuple(tuple(entry) for entry in self.embeddings)
        ends = [0, *(entry[0] + entry[1] for entry in places if len(entry) == 3)]
        fits = all(
            len(entry) == 3 and all(type(n) is int for n in entry) and entry[0] >= end and min(entry[1:]) > 0
            for entry, end in zip(places, ends, strict=False)
        )
        if not fits:
            raise ModelError(
                f"embeddings = {list(map(list, places))}: give [first, words, size] for each column of words, in order"
            )
        object.__setattr__(self, "embeddings", places)

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        width = math.prod(shape)
        if self.embeddings and (len(shape) != 1 or sum(self.embeddings[-1][:2]) > width):
            raise ModelError(f"embeddings reach beyond the {width} numbers of a sample.")
        first = _Embedded(width, self.embeddings)
        return nn.Sequential(first, Mlp(hidden=self.hidden).build((first.width,), embedding))


class _Embedded(nn.Module):
    """Replaces the numbers of each column of words by the vector of its word; the other numbers come first."""

    def __init__(self, width: int, embeddings: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        self.places = embeddings
        self.vectors = nn.ModuleList(nn.Linear(words, size, bias=False) for _, words, size in embeddings)
        taken = {place for first, words, _ in embeddings for place in range(first, first + words)}
        self.plain = [place for place in range(width) if place not in taken]
        self.width = len(self.plain) + sum(size for _, _, size in embeddings)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        parts = [layer(x[:, first : first + words]) for layer, (first, words, _) in zip(self.vectors, self.places)]  # noqa: B905
        return torch.cat([x[:, self.plain], *parts], 1)


class _Flat(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))  # type: ignore[no-any-return, no-untyped-call]
