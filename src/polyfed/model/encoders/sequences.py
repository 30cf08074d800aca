"""Encoders of time series and of token ids: convolutions with a GRU, and transformers."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.errors import ModelError
from polyfed.model.checks import probability, sizes, whole
from polyfed.model.encoders.spec import EncoderSpec, Shape


@dataclass(frozen=True, kw_only=True)
class ConvGru(EncoderSpec):
    """Convolutions over time, followed by a GRU as wide as the embedding.

    Source: Feng et al., "FedMultimodal: A Benchmark For Multimodal Federated Learning", KDD 2023. Each stage is
    Conv1d-ReLU-MaxPool(2)-Dropout. The states of the GRU are averaged over time, except under attention fusion. A time
    step whose features are all zero is padding. The mean leaves out states that come only from padded steps.

    Attributes:
        channels: output channels of each stage.
        kernel: kernel size, odd, so that each stage halves the number of steps exactly.
        dropout: dropout probability after each stage.
    """

    kind: Literal["conv-gru"] = "conv-gru"
    channels: tuple[int, ...] = (32, 64, 128)
    kernel: int = 5
    dropout: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", sizes("channels", self.channels))
        whole("kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise ModelError(f"kernel = {self.kernel}: give an odd size, so that padding keeps the steps aligned.")
        probability("dropout", self.dropout)

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        _rank(shape, 2, "a time series (T, F)")
        if shape[0] < 2 ** len(self.channels):
            raise ModelError(f"{len(self.channels)} stages halve the time axis to nothing: it has {shape[0]} steps.")
        return _ConvGru(self, shape[1], embedding, sequence)


class _ConvGru(nn.Module):
    def __init__(self, spec: ConvGru, width: int, embedding: int, sequence: bool) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for channels in spec.channels:
            stages += [nn.Conv1d(width, channels, spec.kernel, padding=spec.kernel // 2), nn.ReLU()]
            stages += [nn.MaxPool1d(2), nn.Dropout(spec.dropout)]
            width = channels
        self.conv = nn.Sequential(*stages)
        self.gru = nn.GRU(width, embedding, batch_first=True)
        self.sequence, self.halved = sequence, 2 ** len(spec.channels)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))
        if self.sequence:
            return states  # type: ignore[no-any-return]
        real = nn.functional.max_pool1d((x != 0).any(-1).to(x.dtype), self.halved)
        real = torch.where(real.sum(1, keepdim=True) > 0, real, 1.0).unsqueeze(-1)
        return (states * real).sum(1) / real.sum(1)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Transformer(EncoderSpec):
    """A linear map to the embedding, post-norm transformer layers, and the mean over time.

    The encoder reads time series (T, F). A time step whose features are all zero is padding: no step attends to it, and
    the mean leaves it out. Like its source (docs/algorithms/pfmml.md), the encoder has no positional encoding.

    Attributes:
        layers: number of layers.
        heads: number of attention heads; the embedding must be divisible by it.
        feedforward: width of the feed-forward layers.
    """

    kind: Literal["transformer"] = "transformer"
    layers: int = 2
    heads: int = 4
    feedforward: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "feedforward"):
            whole(name, getattr(self, name))

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        _rank(shape, 2, "a time series (T, F)")
        if embedding % self.heads:
            raise ModelError(f"heads = {self.heads} does not divide the embedding of {embedding}.")
        return _Transformer(self, shape[1], embedding)


class _Transformer(nn.Module):
    def __init__(self, spec: Transformer, width: int, embedding: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, embedding)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(embedding, spec.heads, spec.feedforward, dropout=0.0, batch_first=True)
            for _ in range(spec.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        real = (x != 0).any(-1)
        # a sample without any real step attends to all its steps, because a softmax over no steps is NaN
        real = real | ~real.any(1, keepdim=True)
        z = self.project(x)
        for layer in self.layers:
            z = layer(z, src_key_padding_mask=~real)
        z = torch.where(real.unsqueeze(-1), z, z.new_zeros(()))
        return z.sum(1) / real.sum(1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class TokenTransformer(EncoderSpec):
    """Embeddings of token ids and of their positions, post-norm transformer layers, and the mean over the tokens.

    The encoder reads token ids (T,), which are whole numbers from 0. No token attends to padding, and the mean leaves
    padding out. The layers follow Vaswani et al., "Attention Is All You Need" (NeurIPS 2017). The learned positions
    follow Devlin et al., "BERT" (NAACL 2019), Section 3. Both embeddings start from N(0, 0.02²) as in BERT.

    Attributes:
        vocabulary: number of different ids, above the largest id.
        padding: the id that fills up short texts; -1 if there is none.
        layers: number of layers.
        heads: number of attention heads; the embedding must be divisible by it.
        feedforward: width of the feed-forward layers.
    """

    kind: Literal["token-transformer"] = "token-transformer"
    vocabulary: int
    padding: int = 0
    layers: int = 1
    heads: int = 4
    feedforward: int = 128

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "heads", "feedforward"):
            whole(name, getattr(self, name))
        if isinstance(self.padding, bool) or not isinstance(self.padding, int):
            raise ModelError(f"padding = {self.padding!r}: give the id of the padding, or -1 if there is none.")

    @override
    def num_ids(self, shape: Shape) -> int:
        return self.vocabulary

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        _rank(shape, 1, "token ids (T,)")
        if embedding % self.heads:
            raise ModelError(f"heads = {self.heads} does not divide the embedding of {embedding}.")
        return _TokenTransformer(self, shape[0], embedding, sequence)


class _TokenTransformer(nn.Module):
    def __init__(self, spec: TokenTransformer, tokens: int, embedding: int, sequence: bool) -> None:
        super().__init__()
        self.padding, self.sequence = spec.padding, sequence
        self.tokens = nn.Embedding(spec.vocabulary, embedding)
        self.positions = nn.Parameter(torch.empty(tokens, embedding))
        for weight in (self.tokens.weight, self.positions):
            nn.init.normal_(weight, std=0.02)
        self.norm = nn.LayerNorm(embedding)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(embedding, spec.heads, spec.feedforward, dropout=0.0, batch_first=True)
            for _ in range(spec.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        ids = x.to(torch.int64)
        real = ids != self.padding
        # a sample of only padding attends to all of it, because a softmax over no tokens is NaN
        real = real | ~real.any(1, keepdim=True)
        z: Tensor = self.norm(self.tokens(ids) + self.positions)
        for layer in self.layers:
            z = layer(z, src_key_padding_mask=~real)
        if self.sequence:
            return z
        z = torch.where(real.unsqueeze(-1), z, z.new_zeros(()))
        return z.sum(1) / real.sum(1, keepdim=True)


def _rank(shape: Shape, rank: int, what: str) -> None:
    if len(shape) != rank:
        raise ModelError(f"it reads {what}; the samples have shape {shape}.")
