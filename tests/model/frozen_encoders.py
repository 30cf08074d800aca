"""Encoders that freeze a part of themselves, as users write them."""

import torch
from torch import Tensor, nn


class Lora(nn.Module):
    """A linear layer that stays as it is, and a low-rank update of it that trains (Hu et al., ICLR 2022)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


class Adapted(nn.Sequential):
    """An MLP whose linear layers are wrapped, as `peft` wraps those of a model that is there."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__(nn.Linear(shape[0], 12), nn.ReLU(), nn.Linear(12, embedding))
        for name, layer in list(self.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(self, name, Lora(layer))


class Attending(nn.Module):
    """A frozen transformer that stays in evaluation mode, where PyTorch would take its fused kernels."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        layer.self_attn.dropout = 0.0
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, embedding)
        self.body.requires_grad_(False)
        self.attention.requires_grad_(False)

    def train(self, mode: bool = True) -> "Attending":
        super().train(mode)
        self.body.eval()
        self.attention.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        states = self.body(x.reshape(x.shape[0], -1, 8))
        attended: Tensor = self.attention(states, states, states, need_weights=False)[0]
        out: Tensor = self.out(attended.mean(1))
        return out


class Halves(nn.Module):
    """What trains begins as the negative of what is frozen, so that both must come from one draw."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        drawn = torch.randn(embedding, shape[0])
        self.fixed = nn.Parameter(drawn, requires_grad=False)
        self.moving = nn.Parameter(-drawn)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.fixed + self.moving).T


class Loaded(nn.Module):
    """A frozen layer from a file."""

    def __init__(self, shape: tuple[int, ...], embedding: int, path: str) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], 12, bias=False)
        self.layer.load_state_dict({"weight": torch.load(path, weights_only=True)})
        self.layer.requires_grad_(False)
        self.out = nn.Linear(12, embedding)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(x).relu())
        return out


class Tied(nn.Module):
    """One parameter in two layers, one of which is frozen: so the other is too."""

    def __init__(self, shape: tuple[int, ...], embedding: int, way: str) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(*shape, 6), nn.Linear(6, embedding)
        self.one, self.two, self.way = nn.Linear(6, 6), nn.Linear(6, 6), way
        if way == "parameter":
            self.two.weight = self.one.weight
        if way == "memory":
            self.two.weight = nn.Parameter(self.one.weight.data)
        if way in ("parameter", "memory"):
            self.two.requires_grad_(False)

    def train(self, mode: bool = True) -> "Tied":
        if self.way == "train":
            self.two.requires_grad_(False)
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "forward":
            self.two.requires_grad_(False)
        out: Tensor = self.out(self.two(self.one(self.inp(x))))
        return out
