"""Fusions and whole modules as a user would write them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.model import Fusion


class Product(Fusion):
    """The product of 1 + tanh(W_m z_m) over the modalities."""

    def __init__(self, embedding: int, head: tuple[int, ...], outputs: int, dropout: float, scale: float = 1.0) -> None:
        super().__init__(embedding, head, outputs, dropout)
        self.scale = scale
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(embedding, outputs))

    @staticmethod
    def part(embedding: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(embedding, embedding), nn.Dropout(0.2))

    def joint(self, parts: Any, z: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        joint = torch.ones_like(next(iter(z.values())))
        for name, value in z.items():
            factor = torch.tanh(parts[name](value)) * self.scale
            joint = joint * (1 + factor * present[name].unsqueeze(1) if name in present else 1 + factor)
        return joint


class WrongWidth(Product):
    def joint(self, parts: Any, z: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        return super().joint(parts, z, present)[:, :-1]


class NoJoint(Fusion):
    @staticmethod
    def part(embedding: int, width: int) -> None:
        return None


class NoFusion:
    """Not a fusion, and calling it would show."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError("it was called")


class Whole(nn.Module):
    """Two nets, a product of their outputs, BatchNorm and dropout; `a` and `b` are vectors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_outputs: int, width: int = 6) -> None:
        super().__init__()
        self.net_a = nn.Sequential(nn.Linear(shapes["a"][0], width), nn.ReLU(), nn.Dropout(0.25))
        self.net_b = nn.LSTM(shapes["b"][0], width, batch_first=True)
        self.bias_b = nn.Parameter(torch.zeros(width))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.top = nn.Linear(width, num_outputs)

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        a = self.net_a(x["a"]) * present["a"].unsqueeze(1)
        b = (self.net_b(x["b"].unsqueeze(1))[0][:, -1] + self.bias_b) * present["b"].unsqueeze(1)
        out: Tensor = self.top(self.norm(self.frozen(a + b + a * b)))
        return out


class Leaky(Whole):
    """Forgets the masks."""

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x, {m: torch.ones_like(there) for m, there in present.items()})


class Narrow(Whole):
    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x, present)[:, :-1]


class Encoding(nn.Module):
    """A whole module with embeddings."""

    embedding = 5

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({m: nn.Sequential(nn.Linear(s[0], 5), nn.Tanh()) for m, s in shapes.items()})
        self.top = nn.Linear(5, num_outputs)

    def encode(self, modality: str, x: Tensor) -> Tensor:
        out: Tensor = self.nets[modality](x)
        return out

    def fuse(self, z: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.top(sum(value * present[m].unsqueeze(1) for m, value in z.items()))
        return out


class OnlyX(Whole):
    """Its `forward` lacks the argument `present`."""

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x, {})


class NoOutputs(Whole):
    """Its constructor lacks the argument `num_outputs`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(shapes, 4)


class OnlyZ(Encoding):
    """Its `fuse` lacks the argument `present`."""

    def fuse(self, z: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().fuse(z, {})


BLOCKS = {"a": ("net_a",), "b": ("net_b", "bias_b")}
OWN_BLOCKS = {"a": ("nets.a",), "b": ("nets.b",)}


class Tied(Whole):
    """Both nets use the same weight."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__(shapes, num_outputs)
        a, b = nn.Linear(16, 6), nn.Linear(16, 6)
        b.weight = a.weight
        self.net_a, self.net_b = a, b  # type: ignore[assignment]


class Mixing(Whole):
    """Gives the samples of `b` to the net of `a`, which has no bias; so a sample of zeros gives zeros."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__(shapes, num_outputs)
        self.net_a = nn.Sequential(nn.Linear(shapes["a"][0], 6, bias=False))

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        mixed = nn.functional.layer_norm(self.net_a(x["a"] + x["b"][:, :16]), (6,))
        out: Tensor = self.top(mixed)
        return out


class Ids(nn.Module):
    """Reads the samples as ids of two words."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__()
        self.net_a, self.net_b = nn.Embedding(2, 5), nn.Embedding(2, 5)
        self.top = nn.Linear(5, num_outputs)

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        found = [
            net(x[m].long()).mean(1) * present[m].unsqueeze(1) for m, net in (("a", self.net_a), ("b", self.net_b))
        ]
        out: Tensor = self.top(found[0] + found[1])
        return out
