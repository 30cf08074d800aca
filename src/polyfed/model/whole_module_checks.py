"""Checks a whole module before the run: its methods, `[model.blocks]`, and the logits of rows without a modality."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyfed.core import keys
from polyfed.core.errors import ModelError, did_you_mean
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.model.checks import check_entries, refuse_state
from polyfed.model.encoders.spec import Shape
from polyfed.model.model import Model
from polyfed.model.modules.seeded_modules import draws_watched
from polyfed.model.spec import ModelSpec
from polyfed.model.user_classes import refusal

WHERE = "[model] module"

PATH = f"{SHARED}.module."


def name_of(blocks: Mapping[str, Sequence[str]], path: str) -> str:
    """Return a parameter's name in the Tree, given the parameter's path in the model."""
    own = path.removeprefix(PATH)
    owner = next((m for m, prefixes in blocks.items() if any(_begins(own, prefix) for prefix in prefixes)), SHARED)
    return f"{owner}.{own}"


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def check_modalities(spec: ModelSpec, inputs: Mapping[str, Shape]) -> None:
    """Check that `[model.blocks]` has exactly the modalities of the data."""
    cure = (
        "[...] with the first parts of the names of the parameters that only this modality needs; [] if there are none."
    )
    check_entries("[model.blocks]", spec.blocks, inputs, lambda name: f". Write {name} = {cure}")


def check_methods(module: nn.Module, encodes: bool, what: str) -> None:
    """Check the methods that polyfed calls on the module: each must take the arguments that polyfed gives it."""
    methods = {"encode": ("modality", "x"), "fuse": ("z", "present")}
    for name, arguments in (methods if encodes else {"forward": ("x", "present")}).items():
        if why := refusal(getattr(module, name), arguments):
            raise ModelError(
                f"{WHERE} {what}: polyfed calls {name}({', '.join(arguments)}), and this method does not take these "
                f"arguments ({why}). Write def {name}(self, {', '.join(arguments)}){_MEANING[name]}."
            )


_MEANING = {
    "forward": ": x holds the samples (B, ...) of each modality, and present says which rows have it, bool (B,)",
    "fuse": ": z holds the embeddings (B, E) of each modality, and present says which rows have it, bool (B,)",
    "encode": ": x holds the samples (B, ...) of this modality",
}
"""The meaning of the arguments of each method of a module."""


def check_blocks(module: nn.Module, blocks: Mapping[str, Sequence[str]]) -> None:
    """Check that every prefix matches parameters, and that no parameter belongs to two modalities."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    _check_tied(named, blocks)
    names = [name for name, _ in named]
    for modality, prefixes in blocks.items():
        for prefix in prefixes:
            mine = [name for name in names if _begins(name, prefix)]
            if not mine:
                heads = dict.fromkeys(name.split(".")[0] for name in names)
                raise ModelError(
                    f"[model.blocks] {modality} = '{prefix}': no parameter's name begins with it; "
                    f"{did_you_mean(prefix, heads)}.",
                    ("model", "blocks", modality),
                )
            for other, others in blocks.items():
                if other != modality and any(_begins(mine[0], prefix) or _begins(prefix, mine[0]) for prefix in others):
                    raise ModelError(
                        f"[model.blocks]: {mine[0]} belongs to {modality} and to {other}. A parameter that several "
                        f"modalities need belongs to '{SHARED}': name it under neither.",
                        ("model", "blocks"),
                    )


def _check_tied(named: Sequence[tuple[str, Tensor]], blocks: Mapping[str, Sequence[str]]) -> None:
    """Check that no parameter has two names that belong to different modalities."""
    found: dict[int, tuple[str, str]] = {}
    for name, tensor in named:
        owner = block_of(name_of(blocks, PATH + name))
        if owner != SHARED:
            first, of = found.setdefault(id(tensor), (name, owner))
            if of != owner:
                raise ModelError(
                    f"[model.blocks]: {first} and {name} are the same parameter, and belong to {of} and to {owner}. A "
                    f"parameter that several modalities need belongs to '{SHARED}': list longer prefixes under {of} "
                    f"and {owner}, so that none of them begins {first} or {name}.",
                    ("model", "blocks"),
                )


def check_logits(model: Model, what: str) -> None:
    """Run the module on two rows, with all modalities and with each modality left out."""
    w = model.init(0)
    logits = _logits(model, w, model.modalities, what)
    if tuple(logits.shape) != (2, model.num_classes):
        raise ModelError(
            f"{WHERE} {what} gives {tuple(logits.shape)} for two rows; it must give (2, {model.num_classes}), a number "
            "for each class or target."
        )
    for modality in model.modalities if len(model.modalities) > 1 else ():
        others = [m for m in model.modalities if m != modality]
        before = _logits(model, w, others, what)
        moved = {n: _moved(n, v) if block_of(n) == modality else v for n, v in w.items()}
        if not torch.equal(before, _logits(model, moved, others, what)):
            raise ModelError(
                f"{WHERE} {what}: the logits of rows without {modality} depend on the parameters of the block "
                f"{modality}. A client without {modality} does not have these parameters. Multiply the output of this "
                f"block by present['{modality}']."
            )


def _moved(name: str, value: Tensor) -> Tensor:
    """Return other values of a parameter or buffer: larger ones, because a variance must stay positive.

    The differences vary, because a normalisation would remove a difference that is the same everywhere.
    """
    return value + 1.0 + keys.uniform(keys.key("moved", name), tuple(value.shape)).to(value.dtype)


def _bits(modality: str, zeros: Tensor) -> Tensor:
    """Return random samples of the numbers 0 and 1, which are also valid as ids. At least one entry of a row is 1."""
    ones = (keys.uniform(keys.key("samples", modality), tuple(zeros.shape)) < 0.75).to(zeros)
    ones.unsqueeze(1).flatten(1)[:, :1] = 1.0
    return ones


def _logits(model: Model, w: Tree, modalities: Sequence[str], what: str) -> Tensor:
    zeros = model.zero_batch(2, modalities)
    batch = replace(zeros, x={m: _bits(m, value) for m, value in zeros.x.items()})
    try:
        with torch.no_grad(), draws_watched():
            logits = model.logits(w, batch)
            refuse_state(lambda: model.constants, lambda: model.logits(w, batch))
    except ModelError as error:
        raise ModelError(f"{WHERE} {what}: {error}") from error
    except Exception as error:
        shapes = {m: model.shapes[m] for m in model.modalities}
        raise ModelError(
            f"{WHERE} {what} fails on two rows of {', '.join(modalities)} with the shapes {shapes}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(logits, Tensor):
        raise ModelError(f"{WHERE} {what} gives a {type(logits).__name__}; it must give the logits, a tensor (B, C).")
    return logits
