"""The encoders a recipe can name, and how its tables become their specifications."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from polyfed.core.errors import ModelError, NotAllowed, RecipeError
from polyfed.core.registry import check_import, own
from polyfed.model.checks import known_fields, one_of
from polyfed.model.encoder import EncoderSpec, Mlp, Shape
from polyfed.model.hugging_face import HuggingFace
from polyfed.model.images import Cnn4, ResNet18
from polyfed.model.sequences import ConvGru, Transformer


@dataclass(frozen=True, kw_only=True)
class Custom(EncoderSpec):
    """A `torch.nn.Module` of the user's, `kind = "my.module:MyEncoder"`, called with (shape, embedding, **options).

    Attributes:
        options: keyword arguments; in a recipe, the other keys of the entry.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, shape: Shape, embedding: int, sequence: bool = False) -> nn.Module:
        """See `EncoderSpec.build`."""
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
        """The class, imported.

        Raises:
            NotAllowed: the owner of this device has not allowed it.
            ModelError: it cannot be imported, or is no `torch.nn.Module`.
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
    "hf": HuggingFace,
    "resnet18": ResNet18,
    "transformer": Transformer,
}
"""The kinds a recipe can name; anything with a colon is a `Custom`."""


def entry_of(spec: EncoderSpec) -> dict[str, Any]:
    """The entry of `[model.encoders]` that `encoder_spec` reads as this specification; options that are None left out.

    A class of the user's takes its options beside its kind, not in a table of their own.
    """
    written = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "kind"}
    options = dict(spec.options) if isinstance(spec, Custom) else written
    return {"kind": spec.kind} | {name: value for name, value in options.items() if value is not None}


def encoder_spec(where: str, entry: EncoderSpec | Mapping[str, Any]) -> EncoderSpec:
    """The specification that an entry of `[model.encoders]` writes down.

    Args:
        where: name of the entry, for messages.
        entry: a table of the recipe with `kind` and its options, or a specification, which is given back.

    Raises:
        NotAllowed: it names code that the owner of this device has not allowed.
        ModelError: no kind, an unknown one, an unknown option or a value out of range.
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


def _allowed(where: str, kind: str) -> None:
    """Refuse on a device, before the model is built, what building it would refuse."""
    try:
        check_import(kind)
    except NotAllowed as error:
        raise NotAllowed(f"{where}.kind = {error}") from None
