"""The encoder `hf`: a pre-trained model of the `transformers` library, from a folder or the hub's local cache."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polyfed.core.errors import ModelError
from polyfed.core.registry import check_model
from polyfed.model import pretrained
from polyfed.model.encoder_spec import EncoderSpec, Shape
from polyfed.model.layers import BatchNorm, Dropout


@dataclass(frozen=True, kw_only=True)
class HuggingFace(EncoderSpec):
    """A pre-trained backbone, whose pooled output a linear map turns into the embedding.

    Reads token ids (T,), which the data kind "tokens" gives, or images (3, H, W). The pooled output is the mean of the
    last hidden layer over real tokens for text; for images, the backbone's own pooled output, or the mean over patches
    if it has none. Nothing is downloaded. Dropout of the backbone's attention weights is off; its other dropout layers
    are active in training, unless the backbone is frozen.

    Attributes:
        path: folder of a saved model, or its name in the hub's local cache.
        frozen: whether the backbone keeps its weights. It is then in no Tree, so that it neither trains nor crosses,
            and only the linear map trains.
    """

    kind: Literal["hf"] = "hf"
    path: str
    frozen: bool = True

    def __post_init__(self) -> None:
        """Check on a device that the model may be read.

        Raises:
            NotAllowed: the owner of this device has not allowed the model.
        """
        check_model(self.path)

    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        """Make the module; see `EncoderSpec.build`. With `sequence`, text has one embedding for each token."""
        is_text = len(shape) == 1
        if not is_text and not (len(shape) == 3 and shape[0] == 3):
            raise ModelError(f"it reads token ids (T,) or images (3, H, W); the samples have shape {shape}.")
        if sequence and not is_text:
            raise ModelError("attention fusion needs a sequence, and it gives one vector an image.")
        backbone: Any = pretrained.backbone(self.path)
        if is_text:
            backbone.pooler = None  # unused, but it would train and cross
        if self.frozen:
            backbone.requires_grad_(False)
        reader = _Text(backbone, shape[0], sequence) if is_text else _Picture(backbone)
        try:
            with torch.no_grad():
                width = reader(torch.zeros(1, *shape)).shape[-1]
        except Exception as error:  # backbones raise any exception for inputs that they cannot read
            what = "token ids" if is_text else "images"
            raise ModelError(f"{type(backbone).__name__} cannot read {what} of shape {shape}: {error}.") from error
        return nn.Sequential(reader, nn.Linear(width, embedding))


class _Reader(nn.Module):
    """Base of both readers. Keeps the library's layers in evaluation mode.

    Where the backbone trains, the layers that `adopt` has replaced follow the mode of the batch.
    """

    backbone: nn.Module

    def train(self, mode: bool = True) -> Self:
        super().train(False)
        trains = any(parameter.requires_grad for parameter in self.backbone.parameters())
        for layer in self.modules():
            if isinstance(layer, BatchNorm | Dropout):
                layer.train(mode and trains)
        return self


class _Text(_Reader):
    def __init__(self, backbone: nn.Module, tokens: int, sequence: bool) -> None:
        super().__init__()
        config: Any = backbone.config
        limit = getattr(config, "max_position_embeddings", None) or tokens
        if tokens > limit:
            raise ModelError(f"the backbone reads {limit} tokens, the samples have {tokens}; cut them.")
        self.backbone, self.sequence = backbone, sequence
        self.padding = getattr(config, "pad_token_id", None) or 0

    def forward(self, x: Tensor) -> Tensor:
        ids = x.to(torch.int64)
        real = ids != self.padding
        # an additive mask: the library would branch on the values of a boolean one, which vmap cannot
        bias = torch.zeros_like(x).masked_fill(~real, torch.finfo(x.dtype).min)[:, None, None, :]
        states: Tensor = self.backbone(input_ids=ids, attention_mask=bias).last_hidden_state
        if self.sequence:
            return states
        weight = real.to(states.dtype).unsqueeze(-1)
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1.0)


class _Picture(_Reader):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Tensor:
        output = self.backbone(pixel_values=x)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            states = output.last_hidden_state
            pooled = states.mean((2, 3)) if states.dim() == 4 else states.mean(1)
        return pooled.flatten(1)  # type: ignore[no-any-return]
