"""An encoder of spectrograms: convolutions over time and frequency, then recurrent layers."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.errors import ModelError
from polyfed.model.checks import probability, sizes, whole
from polyfed.model.encoders.spec import EncoderSpec, Shape


@dataclass(frozen=True, kw_only=True)
class Conv2dGru(EncoderSpec):
    """Convolutions over time and frequency, a projection, and stacked GRUs.

    Source: the audio encoder of PartialFL (docs/algorithms/partialfl.md); the paper names the parts of the encoder, and
    all sizes are inferred. Each stage is Conv2d-ReLU-Dropout with stride 2, which halves time and frequency. A linear
    layer projects all channels and frequencies of a time step. The states of the last GRU are averaged over time and
    mapped to the embedding. A time step whose features are all zero is padding. The mean leaves out states that come
    only from padded steps.

    Attributes:
        channels: output channels of each stage.
        kernel: kernel size over time and frequency, odd, so that each stage halves both, rounded up.
        hidden: width of the projection and of the GRUs.
        layers: number of GRUs, each of which reads the states of the one before.
        dropout: dropout probability after each stage.
    """

    kind: Literal["conv2d-gru"] = "conv2d-gru"
    channels: tuple[int, ...] = (32, 32)
    kernel: int = 3
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", sizes("channels", self.channels))
        for name in ("kernel", "hidden", "layers"):
            whole(name, getattr(self, name))
        if self.kernel % 2 == 0:
            raise ModelError(f"kernel = {self.kernel}: give an odd size, so that padding keeps the steps aligned.")
        probability("dropout", self.dropout)

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        if len(shape) != 2:
            raise ModelError(f"it reads spectrograms (T, F); the samples have shape {shape}.")
        return _Conv2dGru(self, shape[1], embedding, sequence)


class _Conv2dGru(nn.Module):
    def __init__(self, spec: Conv2dGru, width: int, embedding: int, sequence: bool) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for before, after in zip((1, *spec.channels), spec.channels, strict=False):
            stages += [nn.Conv2d(before, after, spec.kernel, 2, spec.kernel // 2), nn.ReLU(), nn.Dropout(spec.dropout)]
            width = (width + 1) // 2
        self.conv = nn.Sequential(*stages)
        channels = spec.channels[-1] if spec.channels else 1
        self.project = nn.Linear(channels * width, spec.hidden)
        self.gru = nn.ModuleList(nn.GRU(spec.hidden, spec.hidden, batch_first=True) for _ in range(spec.layers))
        self.out = nn.Linear(spec.hidden, embedding)
        self.sequence, self.spec = sequence, spec

    def forward(self, x: Tensor) -> Tensor:
        states = self.project(self.conv(x.unsqueeze(1)).transpose(1, 2).flatten(2))
        for gru in self.gru:
            states, _ = gru(states)
        if self.sequence:
            return self.out(states)  # type: ignore[no-any-return]
        real = (x != 0).any(-1).to(x.dtype)
        for _ in self.spec.channels:
            real = nn.functional.max_pool1d(real, self.spec.kernel, 2, self.spec.kernel // 2)
        # a sample without any real step keeps all of them, because a mean over no steps is undefined
        real = torch.where(real.sum(1, keepdim=True) > 0, real, 1.0).unsqueeze(-1)
        return self.out((states * real).sum(1) / real.sum(1))  # type: ignore[no-any-return]
