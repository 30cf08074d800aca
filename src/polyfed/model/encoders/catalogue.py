"""The encoders that a recipe can name, and the function that reads the entries of `[model.encoders]`."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from torch import nn
from typing_extensions import override

from polyfed.core.errors import ModelError, NotAllowed, RecipeError
from polyfed.core.registry import check_import, own
from polyfed.model.checks import known_fields, one_of
from polyfed.model.encoders.hugging_face import HuggingFace
from polyfed.model.encoders.images import Cnn4, ResNet18
from polyfed.model.encoders.sequences import ConvGru, TokenTransformer, Transformer
from polyfed.model.encoders.spec import EncoderSpec, Mlp, Shape, Tabular
from polyfed.model.encoders.spectrograms import Conv2dGru


@dataclass(frozen=True, kw_only=True)
class Custom(EncoderSpec):
    """The user's own `torch.nn.Module`: `kind = "my.module:MyEncoder"`, called with (shape, embedding, **options).

    Attributes:
        options: more arguments of the constructor; in a recipe, the other keys of the entry.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    @override
    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        """Make the module; see `EncoderSpec.build`.

        Raises:
            NotAllowed: the owner of this device has not allowed the class.
            ModelError: the class cannot be imported, or its constructor fails.
        """
        make = self.encoder_class()
        try:
            module = make(shape, embedding, **self.options)
        except ModelError:
            raise
        except Exception as error:
            given = ", ".join([f"{shape}, {embedding}", *(f"{k}={v!r}" for k, v in self.options.items())])
            raise ModelError(f"calling it with ({given}) raised {type(error).__name__}: {error}.") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"it gave a {type(module).__name__}; it must give a torch.nn.Module.")
        return module

    def encoder_class(self) -> Any:
        """Import the class.

        Raises:
            NotAllowed: the owner of this device has not allowed the class.
            ModelError: the class cannot be imported, or is not a subclass of `torch.nn.Module`.
        """
        try:
            return own(self.kind, nn.Module)
        except NotAllowed:
            raise
        except RecipeError as error:
            raise ModelError(f"kind = {error}") from error


ENCODERS: dict[str, type[EncoderSpec]] = {
    "mlp": Mlp,
    "cnn4": Cnn4,
    "conv-gru": ConvGru,
    "conv2d-gru": Conv2dGru,
    "hf": HuggingFace,
    "resnet18": ResNet18,
    "tabular": Tabular,
    "token-transformer": TokenTransformer,
    "transformer": Transformer,
}
"""The kinds of encoder that a recipe can name; a kind with a colon is a `Custom` encoder."""


def entry_of(spec: EncoderSpec) -> dict[str, Any]:
    """Return the entry of `[model.encoders]` that gives this encoder; the inverse of `encoder_spec`.

    Options that are None are left out. The options of a `Custom` encoder are written next to its kind.
    """
    written = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "kind"}
    options = dict(spec.options) if isinstance(spec, Custom) else written
    return {"kind": spec.kind} | {name: value for name, value in options.items() if value is not None}


def encoder_spec(where: str, entry: EncoderSpec | Mapping[str, Any]) -> EncoderSpec:
    """Read an entry of `[model.encoders]`.

    Args:
        where: name of the entry, for error texts.
        entry: a table with `kind` and its options, or an encoder, which is returned unchanged.

    Raises:
        NotAllowed: the entry names a class or model that the owner of this device has not allowed.
        ModelError: the kind is missing or unknown, an option is unknown, or a value is out of range.
    """
    if isinstance(entry, EncoderSpec):
        return entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise ModelError(f"{where} = {entry!r}: give a table with a kind, e.g. {{ kind = 'mlp', hidden = [128] }}.")
    options = {key: value for key, value in entry.items() if key != "kind"}
    if ":" in entry["kind"]:
        _allowed(where, entry["kind"])
        return Custom(kind=entry["kind"], options=options)
    one_of(f"{where}.kind", entry["kind"], ENCODERS)
    spec = ENCODERS[entry["kind"]]
    known_fields(where, options, spec)
    try:
        return spec(**entry)
    except (ModelError, NotAllowed) as error:
        raise type(error)(f"{where}: {error}") from None
    except TypeError:  # a required option is missing
        lacks = [f.name for f in fields(spec) if f.default is MISSING and f.default_factory is MISSING]
        raise ModelError(f"{where} needs {', '.join(name for name in lacks if name not in entry)}.") from None


def _allowed(where: str, kind: str) -> None:
    """Check, on a device, that the class may be imported, before the model is built."""
    try:
        check_import(kind)
    except NotAllowed as error:
        raise NotAllowed(f"{where}.kind = {error}") from None


HIDDEN = (64,)
"""The hidden layers of the perceptron for vectors. They are as wide as the default embedding."""

WIDTHS = (16, 32, 64, 64)
"""Channels of the ResNet for images, the same as in HFM's small ResNet (docs/algorithms/hfm.md)."""

LARGE = 64
"""The smallest number of pixels per side for which an image gets the `imagenet` stem. This stem first divides both
sides by four."""


def default_encoder(shape: Shape, vocabulary: int | None = None, embedding: int = 64) -> EncoderSpec:
    """Choose an encoder by the shape of a sample.

    | samples | encoder |
    |---|---|
    | vector (F,) | `mlp` |
    | token ids (T,) | `token-transformer` |
    | time series (T, F) | `conv-gru`, with fewer stages if T is below 8; `mlp` if T is 1 |
    | image (C, H, W), clip (C, T, H, W) | `resnet18` with few channels and group normalisation |

    Group normalisation has no statistics of the batch, so every algorithm can train the encoder on few rows.

    Args:
        shape: shape of one sample.
        vocabulary: number of different token ids, if the samples are token ids; None otherwise.
        embedding: width of the embedding, which must be divisible by the number of attention heads.

    Raises:
        ModelError: no encoder reads samples of this shape.
    """
    if vocabulary is not None and len(shape) == 1:
        heads = next(heads for heads in (4, 3, 2, 1) if embedding % heads == 0)
        return TokenTransformer(vocabulary=vocabulary, heads=heads)
    if len(shape) == 1:
        return Mlp(hidden=HIDDEN)
    if len(shape) == 2:
        stages = min(len(ConvGru.channels), int(math.log2(shape[0])))
        return ConvGru(channels=ConvGru.channels[:stages]) if stages else Mlp(hidden=HIDDEN)
    if len(shape) in (3, 4):
        stem = "imagenet" if min(shape[-2:]) >= LARGE else "cifar"
        return ResNet18(stem=stem, widths=WIDTHS, norm="group")  # type: ignore[arg-type]
    raise ModelError(
        f"no encoder is chosen for samples of shape {shape}: name one in [model.encoders], or store vectors (F,), time "
        "series (T, F) or images (C, H, W)."
    )
