"""Builds a model from the `[model]` section of a recipe and the shapes of the data."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyfed.core.errors import ModelError
from polyfed.core.tree import SHARED, Tree, block_of, select, under
from polyfed.model.checks import check_entries, refuse_state
from polyfed.model.encoders.catalogue import Custom
from polyfed.model.encoders.spec import EncoderSpec, Shape
from polyfed.model.fusion import FUSIONS, Adapted, Attention, Concat, Controlled, CrossModal, Fusion, Gated, Sum
from polyfed.model.model import Block, Model
from polyfed.model.modules.layer_replacement import adopt
from polyfed.model.modules.layers import Rows
from polyfed.model.modules.seeded_modules import draws_watched
from polyfed.model.spec import ModelSpec
from polyfed.model.stand_ins import PROTOTYPES, ClassPrototypes
from polyfed.model.trial_calls import check_trial_calls
from polyfed.model.user_classes import called, described, fusion_class
from polyfed.model.whole_module import build_whole

_RESERVED = (SHARED, "labels", "nothing")  # the shared block, a row of the policy, and what a complete row lacks
_SIZE = re.compile("size[0-9]+")  # metrics of subsets: `subset.size2`

_FORM = (
    "def __init__(self, embedding, head, classes, dropout), with the keys of fusion_options as more arguments; see "
    "polyfed.model.Fusion"
)


def build_model(
    spec: ModelSpec,
    inputs: Mapping[str, Shape],
    num_classes: int,
    only: Collection[str] | None = None,
    key: int = 0,
    given: Mapping[str, Tensor] | None = None,
) -> Model:
    """Build the model of a recipe.

    Args:
        spec: the `[model]` section.
        inputs: sample shape of each modality of the data; the model keeps their order.
        num_classes: number of classes C.
        only: the modalities that the model reads. Default: all of `inputs`.
        key: random key of the initial values of frozen parameters; see `Model`.
        given: the values of the blocks in `spec.freeze`, by name. Without values, they are not frozen.

    Raises:
        ModelError: a modality has no encoder, or an encoder has no modality. The error also occurs if an encoder cannot
            read the samples, returns the wrong shape, or has a layer that is not supported.
    """
    if spec.module is not None:
        _check_identifiers(inputs)
        return build_whole(spec, inputs, num_classes, only, key)
    _check_names(spec, inputs)
    rows = Rows()
    shapes = {name: tuple(shape) for name, shape in inputs.items()}
    width = (*spec.head, num_classes)[0]
    read = [name for name in inputs if only is None or name in only]
    kept = {block: select(given or {}, [block]) for block in spec.freeze}
    factories = {
        name: _frozen_factory(_block_factory(name, shapes[name], spec, width, rows), name, kept) for name in read
    }
    if spec.absent == "prototypes":
        factories = {name: _completing(make, num_classes, spec.embedding) for name, make in factories.items()}
    shared = _frozen_factory(_shared_factory(spec, num_classes, tuple(read), rows), SHARED, kept)
    model = Model(factories, shared, rows, shapes, num_classes, key)
    _check_outputs(model, spec)
    for name in read if spec.absent == "prototypes" else ():
        model.encoded_shape(name)  # needed in calls under vmap, in which it cannot be found
    return model


def _completing(make: Callable[[], Block], classes: int, embedding: int) -> Callable[[], Block]:
    """Return a factory of the block with prototypes, which also change in a block that is frozen."""

    def made() -> Block:
        block = make()
        block.prototypes = ClassPrototypes(classes, embedding)
        return block

    return made


def _check_identifiers(inputs: Mapping[str, Shape]) -> None:
    if not inputs:
        raise ModelError("The data has no modality; a model needs at least one.")
    for name in inputs:
        if not (name.isidentifier() and name.isascii()) or name in _RESERVED or _SIZE.fullmatch(name):
            raise ModelError(
                f"{name!r} cannot be the name of a modality: use letters a to z, digits and _, "
                f"no digit first, and none of {', '.join(_RESERVED)}, size1, size2 and so on."
            )


def _check_names(spec: ModelSpec, inputs: Mapping[str, Shape]) -> None:
    _check_identifiers(inputs)
    cure = f"{{ kind = 'mlp', hidden = [128] }}. It has: {', '.join(spec.encoders) or '(nothing)'}."
    check_entries("[model.encoders]", spec.encoders, inputs, lambda name: f"; write e.g. {name} = {cure}")


def _block_factory(name: str, shape: Shape, spec: ModelSpec, width: int, rows: Rows) -> Callable[[], Block]:
    encoder: EncoderSpec = spec.encoders[name]
    fusion = fusion_class(spec.fusion)

    def make() -> Block:
        try:
            net = adopt(encoder.build(shape, spec.embedding, fusion.sequential), rows, f"{name}.encoder")
        except ModelError as error:
            raise ModelError(f"[model.encoders] {name} ({encoder.kind}): {error}") from error
        part = fusion.part(spec.embedding, width)
        return Block(net, None if part is None else adopt(part, rows, f"{name}.fusion"))

    return make


_M = TypeVar("_M", bound=nn.Module)


def _frozen_factory(make: Callable[[], _M], block: str, kept: Mapping[str, Tree]) -> Callable[[], _M]:
    """Return a factory of the block with these values, which do not train, if `kept` has values for the block.

    Raises:
        ModelError: the values do not fit the block. The text names each tensor that does not.
    """
    values = {n: v for n, v in under(block, kept.get(block, {})).items() if not n.startswith(f"{PROTOTYPES}.")}
    if not values:
        return make

    def made() -> _M:
        module = make()
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        lacking = [n for n, t in module.named_parameters() if n not in values and t.requires_grad]
        odd = [n for n, t in values.items() if n not in own or own[n].shape != t.shape]
        if lacking or odd:
            names = ", ".join(f"{block}.{name}" for name in (*lacking, *odd))
            raise ModelError(f"[model] freeze: the values of init do not fit this model: {names}.", ("model", "freeze"))
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        module.requires_grad_(False).eval()
        module.train = lambda mode=True: module  # type: ignore[method-assign]  # stays in evaluation mode
        return module

    return made


def _shared_factory(spec: ModelSpec, num_classes: int, read: tuple[str, ...], rows: Rows) -> Callable[[], Fusion]:
    common = (spec.embedding, spec.head, num_classes, spec.dropout)
    makers: dict[str, Callable[[], Fusion]] = {
        "concat": lambda: Concat(*common),
        "adapted": lambda: Adapted(*common),
        "sum": lambda: Sum(*common),
        "gated": lambda: Gated(*common, gate=read[0]),
        "attention": lambda: Attention(*common, hidden=spec.attention_hidden, heads=spec.attention_heads),
        "cross-modal": lambda: CrossModal(*common, modalities=read),
        "controlled": lambda: Controlled(*common, modalities=read, controls=spec.controls, chosen=spec.controls_chosen),
    }

    def own() -> Fusion:
        cls = fusion_class(spec.fusion)
        return called(f"[model] fusion {spec.fusion}", cls, common, spec.fusion_options, _FORM)  # type: ignore[no-any-return]

    def make() -> Fusion:
        fusion = makers.get(spec.fusion, own)()
        adopt(fusion, rows, SHARED)
        return fusion

    return make


def _check_outputs(model: Model, spec: ModelSpec) -> None:
    """Run every encoder once on two rows of zeros, to find a wrong shape before any client runs the encoder."""
    w = model.init(0)
    trained = {name: value.requires_grad_() for name, value in model.trainable(w).items()}
    for name in model.modalities:
        where = f"[model.encoders] {name} ({spec.encoders[name].kind})"
        batch = model.zero_batch(2, [name])
        try:
            with torch.no_grad(), draws_watched():
                z = model.features(w, batch)[name]
                refuse_state(lambda: model.constants, partial(model.features, w, batch))
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from error
        except Exception as error:
            raise ModelError(f"{where} cannot read samples of shape {model.shapes[name]}: {error}") from error
        if model.sequential and (z.dim() != 3 or z.shape[-1] != spec.embedding):
            raise ModelError(
                f"{where} gives {tuple(z.shape)} for two rows; attention fusion needs a sequence "
                f"(2, T, {spec.embedding}), as kind = 'conv-gru' gives."
            )
        if not model.sequential and tuple(z.shape) != (2, spec.embedding):
            raise ModelError(f"{where} gives {tuple(z.shape)} for two rows; it must give (2, {spec.embedding}).")
        if isinstance(spec.encoders[name], Custom):
            check_trial_calls(model, w, where, [name], model.features)
    if spec.fusion not in FUSIONS:
        _check_fusion(model, w, f"[model] fusion {described(spec.fusion)}")
    for name, value in trained.items():
        if not value.requires_grad:
            raise ModelError(
                f"[model.encoders] {block_of(name)}: forward() freezes {name}. Freeze it in the constructor, "
                "because polyfed decides before the first round what trains and what crosses.",
                ("model", "encoders", block_of(name)),
            )


def _check_fusion(model: Model, w: Tree, where: str) -> None:
    """Run the user's own fusion on two rows, with all modalities and with each modality alone."""
    for read in dict.fromkeys([model.modalities, *((m,) for m in model.modalities)]):
        batch = model.zero_batch(2, read)
        try:
            with torch.no_grad(), draws_watched():
                z = model.features(w, batch)
                logits = model.fuse(w, z, batch)
                refuse_state(lambda: model.constants, partial(model.fuse, w, z, batch))
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from error
        except Exception as error:
            why = str(error) or "joint() is missing"
            raise ModelError(
                f"{where} fails on two rows of {', '.join(read)}: {type(error).__name__}: {why}."
            ) from error
        if tuple(logits.shape) != (2, model.num_classes):
            raise ModelError(
                f"{where} gives {tuple(logits.shape)} for two rows; it must give (2, {model.num_classes}), a number "
                "for each class or target."
            )
    check_trial_calls(model, w, where, model.modalities, model.logits)
