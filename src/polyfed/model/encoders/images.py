"""Encoders of images and clips: the small convolutional network for CG-MNIST, and ResNet-18."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from typing_extensions import override

from polyfed.core.errors import ModelError
from polyfed.model.checks import one_of, sizes
from polyfed.model.encoders.spec import EncoderSpec, Shape
from polyfed.model.modules.layers import BatchNorm

_FEW = 4  # RGB + alpha; an axis with more entries cannot be the channels


def channels_of(shape: Shape) -> int:
    """Number of channels of images (H, W), (C, H, W) or (H, W, C), or of clips (C, T, H, W).

    Images with three axes are channel-last only if the last axis has at most four entries and the first axis has more.

    Raises:
        ModelError: the shape does not have two, three or four axes.

    >>> channels_of((28, 28)), channels_of((3, 28, 28)), channels_of((28, 28, 3))
    (1, 3, 3)
    """
    if len(shape) not in (2, 3, 4):
        raise ModelError(f"it reads images (H, W), (C, H, W) or (H, W, C); the samples have shape {shape}.")
    if len(shape) == 2:
        return 1
    return shape[-1] if _channel_last(shape) else shape[0]


def _nhwc(x: Tensor) -> Tensor:
    """Return (N, C, H, W) as a view (N, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def _mean(x: Tensor) -> Tensor:
    """Return the mean of (N, C, H, W) over height and width, (N, C).

    The gradient gets the memory format of `x`, because the backward passes of other layers are slow for mixed formats.
    """
    return x.mean((2, 3)) if x.stride(1) != 1 else _nhwc(x).mean((1, 2))


def _channel_last(shape: Shape) -> bool:
    return len(shape) == 3 and shape[-1] <= _FEW < shape[0]


class Images(nn.Module):
    """Applies layers to images of any layout, averages over height and width, and maps the result to the embedding.

    Args:
        shape: shape of one sample, see `channels_of`.
        layers: the layers, from (N, C, H, W) to (N, D, h, w).
        project: the map from (N, D) to (N, E), or None.
    """

    def __init__(self, shape: Shape, layers: nn.Module, project: nn.Module | None) -> None:
        super().__init__()
        self.rank, self.last = len(shape), _channel_last(shape)
        self.layers, self.project = layers, project

    def forward(self, x: Tensor) -> Tensor:
        """From (B, *shape) to embeddings (B, E); the frames of a clip are encoded one by one and averaged."""
        if self.rank == 2:
            x = x.unsqueeze(1)
        if self.last:
            x = x.permute(0, 3, 1, 2)
        frames = x.shape[2] if self.rank == 4 else 1
        if self.rank == 4:
            x = x.transpose(1, 2).flatten(0, 1)
        z = _mean(self.layers(x))
        if self.rank == 4:
            z = z.unflatten(0, (-1, frames)).mean(1)  # type: ignore[no-untyped-call]
        return z if self.project is None else self.project(z)


class NormalisedInput(nn.Sequential):
    """Applies layers in sequence. The first two layers must be a batch normalisation of the input and a convolution.

    The batch normalisation computes w * z + b per channel, where z is the standardised input. Convolving w * z + b with
    a kernel k equals convolving z with w * k, plus convolving an image of the constants b with k. In training, this
    class computes the second form. Its backward pass needs no gradient of the convolution's input. This gradient takes
    a fifth of the time of a training step of `cnn4` (docs/performance.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer for images (N, C, H, W)."""
        norm, conv, *rest = self
        if not isinstance(norm, BatchNorm) or not norm.trains:  # PyTorch's BatchNorm2d, until `adopt` replaces it
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        assert isinstance(conv, nn.Conv2d)
        w, b = norm.weight.view(1, -1, 1, 1), norm.bias.view(1, -1, 1, 1)
        constant = conv2d(b.expand(1, *x.shape[1:]), conv.weight, conv.bias, conv.stride, conv.padding)
        kernel = w * conv.weight
        if norm.rows.bound:
            x = conv2d(norm.standardised(x), kernel, None, conv.stride, conv.padding) + constant
        else:  # the next layers are faster in this memory format, which `vmap` does not support
            kernel = kernel.clone(memory_format=torch.channels_last)  # `contiguous` ignores the format of one channel
            x = conv2d(norm.standardised(x), kernel, None, conv.stride, conv.padding)
            x = (_nhwc(x) + _nhwc(constant).contiguous()).permute(0, 3, 1, 2)
        for layer in rest:
            x = layer(x)
        return x


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut, which is projected if the shape changes (He et al. 2016, Fig. 5)."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        same = stride == 1 and before == after
        self.shortcut = None if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        """(N, before, H, W) -> (N, after, H / stride, W / stride)."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + (x if self.shortcut is None else self.shortcut(x))).relu()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Cnn4(EncoderSpec):
    """Four convolutions for small images, with batch normalisation of the input.

    This is the encoder for CG-MNIST in CMSFed's released code (docs/algorithms/cmsfed.md). The average pool at its end
    covers the whole remaining image, which is 7 x 7 for images of 28 x 28 as in the source.
    """

    kind: Literal["cnn4"] = "cnn4"

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        layers = NormalisedInput(
            nn.BatchNorm2d(channels_of(shape)),
            nn.Conv2d(channels_of(shape), 32, 5, padding=2),
            nn.MaxPool2d(3, 2, 1),
            nn.ReLU(),  # ReLU and max-pool commute, and after the pool there are four times fewer entries
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        net = Images(shape, layers, nn.Linear(64, embedding))
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)
        return net


@dataclass(frozen=True, kw_only=True)
class ResNet18(EncoderSpec):
    """ResNet-18 without its classifier (He et al., CVPR 2016, Table 1), for any number of channels.

    It reads images (H, W), (C, H, W) or (H, W, C), and clips (C, T, H, W), whose frames are encoded one by one and
    averaged. A linear map follows if the last width differs from that of the embedding.

    Attributes:
        stem: first layers: `imagenet` is a 7 x 7 convolution with stride 2 and a max-pool, `cifar` a 3 x 3 convolution
            with stride 1 (docs/algorithms/hfm.md).
        widths: channels of the four stages. HFM uses [16, 32, 64, 64].
        norm: `batch`, or `group` with two groups, which fits every even width.
    """

    kind: Literal["resnet18"] = "resnet18"
    stem: Literal["imagenet", "cifar"] = "imagenet"
    widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: Literal["batch", "group"] = "batch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", sizes("widths", self.widths))
        one_of("stem", self.stem, ("imagenet", "cifar"))
        one_of("norm", self.norm, ("batch", "group"))
        if len(self.widths) != 4 or (self.norm == "group" and any(width % 2 for width in self.widths)):
            raise ModelError(
                f"widths = {list(self.widths)}: give four, even under norm = 'group', e.g. [16, 32, 64, 64]."
            )

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        norm = self._norm
        width = self.widths[0]
        kernel, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        stem = nn.Conv2d(channels_of(shape), width, kernel, stride, kernel // 2, bias=False)
        layers: list[nn.Module] = [stem, norm(width), nn.ReLU()]
        if self.stem == "imagenet":
            layers.append(nn.MaxPool2d(3, 2, 1))
        for stage, after in enumerate(self.widths):
            layers += [
                BasicBlock(width, after, 1 if stage == 0 else 2, norm),
                BasicBlock(after, after, 1, norm),
            ]
            width = after
        for module in nn.Sequential(*layers).modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return Images(shape, nn.Sequential(*layers), nn.Linear(width, embedding) if width != embedding else None)

    def _norm(self, channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(2, channels)
