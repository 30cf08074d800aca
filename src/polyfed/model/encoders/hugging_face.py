"""The encoder `hf`: a pre-trained model of the `transformers` library, from a folder or the hub's local cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.errors import ModelError
from polyfed.core.registry import check_model
from polyfed.model.encoders import lora, pretrained
from polyfed.model.encoders.spec import EncoderSpec, Shape
from polyfed.model.modules.layers import BatchNorm, Dropout
from polyfed.model.modules.recompute import recompute_layers


@dataclass(frozen=True, kw_only=True)
class HuggingFace(EncoderSpec):
    """A pre-trained backbone with a linear map from its pooled output to the embedding.

    The encoder reads token ids (T,) (the data kind "tokens"), images (3, H, W), or log-mel spectra (F, T) in the layout
    of Whisper's encoder. For text, the pooled output is the mean of the last hidden layer over real tokens. For sound,
    it is the mean over all time steps. For images, it is the backbone's own pooled output, or the mean over patches if
    the backbone has none. If a model has two towers, such as CLIP, the encoder uses the tower that reads the samples.
    From Whisper, it uses the encoder. Nothing is downloaded. Dropout of the backbone's attention weights is off. Its
    other dropout layers are active in training, unless the backbone is frozen.

    Attributes:
        path: folder of a saved model, or its name in the hub's local cache.
        frozen: whether the backbone keeps its weights: it is then in no Tree, and only the linear map is trained and
            sent.
        lora: a table with the fields of `Lora` (`lora.py`): small matrices (adapters) beside layers of the frozen
            backbone, which with the linear map are all that is trained and sent. Needs the extra `lora`.
        checkpointing: whether the backbone's layers compute their activations again in the backward pass, to save
            memory (gradient checkpointing); clients then run one after another.
    """

    kind: Literal["hf"] = "hf"
    path: str
    frozen: bool = True
    lora: Mapping[str, Any] | None = None
    checkpointing: bool = False

    def __post_init__(self) -> None:
        """Check the options. On a device, also check that the owner has allowed polyfed to read the pretrained model.

        Raises:
            NotAllowed: the owner of this device has not allowed the model.
            ModelError: the table `lora` is wrong, or is combined with frozen = false.
        """
        check_model(self.path)
        if self.lora is not None:
            lora.read(self.lora)
            if not self.frozen:
                raise ModelError("lora trains beside a frozen backbone: remove frozen = false, or lora.")

    @override
    def num_ids(self, shape: Shape) -> int | None:
        return pretrained.vocabulary(self.path) if len(shape) == 1 else None

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        kind = _KINDS.get(len(shape))
        if kind is None or (kind is _Picture and shape[0] != 3):
            raise ModelError(
                f"it reads token ids (T,), log-mel spectra (F, T) or images (3, H, W); the samples have shape {shape}."
            )
        if sequence and kind is _Picture:
            raise ModelError("attention fusion needs a sequence, and it gives one vector an image.")
        backbone = _tower(pretrained.backbone(self.path), kind)
        if hasattr(backbone, "pooler") and kind is _Text:
            backbone.pooler = None  # unused, but it would be trained and sent
        try:
            with torch.no_grad():
                reader = kind(backbone, shape, sequence)
                width = reader(torch.zeros(1, *shape)).shape[-1]
        except ModelError:
            raise
        except Exception as error:  # backbones raise any exception for inputs that they cannot read
            raise ModelError(
                f"{type(backbone).__name__} cannot read {kind.reads} of shape {shape}: {str(error).rstrip('.')}."
            ) from error
        if self.frozen:
            backbone.requires_grad_(False)
        if self.lora is not None:
            lora.adapt(backbone, lora.read(self.lora))
        if self.checkpointing:
            recompute_layers(backbone)
        return nn.Sequential(reader, nn.Linear(width, embedding))


def _tower(backbone: Any, kind: "type[_Reader]") -> Any:
    """Return the part of a backbone that reads samples of this kind, or the backbone itself if it has one part."""
    if hasattr(backbone, "vision_model") and hasattr(backbone, "text_model"):
        return backbone.vision_model if kind is _Picture else backbone.text_model
    return backbone.get_encoder() if kind is _Sound else backbone


class _Reader(nn.Module):
    """Base class of the readers. It keeps the library's layers in evaluation mode.

    The exceptions are the layers for dropout and batch normalisation that `adopt` has inserted. If the backbone has
    trainable parameters, these layers follow `train()` and `eval()`.
    """

    reads = ""
    backbone: nn.Module

    def __init__(self, backbone: nn.Module, shape: Shape, sequence: bool) -> None:
        super().__init__()
        self.backbone, self.sequence = backbone, sequence

    def train(self, mode: bool = True) -> Self:
        super().train(False)
        trains = any(parameter.requires_grad for parameter in self.backbone.parameters())
        for layer in self.modules():
            if isinstance(layer, BatchNorm | Dropout):
                layer.train(mode and trains)
        return self


class _Text(_Reader):
    reads = "token ids"

    def __init__(self, backbone: nn.Module, shape: Shape, sequence: bool) -> None:
        super().__init__(backbone, shape, sequence)
        config: Any = backbone.config
        limit = getattr(config, "max_position_embeddings", None) or shape[0]
        if shape[0] > limit:
            raise ModelError(f"the backbone reads {limit} tokens, the samples have {shape[0]}; cut them.")
        self.padding = getattr(config, "pad_token_id", None) or 0
        self.causal = self._is_causal(torch.arange(shape[0]) % config.vocab_size)

    def _is_causal(self, ids: Tensor) -> bool:
        """Return whether the model uses a causal mask, with which a token attends only to itself and earlier tokens.

        The method computes results with and without a causal mask, and compares them with the results of the library's
        own mask.

        Raises:
            ModelError: the library's mask is neither causal nor bidirectional.
        """
        x = torch.where(ids == self.padding, self.padding + 1, ids)[None].to(torch.float32)
        call: Any = self.backbone
        own = call(input_ids=x.long(), attention_mask=torch.ones_like(x).long()).last_hidden_state
        for causal in (False, True):
            self.causal = causal
            if torch.allclose(self._states(x)[0], own, atol=1e-4, rtol=1e-3):  # sums in another order
                return causal
        raise ModelError(
            f"{type(self.backbone).__name__} masks its tokens in a way that cannot be written as one mask."
        )

    def _states(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden layer (B, T, H), and which tokens are real (B, T)."""
        ids = x.to(torch.int64)
        real = ids != self.padding
        # an additive mask, because the library would branch on the values of a boolean mask, which vmap cannot do
        bias = torch.zeros_like(x).masked_fill(~real, torch.finfo(x.dtype).min)[:, None, None, :]
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            bias = bias.expand(-1, -1, x.shape[1], -1).masked_fill(later, torch.finfo(x.dtype).min)
        return self.backbone(input_ids=ids, attention_mask=bias).last_hidden_state, real

    def forward(self, x: Tensor) -> Tensor:
        states, real = self._states(x)
        if self.sequence:
            return states
        weight = real.to(states.dtype).unsqueeze(-1)
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1.0)


class _Picture(_Reader):
    reads = "images"

    def forward(self, x: Tensor) -> Tensor:
        output = self.backbone(pixel_values=x)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            states = output.last_hidden_state
            pooled = states.mean((2, 3)) if states.dim() == 4 else states.mean(1)
        return pooled.flatten(1)  # type: ignore[no-any-return]


class _Sound(_Reader):
    reads = "log-mel spectra"

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.backbone(input_features=x).last_hidden_state
        return states if self.sequence else states.mean(1)


_KINDS: dict[int, type[_Reader]] = {1: _Text, 2: _Sound, 3: _Picture}
"""Number of dimensions of a sample -> the class that reads such samples."""
