"""Embeddings by models of `transformers`. Models are read from a folder or the hub's cache, and never downloaded."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.media.clip import Clip, PlainExtractor, corrupt
from polyfed.data.media.image import IMAGENET, Image
from polyfed.model.encoders import pretrained

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TextEmbedding(PlainExtractor):
    """Embedding of a text, float32 (hidden,).

    Attributes:
        model: Folder, or name in the hub's cache.
        pool: How the last hidden layer is pooled. "mean" takes the mean over the text's tokens, and "cls" takes the
            first token.
        tokens: Maximum number of tokens; longer texts are cut. The papers do not give this maximum, so the default
            512 is inferred (docs/data.md).
    """

    model: str
    pool: Literal["mean", "cls"] = "mean"
    tokens: int = 512

    def __call__(self, clip: Clip) -> Floats:
        """Return the embedding of a text. For an empty text, the embedding is the mean of the model's special tokens.

        Raises:
            DataError: The clip is missing, or is not text.
        """
        tokenizer, network = _tokenizer(self.model), _backbone(self.model)
        given = tokenizer(clip.text(), truncation=True, max_length=self.tokens, return_tensors="pt")
        with torch.no_grad():
            states = network(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
        vector = states[0, 0] if self.pool == "cls" else states[0].mean(0)
        result: Floats = vector.float().numpy()
        return result


@dataclass(frozen=True, kw_only=True)
class Tokens(PlainExtractor):
    """Token ids of a text, int32 (tokens,), padded with the padding id; the encoder `hf` reads them.

    Attributes:
        model: The tokenizer's folder, or its name in the hub's cache.
        tokens: Length of every sample; longer texts are cut.
    """

    model: str
    tokens: int = 64

    def __call__(self, clip: Clip) -> NDArray[np.int32]:
        """Token ids of a text, int32 (tokens,).

        Raises:
            DataError: The clip is missing, or is not text.
        """
        tokenizer = _tokenizer(self.model)
        given = tokenizer(clip.text(), truncation=True, max_length=self.tokens, padding="max_length")
        return np.asarray(given["input_ids"], np.int32)


@dataclass(frozen=True, kw_only=True)
class ImageEmbedding(PlainExtractor):
    """Embedding of an image, float32 (hidden,): the model's pooled output or, without one, the mean over patches.

    MobileNetV2 gives 1280 numbers. The image is scaled and cropped to `size` (see `Image`). It is then normalised with
    the values of the model's `preprocessor_config.json`, or with ImageNet's mean and deviation if there is no such
    file.

    Attributes:
        model: Folder, or name in the hub's cache.
        size: Height and width that the model sees.
    """

    model: str
    size: int = 224

    def __call__(self, clip: Clip) -> Floats:
        """Embedding of an image file, float32 (hidden,).

        Raises:
            DataError: The file is not a whole image, or its embedding is not finite.
        """
        pixels = torch.from_numpy(Image(size=self.size)(clip)).float()[None] / 255.0
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in _norm(self.model))
        with torch.no_grad():
            output = _backbone(self.model)(pixel_values=(pixels - mean) / std)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            pooled = output.last_hidden_state.flatten(2).mean(2 if output.last_hidden_state.dim() == 4 else 1)
        result: Floats = pooled.flatten().float().numpy()
        if not np.isfinite(result).all():
            raise corrupt(clip, "gives an embedding that is not finite")
        return result


TextKind = Literal["embedding", "tokens"]
ImageKind = Literal["embedding", "pixels"]


def text_extractor(kind: TextKind, model: str) -> TextEmbedding | Tokens:
    """Return the extractor for a recipe's `text` and `text_model`, for embeddings or for token ids (encoder `hf`)."""
    return Tokens(model=model) if kind == "tokens" else TextEmbedding(model=model)


def image_extractor(kind: ImageKind, model: str, size: int) -> ImageEmbedding | Image:
    """Return the extractor for a recipe's `image`, `image_model` and `size`, for embeddings or for pixels."""
    return Image(size=size) if kind == "pixels" else ImageEmbedding(model=model, size=size)


_tokenizer = lru_cache(maxsize=8)(pretrained.tokenizer)
_backbone = lru_cache(maxsize=8)(pretrained.backbone)


@lru_cache(maxsize=8)
def _norm(model: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    file = Path(model).expanduser() / "preprocessor_config.json"
    if not file.is_file():
        return IMAGENET
    settings = json.loads(file.read_text(encoding="utf-8"))
    if "image_mean" not in settings or "image_std" not in settings:
        return IMAGENET
    return tuple(settings["image_mean"]), tuple(settings["image_std"])
