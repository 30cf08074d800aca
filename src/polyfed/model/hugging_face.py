"""The encoder `hf`: a backbone of the `transformers` library, from a folder or the hub's cache."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polyfed.core.errors import ModelError
from polyfed.core.registry import check_model
from polyfed.model import pretrained
from polyfed.model.encoder import EncoderSpec, Shape


@dataclass(frozen=True, kw_only=True)
class HuggingFace(EncoderSpec):
    """A pre-trained backbone, pooled, then a linear map to the embedding.

    Reads token ids (T,) as the data kind "tokens" gives them, or images (3, H, W). Text is the mean of the last
    hidden layer over real tokens, images are the pooled output, or the mean over patches if there is none. Nothing is
    downloaded. Dropout of the backbone's attention weights is off; its other dropout follows the batch.

    Attributes:
        path: folder of a saved model, or its name in the hub's cache.
        frozen: the backbone stays as it is: it is in no Tree, so that it neither trains nor crosses; only the linear
            map does. Otherwise all of it trains.
    """

    kind: Literal["hf"] = "hf"
    path: str
    frozen: bool = True

    def __post_init__(self) -> None:
        """Refuse, on a device, a model that its owner has not allowed."""
        check_model(self.path)

    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        """See `EncoderSpec.build`; under attention fusion, one embedding a token: (B, T, embedding)."""
        is_text = len(shape) == 1
        if not is_text and not (len(shape) == 3 and shape[0] == 3):
            raise ModelError(f"it reads token ids (T,) or images (3, H, W); the samples have shape {shape}.")
        if sequence and not is_text:
            raise ModelError("attention fusion needs a sequence, and it gives one vector an image.")
        backbone: Any = pretrained.backbone(self.path)
        if is_text:
            backbone.pooler = None  # not used here: it would cross the wire for nothing
        if self.frozen:
            _freeze(backbone)
        reader = _Text(backbone, shape[0], sequence) if is_text else _Picture(backbone)
        try:
            with torch.no_grad():
                width = reader(torch.zeros(1, *shape)).shape[-1]
        except Exception as error:  # whatever a backbone of the user's choice says of an input it does not read
            what = "token ids" if is_text else "images"
            raise ModelError(f"{type(backbone).__name__} cannot read {what} of shape {shape}: {error}.") from error
        return nn.Sequential(reader, nn.Linear(width, embedding))


class _Reader(nn.Module):
    """Stays in evaluation mode: what its layers do in training, the batch says (see `polyfed.model.layers`)."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


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
        # the mask is written out, to be added: the library's own way branches on its values, which vmap cannot
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


class _FixedNorm(nn.Module):
    """Batch normalisation by its running statistics, whatever the batch: part of a frozen backbone."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = like.eps
        for name in ("running_mean", "running_var", "weight", "bias"):
            value = getattr(like, name)
            self.register_buffer(name, None if value is None else value.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            eps=self.eps,
        )


def _freeze(module: nn.Module) -> None:
    """Turns parameters and buffers into constants, which no Tree holds, and takes out what depends on the batch."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(module, name, _FixedNorm(child))
        elif isinstance(child, nn.Dropout):
            child.p = 0.0  # its own code may read the probability, so the layer stays
        else:
            _freeze(child)
    constants = {**module._parameters, **module._buffers}
    module._parameters.clear()
    for name, value in constants.items():
        module.register_buffer(name, None if value is None else value.detach(), persistent=False)
